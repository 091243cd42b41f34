"""The time that the lanes show, the lanes drawn for it, and the cursor in it: with one the table shows the GPUs as they
were in the slice under the cursor."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from gputop.core.metrics import GPU_METRICS, LANE_METRICS
from gputop.core.samples import OK, GpuSample, Reading
from gputop.render.gpu_columns import COLUMNS
from gputop.render.time_slices import slice_for
from gputop.session.event_log import EventLog, LoggedEvent
from gputop.tui.monitor.columns import ACTIVITY, HOST, LANES, MAIN, Field, lane_shown
from gputop.tui.monitor.lanes import DEFAULT_SPAN_S, SPANS_S, LaneCache, LaneSignal, LaneWindow, TimeView, common_scale
from gputop.tui.monitor.layout import TableRows
from gputop.tui.terminal.escape_codes import MAX_SHIFT_COLUMNS

if TYPE_CHECKING:
    from gputop.telemetry.history import History

# Moving the lanes is most of what a young picture costs: they move once they have so much new to show, a share of the
# history there is, and at the latest after so many seconds, as once a slice is that long, or columns that the terminal
# still moves by itself. The bars and figures beside them follow each sample.
_MOVE_SHARE, _MOVE_LATEST_S = 0.25, 5.0
# Of the time in view, at least: to show all of it, slices of twice the length would leave half a lane empty.
_COVERED = 0.8
SOURCE = "history: mean over the slice under the cursor"
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
        mean = f"mean over {self.mean_of_s / 60 if long else self.mean_of_s:g} {'min' if long else 's'}"
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

    def put(self, window: LaneWindow, column: int) -> None:
        self.time_s = window.begin_s(column) + window.slice_s / 2

    def move(self, by: int, window: LaneWindow, oldest_s: float, newest_s: float) -> None:
        """Move by so many slices; without a cursor yet, from the newest whole slice."""
        column = window.columns - 2 if self.time_s is None else window.column(self.time_s)
        self.put(window, min(max(column + by, window.column(oldest_s)), window.column(newest_s)))

    def keep_on_screen(self, window: LaneWindow, newest_s: float) -> float | None:
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

    def update(self, window: LaneWindow | None, history: History | None, marks: EventLog | None,
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


class VisibleTime:
    """A span of the history up to now, or up to a time in the past, for a main lane of so many ``columns``.

    While there is less history than the span, the picture is shorter; until the user zooms. The cursor stays in it.
    """

    def __init__(self) -> None:
        self.history: History | None = None
        self.columns = 1
        self.span_s = DEFAULT_SPAN_S
        self.end_s: float | None = None  # None follows the newest sample
        self.lanes_end_s: float | None = None  # the newest sample that the lanes show, if they follow it
        self.cursor = TimeCursor()  # with a cursor the figures are those of the slice under it
        self.longest_interval_s = 0.0  # between samples so far: older ones may be further apart
        self._interval_s = 1.0  # between samples now
        self._stretches = True
        self._view = TimeView()
        self._view_made_of: tuple[object, ...] = ()

    def note_interval(self, interval_s: float) -> None:
        """Note how far apart the samples are that come now."""
        self._interval_s = interval_s
        self.longest_interval_s = max(self.longest_interval_s, interval_s)

    @property
    def view(self) -> TimeView:
        history = self.history
        newest_s = history.newest_s if history is not None else None
        made_of = (self.span_s, self.columns, self.end_s, self._stretches, self._interval_s, newest_s, history)
        if made_of != self._view_made_of:  # else it is asked for several times a frame
            self._view, self._view_made_of = self._new_view(), made_of
        return self._view

    def _new_view(self) -> TimeView:
        span_s, shortest_s, history = self.span_s, 0.0, self.history
        oldest_s = history.oldest_s if history is not None and self._stretches and self.end_s is None else None
        if history is not None and oldest_s is not None:
            age_s = (history.newest_s or oldest_s) - oldest_s
            span_s, shortest_s = min(span_s, age_s), min(self._interval_s, span_s / self.columns)
        return TimeView(slice_for(_COVERED * span_s, self.columns, _COVERED * shortest_s), self.end_s)

    @property
    def shown_s(self) -> float:
        """Seconds from the left to the right edge of the main lane."""
        return self.view.slice_s * self.columns

    def view_of(self, columns: int) -> TimeView:
        """View of a lane of so many columns: a narrow lane shows the same time as the main one, in longer slices."""
        return self.view if columns == self.columns else TimeView(slice_for(self.shown_s, columns), self.end_s)

    def window_of(self, columns: int) -> LaneWindow | None:
        """Window of a lane of so many columns; None before there is anything."""
        return None if self.lanes_end_s is None else LaneWindow.of(self.view_of(columns), self.lanes_end_s, columns)

    @property
    def window(self) -> LaneWindow | None:
        return self.window_of(self.columns)

    def cursor_column(self, columns: int) -> int | None:
        """Column of the cursor in a lane of so many; outside of it if the cursor is not on screen."""
        if self.cursor.time_s is None or (window := self.window_of(columns)) is None:
            return None
        return window.column(self.cursor.time_s)

    def advance(self) -> None:
        """Have the lanes show the newest sample, once they have so much new to show."""
        history, shown_s = self.history, self.lanes_end_s
        newest_s = history.newest_s if history is not None else None
        if history is not None and newest_s is not None and shown_s is not None and self.cursor.time_s is None:
            wait_s = min(_MOVE_LATEST_S, MAX_SHIFT_COLUMNS * self.view.slice_s,
                         _MOVE_SHARE * (newest_s - (history.oldest_s or newest_s)))
            if 0 <= newest_s - shown_s < wait_s - self._interval_s / 2:  # ticks jitter
                return
        self.lanes_end_s = newest_s

    def update_cursor(self, events: EventLog | None, gpus: Sequence[GpuSample]) -> bool:
        """Move the picture to where the cursor is in it, and read the slice there; returns whether it is another one.
        """
        cursor, history = self.cursor, self.history
        if cursor.time_s is None and cursor.slice is None:
            return False
        window = self.window
        if window is not None and history is not None and history.newest_s is not None:
            end_s = cursor.keep_on_screen(window, history.newest_s)
            if end_s is not None:
                self.end_s = None if end_s >= history.newest_s else end_s
        return cursor.update(self.window, history, events, gpus)

    # -- what the user does -------------------------------------------------------------------

    def scroll(self, by: int) -> None:
        """Move the cursor a slice, or else the picture a quarter of it; past the newest sample it follows again."""
        history = self.history
        if self.cursor.time_s is not None:
            self.move_cursor(by)
        elif history is not None and history.newest_s is not None and history.oldest_s is not None:
            newest_s, shown_s = history.newest_s, self.shown_s
            end_s = (self.end_s if self.end_s is not None else newest_s) + by * shown_s / 4
            self.end_s = None if end_s >= newest_s else max(end_s, min(newest_s, history.oldest_s + shown_s / 4))

    def zoom(self, by: int) -> None:
        """Show more time, or less."""
        nearest = min(range(len(SPANS_S)), key=lambda i: abs(SPANS_S[i] - self.span_s))
        self.span_s = SPANS_S[min(len(SPANS_S) - 1, max(0, nearest + by))]
        self._stretches = False

    def follow(self) -> None:
        """Go back to now, picture and figures."""
        self.end_s = self.cursor.time_s = None

    def move_cursor(self, by: int) -> None:
        """Move the cursor by slices; with 0, put it there or take it away."""
        window, history = self.window, self.history
        if by == 0 and self.cursor.time_s is not None:
            self.follow()
        elif window is not None and history is not None and history.newest_s is not None \
                and history.oldest_s is not None:
            self.cursor.move(by, window, history.oldest_s, history.newest_s)


_COLUMNS = {column.id: column for column in COLUMNS if column.draw == "spectrogram"}


class LaneSet:
    """The lanes by device and key: that of its place in a stack, else that of its column in the table.

    A metric without a scale of its own has the same full scale on all GPUs: that of what is visible.
    """

    def __init__(self, time: VisibleTime) -> None:
        self.full_scales: dict[str, float] = {}  # by place in the stack
        self._time = time
        self._caches: dict[tuple[str, str], LaneCache] = {}
        self._activity: dict[str, str] = {}  # the metric that tells the activity of each GPU
        self._drawn_for: tuple[object, ...] = ()

    def clear(self) -> None:
        """Forget what is drawn: the columns of the table are others now."""
        self._caches.clear()
        self._drawn_for = ()

    def get(self, device: str, key: str, columns: int) -> LaneCache | None:
        """Lane of a device; None where it is not drawn for so many columns."""
        cache = self._caches.get((device, key))
        return cache if cache is not None and columns > 0 and len(cache.columns) == columns else None

    def mean(self, device: str, key: str) -> float | None:
        """Mean level 0-1 over what a lane shows; None where nothing was measured."""
        return self._caches[device, key].mean()

    def mean_at(self, device: str, key: str, column: int) -> float | None:
        """Mean level 0-1 of one slice of a lane; None where nothing was measured."""
        return self._caches[device, key].mean_at(column)

    def update(self, gpus: Sequence[GpuSample], metric: str, rows: TableRows,
               fields: Mapping[str, Field]) -> dict[str, dict[str, int]]:
        """Bring the lanes of these GPUs and the host to the visible time; ``metric`` is the main one.

        Returns how many columns at the right of each lane look different, by device and key.
        """
        time = self._time
        drawn_for = (time.view, time.lanes_end_s, metric, time.history, [gpu.info.uuid for gpu in gpus])
        if drawn_for == self._drawn_for:
            return {}
        self._drawn_for = drawn_for
        self.full_scales = self._common_scales(metric, rows)
        drawn: dict[str, dict[str, int]] = {gpu.info.uuid: {} for gpu in gpus}
        for gpu in gpus:
            for key, field, metrics, lines, muted in self._lanes_of(gpu, metric, rows, fields):
                signal = LaneSignal(gpu.info.uuid, metrics, self.full_scales.get(key), time.longest_interval_s)
                drawn[gpu.info.uuid][key] = self._draw(key, signal, field.width, lines, muted)
        if rows.host_lines and gpus:
            signal = LaneSignal(HOST, (), interval_s=time.longest_interval_s)
            drawn[HOST] = {HOST: self._draw(HOST, signal, fields[MAIN].width, rows.host_lines, muted=True)}
        return drawn

    def _draw(self, key: str, signal: LaneSignal, width: int, lines: int, muted: bool) -> int:
        cache = self._caches.setdefault((signal.gpu, key), LaneCache(muted=muted))
        time = self._time
        return cache.update(time.history, signal, time.view_of(width), width, lines, time.lanes_end_s)

    def _lanes_of(self, gpu: GpuSample, metric: str, rows: TableRows,
                  fields: Mapping[str, Field]) -> Iterator[tuple[str, Field, tuple[str, ...], int, bool]]:
        """Yield the lanes of a GPU: key, where it is, metrics, lines, and whether its colors are muted."""
        main = self._activity_of(gpu) if metric == ACTIVITY else (metric,)
        if not rows.is_stacked:
            for key, field in fields.items():
                if field.is_lane and key != MAIN:
                    yield key, field, _COLUMNS[key].metrics, 1, _COLUMNS[key].muted
        for slot, lines in rows.lanes:
            if slot == MAIN:
                yield slot, fields[MAIN], main, lines, False
            else:
                lane = LANES[lane_shown(slot, metric)]
                yield slot, fields[MAIN], lane.metrics or self._activity_of(gpu), lines, lane.muted

    def _activity_of(self, gpu: GpuSample) -> tuple[str]:
        """The metric that tells the activity of a GPU, after the ladder: the finest that there is."""
        which, now = gpu.activity()
        uuid, history = gpu.info.uuid, self._time.history
        if now.value is not None:
            self._activity[uuid] = which
        elif uuid not in self._activity and history is not None:
            # Lost or not responding since before this screen: the lane shows what there was.
            _, fine = history.window(uuid, "sm_active", self._time.shown_s)
            self._activity[uuid] = "gpu_util" if all(v != v for v in fine) else "sm_active"
        return (self._activity.get(uuid, which),)

    def _common_scales(self, metric: str, rows: TableRows) -> dict[str, float]:
        history = self._time.history
        if history is None:
            return {}
        metrics = {slot: LANES[slot].metrics for slot, _ in rows.lanes if slot != MAIN}
        metrics[MAIN] = (metric,) if metric != ACTIVITY else ()
        scales: dict[str, float] = {}
        for slot, lane_metrics in metrics.items():
            known_scales = [scale for one in lane_metrics if (
                scale := common_scale(history, one, self._time.shown_s, self._time.end_s)) is not None]
            if known_scales:
                scales[slot] = max(known_scales)
        return scales
