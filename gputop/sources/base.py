"""The interface of a source of samples. Each way to read a node is one class that satisfies :class:`Source`.

A source is opened once, from a background thread. Each of its probes is then called from one thread at a time, so a
probe may keep state without locks. The sampler (:mod:`gputop.telemetry.sampler`) owns the threads and the clock.

Units are those of :mod:`gputop.core.metrics`: ratios 0-1, bytes, bytes/s, W, °C, Hz. A value that cannot be read is a
:class:`~gputop.core.samples.Reading` with the reason, never 0. All times named ``now_s`` are Unix time in seconds.

Errors: :meth:`Source.open` alone raises (:class:`~gputop.core.errors.GputopError`, with cause and fix). A probe
never raises for a sick device: it returns a sample whose ``state`` and ``message`` say what is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from gputop.core.samples import GpuInfo, GpuSample, HostSample, NodeSample, ProcessSample, XidEvent

if TYPE_CHECKING:
    from gputop.sources.host.source import PsutilHost


class GpuProbe(Protocol):
    """Reads one GPU, or one MIG instance."""

    @property
    def info(self) -> GpuInfo:
        """Facts about the GPU that do not change while gputop runs; from any thread."""
        ...

    def read(self, now_s: float) -> GpuSample:
        """One sample. Blocks for as long as the driver does."""
        ...

    def xids(self) -> tuple[tuple[XidEvent, ...], str | None]:
        """The Xid events reported so far, oldest first, or why they are not known.

        Never blocks. May be called from any thread, also while :meth:`read` hangs: these events say why it does.
        """
        ...


class HostProbe(Protocol):
    """Reads the host and the processes that hold GPUs."""

    def read(self, now_s: float) -> HostSample:
        """One sample. Rates cover the time since the sample before and are missing in the first."""
        ...

    def processes(self, now_s: float, gpus: Sequence[GpuSample]) -> tuple[ProcessSample, ...]:
        """One entry for each PID that ``gpus`` list, joined with what the host knows about it."""
        ...


class Source(Protocol):
    """A way to get samples. ``simulated`` marks every export."""

    simulated: bool

    @property
    def label(self) -> str:
        """Label of what is read, for the header: "NVML + GPM, driver 580.65"."""
        ...

    def open(self) -> None:
        """Connect and find the GPUs; may block for seconds.

        Raises :class:`~gputop.core.errors.GputopError` with cause and fix: :class:`~gputop.core.errors.NoDataError`
        where there is no GPU.
        """
        ...

    @property
    def gpus(self) -> Sequence[GpuProbe]:
        """The probes of the GPUs to watch, a GPU before its MIG instances; empty before :meth:`open`."""
        ...

    @property
    def gpus_present(self) -> int | None:
        """Number of the node's GPUs, watched or not; None where that is not known."""
        ...

    @property
    def host(self) -> HostProbe:
        """The host's probe, after :meth:`open`. The first access may import what it needs."""
        ...

    def backfill(self, now_s: float, interval_s: float) -> Iterable[NodeSample]:
        """Samples of the time before ``now_s``, ``interval_s`` apart, oldest first, where the source has them.

        Called once, on a thread of its own while the probes are already read; may block.
        """
        ...

    def profiler_endpoints(self) -> Mapping[str, str]:
        """Profiler servers that this source itself provides: ``{"127.0.0.1:6009": description}``."""
        ...

    def close(self) -> None:
        """Release the driver or connection. Called only while no probe is in a call."""
        ...


class LiveSource:
    """Base of the sources that read a node as it is now: without earlier time to give, and without a server."""

    simulated = False
    _own_host: PsutilHost | None = None

    def own_host(self, clock: Callable[[], float] = time.monotonic) -> PsutilHost:
        """The probe of this node, made at the first call."""
        if self._own_host is None:
            # Imported late: psutil and the readers of /proc take longer to import than the GPUs to read.
            from gputop.sources.host.source import PsutilHost

            self._own_host = PsutilHost(clock=clock)
        return self._own_host

    def backfill(self, now_s: float, interval_s: float) -> Iterable[NodeSample]:
        return ()

    def profiler_endpoints(self) -> Mapping[str, str]:
        return {}
