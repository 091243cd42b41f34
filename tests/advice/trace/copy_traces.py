"""Traces of a job that copies and computes on one stream."""

from __future__ import annotations

from gputop.trace.model import Kind, MemoryKind
from tests.advice.trace.traces import STEP, STEPS, fill, job
from tests.trace.build import Builder


def one_stream(memory: MemoryKind = MemoryKind.PINNED, stream: int = 1, length: float = 2_000,
               framework: str = "aten::add") -> Builder:
    """Each step begins with a copy, then computes; ``stream``: that of the copy."""
    b = job()
    b.host(framework, 0, 1)
    for i in range(STEPS):
        b.run(0, i * STEP + 50, length, "MemcpyH2D", kind=Kind.H2D, launch=i * STEP + 10, size=50_000_000, src=memory,
              dst=MemoryKind.DEVICE, stream=stream)
    fill(b, 0, length + 60, STEP, 196, 4, queued=20)
    return b
