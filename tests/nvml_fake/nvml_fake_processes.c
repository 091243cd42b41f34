/* The fake NVML: the processes on a GPU. */
#include "nvml_fake.h"

typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } ProcessInfo;
typedef struct { unsigned pid; unsigned long long used; } ProcessInfoV1;

static int list_processes(Gpu *g, const char *function, char kind, unsigned *count, char *to, size_t size)
{
    unsigned found = 0, room = to ? *count : 0;
    int fault = enter(g, function);
    if (fault > 0) return fault;
    if (fault == SPOILT) {
        spoil(g, to, room * size);
        spoil(g, count, sizeof *count);
        return OK;
    }
    for (int i = 0; i < process_count; i++) {
        const Process *p = &processes[i];
        if (p->gpu != g->index || (p->kind != kind && p->kind != 'B')) continue;
        if (found < room) {
            ProcessInfoV1 *info = (ProcessInfoV1 *)(to + found * size);
            info->pid = (unsigned)p->pid;
            info->used = p->mib < 0 ? ~0ull : (unsigned long long)(p->mib * MIB);
            if (size == sizeof(ProcessInfo))
                ((ProcessInfo *)info)->gpu_instance = ((ProcessInfo *)info)->compute_instance = ~0u;
            if (fault_of(g, "process") == SPOILT) spoil(g, info, size);
        }
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : OK;
}

#define PROCESSES(function, kind, type) \
    int function(Gpu *g, unsigned *count, type *to) \
    { return list_processes(g, __func__, kind, count, (char *)to, sizeof(type)); }
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
    int fault = enter(g, __func__);
    if (fault > 0) return fault;
    if (fault == SPOILT) {
        spoil(g, to, to ? *count * sizeof *to : 0);
        spoil(g, count, sizeof *count);
        return OK;
    }
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

