"""Kernels that are tried out in the loop, by cuDNN for each new shape and by Triton: found where it comes back."""

from __future__ import annotations

import pytest

from gputop.analysis.steps.compilations import CUDNN, TRITON, trials
from gputop.trace.model import Trace
from tests.advice.trace.traces import findings
from tests.trace.build import Builder

STEP, STEPS = 100_000.0, 10
FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, std::array<char*, 1ul> >(int)"
USUAL = "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16"


def trace(tried: set[int], by: str = CUDNN, events: bool = True) -> Trace:
    """PyTorch's steps of 100 ms, of which those ``tried`` have 40 ms of trials."""
    b = Builder(format="chrome")
    for i in range(STEPS):
        at = i * STEP
        b.host(f"ProfilerStep#{i}", at, STEP - 1, step_num=i)
        b.host("aten::conv2d", at + 1_000, 45_000).host("aten::convolution_backward", at + 50_000, 49_000)
        b.host("aten::cudnn_convolution" if by == CUDNN else "aten::mm", at + 1_010, 44_000)
        for k in range(20 if i in tried else 0):
            run = at + 2_000 + 2_000 * k
            if by == TRITON:
                b.run(0, run, 900, FILL, launch=run - 20, thread="python")
            if events:
                b.host("cudaEventRecord", run + 910, 5).host("cudaEventRecord", run + 1_900, 5)
            b.run(0, run + 950, 900, f"candidate_{k % 3}" if by == CUDNN else "matmul_kernel", launch=run + 930,
                  launch_length=4, thread="python")
        for k in range(9):
            run = at + 46_000 + 5_000 * k
            b.run(0, run, 4_900, USUAL, launch=run - 50, thread="python")
    return b.build()


@pytest.mark.parametrize(("by", "words"), [(CUDNN, "cudnn.benchmark = False"), (TRITON, "triton.autotune")])
def test_trials_that_come_back_are_found(by: str, words: str) -> None:
    found = findings(trace({2, 4, 5, 7, 8}, by))["retracing"]
    assert found.title.startswith(f"Kernel selection by {by} is repeated: ")
    assert words in (found.snippet or "") and found.evidence["retracings_count"] == 5
    assert "repeated 5 times" in found.why and "wait" not in found.why
    assert found.evidence["share_ratio"] == pytest.approx(0.2, abs=0.03)
    assert found.gain.step_time == pytest.approx(0.2, abs=0.04)


@pytest.mark.parametrize("tried", [set(), {0}, {0, 1}, {6}, {0, 6}])
def test_a_start_and_one_more_shape_are_no_finding(tried: set[int]) -> None:
    for by in (CUDNN, TRITON):
        assert "retracing" not in findings(trace(tried, by))


def test_without_events_nothing_is_tried() -> None:
    for by in (CUDNN, TRITON):
        assert not any(spans.total for spans in trials(trace({2, 5, 8}, by, events=False)).values())
        assert trials(trace({2, 5, 8}, by))[by].total == pytest.approx(3 * 39e6 if by == TRITON else 3 * 44e6, rel=0.05)
