from __future__ import annotations

import pytest

from gputop.diagnosis.diagnose import analyze_trace
from gputop.trace.model import Kind, MemoryKind
from tests.trace.build import Builder


def program(copies: int, src: MemoryKind = MemoryKind.PAGEABLE, kernel_at: int = -1) -> Builder:
    """Copies to the GPU after a second of Python, then kernels; and one kernel behind so many copies."""
    b, at = Builder(format="nsys").host("init_model", 0, 1_000_000, "launch 0"), 1_000_000.0
    for i in range(copies):
        b.run(0, at + 10, 9000, "MemcpyH2D", kind=Kind.H2D, launch=at, src=src, dst=MemoryKind.DEVICE, size=40 << 20)
        if i == kernel_at:
            b.run(0, at + 9100, 5, "at::native::first", launch=at + 9050)
        at += 10_000
    for i in range(600):
        b.run(0, at, 900 + i * i % 13, f"void at::native::kernel_{i * i % 7}", launch=at - 10)
        at += 1000
    return b


@pytest.mark.parametrize(("b", "start"), [
    (program(40), True), (program(4), False), (program(40, MemoryKind.PINNED), False),
    (program(40, kernel_at=2), False),
])
def test_the_model_that_comes_to_the_gpu_before_its_first_kernel_is_the_start(b, start):
    analysis = analyze_trace(b.build())
    notes = [note.message for note in analysis.trace.quality if note.id == "start"]
    assert bool(notes) == start and all("copying the model to the GPU" in note for note in notes)
    if start:
        assert not {f.id for f in analysis.findings} & {"copies_pageable", "copies_excessive", "time_outside_steps"}
        assert {part.id: part.time_s for part in analysis.wall_time.parts}["start"] == pytest.approx(1.4, abs=0.02)
