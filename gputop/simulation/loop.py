"""The simulated training job over time: epochs of steps, each waiting for its batch.

Steps are drawn from a few simulated in full (:mod:`gputop.simulation.step`); when each one
starts follows from the input pipeline and the Python between steps. A loop is a function of
its scenario and seed alone: it has no clock. Times are int nanoseconds since its start.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gputop.simulation.figures import F64, GPU_QUANTITIES, HOST_QUANTITIES, Curve, gpu_curve, host_curve
from gputop.simulation.program import StepKind, Stream, programs
from gputop.simulation.scenarios import GPU_COUNT, Scenario
from gputop.simulation.step import I64, SimulatedStep, simulate_step

CALL_NS = 350_000  # Python from the step's start to asking for the batch
FETCH_NS = 70_000  # what taking a batch costs that is there already
EVAL_INPUT_SHARE = 0.45  # of a training batch's time: no augmentation
KEEP_NS = 1_800 * 10**9  # how much of the past stays known
_VARIANTS = {StepKind.TRAIN: 8, StepKind.EVAL: 3, StepKind.CHECKPOINT: 1}


@dataclass(frozen=True, slots=True)
class Template:
    """A step simulated in full, with the integrals of its figures."""

    step: SimulatedStep
    gpu_curves: tuple[Curve, ...]
    host: Curve
    gpu_total: F64  # [gpus, GPU_QUANTITIES]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the job. It starts at ``start_ns``, asks for its batch at ``wait_ns``, has it at
    ``begin_ns``, its work is done at ``end_ns``; the next step starts at ``next_ns``.

    The pipeline made its batch from ``made_from_ns`` to ``made_ns`` (both 0: it takes no batch).
    """

    number: int
    kind: StepKind
    template: int
    batch: int
    start_ns: int
    wait_ns: int
    begin_ns: int
    end_ns: int
    next_ns: int
    made_from_ns: int
    made_ns: int


@dataclass(frozen=True, slots=True)
class OpSlice:
    """Operations of one stream of one GPU in one step, times since the loop's start.

    ``rows`` are rows of the step's program; ``number`` is the step's.
    """

    number: int
    template: int
    rows: npt.NDArray[np.intp]
    start_ns: I64
    end_ns: I64
    launch_ns: I64
    launch_end_ns: I64


@dataclass(frozen=True, slots=True)
class Truth:
    """What the loop did in the training steps of a stretch of time: means per step, seconds.

    Tuples have one entry per GPU. ``compute_s`` is time in compute kernels, ``collectives_s``
    in collectives of which ``transfer_s`` moved data and the rest waited; ``input_wait_s`` is
    from asking for a batch to having it.
    """

    steps: int
    step_s: float
    input_wait_s: float
    compute_s: tuple[float, ...]
    collectives_s: tuple[float, ...]
    transfer_s: float
    h2d_s: tuple[float, ...]
    kernels: tuple[int, ...]

    @property
    def input_wait_ratio(self) -> float:
        return self.input_wait_s / self.step_s


@dataclass(frozen=True, slots=True)
class _Epoch:
    steps: list[StepRecord]
    starts_ns: list[int]
    gpu: F64  # [steps + 1, gpus, quantities]: gathered since the loop's start, at each step's start
    host: F64  # [steps + 1, quantities]


class _Producer:
    """An input pipeline that makes one batch after the other while its buffer has room."""

    def __init__(self, depth: int, start_ns: int) -> None:
        self._free_ns = start_ns
        self._taken = deque([start_ns] * depth, maxlen=depth)

    def take(self, wait_ns: int, work_ns: int) -> tuple[int, int, int]:
        """Ask for the next batch: when making it began and ended, and when it is in hand."""
        begun = max(self._free_ns, self._taken[0])
        self._free_ns = begun + work_ns
        in_hand = max(wait_ns, self._free_ns) + FETCH_NS
        self._taken.append(in_hand)
        return begun, self._free_ns, in_hand


class TrainingLoop:
    """The job. All methods may be called from any thread."""

    def __init__(self, scenario: Scenario, seed: int = 2024) -> None:
        self.scenario = scenario
        self._seed = seed
        self._lock = threading.RLock()
        self.templates: list[Template] = []
        self._template_ids: dict[StepKind, list[int]] = {}
        rng = np.random.default_rng([seed, 0])
        for kind, count in _VARIANTS.items():
            self._template_ids[kind] = [self._add_template(kind, rng) for _ in range(count)]
        self._producer = _Producer(scenario.prefetch_batches, 0)
        self._epochs: list[_Epoch] = []
        self._epoch_starts: list[int] = []
        self._epoch_number = 0
        self._step_number = 0
        self._batch = 0
        self._end_ns = 0
        self._gpu_total = np.zeros((GPU_COUNT, len(GPU_QUANTITIES)))
        self._host_total = np.zeros(len(HOST_QUANTITIES) + 1)
        # Batches in the making: seconds of work and batches, of the training and evaluation pipelines.
        self._input = {kind: Curve(np.zeros(1, np.int64), np.zeros((1, 2))) for kind in (StepKind.TRAIN, StepKind.EVAL)}

    def _add_template(self, kind: StepKind, rng: np.random.Generator) -> int:
        step = simulate_step(kind, programs(self.scenario, kind), self.scenario, rng)
        if kind is StepKind.CHECKPOINT:
            write_ns = int(self.scenario.checkpoint_bytes / self.scenario.checkpoint_write_bytes_per_s * 1e9)
            step = replace(step, body_ns=max(step.body_ns, write_ns))
        curves = tuple(gpu_curve(ops, self.scenario) for ops in step.gpus)
        total = np.stack([curve.total[-1] for curve in curves])
        self.templates.append(Template(step, curves, host_curve(step, self.scenario), total))
        return len(self.templates) - 1

    # -- the job over time

    def _known(self, time_ns: int) -> list[_Epoch]:
        """Simulate until one epoch past ``time_ns``: the pipeline works ahead of the steps."""
        with self._lock:
            while not self._epochs or self._epoch_starts[-1] <= time_ns:
                self._add_epoch()
                self._forget(time_ns - KEEP_NS)
            return self._epochs

    def _add_epoch(self) -> None:
        scenario = self.scenario
        rng = np.random.default_rng([self._seed, 1 + self._epoch_number])
        kinds = [StepKind.TRAIN] * scenario.steps_per_epoch + [StepKind.EVAL] * scenario.eval_steps
        kinds.append(StepKind.CHECKPOINT)
        n = len(kinds)
        work = (scenario.input_s * 1e9 * np.exp(scenario.input_variation * rng.standard_normal(n))).astype(int).tolist()
        gap = (scenario.host_gap_s * 1e9 * np.exp(0.2 * rng.standard_normal(n))).astype(int).tolist()
        choice = rng.integers(0, 1 << 30, n).tolist()
        steps: list[StepRecord] = []
        evaluation: _Producer | None = None
        time = self._end_ns
        for i, kind in enumerate(kinds):
            ids = self._template_ids[kind]
            template = ids[choice[i] % len(ids)]
            asks = time + CALL_NS
            if kind is StepKind.TRAIN:
                begun, ended, begin = self._producer.take(asks, work[i])
            elif kind is StepKind.EVAL:
                evaluation = evaluation or _Producer(scenario.prefetch_batches, time)
                begun, ended, begin = evaluation.take(asks, int(work[i] * EVAL_INPUT_SHARE))
            else:
                begun, ended, begin = 0, 0, asks
            end = begin + self.templates[template].step.body_ns
            following = end + gap[i]
            steps.append(StepRecord(
                self._step_number, kind, template, self._batch, time, asks, begin, end, following,
                begun, ended))
            self._step_number += 1
            self._batch += kind is not StepKind.CHECKPOINT
            time = following
        for kind in self._input:
            self._extend_input(kind, [s for s in steps if s.kind is kind])
        ran = [self.templates[s.template] for s in steps]
        gpu = np.cumsum([self._gpu_total, *(t.gpu_total for t in ran)], axis=0)
        python_s = np.array([CALL_NS + s.next_ns - s.end_ns for s in steps]) / 1e9
        done = np.column_stack([[t.host.total[-1] for t in ran], python_s])
        host = np.cumsum(np.vstack([self._host_total, done]), axis=0)
        self._epochs.append(_Epoch(steps, [s.start_ns for s in steps], gpu, host))
        self._epoch_starts.append(self._end_ns)
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
        self._input[kind] = Curve(
            np.concatenate([curve.knots_ns, knots]), np.concatenate([curve.total, grown + curve.total[-1]]))

    def _forget(self, before_ns: int) -> None:
        while len(self._epochs) > 2 and self._epoch_starts[1] < before_ns:
            del self._epochs[0], self._epoch_starts[0]
            for kind, curve in self._input.items():
                first = max(0, int(np.searchsorted(curve.knots_ns, self._epoch_starts[0])) - 2)
                self._input[kind] = Curve(curve.knots_ns[first:], curve.total[first:])

    def _locate(self, time_ns: int) -> tuple[_Epoch, int]:
        with self._lock:
            epochs = self._known(time_ns)
            epoch = epochs[max(0, bisect_right(self._epoch_starts, time_ns) - 1)]
        return epoch, max(0, bisect_right(epoch.starts_ns, time_ns) - 1)

    def gpu_integrals(self, gpu: int, time_ns: int) -> F64:
        """How much of each of :data:`GPU_QUANTITIES` that GPU has gathered since the loop's start."""
        epoch, i = self._locate(time_ns)
        step = epoch.steps[i]
        if time_ns >= step.end_ns:
            return epoch.gpu[i + 1, gpu]
        if time_ns <= step.begin_ns:
            return epoch.gpu[i, gpu]
        return epoch.gpu[i, gpu] + self.templates[step.template].gpu_curves[gpu].at(time_ns - step.begin_ns)

    def host_integrals(self, time_ns: int) -> dict[str, float]:
        """What the host has done since the loop's start: seconds of one core by kind of work,
        seconds and count of batches in the making, bytes written."""
        epoch, i = self._locate(time_ns)
        step = epoch.steps[i]
        before = epoch.host[i]
        launch, written = before[:2] + self.templates[step.template].host.at(time_ns - step.begin_ns)
        python = min(max(time_ns - step.start_ns, 0), CALL_NS) + max(0, time_ns - step.end_ns)
        with self._lock:
            made = np.sum([curve.at(time_ns) for curve in self._input.values()], axis=0)
        return {
            "launch_cpu_s": float(launch), "write_bytes": float(written),
            "python_cpu_s": float(before[2] + python / 1e9),
            "input_s": float(made[0]), "batches": float(made[1]),
        }

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

    def operations(self, gpu: int, stream: Stream, start_ns: int, end_ns: int) -> Iterator[OpSlice]:
        """The operations of that stream, launched or run in that time, step by step."""
        for step in self.steps(start_ns, end_ns):
            ops = self.templates[step.template].step.gpus[gpu]
            rows = ops.rows(stream)
            if len(rows):
                at = step.begin_ns
                yield OpSlice(
                    step.number, step.template, rows, ops.start_ns[rows] + at, ops.end_ns[rows] + at,
                    ops.launch_ns[rows] + at, ops.launch_end_ns[rows] + at)

    def epoch_start(self, after_ns: int) -> int:
        """When the first epoch starts that does not start before ``after_ns``."""
        with self._lock:
            self._known(after_ns)
            return next(start for start in self._epoch_starts if start >= after_ns)

    def truth(self, start_ns: int, end_ns: int) -> Truth:
        """What happened in the training steps that lie wholly in that time; ValueError if there are none."""
        steps = [
            s for s in self.steps(start_ns, end_ns)
            if s.kind is StepKind.TRAIN and s.start_ns >= start_ns and s.next_ns <= end_ns
        ]
        if not steps:
            raise ValueError("no whole training step in that time")
        n = len(steps)
        seconds = np.zeros((GPU_COUNT, len(Stream)))
        kernels = np.zeros(GPU_COUNT, np.int64)
        transfer = 0
        for s in steps:
            gpus = self.templates[s.template].step.gpus
            transfer += int(gpus[0].transfer_ns.sum())
            for g, ops in enumerate(gpus):
                np.add.at(seconds[g], ops.program.stream, (ops.end_ns - ops.start_ns) / 1e9)
                kernels[g] += len(ops.rows(Stream.COMPUTE))
        seconds /= n
        return Truth(
            steps=n,
            step_s=sum(s.next_ns - s.start_ns for s in steps) / n / 1e9,
            input_wait_s=sum(s.begin_ns - s.wait_ns for s in steps) / n / 1e9,
            compute_s=tuple(seconds[:, Stream.COMPUTE].tolist()),
            collectives_s=tuple(seconds[:, Stream.COLLECTIVE].tolist()),
            transfer_s=transfer / n / 1e9,
            h2d_s=tuple(seconds[:, Stream.H2D].tolist()),
            kernels=tuple((kernels // n).tolist()),
        )
