"""Timelines for tests of their screen: small jobs, read back from the file that a worker would write."""

from __future__ import annotations

import tempfile

from gputop.timeline.build import build
from gputop.timeline.reader import Timeline
from gputop.trace.analysis import examine
from gputop.trace.model import Kind, Trace
from tests.trace.build import Builder

STEP_NS = 1_000_000


def timeline_of(trace: Trace) -> Timeline:
    with tempfile.TemporaryFile() as file:
        build(examine(trace), file)
        file.flush()
        return Timeline.open(file)


def job(steps: int = 4, gpus: int = 2) -> Trace:
    """Steps of 1 ms that begin at 10 µs: a copy, three kernels, a collective, then nothing for 320 µs."""
    b = Builder(gpus=gpus)
    for step in range(steps):
        begin = step * 1000.0 + 10
        b.host("train", begin, 950, step_num=step, _r=1)
        b.host("EagerExecute", begin + 5, 300)
        b.host("MatMul", begin + 50, 100)
        for gpu in range(gpus):
            b.run(gpu, begin + 20, 30, "MemcpyH2D", kind=Kind.H2D, stream=3, launch=begin + 15 + gpu, size=1000)
            for i in range(3):
                b.run(gpu, begin + 300 + 100 * i, 95, f"sgemm_{i}", launch=begin + 290 + 10 * i + gpu,
                      op=f"model/dense_{i}/MatMul")
            b.run(gpu, begin + 620, 80, "ncclDevKernel_AllReduce", kind=Kind.COLLECTIVE, stream=2,
                  launch=begin + 330 + gpu)
    return b.build()
