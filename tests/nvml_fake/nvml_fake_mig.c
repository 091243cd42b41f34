/*
 * The fake NVML: MIG instances. Each takes the place of a GPU from MIG_FIRST on, in the order in
 * which they are set up, so that "set", "process" and "fault" work for it by that number.
 */
#include "nvml_fake.h"

typedef struct { int used, gpu, number, gpu_instance, slices, memory_gb; char profile[32]; } Mig;
static Mig migs[MAX_GPUS - MIG_FIRST];
static unsigned made; /* so many so far: each has a UUID of its own */

/* All that NVML answers for the handle of an instance. */
static const char *const allowed[] = {
    "nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetAttributes_v2", "nvmlGpmMigSampleGet", "nvmlGpmMetricsGet",
    "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3",
};

static Mig *mig_of(const Gpu *g)
{
    long place = g - gpus - MIG_FIRST;
    return place >= 0 && place < MAX_GPUS - MIG_FIRST && migs[place].used ? &migs[place] : NULL;
}

void mig_reset(void) { memset(migs, 0, sizeof migs); made = 0; }

int mig_setting(const char *line)
{
    Mig m = {.used = 1};
    double mib;
    if (sscanf(line, "unmig %d %d", &m.gpu, &m.number) == 2) {
        for (int i = 0; i < MAX_GPUS - MIG_FIRST; i++)
            if (migs[i].gpu == m.gpu && migs[i].number == m.number) migs[i].used = 0;
        return 1;
    }
    if (sscanf(line, "mig %d %d %d %31s %lf", &m.gpu, &m.number, &m.gpu_instance, m.profile, &mib) != 5) return 0;
    for (int i = 0; i < MAX_GPUS - MIG_FIRST; i++) {
        Gpu *g = &gpus[MIG_FIRST + i];
        if (migs[i].used) continue;
        sscanf(m.profile, "%dg.%dgb", &m.slices, &m.memory_gb);
        migs[i] = m;
        gpus[m.gpu].fixed[MIG] = 1;
        g->fixed[MEMORY_TOTAL_MIB] = mib;
        g->fixed[MEMORY_USED_MIB] = mib / 4;
        snprintf(g->uuid, sizeof g->uuid, "MIG-%08x-feed-4bad-8000-00000000%04x", 0x7e570000 + made, made);
        made++;
        return 1;
    }
    return 0;
}

int mig_answers(const Gpu *g, const char *function)
{
    if (!mig_of(g)) return INVALID_ARGUMENT;
    for (size_t i = 0; i < sizeof allowed / sizeof *allowed; i++)
        if (!strcmp(allowed[i], function)) return OK;
    return NOT_SUPPORTED;
}

const char *mig_profile(const Gpu *g) { const Mig *m = mig_of(g); return m ? m->profile : NULL; }

Gpu *mig_instance(const Gpu *parent, unsigned gpu_instance)
{
    for (int i = 0; i < MAX_GPUS - MIG_FIRST; i++)
        if (migs[i].used && migs[i].gpu == parent->index && (unsigned)migs[i].gpu_instance == gpu_instance)
            return &gpus[MIG_FIRST + i];
    return NULL;
}

int nvmlDeviceGetMaxMigDeviceCount(Gpu *g, unsigned *to)
{
    ENTER(g, to);
    *to = value(g, MIG, 0) ? 7 : 0;
    return OK;
}
int nvmlDeviceGetMigDeviceHandleByIndex(Gpu *g, unsigned number, Gpu **to)
{
    ENTER(g, to);
    for (int i = 0; i < MAX_GPUS - MIG_FIRST; i++)
        if (migs[i].used && migs[i].gpu == g->index && (unsigned)migs[i].number == number) {
            *to = &gpus[MIG_FIRST + i];
            return OK;
        }
    return NOT_FOUND;
}
int nvmlDeviceGetGpuInstanceId(Gpu *g, unsigned *to)
{
    ENTER(g, to);
    *to = (unsigned)mig_of(g)->gpu_instance;
    return OK;
}

typedef struct {
    unsigned multiprocessors, copy_engines, decoders, encoders, jpeg, ofa, gpu_slices, compute_slices;
    unsigned long long memory_mb;
} Attributes;
int nvmlDeviceGetAttributes_v2(Gpu *g, Attributes *to)
{
    const Mig *m = mig_of(g);
    ENTER(g, to);
    if (!m) return NOT_SUPPORTED;
    memset(to, 0, sizeof *to);
    to->gpu_slices = to->compute_slices = (unsigned)m->slices;
    to->multiprocessors = 16 * to->gpu_slices;
    to->memory_mb = (unsigned long long)value(g, MEMORY_TOTAL_MIB, 0);
    return OK;
}
