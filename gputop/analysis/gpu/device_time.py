"""Time of each GPU: busy, compute, collectives, copies, and the cause of idle time.

All by unions on one timeline per GPU, never by sums over streams. The window of a GPU is
from its first device event to its last, or the recording where that is a moment of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
from msgspec import Struct

from gputop.analysis.gpu.copies import copies, pageable_s
from gputop.analysis.results import GpuUse
from gputop.analysis.steps.membership import in_steps
from gputop.analysis.steps.model import Steps
from gputop.trace.intervals import EMPTY, Spans, coverage, intersect, joined, merge, subtract, uncovered, union
from gputop.trace.kernel_names import UNKNOWN, classify
from gputop.trace.lookups import Mask, on_gpu, rows_of
from gputop.trace.model import I64, U8, Kind, Trace
from gputop.trace.parallel import pool

_MOMENT = 0.1  # share of the recording: gputop's own figure
# A stretch of idle time this long in which one other GPU is busy for this share is spent waiting for that GPU.
# Below, gaps between launches coincide with other GPUs' kernels by chance. gputop's own figures.
_WAIT_NS, _WAIT_SHARE = 1_000_000, 0.8
# What an idle GPU starts later than this after its launching call is not held up by its host: another program's work
# runs, or the driver hands launches over in batches, as on Windows (HTA's cut-off of launch delays).
_STARTS_NS = 100_000
NO_LAUNCH = np.iinfo(np.int64).min  # the launch of a device event is not known


class GpuTimeline(Struct, frozen=True):
    """One GPU's device events: where they lie in the trace, and unions of them by what they are.

    ``start_ns``, ``end_ns`` and ``kind`` are those of ``events``. ``kernel_places`` are the places among these of
    compute kernels and collectives, ``computing_places`` those of the former. ``other`` is what the GPU does on its own
    account: copies within it and memsets. ``gaps`` are the idle intervals between events, ``after`` the rows of the
    events that end them: a slice where each event but the first ends one. ``late`` is the idle time that the host could
    have filled: the ``gaps`` whose launch began in them, up to the end of its call where the start is long after that,
    and where the call began before the gap, but was not done yet, the gap up to its end.
    """

    gpu: int  # index into Trace.gpus
    events: slice  # rows of Trace.device
    start_ns: I64
    end_ns: I64
    kind: U8
    compute: Spans
    collectives: Spans
    h2d: Spans
    d2h: Spans
    p2p: Spans
    other: Spans
    busy: Spans
    gaps: Spans
    after: I64 | slice
    late: Spans

    @property
    def window_ns(self) -> tuple[int, int]:
        return (int(self.busy.start[0]), int(self.busy.end[-1])) if len(self.busy.start) else (0, 0)

    @property
    def rows(self) -> I64:
        return np.arange(self.events.start, self.events.stop)

    @property
    def resuming(self) -> I64:
        """Rows of the events that end the gaps."""
        return self.rows[1:] if isinstance(self.after, slice) else self.after

    @property
    def resumes(self) -> I64:
        """Place of the first event that begins at the end of each gap."""
        each = len(self.gaps.end) == len(self.start_ns) - 1
        return np.arange(1, len(self.start_ns)) if each else np.searchsorted(self.start_ns, self.gaps.end)

    @property
    def kernel_places(self) -> I64:
        return np.flatnonzero(self.kind <= Kind.COLLECTIVE)

    @property
    def computing_places(self) -> I64:
        return np.flatnonzero(self.kind == Kind.COMPUTE)

    @property
    def computing(self) -> I64:
        return self.events.start + self.computing_places

    @property
    def copies(self) -> Spans:
        return merge(self.h2d, self.d2h, self.p2p, self.other)

    @property
    def load(self) -> Spans:
        """Spans in which it does anything but communicate; made when it is asked for, as there are many."""
        return merge(self.compute, self.h2d, self.d2h, self.other)

    def within(self, steps: Steps | None, places: I64) -> I64:
        """Places among these whose events begin within the steps; without steps, all."""
        return places if steps is None else places[rows_of(in_steps(self.start_ns[places], steps))]


def any_busy(trace: Trace, gpu_timelines: Iterable[GpuTimeline]) -> Spans:
    """Spans in which any of these GPUs is busy; found once for the same GPUs."""
    busy = [timeline.busy for timeline in gpu_timelines]
    key = any_busy, *map(id, busy)
    if key not in trace.found:
        trace.found[key] = busy, merge(EMPTY, *busy)  # the sets are kept, so that no other has the id of one
    spans: Spans = trace.found[key][1]
    return spans


def launching_to(trace: Trace, timeline: GpuTimeline) -> Mask:
    """Mask of the lines that launch to the GPU; shape (lines,)."""
    out, lines = np.zeros(len(trace.lines), bool), trace.device.launch_line[timeline.events]
    out[lines[lines >= 0]] = True
    return out


def timelines(trace: Trace) -> list[GpuTimeline]:
    """One for each GPU of the trace that ran anything, in the trace's order."""
    with pool(trace.event_count) as threads:
        by_gpu = threads.map(partial(_timeline, trace), range(len(trace.gpus)))
        return [timeline for timeline in by_gpu if timeline is not None]


def _timeline(trace: Trace, gpu: int) -> GpuTimeline | None:
    device = trace.device
    events = on_gpu(device, gpu)
    first, last = events.start, events.stop
    start, end, kind = device.start_ns[events], device.end_ns[events], device.kind[events]
    if not (end > start).any():
        return None
    count_by_kind = np.bincount(kind, minlength=len(Kind))

    def of(*kinds: Kind) -> Spans:
        if not count_by_kind[list(kinds)].any():
            return EMPTY
        chosen = np.flatnonzero(np.logical_or.reduce([kind == one for one in kinds]))
        return union(start[chosen], end[chosen])

    busy = union(start, end)
    gaps = Spans(busy.end[:-1], busy.start[1:])
    before: I64 | slice
    after: I64 | slice
    if len(busy.start) == len(start):  # a gap between each two events
        before, after = slice(first, last - 1), slice(first + 1, last)
    else:
        by_end = np.argsort(end, kind="stable")
        before = first + by_end[np.searchsorted(end[by_end], gaps.start, side="right") - 1]
        after = event_after(trace, np.arange(first, last), gaps)
    return GpuTimeline(
        gpu, events, start, end, kind,
        of(Kind.COMPUTE), of(Kind.COLLECTIVE), of(Kind.H2D), of(Kind.D2H), of(Kind.P2P),
        of(Kind.D2D, Kind.MEMSET, Kind.COPY_OTHER), busy,
        gaps, after, _late(trace, gaps, before, after))


def _late(trace: Trace, gaps: Spans, before: I64 | slice, after: I64 | slice) -> Spans:
    """See :class:`GpuTimeline`. ``before`` and ``after``: the events between which each gap lies."""
    device = trace.device
    launch, launched = device.launch_ns[after], device.launch_end_ns[after]
    until = np.where(gaps.end - launched <= _STARTS_NS, gaps.end, np.maximum(launched, gaps.start))
    until = np.where(launch > gaps.start, until, gaps.start)
    # The kernels of one launch (a CUDA graph's) follow each other as they depend, however long its call lasts.
    called = np.where(device.launch_ns[before] != launch, launched, gaps.start)
    until = np.maximum(until, np.minimum(called, gaps.end))
    chosen = np.flatnonzero((until > gaps.start) & (launch >= 0))
    return Spans(gaps.start[chosen], until[chosen])


def event_after(trace: Trace, rows: I64, gaps: Spans) -> I64:
    """First of a GPU's device events (``rows``) that begins at or after the end of each gap; -1: none. Of several that
    start at once the earliest launched counts: the GPU could have run that one."""
    device = trace.device
    start = device.start_ns[rows]
    if not (lasts := device.end_ns[rows] > start).all():
        rows, start = rows[lasts], start[lasts]
    if (start[1:] == start[:-1]).any():
        launch, unknown = device.launch_ns[rows], np.iinfo(np.int64).max
        rows = rows[np.lexsort((np.where(launch < 0, unknown, launch), start))]
    return np.append(rows, -1)[np.searchsorted(start, gaps.end)]


def gpu_use(trace: Trace, timeline: GpuTimeline, steps: Steps | None) -> GpuUse:
    (first, last), (begin, end) = timeline.window_ns, trace.window_ns
    # One kernel does not make a GPU busy: without steps what takes a moment of the recording is a part of all of it.
    window = end - begin if steps is None and last - first < _MOMENT * (end - begin) else last - first
    length = (timeline.end_ns - timeline.start_ns)[timeline.kernel_places]
    copied = timeline.copies
    by_type, tensor = kernel_types(trace, timeline)
    moves = timeline.rows[timeline.kind > Kind.COLLECTIVE]  # copies and memsets
    copies_s, copies_bytes, copies_count = copies(trace, moves)
    per_step = None
    if steps is not None:
        bounds = steps.edges_ns
        per_step = int(coverage(timeline.compute, bounds[:, 0], bounds[:, 1]).sum()) / steps.count / 1e9
    return GpuUse(
        gpu=gpu_number(trace, timeline.gpu),
        window_s=window / 1e9,
        busy=timeline.busy.total / window,
        compute=timeline.compute.total / window,
        collectives=timeline.collectives.total / window,
        collectives_exposed=uncovered(timeline.collectives, timeline.compute) / window,
        copies=copied.total / window,
        copies_exposed=uncovered(subtract(copied, timeline.compute), timeline.collectives) / window,
        idle_host_fault=_host_fault_share(trace, timeline),
        launch_delay_median_s=_launch_delay(trace, timeline),
        kernels=len(length),
        kernels_per_s=len(length) / (window / 1e9),
        kernel_median_s=float(np.median(length)) / 1e9 if len(length) else None,
        compute_s_per_step=per_step,
        copies_s=copies_s, copies_bytes=copies_bytes, copies_count=copies_count,
        copies_pageable_s=pageable_s(trace, moves),
        tensor_core_time=tensor, kernel_time_by_type=by_type)


def unused_gpu(trace: Trace, gpu: int) -> GpuUse:
    """A GPU of the trace on which nothing ran, over the window of those on which something did."""
    device = trace.device
    window = int(device.end_ns.max() - device.start_ns.min()) / 1e9
    return GpuUse(
        gpu=gpu_number(trace, gpu), window_s=window, busy=0.0, compute=0.0, collectives=0.0, collectives_exposed=0.0,
        copies=0.0, copies_exposed=0.0, idle_host_fault=None, launch_delay_median_s=None, kernels=0,
        kernels_per_s=0.0, kernel_median_s=None, compute_s_per_step=None)


def gpu_number(trace: Trace, gpu: int) -> int:
    """Number of a GPU in results: its ordinal, or its index in the trace where several ranks share ordinals."""
    unique = len({g.ordinal for g in trace.gpus}) == len(trace.gpus)
    return trace.gpus[gpu].ordinal if unique else gpu


def _host_fault_share(trace: Trace, timeline: GpuTimeline) -> float | None:
    """Share of the idle time whose next launch began after the idle did (HTA's rule); of the gaps with a known launch.
    None where there is no idle time, or where the launches of less than half of it are known."""
    gaps, launch = timeline.gaps, trace.device.launch_ns[timeline.after]
    length = gaps.end - gaps.start
    known_ns = int(length[launch >= 0].sum())
    if known_ns == 0 or known_ns * 2 < int(length.sum()):
        return None
    return int(length[(launch > gaps.start) & (launch >= 0)].sum()) / known_ns


def _launch_delay(trace: Trace, timeline: GpuTimeline) -> float | None:
    """Median time from the end of a kernel's launching call to its own start. None where no launch is known, or where
    the clocks of host and GPU differ by more than such a delay."""
    kernels = timeline.kernel_places
    delay = launch_delays_ns(trace, timeline.events.start + kernels, timeline.start_ns[kernels])
    delay = delay[delay != NO_LAUNCH]
    median = float(np.median(delay)) / 1e9 if len(delay) else None
    return median if median is not None and median >= 0 else None


def launch_delays_ns(trace: Trace, rows: I64, start_ns: I64) -> I64:
    """Time from the launching call of each of these device events to its start; ``NO_LAUNCH``: not known. It counts
    from the end of the call, and is 0 for what begins during the call: that waited for nothing. Below 0 is what begins
    before its call: the clocks of host and GPU differ."""
    device = trace.device
    called = device.launch_ns[rows]
    returned = np.maximum(called, device.launch_end_ns[rows])
    delay = np.where(start_ns < called, start_ns - called, np.maximum(start_ns - returned, 0))
    return np.where(called >= 0, delay, NO_LAUNCH)


def kernel_types(trace: Trace, timeline: GpuTimeline) -> tuple[dict[str, float] | None, float | None]:
    """Share of kernel time by number type, collectives apart, and the share on tensor cores. The latter is None where
    no kernel's name says anything either way."""
    computing = timeline.computing_places
    length = timeline.end_ns[computing] - timeline.start_ns[computing]
    total = int(length.sum())
    if total <= 0:
        return None, None
    index = trace.device.name[timeline.events][computing].astype(np.int64) + 1
    times = np.bincount(index, weights=length)
    names = np.flatnonzero(np.bincount(index))
    by_type: dict[str, float] = {}
    tensor, any_known = 0.0, False
    for name, time in zip(names.tolist(), times[names], strict=True):
        kernel = classify(trace.names[name - 1] if name else "")
        dtype = kernel.dtype or UNKNOWN
        by_type[dtype] = by_type.get(dtype, 0.0) + float(time) / total
        any_known = any_known or kernel.tensor_core is not None
        tensor += float(time) / total if kernel.tensor_core else 0.0
    return dict(sorted(by_type.items(), key=lambda item: -item[1])), tensor if any_known else None


def waits_for_another(timeline: GpuTimeline, others: list[GpuTimeline], edges: Spans = EMPTY) -> Spans:
    """Idle time of this GPU in which it waits for another GPU, not for launches.

    Counted are idle stretches of ``_WAIT_NS`` or more during which a single other GPU is busy for at least
    ``_WAIT_SHARE`` of the time, short pauses included: a GPU that itself waits for launches is busy for short moments
    only. A stretch that begins and ends in the middle of the other GPU's work does not count: a GPU that waits for
    another one stops when that one begins, or goes on when that one is done. ``edges`` are idle times of the GPU before
    its first event and after its last one.
    """
    near_ns = _WAIT_NS // 10
    gaps = merge(timeline.gaps, edges) if len(edges.start) else timeline.gaps
    long = gaps.end - gaps.start >= _WAIT_NS
    gaps = Spans(gaps.start[long], gaps.end[long])
    waiting = [EMPTY]
    for other in others:
        if other is timeline or not len(gaps.start):
            continue
        runs = joined(other.busy, near_ns)
        stretch = intersect(gaps, runs)
        idle_ns = stretch.end - stretch.start
        gap = np.searchsorted(gaps.start, stretch.start, side="right") - 1
        run = np.searchsorted(runs.start, stretch.start, side="right") - 1
        amidst = (runs.start[run] + near_ns < gaps.start[gap]) & (runs.end[run] - near_ns > gaps.end[gap])
        busy_ns = coverage(other.busy, stretch.start, stretch.end)
        counts = ~amidst & (idle_ns >= _WAIT_NS) & (busy_ns >= _WAIT_SHARE * idle_ns)
        waiting.append(Spans(stretch.start[counts], stretch.end[counts]))
    return merge(*waiting)
