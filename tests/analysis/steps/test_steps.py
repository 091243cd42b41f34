from __future__ import annotations

import pytest

from gputop.analysis.steps.model import Steps
from gputop.analysis.steps.phases import evaluation_note
from gputop.analysis.steps.steps import STEP_DETECTORS, find_steps
from gputop.trace.model import HloOp
from tests.records import replace
from tests.trace.build import Builder, keras_steps


def test_keras2_markers_of_training_win_and_longer_ones_of_evaluation_end_a_step():
    b = Builder(gpus=0)
    for i in range(5):
        b.host("train", i * 100, 90, step_num=i, _r=1)
    for i in range(20):
        b.host("test", 520 + i * 100, 95, step_num=i, _r=1)
    keras_steps(b, 5, 100, 80)
    steps = find_steps(b.build())
    assert steps is not None and "train" in steps.times.anchor and steps.times.confidence == "high"
    assert steps.count == 5 and steps.bounds_ns[-1] == (400_000, 520_000)
    assert steps.times.phase == "training" and "evaluation" in steps.times.left_out_s


def test_markers_that_a_viewer_numbers_are_of_one_loop():
    b = Builder(gpus=0)
    for i in range(109, 128):
        b.host(f"train {i}", i * 100, 100 if i % 3 else 99, step_num=i)
    b.host("test 0", 12_800, 300, step_num=0)
    steps = find_steps(b.build())
    assert steps is not None and steps.times.anchor == "train markers with step_num" and steps.count == 19
    assert steps.times.phase == "training" and "evaluation" in steps.times.left_out_s


def test_keras3_calls_reach_to_the_next_call_and_the_last_is_left_out():
    steps = find_steps(keras_steps(Builder(gpus=0), 6, 100, 60, first=7).build())
    assert steps is not None and steps.count == 5 and steps.times.dropped == 1
    assert steps.times.median_s == pytest.approx(100e-6)
    assert steps.bounds_ns[0] == (7_000, 107_000) and steps.call_ends_ns[:2] == (67_000, 167_000)
    b = Builder(gpus=0)  # without EagerExecute by the traced function
    for i in range(4):
        b.host("one_step_on_iterator", i * 50, 30, tf_function_call="notTraced-nonXla")
    steps = find_steps(b.build())
    assert steps is not None and steps.count == 3 and "tf_function_call" in steps.times.anchor


def test_validation_is_a_function_of_its_own():
    b = keras_steps(Builder(gpus=0), 6, 100, 60)  # both compiled by XLA, say: nothing tells which of them trains
    for i in range(6):
        b.host("EagerExecute", 600 + i * 20, 10, is_func=1, eager_op="__inference_multi_step_on_iterator_77")
    steps = find_steps(b.build())
    assert steps is not None and steps.count == 6  # the last training step ends where validation begins
    assert steps.times.mean_s == pytest.approx(100e-6)
    assert steps.times.phase == "unknown" and steps.times.left_out_s == pytest.approx({"unknown": 60e-6})
    assert "may be of either kind" in evaluation_note(steps.times)[0].message


def test_functions_on_tf_data_threads_are_no_steps():
    b = Builder(gpus=0)
    for i in range(50):
        b.host("EagerExecute", i * 10, 5, line="tf_data_private_threadpool/1", is_func=1, eager_op="__inference_map_3")
    assert find_steps(b.build()) is None


@pytest.mark.parametrize(("mark", "pace", "length", "behind", "ahead"), [
    ("PjitFunction(train_step)", 1000, 50, 20, False), ("PjitFunction(train_step)", 100, 50, 20, True),
    # As DDP on MI300X of AMD-AGI/TraceLens: a marked step each 16 ms, and the GPU, 30 ms behind, takes 19 ms.
    ("ProfilerStep#{}", 870, 870, 2020, True), ("ProfilerStep#{}", 1000, 1000, 2020, False)])
def test_where_the_host_runs_ahead_its_calls_tell_no_step_time(mark, pace, length, behind, ahead):
    b, count = Builder(gpus=1), 5 if "{}" in mark else 8  # of calls the last is left out
    for i in range(count):
        b.host(mark.format(i), i * pace, length)
        for k in range(9):
            b.run(0, behind + i * 1000 + k * 110, 100, launch=i * pace + 1 + k, thread="python")
    steps = find_steps(b.build())
    assert steps is not None and steps.count == min(count, 7) and steps.times.median_s == pytest.approx(1000e-6)
    assert ("the host runs ahead" in steps.times.anchor) == ahead and bool(steps.call_ends_ns) != ahead


def test_where_the_host_runs_ahead_only_what_is_long_on_the_gpu_is_warm_up():
    """The first step's marks are twice as long as the others', as its graph's memory is reserved."""
    def job(first: float) -> Steps | None:
        b, at = Builder(gpus=1), 0.0
        for i in range(5):
            length = 300.0 if i == 0 else 100.0
            b.host(f"ProfilerStep#{i}", at, length)
            b.run(0, 3000 * (i > 0) * (first > 1000) + 20 + i * 1000, first if i == 0 else 990, launch=at + 1,
                  thread="python")
            at += length
        return find_steps(b.build())
    steps, slow = job(990), job(3900)
    assert steps is not None and (steps.count, steps.times.dropped, steps.warm_up_ns) == (5, 0, ())
    assert slow is not None and (slow.count, len(slow.warm_up_ns)) == (4, 1)


def test_a_pause_after_the_steps_is_no_running_ahead():
    b = Builder(gpus=1)
    for i in range(8):
        b.host("train", i * 1000, 990, step_num=i)
        b.run(0, 20 + i * 1000, 900, launch=i * 1000 + 10, thread="python")
    b.run(0, 60_000, 10, launch=59_990, thread="python")
    steps = find_steps(b.build())
    assert steps is not None and steps.times.anchor == "train markers with step_num" and steps.count >= 7


def test_what_compiles_again_and_again_is_no_warm_up():
    b = Builder(gpus=0)
    at = 0.0
    for i in range(9):
        length = 81.0 if i % 2 == 0 else 21.0
        b.host("train", at, length - 1, step_num=i)
        at += length
    steps = find_steps(b.build())
    assert steps is not None and steps.count == 9 and steps.times.dropped == 0


def test_compilation_is_warm_up():
    b = Builder(gpus=0)
    for i in range(7):
        b.host("EagerExecute", 4900 + i * 100 if i else 0, 60 if i else 5000, is_func=1,
               eager_op="__inference_one_step_on_iterator_1")
    steps = find_steps(b.build())
    assert steps is not None and steps.count == 5 and steps.times.dropped == 2
    assert steps.times.mean_s == pytest.approx(100e-6)


@pytest.mark.parametrize(("names", "iterations"), [(("gradient_tape/replica_1/dense/MatMul", "replica_1/Size"), 2),
                                                   (("my_replica_1/MatMul", "replica_x/MatMul"), 4)])
def test_steps_per_execution_is_counted_by_get_next_and_replicas_on_cpus_are_not_iterations(names, iterations):
    b = keras_steps(Builder(gpus=0), 4, 100, 90)
    for i in range(16):
        b.host("IteratorGetNextAsOptionalOp::DoCompute", i * 25 + 3, 2, line=f"tf_data_iterator_get_next/{i % 2}")
        b.host(names[i % 2], i * 25 + 6, 2)
    assert find_steps(b.build()).times.iterations_per_step == iterations


def test_replicas_are_not_iterations():
    b = keras_steps(Builder(gpus=4), 4, 100, 90)
    for i in range(4):
        for gpu in range(4):
            b.run(gpu, i * 100 + 10, 50)
            b.host("IteratorGetNextOp::DoCompute", i * 100 + 3, 2, line=f"tf_data_iterator_get_next/{gpu}")
    assert find_steps(b.build()).times.iterations_per_step == 1


def test_custom_loop_by_its_root_function():
    b = Builder(gpus=0)
    for i in range(8):
        b.host("EagerExecute", i * 100, 60, is_func=1, eager_op="__inference_train_7")
        b.host("EagerExecute", i * 100 + 70, 5, is_func=1, eager_op="__inference_metric_9")
    steps = find_steps(b.build())
    assert steps is not None and "__inference_train_7" in steps.times.anchor and steps.times.confidence == "medium"
    assert steps.count == 7


@pytest.mark.parametrize(("calls", "length_s", "count"), [(2, 20.0, 2), (2, 0.4, 0), (1, 20.0, 0), (3, 20.0, 3)])
def test_two_long_calls_of_a_function_are_steps(calls, length_s, count):
    b = Builder(gpus=0).host("x", 0, 1)
    for i in range(calls):
        b.host("EagerExecute", 100 + i * length_s * 1e6, length_s * 1e6 - 50, is_func=1, eager_op="__inference_step_7")
    b.host("x", 200 + calls * length_s * 1e6, length_s * 1e6)
    found = find_steps(b.build())
    assert (found.count if found is not None else 0) in (count, max(count - 1, 0))
    assert (found is None) == (count == 0)
    if count == 2:
        assert found is not None and found.count == 2 and found.times.confidence == "low"
        assert found.times.median_s == pytest.approx(length_s, rel=0.01)


def test_jax_calls_recorded_twice_count_once():
    b = Builder(gpus=0)
    for i in range(6):
        b.host("PjitFunction(step)", i * 100, 60).host("PjitFunction(step)", i * 100 + 1, 58)
    steps = find_steps(b.build())
    assert steps is not None and steps.count == 5 and steps.times.mean_s == pytest.approx(100e-6)


@pytest.mark.parametrize("log_every", [0, 3])
def test_a_jitted_helper_that_takes_most_time_is_no_step(log_every):
    """As optax outside of jit, whose helper runs for both moments. What runs now and then hides no step either."""
    b = Builder(gpus=0)
    for i in range(12):
        b.host("dot.3", i * 1000 + 20, 50, line="tf_XLAPjRtCpuClient/1", hlo=0, hlo_module="jit_loss")
        b.host("PjitFunction(loss)", i * 1000, 100).host("PjitFunction(add)", i * 1000 + 150, 20)
        b.host("PjitFunction(tree_bias_correction)", i * 1000 + 200, 300)
        b.host("PjitFunction(tree_bias_correction)", i * 1000 + 600, 300)
        if log_every and i % log_every == 0:
            b.host("PjitFunction(log_norms)", i * 1000 + 950, 10)
    trace = b.build()
    trace.hlo_ops = [HloOp("jit(loss)/transpose(jvp(loss))/dot_general", "", None, None)]
    steps = find_steps(trace)
    assert steps is not None and steps.times.anchor == "calls of PjitFunction(loss)"
    assert steps.count == 11 and steps.times.mean_s == pytest.approx(1e-3)


def test_a_jitted_cell_that_the_loop_calls_forward_and_backward_is_no_step():
    """As of a recurrent model whose loop over time is not jitted: other ops follow a call on the way back."""
    b = Builder(gpus=0)
    for i in range(6):
        for t in range(20):
            at = i * 10_000 + t * 200
            b.host("PjitFunction(dynamic_slice)", at, 20).host("PjitFunction(squeeze)", at + 25, 20)
            b.host("PjitFunction(cell)", at + 50, 100)
            b.host("PjitFunction(cell)", at + 4_500, 120).host("PjitFunction(add)", at + 4_650, 20)
        b.host("PjitFunction(update)", i * 10_000 + 9_000, 60)
    steps = find_steps(b.build())
    assert steps is not None and steps.times.anchor == "calls of PjitFunction(update)"
    assert steps.times.mean_s == pytest.approx(10e-3)


@pytest.mark.parametrize(("calls", "anchor", "count"), [
    (["predict", "log", "slice", "predict", "log", "mul", "predict", "update"], "update", 59),
    (["predict", "predict", "predict", "update"], "predict", 180),  # steps, and what comes once in three of them
    (["predict", "log", "predict", "log", "predict", "log", "update"], "predict", 180)])
def test_a_jitted_function_that_a_gradient_outside_of_jit_calls_several_times_is_no_step(calls, anchor, count):
    """Forward, backward and again for the loss, also where the sequence is another one at the end of an epoch."""
    b, at = Builder(gpus=0), 0
    for i in range(60):
        for name in [*calls, *(["threefry_seed", "iota", "_shuffle"] if i in (5, 16, 40) else [])]:
            b.host(f"PjitFunction({name})", at, 300 if name == "predict" else 20)
            at += 400
    steps = find_steps(b.build())
    assert steps is not None and steps.times.anchor == f"calls of PjitFunction({anchor})"
    assert steps.count == pytest.approx(count, abs=2)


@pytest.mark.parametrize(("update", "anchor", "count"), [
    (True, "calls of PjitFunction(step)", 71), (False, "a loop of JAX's own ops", 5)])
def test_jitted_steps_between_which_ops_evaluate_one_by_one_are_steps_where_they_update(update, anchor, count):
    """As of an evaluation outside of jit every 12 steps; without an update the calls may be passes whose gradients a
    loop sums up."""
    b, ops = Builder(gpus=0), ["jvp()/dot_general", "transpose(jvp())/dot_general", "sub" if update else "jvp()/add"]
    for i in range(72):
        at = i * 1_000 + i // 12 * 4_000
        b.host("PjitFunction(step)", at, 900)
        for k in range(3):
            b.host(f"dot.{k}", at + 100 + 200 * k, 150, line="tf_XLAPjRtCpuClient/1", hlo=k, hlo_module="jit_step")
        for k, op in enumerate(("matmul", "relu", "matmul", "_argmax") if i % 12 == 11 else ()):
            b.host(f"PjitFunction({op})", at + 1_000 + k * 900, 800)
    trace = b.build()
    trace.hlo_ops = [HloOp(f"jit(step)/{op}", "", None, None) for op in ops]
    steps = find_steps(trace)
    assert steps is not None and (steps.times.anchor, steps.count) == (anchor, pytest.approx(count, abs=6))


@pytest.mark.parametrize(("function", "phase"), [("compute_accuracy", "evaluation"), ("<lambda>", "prediction")])
def test_a_loop_of_a_jitted_function_without_gradients_evaluates_or_predicts(function, phase):
    b = Builder(gpus=0)
    for i in range(60):
        at = i * 1_000 + i // 10 * 5_000
        b.host("PjitFunction(update)", at, 800)
        b.host("dot.0", at + 100, 500, line="tf_XLAPjRtCpuClient/1", hlo=0, hlo_module="jit_update")
        for k in range(8 if i % 10 == 9 else 0):
            b.host(f"PjitFunction({function})", at + 900 + k * 600, 550)
    trace = b.build()
    trace.hlo_ops = [HloOp("jit(update)/transpose(jvp())/dot_general", "", None, None)]
    steps = find_steps(trace)
    assert steps is not None and steps.times.anchor == "calls of PjitFunction(update)"
    assert {name: len(spans.start) for name, spans in steps.other_loops.items()} == {phase: 5}


def _sequence(names: list[str], gaps: float = 50) -> Builder:
    b = Builder(format="nsys")
    t = 0.0
    for name in names:
        if name == "first":
            t += gaps
        b.run(0, t, 8, name)
        t += 10
    return b


def test_a_kernel_sequence_that_repeats_begins_after_its_widest_gap():
    step = ["first", *(f"layer{i % 4}" for i in range(16)), "update"]
    steps = find_steps(_sequence((step * 7)[5:]).build())  # cut into in the middle of a step
    assert steps is not None and steps.times.confidence == "low" and "18 kernels" in steps.times.anchor
    assert steps.call_ends_ns == () and steps.bounds_ns[0] == (180_000, 410_000)
    assert steps.times.mean_s == pytest.approx((18 * 10 + 50) * 1e-6)


@pytest.mark.parametrize(("kernels", "times", "loop"), [(12, 8, True), (3, 120, True), (3, 30, False)])
def test_a_kernel_sequence_is_found_beside_a_pause_and_a_short_one_if_it_repeats_often(kernels, times, loop):
    b, t = Builder(format="nsys"), 0.0
    for i in range(times):
        for j in range(kernels):
            b.run(0, t, 8, f"k{j}")
            t += 10
        t += 3_000 if i == times // 2 else 50
    steps = find_steps(b.build())
    assert (steps is not None) == loop
    if steps is not None:
        assert steps.count == times - 2 and steps.times.mean_s == pytest.approx((kernels * 10 + 50) * 1e-6)


@pytest.mark.parametrize("names", [
    ["gemm"] * 100,  # a benchmark, no step in sight
    [f"k{(i * i) % 41}" for i in range(120)],  # no period of the whole
    ["first", *(f"layer{i}" for i in range(20))] * 2,  # too few repetitions
])
def test_without_a_sure_period_there_are_no_steps(names):
    assert find_steps(_sequence(names).build()) is None


def test_irregular_repetitions_and_an_empty_trace_are_no_steps():
    assert find_steps(Builder(gpus=1).build()) is None
    b, t = Builder(format="nsys"), 0.0
    for i in range(6):
        for j in range(12):
            b.run(0, t, 5, f"k{j}")
            t += 10
        t += 1500 * (i % 2)
    assert find_steps(b.build()) is None


def _call(b: Builder, start: float, length: float, function: str, *ops: str) -> None:
    b.host("EagerExecute", start, length, is_func=1, eager_op=function)
    for i, op in enumerate(ops):
        b.host(op, start + 1 + i, 1, "tf_Compute/1")


FORWARD, BACKWARD = "m/dense/MatMul:MatMul", "gradient_tape/m/dense/MatMul_1:MatMul"
FIT, EVALUATE = "__inference_multi_step_on_iterator_1", "__inference_multi_step_on_iterator_2"


def test_training_and_evaluation_are_distinguished_by_their_ops():
    b = Builder(gpus=0)
    for i in range(5):
        _call(b, i * 100, 40, FIT, FORWARD, BACKWARD)
    for i in range(40):  # takes more time than training does
        _call(b, 500 + i * 100, 90, EVALUATE, FORWARD)
    steps = find_steps(b.build())
    assert steps is not None and steps.times.phase == "training" and steps.count == 5
    assert steps.times.left_out_s == pytest.approx({"evaluation": 3.6e-3})
    assert [note.id for note in evaluation_note(steps.times)] == ["evaluation"]


@pytest.mark.parametrize("batches", [1, 3])
def test_what_a_callback_predicts_after_each_batch_belongs_to_the_step(batches):
    """Each batch is read inside the step's call, and outside by the prediction, as Keras 3 does."""
    b = Builder(gpus=0)
    for i in range(6):
        _call(b, i * 1000, 40, FIT, FORWARD, BACKWARD)
        b.host("IteratorGetNextAsOptionalOp::DoCompute", i * 1000 + 3, 2, line="tf_data_iterator_get_next/1")
        for batch in range(batches):
            b.host("IteratorGetNextOp::DoCompute", i * 1000 + 600 + batch * 60, 5)
            _call(b, i * 1000 + 610 + batch * 60, 20, "__inference_one_step_on_data_distributed_3", FORWARD)
    steps = find_steps(b.build())
    assert steps is not None and steps.count == 5 and steps.times.phase == "training" and not steps.times.left_out_s
    assert steps.times.mean_s == pytest.approx(1e-3) and steps.times.iterations_per_step == 1
    assert steps.inside == ("prediction",) and not steps.other_loops and steps.call_spans.total == 5 * 40_000


def test_markers_of_predictions_after_each_batch_belong_to_the_step():
    """Keras 2 marks each batch of fit, evaluate and predict."""
    b = Builder(gpus=0)
    for i in range(6):
        b.host("train", i * 1000, 40, step_num=i).host("predict", i * 1000 + 500, 300, step_num=0)
    steps = find_steps(b.build())
    assert steps is not None and steps.count == 5 and steps.times.mean_s == pytest.approx(1e-3)
    assert steps.inside == ("prediction",) and not steps.times.left_out_s and not steps.other_loops


def test_what_runs_after_every_other_step_is_no_part_of_each():
    b = Builder(gpus=0)
    for i in range(8):
        _call(b, i * 1000, 40, FIT, FORWARD, BACKWARD)
        if i % 2:
            _call(b, i * 1000 + 600, 20, EVALUATE, FORWARD)
    steps = find_steps(b.build())
    assert steps is not None and not steps.inside and "evaluation" in steps.other_loops


def test_the_ops_of_kernels_tell_the_phase_too():
    b = Builder()
    for i in range(5):
        _call(b, i * 100, 40, FIT)
        b.run(0, i * 100 + 70, 20, op=BACKWARD, launch=i * 100 + 5)
    assert find_steps(b.build()).times.phase == "training"


@pytest.mark.parametrize(("function", "ops", "phase"), [
    (EVALUATE, (FORWARD,), "evaluation"),
    (EVALUATE, (), "unknown"),
    (EVALUATE, ("optional:OptionalFromValue", "Add/ReadVariableOp:ReadVariableOp"), "unknown"),
    (FIT, (FORWARD, "CpuExecutable::ExecuteAsyncOnStream"), "unknown"),  # where XLA runs the step they prove nothing
    ("__inference_one_step_on_data_distributed_3", (FORWARD,), "prediction"),
    ("__inference_predict_function_3", (FORWARD,), "prediction"),
    ("__inference_test_function_3", (FORWARD,), "evaluation"), ("__inference_train_function_3", (FORWARD,), "training"),
])
def test_the_ops_of_a_function_or_its_name_tell_its_phase(function, ops, phase):
    b = Builder(gpus=0)
    for i in range(5):
        _call(b, i * 100, 40, function, *ops)
    steps = find_steps(b.build())
    assert steps is not None and steps.times.phase == phase
    assert ("which evaluates" in steps.times.anchor) == (phase == "evaluation")
    notes = evaluation_note(steps.times)
    assert bool(notes) == (phase in ("evaluation", "prediction"))
    assert all("If the job also trains" in note.message for note in notes)


def test_the_only_training_step_of_a_window_does_not_stand_for_it():
    b = Builder(gpus=0)
    _call(b, 0, 40, FIT, FORWARD, BACKWARD)
    for i in range(6):
        _call(b, 100 + i * 50, 40, EVALUATE, FORWARD)
    steps = find_steps(b.build())
    assert steps.times.phase == "evaluation" and steps.count == 5 and "training" in steps.times.left_out_s


def test_a_custom_loop_prefers_the_function_that_trains_and_ends_before_a_pause():
    b = Builder(gpus=0)
    for block in range(2):
        for i in range(6):
            _call(b, block * 10_000 + i * 100, 50, "__inference_train_step_1", BACKWARD)
            _call(b, block * 10_000 + i * 100 + 60, 5, "__inference_log_2", FORWARD)
        for i in range(10):
            _call(b, block * 10_000 + 600 + i * 900, 800, "__inference_test_step_3", FORWARD)
    steps = find_steps(b.build())
    assert steps is not None and "train_step" in steps.times.anchor and steps.times.phase == "training"
    assert steps.count == 11 and steps.times.mean_s == pytest.approx(100e-6)


def test_a_function_traced_anew_at_each_call_is_one_loop():
    b = Builder(gpus=0)
    for i in range(6):
        b.host("train_step", i * 100, 80, tf_function_call="traced-nonXla", tracing_count=i)
        _call(b, i * 100 + 50, 20, f"__inference_train_step_{i}")
    steps = find_steps(b.build())
    assert steps is not None and steps.times.anchor == "calls of the tf.function train_step" and steps.count == 5


def test_a_loop_without_functions_steps_by_its_batches():
    b = Builder(gpus=0)
    for i in range(6):
        b.host("EagerExecute", i * 100, 5, is_func=0, eager_op="IteratorGetNext")
        b.host("EagerExecute", i * 100 + 10, 50, is_func=0, eager_op="MatMul")
    steps = find_steps(b.build())
    assert steps is not None and "batch" in steps.times.anchor and steps.times.confidence == "low" and steps.count == 5


def session(runs: str) -> Builder:
    """A loop of TensorFlow 1, a run each 10 ms: "t" trains, "e" evaluates."""
    b, train = Builder(gpus=0), "gradients/MatMul_grad/MatMul:MatMul"
    for i, run in enumerate(runs):
        b.host("SessionRun", i * 10_000, 8_000, "python 1")
        b.host("MatMul:MatMul", i * 10_000 + 500, 3_000, "tf_Compute/1")
        b.host(train if run == "t" else "acc:Mean", i * 10_000 + 4_000, 3_000, "tf_Compute/2")
    return b


@pytest.mark.parametrize(("runs", "count", "median_s", "evaluation_s"), [
    ("te" * 20, 19, 0.02, 0), ("t" * 12, 11, 0.01, 0), ("e" * 12, 11, 0.01, 0), ("tee", 0, 0, 0),
    (("t" * 10 + "e" * 6) * 3, 29, 0.01, 0.116)])
def test_runs_of_a_session_that_train_are_steps(runs, count, median_s, evaluation_s):
    steps = find_steps(session(runs).build())
    if not count:
        assert steps is None
        return
    assert (steps.count, steps.times.median_s) == (count, pytest.approx(median_s))
    assert steps.times.anchor == "calls of session.run"
    assert sum(spans.total for spans in steps.other_loops.values()) / 1e9 == pytest.approx(evaluation_s)


def test_keras_calls_and_markers_go_before_runs_of_a_session():
    steps = find_steps(keras_steps(session("te" * 5), 6, 16_000, 15_000).build())
    assert "Keras" in steps.times.anchor


@pytest.mark.parametrize(("ranks", "pause"), [(2, 0), (2, 1), (1, 0.5)])
def test_marks_that_touch_or_overlap_count_to_the_last_step(ranks, pause):
    """Two ranks, one 30% of a step behind: the later one's mark ends after the earlier one's next mark begins."""
    b = Builder(gpus=0, format="chrome")
    for rank in range(ranks):
        for i in range(3):
            b.host(f"ProfilerStep#{i + 4}", rank * 30 + i * 100, 100 - pause, f"rank {rank}")
    steps = find_steps(b.build())
    assert steps is not None and steps.count == 3 and steps.times.dropped == 0 and steps.times.confidence == "high"
    assert steps.bounds_ns[-1] == (200_000, (300 - pause) * 1000)


def test_a_single_step_lasts_until_its_last_rank_ends_it():
    b = Builder(gpus=0).host("ProfilerStep#7", 0, 100, "rank 0").host("ProfilerStep#7", 30, 100, "rank 1")
    steps = find_steps(b.build())
    assert steps is not None and steps.bounds_ns == ((0, 130_000),) and steps.times.confidence == "low"


def test_what_another_rank_runs_meanwhile_says_nothing_of_a_function():
    """Of two ranks that do not run in step: one evaluates while the other trains."""
    b = Builder(gpus=0)
    for i in range(40):
        for rank, trains in ((0, i < 20), (1, i >= 20)):
            function, op = (FIT, BACKWARD) if trains else (EVALUATE, FORWARD)
            b.host("EagerExecute", i * 100 + rank, 90, f"python {rank}", is_func=1, eager_op=function)
            b.host(op, i * 100 + 10 + rank, 50, f"tf_Compute {rank}")
    trace = b.build()
    trace.lines = [replace(line, rank=int(line.name.rpartition(" ")[2])) for line in trace.lines]
    steps = find_steps(trace)
    assert steps is not None and steps.times.phase == "training" and steps.other_loops.keys() == {"evaluation"}


def test_each_way_to_find_steps_has_a_name_of_its_own_and_changes_no_trace():
    names = [detector.name for detector in STEP_DETECTORS]
    assert len({*names}) == len(names) and all(d.applies and d.needs and d.min_steps >= 1 for d in STEP_DETECTORS)
    trace = keras_steps(Builder(gpus=1).run(0, 10, 20, launch=5), 6, 100, 60).build()
    before = [column.copy() for column in (trace.host.start_ns, trace.host.name, trace.device.start_ns)]
    found_by = [detector.name for detector in STEP_DETECTORS if detector.detect(trace) is not None]
    after = trace.host.start_ns, trace.host.name, trace.device.start_ns
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
    assert found_by[0] == "Keras's step functions" and len(found_by) > 1, "several ways, of which the first wins"
    assert "Keras" in find_steps(trace).times.anchor
