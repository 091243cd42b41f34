"""The part of a trace in which nothing is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from msgspec.structs import replace

from gputop.core.findings import TraceNote
from gputop.text.units import seconds
from gputop.trace.graph_captures import in_captures
from gputop.trace.lookups import Mask, host_rows, name_mask
from gputop.trace.model import I64, AllocatorEvents, DeviceEvents, HostEvents, Trace, column_types

_Events = TypeVar("_Events", DeviceEvents, HostEvents, AllocatorEvents)

_LAUNCH = r"(?:cu|cuda|hip(?:Ext)?)(?:Module)?(?:Graph)?Launch"
_MIN_LAUNCHES = 50
# The annotation after which gputop's guard in a PyTorch job has operators no longer recorded, a moment before the
# recording ends (gputop.launch.inside.gputop_kineto).
END_MARK = "gputop: end of recording"
_MISSING_SHARE = 0.02  # share of the capture


def longest_recording(trace: Trace) -> Trace:
    """The events of the longest recording only, where several were joined (``Trace.unrecorded_ns``)."""
    begin, end = trace.window_ns
    edges = [begin, *(edge for span in trace.unrecorded_ns for edge in span), end + 1]
    begin, end = max(zip(edges[::2], edges[1::2], strict=True), key=lambda span: span[1] - span[0])
    return replace(part_of(trace, begin, end), unrecorded_ns=())


def part_of(trace: Trace, begin: int, end: int) -> Trace:
    """The trace with the events that begin in this time only."""

    def within(times: I64) -> Mask:
        return (times >= begin) & (times < end)

    return replace(trace, device=_taken(trace.device, within(trace.device.start_ns)),
                   host=host_taken(trace.host, within(trace.host.start_ns)),
                   allocator=_taken(trace.allocator, within(trace.allocator.time_ns)))


def up_to_last_gpu_event(trace: Trace) -> Trace:
    """The trace without the time for which the file holds the host's launches but no event of a GPU any more.

    So end files that were cut off, and captures whose buffers ran full. As it is where the GPUs' events reach to the
    end, and where the host launched next to nothing after them that runs: what a graph records does not.
    """
    device, host = trace.device, trace.host
    if not len(device) or not len(host):
        return trace
    last = int(device.end_ns.max())
    missing_ns = int(host.end_ns.max()) - last
    first = int(np.searchsorted(host.start_ns, last, side="right"))
    if missing_ns <= _MISSING_SHARE * (missing_ns + last - int(device.start_ns.min())):
        return trace
    rows = first + np.flatnonzero(name_mask(trace, _LAUNCH)[host.name[first:]])
    launches = int((~in_captures(trace, rows)).sum())
    if launches < _MIN_LAUNCHES:
        return trace
    note = TraceNote("clipped", (
        f"GPU events stop {seconds(missing_ns / 1e9)} before host events, although the host launches {launches:,} more "
        "times. The file is cut off, or the profiler's buffers were full. gputop analyzes only the time before the GPU "
        "events stop. Capture for a shorter time."))
    window = trace.profile_window_ns
    return replace(trace, host=host_taken(host, np.arange(len(host)) < first), quality=[*trace.quality, note],
                   allocator=_taken(trace.allocator, trace.allocator.time_ns <= last),
                   profile_window_ns=window and (window[0], min(window[1], last)))


def up_to_end_mark(trace: Trace) -> Trace:
    """The trace up to the first rank's END_MARK; as it is without one."""
    marks = host_rows(trace, f"{END_MARK}$")
    if not len(marks):
        return trace
    end = int(trace.host.start_ns[marks].min())
    return _windows_up_to(part_of(trace, trace.window_ns[0], end), lambda begin: end)


def recorded_for(trace: Trace, recorded_s: float | None) -> Trace:
    """The trace of profilers that recorded for so long (None: not known) and took longer to stop: threads that wrote no
    event meanwhile did not wait."""
    if recorded_s is None or trace.unrecorded_ns:
        return trace
    return _windows_up_to(trace, lambda begin: begin + round(recorded_s * 1e9))


def _windows_up_to(trace: Trace, end_of: Callable[[int], int]) -> Trace:
    """The trace with the windows of its profilers cut at ``end_of`` their begin."""
    def clipped(window: tuple[int, int]) -> tuple[int, int]:
        return window[0], min(window[1], end_of(window[0]))

    return replace(trace, rank_windows_ns={rank: clipped(window) for rank, window in trace.rank_windows_ns.items()},
                   profile_window_ns=trace.profile_window_ns and clipped(trace.profile_window_ns))


def host_taken(events: HostEvents, keep: Mask) -> HostEvents:
    """The events in ``keep`` with their stats."""
    taken = _taken(events, keep)
    taken.stats = events.stats_of(keep)
    return taken


def _taken(events: _Events, keep: Mask) -> _Events:
    """The events in ``keep``, without stats."""
    return type(events)(**{name: getattr(events, name)[keep] for name in column_types(type(events))})
