"""What a reader says about a capture that limits the conclusions one may draw from it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from gputop.trace.columns import Parts
from gputop.trace.model import I64

# Cause and remedy, for captures without the right to use the GPUs' counters (tensorflow 35860, xprof 63).
INSUFFICIENT_RIGHTS = (
    "the driver lets only root trace GPUs (CUPTI_ERROR_INSUFFICIENT_PRIVILEGES)",
    "Set NVreg_RestrictProfilingToAdminUsers=0: put `options nvidia NVreg_RestrictProfilingToAdminUsers=0` into "
    "/etc/modprobe.d/nvidia-profiling.conf and reload the driver or reboot; a container needs CAP_SYS_ADMIN as well.",
)
_RIGHTS = re.compile(r"INSUFFICIENT_PRIVILEGES|RestrictProfiling|insufficient privilege", re.IGNORECASE)
_DROPPED = re.compile(r"\bdropp", re.IGNORECASE)
_LAUNCH = re.compile(r"^(cu|cuda|hip(Ext)?)(Module)?(Graph)?(Launch|Mem(cpy|set))")

# CUPTI keeps 2 Mi activity and 2 Mi callback records for all GPUs of a process together; from
# nine tenths of that on, an early end of the device events is the limit's work.
_CUPTI_RECORDS = 2 << 20
_NEAR = 0.9
_MISSING_TAIL = 0.02  # of the capture


def note_messages(parts: Parts, errors: Sequence[str], warnings: Sequence[str]) -> None:
    """Pass on what the profiler itself reported."""
    for text, id_ in (*((e, "capture_error") for e in errors), *((w, "capture_warning") for w in warnings)):
        if _RIGHTS.search(text):
            parts.note("capture_error", f"{text.strip()}. {INSUFFICIENT_RIGHTS[1]}")
        elif _DROPPED.search(text):
            parts.note("dropped_events", f"The profiler dropped events: {text.strip()}. Counts and sums are too low; "
                                         "capture for a shorter time.")
        else:
            parts.note(id_, f"The profiler reported: {text.strip()}")


def note_empty_planes(
    parts: Parts, host: str, events: Sequence[int], messages: Sequence[str], call_names: I64,
) -> None:
    """GPUs are there and nothing ran on any of them: say why, as far as the host's side shows it.

    ``events`` counts those of each GPU, ``call_names`` are the names of host calls with a correlation id.
    """
    if any(events):
        return
    where = f"{host or 'This host'}: no event of its {len(events)} GPUs was recorded"
    if any(_RIGHTS.search(m) for m in messages):
        parts.note("empty_device_plane", f"{where}: {INSUFFICIENT_RIGHTS[0]}. {INSUFFICIENT_RIGHTS[1]}")
        return
    launched = sum(int((call_names == i).sum()) for i in np.unique(call_names).tolist()
                   if _LAUNCH.match(parts.names.list[i]))
    if launched:
        parts.note("empty_device_plane", f"{where}, though the host made {launched} launches and copies. Most likely "
                                         f"{INSUFFICIENT_RIGHTS[0]}. {INSUFFICIENT_RIGHTS[1]}")
    else:
        parts.note("no_device_events", f"{where}, and the host launched nothing: the job did not use its GPUs during "
                                       "the capture, or GPU tracing failed (see the job's log for CUPTI errors).")


def note_clipping(parts: Parts, window_ns: tuple[int, int] | None) -> tuple[int, int] | None:
    """Cut the host's events at the last device event where CUPTI's buffers ran full; returns the window left."""
    records = sum(len(d) for d in parts.device)
    calls = sum(int((d.launch_line >= 0).sum()) for d in parts.device)
    if max(records, calls) < _NEAR * _CUPTI_RECORDS or not parts.host:
        return window_ns
    begin = min(int(d.start_ns.min()) for d in parts.device)
    last = max(int(d.end_ns.max()) for d in parts.device)
    host_end = max((int(h.end_ns.max()) for h in parts.host if len(h)), default=last)
    if host_end - last <= _MISSING_TAIL * (host_end - begin):
        return window_ns
    for events in parts.host:
        keep = events.start_ns <= last
        place = np.cumsum(keep) - 1
        events.stats = {name: (place[rows[keep[rows]]], values[keep[rows]])
                        for name, (rows, values) in events.stats.items()}
        for column in ("line", "name", "start_ns", "end_ns"):
            setattr(events, column, getattr(events, column)[keep])
    parts.note("clipped", f"GPU events stop {(host_end - last) / 1e9:.1f} s before the capture does: CUPTI's buffers "
                          f"hold {_CUPTI_RECORDS} records and {records} GPU events filled them. The time after is left "
                          "out; capture for a shorter time.")
    return window_ns and (window_ns[0], min(window_ns[1], last))
