"""A simulated node (``--demo``): eight GPUs and a training job that do not exist.

All figures follow from :mod:`gputop.simulation`; every reading's source is "simulated".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gputop.core.samples import GpuInfo, GpuSample, HostSample, NodeSample, ProcessSample, XidEvent
from gputop.simulation.loop import LASTS_NS, HangingLoop, SimulatedLoop
from gputop.simulation.node import COMMAND, HOSTNAME, PID, SECOND_NS, SimulatedNode
from gputop.simulation.scenarios import DEFAULT_SCENARIO, GPU_COUNT, find_jobs
from gputop.sources.selection import select_gpus

if TYPE_CHECKING:
    from gputop.core.host_stacks import StackSamples
    from gputop.simulation.server import SimulatedProfilerServer

BACKFILL_S = 300.0
_BACKFILL_STEP_S = 1.0  # at least; finer ticks are for live samples
_LEAD_S = 32.0  # how far into an epoch the job is at the start: plain training before and after it
_FIRST_WINDOW_NS = SECOND_NS  # the time a first reading covers
_SHORTEST_WINDOW_NS = SECOND_NS // 100


class _Window:
    """The time since the last reading of a job."""

    def __init__(self) -> None:
        self._start = self._end = 0
        self._node: SimulatedNode | None = None

    def until(self, node: SimulatedNode, end_ns: int) -> tuple[int, int]:
        if not self._end or node is not self._node or end_ns < self._end:  # the last: the clock was set back
            self._node = node
            self._start, self._end = end_ns - _FIRST_WINDOW_NS, end_ns
        elif end_ns - self._end >= _SHORTEST_WINDOW_NS:
            self._start, self._end = self._end, end_ns
        return self._start, self._end


class _SimulatedGpu:
    def __init__(self, source: SimulatedSource, info: GpuInfo) -> None:
        self.info = info
        self._source = source
        self._window = _Window()

    def read(self, now_s: float) -> GpuSample:
        node, now_ns = self._source.at(now_s)
        return node.gpu(self.info.index, *self._window.until(node, now_ns))

    def xids(self) -> tuple[tuple[XidEvent, ...], str | None]:
        return (), None


class _SimulatedHost:
    def __init__(self, source: SimulatedSource) -> None:
        self._source = source
        self._window = _Window()
        self._last: tuple[HostSample, float] | None = None  # and the cores that the job used

    def read(self, now_s: float) -> HostSample:
        node, now_ns = self._source.at(now_s)
        self._last = node.host(*self._window.until(node, now_ns))
        return self._last[0]

    def processes(self, now_s: float, gpus: Sequence[GpuSample]) -> tuple[ProcessSample, ...]:
        held = {sample.info.index: sample.processes[0] for sample in gpus if sample.processes}
        if not held:
            return ()
        if self._last is None:
            self.read(now_s)
            assert self._last is not None
        return self._source.at(now_s)[0].processes(*self._last, held)


class SimulatedSource:
    """The simulated node as a source of samples.

    ``scenario``: one, or several with commas, whose jobs follow each other (:meth:`next_job`). ``gpus`` restricts which
    GPUs are shown (indices, ranges, UUIDs); the job uses all. Raises GputopError (exit status 2) for an unknown
    scenario, and from ``open`` for unknown GPUs.
    """

    simulated = True

    def __init__(self, scenario: str = DEFAULT_SCENARIO, *, gpus: Sequence[str] = (),
                 clock: Callable[[], float] = time.time) -> None:
        self._jobs = find_jobs(scenario)
        self._scenario = self._jobs[0]
        self._restarts = 0
        self._wanted = gpus
        self._clock = clock
        self._running: tuple[SimulatedNode, int] | None = None  # and the Unix time of its loop's start, ns
        self.gpus: tuple[_SimulatedGpu, ...] = ()
        self._host: _SimulatedHost | None = None
        self._server_lock = threading.Lock()
        self._server: SimulatedProfilerServer | None = None
        self._closed = False

    @property
    def label(self) -> str:
        return f"SIMULATED: {self._scenario.title}"

    def open(self) -> None:
        node, _ = self._running = self._running or self._started()  # opened again, the job goes on
        self.gpus = tuple(_SimulatedGpu(self, info) for info in select_gpus(self._wanted, node.infos))
        self._host = _SimulatedHost(self)

    def _started(self) -> tuple[SimulatedNode, int]:
        loop = HangingLoop(self._scenario) if self._scenario.hangs else SimulatedLoop(self._scenario)
        node = SimulatedNode(loop, PID + GPU_COUNT * self._restarts)
        now_ns, past_ns = int(self._clock() * 1e9), int((BACKFILL_S + 30.0) * 1e9)
        origin_ns = now_ns - int(_LEAD_S * 1e9) - loop.epoch_start(past_ns)
        if isinstance(loop, HangingLoop):
            loop.hang(now_ns - origin_ns - LASTS_NS)
        return node, origin_ns

    @property
    def may_hang(self) -> bool:
        """Return whether one of the jobs hangs."""
        return any(job.hangs for job in self._jobs)

    @property
    def hanging(self) -> tuple[HangingLoop, Sequence[int]] | None:
        """The job that hangs, and its processes by rank; None where it does not."""
        node = self._running[0] if self._running is not None else None
        return (node.loop, node.pids) if node is not None and isinstance(node.loop, HangingLoop) else None

    @property
    def hangs_since_s(self) -> float | None:
        """Unix time since which the job that hangs does; None where none does."""
        if self._running is None or not isinstance(loop := self._running[0].loop, HangingLoop) or loop.hangs_ns is None:
            return None
        return (self._running[1] + loop.hangs_ns) / 1e9

    def next_job(self) -> str | None:
        """End the job and run the next one, after the last the first; its title, or None where there is only one.

        It is simulated in a quarter of a second; the other job runs meanwhile.
        """
        if len(self._jobs) < 2:
            return None
        self._scenario = self._jobs[(self._jobs.index(self._scenario) + 1) % len(self._jobs)]
        self._restarts += 1  # another process, so that what was seen of the one before says nothing about it
        self._running = self._started()
        return self._scenario.title

    def _opened(self) -> tuple[SimulatedNode, int]:
        if self._running is None:
            raise RuntimeError("the source is not open")
        return self._running

    def at(self, now_s: float) -> tuple[SimulatedNode, int]:
        """The node with the job that runs now, and Unix seconds as time of its loop; the loop's first moments stand for
        all that is earlier."""
        node, origin_ns = self._opened()
        return node, max(int(now_s * 1e9) - origin_ns, 2 * _FIRST_WINDOW_NS)

    @property
    def gpus_present(self) -> int | None:
        """Number of the node's GPUs, those that ``gpus`` leaves out included; None before ``open``."""
        return None if self._running is None else len(self._running[0].infos)

    @property
    def host(self) -> _SimulatedHost:
        self._opened()
        assert self._host is not None
        return self._host

    def backfill(self, now_s: float, interval_s: float) -> Iterator[NodeSample]:
        """The last five minutes of the same job, one sample per interval (at most one a second)."""
        step_s = max(interval_s, _BACKFILL_STEP_S)
        count = int(BACKFILL_S / step_s)
        for i in range(count, 0, -1):
            time_s = now_s - i * step_s
            node, end_ns = self.at(time_s)
            start_ns = max(end_ns - int(step_s * 1e9), 0)
            sample = node.sample([gpu.info.index for gpu in self.gpus], start_ns, end_ns, time_s, self.label)
            yield replace(sample, gpus_present=self.gpus_present)

    def profiler_endpoints(self) -> Mapping[str, str]:
        """The job's profiler server. It starts when it is first asked for: gRPC is slow to import.

        Raises GputopError if it cannot start.
        """
        if self._running is None:
            return {}
        with self._server_lock:
            if self._server is None and not self._closed:
                from gputop.simulation.server import SimulatedProfilerServer

                self._server = SimulatedProfilerServer(self.capture, self._clock)
            return {self._server.address: f"{COMMAND} (SIMULATED)"} if self._server else {}

    def capture(self, start_unix_ns: int, end_unix_ns: int) -> bytes:
        """The serialized XSpace of the job in that time."""
        from gputop.simulation.xspace import build_xspace

        node, origin = self._opened()
        return build_xspace(node.loop, start_unix_ns - origin, end_unix_ns - origin, origin, HOSTNAME)

    def python_stacks(self, start_s: float, end_s: float) -> StackSamples | None:
        """The stacks of the job between these Unix times; None for a job that hangs, which has stacks of its own."""
        from gputop.simulation.host_events import python_stacks

        node, origin = self._opened()
        if isinstance(node.loop, HangingLoop):
            return None
        return python_stacks(node.loop, int(start_s * 1e9) - origin, int(end_s * 1e9) - origin, origin)

    def close(self) -> None:
        with self._server_lock:
            self._closed = True
            if self._server is not None:
                self._server.stop()
                self._server = None
