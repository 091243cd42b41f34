from __future__ import annotations

from itertools import combinations, product
from math import prod
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.analysis.gpu import replicas
from gputop.analysis.gpu.replicas import concurrency
from gputop.trace.intervals import EMPTY, Spans, union

WHOLE = 60
piles = st.lists(st.lists(st.tuples(st.integers(-5, WHOLE), st.integers(1, 12)), max_size=6), min_size=2, max_size=4)
windows = st.lists(st.tuples(st.integers(0, WHOLE), st.integers(1, 30)), min_size=1, max_size=3)


def spans(pile) -> Spans:
    return union([a for a, _ in pile], [a + n for a, n in pile])


def instants(s: Spans) -> set[int]:
    return {t for a, b in zip(s.start.tolist(), s.end.tolist(), strict=True) for t in range(a, b)}


@given(piles, windows, st.integers(0, 10**12), st.sampled_from((4, 1 << 16)))
def test_against_counting_instants(active, window, offset, at_once):
    within = spans(window)
    sets = [instants(spans(pile)) & instants(within) for pile in active]
    whole, n = len(instants(within)), len(sets)
    moved = [Spans(s.start + offset, s.end + offset) for s in map(spans, active)]
    with patch.object(replicas, "_EDGES_AT_ONCE", at_once):
        c = concurrency(moved, Spans(within.start + offset, within.end + offset), range(n))
    assert c is not None
    level = [sum(t in s for s in sets) for t in instants(within)]
    assert c.exactly == pytest.approx([level.count(k) / whole for k in range(n + 1)])
    p = [len(s) / whole for s in sets]
    chance = [0.0] * (n + 1)
    for outcome in product((0, 1), repeat=n):
        chance[sum(outcome)] += prod(x if on else 1 - x for x, on in zip(p, outcome, strict=True))
    assert c.by_chance == pytest.approx(chance)
    any_ = sum(k > 0 for k in level)
    assert c.serial == (pytest.approx(level.count(1) / any_) if any_ else None)
    assert c.serial_by_chance == (pytest.approx(chance[1] / sum(chance[1:])) if any_ else None)
    expected = {(i, j): (len(sets[i] & sets[j]) / min(len(sets[i]), len(sets[j])), max(p[i], p[j]))
                for i, j in combinations(range(n), 2) if sets[i] and sets[j]}
    assert {pair.gpus: (pytest.approx(pair.overlap), pytest.approx(pair.by_chance)) for pair in c.pairs} == expected


@pytest.mark.parametrize("gpus", [16, 17, 40])
def test_many_gpus(gpus):
    own = [spans([(i, 2)]) for i in range(gpus)]
    c = concurrency(own, spans([(0, gpus + 1)]), range(gpus))
    assert c is not None and c.exactly[1] == pytest.approx(2 / (gpus + 1))
    assert c.exactly[2] == pytest.approx((gpus - 1) / (gpus + 1)) and sum(c.exactly) == pytest.approx(1)
    assert len(c.pairs) == (28 if gpus == 16 else 0)


def test_nothing_to_judge():
    one = spans([(0, 10)])
    assert concurrency([one], one, (0,)) is None and concurrency([one, one], EMPTY, (0, 1)) is None
    age = Spans(np.array([0]), np.array([10**15]))
    assert concurrency([age, age], age, (0, 1)) is None
    idle = concurrency([EMPTY, EMPTY], one, (0, 1))
    assert idle is not None and idle.exactly == (1, 0, 0) and idle.serial is None and idle.pairs == ()


def test_one_after_the_other_and_side_by_side():
    serial = concurrency([spans([(0, 10)]), spans([(10, 10)])], spans([(0, 20)]), (0, 1))
    assert serial is not None and serial.exactly == (0, 1, 0) and serial.serial == 1
    assert serial.by_chance == (0.25, 0.5, 0.25) and serial.serial_by_chance == pytest.approx(2 / 3)
    assert (serial.pairs[0].overlap, serial.pairs[0].by_chance) == (0, 0.5)
    parallel = concurrency([spans([(0, 10)])] * 2, spans([(0, 20)]), (0, 1))
    assert parallel is not None and parallel.exactly == (0.5, 0, 0.5) and parallel.serial == 0
