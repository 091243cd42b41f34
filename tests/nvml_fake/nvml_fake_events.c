/* The fake NVML: events. */
#include "nvml_fake.h"

enum { MAX_SETS = 16, MAX_EVENTS = 64 };
enum { XID = 8, NO_INSTANCE = -1 };

typedef struct { Gpu *gpu; unsigned long long type, data; unsigned gpu_instance, compute_instance; } Event;
typedef struct { int used, count; unsigned era; char registered[MAX_GPUS]; Event events[MAX_EVENTS]; } Set;

static Set sets[MAX_SETS];
static unsigned era; /* from one start of NVML to the next */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t happened = PTHREAD_COND_INITIALIZER;

static struct timespec after(double seconds)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_nsec += (long)(1e9 * (seconds - (long)seconds));
    t.tv_sec += (long)seconds + t.tv_nsec / 1000000000;
    t.tv_nsec %= 1000000000;
    return t;
}

/* Every wait returns at once; the sets are gone. */
void events_end(void)
{
    pthread_mutex_lock(&lock);
    era++;
    for (int i = 0; i < MAX_SETS; i++) sets[i].used = 0;
    pthread_cond_broadcast(&happened);
    pthread_mutex_unlock(&lock);
}

int nvmlEventSetCreate(Set **to)
{
    int code = fault_of(&gpus[0], __func__);
    if (code > 0) return code;
    code = OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX_SETS && code; i++)
        if (!sets[i].used) {
            memset(&sets[i], 0, sizeof sets[i]);
            sets[i].used = 1;
            sets[i].era = era;
            *to = &sets[i];
            code = OK;
        }
    pthread_mutex_unlock(&lock);
    return code;
}
int nvmlEventSetFree(Set *set)
{
    pthread_mutex_lock(&lock);
    set->used = 0;
    pthread_mutex_unlock(&lock);
    return OK;
}

int nvmlDeviceGetSupportedEventTypes(Gpu *g, unsigned long long *to) { ENTER(g, to); *to = XID | 1; return OK; }
int nvmlDeviceRegisterEvents(Gpu *g, unsigned long long types, Set *set)
{
    int code = enter(g, __func__);
    if (code > 0) return code;
    if (types & ~(XID | 1ull)) return NOT_SUPPORTED;
    pthread_mutex_lock(&lock);
    set->registered[g->index] = (types & XID) != 0;
    pthread_cond_broadcast(&happened);
    pthread_mutex_unlock(&lock);
    return OK;
}

static int wait_for(Set *set, Event *to, size_t size, unsigned timeout_ms)
{
    struct timespec until = after(timeout_ms / 1000.0);
    int code = OK;
    pthread_mutex_lock(&lock);
    unsigned began = set->era;
    while (!code && began == era && !set->count)
        if (pthread_cond_timedwait(&happened, &lock, &until)) code = TIMEOUT;
    if (began != era) {
        code = UNINITIALIZED;
    } else if (!code) {
        memcpy(to, &set->events[0], size);
        memmove(&set->events[0], &set->events[1], (size_t)--set->count * sizeof set->events[0]);
    }
    pthread_mutex_unlock(&lock);
    return code;
}
int nvmlEventSetWait_v2(Set *set, Event *to, unsigned timeout_ms)
{
    int code = fault_of(&gpus[0], __func__);
    return code > 0 ? code : wait_for(set, to, sizeof *to, timeout_ms);
}
int nvmlEventSetWait(Set *set, Event *to, unsigned timeout_ms)
{
    return wait_for(set, to, offsetof(Event, gpu_instance), timeout_ms);
}

/* ---- for tests ---------------------------------------------------------------------------------- */

/* Report an Xid; returns how many sets took it. */
int fake_xid(int gpu, unsigned xid, int gpu_instance)
{
    int taken = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX_SETS; i++)
        if (sets[i].used && sets[i].registered[gpu] && sets[i].count < MAX_EVENTS) {
            sets[i].events[sets[i].count++] = (Event){&gpus[gpu], XID, xid, (unsigned)gpu_instance, (unsigned)NO_INSTANCE};
            taken++;
        }
    pthread_cond_broadcast(&happened);
    pthread_mutex_unlock(&lock);
    return taken;
}
/* Wait until that GPU's Xids are asked for; 0 if they are not within the time. */
int fake_await_registered(int gpu, double seconds)
{
    struct timespec until = after(seconds);
    int found = 0, late = 0;
    pthread_mutex_lock(&lock);
    while (!found && !late) {
        for (int i = 0; i < MAX_SETS; i++) found |= sets[i].used && sets[i].registered[gpu];
        if (!found) late = pthread_cond_timedwait(&happened, &lock, &until);
    }
    pthread_mutex_unlock(&lock);
    return found;
}
