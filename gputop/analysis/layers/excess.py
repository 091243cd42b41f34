"""Ops that make one replica compute longer than the others, or whether it takes longer for everything alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from gputop.analysis.gpu.device_time import GpuTimeline
from gputop.analysis.layers.culprits import op_keys, op_stem
from gputop.analysis.layers.pytorch import CallScopes
from gputop.trace.intervals import Spans, coverage
from gputop.trace.model import I64, Trace

_MIN_NET_SHARE = 0.5  # share of what some ops take longer: so much is left when what others take less is subtracted
_MIN_PROPORTION = 0.5  # share of what all together take longer, in proportion
_NAMED = 0.5  # share of the time: with fewer ops named, kernels are compared by their names
_SHAPES_KNOWN = 0.9  # share of the kernels


class Excess(Struct, frozen=True):
    """Excess of one GPU's compute time over the others: ``rows`` are its kernels, ``time_ns`` is how much of each that
    is, by its op; ``total_ns`` all together, ``own_ns`` of it in ops that the others do not run.

    ``alike`` is the share of the others' time in ops that take longer here by half as much as all do together, and
    more: 1 where each takes longer, as on a GPU with lower clocks or with a larger part of each batch. ``blocks`` is
    how many times as many blocks of threads its kernels have, None: not known. ``by_op``: whether ops were compared,
    not kernels.
    """

    rows: I64
    time_ns: I64
    total_ns: int
    own_ns: int
    alike: float
    blocks: float | None
    by_op: bool


def excess_of(
    trace: Trace, heavy: GpuTimeline, others: Sequence[GpuTimeline], within: Spans, calls: CallScopes | None = None,
) -> Excess | None:
    """``within``: the time to compare. None where it does not compute longer, or ops take longer and less by turns."""
    device = trace.device
    all_rows = [timeline.computing for timeline in (heavy, *others)]
    times = [coverage(within, device.start_ns[rows], device.end_ns[rows]) for rows in all_rows]
    keys = [op_keys(trace, rows, calls) for rows in all_rows]
    whole = sum(int(time.sum()) for time in times)
    by_op = sum(int(time[key >= 0].sum()) for time, key in zip(times, keys, strict=True)) >= _NAMED * whole
    if not by_op:
        keys = [device.name[rows].astype(np.int64) for rows in all_rows]
    distinct, which = np.unique(np.concatenate(keys), return_inverse=True)
    stems: dict[str, int] = {}
    number = np.array([stems.setdefault(op_stem(trace, key, calls) if by_op else str(key), len(stems))
                       for key in distinct.tolist()], np.int64)[which]
    stem_of_event, *rest = np.split(number, np.cumsum([len(rows) for rows in all_rows])[:-1])
    of_heavy = np.bincount(stem_of_event, times[0], len(stems))
    usual = np.median([np.bincount(stem, time, len(stems)) for stem, time in zip(rest, times[1:], strict=True)], axis=0)
    longer = np.maximum(of_heavy - usual, 0)
    total = float((of_heavy - usual).sum())
    if not usual.sum() or total <= 0 or total < _MIN_NET_SHARE * longer.sum():
        return None
    alike = float(usual[longer >= _MIN_PROPORTION * total / usual.sum() * usual].sum() / usual.sum())
    share = np.divide(longer, of_heavy, out=np.zeros(len(stems)), where=of_heavy > 0)
    return Excess(all_rows[0], np.rint(times[0] * share[stem_of_event]).astype(np.int64), round(total),
                  round(float(of_heavy[usual == 0].sum())), alike, _blocks_ratio(trace, all_rows, times), by_op)


def _blocks_ratio(trace: Trace, all_rows: Sequence[I64], times: Sequence[I64]) -> float | None:
    blocks = np.array([shape.grid[0] * shape.grid[1] * shape.grid[2] for shape in trace.launch_shapes] + [0], float)
    sums = []
    for rows, time in zip(all_rows, times, strict=True):
        shape = trace.device.shape[rows[time > 0]]
        if not len(shape) or np.count_nonzero(shape >= 0) < _SHAPES_KNOWN * len(shape):
            return None
        sums.append(float(blocks[shape].sum()))
    usual = float(np.median(sums[1:]))
    return sums[0] / usual if usual else None
