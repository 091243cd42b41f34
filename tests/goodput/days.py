"""Samples of days, cheaply: two GPUs, one job, planted events."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from gputop.core.samples import (
    CgroupSample,
    GpuInfo,
    GpuProcess,
    GpuSample,
    HostSample,
    NodeSample,
    ProcessSample,
    Reading,
)
from tests.records import replace

START_S = 1_800_000_000.0  # a full hour
GIB = float(1 << 30)
POWER_W = {"train": 600.0, "wait": 150.0, "save": 150.0, "hang": 200.0, "free": 75.0, "load": 150.0}


def value(number: float, unit: str = "ratio") -> Reading:
    return Reading(number, unit, "test")


@lru_cache(maxsize=256)
def gpu(index: int, what: str, pid: int) -> GpuSample:
    works = what == "train"
    busy = {"train": 0.8, "hang": 0.2}.get(what, 0.0)
    held = () if what == "free" else (GpuProcess(pid, "C", None, value(40 * GIB, "bytes"), value(busy)),)
    return GpuSample(GpuInfo(index, f"GPU-{index}", "NVIDIA H100"), {
        "sm_active": value(busy), "gpu_util": value(1.0 if busy else 0.0), "tensor_active": value(0.4 * works),
        "dram_active": value(0.3 * works), "power_w": value(POWER_W[what], "W"), "power_limit_w": value(700.0, "W")},
        held)


def node(time_s: float, what: str, pid: int = 100, *, gpus: int = 2, rss: float = 8 * GIB, used: float = 90 * GIB,
         command: str = "python train.py --lr 1", group: CgroupSample | None = None) -> NodeSample:
    on = tuple(gpu(i, what, pid) for i in range(gpus))
    host = HostSample("node-1", {"memory_used_bytes": value(used, "bytes"),
                                 "memory_total_bytes": value(256 * GIB, "bytes")})
    process = () if what == "free" else (ProcessSample(
        pid, "ana", command, value(1.0, "cores"), value(rss, "bytes"), started_s=START_S + pid, cgroup=group,
        io_write_bytes_per_s=value(500e6 if what == "save" else 1e3, "bytes/s"),
        gpus={own.info.index: own.processes[0] for own in on}),)
    return NodeSample(time_s, on, host, process, 60.0, "test")


def without_power(sample: NodeSample) -> NodeSample:
    return replace(sample, gpus=tuple(replace(own, readings={
        **own.readings, "power_w": Reading.missing("W", "the test says so")}) for own in sample.gpus))


# Minutes of a day, the same for each GPU; the 470 of the hang are in training on all days but one.
PLANTED = {"checkpoint": 20, "waiting": 90, "restart": 10, "idle": 120, "training": 1200}
HANG_DAY, HANG_MINUTES = 3, 470


def fortnight() -> Iterator[tuple[float, str, int]]:
    """Time, what the GPUs do, and the process: each day four checkpoints of 5 min, a stall of 90 min, a restart of 10
    min (4 of them start-up) and 2 h without a job; on one day a collective hangs."""
    for tick in range(14 * 1440):
        day, minute = divmod(tick, 1440)
        what = "train"
        if minute % 360 < 5:
            what = "save"
        elif 400 <= minute < 490:
            what = "wait"
        elif 600 <= minute < 610:
            what = "free" if minute < 606 else "load"
        elif 1200 <= minute < 1320:
            what = "free"
        elif day == HANG_DAY and 720 <= minute < 1200:
            what = "hang"
        yield START_S + 60.0 * (tick + 1), what, int(100 + 2 * day + (minute >= 600) + (minute >= 1200))
