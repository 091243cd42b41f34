"""The demo's training job over time: epochs of training, evaluation and a checkpoint, without end.

Each step is one of a few that were simulated in full (:mod:`gputop.simulation.timeline`). When it
starts follows from the input pipeline and the Python between steps. A loop is a function of
its scenario alone: it has no clock. Times are int nanoseconds since its start.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from enum import IntEnum
from functools import lru_cache
from operator import attrgetter

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from gputop.simulation import figures
from gputop.simulation.job import Copy
from gputop.simulation.program import ProgramBuilder, StepProgram
from gputop.simulation.scenarios import GPU_COUNT, MB, Scenario
from gputop.simulation.timeline import (
    NO_OPS,
    CopyEvent,
    HostEvent,
    JobTimeline,
    SimulatedPipeline,
    Simulation,
    Step,
    StreamOps,
)

CALL_NS = 350_000  # Python from the step's start to asking for the batch
EVAL_INPUT_SHARE = 0.45  # share of a training batch's time: no augmentation
KEEP_NS = 1_800 * 10**9  # how much of the past stays known
_LOOKAHEAD_NS = 5 * 10**9
# Device-to-host rate of weights: cudaMemcpy from the device to pageable memory moves through a
# staging buffer, so a checkpoint does not reach the link's rate.
_CHECKPOINT_GB_PER_S = 11.0
_CHECKPOINT_CHUNK_BYTES = 64 * MB


class StepKind(IntEnum):
    TRAIN = 0
    EVAL = 1
    CHECKPOINT = 2


_VARIANTS = {StepKind.TRAIN: 8, StepKind.EVAL: 3, StepKind.CHECKPOINT: 1}


class StepTemplate(Struct, frozen=True):
    """A step simulated in full, with the integrals of its figures; times since the batch was there.

    ``issued_ns``: until the host threads have launched everything; ``body_ns``: until Python goes on.
    """

    kind: StepKind
    gpus: tuple[figures.StepOps, ...]
    issued_ns: int
    body_ns: int
    gpu_curves: tuple[figures.Curve, ...]
    host: figures.Curve
    gpu_total: figures.F64  # [gpus, GPU_QUANTITIES]


class StepRecord(Struct, frozen=True):
    """One step of the job. It starts at ``start_ns``, asks for its batch at ``wait_ns``, has it at
    ``begin_ns`` and is done at ``end_ns``; the next step starts at ``next_ns``.

    The pipeline made its batch from ``made_from_ns`` to ``made_ns`` (both 0: it takes no batch).
    """

    number: int
    kind: StepKind
    template: int
    start_ns: int
    wait_ns: int
    begin_ns: int
    end_ns: int
    next_ns: int
    made_from_ns: int
    made_ns: int


class _Epoch(Struct, frozen=True):
    start_ns: int
    steps: list[StepRecord]
    gpu: figures.F64  # [steps + 1, gpus, quantities]: accumulated since the loop's start, at each step's start
    host: figures.F64  # [steps + 1, quantities]


def step_templates(scenario: Scenario, kind: StepKind, programs: list[StepProgram]) -> list[StepTemplate]:
    if kind is StepKind.CHECKPOINT:
        return [_checkpoint_template(scenario, programs)]
    job = scenario.job
    job = replace(job, seed=job.seed + kind, steps=_VARIANTS[kind], training=kind is StepKind.TRAIN)
    timeline = Simulation(job, programs).run()
    out = []
    for step in timeline.steps:
        gpus = []
        # The host waits for each step's result, so that no operation of one step lies in another.
        compute, collectives = (
            [ops.select((ops.launch >= step.ready) & (ops.launch < step.back)).shifted(-step.ready) for ops in streams]
            for streams in (timeline.compute, timeline.collectives))
        transfer = np.min([ops.end - ops.start for ops in collectives], axis=0)
        for g, program in enumerate(programs):
            copies = tuple(c.shifted(-step.ready) for c in timeline.copies[g] if step.ready <= c.launch < step.back)
            gpus.append(figures.StepOps(program, compute[g], collectives[g], transfer, copies))
        body = step.back - step.ready
        out.append(_template(scenario, kind, gpus, step.issued - step.ready, body, figures.host_curve(gpus, body)))
    return out


def _checkpoint_template(scenario: Scenario, programs: list[StepProgram]) -> StepTemplate:
    """GPU 0's weights are copied to the host by pieces, and written to disk."""
    copies = []
    time, left = 0, scenario.checkpoint_bytes
    while left > 0:
        copy = Copy("D2H", min(left, _CHECKPOINT_CHUNK_BYTES), _CHECKPOINT_GB_PER_S, "device", "pageable")
        end = time + 6_000 + int(copy.size / copy.gb_per_s)
        copies.append(CopyEvent(copy, "checkpoint/SaveV2:SaveV2", time + 6_000, end, time, end + 2_000))
        time, left = end + 3_000, left - copy.size
    gpus = [figures.StepOps(program, NO_OPS, NO_OPS, NO_OPS.row, ()) for program in programs]
    gpus[0] = gpus[0]._replace(copies=tuple(copies))
    body = max(time, int(scenario.checkpoint_bytes / scenario.checkpoint_write_bytes_per_s * 1e9))
    curve = figures.checkpoint_curve(scenario.checkpoint_bytes, body)
    return _template(scenario, StepKind.CHECKPOINT, gpus, time, body, curve)


def _template(scenario: Scenario, kind: StepKind, gpus: list[figures.StepOps], issued_ns: int, body_ns: int,
              host: figures.Curve) -> StepTemplate:
    curves = tuple(figures.gpu_curve(ops, scenario) for ops in gpus)
    total = np.stack([curve.total[-1] for curve in curves])
    return StepTemplate(kind, tuple(gpus), issued_ns, body_ns, curves, host, total)


@lru_cache(maxsize=8)  # a demo of several jobs comes back to the first; nothing changes what is simulated
def simulated_steps(scenario: Scenario) -> tuple[list[StepProgram], tuple[StepTemplate, ...]]:
    """The GPUs' programs, and the steps of every kind."""
    programs = ProgramBuilder(scenario.job).of_gpus(GPU_COUNT)
    return programs, tuple(step for kind in StepKind for step in step_templates(scenario, kind, programs))


class SimulatedLoop:
    """The job. All methods may be called from any thread."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._lock = threading.RLock()
        self.programs, self.templates = simulated_steps(scenario)
        self._template_ids = {kind: [i for i, template in enumerate(self.templates) if template.kind is kind]
                              for kind in StepKind}
        self._pipeline = SimulatedPipeline(scenario.job.prefetch)
        self._epochs: list[_Epoch] = []
        self._epoch_number = 0
        self._step_number = 0
        self._end_ns = 0
        self._gpu_total = np.zeros((GPU_COUNT, len(figures.GPU_QUANTITIES)))
        self._host_total = np.zeros(len(figures.HOST_QUANTITIES) + 1)
        # Batches in the making: seconds of work and batches, of the training and evaluation pipelines.
        self._input = {kind: figures.Curve(np.zeros(1, np.int64), np.zeros((1, 2)))
                       for kind in (StepKind.TRAIN, StepKind.EVAL)}

    # -- the job over time

    def _known(self, time_ns: int) -> list[_Epoch]:
        """Simulate until one epoch past ``time_ns``: the pipeline works ahead of the steps."""
        with self._lock:
            while not self._epochs or self._epochs[-1].start_ns <= time_ns:
                self._add_epoch()
                self._forget(time_ns - KEEP_NS)
            return self._epochs

    def _add_epoch(self) -> None:
        scenario, job = self.scenario, self.scenario.job
        rng = np.random.default_rng([job.seed, 1 + self._epoch_number])
        kinds = [StepKind.TRAIN] * scenario.steps_per_epoch + [StepKind.EVAL] * scenario.eval_steps
        kinds.append(StepKind.CHECKPOINT)
        n = len(kinds)
        work = job.produce_ms * 1e6 * np.exp(job.input_jitter * rng.standard_normal(n))
        work = work.astype(int).tolist()
        gap = (job.gap_ms * 1e6 * np.exp(0.2 * rng.standard_normal(n))).astype(int).tolist()
        choice = rng.integers(0, 1 << 30, n).tolist()
        steps: list[StepRecord] = []
        evaluation: SimulatedPipeline | None = None
        time = self._end_ns
        for i, kind in enumerate(kinds):
            ids = self._template_ids[kind]
            template = ids[choice[i] % len(ids)]
            asks = time + CALL_NS
            if kind is StepKind.TRAIN:
                begun, ended, begin = self._pipeline.take(asks, work[i])
            elif kind is StepKind.EVAL:
                evaluation = evaluation or SimulatedPipeline(job.prefetch, time)
                begun, ended, begin = evaluation.take(asks, int(work[i] * EVAL_INPUT_SHARE))
            else:
                begun, ended, begin = 0, 0, asks
            end = begin + self.templates[template].body_ns
            following = end + gap[i]
            steps.append(StepRecord(self._step_number, kind, template, time, asks, begin, end, following, begun, ended))
            self._step_number += 1
            time = following
        for kind in self._input:
            self._extend_input(kind, [s for s in steps if s.kind is kind])
        ran = [self.templates[s.template] for s in steps]
        gpu = np.cumsum([self._gpu_total, *(t.gpu_total for t in ran)], axis=0)
        python_s = np.array([CALL_NS + s.next_ns - s.end_ns for s in steps]) / 1e9
        done = np.column_stack([[t.host.total[-1] for t in ran], python_s])
        host = np.cumsum(np.vstack([self._host_total, done]), axis=0)
        self._epochs.append(_Epoch(self._end_ns, steps, gpu, host))
        self._epoch_number += 1
        self._end_ns, self._gpu_total, self._host_total = time, gpu[-1], host[-1]

    def _extend_input(self, kind: StepKind, steps: list[StepRecord]) -> None:
        curve = self._input[kind]
        knots = np.array([t for s in steps for t in (s.made_from_ns, s.made_ns)], np.int64)
        work = np.array([(s.made_ns - s.made_from_ns) / 1e9 for s in steps])
        grown = np.zeros((len(knots), 2))
        grown[1::2, 0] = np.cumsum(work)
        grown[1::2, 1] = np.arange(1, len(steps) + 1)
        grown[2::2] = grown[1:-1:2]
        self._input[kind] = figures.Curve(
            np.concatenate([curve.knots_ns, knots]), np.concatenate([curve.total, grown + curve.total[-1]]))

    def _forget(self, before_ns: int) -> None:
        while len(self._epochs) > 2 and self._epochs[1].start_ns < before_ns:
            del self._epochs[0]
            for kind, curve in self._input.items():
                first = max(0, int(np.searchsorted(curve.knots_ns, self._epochs[0].start_ns)) - 2)
                self._input[kind] = figures.Curve(curve.knots_ns[first:], curve.total[first:])

    def _locate(self, time_ns: int) -> tuple[_Epoch, int]:
        with self._lock:
            epochs = self._known(time_ns)
            epoch = epochs[max(0, bisect_right(epochs, time_ns, key=attrgetter("start_ns")) - 1)]
        return epoch, max(0, bisect_right(epoch.steps, time_ns, key=attrgetter("start_ns")) - 1)

    def gpu_integrals(self, gpu: int, time_ns: int) -> figures.F64:
        """Integral of each of :data:`GPU_QUANTITIES` of that GPU since the loop's start."""
        epoch, i = self._locate(time_ns)
        step = epoch.steps[i]
        if time_ns >= step.end_ns:
            return epoch.gpu[i + 1, gpu]
        if time_ns <= step.begin_ns:
            return epoch.gpu[i, gpu]
        return epoch.gpu[i, gpu] + self.templates[step.template].gpu_curves[gpu].at(time_ns - step.begin_ns)

    def host_integrals(self, time_ns: int) -> dict[str, float]:
        """Integrals of the host's work since the loop's start: seconds of one core by kind of work, seconds and count
        of batches in the making, bytes written."""
        epoch, i = self._locate(time_ns)
        step = epoch.steps[i]
        before = epoch.host[i]
        launch, written = before[:2] + self.templates[step.template].host.at(time_ns - step.begin_ns)
        python = min(max(time_ns - step.start_ns, 0), CALL_NS) + max(0, time_ns - step.end_ns)
        with self._lock:
            made = np.sum([curve.at(time_ns) for curve in self._input.values()], axis=0)
        return {"launch_cpu_s": float(launch), "write_bytes": float(written), "input_s": float(made[0]),
                "batches": float(made[1]), "python_cpu_s": float(before[2] + python / 1e9)}

    def steps(self, start_ns: int, end_ns: int) -> list[StepRecord]:
        """The steps that overlap that time, in order."""
        with self._lock:
            epochs = list(self._known(end_ns))
        return [s for e in epochs for s in e.steps if s.start_ns < end_ns and s.next_ns > start_ns]

    def batches(self, start_ns: int, end_ns: int) -> list[StepRecord]:
        """The steps whose batch was in the making in that time, in order."""
        with self._lock:
            epochs = list(self._known(end_ns))
        return [s for e in epochs for s in e.steps if s.made_ns > start_ns and s.made_from_ns < end_ns]

    def epoch_start(self, after_ns: int) -> int:
        """Start of the first epoch that does not start before ``after_ns``."""
        with self._lock:
            return next(epoch.start_ns for epoch in self._known(after_ns) if epoch.start_ns >= after_ns)

    def timeline(self, start_ns: int, end_ns: int) -> JobTimeline:
        """Timeline of that time; steps that overlap its edges are whole."""
        ran = self.steps(start_ns, end_ns)
        # Batches are made, and lie in the buffer, for steps that come after that time.
        later = self.steps(end_ns, end_ns + _LOOKAHEAD_NS)[:2 * self.scenario.job.prefetch + 1]
        by_number = {s.number: s for s in (*ran, *self.batches(start_ns, end_ns), *later)}
        calls = [s for _, s in sorted(by_number.items()) if s.kind is not StepKind.CHECKPOINT]
        done = [(s.begin_ns, self.templates[s.template]) for s in ran]
        gpus = range(GPU_COUNT)
        return JobTimeline(
            self.scenario.job, self.programs,
            [StreamOps.join([step.gpus[g].compute.shifted(begin_ns) for begin_ns, step in done]) for g in gpus],
            [StreamOps.join([step.gpus[g].collectives.shifted(begin_ns) for begin_ns, step in done]) for g in gpus],
            [[copy.shifted(begin_ns) for begin_ns, step in done for copy in step.gpus[g].copies] for g in gpus],
            host=[HostEvent("python", "SaveV2", s.begin_ns, s.end_ns) for s in ran if s.kind is StepKind.CHECKPOINT],
            steps=[Step(s.start_ns, s.wait_ns, s.begin_ns, s.begin_ns + self.templates[s.template].issued_ns, s.end_ns,
                        s.end_ns, training=s.kind is StepKind.TRAIN) for s in calls],
            batches=[(s.made_from_ns, s.made_ns) for s in calls], end=end_ns)


ABSENT_RANK = 5
LASTS_NS = 200 * 10**9  # when gputop starts: the history shows its beginning, and a finding is due at once
ASKED_NS = 120 * 10**9  # after its beginning a gputop that had run all the time would first have asked NCCL
_SPINNING_THREADS = GPU_COUNT - 1  # each waiting rank asks its GPU again and again


class HangingLoop(SimulatedLoop):
    """The training job, of which nothing goes on from a step on."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.hangs_ns: int | None = None
        self.steps_done = 0

    def hang(self, after_ns: int) -> None:
        """Hang from the first training step after that time on."""
        step = next(step for step in super().steps(after_ns, after_ns + 60 * 10**9)
                    if step.kind is StepKind.TRAIN and step.begin_ns >= after_ns)
        self.hangs_ns, self.steps_done = step.begin_ns, step.number

    def _waiting_s(self, time_ns: int) -> float:
        return 0.0 if self.hangs_ns is None else max(0, time_ns - self.hangs_ns) / 1e9

    def _before(self, time_ns: int) -> int:
        return time_ns if self.hangs_ns is None else min(time_ns, self.hangs_ns)

    def gpu_integrals(self, gpu: int, time_ns: int) -> figures.F64:
        before = super().gpu_integrals(gpu, self._before(time_ns))
        return before if gpu == ABSENT_RANK else before + figures.waiting_rates() * self._waiting_s(time_ns)

    def host_integrals(self, time_ns: int) -> dict[str, float]:
        done = super().host_integrals(self._before(time_ns))
        return {**done, "python_cpu_s": done["python_cpu_s"] + _SPINNING_THREADS * self._waiting_s(time_ns)}

    def steps(self, start_ns: int, end_ns: int) -> list[StepRecord]:
        return [step for step in super().steps(start_ns, end_ns) if step.end_ns <= self._before(step.end_ns)]

    def batches(self, start_ns: int, end_ns: int) -> list[StepRecord]:
        return [step for step in super().batches(start_ns, end_ns) if step.end_ns <= self._before(step.end_ns)]
