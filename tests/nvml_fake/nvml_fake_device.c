/* The fake NVML: what a GPU is, its sensors, clocks, counters and errors. */
#include "nvml_fake.h"

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **device)
{
    if (index >= (unsigned)gpu_count) return INVALID_ARGUMENT;
    ENTER(&gpus[index], device);
    *device = &gpus[index];
    return OK;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, Gpu **device)
{
    for (int i = 0; i < gpu_count; i++)
        if (!strcmp(uuid, gpus[i].uuid)) { ENTER(&gpus[i], device); *device = &gpus[i]; return OK; }
    return NOT_FOUND;
}
int nvmlDeviceGetIndex(Gpu *g, unsigned *index) { ENTER(g, index); *index = (unsigned)g->index; return OK; }
int nvmlDeviceGetUUID(Gpu *g, char *to, unsigned room) { ENTER_BYTES(g, to, room); return copy(to, room, g->uuid); }

typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} PciInfo;
int nvmlDeviceGetPciInfo_v3(Gpu *g, PciInfo *info)
{
    ENTER(g, info);
    memset(info, 0, sizeof *info);
    info->bus = 0x18 + 8 * (unsigned)g->index;
    info->pciDeviceId = 0x233010de;
    strcpy(info->busId, g->bus);
    memcpy(info->busIdLegacy, g->bus + 4, 13);
    return OK;
}

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;
enum { RESERVED_MIB = 600 };

int nvmlDeviceGetMemoryInfo(Gpu *g, Memory *m)
{
    ENTER(g, m);
    m->total = (unsigned long long)(value(g, MEMORY_TOTAL_MIB, 0) * MIB);
    m->used = (unsigned long long)((value(g, MEMORY_USED_MIB, now()) + RESERVED_MIB) * MIB);
    m->free = m->total - m->used;
    return OK;
}
int nvmlDeviceGetMemoryInfo_v2(Gpu *g, MemoryV2 *m)
{
    ENTER(g, m);
    if (m->version != (2u << 24 | sizeof *m)) return VERSION_MISMATCH;
    m->total = (unsigned long long)(value(g, MEMORY_TOTAL_MIB, 0) * MIB);
    m->used = (unsigned long long)(value(g, MEMORY_USED_MIB, now()) * MIB);
    m->reserved = (unsigned long long)(RESERVED_MIB * MIB);
    m->free = m->total - m->used - m->reserved;
    return OK;
}

typedef struct { unsigned long long total, free, used; } Bar1;
int nvmlDeviceGetBAR1MemoryInfo(Gpu *g, Bar1 *bar)
{
    ENTER(g, bar);
    bar->total = 128ull << 30;
    bar->used = 1ull << 20;
    bar->free = bar->total - bar->used;
    return OK;
}

typedef struct { unsigned gpu, memory; } Utilization;
int nvmlDeviceGetUtilizationRates(Gpu *g, Utilization *u)
{
    ENTER(g, u);
    u->gpu = (unsigned)value(g, UTIL, now());
    u->memory = u->gpu / 2;
    return OK;
}

#define NUMBER(function, expression) \
    int function(Gpu *g, unsigned *to) { ENTER(g, to); *to = (unsigned)(expression); return OK; }
NUMBER(nvmlDeviceGetPowerUsage, 1000 * value(g, POWER_AVERAGE_W, now()))
NUMBER(nvmlDeviceGetEnforcedPowerLimit, 1000 * value(g, LIMIT_W, 0))
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, 1000 * value(g, DEFAULT_LIMIT_W, 0))
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
int nvmlDeviceGetDriverModel(Gpu *g, unsigned *now_, unsigned *later) { ENTER(g, now_); (void)later; return NOT_SUPPORTED; }
int nvmlDeviceGetFanSpeed(Gpu *g, unsigned *to) { ENTER(g, to); return NOT_SUPPORTED; }

static int clock_of(Gpu *g, int type, unsigned *mhz, int sm)
{
    *mhz = (unsigned)value(g, type == 2 ? MEMORY_CLOCK : sm, 0);
    return OK;
}
int nvmlDeviceGetClockInfo(Gpu *g, int type, unsigned *mhz) { ENTER(g, mhz); return clock_of(g, type, mhz, SM_CLOCK); }
int nvmlDeviceGetMaxClockInfo(Gpu *g, int type, unsigned *mhz) { ENTER(g, mhz); return clock_of(g, type, mhz, SM_CLOCK_MAX); }

int nvmlDeviceGetTemperature(Gpu *g, int sensor, unsigned *to)
{
    ENTER(g, to);
    (void)sensor;
    *to = (unsigned)value(g, TEMPERATURE, now());
    return OK;
}
typedef struct { unsigned version; int sensor, temperature; } TemperatureV1;
int nvmlDeviceGetTemperatureV(Gpu *g, TemperatureV1 *t)
{
    ENTER(g, t);
    t->temperature = (int)value(g, TEMPERATURE, now());
    return OK;
}
int nvmlDeviceGetCurrentClocksEventReasons(Gpu *g, unsigned long long *mask)
{
    ENTER(g, mask);
    *mask = (unsigned long long)value(g, REASONS, 0);
    return OK;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(Gpu *g, unsigned long long *mask)
{
    ENTER(g, mask);
    *mask = (unsigned long long)value(g, REASONS, 0);
    return OK;
}
int nvmlDeviceGetMigMode(Gpu *g, unsigned *current, unsigned *pending)
{
    ENTER(g, current);
    *current = *pending = (unsigned)value(g, MIG, 0);
    return OK;
}

#define ENGINE(function, key) \
    int function(Gpu *g, unsigned *percent, unsigned *period_us) \
    { ENTER(g, percent); *percent = (unsigned)value(g, key, now()); *period_us = 100000; return OK; }
ENGINE(nvmlDeviceGetEncoderUtilization, ENCODER)
ENGINE(nvmlDeviceGetDecoderUtilization, DECODER)
ENGINE(nvmlDeviceGetJpgUtilization, JPEG)

int nvmlDeviceGetCudaComputeCapability(Gpu *g, int *major, int *minor) { ENTER(g, major); *major = 9; *minor = 0; return OK; }
int nvmlDeviceGetTemperatureThreshold(Gpu *g, int type, unsigned *to)
{
    ENTER(g, to);
    if (type != 0 && type != 1) return NOT_SUPPORTED;
    *to = (unsigned)value(g, SLOWDOWN_TEMPERATURE, 0) + (type == 0 ? 5 : 0); /* 0: shutdown, 1: slowdown */
    return OK;
}

int nvmlDeviceGetTotalEccErrors(Gpu *g, int type, int lifetime, unsigned long long *to)
{
    ENTER(g, to);
    *to = (unsigned long long)value(g, type == 0 ? ECC_CORRECTED : lifetime ? ECC_UNCORRECTED_LIFETIME : ECC_UNCORRECTED, 0);
    return OK;
}
int nvmlDeviceGetRemappedRows(Gpu *g, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed)
{
    unsigned *const to[] = {corrected, uncorrected, pending, failed};
    int code = enter(g, __func__);
    if (code > 0) return code;
    for (int k = 0; k < 4; k++) {
        *to[k] = (unsigned)value(g, ROWS_REMAPPED_CORRECTED + k, 0);
        if (code == SPOILT) spoil(g, to[k], sizeof *to[k]);
    }
    return OK;
}

/* Bytes so far of a flow that is `full_mib` per second at full load. */
static unsigned long long bytes_so_far(const Gpu *g, int key, double full_mib, double t)
{
    double start = fixed_time >= 0 ? 0 : 1.7e9; /* keeps real time's counts small enough for exact doubles */
    unsigned long long bytes = (unsigned long long)(sum(g, key, full_mib, t - start) * MIB);
    bytes += (unsigned long long)g->fixed[COUNTER_START];
    return g->fixed[COUNTER_BITS] < 64 ? bytes & 0xffffffffull : bytes;
}
static double pcie_full_mib(int transmit) { return transmit ? 400 : 12000; }
int nvmlDeviceGetPcieThroughput(Gpu *g, int counter, unsigned *kb_per_s)
{
    int key = counter == 0 ? PCIE_TX_MIB : PCIE_RX_MIB;
    ENTER(g, kb_per_s);
    *kb_per_s = (unsigned)((isnan(g->fixed[key]) ? pcie_full_mib(counter == 0) * load(g, now()) : g->fixed[key]) * MIB / 1000);
    return OK;
}

typedef union { double d; unsigned ui; unsigned long long ull; } Value;
typedef struct { uint32_t field, scope; int64_t timestamp, latency; int type, code; Value value; } FieldValue;
enum { TYPE_UNSIGNED = 1, TYPE_UNSIGNED_LONG_LONG = 3 };

static int field_value(Gpu *g, FieldValue *f)
{
    double t = now();
    f->type = TYPE_UNSIGNED;
    switch (f->field) {
    case 82: f->value.ui = (unsigned)value(g, MEMORY_TEMPERATURE, t); return OK;
    case 185: f->value.ui = (unsigned)(1000 * value(g, POWER_AVERAGE_W, t)); return OK;
    case 186: f->value.ui = (unsigned)(1000 * value(g, POWER_W, t)); return OK;
    case 138: case 139: /* KiB over all links together */
        if (f->scope != UINT32_MAX) return INVALID_ARGUMENT;
        f->value.ull = f->field == 138 ? bytes_so_far(g, NVLINK_TX_MIB, 140000, t) : bytes_so_far(g, NVLINK_RX_MIB, 150000, t);
        f->value.ull /= 1024;
        f->type = TYPE_UNSIGNED_LONG_LONG;
        return OK;
    case 197: case 198:
        f->value.ull = bytes_so_far(g, f->field == 197 ? PCIE_TX_MIB : PCIE_RX_MIB, pcie_full_mib(f->field == 197), t);
        /* "counter_bits 33": 32 bits in a field of 64, as hardware counters come. */
        f->type = g->fixed[COUNTER_BITS] == 32 ? TYPE_UNSIGNED : TYPE_UNSIGNED_LONG_LONG;
        return OK;
    default: return NOT_SUPPORTED;
    }
}
int nvmlDeviceGetFieldValues(Gpu *g, int count, FieldValue *fields)
{
    char name[32];
    ENTER_BYTES(g, fields, (size_t)count * sizeof *fields);
    for (int i = 0; i < count; i++) {
        FieldValue *f = &fields[i];
        int fault;
        snprintf(name, sizeof name, "field:%u", f->field);
        fault = fault_of(g, name);
        f->code = fault > 0 ? fault : field_value(g, f);
        f->timestamp = (int64_t)(now() * 1e6);
        if (fault == SPOILT) spoil(g, &f->value, sizeof f->value);
    }
    return OK;
}
