"""A snapshot in the monitor: its sample, and the minutes before it as far as the document holds them.

Of those there are only means over slices: each is repeated second by second, so that the picture
has no holes, and its readings are marked coarse and name their slice.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from gputop.core.metrics import GPU_METRICS
from gputop.core.samples import OK, GpuSample, NodeSample, Reading
from gputop.replay.player import Player
from gputop.replay.reader import Recording
from gputop.replay.snapshot_document import Snapshot, Track, is_snapshot, read

_STEP_S = 1.0


class SnapshotSamples:
    """The samples of a snapshot, made when they are asked for; the last one is the snapshot's own."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._slices: list[int] = []  # of each sample but the last
        self.times_s: list[float] = []
        grid = snapshot.history
        if grid is not None:
            filled = {i for tracks in grid.gpus.values() for t in tracks for i, v in enumerate(t.mean) if v is not None}
            repeats = max(1, round(grid.slice_s / _STEP_S))
            for i in sorted(filled):
                for k in range(repeats):
                    time_s = grid.start_s + (i + (k + 0.5) / repeats) * grid.slice_s
                    if time_s < snapshot.sample.time_s - 0.5 * _STEP_S:
                        self._slices.append(i)
                        self.times_s.append(time_s)
        self.times_s.append(snapshot.sample.time_s)

    def __len__(self) -> int:
        return len(self.times_s)

    def index_at(self, time_s: float) -> int:
        return max(0, bisect_right(self.times_s, time_s) - 1)

    def sample(self, index: int) -> NodeSample:
        now = self._snapshot.sample
        if index == len(self.times_s) - 1:
            return now
        grid, slice_index = self._snapshot.history, self._slices[index]
        assert grid is not None
        source = f"snapshot, mean over {grid.slice_s:g} s"
        gpus = tuple(_gpu_in_slice(g, grid.gpus.get(g.info.uuid, ()), slice_index, source) for g in now.gpus)
        host = replace(now.host, readings={}, core_ratios=(), cgroup=None, top_processes=(),
                       top_reason="not in a snapshot's history")
        return replace(now, time_s=self.times_s[index], gpus=gpus, host=host, processes=(), own_cpu_ratio=None)

    def close(self) -> None:
        """Nothing is open."""


def _gpu_in_slice(gpu: GpuSample, tracks: tuple[Track, ...], slice_index: int, source: str) -> GpuSample:
    readings = {}
    for track in tracks:
        value, metric = track.mean[slice_index], GPU_METRICS[track.metric]
        if value is None:
            continue
        readings[metric.id] = Reading(value, metric.unit, source, coarse=True)
        if isinstance(metric.full_scale, str) and track.full_scale is not None:
            scale = GPU_METRICS[metric.full_scale]
            readings[scale.id] = Reading(track.full_scale, scale.unit, source, coarse=True)
    # It answered then, whatever became of it.
    return replace(gpu, readings=readings, processes=(), processes_reason="not in a snapshot's history",
                   clock_event_reasons=(), clock_events_reason="not in a snapshot's history",
                   state=OK if readings else gpu.state, message="" if readings else gpu.message, xids=())


class SnapshotPlayer(Player):
    """Stands on a snapshot; seeking leads into the minutes before."""

    badge = "SNAPSHOT"

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__(SnapshotSamples(snapshot), start_s=math.inf)
        self.interval_s = snapshot.interval_s

    def state(self) -> str:
        return "" if self.at_end else "the minutes before"


def open_player(path: Path, start_s: float, speed: float, say: Callable[[str], None]) -> tuple[Player, Snapshot | None]:
    """Return what plays this file, a recording or a snapshot, and the latter; ``say`` gets what is missing in a
    recording.

    Raises GputopError for a file that is neither.
    """
    if is_snapshot(path):
        snapshot = read(path)
        return SnapshotPlayer(snapshot), snapshot
    recording = Recording(path)
    for note in recording.notes:
        say(note)
    return Player(recording, start_s=start_s, speed=speed), None
