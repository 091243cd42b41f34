/*
 * What the parts of the fake NVML share: a GPU, its values over time, and the gate that every
 * call goes through. What the fake is and how it is set up stands in nvml_fake.c.
 */
#ifndef NVML_FAKE_H
#define NVML_FAKE_H
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10,
    GPU_IS_LOST = 15, RESET_REQUIRED = 16, OUT_OF_MEMORY = 20, NO_DATA = 21, VERSION_MISMATCH = 25
};
enum { MAX_GPUS = 32, MAX_RULES = 256, MAX_PROCESSES = 64, MAX_COUNTED = 256 };
enum { MIG_FIRST = 16 }; /* with MIG instances there are at most so many whole GPUs */
enum { SPOILT = -1 }; /* what the gate says of a call that succeeds with garbage for an answer */

/* What can be fixed with "set": name here, key there, value at first; NAN means: goes up and down with time. */
#define FIXABLE_VALUES(X) \
    X(UTIL, "util", NAN) X(MEMORY_USED_MIB, "memory_used_mib", NAN) \
    X(MEMORY_TOTAL_MIB, "memory_total_mib", 81920) X(POWER_W, "power_w", NAN) \
    X(POWER_AVERAGE_W, "power_average_w", NAN) X(LIMIT_W, "limit_w", 700) X(TEMPERATURE, "temperature", NAN) \
    X(DEFAULT_LIMIT_W, "default_limit_w", 700) \
    X(MEMORY_TEMPERATURE, "memory_temperature", NAN) X(SLOWDOWN_TEMPERATURE, "slowdown_temperature", 87) \
    X(SM_CLOCK, "sm_clock", 1755) X(SM_CLOCK_MAX, "sm_clock_max", 1980) X(MEMORY_CLOCK, "memory_clock", 2619) \
    X(PCIE_GEN, "pcie_gen", 5) X(PCIE_WIDTH, "pcie_width", 16) X(PCIE_TX_MIB, "pcie_tx_mib", NAN) \
    X(PCIE_RX_MIB, "pcie_rx_mib", NAN) X(COUNTER_BITS, "counter_bits", 64) X(COUNTER_START, "counter_start", 0) \
    X(REASONS, "reasons", 0) X(SM_ACTIVE, "sm_active", NAN) X(NVLINK_TX_MIB, "nvlink_tx_mib", NAN) \
    X(NVLINK_RX_MIB, "nvlink_rx_mib", NAN) X(MIG, "mig", 0) X(ENCODER, "encoder", 0) X(DECODER, "decoder", 0) \
    X(ECC_CORRECTED, "ecc_corrected", 0) X(ECC_UNCORRECTED, "ecc_uncorrected", 0) \
    X(ECC_UNCORRECTED_LIFETIME, "ecc_uncorrected_lifetime", 0) \
    X(ROWS_REMAPPED_CORRECTED, "rows_remapped_corrected", 0) \
    X(ROWS_REMAPPED_UNCORRECTED, "rows_remapped_uncorrected", 0) X(ROW_REMAP_PENDING, "row_remap_pending", 0) \
    X(ROW_REMAP_FAILED, "row_remap_failed", 0) X(JPEG, "jpeg", 0)
#define VALUE_NAME(name, key, first) name,
enum { FIXABLE_VALUES(VALUE_NAME) VALUES };

typedef struct {
    int index, hang, waiting;
    int lost;    /* the code that every call returns from now on */
    int pattern; /* of the garbage that the last call is to answer with */
    uint64_t garbage; /* where random garbage goes on */
    long calls, calls_after_lost, lost_after, hang_after;
    double fixed[VALUES];
    char uuid[48], bus[32];
} Gpu;
typedef struct { int gpu, pid, sm; double mib; char kind; } Process;

#pragma GCC visibility push(hidden)
extern Gpu gpus[MAX_GPUS];
extern Process processes[MAX_PROCESSES];
extern int gpu_count, process_count, with_gpm;
extern double fixed_time;
extern const double MIB;

double now(void);
double load(const Gpu *g, double t);
double load_sum(const Gpu *g, double t);
double value(const Gpu *g, int key, double t);
double sum(const Gpu *g, int key, double full, double t);
int copy(char *to, unsigned room, const char *text);

/* MIG instances are GPUs from MIG_FIRST on. What the library does at each start, and per line of settings. */
void mig_reset(void);
int mig_setting(const char *line);
void events_end(void);
/* OK if NVML answers this function for the handle of a MIG instance, else the code. */
int mig_answers(const Gpu *g, const char *function);
/* The profile of an instance, NULL for a whole GPU. */
const char *mig_profile(const Gpu *g);
Gpu *mig_instance(const Gpu *parent, unsigned gpu_instance);

/* The gate: counts the call and says what is to come of it: OK, an NVML code or SPOILT. May block. */
int enter(Gpu *g, const char *function);
/* The same for what is not a call of its own: one field value or one GPM metric. Neither counts nor blocks. */
int fault_of(Gpu *g, const char *name);
/* Fill an answer with the garbage that was set for what the gate was asked for last. */
void spoil(Gpu *g, void *to, size_t size);
#pragma GCC visibility pop

/* Begin a function of the library whose answer is `size` bytes at `to`. */
#define ENTER_BYTES(g, to, size) \
    do { \
        int code_ = enter((g), __func__); \
        if (code_ == SPOILT) { spoil((g), (to), (size)); return OK; } \
        if (code_) return code_; \
    } while (0)
#define ENTER(g, to) ENTER_BYTES(g, to, sizeof *(to))

#endif
