from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.analysis.gpu.copies import copy_table
from gputop.analysis.gpu.device_time import timelines
from gputop.analysis.results import CopyTable
from gputop.analysis.steps.steps import find_steps
from gputop.trace.model import Kind, MemoryKind
from tests.analyses import of_steps
from tests.trace.build import Builder, keras_steps

KINDS = {"h2d": Kind.H2D, "d2h": Kind.D2H, "d2d": Kind.D2D, "p2p": Kind.P2P, "other": Kind.COPY_OTHER}
MEMORY = list(MemoryKind)


def table(b: Builder) -> CopyTable | None:
    trace = b.build()
    return copy_table(trace, {timeline.gpu: timeline.rows for timeline in timelines(trace)}, of_steps(trace))


copied = st.lists(st.tuples(
    st.integers(0, 1), st.integers(0, 5000), st.integers(1, 50), st.sampled_from(sorted(KINDS)),
    st.sampled_from(MEMORY[:4]), st.sampled_from(MEMORY[:4]), st.integers(-1, 1000),
    st.sampled_from([None, "a:IteratorGetNext", "replica_1/a:IteratorGetNext", "b:Cast"])), max_size=30)


@given(copied, st.booleans())
def test_against_plain_counting(events, with_steps):
    b = keras_steps(Builder(gpus=2), 5, 1000, 700) if with_steps else Builder(gpus=2)
    b.run(0, 0, 5000, stream=9).run(0, 10, 10, "Memset", kind=Kind.MEMSET, size=5, stream=9)  # no copy
    for gpu, start, length, way, src, dst, size, op in events:
        b.run(gpu, start, length, f"copy {way}", kind=KINDS[way], src=src, dst=dst, size=size, op=op)
    steps = find_steps(b.build())
    assert (steps is not None) == with_steps
    found = table(b)
    if not events:
        assert found is None
        return
    assert found is not None
    expected: dict = {}
    for e in events:
        expected.setdefault((e[0], e[3], e[4].name.lower(), e[5].name.lower()), []).append(e)
    assert {(r.gpu, r.direction, r.source, r.target) for r in found.rows} == set(expected)
    for row in found.rows:
        own = expected[row.gpu, row.direction, row.source, row.target]
        sized = [e for e in own if e[6] >= 0]
        assert row.count == len(own) and row.time_s == pytest.approx(sum(e[2] for e in own) * 1e-6)
        assert row.bytes == (sum(e[6] for e in sized) if sized else None)
        assert row.bytes_per_s == (pytest.approx(row.bytes / (sum(e[2] for e in sized) * 1e-6)) if sized else None)
        if steps is None:
            assert row.count_per_step is None and row.bytes_per_step is None and row.time_s_per_step is None
            continue
        inside = [e for e in own if any(a <= e[1] * 1000 < b for a, b in steps.bounds_ns)]
        assert row.count_per_step == pytest.approx(len(inside) / steps.count)
        assert row.time_s_per_step == pytest.approx(sum(e[2] for e in inside) * 1e-6 / steps.count)
        sizes = [e[6] for e in inside if e[6] >= 0]
        assert row.bytes_per_step == (None if inside and not sizes else pytest.approx(sum(sizes) / steps.count))
    ops: dict = {}
    for e in events:
        if e[7]:
            ops.setdefault((e[7].split(":")[0].removeprefix("replica_1/"), e[3]), []).append(e)
    assert (found.by_op is None) == (not ops)
    assert {(o.op, o.direction): (o.count, pytest.approx(o.time_s)) for o in found.by_op or ()} == {
        key: (len(own), pytest.approx(sum(e[2] for e in own) * 1e-6)) for key, own in ops.items()}


def test_ops_beyond_those_kept_are_summed():
    b = Builder()
    for i in range(25):
        b.run(0, i * 200, 100 - i, "MemcpyH2D", kind=Kind.H2D, op=f"op_{i:02}:X")
    found = table(b)
    assert found is not None and found.by_op is not None and len(found.by_op) == 20
    assert found.by_op[0].op == "op_00"
    assert found.other_ops_s == pytest.approx(sum(100 - i for i in range(20, 25)) * 1e-6)
