"""The sequence of kernels that a GPU repeats, where nothing marks steps.

1. Take the kernels of the GPU that ran most of them, in order of their begins.
2. Find the period of their names: how many kernels later the names are the same again. Periods are tried that are
   the usual distance between two kernels of one name, of the rarest names first.
3. Begin the period behind the widest of its usual gaps between kernels.
4. Reject periods that differ much in time, but for a few with a pause.

Layers of a model are alike: such a sequence may be one of them and not the step. It is the step if the optimizer's
kernels are part of it, because those run once a step; else nothing shows which it is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gputop.analysis.steps.anchors import Anchors
from gputop.analysis.steps.whole_steps import without_pause
from gputop.trace.lookups import optimizer_names
from gputop.trace.model import I64, Kind, Trace

# A repeating kernel sequence counts as steps only if it is this long, this often, this alike, this regular. gputop's
# own figures.
_MIN_PERIOD_KERNELS = 10
_MANY_PERIODS = 100  # a loop, however few kernels its iteration has
_MIN_PERIOD_NAMES = 3
_MIN_PERIODS = 3
_MIN_MATCH = 0.98
_MAX_VARIATION = 0.25  # standard deviation of the periods' lengths / their mean
_MAX_TRIED = 16  # periods


def kernel_sequence(trace: Trace) -> Anchors | None:
    """The sequence that a GPU repeats (1 to 4); None where none surely does."""
    device = trace.device
    kernels = np.flatnonzero(device.kind <= Kind.COLLECTIVE)
    if not len(kernels):
        return None
    gpu = int(np.bincount(device.gpu[kernels]).argmax())
    kernels = kernels[device.gpu[kernels] == gpu]
    names = device.name[kernels]
    period = _period(names)
    if period is None:
        return None
    start_ns = device.start_ns[kernels][_widest_gap(device.start_ns[kernels], device.end_ns[kernels], period)::period]
    length = np.diff(start_ns)
    length = length[without_pause(length)]
    if len(length) < _MIN_PERIODS - 1 or length.std() > _MAX_VARIATION * length.mean():
        return None
    optimizer = optimizer_names(trace)
    is_step = bool((optimizer[names] | optimizer[device.tf_op[kernels]]).any())
    name = f"a sequence of {period} kernels that GPU {trace.gpus[gpu].ordinal} repeats"
    return Anchors(f"{name}, including optimizer kernels" if is_step else name, "low", start_ns, start_ns, start_ns,
                   unit="step" if is_step else "period")


def _period(names: npt.NDArray) -> int | None:
    """Length of the sequence that repeats over all of ``names`` (2), or None. Names that occur once a step give its
    length directly; those of a repeated layer fail the comparison."""
    _, which, counts = np.unique(names, return_inverse=True, return_counts=True)
    tried: set[int] = set()
    for kind in np.argsort(counts, kind="stable"):
        if counts[kind] < _MIN_PERIODS or len(tried) == _MAX_TRIED:
            continue
        period = int(np.median(np.diff(np.flatnonzero(which == kind))))
        fewest = _MIN_PERIODS if period >= _MIN_PERIOD_KERNELS else _MANY_PERIODS
        if period in tried or period * fewest > len(names):
            continue
        tried.add(period)
        match = float(np.mean(names[period:] == names[:-period]))
        if match >= _MIN_MATCH and len(np.unique(names[:period])) >= _MIN_PERIOD_NAMES:
            return period
    return None


def _widest_gap(start: I64, end: I64, period: int) -> int:
    """Index of the kernel in a period with the widest usual gap before it (3), in all whole periods but the first."""
    reach = np.maximum.accumulate(end)
    gap = np.concatenate(([0], start[1:] - reach[:-1]))
    whole = len(start) // period
    return int(np.argmax(np.median(gap[: whole * period].reshape(whole, period)[1:], axis=0)))
