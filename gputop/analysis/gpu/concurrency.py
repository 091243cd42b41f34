"""How many GPUs are active at once: side by side, or one after the other?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gputop.analysis.results import Concurrency, PairOverlap
from gputop.trace.intervals import Spans, intersect

_PAIRS_KEPT = 28  # all of eight GPUs
_MAX_FOR_PAIRS = 16
_CODE_BITS = _MAX_FOR_PAIRS  # the low bits of an edge; the others hold its time, up to a day in nanoseconds
_LONGEST_NS = 86_400 * 10**9


def concurrency(active: Sequence[Spans], within: Spans, gpus: Sequence[int]) -> Concurrency | None:
    """For two sets of time or more, of the GPUs numbered ``gpus``; None if ``within`` is empty or longer than a day."""
    whole, n = within.total, len(active)
    if not 0 < whole <= int(within.end[-1]) - int(within.start[0]) < _LONGEST_NS or n < 2:
        return None
    inside = [intersect(spans, within) for spans in active]
    active_time: npt.NDArray | None = None
    if n <= _MAX_FOR_PAIRS:
        # By the set of active GPUs, as bits: every edge turns one of them over.
        turned, time_ns = _edges(inside, [(1 << gpu, 1 << gpu) for gpu in range(n)])
        active_time = np.bincount(np.bitwise_xor.accumulate(turned)[:-1], weights=time_ns, minlength=1 << n)
        exactly = np.bincount(_members(n).sum(axis=1), weights=active_time) / whole
    else:
        ends, time_ns = _edges(inside, [(0, 1)] * n)
        exactly = np.bincount(np.cumsum(1 - 2 * ends)[:-1], weights=time_ns, minlength=n + 1) / whole
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


def _edges(inside: Sequence[Spans], codes: Sequence[tuple[int, int]]) -> tuple[npt.NDArray, npt.NDArray]:
    """All begins and ends in order, each as its set's code for it, and the time from one to the next."""
    base = min((int(spans.start[0]) for spans in inside if len(spans.start)), default=0)
    edges = np.empty(2 * sum(len(spans.start) for spans in inside), np.int64)
    at = 0
    for spans, (begin, end) in zip(inside, codes, strict=True):
        part = edges[at:at + 2 * len(spans.start)]
        part[0::2], part[1::2] = spans.start, spans.end
        part -= base
        part <<= _CODE_BITS
        part[0::2] |= begin
        part[1::2] |= end
        at += len(part)
    edges.sort(kind="stable")  # which makes use of the order that each set has already
    return edges & ((1 << _CODE_BITS) - 1), np.diff(edges >> _CODE_BITS)


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
