"""Times that cannot be right: of a GPU against the other GPUs, and jumps of the clock.

Nothing is corrected here. The notes say which figures rest on such times.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gputop.core.findings import TraceNote
from gputop.text.units import seconds
from gputop.trace.gpu_clocks import MIN_EVENTS, OFF_NS, UNRELIABLE
from gputop.trace.model import Kind, Trace

_JUMP_NS = 60 * 10**9  # a pause longer than this, and than all else in the trace, is no pause of a training job
_OFFSET_TOLERANCE = 0.2  # by which the offsets of single collectives may differ


def clock_notes(trace: Trace) -> list[TraceNote]:
    return [TraceNote("clock", message) for message in (*_launches(trace), *_collectives(trace), *_jumps(trace))]


def _launches(trace: Trace) -> Iterator[str]:
    """GPUs whose kernels begin long after the calls that launched them, although nothing held them up."""
    device = trace.device
    launched = np.flatnonzero((device.launch_ns >= 0) & (device.kind <= Kind.COLLECTIVE))
    gpu_of = device.gpu[launched]
    shortest: dict[int, int] = {}
    for gpu in range(len(trace.gpus)):
        rows = launched[np.flatnonzero(gpu_of == gpu)]
        # Launched by a call before which everything earlier on that GPU had ended; events are in the order of starts.
        free = np.append(True, device.launch_ns[rows[1:]] > np.maximum.accumulate(device.end_ns[rows])[:-1])
        if len(rows) and free.sum() >= MIN_EVENTS:
            chosen = rows[free]
            shortest[gpu] = int(np.percentile(device.start_ns[chosen] - device.launch_ns[chosen], 5))
    usual = min(shortest.values(), default=0)
    for gpu, least in shortest.items():
        if len(shortest) > 1 and least > usual + OFF_NS:
            yield (f"Kernels of GPU {trace.gpus[gpu].ordinal} begin at least {seconds(least / 1e9)} after their "
                   f"launches even if the GPU is idle, but only {seconds(usual / 1e9)} on another GPU, so its clock is "
                   f"probably {seconds((least - usual) / 1e9)} ahead. {UNRELIABLE}")


def _collectives(trace: Trace) -> Iterator[str]:
    """The GPU of a host whose collectives all end by the same time before or after those of the others."""
    device = trace.device
    for host in trace.hosts or [""]:
        ends = []
        for gpu, about in enumerate(trace.gpus):
            rows = np.flatnonzero((device.gpu == gpu) & (device.kind == Kind.COLLECTIVE))
            if about.host == host and len(rows):
                ends.append((gpu, np.sort(device.end_ns[rows])))
        if len(ends) < 3 or len({len(end) for _, end in ends}) > 1 or len(ends[0][1]) < MIN_EVENTS:
            continue
        table = np.stack([end for _, end in ends])
        apart = table - np.median(table, axis=0)
        for (gpu, _), offsets in zip(ends, apart, strict=True):
            off = float(np.median(offsets))
            if abs(off) > OFF_NS and np.percentile(np.abs(offsets - off), 90) < _OFFSET_TOLERANCE * abs(off):
                yield (f"The collectives of GPU {trace.gpus[gpu].ordinal} all end {seconds(abs(off) / 1e9)} "
                       f"{'after' if off > 0 else 'before'} those of the other GPUs. A collective ends on all GPUs "
                       "together, so the clock of this GPU is off by that time. Waiting in collectives and the order "
                       "of the GPUs are not reliable.")


def _jumps(trace: Trace) -> Iterator[str]:
    """A time without any event that is longer than all the rest of the trace."""
    begin, end = trace.window_ns
    if end - begin < _JUMP_NS:
        return
    starts = np.concatenate((trace.device.start_ns, trace.host.start_ns))
    ends = np.concatenate((trace.device.end_ns, trace.host.end_ns))
    order = np.argsort(starts, kind="stable")
    pause = starts[order][1:] - np.maximum.accumulate(ends[order])[:-1]
    longest = int(pause.max(initial=0))
    if longest > _JUMP_NS and longest > (end - begin) / 2:
        after = int(np.argmax(pause)) + 1
        yield (f"The trace has no GPU or host events for {seconds(longest / 1e9)}, and all its events are in the other "
               f"{seconds((end - begin - longest) / 1e9)} ({after:,} before and {len(order) - after:,} after the "
               "pause). The clock jumped, so shares of the recording are not reliable.")
