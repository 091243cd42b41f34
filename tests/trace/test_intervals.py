"""Interval sets against sets of integers, where every instant is an element."""

from __future__ import annotations

from itertools import pairwise
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gputop.trace import intervals
from gputop.trace.intervals import (
    EMPTY,
    Spans,
    at_or_before,
    chained,
    complement,
    coverage,
    intersect,
    joined,
    merge,
    overlap,
    subtract,
    uncovered,
    union,
)

pairs = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def instants(spans: Spans) -> set[int]:
    return {t for a, b in zip(spans.start, spans.end, strict=True) for t in range(a, b)}


def plain(intervals: list[tuple[int, int]]) -> set[int]:
    return {t for a, b in intervals for t in range(a, b)}


def made(intervals: list[tuple[int, int]]) -> Spans:
    return union([a for a, _ in intervals], [b for _, b in intervals])


def is_normal(spans: Spans) -> bool:
    return bool((spans.end > spans.start).all() and (spans.start[1:] > spans.end[:-1]).all())


@given(pairs)
def test_union(a):
    spans = made(a)
    assert is_normal(spans) and instants(spans) == plain(a) and spans.total == len(plain(a))


@given(pairs, pairs)
def test_coverage_of_many_instants_goes_part_by_part(a, b):
    """Also where an end precedes its start, and where starts are in no order."""
    x, rows = made(a), [*b, *sorted(b)]
    expected = coverage(x, [s for s, _ in rows], [e for _, e in rows]).tolist()
    in_order = sorted(range(len(rows)), key=lambda i: rows[i][0])
    with patch.object(intervals, "AT_ONCE", 3):
        assert coverage(x, [s for s, _ in rows], [e for _, e in rows]).tolist() == expected
        assert coverage(x, [rows[i][0] for i in in_order], [rows[i][1] for i in in_order]).tolist() == [
            expected[i] for i in in_order]


@given(st.lists(pairs, max_size=4), st.integers(1, 6))
def test_many_intervals_are_merged_part_by_part(sets, at_once):
    with patch.object(intervals, "AT_ONCE", at_once):
        spans = merge(*map(made, sets))
    assert is_normal(spans) and instants(spans) == set().union(*map(plain, sets))


@given(pairs, pairs)
def test_set_operations(a, b):
    x, y = made(a), made(b)
    for spans, expected in (
        (merge(x, y), plain(a) | plain(b)),
        (intersect(x, y), plain(a) & plain(b)),
        (subtract(x, y), plain(a) - plain(b))):
        assert is_normal(spans) and instants(spans) == expected


@given(pairs, st.integers(0, 60), st.integers(0, 60))
def test_complement_and_coverage(a, lo, hi):
    x = made(a)
    assert instants(complement(x, lo, hi)) == set(range(lo, hi)) - plain(a)
    assert coverage(x, [-1], [lo]).tolist() == [len([t for t in plain(a) if t < lo])]
    if hi >= lo:
        assert coverage(x, [lo], [hi]).tolist() == [len([t for t in plain(a) if lo <= t < hi])]


@given(st.lists(st.integers(0, 60), max_size=6), st.lists(st.integers(0, 60), max_size=60), st.booleans())
def test_at_or_before(a, times, in_order):
    times = sorted(times) if in_order else times
    found = at_or_before(np.array(sorted(a), np.int64), np.array(times, np.int64))
    assert found.tolist() == [sum(x <= t for x in a) for t in times]


@given(st.lists(st.lists(st.integers(0, 100), max_size=8), max_size=4), st.integers(0, 20))
def test_chained(parts, reach):
    spans = chained([np.array(part, np.int64) for part in parts], reach)
    ordered = sorted(t for part in parts for t in part)
    expected = {t for a, b in pairwise(ordered) if b - a <= reach for t in range(a, b)}
    assert instants(spans) == expected


@given(pairs, pairs, st.integers(1, 80))
def test_length_of_what_two_have_in_common(a, b, length):
    x, y = made(a), merge(made(b), made([(1_000 + i * (length + 1), length) for i in range(200)]))
    assert overlap(x, y) == intersect(x, y).total and uncovered(x, y) == subtract(x, y).total
    assert merge(x, y)[0].tolist() == union(np.append(x.start, y.start), np.append(x.end, y.end))[0].tolist()


@given(pairs, st.integers(1, 10))
def test_joined(a, reach):
    x = made(a)
    holes = {t for lo, hi in zip(x.end[:-1], x.start[1:], strict=True) if hi - lo < reach for t in range(lo, hi)}
    assert is_normal(joined(x, reach)) and instants(joined(x, reach)) == plain(a) | holes


def test_nothing():
    assert union([], []).total == 0 and merge().total == 0
    assert intersect(EMPTY, made([(0, 5)])).total == 0 and subtract(EMPTY, made([(0, 5)])).total == 0
    assert np.array_equal(coverage(EMPTY, [3, 4], [5, 4]), [0, 0])


def test_int64_nanoseconds_stay_exact():
    year = 31_536_000_000_000_000
    assert union([year, year + 1], [year + 1, year + 3]).total == 3


@given(st.integers(0, 2000), st.integers(0, 2000), st.integers(1, 3))
def test_a_few_long_intervals_with_many_short_ones(begin, length, few):
    """Whole runs are copied, none of the ends of which may be lost."""
    many = Spans(np.arange(0, 2000, 2), np.arange(0, 2000, 2) + 1)
    long = made([(begin + 700 * i, begin + 700 * i + min(length, 600)) for i in range(few)])
    expected = {t for t in range(0, 2000, 2) if any(a <= t < b for a, b in zip(*long, strict=True))}
    for spans in (intersect(many, long), intersect(long, many)):
        assert is_normal(spans) and instants(spans) == expected
    assert instants(subtract(many, long)) == instants(many) - expected
