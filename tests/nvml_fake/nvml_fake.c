/*
 * A stand-in for libnvidia-ml.so.1, for tests and benchmarks on machines without an NVIDIA GPU.
 *
 * It has the part of NVML's public interface that gputop and nvitop call, as declared in
 * NVIDIA's API reference, and invents a node: GPUs whose load goes up and down with time.
 * nvmlInit reads the file named by $NVML_FAKE_CONFIG, one setting a line, "#" for comments:
 *
 *   gpus 8                          how many GPUs
 *   driver 580.65.06                driver version
 *   init 18                         what nvmlInit returns
 *   name H100 \x1b[31m              device name; \xNN is a byte
 *   gpm 0                           no GPM (default 1)
 *   set KEY NUMBER [GPU]            fix a value: see the table `values`
 *   refuse FUNCTION CODE [GPU]      that function returns CODE; field values are "field:197",
 *                                   GPM metrics "gpm:2"
 *   lost_after CALLS GPU            after so many calls every call returns GPU_IS_LOST
 *   hang_after CALLS GPU            after so many calls every call blocks, until fake_release
 *   process GPU PID MIB KIND SM     a process; KIND C, G or B (both); SM percent
 *
 * Settings without [GPU] hold for all GPUs. Loaded into the process under test it can also be
 * driven by the functions fake_* at the end. The clock is the machine's unless fake_set_time
 * is called.
 */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15, NO_DATA = 21
};
enum { MAX_GPUS = 32, MAX_RULES = 64, MAX_PROCESSES = 64, MAX_COUNTED = 96 };

/* What can be fixed with "set"; NAN means: goes up and down with time. */
enum {
    UTIL, MEMORY_USED_MIB, MEMORY_TOTAL_MIB, POWER_W, LIMIT_W, TEMPERATURE, SM_CLOCK, SM_CLOCK_MAX, MEMORY_CLOCK,
    PCIE_GEN, PCIE_WIDTH, PCIE_TX_MIB, PCIE_RX_MIB, COUNTER_BITS, COUNTER_START, REASONS, SM_ACTIVE, NVLINK_TX_MIB,
    NVLINK_RX_MIB, MIG, VALUES
};
static const struct { const char *key; double value; } values[VALUES] = {
    {"util", NAN}, {"memory_used_mib", NAN}, {"memory_total_mib", 81920}, {"power_w", NAN}, {"limit_w", 700},
    {"temperature", NAN}, {"sm_clock", 1755}, {"sm_clock_max", 1980}, {"memory_clock", 2619}, {"pcie_gen", 5},
    {"pcie_width", 16}, {"pcie_tx_mib", NAN}, {"pcie_rx_mib", NAN}, {"counter_bits", 64}, {"counter_start", 0},
    {"reasons", 0}, {"sm_active", NAN}, {"nvlink_tx_mib", NAN}, {"nvlink_rx_mib", NAN}, {"mig", 0},
};

typedef struct {
    int index, lost, hang, waiting;
    long calls, calls_after_lost, lost_after, hang_after;
    double fixed[VALUES];
    char uuid[48], bus[32];
} Gpu;
typedef struct { char function[64]; int code, gpu; } Rule;
typedef struct { int gpu, pid, sm; double mib; char kind; } Process;
typedef struct { const char *function; long calls[MAX_GPUS]; } Counted;

static Gpu gpus[MAX_GPUS];
static Rule rules[MAX_RULES];
static Process processes[MAX_PROCESSES];
static Counted counted[MAX_COUNTED];
static int gpu_count, rule_count, process_count, counted_count, init_code, with_gpm, initialised;
static char driver[80], device_name[96];
static double fixed_time = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t released = PTHREAD_COND_INITIALIZER, hanging = PTHREAD_COND_INITIALIZER;

/* ---- time and values ------------------------------------------------------------------------ */

static double now(void)
{
    struct timespec t;
    if (fixed_time >= 0) return fixed_time;
    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

/* Load of a GPU, 0 to 1: a wave of 10 s, each GPU a little behind the one before. */
static double load(const Gpu *g, double t) { return 0.6 + 0.35 * sin(0.628 * t - 0.5 * g->index); }

/* The same integrated over time, for counters and GPM. */
static double load_sum(const Gpu *g, double t) { return 0.6 * t - 0.35 / 0.628 * cos(0.628 * t - 0.5 * g->index); }

static double value(const Gpu *g, int key, double t)
{
    double l = load(g, t);
    if (!isnan(g->fixed[key])) return g->fixed[key];
    switch (key) {
    case UTIL: return 100 * l;
    case MEMORY_USED_MIB: return 60000 + 1000 * g->index + 4000 * l;
    case POWER_W: return 150 + 500 * l;
    case TEMPERATURE: return 40 + 30 * l;
    default: return 0;
    }
}

/* Integral over time of a metric that is `full` at full load, or fixed. */
static double sum(const Gpu *g, int key, double full, double t)
{
    return isnan(g->fixed[key]) ? full * load_sum(g, t) : g->fixed[key] * t;
}

/* ---- settings ------------------------------------------------------------------------------- */

static void unescape(const char *from, char *to, size_t room)
{
    size_t n = 0;
    unsigned byte;
    while (*from && n + 1 < room) {
        if (from[0] == '\\' && from[1] == 'x' && sscanf(from + 2, "%2x", &byte) == 1) {
            to[n++] = (char)byte;
            from += 4;
        } else {
            to[n++] = *from++;
        }
    }
    to[n] = 0;
}

static void reset(void)
{
    gpu_count = 8; with_gpm = 1;
    rule_count = process_count = counted_count = init_code = 0;
    strcpy(driver, "580.65.06");
    strcpy(device_name, "NVIDIA H100 80GB HBM3");
    for (int i = 0; i < MAX_GPUS; i++) {
        Gpu *g = &gpus[i];
        memset(g, 0, sizeof *g);
        g->index = i;
        g->lost_after = g->hang_after = -1;
        for (int k = 0; k < VALUES; k++) g->fixed[k] = values[k].value;
        snprintf(g->uuid, sizeof g->uuid, "GPU-%08x-feed-4bad-8000-00000000%04x", 0x1a2b3c00 + 0x11 * i, i);
        snprintf(g->bus, sizeof g->bus, "00000000:%02X:00.0", 0x18 + 8 * i);
    }
}

static int setting(const char *line)
{
    char word[64], text[128];
    int gpu = -1, pid, code, sm;
    long calls;
    double number;
    char kind;
    if (sscanf(line, "gpus %d", &gpu_count) == 1) return 1;
    if (sscanf(line, "driver %79s", driver) == 1) return 1;
    if (sscanf(line, "init %d", &init_code) == 1) return 1;
    if (sscanf(line, "gpm %d", &with_gpm) == 1) return 1;
    if (sscanf(line, "name %127[^\n]", text) == 1) { unescape(text, device_name, sizeof device_name); return 1; }
    if (sscanf(line, "set %63s %lf %d", word, &number, &gpu) >= 2) {
        for (int k = 0; k < VALUES; k++)
            if (!strcmp(word, values[k].key)) {
                for (int i = 0; i < MAX_GPUS; i++)
                    if (gpu < 0 || i == gpu) gpus[i].fixed[k] = number;
                return 1;
            }
        return 0;
    }
    if (sscanf(line, "refuse %63s %d %d", word, &code, &gpu) >= 2 && rule_count < MAX_RULES) {
        strcpy(rules[rule_count].function, word);
        rules[rule_count].code = code;
        rules[rule_count++].gpu = gpu;
        return 1;
    }
    if (sscanf(line, "lost_after %ld %d", &calls, &gpu) == 2) { gpus[gpu].lost_after = calls; return 1; }
    if (sscanf(line, "hang_after %ld %d", &calls, &gpu) == 2) { gpus[gpu].hang_after = calls; return 1; }
    if (sscanf(line, "process %d %d %lf %c %d", &gpu, &pid, &number, &kind, &sm) == 5 && process_count < MAX_PROCESSES) {
        processes[process_count++] = (Process){gpu, pid, sm, number, kind};
        return 1;
    }
    return 0;
}

static void configure(void)
{
    const char *path = getenv("NVML_FAKE_CONFIG");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[256];
    reset();
    while (file && fgets(line, sizeof line, file))
        if (line[0] != '#' && line[0] != '\n' && !setting(line)) {
            fprintf(stderr, "nvml_fake: %s: not understood: %s", path, line);
            abort();
        }
    if (file) fclose(file);
}

/* ---- what every call goes through ----------------------------------------------------------- */

static int refused(const char *function, int gpu)
{
    for (int i = 0; i < rule_count; i++)
        if ((rules[i].gpu < 0 || rules[i].gpu == gpu) && !strcmp(rules[i].function, function)) return rules[i].code;
    return OK;
}

static int enter(Gpu *g, const char *function)
{
    int code = OK, n;
    if (!initialised) return UNINITIALIZED;
    if (g < gpus || g >= gpus + gpu_count) return INVALID_ARGUMENT;
    pthread_mutex_lock(&lock);
    for (n = 0; n < counted_count && strcmp(counted[n].function, function); n++) {}
    if (n == counted_count && n < MAX_COUNTED) {
        memset(&counted[n], 0, sizeof counted[n]);
        counted[n].function = function;
        counted_count++;
    }
    if (n < MAX_COUNTED) counted[n].calls[g->index]++;
    g->calls++;
    if (g->lost_after >= 0 && g->calls > g->lost_after) g->lost = 1;
    if (g->hang_after >= 0 && g->calls > g->hang_after) g->hang = 1;
    while (g->hang) {
        g->waiting = 1;
        pthread_cond_broadcast(&hanging);
        pthread_cond_wait(&released, &lock);
    }
    g->waiting = 0;
    if (g->lost) {
        g->calls_after_lost++;
        code = GPU_IS_LOST;
    } else {
        code = refused(function, g->index);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

#define ENTER(g) do { int code_ = enter((g), __func__); if (code_) return code_; } while (0)

/* ---- the library ---------------------------------------------------------------------------- */

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    configure();
    initialised = init_code == OK;
    return init_code;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { initialised = 0; return OK; }
const char *nvmlErrorString(int code) { (void)code; return "an error of the fake NVML"; }

static int copy(char *to, unsigned room, const char *text)
{
    if (strlen(text) + 1 > room) return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return OK;
}

int nvmlSystemGetDriverVersion(char *to, unsigned room) { return copy(to, room, driver); }
int nvmlSystemGetNVMLVersion(char *to, unsigned room) { return copy(to, room, "13.580.65"); }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return OK; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)gpu_count; return initialised ? OK : UNINITIALIZED; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **device)
{
    if (index >= (unsigned)gpu_count) return INVALID_ARGUMENT;
    ENTER(&gpus[index]);
    *device = &gpus[index];
    return OK;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, Gpu **device)
{
    for (int i = 0; i < gpu_count; i++)
        if (!strcmp(uuid, gpus[i].uuid)) { ENTER(&gpus[i]); *device = &gpus[i]; return OK; }
    return NOT_FOUND;
}
int nvmlDeviceGetIndex(Gpu *g, unsigned *index) { ENTER(g); *index = (unsigned)g->index; return OK; }
int nvmlDeviceGetUUID(Gpu *g, char *to, unsigned room) { ENTER(g); return copy(to, room, g->uuid); }
int nvmlDeviceGetName(Gpu *g, char *to, unsigned room) { ENTER(g); return copy(to, room, device_name); }

typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} PciInfo;
int nvmlDeviceGetPciInfo_v3(Gpu *g, PciInfo *info)
{
    ENTER(g);
    memset(info, 0, sizeof *info);
    info->bus = 0x18 + 8 * (unsigned)g->index;
    info->pciDeviceId = 0x233010de;
    strcpy(info->busId, g->bus);
    memcpy(info->busIdLegacy, g->bus + 4, 13);
    return OK;
}

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;
static const double MIB = 1024.0 * 1024.0;
enum { RESERVED_MIB = 600 };

int nvmlDeviceGetMemoryInfo(Gpu *g, Memory *m)
{
    ENTER(g);
    m->total = (unsigned long long)(value(g, MEMORY_TOTAL_MIB, 0) * MIB);
    m->used = (unsigned long long)((value(g, MEMORY_USED_MIB, now()) + RESERVED_MIB) * MIB);
    m->free = m->total - m->used;
    return OK;
}
int nvmlDeviceGetMemoryInfo_v2(Gpu *g, MemoryV2 *m)
{
    ENTER(g);
    if (m->version != (2u << 24 | sizeof *m)) return 25;
    m->total = (unsigned long long)(value(g, MEMORY_TOTAL_MIB, 0) * MIB);
    m->used = (unsigned long long)(value(g, MEMORY_USED_MIB, now()) * MIB);
    m->reserved = (unsigned long long)(RESERVED_MIB * MIB);
    m->free = m->total - m->used - m->reserved;
    return OK;
}

typedef struct { unsigned long long total, free, used; } Bar1;
int nvmlDeviceGetBAR1MemoryInfo(Gpu *g, Bar1 *bar)
{
    ENTER(g);
    bar->total = 128ull << 30;
    bar->used = 1ull << 20;
    bar->free = bar->total - bar->used;
    return OK;
}

typedef struct { unsigned gpu, memory; } Utilization;
int nvmlDeviceGetUtilizationRates(Gpu *g, Utilization *u)
{
    ENTER(g);
    u->gpu = (unsigned)value(g, UTIL, now());
    u->memory = u->gpu / 2;
    return OK;
}

#define NUMBER(function, expression) \
    int function(Gpu *g, unsigned *to) { ENTER(g); *to = (unsigned)(expression); return OK; }
NUMBER(nvmlDeviceGetPowerUsage, 1000 * value(g, POWER_W, now()))
NUMBER(nvmlDeviceGetEnforcedPowerLimit, 1000 * value(g, LIMIT_W, 0))
NUMBER(nvmlDeviceGetPowerManagementLimit, 1000 * value(g, LIMIT_W, 0))
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, value(g, PCIE_GEN, 0))
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, value(g, PCIE_WIDTH, 0))
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, value(g, PCIE_GEN, 0))
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, value(g, PCIE_WIDTH, 0))
NUMBER(nvmlDeviceGetPerformanceState, 0)
NUMBER(nvmlDeviceGetPersistenceMode, 1)
NUMBER(nvmlDeviceGetDisplayActive, 0)
NUMBER(nvmlDeviceGetDisplayMode, 0)
NUMBER(nvmlDeviceGetComputeMode, 0)
NUMBER(nvmlDeviceGetMaxMigDeviceCount, 0)
int nvmlDeviceGetDriverModel(Gpu *g, unsigned *now_, unsigned *later) { ENTER(g); (void)now_, (void)later; return NOT_SUPPORTED; }
int nvmlDeviceGetFanSpeed(Gpu *g, unsigned *to) { ENTER(g); (void)to; return NOT_SUPPORTED; }

static int clock_of(Gpu *g, int type, unsigned *mhz, int sm)
{
    *mhz = (unsigned)value(g, type == 2 ? MEMORY_CLOCK : sm, 0);
    return OK;
}
int nvmlDeviceGetClockInfo(Gpu *g, int type, unsigned *mhz) { ENTER(g); return clock_of(g, type, mhz, SM_CLOCK); }
int nvmlDeviceGetMaxClockInfo(Gpu *g, int type, unsigned *mhz) { ENTER(g); return clock_of(g, type, mhz, SM_CLOCK_MAX); }

int nvmlDeviceGetTemperature(Gpu *g, int sensor, unsigned *to)
{
    ENTER(g);
    (void)sensor;
    *to = (unsigned)value(g, TEMPERATURE, now());
    return OK;
}
typedef struct { unsigned version; int sensor, temperature; } TemperatureV1;
int nvmlDeviceGetTemperatureV(Gpu *g, TemperatureV1 *t)
{
    ENTER(g);
    t->temperature = (int)value(g, TEMPERATURE, now());
    return OK;
}
int nvmlDeviceGetCurrentClocksEventReasons(Gpu *g, unsigned long long *mask)
{
    ENTER(g);
    *mask = (unsigned long long)value(g, REASONS, 0);
    return OK;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(Gpu *g, unsigned long long *mask)
{
    ENTER(g);
    *mask = (unsigned long long)value(g, REASONS, 0);
    return OK;
}
int nvmlDeviceGetMigMode(Gpu *g, unsigned *current, unsigned *pending)
{
    ENTER(g);
    *current = *pending = (unsigned)value(g, MIG, 0);
    return OK;
}
static int utilization_of(unsigned *percent, unsigned *period_us) { *percent = 0; *period_us = 100000; return OK; }
int nvmlDeviceGetEncoderUtilization(Gpu *g, unsigned *u, unsigned *period) { ENTER(g); return utilization_of(u, period); }
int nvmlDeviceGetDecoderUtilization(Gpu *g, unsigned *u, unsigned *period) { ENTER(g); return utilization_of(u, period); }
int nvmlDeviceGetCudaComputeCapability(Gpu *g, int *major, int *minor) { ENTER(g); *major = 9; *minor = 0; return OK; }
int nvmlDeviceGetTotalEccErrors(Gpu *g, int type, int counter, unsigned long long *count)
{
    ENTER(g);
    (void)type, (void)counter;
    *count = 0;
    return OK;
}

/* PCIe: bytes so far, and the rate of this moment in KB/s. */
static double full_load_mib(int transmit) { return transmit ? 400 : 12000; }
static unsigned long long pcie_bytes(const Gpu *g, int transmit, double t)
{
    double start = fixed_time >= 0 ? 0 : 1.7e9; /* keeps real time's counts small enough for exact doubles */
    double mib = sum(g, transmit ? PCIE_TX_MIB : PCIE_RX_MIB, full_load_mib(transmit), t - start);
    unsigned long long bytes = (unsigned long long)(mib * MIB) + (unsigned long long)g->fixed[COUNTER_START];
    return g->fixed[COUNTER_BITS] < 64 ? bytes & 0xffffffffull : bytes;
}
int nvmlDeviceGetPcieThroughput(Gpu *g, int counter, unsigned *kb_per_s)
{
    int key = counter == 0 ? PCIE_TX_MIB : PCIE_RX_MIB;
    ENTER(g);
    *kb_per_s = (unsigned)((isnan(g->fixed[key]) ? full_load_mib(counter == 0) * load(g, now()) : g->fixed[key]) * MIB / 1000);
    return OK;
}

typedef union { double d; unsigned ui; unsigned long long ull; } Value;
typedef struct { uint32_t field, scope; int64_t timestamp, latency; int type, code; Value value; } FieldValue;
int nvmlDeviceGetFieldValues(Gpu *g, int count, FieldValue *fields)
{
    char name[32];
    ENTER(g);
    for (int i = 0; i < count; i++) {
        FieldValue *f = &fields[i];
        snprintf(name, sizeof name, "field:%u", f->field);
        f->code = refused(name, g->index);
        if (f->code) continue;
        if (f->field != 197 && f->field != 198) { f->code = NOT_SUPPORTED; continue; }
        f->value.ull = pcie_bytes(g, f->field == 197, now());
        /* "counter_bits 33": 32 bits in a field of 64, as hardware counters come. */
        f->type = g->fixed[COUNTER_BITS] == 32 ? 1 : 3;
        f->timestamp = (int64_t)(now() * 1e6);
    }
    return OK;
}

/* ---- processes ------------------------------------------------------------------------------ */

typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } ProcessInfo;
typedef struct { unsigned pid; unsigned long long used; } ProcessInfoV1;

static int list_processes(const Gpu *g, char kind, unsigned *count, char *to, size_t size)
{
    unsigned found = 0, room = to ? *count : 0;
    for (int i = 0; i < process_count; i++) {
        const Process *p = &processes[i];
        if (p->gpu != g->index || (p->kind != kind && p->kind != 'B')) continue;
        if (found < room) {
            ProcessInfoV1 *info = (ProcessInfoV1 *)(to + found * size);
            info->pid = (unsigned)p->pid;
            info->used = p->mib < 0 ? ~0ull : (unsigned long long)(p->mib * MIB);
            if (size == sizeof(ProcessInfo)) {
                ((ProcessInfo *)info)->gpu_instance = ((ProcessInfo *)info)->compute_instance = ~0u;
            }
        }
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : OK;
}

#define PROCESSES(function, kind, type) \
    int function(Gpu *g, unsigned *count, type *to) \
    { ENTER(g); return list_processes(g, kind, count, (char *)to, sizeof(type)); }
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, 'C', ProcessInfo)
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, 'C', ProcessInfo)
PROCESSES(nvmlDeviceGetComputeRunningProcesses, 'C', ProcessInfoV1)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, 'G', ProcessInfo)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, 'G', ProcessInfo)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, 'G', ProcessInfoV1)

PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, 'M', ProcessInfo)

typedef struct { unsigned pid; unsigned long long stamp; unsigned sm, memory, encoder, decoder; } Share;
int nvmlDeviceGetProcessUtilization(Gpu *g, Share *to, unsigned *count, unsigned long long seen_us)
{
    unsigned found = 0;
    unsigned long long stamp = (unsigned long long)(now() * 1e6);
    ENTER(g);
    if (stamp <= seen_us) return NOT_FOUND;
    for (int i = 0; i < process_count; i++) {
        if (processes[i].gpu != g->index || processes[i].sm < 0) continue;
        if (to && found < *count) to[found] = (Share){(unsigned)processes[i].pid, stamp, (unsigned)processes[i].sm, 0, 0, 0};
        found++;
    }
    if (!found) return NOT_FOUND;
    if (!to || *count < found) { *count = found; return INSUFFICIENT_SIZE; }
    *count = found;
    return OK;
}

/* ---- GPM ------------------------------------------------------------------------------------ */

typedef struct { const Gpu *gpu; double time; } Sample;
typedef struct { unsigned id; int code; double value; char *text[3]; } Metric;
typedef struct { unsigned version, count; Sample *older, *newer; Metric metrics[]; } MetricsGet;
typedef struct { unsigned version, supported; } Support;

int nvmlGpmQueryDeviceSupport(Gpu *g, Support *s) { ENTER(g); s->supported = (unsigned)with_gpm; return OK; }
int nvmlGpmSampleAlloc(Sample **s) { *s = calloc(1, sizeof **s); return *s ? OK : 20; }
int nvmlGpmSampleFree(Sample *s) { free(s); return OK; }
int nvmlGpmSampleGet(Gpu *g, Sample *s) { ENTER(g); s->gpu = g; s->time = now(); return OK; }

/* Integral over time of a metric, in percent or MiB/s times seconds. */
static double gpm_sum(const Gpu *g, unsigned id, double t)
{
    switch (id) {
    case 2: return sum(g, SM_ACTIVE, 100, t);
    case 1: return 105 * load_sum(g, t); /* above 100 % at the top, as drivers round */
    case 3: return 50 * load_sum(g, t);
    case 5: return 60 * load_sum(g, t);
    case 10: return 45 * load_sum(g, t);
    case 11: case 12: case 13: return 5 * load_sum(g, t);
    case 20: return sum(g, PCIE_TX_MIB, full_load_mib(1), t);
    case 21: return sum(g, PCIE_RX_MIB, full_load_mib(0), t);
    case 60: return sum(g, NVLINK_RX_MIB, 150000, t);
    case 61: return sum(g, NVLINK_TX_MIB, 140000, t);
    default: return NAN;
    }
}
int nvmlGpmMetricsGet(MetricsGet *request)
{
    const Gpu *g = request->newer->gpu;
    double elapsed = request->newer->time - request->older->time;
    char name[32];
    if (request->version != 1) return 25;
    if (elapsed <= 0) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < request->count; i++) {
        Metric *m = &request->metrics[i];
        snprintf(name, sizeof name, "gpm:%u", m->id);
        m->code = refused(name, g->index);
        m->value = (gpm_sum(g, m->id, request->newer->time) - gpm_sum(g, m->id, request->older->time)) / elapsed;
        /* The trap of real drivers: byte rates of two close samples are 0, and no error says so. */
        if (m->id >= 20 && elapsed <= 0.1) m->value = 0;
    }
    return OK;
}

/* ---- for tests that load this library into their own process ---------------------------------- */

void fake_set_time(double seconds) { fixed_time = seconds; }
long fake_calls(const char *function, int gpu)
{
    for (int i = 0; i < counted_count; i++)
        if (!strcmp(counted[i].function, function)) return counted[i].calls[gpu];
    return 0;
}
long fake_calls_after_lost(int gpu) { return gpus[gpu].calls_after_lost; }
void fake_lose(int gpu) { gpus[gpu].lost = 1; }
int fake_setting(const char *line)
{
    pthread_mutex_lock(&lock);
    int understood = setting(line);
    pthread_mutex_unlock(&lock);
    return understood;
}
void fake_allow(void) { rule_count = 0; }
void fake_hang(int gpu)
{
    pthread_mutex_lock(&lock);
    gpus[gpu].hang = 1;
    pthread_mutex_unlock(&lock);
}
/* Wait until a call hangs in that GPU; 0 if none does within the time. */
int fake_await_hanging(int gpu, double seconds)
{
    struct timespec until;
    int waiting;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)seconds;
    pthread_mutex_lock(&lock);
    while (!gpus[gpu].waiting && pthread_cond_timedwait(&hanging, &lock, &until) == 0) {}
    waiting = gpus[gpu].waiting;
    pthread_mutex_unlock(&lock);
    return waiting;
}
void fake_release(int gpu)
{
    pthread_mutex_lock(&lock);
    gpus[gpu].hang = 0;
    gpus[gpu].hang_after = -1;
    pthread_cond_broadcast(&released);
    pthread_mutex_unlock(&lock);
}
