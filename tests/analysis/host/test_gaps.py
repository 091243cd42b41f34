from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.analysis.gpu.device_time import timelines
from gputop.analysis.host.gaps import step_gaps
from gputop.analysis.results import StepGaps
from gputop.analysis.steps.steps import find_steps
from gputop.diagnosis.diagnose import analyze_trace
from tests.trace.build import Builder, keras_steps


def gaps_of(b: Builder, shuffle: int | None = None) -> StepGaps | None:
    trace = b.build(shuffle)
    return step_gaps(trace, timelines(trace), find_steps(trace))


def by_name(gaps: StepGaps) -> dict[str, float]:
    return {work.name: work.s_per_step for work in gaps.main}


def test_without_gpus_gaps_lie_between_the_calls_and_eager_ops_have_their_own_names():
    b = keras_steps(Builder(gpus=0), 5, 100, 60)
    for i in range(5):
        at = i * 100 + 70
        b.host("TFE_Py_FastPathExecute_C", at, 12).host("EagerExecute", at + 1, 10, is_func=0, eager_op="Square")
        b.host("EagerLocalExecute: Square", at + 2, 8).host("EagerKernelExecute", at + 3, 6)
        b.host("KernelAndDeviceFunc::Run", at + 4, 4)
        b.host("numpy", at + 15, 5)
    gaps = gaps_of(b)
    assert gaps is not None and gaps.total_s_per_step == pytest.approx(40e-6) and "end of a step's call" in gaps.what
    assert by_name(gaps) == pytest.approx({"Square": 10e-6, "numpy": 5e-6, "TFE_Py_FastPathExecute_C": 2e-6})
    assert next(work.count_per_step for work in gaps.main if work.name == "Square") == 1
    assert gaps.no_event_s_per_step == pytest.approx(23e-6)


def test_with_gpus_gaps_are_when_none_of_them_is_busy():
    b = keras_steps(Builder(gpus=2), 4, 100, 50)
    for i in range(4):
        b.run(0, i * 100 + 10, 30, launch=i * 100 + 5).run(1, i * 100 + 30, 40)
        b.host("ExecutorState::Process", i * 100 + 60, 30, line="tf_Compute/1")
        b.host("model/Unique:Unique", i * 100 + 65, 20, line="tf_Compute/1")
    gaps = gaps_of(b)
    assert gaps is not None and gaps.total_s_per_step == pytest.approx(40e-6) and "no GPU" in gaps.what
    assert by_name(gaps) == pytest.approx({"__inference_multi_step_on_iterator_42": 10e-6})
    executor = {work.name: work.s_per_step for work in gaps.executor}
    assert executor["model/Unique:Unique"] == pytest.approx(15e-6)  # from 70 on
    assert executor["cuLaunchKernel"] == pytest.approx(5e-6)  # the launching thread's
    assert executor["ExecutorState::Process"] == pytest.approx(5e-6)


def test_marks_of_steps_and_what_is_around_them_are_no_work():
    b = Builder(gpus=1).host("fit", 0, 1000).host("epoch", 5, 495).host("epoch", 505, 490)
    for i in range(10):
        at = 10 + i * 98
        b.host("train", at, 90, step_num=i).host("PjitFunction(f)", at, 40).run(0, at + 10, 30, launch=at + 5)
        b.host("checkpoint", at + 50, 20)  # in the mark, and all of it in the gap
    gaps = gaps_of(b)
    assert gaps is not None
    assert {"checkpoint"} <= set(by_name(gaps)) <= {"checkpoint", "PjitFunction(f)", "cuLaunchKernel"}
    assert by_name(gaps)["checkpoint"] == pytest.approx(20e-6)
    assert gaps.no_event_s_per_step == pytest.approx(gaps.total_s_per_step - sum(by_name(gaps).values()), abs=1e-6)


def test_python_is_seen_where_the_runtimes_calls_have_lines_of_their_own():
    b = Builder(gpus=1)
    for i in range(6):
        b.host("PjitFunction(f)", i * 100, 40).run(0, i * 100 + 10, 30, launch=i * 100 + 5, thread="Host Threads/7")
        b.host("log", i * 100 + 60, 20)
    gaps = gaps_of(b)
    assert gaps is not None and by_name(gaps)["log"] == pytest.approx(20e-6)


def test_no_gaps_without_steps_or_without_gpu_events():
    assert gaps_of(Builder(gpus=0).host("EagerExecute", 0, 10)) is None
    assert gaps_of(keras_steps(Builder(gpus=1), 5, 100, 60)) is None  # GPUs are there and their plane is empty


Calls = st.lists(st.tuples(st.integers(0, 59), st.integers(1, 20), st.sampled_from("abc")), max_size=15)


@given(Calls, st.lists(st.tuples(st.integers(0, 59), st.integers(1, 15)), min_size=1, max_size=8), st.integers(0, 99))
def test_gaps_against_a_clock_that_ticks(calls, kernels, seed):
    b = keras_steps(Builder(gpus=1), 4, 20, 20)
    call = "__inference_multi_step_on_iterator_42"
    kept: list[tuple[int, int, str]] = [(i * 20, i * 20 + 20, call) for i in range(4)]
    for start, length, name in calls:
        end = start + length
        if all(end <= s or e <= start or (s <= start and end <= e) or (start <= s and e <= end) for s, e, _ in kept):
            kept.append((start, end, name))
            b.host(name, start, length)
    for start, length in kernels:
        b.run(0, start, length)
    b.run(0, 79, 1)
    gaps = gaps_of(b, seed)
    want: Counter = Counter()
    idle = 0
    for at in range(60):  # three whole steps
        if any(s <= at < s + length for s, length in kernels):
            continue
        idle += 1
        open_ = [event for event in kept if event[0] <= at < event[1]]
        want[max(open_, key=lambda e: (e[0], -e[1], e[2] != call, e[2]))[2]] += 1
    assert gaps is not None and gaps.total_s_per_step * 3 == pytest.approx(idle * 1e-6)
    assert {n: round(s * 3e6) for n, s in by_name(gaps).items()} == dict(want)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_lines_and_events_tells_nothing(seed):
    b = keras_steps(Builder(gpus=2), 5, 100, 60)
    for i in range(5):
        for name in ("x", "y"):
            b.host(name, i * 100 + 70, 10).host(name, i * 100 + 70, 10, line="tf_Compute/1")
        b.run(i % 2, i * 100 + 10, 20, launch=i * 100 + 2, thread="tf_Compute/2", op="m/MatMul:MatMul")
        b.host("train_step", i * 100 + 1, 50, tf_function_call="notTraced-nonXla", tracing_count=1)
        b.host("Iterator::Root", i * 100 + 3, 4, line="tf_data_iterator/1", id=1, name="D:1", shapes="[1]")
        b.memory(i * 100, "GPU_0_bfc", 100 + i, 900, 500, op=f"op{i}", size=100, address=i)
        b.memory(i * 100, "GPU_0_bfc", 50, 950, 500, size=100, address=i, free=True)
    assert analyze_trace(b.build()).to_json() == analyze_trace(b.build(shuffle=seed)).to_json()


@pytest.mark.parametrize("format_", ["nsys", "chrome"])
def test_of_nested_ranges_in_a_gap_the_outermost_is_named_and_no_whole_step(format_: str) -> None:
    b, kind = Builder(format=format_), {"annotation": 1} if format_ == "chrome" else {}
    for i in range(12):
        at = i * 20_000 + 10
        b.host(f"step {i}", at, 19_900, "launch 0", **kind).host("train", at + 50, 19_800, "launch 0", **kind)
        b.host("load_sample", at + 100, 12_000, "launch 0", **kind)
        for k in range(3):
            b.host("decode", at + 200 + k * 3_900, 3_000, "launch 0", **kind)
            b.host("huffman", at + 300 + k * 3_900, 2_500, "launch 0", **kind)
        b.host("cudaMalloc", at + 11_950, 100, "launch 0")
        for k in range(5):
            b.run(0, at + 12_500 + k * 1_300, 1_300, launch=at + 12_400 + k * 10)
    gaps = gaps_of(b)
    assert gaps is not None and gaps.main[0].name == "load_sample" and gaps.main[0].s_per_step >= 0.0118
    assert not {"decode", "huffman"} & by_name(gaps).keys()


def test_while_autograd_runs_ops_the_loop_is_not_without_events():
    b = Builder(gpus=1, format="chrome")
    for i in range(6):
        at = 1_000 * i
        b.host(f"ProfilerStep#{i}", at, 990, step_num=i).host("aten::mm", at + 10, 90)
        b.run(0, at + 40, 50, launch=at + 20, thread="python")
        for k in range(8):  # the main thread waits for it and shows no event
            b.host("autograd::engine::evaluate_function: MmBackward0", at + 100 + 100 * k, 100, line="thread 2")
            b.run(0, at + 140 + 100 * k, 50, launch=at + 120 + 100 * k, thread="thread 2")
    gaps = gaps_of(b)
    assert gaps is not None and gaps.no_event_s_per_step == pytest.approx(0.11e-3, abs=0.03e-3)
