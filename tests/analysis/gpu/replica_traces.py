"""Traces of GPUs that do the same work in each step."""

from __future__ import annotations

from tests.trace.build import Builder, keras_steps

STEP, STEPS = 1000, 5


def job(gpus: int) -> Builder:
    return keras_steps(Builder(gpus=gpus), STEPS, STEP, 700)


def each_step(b: Builder, gpu: int, start: float, length: float, **how) -> Builder:
    """A kernel a step; ``launch`` and ``start`` count from the step's begin."""
    for i in range(STEPS):
        own = {**how, "launch": how["launch"] + i * STEP} if "launch" in how else how
        b.run(gpu, i * STEP + start, length, **own)
    return b
