"""Samples and sessions for tests of the views: every figure follows from the tick's number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import cache, lru_cache
from pathlib import Path
from typing import TypeVar

from gputop.core.metrics import CGROUP_METRICS
from gputop.core.samples import (
    NO_LIMIT,
    CgroupSample,
    GpuInfo,
    GpuProcess,
    GpuSample,
    HostSample,
    NodeSample,
    ProcessSample,
    Reading,
)
from gputop.session.session import Options, Session
from gputop.telemetry.history import History
from gputop.telemetry.ring_buffers import SampleRing, Tier, _Table
from gputop.telemetry.step_period import StepPeriodEstimate, estimate_step_period
from tests.records import replace

START_S = 1_800_000_000.0
GIB = 2**30

_FEW = 12  # samples up to which a session is told each, from the first on

Ring = TypeVar("Ring", SampleRing, Tier)

Change = Callable[[GpuSample, int], GpuSample]


def reading(value: float | None, unit: str = "ratio") -> Reading:
    return Reading.missing(unit, "the test says so") if value is None else Reading(value, unit, "test")


@cache  # the same 300 for each of some hundred sessions; nothing changes a sample
def gpu_sample(index: int, tick: int, *, fine: bool = True) -> GpuSample:
    """A GPU in a sawtooth of period 20 ticks, shifted by its index."""
    level = ((tick + 2 * index) % 20) / 20
    readings = {
        "sm_active": Reading(level, "ratio", "GPM") if fine else Reading.missing("ratio", "GPM needs Hopper or newer"),
        "gpu_util": Reading(min(1.0, level + 0.2), "ratio", "NVML", coarse=True),
        "tensor_active": reading(level / 2), "dram_active": reading(level / 3),
        "memory_used_bytes": reading(71.2 * GIB, "bytes"), "memory_total_bytes": reading(79.6 * GIB, "bytes"),
        "pcie_rx_bytes_per_s": reading(12.1e9 * level, "bytes/s"), "pcie_tx_bytes_per_s": reading(0.4e9, "bytes/s"),
        "pcie_max_bytes_per_s": reading(63e9, "bytes/s"),
        "nvlink_rx_bytes_per_s": reading(90e9, "bytes/s"), "nvlink_tx_bytes_per_s": reading(90e9, "bytes/s"),
        "power_w": reading(300 + 380 * level, "W"), "power_limit_w": reading(700, "W"),
        "temperature_c": reading(50 + index, "°C"),
        "sm_clock_hz": reading(1.755e9, "Hz"), "sm_clock_max_hz": reading(1.98e9, "Hz"),
    }
    process = GpuProcess(41231, "C", None, reading(70.8 * GIB, "bytes"), reading(level))
    info = GpuInfo(index, f"GPU-test-{index}", "NVIDIA H100 80GB HBM3", f"0000:{index:02x}:00.0", 5, 16)
    return GpuSample(info, readings, (process,))


def cgroup_sample(name: str = "slurm 48213", **values: float | None) -> CgroupSample:
    """A control group with these figures; None: no limit."""
    return CgroupSample(name, {m: Reading.missing(CGROUP_METRICS[m].unit, NO_LIMIT) if v is None
                               else Reading(v, CGROUP_METRICS[m].unit, "cgroup") for m, v in values.items()})


@lru_cache(maxsize=1024)  # some hundred sessions begin with the same
def still_node(tick: int, gpus: int, fine: bool) -> NodeSample:
    return node_sample(tick, gpus, fine=fine)


def node_sample(tick: int, gpus: int = 8, *, fine: bool = True, change: Change | None = None) -> NodeSample:
    gpus_now = [gpu_sample(i, tick, fine=fine) for i in range(gpus)]
    if change is not None:
        gpus_now = [change(g, tick) for g in gpus_now]
    host = HostSample("node-07", {
        "cpu_ratio": reading(0.31), "iowait_ratio": reading(0.02),
        "memory_used_bytes": reading(212 * GIB, "bytes"), "memory_total_bytes": reading(1008 * GIB, "bytes"),
        "disk_read_bytes_per_s": reading(1.2e9, "bytes/s"), "disk_write_bytes_per_s": reading(3e6, "bytes/s"),
        "net_rx_bytes_per_s": reading(90e6, "bytes/s"), "net_tx_bytes_per_s": reading(None, "bytes/s"),
    }, 96)
    held = {g.info.index: g.processes[0] for g in gpus_now if g.processes}
    process = ProcessSample(41231, "ana", "python train.py --batch 256", reading(6.4, "cores"),
                            reading(40 * GIB, "bytes"), 212, held)
    return NodeSample(START_S + tick, tuple(gpus_now), host, (process,), 1.0, "NVML + GPM, driver 580.65", False, 0.008)


def history_of(ticks: int, gpus: int = 1, *, change: Change | None = None, **options: object) -> History:
    """A history with these ``options`` after so many samples."""
    history = History(**options)  # type: ignore[arg-type]
    for tick in range(ticks):
        history.append(node_sample(tick, gpus, change=change))
    return history


@lru_cache(maxsize=16)
def _still_history(ticks: int, gpus: int, fine: bool) -> History:
    history = History()
    for tick in range(ticks):
        history.append(still_node(tick, gpus, fine))
    return history


@lru_cache(maxsize=16)
def _still_step_period(ticks: int, gpus: int, fine: bool) -> StepPeriodEstimate:
    return estimate_step_period(_still_history(ticks, gpus, fine))


def _copy(history: History) -> History:
    """Another one of the same samples of the same GPUs: it takes a tenth of what it takes to add them."""
    twin = History()
    vars(twin).update({name: copy(value) for name, value in vars(history).items() if name != "_lock"})
    (rings,) = history._rings
    twin._rings = [copy(rings)]
    twin._slots = {uuid: replace(slot, rings=twin._rings[0]) for uuid, slot in history._slots.items()}
    twin._rings[0].samples = _with_own_tables(rings.samples, range(rings.samples.kept))
    twin._rings[0]._tiers = [_copy_of_tier(tier) for tier in rings._tiers]
    return twin


def _copy_of_tier(tier: Tier) -> Tier:
    tier._store()
    twin = _with_own_tables(tier, [row for row, slot in enumerate(tier._slots) if slot >= 0])
    twin._slots = tier._slots[:]
    if tier._open is not None:
        twin._open = replace(tier._open, levels=tier._open.levels[:])
    return twin


def _with_own_tables(ring: Ring, used: Iterable[int]) -> Ring:
    """A copy whose tables hold the rows that are used; the rest is untouched memory."""
    twin = copy(ring)
    for name, table in vars(ring).items():
        if isinstance(table, _Table):
            own = _Table(len(table.cells) // max(1, table.width), table.width, table._code)
            for row in used:
                own[row] = table[row]
            setattr(twin, name, own)
    return twin


class StillSource:
    """A source whose session is fed by the test; it never samples by itself."""

    simulated = False
    label = "test"
    gpus: Sequence = ()
    host = None
    gpus_present = None

    def open(self) -> None: ...

    def backfill(self, now_s: float, interval_s: float) -> Iterable[NodeSample]:
        return ()

    def profiler_endpoints(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None: ...


class StillSession(Session):
    """A session whose clock stands at its newest sample and whose threads never start."""

    def __init__(self, ticks: int = 300, logdir: Path | None = None, gpus: int = 8, fine: bool = True,
                 change: Change | None = None, judged: int = 2) -> None:
        """``judged``: of how many samples the live rules judge each; of all 300 that took most of a test's time."""
        self.tick = ticks - judged if ticks > _FEW else 0
        self._make = lambda tick: (still_node(tick, gpus, fine) if change is None
                                   else node_sample(tick, gpus, fine=fine, change=change))
        options = Options(logdir=logdir) if logdir else Options()
        super().__init__(StillSource(), options, clock=lambda: START_S + self.tick)
        if change is None and self.tick:
            self.feed.history = _copy(_still_history(self.tick, gpus, fine))
            self.feed.sample = self._make(self.tick - 1)
            self.sample_stored(self.feed.sample)
            self.feed.step_period = _still_step_period(self.tick, gpus, fine)
            self.feed._period_checked_s = self.feed.sample.time_s
        else:
            self.feed.on_backfill([self._make(tick) for tick in range(self.tick)])
        self.advance(ticks - self.tick)
        self.watch.servers_known = True

    def start(self) -> None: ...

    def holding(self, *processes: ProcessSample) -> StillSession:
        """The same, whose newest sample has these processes."""
        assert self.feed.sample is not None
        self.feed.sample = replace(self.feed.sample, processes=processes)
        return self

    def advance(self, ticks: int = 1) -> None:
        for _ in range(ticks):
            self.feed.on_sample(self._make(self.tick))
            self.tick += 1
