"""Nodes for the tests of the live rules: what runs where, and how busy each GPU is, over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from gputop.advice.live.advise import _outcome, live_advice
from gputop.advice.live.node_view import NodeView
from gputop.advice.live_rules import LIVE_RULES
from gputop.core.findings import Advice, Finding
from gputop.core.metrics import GPU_METRICS
from gputop.core.samples import GpuInfo, GpuProcess, GpuSample, HostSample, NodeSample, ProcessSample, Reading
from gputop.ranks.model import RasReport
from gputop.telemetry.history import History
from tests.fakes import cgroup_sample
from tests.records import replace

START_S = 1_800_000_000.0
TOTAL = 80e9

TIERS = ((1.0, 600), (10.0, 60), (60.0, 60))
LINK = 63e9  # PCIe 5 × 16

Level = float | Callable[[float], float]
STUCK: dict[str, Level | None] = {  # GPUs that wait for each other
    "tensor_active": 0.0, "dram_active": 0.001, "power_w": 130.0,
    "pcie_rx_bytes_per_s": 2e5, "pcie_tx_bytes_per_s": 2e5,
}


@dataclass(frozen=True)
class Job:
    """A process on some GPUs, alive from ``since_s`` to ``until_s`` of the scenario."""

    pid: int = 100
    gpus: Sequence[int] = tuple(range(8))
    command: str | None = "python train.py"
    user: str = "ana"
    memory: float = 0.5 * TOTAL
    sm: float | None = None
    since_s: float = 0.0
    until_s: float = 1e9
    cores: Level = 1.5
    parent: int | None = None
    started_s: float | None = None
    framework: str = ""
    granted_cores: float | None = None  # by its control group; None: it has none
    throttled: Level = 0.0  # there
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    reason: str | None = None  # why nothing more is known of it


@dataclass(frozen=True)
class Scene:
    """What a node does: activity per GPU (a number, or a function of time), and its jobs."""

    active: Mapping[int, Level] = field(default_factory=dict)
    jobs: Sequence[Job] = (Job(),)
    gpus: int = 8
    fine: bool = True
    util: Level = 1.0
    other: Mapping[str, Level | None] = field(default_factory=dict)
    events: Sequence[str] | None = ()
    change: Callable[[GpuSample, float], GpuSample] | None = None
    interval_s: float = 1.0
    watched: Sequence[int] | None = None  # as --gpus would; None: all
    cpu: Level | None = 0.3
    full_cores: Level | None = 0.0  # of 64
    cpu_limit_cores: float | None = None
    host_used: Level = 0.3  # share of its memory
    iowait: float = 0.0  # share of the CPUs' time

    def sample(self, t: float) -> NodeSample:
        jobs = [j for j in self.jobs if j.since_s <= t < j.until_s]
        watched = range(self.gpus) if self.watched is None else self.watched
        held = {j.pid: {g: GpuProcess(j.pid, "C", None, read("memory_used_bytes", j.memory), read("sm_active", j.sm))
                        for g in j.gpus if g in watched} for j in jobs}
        gpus = tuple(self.gpu(i, t, [h[i] for h in held.values() if i in h]) for i in watched)
        if self.change is not None:
            gpus = tuple(self.change(gpu, t) for gpu in gpus)
        processes = tuple(
            ProcessSample(j.pid, j.user, j.command, Reading(at(j.cores, t), "cores"), Reading(1e9, "bytes"), 10,
                          held[j.pid], j.reason or (None if j.command else "no permission"), j.parent, j.started_s,
                          framework=j.framework, cuda_visible_devices=j.visible,
                          cgroup=None if j.granted_cores is None else cgroup_sample(
                              "slurm 7", cpu_limit_cores=j.granted_cores, cpu_used_cores=at(j.cores, t),
                              cpu_throttled_ratio=at(j.throttled, t)))
            for j in jobs if held[j.pid] or not j.gpus)
        return NodeSample(START_S + t, gpus, self.host(t), processes, self.interval_s, gpus_present=self.gpus)

    def samples(self, seconds: float) -> list[NodeSample]:
        """Those of the first ``seconds``; if nothing changes meanwhile, one with the time of each."""
        times_s = [tick * self.interval_s for tick in range(round(seconds / self.interval_s))]
        levels = (*self.active.values(), *self.other.values(), self.util, self.cpu, self.full_cores, self.host_used,
                  *(level for job in self.jobs for level in (job.cores, job.throttled)))
        # What a kind of scene adds of its own may change, too.
        if type(self) is not Scene or self.change is not None or any(map(callable, levels)) or any(
                job.since_s > 0 or job.until_s <= seconds for job in self.jobs):
            return [self.sample(t) for t in times_s]
        still = self.sample(0.0)
        return [replace(still, time_s=START_S + t) for t in times_s]

    def host(self, t: float) -> HostSample:
        cpu = Reading.missing("ratio", "the test says so") if self.cpu is None else Reading(at(self.cpu, t), "ratio")
        full = None if self.full_cores is None else round(at(self.full_cores, t))
        cores = () if full is None else (1.0,) * full + (0.2,) * (64 - full)
        memory = {"memory_used_bytes": Reading(at(self.host_used, t) * 1e12, "bytes"),
                  "memory_total_bytes": Reading(1e12, "bytes")}
        memory["iowait_ratio"] = Reading(self.iowait, "ratio")
        return HostSample("test", {"cpu_ratio": cpu, **memory}, 64, cores, self.cpu_limit_cores)

    def gpu(self, index: int, t: float, processes: Sequence[GpuProcess]) -> GpuSample:
        level = at(self.active.get(index, 0.9 if processes else 0.0), t)
        used = sum(p.memory_bytes.value or 0 for p in processes)
        values: dict[str, float | None] = {
            "sm_active": level if self.fine else None, "gpu_util": at(self.util, t) if level else 0.0,
            "memory_used_bytes": used + 0.5e9, "memory_total_bytes": TOTAL, "power_w": 400.0, "power_limit_w": 700.0,
            "sm_clock_hz": 1.98e9, "sm_clock_max_hz": 1.98e9, "temperature_c": 60.0, "temperature_slowdown_c": 92.0,
            "tensor_active": 0.45 * level if self.fine else None, "dram_active": 0.35 * level if self.fine else None,
            "pcie_rx_bytes_per_s": 6e8 * level, "pcie_tx_bytes_per_s": 5e7 * level, "pcie_max_bytes_per_s": LINK,
            "pcie_gen": 5.0, "pcie_width": 16.0}
        values.update({m: None if v is None else at(v, t) for m, v in self.other.items()})
        info = GpuInfo(index, f"GPU-{index}", "H100", pcie_gen_max=5, pcie_width_max=16)
        return GpuSample(info, {m: read(m, v) for m, v in values.items()},
                         tuple(processes), None, tuple(self.events or ()),
                         "the test says so" if self.events is None else None)


def two(level: Level, job: Job | None = None, **how: Any) -> Scene:
    """Two GPUs of a job that do the same: over a long time they show it as well as eight, in less time."""
    return Scene({0: level, 1: level}, [replace(job or Job(), gpus=(0, 1))], gpus=2, **how)


def only(index: int, **values: float) -> Callable[[GpuSample, float], GpuSample]:
    """A change of a scene: one GPU has these readings."""
    readings = {m: read(m, v) for m, v in values.items()}
    return lambda gpu, t: gpu if gpu.info.index != index else replace(gpu, readings={**gpu.readings, **readings})


def at(level: Level, t: float) -> float:
    return level(t) if callable(level) else level


@lru_cache(maxsize=4096)  # most stay the same from sample to sample
def read(metric: str, value: float | None) -> Reading:
    unit = GPU_METRICS[metric].unit
    return Reading.missing(unit, "the test says so") if value is None else Reading(value, unit)


def play(scene: Scene, seconds: float, history: History | None = None, start: float = 0.0,
         previous: tuple[Finding, ...] = ()) -> tuple[History, list[Advice]]:
    """The advice of each tick from ``start`` for ``seconds``. Without a history the node was seen until ``start``."""
    history, out = history or recorded(scene, start)[0], []
    for tick in range(round(seconds / scene.interval_s)):
        sample = scene.sample(start + tick * scene.interval_s)
        history.append(sample)
        out.append(live_advice(history, sample, previous))
        previous = out[-1].findings
    return history, out


def after(scene: Scene, seconds: float, ranks: RasReport | None = None,
          unprotected: tuple[int, ...] | None = None, profiled: Mapping[int, float] | None = None) -> Advice:
    """The advice at the end alone, from nothing shown."""
    history, samples = recorded(scene, seconds)
    return live_advice(history, samples[-1], ranks=ranks, unprotected=unprotected, profiled=profiled)


def verdict(scene: Scene, seconds: float, id_: str, ranks: RasReport | None = None) -> Any:
    """What a rule computes at the end, before it is put into words."""
    history, samples = recorded(scene, seconds)
    view = NodeView(history, samples[-1], (), ranks)
    for rule in LIVE_RULES:
        if rule.id == id_:
            return rule.function("judge")(view)
        outcome = _outcome(rule, view)
        if isinstance(outcome, Finding):
            view.note(outcome)
    raise KeyError(id_)


def recorded(scene: Scene, seconds: float) -> tuple[History, list[NodeSample]]:
    """The history of its first ``seconds``, and their samples."""
    history = History(raw_samples=2000, tiers=TIERS)
    samples = scene.samples(seconds)
    for sample in samples:
        history.append(sample)
    return history, samples


def ids(advice: Advice) -> list[str]:
    return [f.id for f in advice.findings]


def get(advice: Advice, finding_id: str) -> Finding:
    return next(f for f in advice.findings if f.id == finding_id)


def abstained(advice: Advice) -> dict[str, str]:
    return {a.id: a.missing for a in advice.abstained}
