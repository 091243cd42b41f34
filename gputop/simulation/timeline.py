"""The timeline of a simulated job: when the host's and the GPUs' work happens, by cause and effect.

The host issues work in order. A GPU runs a stream in order: each kernel starts when it has been launched
and the one before it has ended. A collective ends on all GPUs at once. What a fault does to a step follows
from these rules, and the same job without the fault shows what it cost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from gputop.simulation.job import Copy, SimulatedJob
from gputop.simulation.program import I64, Phase, StepProgram

MS, US = 1_000_000, 1_000
LAUNCH_QUEUE = 500  # kernels that are launched at once at most: CUDA's queue holds about a thousand
GATHER_GB_PER_S = 220.0  # over NVLink


class StreamOps(NamedTuple):
    """Operations of one stream of one GPU, in order: when each ran and when the host's launch call ran.

    ``row`` is the kernel's row in the GPU's program, or the collective's number in the step.
    """

    row: I64
    start: I64
    end: I64
    launch: I64
    launch_end: I64

    @classmethod
    def join(cls, parts: Sequence[StreamOps]) -> StreamOps:
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return cls(*[np.empty(0, np.int64)] * 5)
        return cls(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def select(self, rows: slice | npt.NDArray[np.bool_]) -> StreamOps:
        return StreamOps(*(column[rows] for column in self))

    def shifted(self, by_ns: int) -> StreamOps:
        return StreamOps(self.row, self.start + by_ns, self.end + by_ns, self.launch + by_ns, self.launch_end + by_ns)


NO_OPS = StreamOps.join([])


class CopyEvent(NamedTuple):
    copy: Copy
    op: str
    start: int
    end: int
    launch: int
    launch_end: int

    def shifted(self, by_ns: int) -> CopyEvent:
        return CopyEvent(self.copy, self.op, *(time + by_ns for time in self[2:]))


class HostEvent(Struct, frozen=True):
    """``thread``: python, get_next, resource, compute<gpu>, map<worker>, or a name of its own."""

    thread: str
    name: str
    start: int
    end: int
    stats: dict[str, int | float | str] = field(default_factory=dict)


class Step(Struct):
    """One optimizer step, or one step of an evaluation.

    Python's call lasts from ``start`` to ``back``. It asks for the batch at ``request`` and has it at ``ready``.
    """

    start: int
    request: int
    ready: int
    issued: int  # end of the last launch
    back: int
    device_end: int
    training: bool = True


class JobTimeline(Struct):
    job: SimulatedJob
    programs: list[StepProgram]
    compute: list[StreamOps]
    collectives: list[StreamOps]
    copies: list[list[CopyEvent]]
    host: list[HostEvent]
    steps: list[Step]
    batches: list[tuple[int, int]]  # when each step's batch was made
    end: int


class SimulatedPipeline:
    """Makes one batch after the other while its prefetch buffer has room."""

    def __init__(self, depth: int, start_ns: int = 0) -> None:
        self._free_ns = start_ns
        self._taken_ns = deque([start_ns] * depth, maxlen=depth)

    def take(self, request_ns: int, work_ns: int) -> tuple[int, int, int]:
        """Ask for the next batch: when its making began and ended, and when the caller has it."""
        return self._make(max(self._free_ns, self._taken_ns[0]), request_ns, work_ns)

    def _make(self, begin: int, request_ns: int, work_ns: int) -> tuple[int, int, int]:
        self._free_ns = begin + work_ns
        has = max(request_ns + 30 * US, self._free_ns + 12 * US)
        self._taken_ns.append(has)
        return begin, self._free_ns, has


def run_in_order(ready_ns: I64, duration_ns: I64, free_ns: int, gap_ns: int) -> tuple[I64, I64]:
    """Start and end of operations on one stream.

    Each starts when it is ready and ``gap_ns`` after the end of the one before, the first not before ``free_ns``.
    """
    spacing = duration_ns + gap_ns
    before = np.cumsum(spacing) - spacing
    slack = ready_ns - before
    slack[0] = max(slack[0], free_ns)
    start = before + np.maximum.accumulate(slack)
    return start, start + duration_ns


class Simulation:
    """The steps of a job that waits for each one's result. The host's events are not part of it."""

    def __init__(self, job: SimulatedJob, programs: list[StepProgram]) -> None:
        self.job = job
        self.programs = programs
        self.gpus = range(job.gpus)
        count = len(self.gpus)
        self.compute: list[list[StreamOps]] = [[] for _ in self.gpus]
        self.collectives: list[list[StreamOps]] = [[] for _ in self.gpus]
        self.copies: list[list[CopyEvent]] = [[] for _ in self.gpus]
        self.steps: list[Step] = []
        self.batches: list[tuple[int, int]] = []
        self.rng = {name: job.rng(name) for name in ("device", "launch", "host", "input", "comm")}
        self.free = [0] * count  # when the compute stream is
        self.comm_free = [0] * count
        self.input = SimulatedPipeline(job.prefetch)
        # GPUs of one kind differ a little in clock.
        self.factor = [1 + 0.004 * clock for clock in job.rng("clock").normal(size=count).tolist()]

    def run(self) -> JobTimeline:
        now = 6 * MS
        for _ in range(self.job.steps):
            step = self._step(now)
            self.steps.append(step)
            now = step.back = self._fetch_loss(step)
            now += int(self._vary(self.job.gap_ms * MS, "host", 0.1))
        return self._timeline(now)

    def _timeline(self, now: int) -> JobTimeline:
        return JobTimeline(
            self.job, self.programs, [StreamOps.join(parts) for parts in self.compute],
            [StreamOps.join(parts) for parts in self.collectives], self.copies, [], self.steps, self.batches,
            max([now, *self.free, *(s.device_end for s in self.steps)]))

    def _vary(self, mean_ns: float, stream: str, spread: float = 0.06) -> float:
        return mean_ns * float(np.exp(self.rng[stream].normal(0.0, spread)))

    def _fetch_loss(self, step: Step) -> int:
        """The host waits for the step's result; returns when Python has it."""
        now = max(step.issued + int(self._vary(0.1 * MS, "host")), step.device_end + 25 * US)
        self.copies[0].append(CopyEvent(
            Copy("D2H", 4, 0.002, "device", "pageable"), "Mean:Mean", step.device_end + 2 * US,
            step.device_end + 4 * US, step.issued + 5 * US, now - 5 * US))
        return now

    def _step(self, start: int) -> Step:
        request = start + int(self._vary(0.18 * MS, "host")) + int(self._vary(0.12 * MS, "host"))
        ready = self._batch(request, int(self._vary(self.job.produce_ms * MS, "input", self.job.input_jitter)))
        issued, last = self._data_parallel(ready + int(self._vary(self.job.function_start_ms * MS, "host")))
        collected = self._collectives(last, issued) if self.job.training else [0] * len(self.gpus)
        if self.job.training:
            for g in self.gpus:
                issued[g], _ = self._phase(g, Phase.APPLY, issued[g], collected[g])
        device_end = max(*self.free, *collected)
        return Step(start, request, ready, max(issued), max(issued), device_end, self.job.training)

    def _batch(self, request: int, work_ns: int) -> int:
        """Time at which the batch asked for at ``request`` is there."""
        begin, end, ready = self.input.take(request, work_ns)
        self.batches.append((begin, end))
        return ready

    def _launches_begin(self, begin: int) -> list[int]:
        return [begin + int(g * self.job.thread_stagger_us * US) for g in self.gpus]

    def _data_parallel(self, begin: int) -> tuple[list[int], list[StreamOps]]:
        """Forward and backward pass on all GPUs: when each is launched, and the kernels of the last pass."""
        job = self.job
        issued = self._launches_begin(begin)
        last = [NO_OPS] * len(issued)
        gather = Copy("P2P", round(job.gather_mb * 1e6), GATHER_GB_PER_S, "device", "device")
        gathered = 0
        # GPU 0's extra kernels need what the others send.
        for g in [*self.gpus[1:], 0] if job.gather_mb else self.gpus:
            host, last[g] = self._phase(g, Phase.FORWARD, self._input_copy(g, issued[g]))
            if job.training:
                if g and job.gather_mb:
                    host, end = self._copy(g, gather, host, int(last[g].end[-1]), "concat_predictions:ConcatV2")
                    gathered = max(gathered, end)
                elif g == 0 and job.gpu0_extra_kernels:
                    host, _ = self._phase(g, Phase.EXTRA, host, gathered)
                host, last[g] = self._phase(g, Phase.BACKWARD, host)
            issued[g] = host
        return issued, last

    def _input_copy(self, gpu: int, host: int) -> int:
        """Copy the batch to the GPU, from pinned memory."""
        size, rate = round(self.job.batch_mb * 1e6), self.job.h2d_gb_per_s
        end = host + 7 * US + int(size / rate)
        self.copies[gpu].append(CopyEvent(Copy("H2D", size, rate, "pinned", "device"),
                                          "IteratorGetNext:IteratorGetNext", host + 7 * US, end, host, host + 6 * US))
        self.free[gpu] = max(self.free[gpu], end)
        return host + 11 * US

    def _copy(self, gpu: int, copy: Copy, host: int, after: int, op: str) -> tuple[int, int]:
        """One copy in the stream's order: the end of its call and of the copy."""
        length = int(copy.size / copy.gb_per_s) + 1_400
        begin = max(host + 6 * US, after)
        call_end = host + 5 * US
        self.copies[gpu].append(CopyEvent(copy, op, begin, begin + length, host, call_end))
        return call_end, begin + length

    def _phase(self, gpu: int, phase: Phase, host: int, after: int = 0) -> tuple[int, StreamOps]:
        """Launch and run the kernels of a phase: when launched, and the kernels."""
        rows = self.programs[gpu].rows(phase)
        self.free[gpu] = max(self.free[gpu], after)
        ran = []
        for low in range(0, len(rows), LAUNCH_QUEUE):
            ran.append(self._kernels(gpu, rows[low:low + LAUNCH_QUEUE], host))
            host = int(ran[-1].launch_end[-1])
        self.compute[gpu] += ran
        return host, StreamOps.join(ran)

    def _launch_gaps(self, count: int) -> npt.NDArray[np.float64]:
        """Nanoseconds between the launches of so many kernels."""
        jitter = np.exp(self.rng["launch"].normal(0.0, self.job.launch_jitter, count))
        return self.job.launch_us * US * jitter

    def _kernels(self, gpu: int, rows: I64, host: int) -> StreamOps:
        job, program = self.job, self.programs[gpu]
        gaps = self._launch_gaps(len(rows))
        launch = host + np.cumsum(gaps).astype(np.int64)
        call = np.minimum(gaps * 0.55, 5.5 * US).astype(np.int64)
        jitter = np.exp(self.rng["device"].normal(0.0, job.jitter, len(rows)))
        length = np.maximum(program.mean_ns[rows] * jitter * self.factor[gpu], 700).astype(np.int64)
        gap = int(job.kernel_gap_us * US)
        start, end = run_in_order(launch + call + int(job.latency_us * US), length, self.free[gpu], gap)
        self.free[gpu] = int(end[-1]) + gap
        return StreamOps(rows, start, end, launch, launch + call)

    def _collectives(self, backward: Sequence[StreamOps], issued: list[int]) -> list[int]:
        """AllReduce of the gradients in pieces, as the backward pass yields them or after it; their end per GPU."""
        job = self.job
        n = job.comm_count
        ready_share = np.linspace(1 / n, 1, n) if job.comm_overlap else np.ones(n)
        transfer = job.comm_ms * MS / n * np.exp(self.rng["comm"].normal(0.0, 0.03, n))
        part = (transfer + job.comm_latency_us * US).astype(np.int64)
        launch, ready = [], []
        for g in self.gpus:
            rows = (ready_share * len(backward[g].row)).astype(np.int64) - 1
            # Each needs a launch of its own, on the thread that launches the GPU's kernels.
            if not job.comm_overlap:
                launched = issued[g] + (np.arange(n) + 1) * int(job.launch_us * US)
                issued[g] = int(launched[-1])
            else:
                launched = backward[g].launch_end[rows] + US
            launch.append(launched)
            ready.append(np.maximum(backward[g].end[rows], launched + int(job.latency_us * US)) + 3 * US)
        _, end = run_in_order(np.max(ready, axis=0), part, max(self.comm_free), 0)
        collected = []
        for g in self.gpus:
            skew = self.rng["comm"].integers(0, max(int(job.comm_skew_us * US), 1), n)
            own_end = np.maximum.accumulate(end + skew)
            before = np.concatenate(([self.comm_free[g]], own_end[:-1] + 900))
            start = np.minimum(np.maximum(ready[g], before), own_end - 1_000)
            self.collectives[g].append(StreamOps(np.arange(n), start, own_end, launch[g], launch[g] + 4 * US))
            self.comm_free[g] = int(own_end[-1])
            collected.append(int(own_end[-1]) + 2 * US)
        return collected
