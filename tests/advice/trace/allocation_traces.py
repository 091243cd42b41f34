"""Traces of a job that allocates device memory in every step."""

from __future__ import annotations

from tests.advice.trace.traces import KERNEL, STEP, STEPS, job
from tests.trace.build import Builder


def allocating(call: str = "cudaFree", steps: range = range(STEPS), framework: str = "aten::add", takes: float = 2_000,
               marked: bool = True) -> Builder:
    """In the midst of these steps a call for which all work is awaited, and which launches nothing meanwhile."""
    b = job() if marked else Builder()
    b.host(framework, 0, 1)
    for i in range(STEPS):
        at = i * STEP + 100
        for half in range(2):
            begin = at
            for k in range(40):
                b.run(0, at, 200, KERNEL, launch=max(begin - 60 + k * 10, 0), launch_length=5)
                at += 202
            if half == 0 and i in steps:
                b.host(call, begin + 400, at - begin - 400 + takes, line="launch 0")
                at += takes + 70
            elif half == 0:
                at += 2
    return b
