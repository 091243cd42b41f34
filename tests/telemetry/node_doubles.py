"""A node whose probes answer, fail and hang as they are told."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

from gputop.core.samples import GpuInfo, GpuProcess, GpuSample, HostSample, NodeSample, ProcessSample, Reading, XidEvent
from tests.waiting import PATIENCE_S


class Probe:
    """A GPU that answers at once, unless its gate is closed."""

    def __init__(self, index: int) -> None:
        self.info = GpuInfo(index, f"GPU-{index}", "H100")
        self.gate = threading.Event()
        self.gate.set()
        self.reads = 0
        self.fault: Exception | None = None
        self.faults: tuple[XidEvent, ...] = ()

    def read(self, now_s: float) -> GpuSample:
        self.reads += 1
        if not self.gate.wait(PATIENCE_S):
            raise TimeoutError
        if self.fault is not None:
            raise self.fault
        held = GpuProcess(7, "C", None, Reading(1.0, "bytes"), Reading(0.5, "ratio"))
        return GpuSample(self.info, {"power_w": Reading(float(self.reads), "W")}, (held,))


    def xids(self) -> tuple[tuple[XidEvent, ...], str | None]:
        return self.faults, None


class Host:
    def __init__(self) -> None:
        self.fault: Exception | None = None

    def read(self, now_s: float) -> HostSample:
        if self.fault is not None:
            raise self.fault
        return HostSample("node", {"cpu_ratio": Reading(0.5, "ratio")}, 4)

    def processes(self, now_s: float, gpus: Sequence[GpuSample]) -> tuple[ProcessSample, ...]:
        if self.fault is not None:
            raise self.fault
        on = {gpu.info.index: gpu.processes[0] for gpu in gpus if gpu.processes}
        return (ProcessSample(7, "ana", "train.py", Reading(1.0, "count"), Reading(1.0, "bytes"), gpus=on),)


class Node:
    """A source of ``count`` probes."""

    simulated = False
    gpus_present = None
    label = "test"

    def __init__(self, count: int = 2, backfill: Iterable[NodeSample] = ()) -> None:
        self.gpus = tuple(Probe(i) for i in range(count))
        self.host = Host()
        self.backfilled = tuple(backfill)
        self.fault: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.closed = threading.Event()

    def open(self) -> None:
        self.gate.wait(PATIENCE_S)
        if self.fault is not None:
            raise self.fault

    def backfill(self, now_s: float, interval_s: float) -> Iterable[NodeSample]:
        return self.backfilled

    def profiler_endpoints(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None:
        self.closed.set()
