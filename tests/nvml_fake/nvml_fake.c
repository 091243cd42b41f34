/*
 * A stand-in for libnvidia-ml.so.1, for tests and benchmarks on machines without an NVIDIA GPU.
 *
 * It has the part of NVML's public interface that gputop and nvitop call, as declared in
 * NVIDIA's API reference, and invents a node: GPUs whose load goes up and down with time.
 * Every call goes through one gate, where any function of any GPU can be made to fail, hang
 * or answer garbage. nvmlInit reads the file named by $NVML_FAKE_CONFIG, one setting a line,
 * "#" for comments:
 *
 *   gpus 8                          how many GPUs
 *   driver 580.65.06                driver version
 *   init 18                         what nvmlInit returns
 *   name H100 \x1b[31m              device name; \xNN is a byte
 *   gpm 0                           no GPM (default 1)
 *   set KEY NUMBER [GPU]            fix a value: see FIXABLE_VALUES in nvml_fake.h
 *   refuse FUNCTION CODE [GPU]      that function returns CODE; field values are "field:197",
 *                                   GPM metrics "gpm:2", "*" is every function
 *   fault FUNCTION GPU FIRST EVERY code CODE           the same from the call FIRST (1, 2, ...) on,
 *   fault FUNCTION GPU FIRST EVERY garbage ff|a5|random    at every EVERYth call; or it succeeds and
 *   fault FUNCTION GPU FIRST EVERY hang 0              answers garbage; or it blocks until fake_release
 *   lost_after CALLS GPU            after so many calls every call returns GPU_IS_LOST
 *   hang_after CALLS GPU            after so many calls every call blocks, until fake_release
 *   process GPU PID MIB KIND SM     a process; KIND C, G or B (both); SM percent
 *   end_process PID                 it holds no GPU any more
 *   mig GPU NUMBER ID PROFILE MIB   a MIG instance with that GPU instance id ("mig 0 1 9 1g.10gb 9728");
 *                                   the first is GPU 16 to the other settings, the second 17, …
 *   unmig GPU NUMBER                destroy it
 *
 * Settings without [GPU], and GPU -1, hold for all GPUs. Counters wrap with "set counter_bits".
 * A GPU that once returned GPU_IS_LOST or RESET_REQUIRED goes on with that code, and the calls
 * that are made to it nevertheless are counted. Loaded into the process under test the fake can
 * also be driven by the functions fake_* at the end. The clock is the machine's unless
 * fake_set_time is called.
 */
#include "nvml_fake.h"

#define VALUE_ROW(name, key, first) {key, first},
static const struct { const char *key; double value; } values[VALUES] = {FIXABLE_VALUES(VALUE_ROW)};

enum { RULE_OFF, RULE_CODE, RULE_GARBAGE, RULE_HANG };
enum { PATTERN_RANDOM = 256 }; /* else the byte that everything is filled with */
typedef struct { char function[64]; int gpu, kind, argument; long first, every; } Rule;
typedef struct { char function[64]; long calls[MAX_GPUS]; } Counted;

Gpu gpus[MAX_GPUS];
Process processes[MAX_PROCESSES];
int gpu_count, process_count, with_gpm;
double fixed_time = -1;
const double MIB = 1024.0 * 1024.0;

static Rule rules[MAX_RULES];
static Counted counted[MAX_COUNTED];
static int rule_count, counted_count, init_code, initialized;
static char driver[80], device_name[96];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER, starting = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t released = PTHREAD_COND_INITIALIZER, hanging = PTHREAD_COND_INITIALIZER;

/* ---- time and values ------------------------------------------------------------------------ */

double now(void)
{
    struct timespec t;
    if (fixed_time >= 0) return fixed_time;
    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

/* Load of a GPU, 0 to 1: a wave of 10 s, each GPU a little behind the one before. */
double load(const Gpu *g, double t) { return 0.6 + 0.35 * sin(0.628 * t - 0.5 * g->index); }

/* The same integrated over time, for counters and GPM. */
double load_sum(const Gpu *g, double t) { return 0.6 * t - 0.35 / 0.628 * cos(0.628 * t - 0.5 * g->index); }

double value(const Gpu *g, int key, double t)
{
    double l = load(g, t);
    if (!isnan(g->fixed[key])) return g->fixed[key];
    switch (key) {
    case UTIL: return 100 * l;
    case MEMORY_USED_MIB: return 60000 + 1000 * g->index + 4000 * l;
    case POWER_W: return 150 + 500 * l;
    case POWER_AVERAGE_W: return value(g, POWER_W, t - 0.5);
    case TEMPERATURE: return 40 + 30 * l;
    case MEMORY_TEMPERATURE: return 45 + 35 * l;
    default: return 0;
    }
}

/* Integral over time of a metric that is `full` at full load, or fixed. */
double sum(const Gpu *g, int key, double full, double t)
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
    mig_reset();
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

static int add_rule(const char *function, int gpu, int kind, int argument, long first, long every)
{
    Rule *rule = &rules[rule_count];
    if (rule_count == MAX_RULES || every < 1) return 0;
    *rule = (Rule){.gpu = gpu, .kind = kind, .argument = argument, .first = first, .every = every};
    strcpy(rule->function, function);
    rule_count++;
    return 1;
}

static int fault_setting(const char *line)
{
    char function[64], kind[16], argument[16];
    int gpu;
    long first, every;
    if (sscanf(line, "fault %63s %d %ld %ld %15s %15s", function, &gpu, &first, &every, kind, argument) != 6) return 0;
    if (!strcmp(kind, "code")) return add_rule(function, gpu, RULE_CODE, atoi(argument), first, every);
    if (!strcmp(kind, "hang")) return add_rule(function, gpu, RULE_HANG, 0, first, every);
    if (strcmp(kind, "garbage")) return 0;
    int pattern = strcmp(argument, "random") ? (int)strtol(argument, NULL, 16) & 0xff : PATTERN_RANDOM;
    return add_rule(function, gpu, RULE_GARBAGE, pattern, first, every);
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
    if (sscanf(line, "refuse %63s %d %d", word, &code, &gpu) >= 2) return add_rule(word, gpu, RULE_CODE, code, 1, 1);
    if (sscanf(line, "lost_after %ld %d", &calls, &gpu) == 2) { gpus[gpu].lost_after = calls; return 1; }
    if (sscanf(line, "hang_after %ld %d", &calls, &gpu) == 2) { gpus[gpu].hang_after = calls; return 1; }
    if (sscanf(line, "process %d %d %lf %c %d", &gpu, &pid, &number, &kind, &sm) == 5 && process_count < MAX_PROCESSES) {
        processes[process_count++] = (Process){gpu, pid, sm, number, kind};
        return 1;
    }
    if (sscanf(line, "end_process %d", &pid) == 1) {
        for (int i = process_count - 1; i >= 0; i--)
            if (processes[i].pid == pid) processes[i] = processes[--process_count];
        return 1;
    }
    return fault_setting(line) || mig_setting(line);
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

static long count(const char *name, int gpu)
{
    int n;
    for (n = 0; n < counted_count && strcmp(counted[n].function, name); n++) {}
    if (n == MAX_COUNTED) {
        fprintf(stderr, "nvml_fake: more functions than it counts\n");
        abort();
    }
    if (n == counted_count) {
        memset(&counted[n], 0, sizeof counted[n]);
        strcpy(counted[n].function, name);
        counted_count++;
    }
    return ++counted[n].calls[gpu];
}

/* The rule that this call of `name` meets, or NULL; `call` and `calls` count those of the function and of the GPU. */
static const Rule *met(const char *name, int gpu, long call, long calls)
{
    for (int i = 0; i < rule_count; i++) {
        const Rule *rule = &rules[i];
        int any = !strcmp(rule->function, "*");
        long n = any ? calls : call;
        if (rule->kind == RULE_OFF || (rule->gpu >= 0 && rule->gpu != gpu)) continue;
        if (!any && strcmp(rule->function, name)) continue;
        if (n >= rule->first && (n - rule->first) % rule->every == 0) return rule;
    }
    return NULL;
}

/* Garbage of its own for each function and each of its calls: another call, before or between, changes none of it. */
static uint64_t seed_of(const char *name, long call)
{
    uint64_t seed = 0xcbf29ce484222325ull + (uint64_t)call * 0x9e3779b97f4a7c15ull; /* FNV-1a */
    for (; *name; name++) seed = (seed ^ (unsigned char)*name) * 0x100000001b3ull;
    return seed;
}

static int outcome(Gpu *g, const Rule *rule, const char *name, long call)
{
    if (!rule) return OK;
    if (rule->kind == RULE_GARBAGE) {
        g->pattern = rule->argument;
        g->garbage = seed_of(name, call);
        return SPOILT;
    }
    if (rule->argument == GPU_IS_LOST || rule->argument == RESET_REQUIRED) g->lost = rule->argument;
    return rule->argument;
}

int enter(Gpu *g, const char *function)
{
    int code = OK;
    const Rule *rule;
    long call;
    if (!initialized) return UNINITIALIZED;
    if (g < gpus || g >= gpus + gpu_count) code = mig_answers(g, function);
    if (code) return code;
    pthread_mutex_lock(&lock);
    g->calls++;
    call = count(function, g->index);
    rule = met(function, g->index, call, g->calls);
    if (g->lost_after >= 0 && g->calls > g->lost_after) g->lost = GPU_IS_LOST;
    if (g->hang_after >= 0 && g->calls > g->hang_after) g->hang = 1;
    if (rule && rule->kind == RULE_HANG) {
        g->hang = 1;
        rule = NULL;
    }
    while (g->hang) {
        g->waiting = 1;
        pthread_cond_broadcast(&hanging);
        pthread_cond_wait(&released, &lock);
    }
    g->waiting = 0;
    if (g->lost) {
        g->calls_after_lost++;
        code = g->lost;
    } else {
        code = outcome(g, rule, function, call);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

int fault_of(Gpu *g, const char *name)
{
    int code;
    long call;
    pthread_mutex_lock(&lock);
    call = count(name, g->index);
    code = outcome(g, met(name, g->index, call, 0), name, call);
    pthread_mutex_unlock(&lock);
    return code;
}

void spoil(Gpu *g, void *to, size_t size)
{
    unsigned char *bytes = to;
    for (size_t i = 0; bytes && i < size; i++) {
        g->garbage = g->garbage * 6364136223846793005ull + 1442695040888963407ull;
        bytes[i] = (unsigned char)(g->pattern == PATTERN_RANDOM ? g->garbage >> 56 : (unsigned)g->pattern);
    }
}

/* ---- the library as a whole ------------------------------------------------------------------ */

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    pthread_mutex_lock(&starting);
    if (!initialized) configure();
    if (init_code == OK) initialized++;
    pthread_mutex_unlock(&starting);
    return init_code;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void)
{
    int code = UNINITIALIZED;
    pthread_mutex_lock(&starting);
    if (initialized) code = OK;
    if (initialized && !--initialized) events_end();
    pthread_mutex_unlock(&starting);
    return code;
}
const char *nvmlErrorString(int code) { (void)code; return "an error of the fake NVML"; }

int copy(char *to, unsigned room, const char *text)
{
    if (strlen(text) + 1 > room) return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return OK;
}

int nvmlSystemGetDriverVersion(char *to, unsigned room) { return copy(to, room, driver); }
int nvmlSystemGetNVMLVersion(char *to, unsigned room) { return copy(to, room, "13.580.65"); }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return OK; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; return OK; }
int nvmlDeviceGetCount_v2(unsigned *to) { *to = (unsigned)gpu_count; return initialized ? OK : UNINITIALIZED; }
int nvmlDeviceGetName(Gpu *g, char *to, unsigned room)
{
    char name[160];
    ENTER_BYTES(g, to, room);
    snprintf(name, sizeof name, mig_profile(g) ? "%s MIG %s" : "%s", device_name, mig_profile(g));
    return copy(to, room, name);
}

/* ---- for tests that load this library into their own process ---------------------------------- */

void fake_set_time(double seconds) { fixed_time = seconds; }
long fake_calls(const char *function, int gpu)
{
    for (int i = 0; i < counted_count; i++)
        if (!strcmp(counted[i].function, function)) return counted[i].calls[gpu];
    return 0;
}
/* The name of the nth function, field value or GPM metric that was asked for since nvmlInit; NULL after the last. */
const char *fake_function(int n) { return n < counted_count ? counted[n].function : NULL; }
long fake_calls_after_lost(int gpu) { return gpus[gpu].calls_after_lost; }
void fake_lose(int gpu) { gpus[gpu].lost = GPU_IS_LOST; }
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
    for (int i = 0; i < rule_count; i++)
        if (rules[i].kind == RULE_HANG && (rules[i].gpu < 0 || rules[i].gpu == gpu)) rules[i].kind = RULE_OFF;
    pthread_cond_broadcast(&released);
    pthread_mutex_unlock(&lock);
}
/* As after the end of the process that used the library: whoever is still in a call comes back. */
void fake_end(void)
{
    pthread_mutex_lock(&starting);
    initialized = 0;
    pthread_mutex_unlock(&starting);
    for (int i = 0; i < MAX_GPUS; i++) fake_release(i);
    events_end();
}
