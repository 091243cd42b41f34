from __future__ import annotations

from collections import Counter, defaultdict
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gputop.analysis.gpu.device_time import timelines
from gputop.analysis.gpu.kernel_table import SIZE_BOUNDS_NS, TOP, kernel_sizes, kernels
from gputop.analysis.results import KernelRow, Kernels, KernelSizes
from gputop.analysis.steps.steps import find_steps
from gputop.trace.kernel_names import classify
from gputop.trace.model import Kind, LaunchShape, Trace
from tests.trace.build import Builder, keras_steps

NAMES = ("volta_sgemm_128x64_nn", "ampere_bf16_s16816gemm_bf16_128x128", "EigenMetaKernel", "loop_add_fusion",
         "ncclDevKernel_AllReduce_Sum_f32_RING_LL")
OPS = (None, "model/dense/MatMul:MatMul", "replica_1/model/dense/MatMul:MatMul", "model/relu:Relu", "jit_f/fusion.12")
SHAPES = (None, LaunchShape((1, 1, 1), (32, 1, 1), 16, 0, 0.5), LaunchShape((8, 1, 1), (256, 1, 1), 32, 0, 1.0),
          LaunchShape((9, 1, 1), (256, 1, 1), 255, 0, None))

ran = st.lists(st.tuples(
    st.integers(0, 2), st.integers(0, 5000),
    st.one_of(st.integers(1, 90), st.sampled_from([1.25, 20, 40, 2500, 2.499])),
    st.sampled_from(NAMES), st.sampled_from(OPS), st.sampled_from(SHAPES)), min_size=1, max_size=40)


def made(events) -> Builder:
    b = keras_steps(Builder(gpus=3), 5, 1000, 700)
    for gpu, start, length, name, op, shape in events:
        b.run(gpu, start, length, name, op=op, shape=shape, kind=classify(name).kind)
    return b


def tables(trace: Trace) -> Kernels:
    found = kernels(trace, timelines(trace))
    assert found is not None
    return found


def by_label(rows: tuple[KernelRow, ...]) -> dict[str, KernelRow]:
    return {row.name: row for row in rows}


@given(ran)
def test_rows_against_plain_counting(events):
    k = tables(made(events).build())
    assert (k.count, k.time_s) == (len(events), pytest.approx(sum(e[2] for e in events) * 1e-6))
    assert {row.name for row in k.by_name} == {e[3] for e in events}
    for row in k.by_name:
        own = [e for e in events if e[3] == row.name]
        lengths = [round(e[2] * 1000) for e in own]
        assert row.count == len(own) and row.time_s == pytest.approx(sum(lengths) / 1e9)
        assert row.mean_s == pytest.approx(row.time_s / row.count) and row.median_s == pytest.approx(
            median(lengths) / 1e9)
        assert row.share == pytest.approx(row.time_s / k.time_s)
        assert {gpu: part.count for gpu, part in row.by_gpu.items()} == Counter(e[0] for e in own)
        for gpu, part in row.by_gpu.items():
            time = sum(e[2] for e in own if e[0] == gpu) * 1e-6
            assert part.time_s == pytest.approx(time)
            assert part.share == pytest.approx(time / (sum(e[2] for e in events if e[0] == gpu) * 1e-6))
        about = classify(row.name)
        assert row.types == {about.dtype: 1.0} and row.collective == (about.kind is Kind.COLLECTIVE)
        assert row.tensor_core == (None if about.tensor_core is None else float(about.tensor_core))
        of_shape: dict[LaunchShape, float] = defaultdict(float)
        for e in own:
            if e[5] is not None:
                of_shape[e[5]] += e[2]
        known = {s: t for s, t in of_shape.items() if s.occupancy is not None}
        assert row.shapes == len(of_shape) and (row.shape is None) == (not of_shape)
        assert row.shape is None or of_shape[row.shape] == pytest.approx(max(of_shape.values()))
        assert row.occupancy_known == pytest.approx(sum(known.values()) * 1e-6 / row.time_s)
        if known:
            assert row.occupancy == pytest.approx(sum(s.occupancy * t for s, t in known.items()) / sum(known.values()))
        else:
            assert row.occupancy is None
    assert k.occupancy_is == ("theoretical" if any(e[5] in SHAPES[1:3] for e in events) else None)


@settings(max_examples=40)
@given(ran)
def test_every_table_sums_to_all_kernels(events):
    k = tables(made(events).build())
    assert (k.by_op is None) == (not any(e[4] for e in events)) == (k.by_op_type is None)
    assert sum(k.time_s_by_gpu.values()) == pytest.approx(k.time_s)
    for rows in (k.by_name, k.by_op, k.by_op_type):
        for row in rows or ():
            assert sum(row.types.values()) == pytest.approx(1)
            assert sum(p.time_s for p in row.by_gpu.values()) == pytest.approx(row.time_s)
        if rows is not None:
            assert sum(row.count for row in rows) == len(events)
            assert sum(row.time_s for row in rows) == pytest.approx(k.time_s)


def test_replicas_of_an_op_are_merged_and_types_are_not():
    b = (Builder(gpus=2).run(0, 0, 30, NAMES[1], op="model/dense/MatMul:MatMul")
         .run(1, 0, 20, NAMES[0], op="replica_1/model/dense/MatMul:MatMul").run(1, 30, 50, "k", op="jit_f/fusion.12"))
    k = tables(b.build())
    assert k.by_op is not None and k.by_op_type is not None
    op, kind = by_label(k.by_op)["model/dense/MatMul"], by_label(k.by_op_type)["MatMul"]
    assert {g: p.count for g, p in op.by_gpu.items()} == {0: 1, 1: 1}
    assert kind.types == {"bf16": 0.6, "fp32": 0.4} and kind.tensor_core == pytest.approx(0.6)
    assert kind.tensor_core_known == 1 and by_label(k.by_op_type)["fusion"].tensor_core is None
    assert [row.name for row in k.by_op] == ["jit_f/fusion.12", "model/dense/MatMul"]  # 50 µs each: by name


def test_what_is_not_kept_is_summed_and_each_gpus_own_are_kept():
    b = Builder(gpus=2)
    for i in range(TOP + 30):
        b.run(0, i * 1000, 500 + i, f"common_{i:03}", shape=SHAPES[1])
    b.run(1, 0, 7, "only_on_gpu_1").run(1, 10, 3, "common_000")
    k = tables(b.build())
    rows = by_label(k.by_name)
    # GPU 1's own kernels, common_000 among them, are kept though they are short.
    assert len(k.by_name) == TOP + 3 and rows["only_on_gpu_1"].by_gpu[1].share == pytest.approx(0.7)
    assert k.by_name[-1] is rows[""] and rows[""].names == 29 and rows[""].count == 29
    assert rows[""].time_s == pytest.approx(sum(500 + i for i in range(1, 30)) * 1e-6)
    assert rows[""].shape is None and rows[""].occupancy == 0.5
    assert sum(row.time_s for row in k.by_name) == pytest.approx(k.time_s)
    assert next(iter(rows)) == f"common_{TOP + 29:03}"


def test_no_kernel_no_table():
    trace = Builder().run(0, 0, 10, "MemcpyH2D", kind=Kind.H2D).build()
    assert kernels(trace, timelines(trace)) is None and kernels(trace, []) is None
    assert kernel_sizes(trace, timelines(trace), None) == ()


def sizes(trace: Trace) -> tuple[KernelSizes, ...]:
    return kernel_sizes(trace, timelines(trace), find_steps(trace))


@given(ran)
def test_sizes_against_plain_counting(events):
    trace = made(events).build()
    found = {s.gpu: s for s in sizes(trace)}
    compute = [e for e in events if classify(e[3]).kind is Kind.COMPUTE]
    assert set(found) == {e[0] for e in compute}
    steps = find_steps(trace)
    for gpu, s in found.items():
        lengths = [(round(e[1] * 1000), round(e[2] * 1000)) for e in compute if e[0] == gpu]
        count, time, inside = [0] * 16, [0] * 16, [0] * 16
        for start, length in lengths:
            bucket = sum(length >= bound for bound in SIZE_BOUNDS_NS)
            count[bucket] += 1
            time[bucket] += length
            inside[bucket] += any(a <= start < b for a, b in steps.bounds_ns)
        assert s.count == tuple(count) and s.time_s == pytest.approx([t / 1e9 for t in time])
        assert s.count_per_step == pytest.approx([n / steps.count for n in inside])
        assert s.below_20us == pytest.approx(sum(length < 20_000 for _, length in lengths) / len(lengths))
        assert s.below_40us == pytest.approx(sum(length < 40_000 for _, length in lengths) / len(lengths))


def test_bounds_hold_both_ends_of_the_launch_latency():
    assert 20_000 in SIZE_BOUNDS_NS and 40_000 in SIZE_BOUNDS_NS
    (s,) = sizes(Builder().run(0, 0, 20).build())
    assert s.count[s.bounds_s.index(20e-6) + 1] == 1 and s.below_20us == 0 and s.below_40us == 1
    assert s.count_per_step is None and s.time_s_per_step is None


@settings(max_examples=30)
@given(ran, st.integers(0, 1000))
def test_the_order_of_events_names_and_shapes_does_not_matter(events, seed):
    b = made(events)
    assert tables(b.build()) == tables(b.build(shuffle=seed))
    assert sizes(b.build()) == sizes(b.build(shuffle=seed))


def test_many_launch_shapes_count_the_same(monkeypatch):
    b = Builder()
    for i, shape in enumerate(SHAPES * 3):
        b.run(0, i * 100, 10 + i % 5, NAMES[i % 2], shape=shape)
    trace = b.build()
    few = tables(trace)
    monkeypatch.setattr("gputop.trace.lookups._SORTED_BELOW", 0)  # counted, as of many kernels, not sorted
    assert tables(trace) == few and any(row.shapes > 1 for row in few.by_name)


def test_shapes_that_were_not_read_are_unknown():
    trace = Builder().run(0, 0, 10).build()
    trace.device.shape[:] = -1
    (row,) = tables(trace).by_name
    assert row.shape is None and row.occupancy is None and row.occupancy_known == 0
