"""What the screens of the golden files and of the key tests show: the simulated node at a fixed moment.

Clock, samples and traces are the same in every run: the simulation is a function of its scenario, and
nothing here starts a thread, a server or a process.
"""

from __future__ import annotations

import tempfile
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from gputop.advice.trace.facts import TraceFacts
from gputop.core.samples import LOST, GpuProcess, GpuSample, NodeSample, Reading, XidEvent
from gputop.diagnosis.diagnose import analyze_to_facts
from gputop.diagnosis.report import limit_of, text_report
from gputop.diagnosis.worker import REPORT_WIDTH
from gputop.profiler.capture.records import CaptureRecord, Server
from gputop.replay.player import Player
from gputop.replay.snapshot_document import Snapshot, read
from gputop.replay.snapshot_source import SnapshotPlayer
from gputop.session.session import Options, Session
from gputop.simulation.node import COMMAND, PID
from gputop.sources.nvml.status import LIBRARY_NOT_FOUND, open_error
from gputop.sources.simulated import SimulatedSource
from gputop.timeline.file_layout import Extent
from gputop.trace.readers.load import load
from gputop.tui.screens.details import capture_text
from gputop.tui.timeline.trace_file import TraceFile
from tests.fakes import START_S
from tests.records import replace
from tests.tui.timelines import built, opened

TRACE_S, EPOCH_S = 2.0, 10.0
ADDRESS = "127.0.0.1:6009"
Change = Callable[[NodeSample], NodeSample]


class Scene(Session):
    """The simulated node after five minutes of watching; further samples come by :meth:`advance` alone."""

    def __init__(self, scenario: str = "gpu0-oversubscribed", change: Change = lambda sample: sample, *,
                 served: bool = True, watched: bool = True, logdir: Path = Path("traces")) -> None:
        """``change`` is made to each sample; not ``served``: no profiler server; not ``watched``: no sample yet."""
        self.now_s = START_S
        self.simulation = SimulatedSource(scenario, clock=lambda: self.now_s)
        self.simulation.open()
        self._change = change
        super().__init__(self.simulation, Options(logdir=logdir), clock=lambda: self.now_s)
        if watched:
            for sample in backfill(scenario):
                self._taken(sample)
        self.watch.servers_known = watched
        if served and watched:
            self.watch.servers = (Server(ADDRESS, f"{COMMAND} (SIMULATED)", PID),)

    def _taken(self, sample: NodeSample) -> None:
        self.feed.on_sample(self._change(replace(sample, own_cpu_ratio=0.008)))

    def start(self) -> None: ...

    def advance(self, ticks: int = 1) -> None:
        """That many more seconds."""
        for _ in range(ticks):
            self.now_s += 1
            *_, newest = self.simulation.backfill(self.now_s + 1, 1.0)
            self._taken(newest)

    def capture(self, scenario: str = "", ago_s: float = 12.0, *, epoch: bool = False) -> CaptureRecord:
        """Keep a capture of the node, or of another scenario's; ``epoch``: of ten seconds around an epoch's end."""
        record = replace(capture_of(scenario or scenario_of(self), epoch=epoch), time_s=self.now_s - ago_s)
        self.capture_ended(record, self.watch.servers)
        return record


@cache
def backfill(scenario: str) -> tuple[NodeSample, ...]:
    """What the node's source knows of the five minutes before; nothing changes a sample."""
    source = SimulatedSource(scenario, clock=lambda: START_S)
    source.open()
    return tuple(source.backfill(START_S + 1, 1.0))


def scenario_of(scene: Scene) -> str:
    return scene.simulation._scenario.id


@cache
def _facts(scenario: str, *, epoch: bool = False) -> tuple[TraceFacts, str]:
    """What the analysis knows of :data:`TRACE_S` of a scenario's job, or of :data:`EPOCH_S` in which an epoch ends; and
    its report."""
    source = SimulatedSource(scenario, clock=lambda: START_S)
    source.open()
    begin_ns, length_s = (int((START_S - 120) * 1e9), EPOCH_S) if epoch else (int((START_S - 20) * 1e9), TRACE_S)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "demo-node.xplane.pb"
        path.write_bytes(source.capture(begin_ns, begin_ns + int(length_s * 1e9)))
        facts = analyze_to_facts(load([str(path)]))
        return facts, text_report(facts.analysis, REPORT_WIDTH).replace(folder, f"traces/{scenario}")


@cache
def capture_of(scenario: str, *, epoch: bool = False) -> CaptureRecord:
    """A capture of a scenario's job; its file is no longer there, as after a cleaning up."""
    facts, report = _facts(scenario, epoch=epoch)
    length_s = EPOCH_S if epoch else TRACE_S
    return CaptureRecord(ADDRESS, Path(f"traces/{scenario}/demo-node.xplane.pb"), START_S, length_s, length_s + 0.1,
                         analysis=facts.analysis, report=report, limit=limit_of(facts.analysis))


@cache
def _timeline(scenario: str) -> tuple[bytes, Extent]:
    return built(_facts(scenario)[0])


def trace_of(record: CaptureRecord) -> TraceFile:
    """A capture that was opened before: its timeline is there at once."""
    scenario = record.path.parent.name
    return TraceFile((str(record.path),), f"{scenario}/{record.path.name}", record.findings, capture_text(record),
                     analyzed=True, timeline=opened(*_timeline(scenario)))


# -- what is otherwise with a node ---------------------------------------------------------------


def with_faults(sample: NodeSample) -> NodeSample:
    """GPU 3 has fallen off the bus for a minute, GPU 5 is too hot for two."""
    def change(gpu: GpuSample) -> GpuSample:
        at_s = sample.time_s - START_S
        if gpu.info.index == 3 and at_s > -60:
            return replace(gpu, readings={}, processes=(), state=LOST, xids=(XidEvent(START_S - 59, 79),),
                           message="the GPU fell off the bus (Xid 79). Drain the node and reset it")
        if gpu.info.index == 5 and at_s > -120:
            hot = Reading(88.0, "°C", "simulated")
            return replace(gpu, readings={**gpu.readings, "temperature_c": hot}, clock_event_reasons=("hw thermal",))
        return gpu

    return replace(sample, gpus=tuple(map(change, sample.gpus)))


def with_sixteen(sample: NodeSample) -> NodeSample:
    """The same eight once more."""
    more = tuple(replace(g, info=replace(g.info, index=g.info.index + 8, uuid=g.info.uuid + "-2"))
                 for g in sample.gpus)
    return replace(sample, gpus=(*sample.gpus, *more))


def with_only(count: int) -> Change:
    """The first GPUs alone, and the job on them."""
    def change(sample: NodeSample) -> NodeSample:
        processes = tuple(replace(process, started_s=START_S - 7500.0,
                                  gpus={index: on for index, on in process.gpus.items() if index < count})
                          for process in sample.processes)
        return replace(sample, gpus=sample.gpus[:count], processes=processes)

    return change


def with_coarse(sample: NodeSample) -> NodeSample:
    """One GPU whose driver has nothing finer than the utilization."""
    def change(gpu: GpuSample) -> GpuSample:
        why = "needs GPM, which begins with Hopper"
        fine = {m: Reading.missing(r.unit, why, r.source) for m, r in gpu.readings.items() if m.endswith("_active")}
        return replace(gpu, readings={**gpu.readings, **fine})

    only = with_only(1)(sample)
    return replace(only, gpus=tuple(map(change, only.gpus)))


def with_mig(sample: NodeSample) -> NodeSample:
    """Two GPUs, the first divided into three instances, of which two have a process."""
    first, second = sample.gpus[:2]
    why = "partitioned into MIG instances: see 0:0, 0:1, 0:2"
    of_whole = {m: replace(r, value=None, reason=why) if m.endswith("_active") or m == "gpu_util" else r
                for m, r in first.readings.items()}
    devices = [replace(first, info=replace(first.info, mig_mode=True), readings=of_whole, processes=())]
    held: list[GpuProcess] = []
    for part, (profile, share) in enumerate((("3g.40gb", 0.5), ("2g.20gb", 0.25), ("1g.10gb", 0.125))):
        uuid = f"MIG-5104a7ed-0000-4000-8000-00000000000{part}"
        info = replace(first.info, uuid=uuid, name=f"{first.info.name} MIG {profile}", mig=part)
        kept = {m: r for m, r in first.readings.items() if m in ("sm_active", "tensor_active", "dram_active")}
        busy = part < 2
        readings = {m: replace(r, value=(r.value or 0.0) * (1 - part / 3) * busy) for m, r in kept.items()}
        total = 79.6 * 2**30 * share
        readings["memory_total_bytes"] = Reading(total, "bytes", "simulated")
        readings["memory_used_bytes"] = Reading(total * (0.9 if busy else 0.001), "bytes", "simulated")
        no_util = Reading.missing("ratio", "NVML reports no utilization for MIG instances", "NVML")
        own = tuple(GpuProcess(PID + part, "C", part, Reading(total * 0.89, "bytes", "simulated"), no_util)
                    for _ in range(busy))
        held += own
        devices.append(replace(first, info=info, readings={**readings, "gpu_util": no_util}, processes=own))
    process = sample.processes[0]
    processes = tuple(replace(process, pid=p.pid, gpus={0: p}, command=f"{process.command} --part {p.mig}")
                      for p in held)
    return replace(sample, gpus=(*devices, second), processes=processes)


def without_gpus(sample: NodeSample) -> NodeSample:
    error = open_error(LIBRARY_NOT_FOUND)
    served = tuple(replace(process, gpus={}) for process in sample.processes)  # as a node without GPUs lists them
    return replace(sample, gpus=(), processes=served, source=f"{error.message} {error.fix}")


# -- what was recorded ---------------------------------------------------------------------------


class Samples:
    """A recording in memory, as a player takes it."""

    def __init__(self, samples: Sequence[NodeSample]) -> None:
        self._samples = samples
        self.times_s = [sample.time_s for sample in samples]

    def __len__(self) -> int:
        return len(self._samples)

    def sample(self, index: int) -> NodeSample:
        return self._samples[index]

    def index_at(self, time_s: float) -> int:
        return max(0, bisect_right(self.times_s, time_s) - 1)

    def close(self) -> None: ...


class Replayed(Session):
    """A player's recording that stands at one of its samples; its thread never starts."""

    def __init__(self, player: Player, at: int, snapshot: Snapshot | None = None) -> None:
        super().__init__(player, replayed_snapshot=snapshot)
        for index in range(at + 1):
            self.feed.player._index = index
            self.feed.on_sample(self.feed.player.recording.sample(index))

    def start(self) -> None: ...


def recorded(seconds: int = 200) -> Replayed:
    """A recording of the node, at twice its pace, with a minute to go."""
    return Replayed(Player(Samples(backfill("input-bound")[-seconds:]), speed=2.0), seconds - 60)


def snapshot_of(scene: Scene, folder: Path) -> Replayed:
    """A snapshot of a session, written and read back."""
    from gputop.export.snapshot import write_snapshot

    path = next(p for p in write_snapshot(scene, folder) if p.suffix == ".json")
    snapshot = read(path)
    player = SnapshotPlayer(snapshot)
    return Replayed(player, len(player.recording) - 1, snapshot)
