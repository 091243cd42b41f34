"""When everything of a job happens: host, launches and GPUs, by cause and effect.

The host issues work in order; a GPU runs a stream in order, each kernel when it was launched
and the one before ended; a collective ends on all GPUs at once. What a fault does to a step
therefore follows by itself, and the same job without the fault says what it cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tests.advice.labelled.job import KERAS_STYLES, Copy, Job, Point
from tests.advice.labelled.program import APPLY, BACKWARD, FORWARD, Program, build

I64 = npt.NDArray[np.int64]
MS, US = 1_000_000, 1_000
_QUEUE = 500  # kernels launched at once at most: CUDA's queue takes about a thousand
COMPUTE, H2D, D2H, P2P, COMM = "Kernel", "MemcpyH2D", "MemcpyD2H", "MemcpyP2P", "Collective"


@dataclass
class Rows:
    """Device events of one GPU, one stream; ``name`` and ``op`` index the program of the GPU, or are texts' ids."""

    name: list[I64] = field(default_factory=list)
    op: list[I64] = field(default_factory=list)
    start: list[I64] = field(default_factory=list)
    end: list[I64] = field(default_factory=list)
    launch: list[I64] = field(default_factory=list)
    launch_end: list[I64] = field(default_factory=list)

    def add(self, name: I64, op: I64, start: I64, end: I64, launch: I64, launch_end: I64) -> None:
        for mine, new in zip((self.name, self.op, self.start, self.end, self.launch, self.launch_end),
                             (name, op, start, end, launch, launch_end), strict=True):
            mine.append(new)

    def columns(self) -> list[I64]:
        return [np.concatenate(c) if c else np.empty(0, np.int64)
                for c in (self.name, self.op, self.start, self.end, self.launch, self.launch_end)]


@dataclass(frozen=True)
class CopyEvent:
    copy: Copy
    op: str
    start: int
    end: int
    launch: int
    launch_end: int


@dataclass(frozen=True)
class HostEvent:
    """``thread``: python, compute<gpu>, get_next, produce<i> or a name of its own."""

    thread: str
    name: str
    start: int
    end: int
    stats: dict[str, int | float | str] = field(default_factory=dict)


@dataclass
class Step:
    """One iteration. ``start``/``back`` bound the Python call, ``retraced`` says it traced its function anew."""

    start: int
    request: int  # asks for a batch
    ready: int  # has it
    issued: int  # last launch done
    back: int
    device_end: int
    first: bool  # of its execution (always, but for several steps per execution)
    trace: tuple[int, int]  # when its function was traced, if it was
    retraced: bool = False


@dataclass
class Timeline:
    job: Job
    programs: list[Program]
    compute: list[Rows]
    collectives: list[Rows]
    copies: list[list[CopyEvent]]
    host: list[HostEvent] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    batches: list[tuple[int, int]] = field(default_factory=list)  # when each was made
    end: int = 0

    @property
    def step_ms(self) -> float:
        """Mean length from anchor to anchor, the warm-up and the last step left out."""
        starts = [s.start for s in self.steps if s.first]
        begin = lead(self.job) or min(2 if len(starts) > 6 else 1, len(starts) - 2)
        return (starts[-1] - starts[begin]) / (len(starts) - 1 - begin) / MS


def simulate(job: Job) -> Timeline:
    return _Simulation(job).run()


def lead(job: Job) -> int:
    """Steps before the capture, in which queues and buffers come to their ordinary level."""
    return 0 if job.warm_up else 2 * job.run_ahead + 4 + min(job.prefetch, 6) * (not job.buffer_full)


class _Simulation:
    def __init__(self, job: Job) -> None:
        self.job = job
        count = 0 if job.cpu_only else job.gpus
        programs = [build(job, 0)]
        if job.gpu0_extra_kernels and count > 1:
            programs += [build(job, 1)] * (count - 1)
        else:
            programs *= max(count, 1)
        self.out = Timeline(job, programs, [Rows() for _ in range(count)], [Rows() for _ in range(count)],
                            [[] for _ in range(count)])
        self.rng = {name: job.rng(name) for name in ("device", "launch", "stall", "host", "retrace", "late", "input",
                                                     "comm")}
        self.free = [0] * count  # when the compute stream is
        self.h2d_free = [0] * count
        self.comm_free = [0] * count
        self.earlier: list[list[int]] = [[] for _ in range(count)]
        self.made: list[int] = []
        self.consumed: list[int] = []
        self.factor = self._factors(count)

    def _factors(self, count: int) -> list[float]:
        own = self.job.gpu_factor or (1.0,) * count
        # GPUs of one kind differ a little in clock.
        return [own[g] * (1 + 0.004 * float(x)) for g, x in enumerate(self.job.rng("clock").normal(size=count))]

    def run(self) -> Timeline:
        job, now = self.job, 6 * MS
        iteration = 0
        per = job.iterations
        starts: list[int] = []
        for n in range(lead(job) + job.steps):
            if n > job.run_ahead and len(starts) > job.run_ahead:
                limit = self.out.steps[(n - job.run_ahead) * per - 1].device_end
                now = max(now, limit)
            start = now
            starts.append(start)
            traces = bool(job.retrace_every) and n % job.retrace_every == job.seed % job.retrace_every
            at = start + int(self._vary(0.18 * MS, "host"))
            tracing = int(self._vary(job.retrace_ms * MS, "retrace", 0.1)) if traces else 0
            tracing += int(job.warm_up * MS) if n == 0 else 0
            for k in range(per):
                step = self._iteration(iteration, start if k == 0 else at, at, k == 0, 0 if k else tracing)
                step.retraced = traces and k == 0
                self.out.steps.append(step)
                at = step.issued + 20 * US
                iteration += 1
            last = self.out.steps[-1]
            now = last.issued + int(self._vary(0.1 * MS, "host"))
            if job.run_ahead == 0:
                now = max(now, last.device_end + 25 * US)
                self._fetch(last, now)
            for step in self.out.steps[-per:]:
                step.back = now
            gap = int(self._vary(job.gap_ms * MS, "host", 0.1))
            self._gap_events(now, gap)
            now += gap
        self.out.end = max([now, *self.free, *(s.device_end for s in self.out.steps)])
        return self.out

    def _vary(self, mean_ns: float, stream: str, spread: float = 0.06) -> float:
        return mean_ns * float(np.exp(self.rng[stream].normal(0.0, spread)))

    def _gap_events(self, begin: int, length: int) -> None:
        names = self.job.gap_events
        if not names or length < 100 * US:
            return
        each = int(length * 0.92) // len(names)
        for i, name in enumerate(names):
            self.out.host.append(HostEvent("python", name, begin + 20 * US + i * each, begin + (i + 1) * each))

    def _batch(self, iteration: int, request: int) -> int:
        """When the batch asked for at ``request`` is there: a bounded buffer and a producer behind it."""
        job = self.job
        length = int(self._vary(job.produce_ms * MS, "input", job.input_jitter))
        if job.burst_every and iteration % job.burst_every == 0:
            length += int(job.burst_ms * MS)
        if job.prefetch:
            room = self.consumed[iteration - job.prefetch] if iteration >= job.prefetch else -10**12
            if not job.buffer_full:
                begin = max(room, self.made[-1] if self.made else 0)
                end = begin + length
            elif iteration < job.prefetch:  # made before the capture
                begin = -length if not self.made else min(self.made[-1], 0)
                end = min(begin + length, 0)
                begin = end - length
            else:
                begin = max(room, self.made[-1])
                end = begin + length
        else:
            begin = request + 15 * US
            end = begin + length
        self.made.append(end)
        self.out.batches.append((begin, end))
        ready = max(request + 30 * US, end + 12 * US)
        self.consumed.append(ready)
        return ready

    def _iteration(self, iteration: int, start: int, at: int, first: bool, tracing: int) -> Step:
        job = self.job
        # Keras traces before its function asks for a batch; a loop of one's own has the batch first.
        inside = job.style in KERAS_STYLES
        request = at + int(self._vary(0.12 * MS, "host")) + tracing * inside
        ready = self._batch(iteration, request)
        begin = ready + int(self._vary(0.05 * MS, "host")) + tracing * (not inside)
        trace = (request - tracing, request) if inside else (begin - tracing, begin)
        count = len(self.out.compute)
        if not count:
            end = begin + int(self._vary(job.compute_ms * MS, "device", 0.03))
            self.out.host.append(HostEvent("compute0", "", begin, end))
            return Step(start, request, ready, end, end, end, first, trace)
        begins = [begin] * count
        if job.late_ms:
            late = job.late_gpu if job.late_gpu >= 0 else int(self.rng["late"].integers(count))
            begins[late] += int(self._vary(job.late_ms * MS, "late", 0.15))
        issued = [0] * count
        ends: list[I64] = [np.empty(0, np.int64)] * count
        if job.serial:
            issued, ends = self._serial(begin)
        else:
            for g in range(count):
                host = begins[g] if not (job.one_thread and g) else issued[g - 1]
                host = self._input_copy(g, host, start)
                host, forward = self._phase(g, FORWARD, host)
                host, ends[g] = self._phase(g, BACKWARD, host) if job.training else (host, forward)
                if job.one_thread and job.training:  # the optimizer's launches come in the same go
                    rows = len(self.out.programs[g].rows(APPLY))
                    host += int(rows * job.launch_us * US)
                issued[g] = host
        collected = self._collectives(ends, issued) if count > 1 and job.comm_ms and not job.serial else [0] * count
        for g in range(count) if job.training else ():
            if job.loss_scale_blocks:
                issued[g] = self._predicate(g, issued[g], collected[g])
            issued[g], _ = self._phase(g, APPLY, issued[g], collected[g])
        device_end = max(max(self.free), *collected, 0) if count > 1 else self.free[0]
        return Step(start, request, ready, max(issued), max(issued), device_end, first, trace)

    def _serial(self, host: int) -> tuple[list[int], list[I64]]:
        """Forward through the GPUs one by one, backward the other way round, activations between them."""
        count = len(self.out.compute)
        ends: list[I64] = [np.empty(0, np.int64)] * count
        after = 0
        activations = Copy("P2P", 24 << 20, 40.0, "device", "device")
        order = [(g, FORWARD) for g in range(count)] + [(g, BACKWARD) for g in reversed(range(count))]
        issued = [host] * count
        for g, phase in order:
            if g == 0 and phase == FORWARD:
                host = self._input_copy(g, host, host)
            host, ends[g] = self._phase(g, phase, host, after)
            issued[g] = host
            after = int(ends[g][-1])
            after = self._copy(g, activations, host, after, "")[1]
        return issued, ends

    def _input_copy(self, gpu: int, host: int, step_start: int) -> int:
        """Bring the batch to the GPU; pageable memory goes through the driver's staging buffer and holds the host."""
        job = self.job
        if not job.batch_mb:
            return host
        rate = job.h2d_gb_per_s or job.link_gb_per_s * (1.0 if job.pinned else 0.25)
        copy = Copy("H2D", int(job.batch_mb * 1e6), rate, "pinned" if job.pinned else "pageable", "device")
        length = int(copy.size / rate)
        overlap = job.h2d_overlap and job.pinned
        # A pipeline that prefetches to the device copies the next batch once this one is taken, while the step
        # computes.
        taken = self.out.steps[-1].ready if self.out.steps else step_start - length
        launch = max(min(taken, step_start) + 300 * US, self.h2d_free[gpu]) if overlap else host
        begin = max(launch + 7 * US, self.h2d_free[gpu])
        end = begin + length
        call_end = end if not job.pinned else launch + 6 * US
        self.h2d_free[gpu] = end
        self.out.copies[gpu].append(CopyEvent(copy, "IteratorGetNext:IteratorGetNext", begin, end, launch, call_end))
        self.free[gpu] = max(self.free[gpu], end)
        return host if overlap else max(host, call_end) + 5 * US

    def _copy(self, gpu: int, copy: Copy, host: int, after: int, op: str) -> tuple[int, int]:
        """One copy in the stream's order; the end of its call and of itself."""
        length = int(copy.size / copy.gb_per_s) + 1_400
        begin = max(host + 6 * US, after)
        waits = not copy.is_async or "pageable" in (copy.src, copy.dst)
        call_end = begin + length + 2 * US if waits else host + 5 * US
        self.out.copies[gpu].append(CopyEvent(copy, op, begin, begin + length, host, call_end))
        return call_end, begin + length

    def _phase(self, gpu: int, phase: int, host: int, after: int = 0) -> tuple[int, I64]:
        """Launch and run the kernels of a phase, with whatever lies between them; when launched, and their ends."""
        program, job = self.out.programs[gpu], self.job
        rows = program.rows(phase)
        self.free[gpu] = max(self.free[gpu], after)
        points = [] if phase == APPLY else [
            (min(int((p.at * 2 - phase) * len(rows)), len(rows)), p) for p in job.points
            if phase == (FORWARD if p.at < 0.5 or not job.training else BACKWARD)] if job.training else [
            (min(int(p.at * len(rows)), len(rows)), p) for p in job.points]
        points.sort(key=lambda item: item[0])
        cuts = sorted({0, len(rows), *range(0, len(rows), _QUEUE), *(i for i, _ in points)})
        ends = []
        for index, (lo, hi) in enumerate(zip(cuts, [*cuts[1:], cuts[-1]], strict=True)):
            for at, point in points:
                if at == lo:
                    host = self._point(gpu, point, host)
            if hi > lo:
                if index >= 2 and len(self.earlier[gpu]) >= 2:
                    host = max(host, self.earlier[gpu][-2])
                host, end = self._kernels(gpu, rows[lo:hi], host)
                ends.append(end)
        return host, np.concatenate(ends) if ends else np.array([self.free[gpu]], np.int64)

    def _kernels(self, gpu: int, rows: I64, host: int) -> tuple[int, I64]:
        job, program = self.job, self.out.programs[gpu]
        n = len(rows)
        gaps = job.launch_us * US * np.exp(self.rng["launch"].normal(0.0, job.launch_jitter, n))
        stalled = self.rng["stall"].random(n)
        if job.stall_share:
            gaps += np.where(stalled < job.stall_share, self.rng["stall"].exponential(1.0, n) * job.stall_us * US, 0.0)
        launch = host + np.cumsum(gaps).astype(np.int64)
        call = np.minimum(gaps * 0.55, 5.5 * US).astype(np.int64)
        jitter = np.exp(self.rng["device"].normal(0.0, job.jitter, n))
        length = np.maximum(program.ns[rows] * jitter * self.factor[gpu], 700).astype(np.int64)
        gap = int(job.kernel_gap_us * US)
        ready = launch + call + int(job.latency_us * US)
        ready[0] = max(int(ready[0]), self.free[gpu])
        whole = np.cumsum(length + gap)
        end = whole + np.maximum.accumulate(ready - whole + length + gap) - gap
        start = end - length
        self.out.compute[gpu].add(program.name[rows], program.op[rows], start, end, launch, launch + call)
        self.free[gpu] = int(end[-1]) + gap
        self.earlier[gpu] = [*self.earlier[gpu][-3:], int(start[-1])]
        return int(launch[-1] + call[-1]), end

    def _point(self, gpu: int, point: Point, host: int) -> int:
        for copy in point.copies:
            if copy.way == "H2D" and point.host_ms:
                continue  # the result, after the host's work
            host, self.free[gpu] = self._copy(gpu, copy, host, self.free[gpu], point.op)
        if point.blocks:
            done = max(host, self.free[gpu]) + 8 * US
            if point.sync_call:
                self.out.host.append(HostEvent(f"compute{gpu}", "cuStreamSynchronize", host, done - 2 * US))
            host = done
        if point.host_ms:
            begin, host = host, host + int(self._vary(point.host_ms * MS, "host", 0.05))
            self.out.host.append(HostEvent(f"compute{gpu}", point.op, begin, host))
            for copy in point.copies:
                if copy.way == "H2D":
                    host, self.free[gpu] = self._copy(gpu, copy, host, self.free[gpu], point.op)
        return host

    def _collectives(self, ends: Sequence[I64], issued: list[int]) -> list[int]:
        """AllReduce of the gradients in pieces, as the backward pass yields them or after it; their end per GPU."""
        job = self.job
        count, n = len(ends), job.comm_count
        at = np.linspace(1 / n, 1, n) if job.comm_overlap else np.ones(n)
        part = job.comm_ms * MS / n * np.exp(self.rng["comm"].normal(0.0, 0.03, n)) + job.comm_latency_us * US
        ready = np.empty((count, n), np.int64)
        launch = np.empty((count, n), np.int64)
        for g in range(count):
            rows = np.minimum((at * len(ends[g])).astype(np.int64), len(ends[g])) - 1
            done = ends[g][rows]
            # Each needs a launch of its own, on the thread that launches the GPU's kernels.
            calls = self.out.compute[g].launch_end[-1]
            begun = calls[np.minimum(rows, len(calls) - 1)] if len(calls) == len(ends[g]) else np.full(n, issued[g])
            if not job.comm_overlap:
                begun = np.full(n, issued[g])
            own = begun + (np.arange(n) + 1) * int((job.launch_us if not job.comm_overlap else 4.0) * US)
            launch[g] = own
            ready[g] = np.maximum(done, own + int(job.latency_us * US)) + 3 * US
            if not job.comm_overlap:
                issued[g] = int(own[-1])
        everyone = ready.max(axis=0)
        whole = np.cumsum(part.astype(np.int64))
        floor = np.maximum(everyone, max(self.comm_free))
        end = whole + np.maximum.accumulate(floor - whole + part.astype(np.int64))
        collected = []
        for g in range(count):
            skew = self.rng["comm"].integers(0, 4_000, n)
            own_end = np.maximum.accumulate(end + skew)
            before = np.concatenate(([self.comm_free[g]], own_end[:-1] + 900))
            start = np.minimum(np.maximum(ready[g], before), own_end - 1_000)
            self.out.collectives[g].add(np.zeros(n, np.int64), np.arange(n), start, own_end, launch[g],
                                        launch[g] + 4 * US)
            self.comm_free[g] = int(own_end[-1])
            collected.append(int(own_end[-1]) + 2 * US)
        return collected

    def _predicate(self, gpu: int, host: int, after: int) -> int:
        """Dynamic loss scaling: are all gradients finite? The host must know before it goes on."""
        copy = Copy("D2H", 1, 0.001, "device", "pageable")
        host, self.free[gpu] = self._copy(gpu, copy, host, max(self.free[gpu], after), "loss_scale_optimizer/cond:If")
        begin, host = host, host + int(self._vary(0.06 * MS, "host"))
        self.out.host.append(HostEvent(f"compute{gpu}", "loss_scale_optimizer/cond:If", begin, host))
        return host

    def _fetch(self, step: Step, now: int) -> None:
        """The loss comes to the host at the end of a step that waits for it."""
        if self.out.copies:
            copy = Copy("D2H", 4, 0.002, "device", "pageable")
            self.out.copies[0].append(CopyEvent(copy, "Mean:Mean", step.device_end + 2 * US, step.device_end + 4 * US,
                                                step.issued + 5 * US, now - 5 * US))
