"""What the words of a finding have to know about the job, beside the verdict."""

from __future__ import annotations

from dataclasses import dataclass

from gputop.advice.trace.facts import TraceFacts
from gputop.advice.trace.training_loop import training_loop


@dataclass(frozen=True, slots=True)
class Job:
    basis: str  # what shares are of: "step" or "window"
    period_s: float  # length of one step, or of the window
    framework: str  # tensorflow, jax, pytorch or unknown
    loop: str  # how the training loop is written (gputop.advice.trace.training_loop)
    gpus: tuple[int, ...]  # those that ran kernels

    @classmethod
    def of(cls, facts: TraceFacts) -> Job:
        return cls(facts.basis, facts.period_s, facts.framework, training_loop(facts), facts.active_numbers)
