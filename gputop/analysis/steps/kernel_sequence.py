"""The sequence of kernels that a GPU repeats, where nothing marks steps.

Layers of a model are alike: such a sequence may be one of them and not the step. It is the step where the optimizer's
kernels are part of it, because those run once per step; else nothing tells which it is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gputop.trace.lookups import optimizer_names
from gputop.trace.model import I64, Kind, Trace

# A repeating kernel sequence counts as steps only if it is this long, this often, this alike, this regular.
_MIN_PERIOD_KERNELS = 10
_MIN_PERIOD_NAMES = 3
_MIN_PERIODS = 3
_MIN_MATCH = 0.98
_MAX_VARIATION = 0.25


class KernelSequence(NamedTuple):
    """``gpu`` is an index into ``Trace.gpus``; ``period`` kernels begin anew at each of ``start_ns``. ``is_step``:
    the optimizer's kernels are among them."""

    gpu: int
    period: int
    start_ns: I64
    is_step: bool


def kernel_sequence(trace: Trace) -> KernelSequence | None:
    """That of the GPU with most kernels, from the widest gap within it on; None where nothing surely repeats."""
    device = trace.device
    kernels = np.flatnonzero(device.kind <= Kind.COLLECTIVE)
    if not len(kernels):
        return None
    gpu = _most_common(device.gpu[kernels])
    kernels = kernels[device.gpu[kernels] == gpu]
    names = device.name[kernels]
    period = _period(names)
    if period is None:
        return None
    start, end = device.start_ns[kernels], device.end_ns[kernels]
    reach = np.maximum.accumulate(end)
    gap = np.concatenate(([0], start[1:] - reach[:-1]))
    whole = len(names) // period
    phase = int(np.argmax(np.median(gap[: whole * period].reshape(whole, period)[1:], axis=0)))
    first = start[phase::period]
    length = np.diff(first)
    if len(length) < _MIN_PERIODS - 1 or length.std() > _MAX_VARIATION * length.mean():
        return None
    optimizer = optimizer_names(trace)
    is_step = bool((optimizer[names] | optimizer[device.tf_op[kernels]]).any())
    return KernelSequence(gpu, period, first, is_step)


def _period(names: npt.NDArray) -> int | None:
    """Length of the sequence that repeats over all of ``names``, or None.

    Candidates are the distances between equal names, rarest names first: those that occur
    once a step give its length directly, those of a repeated layer fail the comparison.
    """
    _, which, counts = np.unique(names, return_inverse=True, return_counts=True)
    tried: set[int] = set()
    for kind in np.argsort(counts, kind="stable"):
        if counts[kind] < _MIN_PERIODS or len(tried) == 16:
            continue
        period = int(np.median(np.diff(np.flatnonzero(which == kind))))
        if period in tried or period < _MIN_PERIOD_KERNELS or period * _MIN_PERIODS > len(names):
            continue
        tried.add(period)
        alike = float(np.mean(names[period:] == names[:-period]))
        if alike >= _MIN_MATCH and len(np.unique(names[:period])) >= _MIN_PERIOD_NAMES:
            return period
    return None


def _most_common(values: npt.NDArray) -> int:
    kinds, counts = np.unique(values, return_counts=True)
    return int(kinds[np.argmax(counts)])
