"""A job of a process for each GPU that hangs: one rank reads a file that does not come, the others wait in a
collective."""

from __future__ import annotations

from gputop.simulation.figures import F64, waiting_rates
from gputop.simulation.loop import SimulatedLoop, StepKind, StepRecord
from gputop.simulation.scenarios import GPU_COUNT, Scenario

ABSENT_RANK = 5
LASTS_NS = 200 * 10**9  # when gputop starts: the history shows its beginning, and a finding is due at once
ASKED_NS = 120 * 10**9  # after its beginning a gputop that had run all the time would first have asked NCCL
_SPINNING_THREADS = GPU_COUNT - 1  # each waiting rank asks its GPU again and again


class HangingLoop(SimulatedLoop):
    """The training job, of which nothing goes on from a step on."""

    def __init__(self, scenario: Scenario, seed: int = 2024) -> None:
        super().__init__(scenario, seed)
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

    def gpu_integrals(self, gpu: int, time_ns: int) -> F64:
        before = super().gpu_integrals(gpu, self._before(time_ns))
        return before if gpu == ABSENT_RANK else before + waiting_rates() * self._waiting_s(time_ns)

    def host_integrals(self, time_ns: int) -> dict[str, float]:
        done = super().host_integrals(self._before(time_ns))
        return {**done, "python_cpu_s": done["python_cpu_s"] + _SPINNING_THREADS * self._waiting_s(time_ns)}

    def steps(self, start_ns: int, end_ns: int) -> list[StepRecord]:
        return [step for step in super().steps(start_ns, end_ns) if step.end_ns <= self._before(step.end_ns)]

    def batches(self, start_ns: int, end_ns: int) -> list[StepRecord]:
        return [step for step in super().batches(start_ns, end_ns) if step.end_ns <= self._before(step.end_ns)]
