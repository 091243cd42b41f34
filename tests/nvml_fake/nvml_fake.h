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

/* What can be fixed with "set"; NAN means: goes up and down with time. The table is in nvml_fake.c. */
enum {
    UTIL, MEMORY_USED_MIB, MEMORY_TOTAL_MIB, POWER_W, POWER_AVERAGE_W, LIMIT_W, TEMPERATURE, MEMORY_TEMPERATURE,
    SLOWDOWN_TEMPERATURE, SM_CLOCK, SM_CLOCK_MAX, MEMORY_CLOCK, PCIE_GEN, PCIE_WIDTH, PCIE_TX_MIB, PCIE_RX_MIB,
    COUNTER_BITS, COUNTER_START, REASONS, SM_ACTIVE, NVLINK_TX_MIB, NVLINK_RX_MIB, MIG, ENCODER, DECODER,
    ECC_CORRECTED, ECC_UNCORRECTED, ECC_UNCORRECTED_LIFETIME, ROWS_REMAPPED_CORRECTED, ROWS_REMAPPED_UNCORRECTED,
    ROW_REMAP_PENDING, ROW_REMAP_FAILED, JPEG, VALUES
};

typedef struct {
    int index, hang, waiting;
    int lost;    /* the code that every call returns from now on */
    int pattern; /* of the garbage that the last call is to answer with */
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
void spoil(const Gpu *g, void *to, size_t size);
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
