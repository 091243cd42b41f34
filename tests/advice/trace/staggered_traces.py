"""Traces of several GPUs that do not begin their steps together."""

from __future__ import annotations

from gputop.trace.model import Kind
from tests.advice.trace.traces import KERNEL, NCCL, STEP, STEPS, job
from tests.trace.build import Builder


def staggered(each: float, shared: bool = True, gpus: int = 4) -> Builder:
    b = job(gpus)
    for i in range(STEPS):
        for gpu in range(gpus):
            behind = gpu * each
            for k in range(100):
                b.run(gpu, i * STEP + 100 + behind + k * 100, 98, KERNEL,
                      launch=i * STEP + 20 + behind + k * each / 100, launch_length=0.5,
                      thread="python" if shared else None)
            end = i * STEP + 100 + (gpus - 1) * each + 10_200
            b.run(gpu, i * STEP + 10_150 + behind, end - (i * STEP + 10_150 + behind), NCCL, kind=Kind.COLLECTIVE,
                  launch=i * STEP + 90 + behind)
    return b
