"""Live rules about memory: of a GPU, nearly used up by several processes, reserved at the start, or held by nobody who
is listed; and of the host, nearly used up."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from gputop.advice.fix_code import code, code_for
from gputop.advice.live.jobs import name_of
from gputop.advice.live.node_view import NodeView, gpus_text
from gputop.advice.registry import limit, source
from gputop.advice.verdict import NO_TIME, Explanation, Missing, Verdict
from gputop.core.samples import ENDED, ZOMBIE, GpuSample
from gputop.text.units import bytes_, percent

# What makes memory stay in use that the job may not need, and how to see what it needs.
_PEAK = "Capture a trace: the allocator's peak shows whether a larger batch fits. "
_TENSORFLOW = (f"{_PEAK}TF_FORCE_GPU_ALLOW_GROWTH=true makes TensorFlow take only the memory it needs.",
               "TensorFlow GPU guide: memory is mapped at startup")
_RESERVES = {
    "": ("TensorFlow reserves nearly all memory at startup (JAX: 75%)", *_TENSORFLOW),
    "tensorflow": ("TensorFlow reserves nearly all memory at startup", *_TENSORFLOW),
    "jax": (
        "JAX reserves 75% of the memory at startup, or the share set by XLA_PYTHON_CLIENT_MEM_FRACTION",
        f"{_PEAK}XLA_PYTHON_CLIENT_PREALLOCATE=false makes JAX take only the memory it needs.",
        "JAX: GPU memory allocation"),
    "pytorch": (
        "PyTorch keeps freed memory for its next tensors",
        "Print the allocator's peak, which shows whether a larger batch fits.",
        "PyTorch, CUDA semantics: the caching allocator"),
}


class _Memory(Struct, frozen=True):
    """The memory of a GPU over a window: mean, capacity, and from the smallest to the largest reading."""

    used: float
    total: float
    span: float


def _memory(view: NodeView, gpus: Iterable[GpuSample], window_s: float) -> Iterable[tuple[GpuSample, _Memory]]:
    """The GPUs of which it is known."""
    for gpu in gpus:
        total, used = gpu["memory_total_bytes"].value, view.mean(gpu, "memory_used_bytes", window_s)
        if used is not None and total:
            yield gpu, _Memory(used, total, view.span(gpu, "memory_used_bytes", window_s) or 0.0)


def _held(view: NodeView, window_s: float) -> list[tuple[GpuSample, _Memory]]:
    """GPUs that processes compute on."""
    return [*_memory(view, {g.info.index: g for p in view.processes for g in view.compute_gpus(p)}.values(), window_s)]


class UnlistedMemory(Verdict, frozen=True, kw_only=True):
    window_s: float
    gpu: int  # where most is held
    used_bytes: float
    ended: tuple[int, ...]  # PIDs that the driver lists there although the processes have ended


def judge_unlisted_memory(view: NodeView) -> UnlistedMemory | Missing | None:
    """Memory of idle GPUs is in use, but no process that is alive is listed there."""
    rule, window_s = "unlisted_memory", view.seconds("unused_gpu.window_s")
    alone = {gpu.info.index for gpu in view.without_process(window_s)[0]}
    held: tuple[dict[int, float], dict[int, float]] = {}, {}  # by processes that have ended, and by nobody
    pids: set[int] = set()
    judged = False
    for gpu, memory in _memory(view, view.whole_gpus, window_s):
        activity, index = view.activity(gpu, window_s), gpu.info.index
        if activity is None:
            continue
        judged = True
        here = [p for p in view.sample.processes if index in p.gpus]
        nobody = all(p.reason in (ENDED, ZOMBIE) for p in here) if here else index in alone and not gpu.processes
        idle = activity[1] <= view.limit("unused_gpu", "", index)
        if nobody and idle and memory.used >= limit(f"{rule}.ratio") * memory.total:
            held[not here][index] = memory.used
            pids |= {p.pid for p in here}
    gpus = held[0] or held[1]
    if not gpus:
        return None if judged else Missing(f"{window_s:.0f} s of activity and of used and total memory of a GPU")
    most = max(gpus, key=gpus.__getitem__)
    return UnlistedMemory(gpus=tuple(sorted(gpus)), severity="low", window_s=window_s, gpu=most,
                          used_bytes=gpus[most], ended=tuple(sorted(pids)))


def describe_unlisted_memory(v: UnlistedMemory) -> Explanation:
    used, several = f"{bytes_(v.used_bytes)} of memory", len(v.ended) > 1
    who = "The process is in another container, or it has ended without freeing its memory."
    held = "in use, but no process is listed"
    if v.ended:
        who = (f"The driver lists process{'es' * several} {', '.join(map(str, v.ended))}, which "
               f"{'have' if several else 'has'} ended without freeing the memory.")
        held = f"held by {'processes that have' if several else 'a process that has'} ended"
    return Explanation(
        title=f"{gpus_text(v.gpus)}: {'up to ' * (len(v.gpus) > 1)}{used} {held}",
        why=f"GPU {v.gpu} did nothing over the last {v.window_s:.0f} s, but {used} is in use there. {who}",
        evidence={"window_s": v.window_s, "used_bytes": v.used_bytes, "held_gpus_count": float(len(v.gpus))},
        brief=who, action="On the host, find the process that has the device open. If there is none, reset the GPU.",
        snippet=f"sudo fuser -v /dev/nvidia{v.gpu}", gain="none: a fix frees the memory for other jobs",
        source="NVML process list and memory; " + source("unlisted_memory.ratio"))


class HostMemoryLow(Verdict, frozen=True, kw_only=True):
    used_bytes: float
    total_bytes: float
    largest: str  # process of all; empty: not known
    largest_bytes: float


def judge_host_memory_low(view: NodeView) -> HostMemoryLow | Missing | None:
    """Next to no memory of the host is available, page cache that can be dropped included."""
    rule, host = "host_memory_low", view.sample.host
    used, total = host["memory_used_bytes"].value, host["memory_total_bytes"].value
    if used is None or not total:
        return Missing(f"memory of the host ({host['memory_used_bytes'].reason or 'its total is unknown'})")
    most = min(total, limit(f"{rule}.free_bytes") / limit(f"{rule}.free_enter"))
    if total - used > view.level(rule, f"{rule}.free_", "medium") * most:
        return None
    sizes = {name_of(p): size for p in host.top_processes if (size := p.rss_bytes.value)}
    largest = max(sizes, key=sizes.__getitem__, default="")
    return HostMemoryLow(gpus=(), severity="medium", used_bytes=used, total_bytes=total, largest=largest,
                         largest_bytes=sizes.get(largest, 0.0))


def describe_host_memory_low(v: HostMemoryLow) -> Explanation:
    largest = f" The largest process is {v.largest} with {bytes_(v.largest_bytes)}." if v.largest else ""
    used = f"{bytes_(v.used_bytes)} of {bytes_(v.total_bytes)}"
    return Explanation(
        title=f"Host memory is nearly used up: {used}",
        why=f"{used} of the host's memory is in use, not counting page cache that can be dropped. When nothing is "
            f"left, the kernel swaps or terminates a process, often the largest one.{largest}",
        evidence={"host_memory_used_bytes": v.used_bytes, "host_memory_total_bytes": v.total_bytes},
        brief=f"When nothing is left, the kernel terminates a process.{largest}",
        action="Find what grows: caches and copies of the dataset in each worker, checkpoints in /dev/shm, and other "
               "jobs. Fewer workers or less prefetching need less memory.",
        snippet="ps -eo pid,user,rss,args --sort=-rss | head", gain=NO_TIME,
        source=source("host_memory_low.free_enter"))


class MemoryPressure(Verdict, frozen=True, kw_only=True):
    """``gpu`` is the tightest."""

    window_s: float
    gpu: int
    free: float  # share of all memory
    processes: int
    span_bytes: float  # between the largest and the smallest reading


def judge_memory_pressure(view: NodeView) -> MemoryPressure | Missing | None:
    """Processes that share a GPU have nearly used up its memory, and it still moves.

    That is all that live figures can show: what one process holds may be its allocator's reserve.
    """
    rule, window_s = "memory_pressure", view.seconds("memory_pressure.window_s")
    held = _held(view, window_s)
    tight: dict[int, tuple[float, int, float]] = {}
    reserves = []
    for gpu, memory in held:
        index, processes = gpu.info.index, sum(gpu.info.index in p.gpus for p in view.processes)
        free = memory.total - memory.used - (gpu["memory_reserved_bytes"].value or 0.0)
        moves = index in view.shown(rule) or memory.span >= limit("memory_pressure.moved") * memory.total
        if processes > 1 and moves and free <= view.limit(rule, "free_", index) * memory.total:
            tight[index] = max(0.0, free) / memory.total, processes, memory.span
        elif memory.used >= limit("memory_pressure.full") * memory.total:
            reserves.append(gpu)
    if tight:
        gpu_index, (free, processes, span) = min(tight.items(), key=lambda one: one[1])
        return MemoryPressure(gpus=tuple(sorted(tight)), severity="medium", window_s=window_s, gpu=gpu_index, free=free,
                              processes=processes, span_bytes=span)
    if reserves:
        return Missing(f"the allocator's peak on {gpus_text(reserves)}, because memory in use may merely be reserved; "
                       "a capture shows the peak")
    return None if held else Missing(f"{window_s:.0f} s of used and total memory of a GPU in use")


def describe_memory_pressure(v: MemoryPressure) -> Explanation:
    return Explanation(
        title=f"{gpus_text(v.gpus)}: processes compete for the remaining memory",
        why=f"{v.processes} processes hold GPU {v.gpu}. Only {percent(v.free)} of the GPU memory was free "
            f"over the last {v.window_s:.0f} s, while the memory in use kept changing. The next process that needs "
            "more memory will fail with an out-of-memory error.",
        evidence={"window_s": v.window_s, "free_of_total_ratio": v.free,
                  "processes_count": float(v.processes), "memory_span_bytes": v.span_bytes},
        brief=f"{v.processes} processes share GPU {v.gpu}, with only {percent(v.free)} of its memory free.",
        action="Give each process its own GPU, or a memory limit that leaves room for the others.",
        snippet=code_for(v.framework, "memory_pressure", "share-"),
        gain=NO_TIME,
        source="memory use and processes from NVML; " + source("memory_pressure.free_enter"))


class MemoryPreallocated(Verdict, frozen=True, kw_only=True):
    window_s: float
    used: float  # share of all memory, of the GPU with most


def judge_memory_preallocated(view: NodeView) -> MemoryPreallocated | Missing | None:
    """Nearly all memory is held and does not move: reserved at start, whatever the job needs."""
    rule, window_s = "memory_preallocated", view.seconds("window_s")
    pressed, held = view.gpus_left_out(rule), _held(view, window_s)
    reserved = {index: memory.used / memory.total for gpu, memory in held if (index := gpu.info.index) not in pressed
                and memory.span <= limit("memory_preallocated.flat") * memory.total
                and memory.used >= view.limit(rule, "", index) * memory.total}
    if not held:
        return Missing(f"{window_s:.0f} s of used and total memory of a GPU in use")
    if not reserved:
        return None
    return MemoryPreallocated(gpus=tuple(sorted(reserved)), severity="low", window_s=window_s,
                              used=max(reserved.values()))


def describe_memory_preallocated(v: MemoryPreallocated) -> Explanation:
    reserves, action, guide = _RESERVES.get(v.framework, _RESERVES[""])
    return Explanation(
        title=f"{gpus_text(v.gpus)}: memory in use does not show what the job needs",
        why=f"{percent(v.used)} of the memory is reserved, and this has not changed for {v.window_s:.0f} s. "
            f"{reserves}, so this value does not show how much memory the job really needs.",
        evidence={"window_s": v.window_s, "memory_used_of_total_ratio": v.used},
        action=action, snippet=code("memory_preallocated", v.framework, "tensorflow"),
        gain="none: nothing is wrong, and this finding only explains a value",
        source=f"{guide}; gputop's own thresholds")
