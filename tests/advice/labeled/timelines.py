"""The timeline of a labeled job: what its faults do to a step follows from the order of launches and operations."""

from __future__ import annotations

import numpy as np

from gputop.simulation.job import Copy
from gputop.simulation.program import I64, Phase, StepProgram
from gputop.simulation.timeline import (
    LAUNCH_QUEUE,
    MS,
    NO_OPS,
    US,
    CopyEvent,
    HostEvent,
    JobTimeline,
    SimulatedPipeline,
    Simulation,
    Step,
    StreamOps,
)
from tests.advice.labeled.jobs import KERAS_STYLES, LabeledJob, MidStepWork, SyncCopy
from tests.advice.labeled.programs import programs


class LabeledStep(Step):
    first: bool = True  # of its call (always, but for steps_per_execution)
    trace: tuple[int, int] = (0, 0)  # when its function was traced, if it was
    retraced: bool = False


class LabeledPipeline(SimulatedPipeline):
    """Makes batches when asked if it has no buffer. ``ready`` ones were made before."""

    def __init__(self, depth: int, ready: int) -> None:
        super().__init__(depth)
        self._depth, self._ready = depth, ready

    def take(self, request_ns: int, work_ns: int) -> tuple[int, int, int]:
        if self._ready:
            self._ready -= 1
            return self._make(-work_ns, request_ns, work_ns)
        return super().take(request_ns, work_ns) if self._depth else self._make(request_ns + 15 * US, request_ns,
                                                                                work_ns)


def simulate(job: LabeledJob) -> JobTimeline:
    """The job's timeline, with :func:`lead_steps` before those asked for."""
    return LabeledSimulation(job, programs(job)).run()


def lead_steps(job: LabeledJob) -> int:
    """Steps before the capture, in which queues and buffers reach their usual level."""
    if job.warm_up:
        return 0
    return 2 * job.run_ahead + 4 + min(job.prefetch, 6) * (not job.buffer_full)


class LabeledSimulation(Simulation):
    job: LabeledJob
    steps: list[LabeledStep]

    def __init__(self, job: LabeledJob, programs: list[StepProgram]) -> None:
        super().__init__(job, programs)
        self.gpus = range(0 if job.cpu_only else job.gpus)
        if job.cpu_only:
            self.compute, self.collectives, self.copies, self.free, self.comm_free = [], [], [], [], []
        self.host: list[HostEvent] = []
        self.rng |= {name: job.rng(name) for name in ("stall", "retrace", "late")}
        self.h2d_free = [0] * len(self.gpus)
        self.chunk_starts: list[list[int]] = [[] for _ in self.gpus]
        self.input = LabeledPipeline(job.prefetch, job.prefetch if job.buffer_full else 0)
        if job.gpu_factor:
            self.factor = [given * clock for given, clock in zip(job.gpu_factor, self.factor, strict=False)]
        self.step_start = 0

    def run(self) -> JobTimeline:
        job, now = self.job, 6 * MS
        per = job.iterations
        for n in range(lead_steps(job) + job.steps):
            if n > job.run_ahead:
                now = max(now, self.steps[(n - job.run_ahead) * per - 1].device_end)
            start = now
            traces = bool(job.retrace_every) and n % job.retrace_every == job.seed % job.retrace_every
            begin = start + int(self._vary(0.18 * MS, "host"))
            tracing = int(self._vary(job.retrace_ms * MS, "retrace", 0.1)) if traces else 0
            tracing += int(job.warm_up * MS) if n == 0 else 0
            for k in range(per):
                step = self._labeled_step(n * per + k, start if k == 0 else begin, begin, k == 0, 0 if k else tracing)
                step.retraced = traces and k == 0
                self.steps.append(step)
                begin = step.issued + 20 * US
            now = self._python_goes_on(self.steps[-1])
            for step in self.steps[-per:]:
                step.back = now
            gap = int(self._vary((job.gap_ms if n % job.gap_every == 0 else 0.3) * MS, "host", 0.1))
            self._gap_events(now, gap)
            now += gap
        timeline = self._timeline(now)
        timeline.host = self.host
        return timeline

    def _python_goes_on(self, last: Step) -> int:
        if self.job.run_ahead == 0 and self.copies:
            return self._fetch_loss(last)
        now = last.issued + int(self._vary(0.1 * MS, "host"))
        return max(now, last.device_end + 25 * US) if self.job.run_ahead == 0 else now

    def _gap_events(self, begin: int, length: int) -> None:
        names = self.job.gap_events
        if not names or length < 100 * US:
            return
        each = int(length * 0.92) // len(names)
        for i, name in enumerate(names):
            self.host.append(HostEvent("python", name, begin + 20 * US + i * each, begin + (i + 1) * each))

    def _work_ns(self, number: int) -> int:
        """Time that making a batch takes."""
        job = self.job
        length = int(self._vary(job.produce_ms * MS, "input", job.input_jitter))
        return length + (int(job.burst_ms * MS) if job.burst_every and number % job.burst_every == 0 else 0)

    def _labeled_step(self, number: int, start: int, call_begin: int, first: bool, tracing: int) -> LabeledStep:
        job = self.job
        # Keras traces before its function asks for a batch; a custom loop has the batch first.
        inside = job.style in KERAS_STYLES
        request = call_begin + int(self._vary(0.12 * MS, "host")) + tracing * inside
        ready = self._batch(request, self._work_ns(number))
        begin = ready + int(self._vary(job.function_start_ms * MS, "host")) + tracing * (not inside)
        trace = (request - tracing, request) if inside else (begin - tracing, begin)
        if not self.gpus:
            end = begin + int(self._vary(job.compute_ms * MS, "device", 0.03))
            self.host.append(HostEvent("compute0", "", begin, end))
            return LabeledStep(start, request, ready, end, end, end, first=first, trace=trace)
        self.step_start = start
        issued, last = self._model_parallel(begin) if job.serial else self._data_parallel(begin)
        reduces = len(self.gpus) > 1 and job.comm_ms and job.training and not job.serial
        collected = self._collectives(last, issued) if reduces else [0] * len(self.gpus)
        if job.training:
            for g in self.gpus:
                if job.loss_scale_blocks:
                    issued[g] = self._fetch_predicate(g, issued[g], collected[g])
                issued[g], _ = self._phase(g, Phase.APPLY, issued[g], collected[g])
        device_end = max(*self.free, *collected)
        return LabeledStep(start, request, ready, max(issued), max(issued), device_end, job.training, first, trace)

    def _launches_begin(self, begin: int) -> list[int]:
        begins, job = super()._launches_begin(begin), self.job
        if job.late_ms:
            late = job.late_gpu if job.late_gpu >= 0 else int(self.rng["late"].integers(len(begins)))
            begins[late] += int(self._vary(job.late_ms * MS, "late", 0.15))
        return begins

    def _data_parallel(self, begin: int) -> tuple[list[int], list[StreamOps]]:
        if not self.job.one_thread:
            return super()._data_parallel(begin)
        issued = self._launches_begin(begin)
        last = [NO_OPS] * len(issued)
        for g in self.gpus:
            host, _ = self._phase(g, Phase.FORWARD, self._input_copy(g, issued[g - 1] if g else issued[g]))
            host, last[g] = self._phase(g, Phase.BACKWARD, host)
            # The thread launches the optimizer's kernels before those of the next GPU.
            issued[g] = host + int(len(self.programs[g].rows(Phase.APPLY)) * self.job.launch_us * US)
        return issued, last

    def _model_parallel(self, host: int) -> tuple[list[int], list[StreamOps]]:
        """Forward through the GPUs one by one, backward in reverse, activations between them."""
        last = [NO_OPS] * len(self.gpus)
        issued = [host] * len(self.gpus)
        activations = Copy("P2P", 24 << 20, 40.0, "device", "device")
        self.step_start = host
        host = self._input_copy(0, host)
        after = 0
        for g, phase in [(g, Phase.FORWARD) for g in self.gpus] + [(g, Phase.BACKWARD) for g in reversed(self.gpus)]:
            host, last[g] = self._phase(g, phase, host, after)
            issued[g] = host
            after = self._copy(g, activations, host, int(last[g].end[-1]), "")[1]
        return issued, last

    def _input_copy(self, gpu: int, host: int) -> int:
        """Copy the batch to the GPU. From pageable memory it is staged by the driver and holds the host."""
        job = self.job
        if not job.batch_mb:
            return host
        rate = job.h2d_gb_per_s or job.link_gb_per_s * (1.0 if job.pinned else 0.25)
        memory = "pinned" if job.pinned else "pageable"
        copy = Copy("H2D", round(job.batch_mb * 1e6), rate, memory, "device")
        length = int(copy.size / rate)
        # With prefetching to the device the next batch is copied once this one is taken, while the step computes.
        taken = self.steps[-1].ready if self.steps else self.step_start - length
        launch = max(min(taken, self.step_start) + 300 * US, self.h2d_free[gpu]) if job.pinned else host
        begin = max(launch + 7 * US, self.h2d_free[gpu])
        end = begin + length
        call_end = launch + 6 * US if job.pinned else end
        self.h2d_free[gpu] = end
        self.copies[gpu].append(CopyEvent(copy, "IteratorGetNext:IteratorGetNext", begin, end, launch, call_end))
        self.free[gpu] = max(self.free[gpu], end)
        return host if job.pinned else max(host, call_end) + 5 * US

    def _copy(self, gpu: int, copy: Copy, host: int, after: int, op: str) -> tuple[int, int]:
        call_end, end = super()._copy(gpu, copy, host, after, op)
        if isinstance(copy, SyncCopy) or "pageable" in (copy.src, copy.dst):
            call_end = end + 2 * US
            self.copies[gpu][-1] = self.copies[gpu][-1]._replace(launch_end=call_end)
        return call_end, end

    def _phase(self, gpu: int, phase: Phase, host: int, after: int = 0) -> tuple[int, StreamOps]:
        """Launch and run the kernels of a phase and the work between them: when launched, and the kernels."""
        rows = self.programs[gpu].rows(phase)
        self.free[gpu] = max(self.free[gpu], after)
        between = self._mid_step_work(phase, len(rows))
        cuts = sorted({0, len(rows), *range(0, len(rows), LAUNCH_QUEUE), *(i for i, _ in between)})
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

    def _launch_gaps(self, count: int) -> np.ndarray:
        gaps, job = super()._launch_gaps(count), self.job
        if job.stall_share:
            stalled = self.rng["stall"].random(count)
            stall = self.rng["stall"].exponential(1.0, count) * job.stall_us * US
            gaps += np.where(stalled < job.stall_share, stall, 0.0)
        return gaps

    def _kernels(self, gpu: int, rows: I64, host: int) -> StreamOps:
        ran = super()._kernels(gpu, rows, host)
        self.chunk_starts[gpu] = [*self.chunk_starts[gpu][-3:], int(ran.start[-1])]
        return ran

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

    def _fetch_predicate(self, gpu: int, host: int, after: int) -> int:
        """Dynamic loss scaling: the host waits to know whether all gradients are finite."""
        copy = Copy("D2H", 1, 0.001, "device", "pageable")
        host, self.free[gpu] = self._copy(gpu, copy, host, max(self.free[gpu], after), "loss_scale_optimizer/cond:If")
        begin, host = host, host + int(self._vary(0.06 * MS, "host"))
        self.host.append(HostEvent(f"compute{gpu}", "loss_scale_optimizer/cond:If", begin, host))
        return host
