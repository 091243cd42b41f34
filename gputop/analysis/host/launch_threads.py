"""The host threads that launch work to GPUs, and what contends with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from gputop.analysis.gpu.device_time import GpuTimeline, gpu_number
from gputop.analysis.host.host_ops import OP, input_executors
from gputop.analysis.results import LaunchThread, LaunchThreads
from gputop.trace.intervals import EMPTY, Spans, merge, overlap, subtract, uncovered, union
from gputop.trace.lookups import by_line, host_stat, launching_lines, line_by_line, name_mask, rows_of
from gputop.trace.model import I64, Trace
from gputop.trace.threads import GLOBAL_POOL, GPU_PRIVATE, GPU_SHARED, GRAPH_EXECUTOR, INPUT, MAIN, lines_of


def launch_threads(trace: Trace, gpu_timelines: Sequence[GpuTimeline]) -> LaunchThreads | None:
    """Launch threads and contention; None where no launch, or no thread, is in the trace."""
    device = trace.device
    launched = rows_of(device.launch_line >= 0)
    lines = launching_lines(trace).tolist()
    if not lines or trace.lines[lines[0]].name.startswith(GRAPH_EXECUTOR):
        return None
    calls, by_gpu = dict[int, Spans](), dict[int, dict[int, int]]()
    for line, indices in line_by_line(device.launch_line[launched]):
        of_line = indices if isinstance(launched, slice) else launched[indices]
        calls[line] = union(device.launch_ns[of_line], device.launch_end_ns[of_line])
        counts = np.bincount(device.gpu[of_line]).tolist()
        by_gpu[line] = dict(sorted((gpu_number(trace, gpu), n) for gpu, n in enumerate(counts) if n))
    launching = merge(*calls.values())
    of_input, shared = lines_of(trace, INPUT), input_on_shared_threads(trace)
    busy, other, at_work = dict[int, int](), dict[int, int](), [*shared.values()]
    for line, work in work_by_line(trace):
        busy[line], other[line] = overlap(launching, work), uncovered(work, calls.get(line, EMPTY))
        at_work += [work] if of_input[line] else []
    threads = [LaunchThread(
        name=trace.lines[line].name, pool=_pool(trace.lines[line].name), launches=by_gpu[line],
        launch_s=of_line.total / 1e9, other_s=other.get(line, 0) / 1e9) for line, of_line in calls.items()]
    threads.sort(key=lambda t: (-sum(t.launches.values()), t.name))
    per_gpu = Counter(gpu for thread in threads for gpu in thread.launches)
    late = merge(EMPTY, *(timeline.late for timeline in gpu_timelines))
    windows = [timeline.window_ns for timeline in gpu_timelines]
    on_time = subtract(union([a for a, _ in windows], [b for _, b in windows]), late)
    input_work = merge(*at_work) if of_input.any() and at_work else EMPTY if of_input.any() else None
    waits = lines_of(trace, MAIN)  # a thread of Python's shows its call while it waits, so it counts where it launches
    waits[launching_lines(trace)] = False
    per = launching.total
    return LaunchThreads(
        mode=_mode(threads), threads=tuple(threads), threads_per_gpu=dict(sorted(per_gpu.items())),
        input_busy_late=_share(input_work, late), input_busy=_share(input_work, on_time),
        late_s=late.total / 1e9 if gpu_timelines else None,
        busy_threads_at_launch=sum(n for line, n in busy.items() if not waits[line]) / per if per else None,
        input_threads_at_launch=((sum(n for line, n in busy.items() if of_input[line])
                                  + sum(overlap(launching, spans) for spans in shared.values())) / per
                                 if per and of_input.any() else None),
        cpus=cpu_budget(trace))


def work_by_line(trace: Trace) -> Iterator[tuple[int, Spans]]:
    """Spans in which each host thread has an event, one thread after the other; of tf.data's threads only the events
    that are work count."""
    host = trace.host
    start, end, line = host.start_ns, host.end_ns, host.line
    of_input = lines_of(trace, INPUT)
    if of_input.any() and len(host):
        # Its Iterator:: events last while it waits for the stages below as well.
        is_work = name_mask(trace, OP) | name_mask(trace, r"ExecutorState::Process$|InstantiatedCapturedFunction::Run")
        rows = np.flatnonzero(is_work.take(host.name) | ~of_input.take(host.line))
        start, end, line = start[rows], end[rows], line[rows]
    return ((number, union(start[indices], end[indices])) for number, indices in line_by_line(line))


def input_on_shared_threads(trace: Trace) -> dict[int, Spans]:
    """Spans in which each thread that is not tf.data's own runs a function of tf.data."""
    host, of_input = trace.host, lines_of(trace, INPUT)
    rows = input_executors(trace)
    rows = rows[~of_input[host.line[rows]]] if len(rows) else rows
    return {line: union(host.start_ns[rows[indices]], host.end_ns[rows[indices]])
            for line, indices in by_line(host.line[rows]).items()}


def _pool(name: str) -> str:
    for pool, pattern in (("gpu_private", GPU_PRIVATE), ("gpu_shared", GPU_SHARED), ("global", GLOBAL_POOL)):
        if pattern.match(name):
            return pool
    return "python" if name.startswith("python") else "other"


def _mode(threads: Sequence[LaunchThread]) -> str:
    """TF_GPU_THREAD_MODE by the pool of TensorFlow's that launches most; unknown where none of them does."""
    counts = Counter[str]()
    for thread in threads:
        if thread.pool in ("gpu_private", "gpu_shared", "global"):
            counts[thread.pool] += sum(thread.launches.values())
    return max(sorted(counts), key=lambda pool: counts[pool]) if counts else "unknown"


def _share(work: Spans | None, of: Spans) -> float | None:
    return None if work is None or not of.total else overlap(work, of) / of.total


def cpu_budget(trace: Trace) -> int | None:
    """tf.data's CPU budget: the CPUs that the process may run on, unless the job set it otherwise."""
    budgets: I64 = host_stat(trace.host, "cpu_budget")[1]
    return int(budgets.max()) if len(budgets) and budgets.max() > 0 else None
