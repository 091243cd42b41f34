"""Number of GPUs that are active at once: side by side, or one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gputop.analysis.results import Concurrency, PairOverlap
from gputop.trace.intervals import Spans, intersect
from gputop.trace.model import F64

_PAIRS_KEPT = 28  # all of eight GPUs
_MAX_FOR_PAIRS = 16
_CODE_BITS = _MAX_FOR_PAIRS  # the low bits of an edge; the others hold its time, up to a day in nanoseconds
_MINUS_ONE = (1 << _CODE_BITS) - 1  # as a code: sums wrap around
_EDGES_AT_ONCE = 1 << 16
_LONGEST_NS = 86_400 * 10**9


def concurrency(active: Sequence[Spans], within: Spans, gpus: Sequence[int]) -> Concurrency | None:
    """Concurrency of two or more sets of time, of the GPUs numbered ``gpus``; None if ``within`` is empty or longer
    than a day."""
    whole, n = within.total, len(active)
    if not 0 < whole <= int(within.end[-1]) - int(within.start[0]) < _LONGEST_NS or n < 2:
        return None
    inside = [intersect(spans, within) for spans in active]
    active_time: npt.NDArray | None = None
    if n <= _MAX_FOR_PAIRS:
        # By the set of active GPUs, as bits: every edge turns one of them over.
        active_time = _time_by_state(inside, [(1 << gpu, 1 << gpu) for gpu in range(n)], np.bitwise_xor, 1 << n)
        exactly = np.bincount(_members(n).sum(axis=1), weights=active_time) / whole
    else:
        exactly = _time_by_state(inside, [(1, _MINUS_ONE)] * n, np.add, n + 1) / whole
    exactly[0] = 1 - sum(exactly[1:].tolist())  # also the time before the first edge and after the last
    ratios = [spans.total / whole for spans in inside]
    by_chance = np.ones(1)
    for ratio in sorted(ratios):
        by_chance = np.convolve(by_chance, (1 - ratio, ratio))
    return Concurrency(
        tuple(max(float(x), 0.0) for x in exactly), tuple(max(float(x), 0.0) for x in by_chance),
        _alone(exactly), _alone(by_chance),
        () if active_time is None else _pairs(active_time, [spans.total for spans in inside], whole, gpus),
    )


def _time_by_state(inside: Sequence[Spans], codes: Sequence[tuple[int, int]], turn: np.ufunc, states: int) -> F64:
    """Time (ns) of each state from the first edge to the last. The state is 0 at first; a set's begin and end turn it
    to another one by their codes.

    Goes through the time in parts: what is computed of one stays in a core's cache.
    """
    out = np.zeros(states)
    first = min((int(spans.start[0]) for spans in inside if len(spans.start)), default=0)
    last = max((int(spans.end[-1]) for spans in inside if len(spans.start)), default=0)
    parts = 2 * sum(len(spans.start) for spans in inside) // _EDGES_AT_ONCE + 1
    stops = np.linspace(first, last, parts + 1)[1:].astype(np.int64) if parts > 1 else np.array([last])
    stops[-1] = last + 1
    columns = [(column, code, [0, *np.searchsorted(column, stops).tolist()])
               for spans, pair in zip(inside, codes, strict=True) for column, code in zip(spans, pair, strict=True)]
    time, state = 0, 0
    for i in range(parts):
        edges = [np.array([time << _CODE_BITS | state])]
        edges += [column[cuts[i]:cuts[i + 1]] - first << _CODE_BITS | code for column, code, cuts in columns]
        edge = np.concatenate(edges)
        edge[1:].sort()
        times = edge >> _CODE_BITS
        held = turn.accumulate(edge.astype(np.uint16), dtype=np.uint16)
        out += np.bincount(held[:-1], weights=np.diff(times), minlength=states)
        time, state = int(times[-1]), int(held[-1])
    return out


def _members(n: int) -> npt.NDArray:
    """Shape (2**n, n): 1 where the set of that number has that member."""
    return (np.arange(1 << n)[:, None] >> np.arange(n)) & 1


def _alone(level: npt.NDArray) -> float | None:
    any_ = float(level[1:].sum())
    return float(level[1]) / any_ if any_ > 1e-12 else None


def _pairs(
    active_time: npt.NDArray, totals: Sequence[int], whole: int, gpus: Sequence[int],
) -> tuple[PairOverlap, ...]:
    """The pairs that overlap least, from the time each set of GPUs is active."""
    n = len(totals)
    member = _members(n).astype(np.float64)
    both = (member * active_time[:, None]).T @ member
    out = []
    for i in range(n):
        for j in range(i + 1, n):
            shorter, longer = sorted((totals[i], totals[j]))
            if shorter:
                out.append(PairOverlap((gpus[i], gpus[j]), float(both[i, j]) / shorter, longer / whole))
    out.sort(key=lambda pair: (pair.overlap, pair.gpus))
    return tuple(out[:_PAIRS_KEPT])
