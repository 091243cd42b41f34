"""What one replica computes longer than the others, against sums op by op."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gputop.analysis.gpu.device_time import timelines
from gputop.analysis.layers.culprits import excess_of
from gputop.trace.intervals import union
from tests.trace.build import Builder

replicas = st.lists(st.lists(st.tuples(st.sampled_from(["a/x", "a/y", "b/z", "c"]), st.integers(1, 50)), min_size=1,
                             max_size=8), min_size=2, max_size=4)


@settings(max_examples=120, deadline=None)
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
