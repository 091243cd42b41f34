/* The fake NVML: GPM. */
#include "nvml_fake.h"

typedef struct { Gpu *gpu; double time; } Sample;
typedef struct { unsigned id; int code; double value; char *text[3]; } Metric;
typedef struct { unsigned version, count; Sample *older, *newer; Metric metrics[]; } MetricsGet;
typedef struct { unsigned version, supported; } Support;

int nvmlGpmQueryDeviceSupport(Gpu *g, Support *s) { ENTER(g, s); s->supported = (unsigned)with_gpm; return OK; }
int nvmlGpmSampleAlloc(Sample **s) { *s = calloc(1, sizeof **s); return *s ? OK : OUT_OF_MEMORY; }
int nvmlGpmSampleFree(Sample *s)
{
    if (s->gpu && s->gpu->lost) s->gpu->calls_after_lost++;
    free(s);
    return OK;
}
int nvmlGpmSampleGet(Gpu *g, Sample *s)
{
    s->gpu = g;
    ENTER(g, &s->time);
    s->time = now();
    return OK;
}

int nvmlGpmMigSampleGet(Gpu *parent, unsigned gpu_instance, Sample *s)
{
    Gpu *g = mig_instance(parent, gpu_instance);
    if (!g) return INVALID_ARGUMENT;
    s->gpu = g;
    ENTER(g, &s->time);
    s->time = now();
    return OK;
}

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
    case 20: return sum(g, PCIE_TX_MIB, 400, t);
    case 21: return sum(g, PCIE_RX_MIB, 12000, t);
    case 60: return sum(g, NVLINK_RX_MIB, 150000, t);
    case 61: return sum(g, NVLINK_TX_MIB, 140000, t);
    default: return NAN;
    }
}
int nvmlGpmMetricsGet(MetricsGet *request)
{
    Gpu *g = request->newer->gpu;
    double elapsed = request->newer->time - request->older->time;
    char name[32];
    ENTER_BYTES(g, request->metrics, request->count * sizeof *request->metrics);
    if (request->version != 1) return VERSION_MISMATCH;
    if (elapsed <= 0) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < request->count; i++) {
        Metric *m = &request->metrics[i];
        int fault;
        snprintf(name, sizeof name, "gpm:%u", m->id);
        fault = fault_of(g, name);
        m->code = fault > 0 ? fault : m->id >= 20 && mig_profile(g) ? NOT_SUPPORTED : OK;
        m->value = (gpm_sum(g, m->id, request->newer->time) - gpm_sum(g, m->id, request->older->time)) / elapsed;
        /* The trap of real drivers: byte rates of two close samples are 0, and no error says so. */
        if (m->id >= 20 && elapsed <= 0.1) m->value = 0;
        if (fault == SPOILT) spoil(g, &m->value, sizeof m->value);
    }
    return OK;
}
