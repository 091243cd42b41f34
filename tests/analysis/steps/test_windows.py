"""What is called a step where little is known: one call, XProf's marks, a layer, a job's start, the profiler's end."""

from __future__ import annotations

import numpy as np
import pytest

from gputop.analysis.steps.start_up import start_up_spans
from gputop.analysis.steps.steps import find_steps
from gputop.diagnosis.diagnose import analyze_trace
from gputop.trace.model import StepEvents, Trace
from tests.trace.build import Builder, keras_steps, ns


def one_call() -> Builder:
    """A call of Keras' step function, its kernels, and a callback that ends the profile half a second later."""
    b = Builder()
    b.host("train_function", 100, 50, tf_function_call="notTraced-nonXla")
    for i in range(20):
        b.run(0, 200 + i * 10, 9, f"kernel_{i}", launch=105 + i, launch_length=1)
    b.run(0, 500_000, 5, "fetched later", launch=499_000)
    return b


def test_one_call_is_a_step_that_ends_with_what_it_launched():
    steps = find_steps(one_call().build())
    assert steps is not None and steps.bounds_ns == ((100_000, 399_000),)
    assert steps.times.confidence == "low" and "step function" in steps.times.anchor
    said = {note.id for note in analyze_trace(one_call().build()).trace.quality}
    assert "few_steps" in said and "no_steps" not in said


def test_two_calls_are_one_whole_step():
    b = one_call()
    b.host("train_function", 300, 50, tf_function_call="notTraced-nonXla")
    b.run(0, 400, 100, "kernel_0", launch=310)
    steps = find_steps(b.build())
    assert steps is not None and steps.bounds_ns == ((100_000, 300_000),) and steps.times.dropped == 1


@pytest.mark.parametrize(("usual_us", "starts"), [(20_000, True), (200_000, False)])
def test_the_first_run_of_a_traced_function_is_a_start_and_no_step(usual_us: int, starts: bool) -> None:
    b = Builder(gpus=0).host("train_function", 0, 1_240_000, tf_function_call="traced-nonXla")
    b.host("tf.function-graph_building", 0, 1_000_000)
    b.host("train_function", 1_240_000, usual_us, tf_function_call="notTraced-nonXla")
    trace = b.build()
    assert [span.end_ns for span in start_up_spans(trace)] == [1_240_000_000 if starts else 1_000_000_000]
    steps = find_steps(trace)
    assert steps is not None and steps.bounds_ns == ((1_240_000_000, 1_240_000_000 + usual_us * 1_000),)


def marked(trace: Trace, *bounds_us: tuple[int, float, float]) -> Trace:
    """The trace with steps that a viewer has marked: number, begin and end in µs."""
    trace.step_events = StepEvents(
        np.array([len(trace.names) + n for n, _, _ in bounds_us], np.int32),
        np.array([ns(a) for _, a, _ in bounds_us], np.int64), np.array([ns(b) for _, _, b in bounds_us], np.int64))
    trace.names += [str(n) for n in range(max(n for n, _, _ in bounds_us) + 1)]
    return trace


def test_steps_that_a_viewer_marked_are_used_over_all_gpus():
    b = Builder(gpus=2)
    for gpu in range(2):
        for i in range(3):
            b.run(gpu, i * 100 + gpu, 60)
    trace = marked(b.build(), *((i, i * 100 + gpu, i * 100 + gpu + 60) for gpu in range(2) for i in range(3)))
    steps = find_steps(trace)
    assert steps is not None and "XProf" in steps.times.anchor
    assert steps.bounds_ns == ((0, 61_000), (100_000, 161_000), (200_000, 261_000))


def layers(*ends: str) -> Builder:
    """Eight repetitions of 12 kernels with a pause, and ``ends`` in each."""
    b, t = Builder(format="nsys"), 0.0
    for _ in range(8):
        for name in (*(f"layer{i}" for i in range(12)), *ends):
            b.run(0, t, 8, name)
            t += 10
        t += 50
    return b


def test_a_sequence_that_may_be_a_layer_is_called_a_period():
    trace = layers().build()
    assert find_steps(trace).times.unit == "period"
    a = analyze_trace(trace)
    said = {note.id: note.message for note in a.trace.quality}
    assert "a layer of the model or a step" in said["no_steps"]
    assert not any("of the step" in f.title for f in a.findings)


def test_a_sequence_with_the_optimizers_kernels_is_the_step():
    steps = find_steps(layers("void at::native::multi_tensor_apply_kernel<FusedAdam>()").build())
    assert steps is not None and steps.times.unit == "step" and "optimizer" in steps.times.anchor


REDZONE = "void redzone_checker(unsigned char*, unsigned char, unsigned long, unsigned long*)"


@pytest.mark.parametrize("tried", [1, 2])
def test_leading_steps_in_which_kernels_are_tried_out_are_left_out(tried):
    b = keras_steps(Builder(), 8, 1000, 900)
    for i in range(8):
        b.run(0, i * 1000 + 20, 800, launch=i * 1000 + 10)
        if i < tried:
            b.run(0, i * 1000 + 850, 20, REDZONE, launch=i * 1000 + 12)
    steps = find_steps(b.build())
    assert steps is not None and steps.bounds_ns[0][0] == tried * 1_000_000 and not steps.times.start_up


def test_a_window_of_a_start_alone_is_called_one_and_concluded_from_in_nothing():
    b = one_call()
    for i in range(30):
        b.run(0, 3000 + i * 1000, 10, REDZONE, launch=130 + i / 10, launch_length=0.05)
    a = analyze_trace(b.build())
    assert a.steps is not None and "autotuning" in a.steps.start_up
    assert "start_up" in {note.id for note in a.trace.quality}
    assert not a.findings and "launch_bound" in {one.id for one in a.abstained}


def test_replicas_that_set_up_in_turn_are_a_start():
    b = Builder(gpus=2)
    b.host("train_function", 0, 1000, tf_function_call="notTraced-nonXla")
    for gpu in range(2):
        for i in range(20):
            b.run(gpu, 10 + gpu * 500 + i * 10, 8, launch=5 + gpu * 500 + i * 10, launch_length=1)
    assert "one after another" in find_steps(b.build()).times.start_up


@pytest.mark.parametrize("kernels", [100, 400])
def test_findings_from_fewer_than_three_steps_say_so(kernels):
    b = keras_steps(Builder(), 3, 20_000, 19_900)  # the last one's end is not known
    for i in range(3):
        for k in range(kernels):
            b.run(0, i * 20_000 + k * 45, 5, launch=i * 20_000 + k * 45 - 1 if i + k else 0, launch_length=1)
    a = analyze_trace(b.build())
    assert a.steps is not None and a.steps.count == 2
    assert a.findings and "2 complete steps" in a.findings[0].why
