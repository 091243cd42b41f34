"""What the demo's training loop did in a stretch of time, to hold analyses and live figures against."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gputop.simulation.loop import SimulatedLoop, StepKind
from gputop.simulation.timeline import StreamOps


@dataclass(frozen=True, slots=True)
class LoopTruth:
    """Means per training step, in seconds. Tuples have one entry per GPU.

    ``compute_s`` is time in compute kernels, ``collectives_s`` in collectives, of which ``transfer_s`` moved data
    and the rest waited. ``input_wait_s`` is from asking for a batch to having it.
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


def loop_truth(loop: SimulatedLoop, start_ns: int, end_ns: int) -> LoopTruth:
    """Of the training steps that lie wholly in that time; ValueError if there are none."""
    steps = [s for s in loop.steps(start_ns, end_ns)
             if s.kind is StepKind.TRAIN and s.start_ns >= start_ns and s.next_ns <= end_ns]
    if not steps:
        raise ValueError("no whole training step in that time")
    ran = [loop.templates[s.template].gpus for s in steps]
    per_step = 1 / len(steps) / 1e9

    def busy(ops: StreamOps) -> int:
        return int((ops.end - ops.start).sum())

    gpus = [[step[g] for step in ran] for g in range(len(ran[0]))]
    return LoopTruth(
        steps=len(steps),
        step_s=sum(s.next_ns - s.start_ns for s in steps) * per_step,
        input_wait_s=sum(s.begin_ns - s.wait_ns for s in steps) * per_step,
        compute_s=tuple(sum(busy(ops.compute) for ops in own) * per_step for own in gpus),
        collectives_s=tuple(sum(busy(ops.collectives) for ops in own) * per_step for own in gpus),
        transfer_s=int(np.sum([ops.transfer_ns.sum() for ops in gpus[0]])) * per_step,
        h2d_s=tuple(sum(c.end - c.start for ops in own for c in ops.copies if c.copy.way == "H2D") * per_step
                    for own in gpus),
        kernels=tuple(sum(len(ops.compute.row) for ops in own) // len(steps) for own in gpus))
