"""The lanes of all GPUs and of the host's CPUs, drawn for the time that is visible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gputop.core.samples import GpuSample
from gputop.render.gpu_columns import COLUMNS
from gputop.tui.monitor.columns import ACTIVITY, HOST, LANES, MAIN, Field, lane_shown
from gputop.tui.monitor.lanes import LaneCache, LaneSignal, common_scale
from gputop.tui.monitor.layout import TableRows
from gputop.tui.monitor.visible_time import VisibleTime

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
        drawn = {gpu.info.uuid: self._update_gpu(gpu, metric, rows, fields) for gpu in gpus}
        if rows.host_lines and gpus:
            signal = LaneSignal(HOST, (), interval_s=time.longest_interval_s)
            drawn[HOST] = {HOST: self._draw(HOST, signal, fields[MAIN].width, rows.host_lines, muted=True)}
        return drawn

    def _update_gpu(self, gpu: GpuSample, metric: str, rows: TableRows, fields: Mapping[str, Field]) -> dict[str, int]:
        drawn: dict[str, int] = {}
        for key, field, metrics, lines, muted in self._lanes_of(gpu, metric, rows, fields):
            signal = LaneSignal(gpu.info.uuid, metrics, self.full_scales.get(key), self._time.longest_interval_s)
            drawn[key] = self._draw(key, signal, field.width, lines, muted)
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
