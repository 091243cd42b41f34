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

from gputop.simulation.job import KERAS_STYLES, Copy, MidStepWork, SimulatedJob
from gputop.simulation.program import I64, Phase, StepProgram, build_program

MS, US = 1_000_000, 1_000
_LAUNCH_QUEUE = 500  # kernels that are launched at once at most: CUDA's queue holds about a thousand
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
    first: bool  # the first of its call (always, but for steps_per_execution)
    trace: tuple[int, int]  # when its function was traced, if it was
    retraced: bool = False
    training: bool = True


class JobTimeline(Struct):
    job: SimulatedJob
    programs: list[StepProgram]
    compute: list[StreamOps]
    collectives: list[StreamOps]
    copies: list[list[CopyEvent]]
    host: list[HostEvent] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    batches: list[tuple[int, int]] = field(default_factory=list)  # when each step's batch was made
    end: int = 0


class SimulatedPipeline:
    """Makes one batch after the other while its prefetch buffer has room; without a buffer, when asked.

    ``ready`` batches were made before ``start_ns``.
    """

    def __init__(self, depth: int, start_ns: int = 0, ready: int = 0) -> None:
        self._depth = depth
        self._start_ns = self._free_ns = start_ns
        self._ready = ready
        self._taken_ns = deque([start_ns] * depth, maxlen=depth)

    def take(self, request_ns: int, work_ns: int) -> tuple[int, int, int]:
        """Ask for the next batch: when its making began and ended, and when the caller has it."""
        if self._ready:
            self._ready -= 1
            begin = self._start_ns - work_ns
        else:
            begin = max(self._free_ns, self._taken_ns[0]) if self._depth else request_ns + 15 * US
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


def simulate(job: SimulatedJob, lead: int | None = None, programs: list[StepProgram] | None = None) -> JobTimeline:
    """The job's timeline, with ``lead`` steps before those asked for (None: :func:`lead_steps`).

    ``programs`` are the GPUs' (None: :func:`job_programs`).
    """
    return _Simulation(job, programs or job_programs(job)).run(lead_steps(job) if lead is None else lead)


def job_programs(job: SimulatedJob) -> list[StepProgram]:
    count = 1 if job.cpu_only else job.gpus
    first = build_program(job)
    others = build_program(job, 1) if job.across.gpu0_extra_kernels and count > 1 else first
    return [first] + [others] * (count - 1)


def lead_steps(job: SimulatedJob) -> int:
    """Steps before the capture, in which queues and buffers reach their usual level."""
    if job.host.warm_up:
        return 0
    return 2 * job.host.run_ahead + 4 + min(job.input.prefetch, 6) * (not job.input.buffer_full)


class _Simulation:
    def __init__(self, job: SimulatedJob, programs: list[StepProgram]) -> None:
        self.job = job
        self.programs = programs
        self.gpus = range(0 if job.cpu_only else job.gpus)
        count = len(self.gpus)
        self.compute: list[list[StreamOps]] = [[] for _ in self.gpus]
        self.collectives: list[list[StreamOps]] = [[] for _ in self.gpus]
        self.copies: list[list[CopyEvent]] = [[] for _ in self.gpus]
        self.host: list[HostEvent] = []
        self.steps: list[Step] = []
        self.batches: list[tuple[int, int]] = []
        self.rng = {name: job.rng(name) for name in ("device", "launch", "stall", "host", "retrace", "late", "input",
                                                     "comm")}
        self.free = [0] * count  # when the compute stream is
        self.h2d_free = [0] * count
        self.comm_free = [0] * count
        self.chunk_starts: list[list[int]] = [[] for _ in self.gpus]
        self.input = SimulatedPipeline(job.input.prefetch, ready=job.input.prefetch if job.input.buffer_full else 0)
        factor = job.across.gpu_factor or (1.0,) * count
        # GPUs of one kind differ a little in clock.
        clocks = job.rng("clock").normal(size=count).tolist()
        self.factor = [gpu_factor * (1 + 0.004 * clock) for gpu_factor, clock in zip(factor, clocks, strict=False)]

    def run(self, lead: int) -> JobTimeline:
        job, now = self.job, 6 * MS
        per = job.iterations
        for n in range(lead + job.steps):
            if n > job.host.run_ahead:
                now = max(now, self.steps[(n - job.host.run_ahead) * per - 1].device_end)
            start = now
            traces = bool(job.host.retrace_every) and n % job.host.retrace_every == job.seed % job.host.retrace_every
            begin = start + int(self._vary(0.18 * MS, "host"))
            tracing = int(self._vary(job.host.retrace_ms * MS, "retrace", 0.1)) if traces else 0
            tracing += int(job.host.warm_up * MS) if n == 0 else 0
            for k in range(per):
                step = self._step(n * per + k, start if k == 0 else begin, begin, k == 0, 0 if k else tracing)
                step.retraced = traces and k == 0
                self.steps.append(step)
                begin = step.issued + 20 * US
            last = self.steps[-1]
            now = last.issued + int(self._vary(0.1 * MS, "host"))
            if job.host.run_ahead == 0:
                now = max(now, last.device_end + 25 * US)
                if self.copies:  # the loss
                    copy = Copy("D2H", 4, 0.002, "device", "pageable")
                    self.copies[0].append(CopyEvent(copy, "Mean:Mean", last.device_end + 2 * US,
                                                    last.device_end + 4 * US, last.issued + 5 * US, now - 5 * US))
            for step in self.steps[-per:]:
                step.back = now
            gap = int(self._vary((job.host.gap_ms if n % job.host.gap_every == 0 else 0.3) * MS, "host", 0.1))
            self._gap_events(now, gap)
            now += gap
        return JobTimeline(
            job, self.programs, [StreamOps.join(parts) for parts in self.compute],
            [StreamOps.join(parts) for parts in self.collectives], self.copies, self.host, self.steps, self.batches,
            max([now, *self.free, *(s.device_end for s in self.steps)]))

    def _vary(self, mean_ns: float, stream: str, spread: float = 0.06) -> float:
        return mean_ns * float(np.exp(self.rng[stream].normal(0.0, spread)))

    def _gap_events(self, begin: int, length: int) -> None:
        names = self.job.host.gap_events
        if not names or length < 100 * US:
            return
        each = int(length * 0.92) // len(names)
        for i, name in enumerate(names):
            self.host.append(HostEvent("python", name, begin + 20 * US + i * each, begin + (i + 1) * each))

    def _batch(self, number: int, request: int) -> int:
        """Time at which the batch asked for at ``request`` is there."""
        job = self.job
        length = int(self._vary(job.input.produce_ms * MS, "input", job.input.input_jitter))
        if job.input.burst_every and number % job.input.burst_every == 0:
            length += int(job.input.burst_ms * MS)
        begin, end, ready = self.input.take(request, length)
        self.batches.append((begin, end))
        return ready

    def _step(self, number: int, start: int, call_begin: int, first: bool, tracing: int) -> Step:
        job = self.job
        # Keras traces before its function asks for a batch; a custom loop has the batch first.
        inside = job.style in KERAS_STYLES
        request = call_begin + int(self._vary(0.12 * MS, "host")) + tracing * inside
        ready = self._batch(number, request)
        begin = ready + int(self._vary(job.host.function_start_ms * MS, "host")) + tracing * (not inside)
        trace = (request - tracing, request) if inside else (begin - tracing, begin)
        if not self.gpus:
            end = begin + int(self._vary(job.work.compute_ms * MS, "device", 0.03))
            self.host.append(HostEvent("compute0", "", begin, end))
            return Step(start, request, ready, end, end, end, first, trace)
        if job.across.serial:
            issued, last = self._model_parallel(begin)
        else:
            issued, last = self._data_parallel(begin, start)
        reduces = len(self.gpus) > 1 and job.across.comm_ms and job.training and not job.across.serial
        collected = self._collectives(last, issued) if reduces else [0] * len(self.gpus)
        if job.training:
            for g in self.gpus:
                if job.loss_scale_blocks:
                    issued[g] = self._fetch_predicate(g, issued[g], collected[g])
                issued[g], _ = self._phase(g, Phase.APPLY, issued[g], collected[g])
        device_end = max(*self.free, *collected)
        return Step(start, request, ready, max(issued), max(issued), device_end, first, trace, training=job.training)

    def _data_parallel(self, begin: int, step_start: int) -> tuple[list[int], list[StreamOps]]:
        """Forward and backward pass on all GPUs: when each is launched, and the kernels of the last pass."""
        job = self.job
        begins = [begin + int(g * job.host.thread_stagger_us * US) for g in self.gpus]
        if job.across.late_ms:
            late = job.across.late_gpu if job.across.late_gpu >= 0 else int(self.rng["late"].integers(len(begins)))
            begins[late] += int(self._vary(job.across.late_ms * MS, "late", 0.15))
        issued = list(begins)
        last = [NO_OPS] * len(begins)
        gather = Copy("P2P", round(job.across.gather_mb * 1e6), GATHER_GB_PER_S, "device", "device")
        gathered = 0
        # GPU 0's extra kernels need what the others send.
        for g in [*self.gpus[1:], 0] if job.across.gather_mb else self.gpus:
            host = issued[g - 1] if job.across.one_thread and g else begins[g]
            host, last[g] = self._phase(g, Phase.FORWARD, self._input_copy(g, host, step_start))
            if job.training:
                if g and job.across.gather_mb:
                    host, end = self._copy(g, gather, host, int(last[g].end[-1]), "concat_predictions:ConcatV2")
                    gathered = max(gathered, end)
                elif g == 0 and job.across.gpu0_extra_kernels:
                    host, _ = self._phase(g, Phase.EXTRA, host, gathered)
                host, last[g] = self._phase(g, Phase.BACKWARD, host)
                if job.across.one_thread:  # it launches the optimizer's kernels before those of the next GPU
                    host += int(len(self.programs[g].rows(Phase.APPLY)) * job.host.launch_us * US)
            issued[g] = host
        return issued, last

    def _model_parallel(self, host: int) -> tuple[list[int], list[StreamOps]]:
        """Forward through the GPUs one by one, backward in reverse, activations between them."""
        last = [NO_OPS] * len(self.gpus)
        issued = [host] * len(self.gpus)
        activations = Copy("P2P", 24 << 20, 40.0, "device", "device")
        host = self._input_copy(0, host, host)
        after = 0
        for g, phase in [(g, Phase.FORWARD) for g in self.gpus] + [(g, Phase.BACKWARD) for g in reversed(self.gpus)]:
            host, last[g] = self._phase(g, phase, host, after)
            issued[g] = host
            after = self._copy(g, activations, host, int(last[g].end[-1]), "")[1]
        return issued, last

    def _input_copy(self, gpu: int, host: int, step_start: int) -> int:
        """Copy the batch to the GPU. From pageable memory it is staged by the driver and holds the host."""
        job = self.job
        if not job.input.batch_mb:
            return host
        rate = job.input.h2d_gb_per_s or job.link_gb_per_s * (1.0 if job.input.pinned else 0.25)
        memory = "pinned" if job.input.pinned else "pageable"
        copy = Copy("H2D", round(job.input.batch_mb * 1e6), rate, memory, "device")
        length = int(copy.size / rate)
        overlap = job.input.h2d_overlap and job.input.pinned
        # With prefetching to the device the next batch is copied once this one is taken, while the step computes.
        taken = self.steps[-1].ready if self.steps else step_start - length
        launch = max(min(taken, step_start) + 300 * US, self.h2d_free[gpu]) if overlap else host
        begin = max(launch + 7 * US, self.h2d_free[gpu])
        end = begin + length
        call_end = end if not job.input.pinned else launch + 6 * US
        self.h2d_free[gpu] = end
        self.copies[gpu].append(CopyEvent(copy, "IteratorGetNext:IteratorGetNext", begin, end, launch, call_end))
        self.free[gpu] = max(self.free[gpu], end)
        return host if overlap else max(host, call_end) + 5 * US

    def _copy(self, gpu: int, copy: Copy, host: int, after: int, op: str) -> tuple[int, int]:
        """One copy in the stream's order: the end of its call and of the copy."""
        length = int(copy.size / copy.gb_per_s) + 1_400
        begin = max(host + 6 * US, after)
        waits = not copy.is_async or "pageable" in (copy.src, copy.dst)
        call_end = begin + length + 2 * US if waits else host + 5 * US
        self.copies[gpu].append(CopyEvent(copy, op, begin, begin + length, host, call_end))
        return call_end, begin + length

    def _phase(self, gpu: int, phase: Phase, host: int, after: int = 0) -> tuple[int, StreamOps]:
        """Launch and run the kernels of a phase and the work between them: when launched, and the kernels."""
        rows = self.programs[gpu].rows(phase)
        self.free[gpu] = max(self.free[gpu], after)
        between = self._mid_step_work(phase, len(rows))
        cuts = sorted({0, len(rows), *range(0, len(rows), _LAUNCH_QUEUE), *(i for i, _ in between)})
        ran = []
        starts = self.chunk_starts[gpu]
        for index, (low, high) in enumerate(zip(cuts, [*cuts[1:], cuts[-1]], strict=True)):
            for kernel, work in between:
                if kernel == low:
                    host = self._run_mid_step(gpu, work, host)
            if high > low:
                if index >= 2 and len(starts) >= 2:
                    host = max(host, starts[-2])
                ran.append(self._kernels(gpu, rows[low:high], host))
                host = int(ran[-1].launch_end[-1])
        self.compute[gpu] += ran
        return host, StreamOps.join(ran)

    def _mid_step_work(self, phase: Phase, kernels: int) -> list[tuple[int, MidStepWork]]:
        """The job's mid-step work in that phase, each with the number of the kernel that it precedes."""
        job = self.job
        if phase in (Phase.APPLY, Phase.EXTRA):
            return []
        parts = [(work.at, work) for work in job.mid_step] if not job.training else [
            (work.at * 2 - phase, work) for work in job.mid_step if (work.at >= 0.5) == (phase == Phase.BACKWARD)]
        return sorted(((min(int(part * kernels), kernels), work) for part, work in parts), key=lambda item: item[0])

    def _kernels(self, gpu: int, rows: I64, host: int) -> StreamOps:
        job, program = self.job, self.programs[gpu]
        n = len(rows)
        gaps = job.host.launch_us * US * np.exp(self.rng["launch"].normal(0.0, job.host.launch_jitter, n))
        if job.host.stall_share:
            stalled = self.rng["stall"].random(n)
            stall = self.rng["stall"].exponential(1.0, n) * job.host.stall_us * US
            gaps += np.where(stalled < job.host.stall_share, stall, 0.0)
        launch = host + np.cumsum(gaps).astype(np.int64)
        call = np.minimum(gaps * 0.55, 5.5 * US).astype(np.int64)
        jitter = np.exp(self.rng["device"].normal(0.0, job.work.jitter, n))
        length = np.maximum(program.mean_ns[rows] * jitter * self.factor[gpu], 700).astype(np.int64)
        gap = int(job.work.kernel_gap_us * US)
        start, end = run_in_order(launch + call + int(job.host.latency_us * US), length, self.free[gpu], gap)
        self.free[gpu] = int(end[-1]) + gap
        self.chunk_starts[gpu] = [*self.chunk_starts[gpu][-3:], int(start[-1])]
        return StreamOps(rows, start, end, launch, launch + call)

    def _run_mid_step(self, gpu: int, work: MidStepWork, host: int) -> int:
        # Results that the host's own work brings about are copied up after it.
        results = [copy for copy in work.copies if copy.way == "H2D" and work.host_ms]
        for copy in work.copies:
            if copy not in results:
                host, self.free[gpu] = self._copy(gpu, copy, host, self.free[gpu], work.op)
        if work.blocks:
            done = max(host, self.free[gpu]) + 8 * US
            if work.sync_call:
                self.host.append(HostEvent(f"compute{gpu}", "cuStreamSynchronize", host, done - 2 * US))
            host = done
        if work.host_ms:
            begin, host = host, host + int(self._vary(work.host_ms * MS, "host", 0.05))
            self.host.append(HostEvent(f"compute{gpu}", work.op, begin, host))
        for copy in results:
            host, self.free[gpu] = self._copy(gpu, copy, host, self.free[gpu], work.op)
        return host

    def _collectives(self, backward: Sequence[StreamOps], issued: list[int]) -> list[int]:
        """AllReduce of the gradients in pieces, as the backward pass yields them or after it; their end per GPU."""
        job = self.job
        n = job.across.comm_count
        ready_share = np.linspace(1 / n, 1, n) if job.across.comm_overlap else np.ones(n)
        transfer = job.across.comm_ms * MS / n * np.exp(self.rng["comm"].normal(0.0, 0.03, n))
        part = (transfer + job.across.comm_latency_us * US).astype(np.int64)
        launch, ready = [], []
        for g in self.gpus:
            rows = (ready_share * len(backward[g].row)).astype(np.int64) - 1
            # Each needs a launch of its own, on the thread that launches the GPU's kernels.
            if not job.across.comm_overlap:
                launched = issued[g] + (np.arange(n) + 1) * int(job.host.launch_us * US)
                issued[g] = int(launched[-1])
            else:
                launched = backward[g].launch_end[rows] + US
            launch.append(launched)
            ready.append(np.maximum(backward[g].end[rows], launched + int(job.host.latency_us * US)) + 3 * US)
        _, end = run_in_order(np.max(ready, axis=0), part, max(self.comm_free), 0)
        collected = []
        for g in self.gpus:
            skew = self.rng["comm"].integers(0, max(int(job.across.comm_skew_us * US), 1), n)
            own_end = np.maximum.accumulate(end + skew)
            before = np.concatenate(([self.comm_free[g]], own_end[:-1] + 900))
            start = np.minimum(np.maximum(ready[g], before), own_end - 1_000)
            self.collectives[g].append(StreamOps(np.arange(n), start, own_end, launch[g], launch[g] + 4 * US))
            self.comm_free[g] = int(own_end[-1])
            collected.append(int(own_end[-1]) + 2 * US)
        return collected

    def _fetch_predicate(self, gpu: int, host: int, after: int) -> int:
        """Dynamic loss scaling: the host waits to know whether all gradients are finite."""
        copy = Copy("D2H", 1, 0.001, "device", "pageable")
        host, self.free[gpu] = self._copy(gpu, copy, host, max(self.free[gpu], after), "loss_scale_optimizer/cond:If")
        begin, host = host, host + int(self._vary(0.06 * MS, "host"))
        self.host.append(HostEvent(f"compute{gpu}", "loss_scale_optimizer/cond:If", begin, host))
        return host
