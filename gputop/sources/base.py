"""Where samples come from. Each way to look at a node is one module with one class that
satisfies :class:`Source`; the sampler (``gputop.telemetry.sampler``) does the threads and the clock.

A source is opened once, from a background thread. Its probes are then called from one
thread each, never from two at once, so a probe may keep state without locks. A probe
never raises for a sick device: it returns a :class:`~gputop.core.samples.GpuSample` whose state
says what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from gputop.core.samples import GpuInfo, GpuSample, HostSample, NodeSample, ProcessSample, XidEvent


class GpuProbe(Protocol):
    """Reads one GPU."""

    @property
    def info(self) -> GpuInfo: ...

    def read(self, now_s: float) -> GpuSample:
        """One look. May block for as long as the driver does; ``now_s`` is Unix time."""
        ...

    def xids(self) -> tuple[tuple[XidEvent, ...], str | None]:
        """The faults reported so far, or why they are not known. Never blocks; from any thread, also
        while :meth:`read` hangs: the driver says why it does by just these."""
        ...


class HostProbe(Protocol):
    """Reads the host and the processes that hold GPUs."""

    def read(self, now_s: float) -> HostSample: ...

    def processes(self, now_s: float, gpus: Sequence[GpuSample]) -> tuple[ProcessSample, ...]:
        """Join the processes named by ``gpus`` with what the host knows of them."""
        ...


class Source(Protocol):
    """A way to get samples. ``label`` is for the header; ``simulated`` marks every export."""

    simulated: bool

    @property
    def label(self) -> str: ...

    def open(self) -> None:
        """Connect. Raises :class:`gputop.core.errors.GputopError` with the cause and the fix."""
        ...

    @property
    def gpus(self) -> Sequence[GpuProbe]: ...

    @property
    def gpus_present(self) -> int | None:
        """How many GPUs the node has, watched or not; None where that is not known."""
        ...

    @property
    def host(self) -> HostProbe: ...

    def backfill(self, now_s: float, interval_s: float) -> Iterable[NodeSample]:
        """Samples of the time before ``now_s``, oldest first, where the source knows them.

        Called once, from a thread of its own while the probes are already read; may block.
        """
        ...

    def profiler_endpoints(self) -> Mapping[str, str]:
        """Profiler servers this source itself brings, ``{"127.0.0.1:6009": description}``."""
        ...

    def close(self) -> None: ...
