"""What the words of a finding have to know about the job, beside the verdict."""

from __future__ import annotations

from dataclasses import dataclass

from gputop.advice.trace.facts import TraceFacts
from gputop.advice.trace.training_loop import training_loop
from gputop.trace.lookups import name_mask

JITTED = r"PjitFunction\("  # a call of a function that jax.jit made


@dataclass(frozen=True, slots=True)
class Job:
    basis: str  # what shares are of: "step", "window" or "period"
    period_s: float  # length of one step, or of the window
    framework: str  # tensorflow, jax, pytorch or unknown
    loop: str  # how the training loop is written (gputop.advice.trace.training_loop)
    gpus: tuple[int, ...]  # those that ran kernels
    jitted: bool = False  # JAX: the loop calls compiled functions
    strategy: str = ""  # how it is distributed: mirrored or multi_worker (tf.distribute), ddp, fsdp; "": not told

    @classmethod
    def of(cls, facts: TraceFacts) -> Job:
        return cls(facts.basis, facts.period_s, facts.framework, training_loop(facts), facts.active_numbers,
                   bool(name_mask(facts.trace, JITTED).any()), _strategy(facts))


def _strategy(facts: TraceFacts) -> str:
    several = len(facts.active_numbers) > 1
    if facts.framework == "tensorflow" and several and (
            facts.waits is not None or name_mask(facts.trace, r"(?:.*/)?replica_\d+/").any()):
        return "multi_worker" if len(facts.trace.hosts) > 1 else "mirrored"
    if facts.framework == "pytorch":
        for strategy, pattern in (("fsdp", r"FSDP::|FullyShardedDataParallel"), ("ddp", r"DistributedDataParallel")):
            if name_mask(facts.trace, pattern).any():
                return strategy
    return ""
