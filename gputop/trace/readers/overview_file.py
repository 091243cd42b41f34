"""The overview of a capture: a file ``<host>.overview.pb`` beside the trace, on which it is laid.

gputop records a job in detail for a short time, and for the rest of the time asked for only the coarsest events of the
host: steps and what lies between them. XProf and TensorBoard take every ``*.xplane.pb`` of a run's folder for a host
of the job, so an overview is called otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from gputop.core.errors import GputopError, NoDataError
from gputop.core.findings import TraceNote
from gputop.trace import limits
from gputop.trace.model import AllocatorEvents, DeviceEvents, StepEvents, Trace
from gputop.trace.readers.capture_file import OVERVIEW
from gputop.trace.readers.clock_file import read_clocks

_TRACE = ".xplane.pb"
_MAX_APART_NS = 7200 * 10**9  # a capture lasts an hour at most
_LIMITING = ("truncated", "left_out", "unnamed_events", "dropped_events")  # notes that limit what it shows

Read = Callable[[Sequence[Path]], Trace]


def overviews_of(trace: Trace, read: Read) -> tuple[dict[int, Trace], list[TraceNote]]:
    """Overviews by rank beside its trace, on the clock and the origin of the trace, and what limits them.

    A rank without an overview that can be used is left out; a note says why, if another rank has one.
    """
    overviews: dict[int, Trace] = {}
    notes: list[TraceNote] = []
    for rank, path in enumerate(map(Path, trace.paths)):
        beside = path.with_name(path.name.removesuffix(".gz").removesuffix(_TRACE) + OVERVIEW)
        if path.name.removesuffix(".gz").endswith(_TRACE) and os.path.lexists(beside):
            try:
                overviews[rank], limited = _placed(read([beside]), trace, rank, path)
                notes += limited
            except GputopError as error:
                whose = f"the trace of {_host(trace, rank)}" if len(trace.paths) > 1 else "this trace"
                notes.append(_note(f"gputop cannot use the rare events recorded next to {whose}: {error.message}"))
    without = [_host(trace, rank) for rank in range(len(trace.paths)) if rank not in overviews]
    if overviews and without:
        notes.insert(0, _note(f"Rare events are missing for {len(without)} of {len(trace.paths)} workers, so their "
                              f"activity after the detailed part is unknown ({', '.join(without)})."))
    return overviews, notes


def _placed(overview: Trace, trace: Trace, rank: int, path: Path) -> tuple[Trace, list[TraceNote]]:
    """The host's events of an overview, its times relative to the origin of the trace; raises GputopError."""
    if not len(overview.host):
        raise NoDataError("the recording has no host events.", "")
    if not overview.origin_ns or not trace.origin_ns:
        raise NoDataError("the recording or the trace does not show when it was made.", "")
    clock = read_clocks(path.parent).get(path.name.removesuffix(".gz")) if len(trace.paths) > 1 else None
    by_ns = overview.origin_ns - trace.origin_ns - (clock.offset_ns if clock is not None else 0)
    if abs(by_ns) > _MAX_APART_NS:
        raise NoDataError("the recording was made at another time.", "")

    def moved(span: tuple[int, int]) -> tuple[int, int]:
        return span[0] + by_ns, span[1] + by_ns

    host = overview.host
    host.start_ns, host.end_ns = host.start_ns + np.int64(by_ns), host.end_ns + np.int64(by_ns)
    name = _host(trace, rank) or overview.hosts[0]
    window = overview.profile_window_ns and moved(overview.profile_window_ns)
    placed = replace(
        overview, origin_ns=trace.origin_ns, hosts=[name], gpus=[], device=DeviceEvents.empty(),
        allocator=AllocatorEvents.empty(), step_events=StepEvents.empty(),
        lines=[replace(line, host=name, gpu=-1, rank=rank) for line in overview.lines],
        rank_windows_ns={rank: window} if window is not None else {},
        profile_window_ns=window,
        unrecorded_ns=tuple(map(moved, overview.unrecorded_ns)))
    whose = f"the trace of {name}" if len(trace.paths) > 1 else "this trace"
    return placed, [_note(f"Overview next to {whose}: {note.message}") for note in overview.quality
                    if note.id in _LIMITING]


def _host(trace: Trace, rank: int) -> str:
    return trace.hosts[rank] if len(trace.hosts) == len(trace.paths) else ""


def _note(message: str) -> TraceNote:
    return TraceNote("overview", limits.cut_text(message))
