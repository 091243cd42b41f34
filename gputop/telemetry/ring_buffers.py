"""The arrays behind :mod:`gputop.telemetry.history`: ring buffers of a fixed set of GPUs at several resolutions.

One ring keeps every sample; each tier keeps count, sum, minimum, maximum and a histogram of
levels per slice of time. A slice's number is ``floor(time / length)`` and its row that number
modulo the ring's size, so nothing is shifted and a gap in time costs nothing: a row whose
stored number differs from the requested one is empty.

The rows of all tiers lie in common arrays, so that one sample updates every tier with one
NumPy call per figure. A page of the arrays takes memory when it is first written: memory grows
with what is kept, up to a fixed bound.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

LEVELS = 8

# In slices. Slice numbers of times like 0.3 / 0.1 may miss the whole number by a rounding error,
# which stays below this for Unix times and slices of at least 0.1 s.
_SLICE_TOLERANCE = 1e-5

_EMPTY = np.iinfo(np.int64).min  # the slot number of a row that holds nothing

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Lane:
    """One metric of one GPU over consecutive slices of time, oldest first.

    ``count`` is the number of readings in each slice; ``mean``, ``min`` and ``max`` are in the
    metric's unit, NaN where there is no reading. ``levels[i, k]`` is the share of the readings
    of slice i between k/8 and (k+1)/8 of full scale; a row sums to 1, or to 0 where no reading
    had a scale. ``full_scale`` is 100 % in the metric's unit, averaged over the view (for a
    metric without one the largest reading in view); None where it is not known.
    ``resolution_s`` is the length of the stored slices behind it, 0 for single samples.
    """

    start_s: F64
    count: Array  # int64
    mean: F32
    min: F32
    max: F32
    levels: F32
    full_scale: float | None
    resolution_s: float


@dataclass(frozen=True, slots=True)
class Grid:
    """``slices`` slices of ``slice_s`` seconds; the first is number ``first`` (starts at first * slice_s)."""

    first: int
    slices: int
    slice_s: float

    @classmethod
    def ending(cls, end_s: float, slice_s: float, slices: int) -> Grid:
        """The grid whose last slice holds the moment just before ``end_s``."""
        return cls(math.ceil(end_s / slice_s - _SLICE_TOLERANCE) - slices, slices, slice_s)

    @property
    def begin_s(self) -> float:
        return self.first * self.slice_s

    def starts_s(self) -> F64:
        return np.arange(self.first, self.first + self.slices) * np.float64(self.slice_s)


@dataclass(frozen=True, slots=True)
class Columns:
    """The metric of each column: first those with a constant scale, then those whose scale is another
    reading, then those without a scale. Only the first two kinds have a histogram."""

    ids: tuple[str, ...]
    constants: tuple[float, ...]  # full scale of the first columns
    scale_ids: tuple[str, ...]  # reading that is the full scale of the next columns

    @property
    def histogram_columns(self) -> int:
        return len(self.constants) + len(self.scale_ids)


@dataclass(frozen=True, slots=True)
class Tier:
    """``rows`` slices of ``slice_s`` seconds, kept in rows ``offset`` and up of the common arrays."""

    slice_s: float
    rows: int
    offset: int


def _zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Zeros that take memory page by page as they are written.

    Not ``np.zeros``: that asks for huge pages, and one row written here and there then takes
    2 MB each, 30 MB at the first sample.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages does not know the advice
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape)


def level_of(ratio: Array) -> Array:
    """Level 0 to LEVELS-1 of finite ratios; a ratio above full scale has the highest level."""
    return np.clip(ratio * LEVELS, 0, LEVELS - 1).astype(np.intp)


class Rings:
    """History of ``gpus`` GPUs. Not locked: :class:`gputop.telemetry.history.History` does that."""

    def __init__(self, gpus: int, columns: Columns, raw_samples: int, tiers: Sequence[tuple[float, int]]) -> None:
        metrics, scales, histogram_columns = len(columns.ids), len(columns.scale_ids), columns.histogram_columns
        self.columns = columns
        self.gpus = gpus
        self.first_s = math.inf
        self.newest_s = -math.inf

        self._times = _zeros((raw_samples,), np.float64)
        self._values = _zeros((raw_samples, gpus, metrics), np.float32)
        self._scales = _zeros((raw_samples, gpus, scales), np.float32)
        self._flags = _zeros((raw_samples, gpus), np.uint32)
        self._head = 0  # where the next sample goes
        self._kept = 0
        self._overwritten_s = -math.inf  # time of the newest sample the ring has lost

        offset = 0
        self._tiers: list[Tier] = []
        for slice_s, rows in tiers:
            self._tiers.append(Tier(slice_s, rows, offset))
            offset += rows
        self._slots = np.full(offset, _EMPTY, np.int64)
        self._count = _zeros((offset, gpus, metrics), np.uint16)
        self._sum = _zeros((offset, gpus, metrics), np.float32)
        self._min = _zeros((offset, gpus, metrics), np.float32)
        self._max = _zeros((offset, gpus, metrics), np.float32)
        self._levels = _zeros((offset, gpus * histogram_columns * LEVELS), np.uint16)
        self._scale_sum = _zeros((offset, gpus, scales), np.float32)

        self.reserved_bytes = sum(a.nbytes for a in vars(self).values() if isinstance(a, np.ndarray))
        self._full_scales = np.empty((gpus, histogram_columns), np.float32)
        self._full_scales[:, : len(columns.constants)] = columns.constants
        self._level_base = np.arange(gpus * histogram_columns).reshape(gpus, histogram_columns) * LEVELS

    # -- writing ------------------------------------------------------------------------------

    def append(self, time_s: float, values: F32, scales: F32, flags: npt.NDArray[np.uint32]) -> None:
        """Add one sample: ``values[gpu, column]``, ``scales[gpu, scale]``; NaN is missing."""
        if time_s < self.newest_s:
            self._forget_from(time_s)
        self.first_s = min(self.first_s, time_s)
        self.newest_s = time_s
        head, size = self._head, len(self._times)
        if self._kept == size:
            self._overwritten_s = float(self._times[head])
        self._times[head] = time_s
        self._values[head] = values
        self._scales[head] = scales
        self._flags[head] = flags
        self._head = (head + 1) % size
        self._kept = min(size, self._kept + 1)
        self._add_to_tiers(self._rows_at(time_s), values, scales)

    def _rows_at(self, time_s: float) -> list[int]:
        """The row of each tier that this time falls into, cleared if it held an older slice."""
        rows = []
        for tier in self._tiers:
            slot = math.floor(time_s / tier.slice_s)
            row = tier.offset + slot % tier.rows
            if self._slots[row] != slot:
                self._slots[row] = slot
                self._count[row] = 0
                self._sum[row] = 0
                self._min[row] = np.nan
                self._max[row] = np.nan
                self._levels[row] = 0
                self._scale_sum[row] = 0
            rows.append(row)
        return rows

    def _add_to_tiers(self, rows: list[int], values: F32, scales: F32) -> None:
        present = ~np.isnan(values)
        self._count[rows] += present
        self._sum[rows] += np.where(present, values, np.float32(0))
        self._min[rows] = np.fmin(self._min[rows], values)
        self._max[rows] = np.fmax(self._max[rows], values)

        full, constants = self._full_scales, len(self.columns.constants)
        histogram_columns = self.columns.histogram_columns
        full[:, constants:] = scales
        ratio = values[:, :histogram_columns] / full
        known = ~np.isnan(ratio)
        places = self._level_base[known] + level_of(ratio[known])
        self._levels[np.array(rows)[:, None], places] += 1
        # A scale is summed only where its metric has a value, so that both are means of the same samples.
        self._scale_sum[rows] += np.where(known[:, constants:], scales, np.float32(0))

    def _forget_from(self, time_s: float) -> None:
        """Drop what is later than ``time_s``, to which the clock was set back: it would hide the next samples.

        Slices that began before ``time_s`` stay.
        """
        oldest = self._head - self._kept
        self._kept = sum(stop - start for start, stop in self._raw_parts(-math.inf, time_s))
        self._head = (oldest + self._kept) % len(self._times)
        for tier in self._tiers:
            slots = self._slots[tier.offset: tier.offset + tier.rows]
            slots[slots > math.floor(time_s / tier.slice_s)] = _EMPTY
        self.first_s = min(self.first_s, time_s)

    # -- reading ------------------------------------------------------------------------------

    def _raw_parts(self, begin_s: float, end_s: float, closed: bool = False) -> list[tuple[int, int]]:
        """The index ranges with begin_s <= time < end_s (<= with ``closed``), in order of time."""
        size = len(self._times)
        oldest = (self._head - self._kept) % size
        stop = oldest + self._kept
        parts = [(oldest, stop)] if stop <= size else [(oldest, size), (0, stop - size)]
        out = []
        for start, stop in parts:
            times = self._times[start:stop]
            low = start + int(np.searchsorted(times, begin_s, "left"))
            high = start + int(np.searchsorted(times, end_s, "right" if closed else "left"))
            if low < high:
                out.append((low, high))
        return out

    def times(self, begin_s: float, end_s: float) -> F64:
        """Times of the samples kept between ``begin_s`` and ``end_s``, both included."""
        return _joined([self._times[a:b] for a, b in self._raw_parts(begin_s, end_s, closed=True)], np.float64)

    def values(self, gpu: int | slice, column: int, begin_s: float, end_s: float) -> F32:
        """The readings at :meth:`times`; with a slice of GPUs as [time, gpu]."""
        parts = self._raw_parts(begin_s, end_s, closed=True) or [(0, 0)]
        return _joined([self._values[a:b, gpu, column] for a, b in parts], np.float32)

    def scales(self, column: int, begin_s: float, end_s: float) -> F32:
        """The readings of ``scale_ids[column]`` of all GPUs at :meth:`times`: [time, gpu]."""
        parts = self._raw_parts(begin_s, end_s, closed=True) or [(0, 0)]
        return _joined([self._scales[a:b, :, column] for a, b in parts], np.float32)

    def flags(self, gpu: int | slice, begin_s: float, end_s: float) -> npt.NDArray[np.uint32]:
        """The flags at :meth:`times`; with a slice of GPUs as [time, gpu]."""
        parts = self._raw_parts(begin_s, end_s, closed=True) or [(0, 0)]
        return _joined([self._flags[a:b, gpu] for a, b in parts], np.uint32)

    @property
    def oldest_s(self) -> float:
        """Start of the oldest slice kept at any resolution, or the time of the first sample."""
        return max(self.first_s, min(self._reach_s(tier) for tier in self._tiers))

    def _reach_s(self, tier: Tier) -> float:
        """The time from which on this tier is complete."""
        return (math.floor(self.newest_s / tier.slice_s) - tier.rows + 1) * tier.slice_s

    def lane(self, gpu: int, column: int, grid: Grid, full_scale: float | None) -> Lane:
        """See :meth:`gputop.telemetry.history.History.lane`."""
        has_levels = column < self.columns.histogram_columns
        begin_s = max(grid.begin_s, self.first_s)
        raw_covers = begin_s > self._overwritten_s
        if raw_covers and not has_levels:
            return self._lane_of_samples(gpu, column, grid, full_scale)
        covering = [tier for tier in self._tiers if begin_s >= self._reach_s(tier)]
        for tier in reversed(covering):
            parts = grid.slice_s / tier.slice_s
            if parts > 1 - _SLICE_TOLERANCE and abs(parts - round(parts)) < _SLICE_TOLERANCE:
                return self._lane_of_tier(gpu, column, grid, full_scale, tier)
        if raw_covers:
            return self._lane_of_samples(gpu, column, grid, full_scale)
        return self._lane_of_tier(gpu, column, grid, full_scale, covering[0] if covering else self._tiers[-1])

    def _lane_of_samples(self, gpu: int, column: int, grid: Grid, full_scale: float | None) -> Lane:
        end_s = (grid.first + grid.slices) * grid.slice_s
        parts = self._raw_parts(grid.begin_s - _SLICE_TOLERANCE, end_s + _SLICE_TOLERANCE)
        times = _joined([self._times[a:b] for a, b in parts], np.float64)
        values = _joined([self._values[a:b, gpu, column] for a, b in parts], np.float32)
        place = np.floor(times / grid.slice_s + _SLICE_TOLERANCE).astype(np.int64) - grid.first
        present = ~np.isnan(values) & (place >= 0) & (place < grid.slices)
        place, values = place[present], values[present]

        count = np.bincount(place, minlength=grid.slices)
        mean = _quotient(np.bincount(place, weights=values, minlength=grid.slices), count)
        low = np.full(grid.slices, np.nan, np.float32)
        high = low.copy()
        if len(values):
            starts = np.flatnonzero(np.diff(place, prepend=-1))
            low[place[starts]] = np.minimum.reduceat(values, starts)
            high[place[starts]] = np.maximum.reduceat(values, starts)

        constants, histogram_columns = self.columns.constants, self.columns.histogram_columns
        scale: Array | float | None
        mean_scale: float | None
        if column < len(constants):
            scale = mean_scale = constants[column]
        elif column < histogram_columns:
            scale = scales = _joined([self._scales[a:b, gpu, column - len(constants)] for a, b in parts],
                                     np.float32)[present]
            known = scales[~np.isnan(scales)]
            mean_scale = float(known.mean(dtype=np.float64)) if len(known) else None
        else:
            scale = mean_scale = full_scale or _largest(high)
        levels = _histogram(values, scale, place, np.ones(len(values)), grid.slices)
        return Lane(grid.starts_s(), count, mean, low, high, levels, mean_scale, 0.0)

    def _lane_of_tier(self, gpu: int, column: int, grid: Grid, full_scale: float | None, tier: Tier) -> Lane:
        numbers = grid.first + np.arange(grid.slices + 1)
        if grid.slice_s > tier.slice_s * (1 - _SLICE_TOLERANCE):
            # A stored slice belongs to the slice it starts in: exact where the lengths divide.
            edges = np.ceil(numbers * (grid.slice_s / tier.slice_s) - _SLICE_TOLERANCE).astype(np.int64)
            slots = np.arange(edges[0], edges[-1])
            groups = edges[:-1] - edges[0]
        else:
            # Finer than the stored slices: each slice shows the stored one it lies in.
            slots = np.floor((numbers[:-1] + 0.5) * grid.slice_s / tier.slice_s).astype(np.int64)
            groups = np.arange(grid.slices)
        rows = tier.offset + slots % tier.rows
        filled = self._slots[rows] == slots
        if grid.slice_s < tier.slice_s:
            starts_s = grid.starts_s()
            filled &= (starts_s <= self.newest_s) & (starts_s > self.first_s - grid.slice_s)

        counts = np.where(filled, self._count[rows, gpu, column], 0)
        sums = np.where(filled, self._sum[rows, gpu, column], np.float32(0))
        count = np.add.reduceat(counts.astype(np.int64), groups)
        low = np.fmin.reduceat(np.where(filled, self._min[rows, gpu, column], np.float32(np.nan)), groups)
        high = np.fmax.reduceat(np.where(filled, self._max[rows, gpu, column], np.float32(np.nan)), groups)
        mean = _quotient(np.add.reduceat(sums, groups, dtype=np.float64), count)

        constants, histogram_columns = self.columns.constants, self.columns.histogram_columns
        scale: float | None
        if column >= histogram_columns:
            # A metric without a scale has no histogram: each stored slice counts at its mean.
            scale = full_scale or _largest(high)
            some = counts > 0
            place = np.repeat(np.arange(grid.slices), np.diff(groups, append=len(slots)))[some]
            levels = _histogram(sums[some] / counts[some], scale, place, counts[some], grid.slices)
            return Lane(grid.starts_s(), count, mean, low, high, levels, scale, tier.slice_s)

        first = (gpu * histogram_columns + column) * LEVELS
        stored = np.where(filled[:, None], self._levels[rows, first: first + LEVELS], 0)
        shares = np.add.reduceat(stored.astype(np.float32), groups, axis=0)
        if column < len(constants):
            scale = constants[column]
        else:
            known = int(stored.sum())
            scales = np.where(filled, self._scale_sum[rows, gpu, column - len(constants)], 0)
            scale = float(scales.sum(dtype=np.float64)) / known if known else None
        return Lane(grid.starts_s(), count, mean, low, high, _shares(shares), scale, tier.slice_s)


def _joined(parts: Sequence[Array], dtype: npt.DTypeLike) -> Array:
    """A copy of the parts, one after the other."""
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _quotient(total: Array, count: Array) -> F32:
    out = np.full(len(count), np.nan, np.float32)
    np.divide(total, count, out=out, where=count > 0, casting="same_kind")
    return out


def _largest(values: F32) -> float | None:
    """The largest value above zero; None where there is none."""
    largest = np.fmax.reduce(values, initial=np.float32(0))
    return float(largest) or None


def _histogram(values: Array, scale: Array | float | None, place: Array, weight: Array, slices: int) -> F32:
    """Share of ``values`` (by ``weight``) at each level of ``scale``, per slice ``place``."""
    if scale is None:
        scale = 1.0  # all values are zero, or there are none
    ratio = values / np.asarray(scale, np.float32)
    known = ~np.isnan(ratio)
    cells = place[known] * LEVELS + level_of(ratio[known])
    filled = np.bincount(cells, weights=weight[known], minlength=slices * LEVELS).astype(np.float32)
    return _shares(filled.reshape(slices, LEVELS))


def _shares(filled: F32) -> F32:
    """Each row divided by its sum; rows of zeros stay zero."""
    total = filled.sum(axis=1, keepdims=True)
    total[total == 0] = 1
    filled /= total
    return filled
