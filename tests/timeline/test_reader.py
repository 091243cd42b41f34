"""Every question to a timeline against the plain truth, on small traces of any shape."""

from __future__ import annotations

import contextlib
from operator import attrgetter
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Struct

from gputop.timeline import read_timeline as module
from gputop.timeline.model import KINDS
from gputop.timeline.read_timeline import RangeColumns, Texts, Timeline
from gputop.trace.model import Kind, Trace
from tests.timeline.make import Plain, timeline_of
from tests.trace.build import Builder

_HORIZON = 60
_times = st.tuples(st.integers(0, _HORIZON), st.integers(0, 15))
_device = st.tuples(_times, st.integers(0, 1), st.integers(1, 2), st.sampled_from(list(Kind)),
                    st.sampled_from(["gemm", "Relu", "copy it"]), st.sampled_from([None, "model/dense:MatMul"]))
_host = st.tuples(_times, st.sampled_from(["python", "tf_data_private_threadpool/1"]),
                  st.sampled_from(["train", "MatMul", "Iterator::Map", "ΑΒΓ straße"]))
_traces = st.tuples(st.lists(_device, max_size=14), st.lists(_host, max_size=14)).filter(lambda t: t[0] or t[1])


def trace_of(events: tuple[list, list]) -> Trace:
    """Times are nanoseconds, so that all of them can be gone through."""
    b = Builder(gpus=2)
    for (start, length), gpu, stream, kind, name, op in events[0]:
        b.run(gpu, start / 1e3, length / 1e3, name, kind=kind, stream=stream, op=op)
    for (start, length), line, name in events[1]:
        b.host(name, start / 1e3, length / 1e3, line)
    return b.build()


class Question(Struct):
    """What is asked of a timeline, each with what it needs of this."""

    time: int = 0
    length: int = 0
    columns: int = 1
    least: int = 1
    back: bool = False
    text: str = ""
    row: int = 0


_questions = st.builds(
    Question, st.integers(-5, _HORIZON + 25), st.integers(0, 70), st.integers(1, 12), st.integers(1, 20), st.booleans(),
    st.sampled_from(["mat", "MATMUL", "e", "dense", "STRASSE", "αβγ", "no such", "", ".", "t\nm"]), st.integers(0, 8))


def the_picture_is_what_one_sees_instant_by_instant(timeline: Timeline, plain: Plain, q: Question) -> None:
    rows = [row.key for row in timeline.rows]
    share, kind = timeline.coverage.picture(rows, q.time, q.time + q.length, q.columns)
    assert share.shape == kind.shape == (len(rows), q.columns)
    assert (share.dtype, kind.dtype) == (np.float32, np.uint8)
    for row in rows:
        for i in range(q.columns):
            low = q.time + q.length * i // q.columns
            high = max(q.time + q.length * (i + 1) // q.columns, low + 1)
            expected, dominant = plain.column(row, low, high)
            assert share[row, i] == pytest.approx(expected, abs=1e-6)
            assert KINDS[kind[row, i]] == KINDS[dominant]
    (last_share,), (last_kind,) = timeline.coverage.picture(rows[-1:], q.time, q.time + q.length, q.columns)
    assert (last_share == share[-1]).all() and (last_kind == kind[-1]).all()


def the_next_gap(timeline: Timeline, plain: Plain, q: Question) -> None:
    for row in timeline.rows:
        gaps = [gap for gap in plain.gaps(row.key) if gap[1] - gap[0] >= q.least]
        matching = [gap for gap in gaps if (gap[0] < q.time if q.back else gap[0] > q.time)]
        expected = (matching[-1] if q.back else matching[0]) if matching else None
        assert timeline.coverage.next_gap(row.key, q.time, q.least, q.back) == expected


def the_ranges_of_a_stretch(timeline: Timeline, plain: Plain, q: Question) -> None:
    start, end = q.time, q.time + q.length
    for row in timeline.rows:
        found = timeline.ranges(row.key, start, end)
        expected = [r for r in plain.rows[row.key] if start <= r.start_ns < end or r.start_ns < start < r.end_ns]
        order = attrgetter("row", "index")
        assert sorted(found, key=order) == sorted(expected, key=order)
        assert [r.start_ns for r in found] == sorted(r.start_ns for r in found)
        assert timeline.count(row.key, start, end) == sum(start <= r.start_ns < end for r in expected)
        assert timeline.ranges(row.key, start, end, least_ns=5) == [r for r in found if r.end_ns - r.start_ns >= 5]
        few = timeline.ranges(row.key, start, end, 2)
        longest = sorted((r.end_ns - r.start_ns for r in expected), reverse=True)[:2]
        assert sorted((r.end_ns - r.start_ns for r in few), reverse=True) == longest


def the_innermost_range_at_an_instant(timeline: Timeline, plain: Plain, q: Question) -> None:
    for row in timeline.rows:
        found = timeline.at(row.key, q.time)
        there = [r for r in plain.rows[row.key] if r.start_ns <= q.time < r.end_ns]
        if not there:
            assert found is None
            continue
        assert found is not None and found in there
        own = [r for r in there if r.row == found.row]
        assert found == max(own, key=lambda r: (r.start_ns, -r.end_ns, r.index))
        # The busiest stream that shows something is the one that counts.
        assert found.row == min(r.row for r in there)


def the_next_range(timeline: Timeline, plain: Plain, q: Question) -> None:
    for row in timeline.rows:
        found = timeline.next_range(row.key, q.time, q.back)
        matching = sorted(r.start_ns for r in plain.rows[row.key]
                          if (r.start_ns < q.time if q.back else r.start_ns > q.time))
        assert (found.start_ns if found else None) == ((matching[-1] if q.back else matching[0]) if matching else None)


def from_range_to_range_by_its_index_misses_none(timeline: Timeline, plain: Plain, q: Question) -> None:
    for row in timeline.rows:
        ranges = plain.rows[row.key]
        if row.kind == "gpu" or not ranges:
            continue
        at = ranges[-1] if q.back else ranges[0]
        seen = [at]
        while (following := timeline.next_range(row.key, at.start_ns, q.back, at.index)) is not None:
            seen.append(at := following)
        assert seen == (ranges[::-1] if q.back else ranges)


def search_goes_through_all_hits_in_order(timeline: Timeline, plain: Plain, q: Question) -> None:
    row = min(q.row, len(timeline.rows) - 1)
    hits = sorted(
        (r for key, ranges in plain.rows.items() if timeline.rows[key].kind in ("stream", "thread") for r in ranges
         if q.text and (q.text.casefold() in r.name.casefold() or q.text.casefold() in r.tf_op.casefold())),
        key=lambda r: (r.start_ns, r.row, r.index))
    left = [r for r in hits if ((r.start_ns, r.row) < (q.time, row) if q.back else (r.start_ns, r.row) > (q.time, row))]
    found, at = [], timeline.search(q.text, row, q.time, q.back)
    while at is not None:
        found.append(at)
        at = timeline.search(q.text, at.row, at.start_ns, q.back, at.index)
    assert found == (left[::-1] if q.back else left)


@given(_traces, _questions, st.booleans())
@example(([], [((1, 1), "python", "Iterator::Map"), ((1, 2), "python", "Iterator::Map")]), Question(1), True)
@example(([], [((1, 9), "python", "outer"), ((2, 3), "python", "inner")]), Question(5), False)
@example(([], [((1, 9), "python", "outer"), ((2, 3), "python", "inner")]), Question(text="outer\n"), False)
def test_every_answer_is_the_plain_truth(events, question, small):
    """``small``: hardly a name is kept, and those that a search finds are looked up and not compared one by one."""
    with patch.multiple(module, _NAMES_KEPT=1 if small else 99, _COMPARED_NAMES=0 if small else 8):
        answers_are_true(timeline_of(trace_of(events)), question)


def answers_are_true(timeline: Timeline, question: Question) -> None:
    plain = Plain.of(timeline)
    the_picture_is_what_one_sees_instant_by_instant(timeline, plain, question)
    the_next_gap(timeline, plain, question)
    the_ranges_of_a_stretch(timeline, plain, question)
    the_innermost_range_at_an_instant(timeline, plain, question)
    the_next_range(timeline, plain, question)
    from_range_to_range_by_its_index_misses_none(timeline, plain, question)
    search_goes_through_all_hits_in_order(timeline, plain, question)


def test_names_and_depths_of_events():
    b = Builder()
    b.run(0, 10, 5, "gemm", launch=1, op="model/dense:MatMul")
    b.host("outer", 0, 50).host("inner", 0.5, 20).host("innermost", 1, 2)
    timeline = timeline_of(b.build())
    row = next(row for row in timeline.rows if row.label == "python")
    assert row.depth == 2
    assert [(r.name, r.depth, r.kind, r.tf_op) for r in timeline.ranges(row.key, 0, 10**6)] == [
        ("outer", 0, "host", ""), ("inner", 1, "host", ""), ("innermost", 2, "host", "")]
    kernel = timeline.at(0, 12_000)
    assert kernel is not None and (kernel.name, kernel.tf_op, kernel.kind) == ("gemm", "model/dense:MatMul", "compute")
    assert timeline.rows[kernel.row].kind == "stream"
    with pytest.raises(IndexError):
        timeline.range(row.key, 3)


def test_many_events_are_read_in_blocks():
    """More events than are looked at in one go, a long one around them, and hits far apart."""
    b = Builder()
    b.host("around", 0, 100_000)
    for i in range(12_000):
        b.host("small", 1 + 8 * i, 4)
    b.host("needle", 99_000, 10)
    timeline = timeline_of(b.build())
    between = timeline.at(0, 96_006_000)
    assert between is not None and between.name == "around"
    assert [r.name for r in timeline.ranges(0, 96_006_000, 96_007_000)] == ["around"]
    found = timeline.search("needle", 0, 0)
    assert found is not None and found.start_ns == 99_000_000
    assert timeline.search("NEEDLE", 0, 10**9, back=True) == found
    assert [r.name for r in timeline.ranges(0, 0, 10**9, 2)] == ["around", "needle"]  # the longest
    assert timeline.coverage.next_gap(0, 0, 1) is None


def test_a_closed_timeline_lets_go_of_its_file():
    b = Builder()
    b.run(0, 10, 5)
    with contextlib.closing(timeline_of(b.build())) as timeline:
        assert timeline.rows
    with pytest.raises(AttributeError):
        timeline.coverage.picture([0], 0, 10, 1)


def test_no_rows_and_no_columns_are_no_picture():
    b = Builder()
    b.run(0, 10, 5)
    timeline = timeline_of(b.build())
    assert timeline.coverage.picture([], 0, 10, 5)[0].shape == (0, 5)
    assert timeline.coverage.picture([0, 1], 0, 10, 0)[1].shape == (2, 0)


NAMES = ["MatMul", "", "conv2d/Größe", "matmul_grad", "a.b"]


def columns() -> RangeColumns:
    """Row 0: a kernel with an op and one within it; row 1: a launch of the first; row 2: a counter, sampled twice."""
    raw = b"gemm\nlaunch\nDense\n"
    return RangeColumns({
        "start": np.array([10, 12, 5, 0, 20], np.int64), "end": np.array([30, 14, 6, 10, 40], np.int64),
        "name": np.array([0, 0, 1, -1, -1], np.int32), "op": np.array([2, -1], np.int32),
        "kind": np.array([COMPUTE] * 3 + [COUNTER] * 2, np.uint8), "depth": np.array([0, 1, 0, 0, 0], np.uint8),
        "level": np.array([0.25, 1.0], np.float32), "link": np.array([2, -1, 0, -1, -1], np.int64),
    }, [(0, 2), (2, 3), (3, 5)], Texts({
        "text": np.frombuffer(raw, np.uint8), "text_end": np.array([5, 12, 18], np.int64),
        "folded": np.frombuffer(raw, np.uint8), "folded_end": np.array([5, 12, 18], np.int64)}))


def texts_of(names: list[str]) -> Texts:
    columns = {}
    for column, shown in (("text", names), ("folded", [name.casefold() for name in names])):
        raw = [name.encode() + b"\n" for name in shown]
        columns[column] = np.frombuffer(b"".join(raw), np.uint8)
        columns[f"{column}_end"] = np.cumsum([len(name) for name in raw], dtype=np.int64)
    return Texts(columns)


COMPUTE, COUNTER = KINDS.index("compute"), KINDS.index("counter")


def test_what_begins_and_what_runs_at_a_time() -> None:
    assert columns().begun(0, 11, 100) == (1, 2) and columns().begun(1, 0, 5) == (2, 2)
    assert columns().running(0, 13, since_ns=10, before=2).tolist() == [0, 1]
    assert columns().running(0, 20, since_ns=10, before=2).tolist() == [0]
    assert columns().running(0, 13, since_ns=12, before=2).tolist() == [1]
    assert columns().lengths(np.array([0, 2])).tolist() == [20, 1]


def test_a_link_leads_to_the_row_of_its_other_end() -> None:
    assert columns().linked(0, 0) == (1, 2) and columns().linked(1, 0) == (0, 0) and columns().linked(0, 1) is None


@pytest.mark.parametrize("further", [[], list(range(3, 20))])
def test_names_and_ops_are_compared_or_looked_up(further: list[int]) -> None:
    wanted = [2, *further]
    mask = np.zeros(21, np.bool_)
    mask[wanted] = True
    assert columns().named(0, 2, wanted, mask).tolist() == [0], "its op"
    assert columns().named(2, 3, wanted, mask).tolist() == []
    mask[:2] = True
    assert columns().named(0, 2, [0, 1, *wanted], mask).tolist() == [0, 1]
    assert columns().named(2, 3, [0, 1, *wanted], mask).tolist() == [2]


def test_levels_are_means_of_the_time_that_was_sampled() -> None:
    levels = columns().levels(2, 0, 40, 2)
    assert levels.tolist() == [0.25, 1.0] and np.isnan(columns().levels(2, 10, 20, 1)[0])
    assert columns().levels(2, 0, 40, 1)[0] == pytest.approx((10 * 0.25 + 20 * 1.0) / 30)


def test_each_number_has_its_name_however_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_NAMES_KEPT", 2)
    texts = texts_of(NAMES)
    for _ in range(2):
        assert [texts[i] for i in range(len(NAMES))] == NAMES
    assert texts[-1] == ""


@pytest.mark.parametrize(("text", "numbers"), [
    ("matmul", [0, 3]), ("MATMUL", [0, 3]), ("GRÖSSE", [2]), (".", [4]), ("", []), ("none", []), ("l\n", []),
])
def test_a_search_finds_the_names_that_contain_the_text(text: str, numbers: list[int]) -> None:
    texts = texts_of(NAMES)
    texts.containing("conv")
    for _ in range(2):
        found = texts.containing(text)
        assert np.flatnonzero(found).tolist() == numbers and len(found) == len(NAMES) + 1 and not found[-1]
    assert not texts_of([]).containing("a").any()
