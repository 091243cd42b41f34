from __future__ import annotations

from pathlib import Path

import pytest

from gputop.analysis.host.host_ops import host_ops
from gputop.analysis.results import HostOps, OpType
from gputop.analysis.steps.steps import find_steps
from gputop.trace.readers.load import load
from tests.trace.build import Builder, keras_steps

DATA = Path(__file__).resolve().parents[2] / "data"
STEP = "__inference_multi_step_on_iterator_42"


def ops_of(b: Builder) -> HostOps:
    trace = b.build()
    found = host_ops(trace, find_steps(trace))
    assert found is not None
    return found


def by_type(ops: HostOps) -> dict[tuple[str, str | None], OpType]:
    return {(op.type, op.placement): op for op in ops.types}


def test_placement_is_known_by_device_events_and_by_launches_inside():
    b = keras_steps(Builder(), 4, 100, 90)
    for i in range(4):
        at, line = i * 100, "tf_Compute/1"
        b.host("m/MatMul:MatMul", at + 5, 10, line).run(0, at + 20, 40, op="m/MatMul:MatMul")
        b.host("m/Where:Where", at + 20, 10, line).run(0, at + 70, 5, launch=at + 22, thread=line)
        b.host("m/Unique:Unique", at + 40, 30, line).host("m/Unique/sort:Sort", at + 45, 10, line)
        b.host("parse/Decode:DecodeJpeg", at + 10, 80, "tf_data_private_threadpool/1")  # tf.data's, not the step's
        b.host("Iterator::Root", at, 3, line)
    ops = ops_of(b)
    found = by_type(ops)
    assert set(found) == {("MatMul", "gpu"), ("Where", "gpu"), ("Unique", "host"), ("Sort", "host")}
    assert found["Unique", "host"].host_s == pytest.approx(60e-6) and found["Unique", "host"].count == 3
    assert found["MatMul", "gpu"].device_s == pytest.approx(120e-6) and found["MatMul", "gpu"].example == "m/MatMul"
    assert ops.host_s == pytest.approx(90e-6) and ops.device_s == pytest.approx(120e-6) and ops.basis == "steps"


def test_without_any_link_the_placement_is_not_known():
    b = keras_steps(Builder(), 4, 100, 90).host("m/MatMul:MatMul", 105, 10, "tf_Compute/1").run(0, 110, 5)
    assert by_type(ops_of(b))["MatMul", None].placement is None


def test_without_gpus_all_is_on_the_host_and_without_steps_the_window_counts():
    ops = ops_of(Builder(gpus=0).host("m/MatMul:MatMul", 0, 10, "tf_Compute/1"))
    assert ops.types[0].placement == "host" and ops.basis == "window" and ops.eager_ops_per_step is None
    assert ops.eager_share is None


def test_eager_share_leaves_out_calls_for_a_batch_and_what_runs_inside_functions():
    b = Builder(gpus=0)
    for i in range(5):
        at = i * 100
        b.host("EagerExecute", at, 60, is_func=1, eager_op=STEP)
        b.host("EagerExecute", at + 10, 5, is_func=0, eager_op="Inside")
        b.host("EagerExecute", at + 65, 20, is_func=0, eager_op="Square")
        b.host("EagerExecute", at + 90, 5, is_func=0, eager_op="IteratorGetNext")
        b.host("EagerExecute", at + 20, 50, line="tf_data_private_threadpool/1", is_func=0, eager_op="Decode")
    ops = ops_of(b)
    assert ops.eager_share == pytest.approx(20 / 80) and ops.eager_ops_per_step == 2
    assert [(op.name, op.count) for op in ops.eager] == [("Square", 4), ("Inside", 4)]
    assert ops.eager[0].seconds == pytest.approx(80e-6) and ops.eager[1].seconds == 0


def test_no_ops():
    trace = Builder(gpus=0).host("std::vector<int>", 0, 1).host("a::b:C", 0, 1).build()
    assert host_ops(trace, None) is None


def test_a_real_callback_runs_ops_eagerly():
    trace = load([DATA / "keras3_host_work.xplane.pb.gz"])
    ops = host_ops(trace, find_steps(trace))
    assert ops is not None and ops.eager_share is not None and 0.1 < ops.eager_share < 0.9
    count = {op.name: op.count for op in ops.eager}
    assert count["Square"] == count["Mean"] == 5 * find_steps(trace).count  # as the callback is written
    assert next(op for op in ops.types if op.type == "MatMul").placement == "host"
