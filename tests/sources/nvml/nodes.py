"""Nodes with the fake driver's GPUs, read at times that tests choose."""

from __future__ import annotations

from gputop.core.samples import GpuSample
from gputop.sources.base import GpuProbe
from gputop.sources.nvml.source import NvmlSource
from tests.nvml_fake import FakeNvml
from tests.sources.conftest import Clock


class Node:
    """GPUs under these settings of the fake; ``options`` are those of the source."""

    def __init__(self, fake: FakeNvml, *settings: str, gpus: tuple[str, ...] = (), **options: object) -> None:
        fake.configure(*settings)
        self.clock = Clock(fake)
        self.source = NvmlSource(gpus, clock=self.clock, wall_clock=self.clock, **options)
        self.source.open()

    @property
    def gpus(self) -> tuple[GpuProbe, ...]:
        return self.source.gpus

    @property
    def labels(self) -> list[str]:
        return [probe.info.label for probe in self.gpus]

    def samples(self, after_s: float = 0.0) -> list[GpuSample]:
        """One of each GPU."""
        self.clock.advance(after_s)
        return [probe.read(0.0) for probe in self.gpus]

    def sample(self, gpu: int = 0, after_s: float = 0.0, times: int = 1) -> GpuSample:
        """The last of some samples of a GPU."""
        for _ in range(times):
            self.clock.advance(after_s)
            sample = self.gpus[gpu].read(0.0)
        return sample
