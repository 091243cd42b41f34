from __future__ import annotations

import random
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gputop.trace.lookups import host_rows, outermost_rows
from gputop.trace.nesting import nest
from tests.trace.build import Builder

NAMES = ["a", "b", "c", "d"]
Event = tuple[int, int, int, int]  # line, start, end, name
events = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 30), st.integers(0, 3)), max_size=40)


def nested(raw: list[Event]) -> list[Event]:
    """Those of the events that nest with the ones before them, as calls of a thread do."""
    kept: list[Event] = []
    for line, a, b, name in raw:
        start, end = min(a, b), max(a, b)
        if not any(ln == line and (s < start < e < end or start < s < end < e) for ln, s, e, _ in kept):
            kept.append((line, start, end, name))
    return kept


def innermost(found: list[Event], line: int, at: int) -> int | None:
    """Which event a thread is in at an instant: the last that began, of those the shortest, then the last by name."""
    open_ = [i for i, (ln, s, e, _) in enumerate(found) if ln == line and s <= at < e]
    return max(open_, key=lambda i: (found[i][1], -found[i][2], NAMES[found[i][3]]), default=None)


def nesting_of(found: list[Event]):
    columns = np.array(found, np.int64).reshape(-1, 4).T
    return nest(columns[0], columns[1], columns[2], columns[3], NAMES), columns


@given(events, st.randoms(use_true_random=False))
def test_own_time_is_the_time_in_which_no_other_is_further_in(raw, rng: random.Random):
    found = nested(raw)
    rng.shuffle(found)
    nesting, columns = nesting_of(found)
    own = Counter()
    for i, time in enumerate(nesting.own(columns[2] - columns[1]).tolist()):
        own[found[i][0], found[i][1:]] += time
    want: Counter = Counter()
    for line in range(3):
        for at in range(31):
            i = innermost(found, line, at)
            if i is not None:
                want[line, found[i][1:]] += 1
    assert +own == want


@given(events)
def test_a_parent_contains_its_child_and_nothing_lies_between(raw):
    found = nested(raw)
    nesting, _ = nesting_of(found)
    for child, parent in enumerate(nesting.parent.tolist()):
        line, start, end, _ = found[child]
        around = [i for i, (ln, s, e, _) in enumerate(found) if i != child and ln == line and s <= start and end <= e
                  and (s, e) != (start, end) and start < end and s < e]
        if parent < 0:
            assert not around
        else:
            assert found[parent][0] == line and found[parent][1] <= start and end <= found[parent][2]
            assert all(found[i][1] <= found[parent][1] and found[parent][2] <= found[i][2] for i in around)


@given(events, st.sampled_from((0, 7, 1 << 57)))
def test_many_lines_are_nested_as_each_is_alone(raw, apart):
    alone, lines = nested(raw), range(20)
    parent = nesting_of(alone)[0].parent
    nesting, _ = nesting_of([(3 * i + line, start + i * apart, end + i * apart, name)
                             for i in lines for line, start, end, name in alone])
    assert nesting.parent.tolist() == [
        number + i * len(alone) if number >= 0 else -1 for i in lines for number in parent.tolist()]


def test_holders_pass_their_time_up_to_the_first_that_keeps_it():
    found = [(0, 0, 10, 0), (0, 1, 9, 1), (0, 2, 8, 1), (0, 3, 4, 2), (1, 0, 5, 1)]
    nesting, columns = nesting_of(found)
    assert nesting.holder(columns[3] == 1).tolist() == [0, 0, 0, 3, 4]


def test_events_that_overlap_without_nesting_have_no_negative_time():
    nesting, columns = nesting_of([(0, 0, 10, 0), (0, 5, 100, 1), (0, 50, 60, 2)])
    assert (nesting.own(columns[2] - columns[1]) >= 0).all()


def test_no_events():
    assert len(nesting_of([])[0].parent) == 0


def test_of_events_that_begin_together_the_longest_is_the_outermost():
    b = Builder(gpus=0)
    for name, start, length in (("a", 0, 10), ("b", 0, 100), ("c", 20, 5), ("d", 100, 5)):
        b.host(name, start, length)
    trace = b.build()
    rows = outermost_rows(trace, host_rows(trace, "[a-d]"))
    assert [trace.names[i] for i in trace.host.name[rows].tolist()] == ["b", "d"]
