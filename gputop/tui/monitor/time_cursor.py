"""The cursor in time: with it the table shows the GPUs as they were in the slice under the cursor."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from gputop.core.metrics import GPU_METRICS, LANE_METRICS
from gputop.core.samples import OK, GpuSample, Reading
from gputop.session.event_log import EventLog, LoggedEvent

if TYPE_CHECKING:
    from gputop.telemetry.history import History
    from gputop.tui.monitor.lanes import Window

SOURCE = "history: mean of the slice under the cursor"
UNMEASURED = "nothing was measured in this slice"


class Slice(Struct, frozen=True):
    """A slice of time. Its means are over ``mean_of_s``, which is longer where history is coarser."""

    begin_s: float
    slice_s: float
    mean_of_s: float

    @property
    def end_s(self) -> float:
        return self.begin_s + self.slice_s

    def title(self, name: str, width: int) -> str:
        """The title of lanes and figures, in a form that fits ``width``."""
        clock = time.strftime("%H:%M:%S", time.localtime(self.begin_s))
        long = self.mean_of_s >= 120
        mean = f"mean of {self.mean_of_s / 60 if long else self.mean_of_s:g} {'min' if long else 's'}"
        for text in (f"{name} at {clock}, {mean} (esc: now)", f"{name} {clock}, {mean}", f"{clock}, {mean}"):
            if len(text) <= width:
                return text
        return clock


def gpu_in_slice(history: History, gpu: GpuSample, begin_s: float, slice_s: float,
              marks: Sequence[LoggedEvent]) -> tuple[GpuSample, float]:
    """``gpu`` as it was from ``begin_s`` on for ``slice_s``, and over how many seconds the means were taken.

    What history does not keep is missing, with that reason; so is what was not measured then.
    """
    readings: dict[str, Reading] = {}
    mean_of_s = slice_s
    for metric in LANE_METRICS:
        lane = history.lane(gpu.info.uuid, metric, end_s=begin_s + slice_s, slice_s=slice_s, slices=1)
        about = GPU_METRICS[metric]
        if not lane.count[0]:
            readings[metric] = Reading.missing(about.unit, UNMEASURED)
            continue
        mean_of_s = max(mean_of_s, lane.resolution_s)
        readings[metric] = Reading(lane.mean[0], about.unit, SOURCE, coarse=metric == "gpu_util")
        if isinstance(about.full_scale, str) and lane.full_scale is not None:
            readings[about.full_scale] = Reading(lane.full_scale, GPU_METRICS[about.full_scale].unit, SOURCE)
    reasons = dict.fromkeys(m.text for m in marks if m.uuid == gpu.info.uuid and m.kind in ("thermal", "power"))
    xids = tuple(event for event in gpu.xids if begin_s <= event.time_s < begin_s + slice_s)
    return replace(gpu, readings=readings, processes=(), clock_event_reasons=tuple(reasons), state=OK, message="",
                   xids=xids), mean_of_s


class TimeCursor:
    """The cursor's place and the GPUs there. It has a time, not a column: the picture moves under it."""

    def __init__(self) -> None:
        self.time_s: float | None = None  # a time in its slice; None: no cursor
        self.slice: Slice | None = None
        self._past: dict[str, GpuSample] = {}

    def put(self, window: Window, column: int) -> None:
        self.time_s = window.begin_s(column) + window.slice_s / 2

    def move(self, by: int, window: Window, oldest_s: float, newest_s: float) -> None:
        """Move by so many slices; without a cursor yet, from the newest whole slice."""
        column = window.columns - 2 if self.time_s is None else window.column(self.time_s)
        self.put(window, min(max(column + by, window.column(oldest_s)), window.column(newest_s)))

    def keep_on_screen(self, window: Window, newest_s: float) -> float | None:
        """End of the picture for which the cursor is in it, ``newest_s`` for one that follows now.

        None: it may end where it does. A recording that went back to before the cursor takes it away.
        """
        if self.time_s is not None and self.time_s >= newest_s + window.slice_s:
            self.time_s = None
        if self.time_s is None:
            return None
        column = window.column(self.time_s)
        if 0 <= column < window.columns:
            return None
        last = column + window.first + (window.columns - 1 if column < 0 else 0)
        return newest_s if last >= newest_s // window.slice_s else (last + 0.5) * window.slice_s

    def update(self, window: Window | None, history: History | None, marks: EventLog | None,
             gpus: Sequence[GpuSample]) -> bool:
        """Read the slice under the cursor again; returns whether it is another slice than before."""
        before = self.slice
        if self.time_s is None or window is None or history is None or history.newest_s is None:
            self.slice, self._past = None, {}
            return before is not None
        begin_s, slice_s = window.begin_s(window.column(self.time_s)), window.slice_s
        same = before is not None and (before.begin_s, before.slice_s) == (begin_s, slice_s)
        # A slice that is over does not change any more; only its resolution can become coarser.
        if same and history.newest_s >= begin_s + slice_s and len(self._past) == len(gpus):
            return False
        events = marks.between(begin_s, begin_s + slice_s) if marks is not None else []
        past_gpus = {gpu.info.uuid: gpu_in_slice(history, gpu, begin_s, slice_s, events) for gpu in gpus}
        self._past = {uuid: past for uuid, (past, _) in past_gpus.items()}
        self.slice = Slice(begin_s, slice_s, max((s for _, s in past_gpus.values()), default=slice_s))
        return not same

    def at_cursor(self, gpu: GpuSample) -> GpuSample:
        """The GPU as it was under the cursor; without a cursor, as it is now."""
        return self._past.get(gpu.info.uuid, gpu)
