"""A few names for what thousands of device events belong to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.analysis.gpu.device_time import timelines
from gputop.analysis.layers.culprits import Events, excess_of, named_events
from gputop.analysis.layers.pytorch import call_scopes
from gputop.core.findings import Culprit
from gputop.trace.intervals import union
from gputop.trace.model import HloOp
from tests.trace.build import Builder, ns

CONV = "model/block_{}/Conv2D:Conv2D"


def named(b: Builder, only_on: tuple[int, ...] = (), steps: int = 1, timed: bool = True) -> tuple[Culprit, ...]:
    trace = b.build()
    rows = np.arange(len(trace.device))
    return named_events(trace, Events(rows, only_on=only_on, timed=timed), union([0], [ns(1e6)]), steps, "step",
                        sorted({int(g) for g in trace.device.gpu}), call_scopes(trace))


def each(b: Builder, op: Callable[[int], str | None], count: int, length: float = 10, gpu: int = 0) -> Builder:
    for i in range(count):
        b.run(gpu, i * 100, length, "k", op=op(i))
    return b


def test_ops_become_layers_with_their_time_per_step_and_gpu() -> None:
    b = each(Builder(gpus=2), lambda i: f"teacher/dense_{i}/MatMul:MatMul", 4, 30)
    each(b, lambda i: "metrics/TopK:TopKV2", 3, 10, gpu=1)
    teacher, metrics = named(b, steps=2)
    assert (teacher.name, teacher.kind, teacher.names) == ("teacher/*", "layer", 4)
    assert teacher.time_s == pytest.approx(4 * 30e-6 / 2 / 2)
    assert (metrics.name, metrics.kind, metrics.names, metrics.gpu) == ("metrics/TopK", "op", 1, 1)


def test_the_longest_event_is_its_place_and_times_that_mean_something_else_are_not_told() -> None:
    b = each(Builder(), lambda i: "a/x:MatMul", 3).run(0, 500, 90, "k", op="a/x:MatMul")
    own, = named(b)
    assert (own.gpu, own.at_s, own.time_s) == (0, pytest.approx(500e-6), pytest.approx(120e-6))
    other, = named(b, timed=False)
    assert (other.name, other.time_s) == ("a/x", None)


def test_forward_backward_and_replicas_of_a_layer_are_one() -> None:
    b = Builder(gpus=2)
    for i, op in enumerate(("net/conv/Conv2D:Conv2D", "gradient_tape/net/conv/Conv2D/Conv2DBackpropFilter:X")):
        b.run(0, i * 100, 10, "k", op=op).run(1, i * 100, 10, "k", op=op.replace("net/", "replica_1/net/"))
    b.run(0, 300, 10, "k", op="net/dense/MatMul:MatMul")
    assert [(c.name, c.names) for c in named(b)] == [("net/conv/Conv2D/*", 2), ("net/dense/MatMul", 1)]


def test_many_alike_are_one_where_each_is_little() -> None:
    several = named(each(Builder(), CONV.format, 40))
    assert [(c.name, c.names) for c in several] == [("model/block_*/Conv2D", 40)]
    few = named(each(Builder(), CONV.format, 3))
    assert [c.name for c in few] == [f"model/block_{i}/Conv2D" for i in range(3)], "their numbers tell them apart"


def test_what_is_left_has_no_name_and_counts_its_ops() -> None:
    found = named(each(Builder(), lambda i: f"{'ab'[i % 2]}{chr(65 + i // 2)}{i}x/op:MatMul", 50))
    assert found[-1].name == "" or len(found) <= 20
    assert sum(c.names for c in found) == 50
    assert sum(c.time_s or 0 for c in found) == pytest.approx(50 * 10e-6)


def test_only_what_no_other_gpu_runs_is_only_there() -> None:
    b = Builder(gpus=2)
    for gpu, prefix in ((0, ""), (1, "replica_1/")):
        b.run(gpu, 0, 50, "k", op=f"{prefix}model/dense/MatMul:MatMul")
        b.run(gpu, 100, 50, "k", op=f"Adam/Adam/update{'_1' if gpu else ''}/ResourceApplyAdam:ResourceApplyAdam")
    b.run(0, 200, 159, "k", op="teacher/dense/MatMul:MatMul")
    own, = named(b, only_on=(0,))
    assert (own.name, own.only_on) == ("teacher/dense/MatMul", (0,))
    assert own.time_s == pytest.approx(159e-6), "per step of that GPU, not the mean over all"


def test_without_names_or_with_too_few_nothing_is_said() -> None:
    assert named(each(Builder(), lambda i: None, 5)) == ()
    assert named(each(Builder(), lambda i: "a/x:MatMul" if i == 0 else None, 5)) == ()
    assert named(Builder(gpus=2).run(0, 0, 10, "k", op="a:MatMul").run(1, 0, 10, "k", op="a:MatMul"), (0,)) == ()


def test_an_op_of_a_program_has_its_line() -> None:
    trace = Builder().run(0, 0, 10, "k", op="jit_step/fusion").build()
    trace.hlo_ops.append(HloOp("jit(step)/transpose(jvp(Model))/Dense_0/dot_general", "train.py:31", None, None))
    trace.device.hlo[:] = 0
    own, = named_events(trace, Events(np.arange(1)), union([0], [ns(1e3)]), 1, "step", [0])
    assert (own.name, own.source) == ("Model/Dense_0/dot_general", "train.py:31")


def test_without_op_names_it_is_pytorchs_call_around_the_launch() -> None:
    b = Builder()
    b.host("aten::linear", 0, 50, line="python").host("aten::addmm", 5, 40, line="python")
    b.host("autograd::engine::evaluate_function: AddmmBackward0", 100, 50, line="python")
    b.host("aten::mm", 110, 20, line="python")
    b.run(0, 200, 30, "gemm", launch=10, thread="python").run(0, 240, 60, "gemm", launch=115, thread="python")
    b.run(0, 310, 5, "copy", launch=180, thread="python")  # of no op
    assert [(c.name, c.time_s) for c in named(b)] == [
        ("AddmmBackward0", pytest.approx(60e-6)), ("aten::linear", pytest.approx(30e-6))]


replicas = st.lists(st.lists(st.tuples(st.sampled_from(["a/x", "a/y", "b/z", "c"]), st.integers(1, 50)), min_size=1,
                             max_size=8), min_size=2, max_size=4)


@given(replicas, st.integers(0, 400))
def test_the_excess_of_each_op_is_its_time_less_the_median_of_the_others(jobs, end):
    b, sums = Builder(gpus=len(jobs)), [defaultdict(int) for _ in jobs]
    for gpu, kernels in enumerate(jobs):
        at = 0
        for op, length in kernels:
            b.run(gpu, at, length, op=op)
            sums[gpu][op] += 1000 * max(0, min(end, at + length) - at)
            at += length + 1
    trace = b.build()
    heavy, *others = timelines(trace)
    found = excess_of(trace, heavy, others, union([0], [1000 * end]))
    usual = {op: median(own[op] for own in sums[1:]) for op in {op for own in sums for op in own}}
    longer = {op: max(0, sums[0][op] - usual[op]) for op in usual}
    total = sum(sums[0][op] - usual[op] for op in usual)
    if found is None:
        assert total <= 0 or total < 0.5 * sum(longer.values()) or not sum(usual.values())
        return
    assert found.total_ns == pytest.approx(total, abs=1) and found.by_op
    assert found.own_ns == pytest.approx(sum(sums[0][op] for op in usual if not usual[op]), abs=1)
    by_op = defaultdict(int)
    for row, time in zip(found.rows.tolist(), found.time_ns.tolist(), strict=True):
        by_op[trace.names[trace.device.tf_op[row]]] += time
    assert {op: by_op[op] for op in usual} == pytest.approx(longer, abs=10)
    rate = total / sum(usual.values())
    alike = sum(usual[op] for op in usual if longer[op] >= 0.5 * rate * usual[op]) / sum(usual.values())
    assert found.alike == pytest.approx(alike) and 0 <= found.alike <= 1
    assert found.blocks is None


def test_times_that_mean_something_else_are_not_told() -> None:
    own, = named(each(Builder(), lambda i: "Adam/NcclAllReduce:NcclAllReduce", 2), timed=False)
    assert own.time_s is None and own.name == "Adam/NcclAllReduce"
