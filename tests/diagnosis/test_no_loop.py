"""Recordings of programs that are no loop: their start, their end, and GPU events alone."""

from __future__ import annotations

import pytest

from gputop.analysis.results import Analysis
from gputop.diagnosis.diagnose import analyze_trace
from gputop.diagnosis.report import short_report
from tests.trace.build import Builder


def program(kernels: int, *, name: str = "add(float*)", pause_at: int = -1, launch: bool = True) -> Builder:
    """Kernels one behind the other; after one of them a second without any."""
    b, at = Builder(format="nsys"), 1000.0
    for i in range(kernels):
        b.run(0, at, 170 + 7 * (i * i % 11), f"{name} {i * i % 7}", launch=at - 40 if launch else None)
        at += 300 + (1e6 if i == pause_at else 0)
    return b


def judged(b: Builder) -> tuple[Analysis, str]:
    analysis = analyze_trace(b.build())
    return analysis, short_report(analysis, 1000)


@pytest.mark.parametrize("call", ["cuModuleUnload", "cudaFree", "cuCtxDestroy_v2", "cudaDeviceReset", "cublasDestroy"])
@pytest.mark.parametrize("kernels", [36, 400])
def test_tear_down_is_the_end(call, kernels):
    b = program(kernels).host(call, 1000 + 300 * kernels, 528_000, "launch 0")
    analysis, report = judged(b)
    assert "time_outside_steps" not in {f.id for f in analysis.findings} and "training loop" not in report
    assert "In the last 528 ms of the recording, the program" in report and analysis.wall_time is not None
    assert {part.id: round(part.time_s, 2) for part in analysis.wall_time.parts}["end"] == 0.53


def test_a_recording_without_any_length_has_no_end():
    analysis, _ = judged(Builder(format="nsys").run(0, 0, 0))
    assert not [note for note in analysis.trace.quality if note.id == "end"]


def test_memory_that_is_freed_between_kernels_is_not_the_end():
    b = program(400, name="void at::native::vectorized_elementwise_kernel", pause_at=200)
    analysis, _ = judged(b.host("cudaFree", 1000 + 300 * 201, 900_000, "launch 0"))
    assert analysis.wall_time is not None and "end" not in {part.id for part in analysis.wall_time.parts}


def test_the_first_use_of_a_library_is_the_start():
    b = Builder(format="nsys").host("cudaFree", 0, 3_980_000, "launch 0").host(
        "cudaStreamCreate", 3_990_000, 560_000, "launch 0")
    for i in range(60):
        b.run(0, 4_560_000 + 300 * i, 170, f"add {i % 7}", launch=4_560_000 + 300 * i - 40)
    analysis, report = judged(b)
    assert "time_outside_steps" not in {f.id for f in analysis.findings} and "training loop" not in report
    assert "The first 4.55 s of the recording are job startup, with loading" in report


@pytest.mark.parametrize(("kernels", "launch"), [(22, True), (22, False), (900, False)])
def test_what_is_no_training_has_nothing_moved_out_of_its_loop(kernels, launch):
    """A tool that runs a few kernels once, and GPU events alone."""
    analysis, report = judged(program(kernels, pause_at=kernels // 2, launch=launch))
    assert "time_outside_steps" not in {f.id for f in analysis.findings} and "training loop" not in report


def test_a_framework_whose_gpus_pause_again_and_again_is_still_told():
    b, at = Builder(format="nsys"), 1000.0
    for i in range(900):
        b.run(0, at, 170 + 7 * (i * i % 11), f"void at::native::softmax_backward_{i * i % 7}", launch=at - 40)
        at += 300
        if i % 150 == 70:
            b.host("save_model", at, 900_000, "launch 0")
            at += 900_100
    analysis, _ = judged(b)
    assert "time_outside_steps" in {f.id for f in analysis.findings}
