"""Calls in which the host waits for a GPU.

While a thread waits it launches nothing, so the GPU's queue runs empty, and the GPU stands still until launching is
ahead of it again. How long, a replay without these calls tells (:mod:`gputop.analysis.what_if.replay`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gputop.analysis.gpu.device_time import GpuTimeline
from gputop.analysis.steps.model import Steps
from gputop.analysis.what_if.cure import Calls
from gputop.analysis.what_if.dependencies import HELD_NS, Flags
from gputop.trace.intervals import EMPTY, Spans
from gputop.trace.lookups import by_line, host_rows
from gputop.trace.model import I64, Kind, MemoryKind, Trace

SYNCHRONIZE = r"(cu|cuda|hip)(Stream|Event|Device|Thread|Ctx)Synchronize"
_FREES = r"(?:cuda|hip)Free(?:Array|Host)?(?:_v\d+)?$|(?:cu|hip)MemFree(?:Host)?(?:_v\d+)?$"
_LEFT_OUT = -2
_CLOCK_ERROR_NS = 100_000  # between host and GPU; a wait was seen to return 5 µs before its copy ended
_NEAR_STEP_NS = 100_000  # what marks a step may be an event somewhat after its first launch


class HostWaits(NamedTuple):
    """Calls that return when work of a GPU is done: their threads, and when they run; any order. ``copy`` is the row of
    the copy that is waited for, -1 for a synchronization without one."""

    line: I64
    start_ns: I64
    end_ns: I64
    copy: I64

    @property
    def calls(self) -> Calls:
        return Calls(self.line, self.start_ns, self.end_ns)

    def chosen(self, rows: I64) -> HostWaits:
        keep = np.isin(self.copy, rows)
        return HostWaits(*(column[keep] for column in self))


def waits_for_copy(call_ns: I64, call_end_ns: I64, copy_ns: I64, copy_end_ns: I64) -> Flags:
    """Mask of the calls, by begin and end, that last until their copy has ended, or until the driver has taken it. The
    driver takes the last part of a copy into its own memory, and the call returns while the GPU still moves it: 4 to
    180 µs before the end in real traces of copies of 0.5 to 40 ms. An asynchronous call returns when the copy begins or
    before, and does not see half of it. Calls that are no longer than launches tell that by their end alone."""
    seen = np.minimum(call_end_ns, copy_end_ns) - np.maximum(call_ns, copy_ns)
    least = np.where(call_end_ns - call_ns >= HELD_NS, seen, (copy_end_ns - copy_ns) // 10)
    return copy_end_ns - call_end_ns <= np.maximum(least, 0)


def host_waits(trace: Trace, staged_bytes: float) -> HostWaits:
    """All such calls whose thread launches work. A copy with the host is waited for where its call lasts until it ends,
    or where the thread synchronizes next. Copies of more than ``staged_bytes`` with pageable memory are left out, they
    wait by nature, and so are synchronizations for them."""
    device, host = trace.device, trace.host
    copies = np.flatnonzero(((device.kind == Kind.H2D) | (device.kind == Kind.D2H)) & (device.launch_ns >= 0))
    pageable = (device.src[copies] == MemoryKind.PAGEABLE) | (device.dst[copies] == MemoryKind.PAGEABLE)
    waits_by_nature = pageable & (device.bytes[copies] > staged_bytes)
    held = copies[~waits_by_nature & waits_for_copy(*(column[copies] for column in (
        device.launch_ns, device.launch_end_ns, device.start_ns, device.end_ns)))]
    syncs = host_rows(trace, SYNCHRONIZE)
    copy = _copies_of(trace, syncs, copies)
    copy[np.isin(copy, copies[waits_by_nature])] = _LEFT_OUT
    syncs, copy = syncs[copy != _LEFT_OUT], copy[copy != _LEFT_OUT]
    line = np.concatenate((device.launch_line[held], host.line[syncs])).astype(np.int64)
    end_ns = np.concatenate((device.launch_end_ns[held], host.end_ns[syncs]))
    keep = ~waits_again(trace, line, end_ns)
    return HostWaits(line[keep], np.concatenate((device.launch_ns[held], host.start_ns[syncs]))[keep], end_ns[keep],
                     np.concatenate((held, copy))[keep])


def waits_again(trace: Trace, line: I64, end_ns: I64) -> Flags:
    """Mask of the calls after which their thread frees memory before it launches a kernel: that waits, too."""
    device, host = trace.device, trace.host
    frees, out = host_rows(trace, _FREES), np.zeros(len(line), bool)
    if not len(frees):
        return out
    kernels = np.flatnonzero((device.kind <= Kind.COLLECTIVE) & (device.launch_ns >= 0))
    for thread in np.unique(line).tolist():
        sorted_ns = (np.sort(begin_ns[of == thread]) for begin_ns, of in (
            (host.start_ns[frees], host.line[frees]), (device.launch_ns[kernels], device.launch_line[kernels])))
        free, launch = (np.append(begin_ns, np.iinfo(np.int64).max)[np.searchsorted(begin_ns, end_ns[line == thread])]
                        for begin_ns in sorted_ns)
        out[line == thread] = free < launch
    return out


def _copies_of(trace: Trace, syncs: I64, copies: I64) -> I64:
    """Row of the copy that each synchronization waits for: the longest of those that are the last work that its thread
    launched before. -1 where that is something else, ``_LEFT_OUT`` where the thread launches nothing at all."""
    device, host = trace.device, trace.host
    is_copy = np.zeros(len(device), bool)
    is_copy[copies] = True
    out = np.full(len(syncs), _LEFT_OUT, np.int64)
    for thread, mine in by_line(host.line[syncs]).items():
        rows = np.flatnonzero((device.launch_line == thread) & (device.launch_ns >= 0))
        if not len(rows):
            continue
        rows = rows[np.argsort(device.launch_ns[rows], kind="stable")]
        begin, end = host.start_ns[syncs[mine]], host.end_ns[syncs[mine]]
        last_launch = np.searchsorted(device.launch_ns[rows], begin, side="right") - 1
        last = rows[np.maximum(last_launch, 0)]
        waited = (last_launch >= 0) & is_copy[last] & (device.end_ns[last] <= end + _CLOCK_ERROR_NS)
        # Copies in a row, with no other work and no wait between two of them.
        run = np.cumsum(~is_copy[rows]) + np.searchsorted(np.sort(begin[waited]), device.launch_ns[rows])
        by_length = np.lexsort((device.end_ns[rows] - device.start_ns[rows], run))
        longest = rows[by_length[np.searchsorted(run[by_length], run[np.maximum(last_launch, 0)], side="right") - 1]]
        out[mine] = np.where(waited, np.where(is_copy[longest], longest, last), -1)
    return out


def before_steps(timeline: GpuTimeline, steps: Steps | None) -> Spans:
    """Idle gaps of the GPU that end in the first kernel of a step: there the host has more to do than to wait. None
    where the steps rest on kernels: one such gap is then wherever the GPU is idle longest."""
    if steps is None or not steps.call_ends_ns:
        return EMPTY
    gaps = timeline.gaps
    kernels = timeline.start_ns[timeline.kernel_places]
    after = np.append(kernels, timeline.window_ns[1])[np.searchsorted(kernels, gaps.end)]
    edges = np.sort(steps.edges_ns.ravel())
    chosen = np.searchsorted(edges, gaps.start, side="right") != np.searchsorted(
        edges, after + _NEAR_STEP_NS, side="right")
    return Spans(gaps.start[chosen], gaps.end[chosen])
