"""The arrays behind :mod:`gputop.telemetry.history`: ring buffers of a fixed set of GPUs at several resolutions.

A :class:`SampleRing` keeps every sample; each :class:`Tier` keeps count, sum and a histogram of levels per slice of
time. A slice's number is ``floor(time / length)`` and its row that number
modulo the ring's size, so nothing is shifted and a gap in time costs nothing: a row whose
stored number differs from the requested one is empty. :class:`Rings` chooses what is written and read.

The rows lie in common memory, a page of which is taken when it is first written: memory grows with what is kept, up to
a fixed bound. Plain Python and not NumPy, which the monitor would import for this and the live rules alone: 13 MB. A
row is a few hundred numbers, of which one call of NumPy's costs as much as some dozens.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import add, truediv
from typing import Any, Literal

from msgspec import Struct

from gputop.core.metrics import LEVELS

# In slices. Slice numbers of times like 0.3 / 0.1 may miss the whole number by a rounding error,
# which stays below this for Unix times and slices of at least 0.1 s.
_SLICE_TOLERANCE = 1e-5

_EMPTY = -2**63  # the slot number of a row that holds nothing
_MAX_COUNT = 2**16 - 1  # readings counted in a slice: the tables hold 16 bits
_SAMPLES_REACH_S = 3600.0  # of single samples; they are fewer than their ring could hold where they come slowly

Series = list[float]


class Lane(Struct, frozen=True):
    """One metric of one GPU over consecutive slices of time, oldest first.

    ``count`` is the number of readings in each slice; ``mean`` is in the metric's unit, NaN where there is no reading.
    ``levels[i][k]`` is the share of the readings of slice i between k/8 and (k+1)/8 of full scale; a row sums to 1, or
    to 0 where no reading had a scale. ``full_scale`` is 100% in the metric's unit, averaged over the view (for a metric
    without one the largest reading in view); None where it is not known. ``resolution_s`` is the length of the stored
    slices behind it, 0 for single samples.
    """

    start_s: Series
    count: list[int]
    mean: Series
    levels: list[Series]
    full_scale: float | None
    resolution_s: float


class SliceGrid(Struct, frozen=True):
    """``slices`` slices of ``slice_s`` seconds; the first is number ``first`` (starts at first * slice_s)."""

    first: int
    slices: int
    slice_s: float

    @classmethod
    def ending(cls, end_s: float, slice_s: float, slices: int) -> SliceGrid:
        """The grid whose last slice holds the moment just before ``end_s``."""
        return cls(math.ceil(end_s / slice_s - _SLICE_TOLERANCE) - slices, slices, slice_s)

    @property
    def begin_s(self) -> float:
        return self.first * self.slice_s

    def starts_s(self) -> Series:
        return [number * self.slice_s for number in range(self.first, self.first + self.slices)]


class LaneColumns(Struct, frozen=True):
    """The metric of each column: first those with a constant scale, then those whose scale is another
    reading, then those without a scale. Only the first two kinds have a histogram."""

    ids: tuple[str, ...]
    constants: tuple[float, ...]  # full scale of the first columns
    scale_ids: tuple[str, ...]  # reading that is the full scale of the next columns

    @property
    def histogram_columns(self) -> int:
        return len(self.constants) + len(self.scale_ids)


class _Table:
    """Rows of ``width`` numbers of one type (array's code), zero at first. A page takes memory when it is written."""

    def __init__(self, rows: int, width: int, code: Literal["d", "f", "H", "I"]) -> None:
        self.width, self._code = width, code
        nbytes = rows * width * array(code).itemsize
        memory = mmap.mmap(-1, max(mmap.PAGESIZE, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages does not know the advice
            # One row written here and there would take 2 MB each, 30 MB at the first sample.
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        self.cells: memoryview[Any] = memoryview(memory)[:nbytes].cast(code)

    def __getitem__(self, row: int) -> Sequence[float]:
        return self.cells[row * self.width: (row + 1) * self.width].tolist()

    def __setitem__(self, row: int, values: Sequence[float]) -> None:
        self.cells[row * self.width: (row + 1) * self.width] = array(self._code, values)

    def column(self, column: int, parts: Sequence[tuple[int, int]]) -> list[Any]:
        """One column of these ranges of rows, one after the other."""
        width = self.width
        out: list[Any] = []
        for a, b in parts:
            out += self.cells[a * width + column: b * width: width].tolist()
        return out


class _Addend(Struct, frozen=True):
    """Figures of one sample, as they are added to a slice of any length."""

    count: list[bool]
    sum: Series  # 0: missing
    scale_sum: Series
    unscaled: Series  # values of the metrics without a scale; NaN: missing
    cells: list[int]  # of the histograms: those that the sample falls into

    @classmethod
    def of(cls, values: Sequence[float], scales: Sequence[float], columns: LaneColumns) -> _Addend:
        """The addend of the values and scales of all GPUs. A scale is 0 if its metric has no value: the means of both
        are then means of the same samples."""
        constants, metrics, per_gpu = columns.constants, len(columns.ids), len(columns.scale_ids)
        ratios: Series = []
        scaled: Series = []
        unscaled: Series = []
        for gpu in range(len(values) // metrics):
            of_gpu = scales[gpu * per_gpu: (gpu + 1) * per_gpu]
            numbers = values[gpu * metrics: (gpu + 1) * metrics]
            ratios += map(truediv, numbers, (*constants, *of_gpu))
            unscaled += numbers[columns.histogram_columns:]
            scaled += [scale if ratio == ratio else 0.0
                       for scale, ratio in zip(of_gpu, ratios[len(ratios) - per_gpu:], strict=True)]
        return cls([v == v for v in values], [v if v == v else 0.0 for v in values], scaled, unscaled,
                   [cell + level_of(ratio) for cell, ratio in zip(range(0, len(ratios) * LEVELS, LEVELS), ratios,
                                                                  strict=True) if ratio == ratio])


class _OpenSlice(Struct):
    """The slice of a tier that samples are added to. Lists are quicker to add to than tables, in which it is stored
    once it is over or asked for."""

    slot: int
    row: int
    count: Sequence[float]
    sum: Sequence[float]
    scale_sum: Sequence[float]
    largest: Sequence[float]  # of the metrics without a scale; that of nothing is minus infinity
    levels: list[int]
    samples: int = 0
    stored: bool = False

    def add(self, addend: _Addend) -> None:
        if self.samples == _MAX_COUNT:  # a clock that stands still
            return
        self.samples, self.stored = self.samples + 1, False
        self.count = [*map(add, self.count, addend.count)]
        self.sum = [*map(add, self.sum, addend.sum)]
        self.scale_sum = [*map(add, self.scale_sum, addend.scale_sum)]
        # NaN is not more than anything, so that what is missing changes nothing.
        self.largest = [b if b > a else a for a, b in zip(self.largest, addend.unscaled, strict=True)]
        levels = self.levels
        for cell in addend.cells:
            levels[cell] += 1


def level_of(ratio: float) -> int:
    """Level 0 to LEVELS-1 of a finite ratio; one above full scale has the highest level."""
    return LEVELS - 1 if ratio >= 1 else int(ratio * LEVELS) if ratio > 0 else 0


class SampleRing:
    """The newest single samples of ``gpus`` GPUs, in order of time: ``most`` of them, or those of the last hour.

    The ring has ``size`` rows so far, ``kept`` of which hold a sample; ``overwritten_s`` is the time of the newest one
    that gave way to another.
    """

    def __init__(self, most: int, gpus: int, columns: LaneColumns) -> None:
        self.most = most
        self.size = 1
        self.kept = 0
        self.overwritten_s = -math.inf
        self._columns = columns
        self._head = 0  # where the next sample goes
        self._times = _Table(most, 1, "d")
        self._values = _Table(most, gpus * len(columns.ids), "f")
        self._scales = _Table(most, gpus * len(columns.scale_ids), "f")
        self._flags = _Table(most, gpus, "I")

    def append(self, time_s: float, values: Sequence[float], scales: Sequence[float], flags: Sequence[int]) -> None:
        """Add a sample that is not older than the newest, see :meth:`Rings.append`."""
        if self.is_full(time_s):
            self.overwritten_s = self._times.cells[self._head]
        elif self.kept == self.size:
            self._head, self.size = self.size, self.size + 1
        head = self._head
        self._times.cells[head] = time_s
        self._values[head] = values
        self._scales[head] = scales
        self._flags[head] = flags
        self._head = (head + 1) % self.size
        self.kept = min(self.size, self.kept + 1)

    def is_full(self, time_s: float) -> bool:
        """Return whether a sample of this time takes the row of the oldest one."""
        return self.kept == self.size and not (  # else the oldest is in the first row, and a new row follows the last
            self._head == 0 and self.size < self.most and time_s - self._times.cells[0] <= _SAMPLES_REACH_S)

    def newest(self) -> tuple[Sequence[float], Sequence[float]]:
        """Values and scales of the newest sample, in the 32 bits that are kept of them."""
        row = (self._head - 1) % self.size
        return self._values[row], self._scales[row]

    def forget_from(self, time_s: float) -> None:
        """Drop the samples from ``time_s`` on."""
        oldest = self._head - self.kept
        self.kept = sum(stop - start for start, stop in self._parts(-math.inf, time_s))
        self._head = (oldest + self.kept) % self.size

    def _parts(self, begin_s: float, end_s: float, closed: bool = False) -> list[tuple[int, int]]:
        """The index ranges with begin_s <= time < end_s (<= with ``closed``), in order of time."""
        size, times = self.size, self._times.cells
        oldest = (self._head - self.kept) % size
        stop = oldest + self.kept
        parts = [(oldest, stop)] if stop <= size else [(oldest, size), (0, stop - size)]
        out = []
        for start, stop in parts:
            low = bisect_left(times, begin_s, start, stop)
            high = (bisect_right if closed else bisect_left)(times, end_s, start, stop)
            if low < high:
                out.append((low, high))
        return out

    def times(self, begin_s: float, end_s: float) -> Series:
        """Times of the samples kept between ``begin_s`` and ``end_s``, both included."""
        return self._times.column(0, self._parts(begin_s, end_s, closed=True))

    def values(self, gpu: int, column: int, begin_s: float, end_s: float) -> Series:
        """The readings at :meth:`times`."""
        cell = gpu * len(self._columns.ids) + column
        return self._values.column(cell, self._parts(begin_s, end_s, closed=True))

    def all_values(self, column: int, begin_s: float, end_s: float, scale: bool = False) -> list[Series]:
        """The readings at :meth:`times` of each GPU; with ``scale`` those of ``scale_ids[column]``."""
        parts, table = self._parts(begin_s, end_s, closed=True), self._scales if scale else self._values
        step = table.width // self._flags.width
        return [table.column(first + column, parts) for first in range(0, table.width, step)]

    def flags(self, gpu: int, begin_s: float, end_s: float) -> list[int]:
        """The flags at :meth:`times`."""
        return self._flags.column(gpu, self._parts(begin_s, end_s, closed=True))

    def lane(self, gpu: int, column: int, grid: SliceGrid, full_scale: float | None) -> Lane:
        """The lane of the samples that are kept, see :meth:`gputop.telemetry.history.History.lane`."""
        end_s = (grid.first + grid.slices) * grid.slice_s
        parts = self._parts(grid.begin_s - _SLICE_TOLERANCE, end_s + _SLICE_TOLERANCE)
        constants, histogram_columns = self._columns.constants, self._columns.histogram_columns
        values = self._values.column(gpu * len(self._columns.ids) + column, parts)
        own_scale = len(constants) <= column < histogram_columns
        scales = (self._scales.column(gpu * len(self._columns.scale_ids) + column - len(constants), parts) if own_scale
                  else [math.nan] * len(values))

        slices: list[Series] = [[] for _ in range(grid.slices)]
        slice_scales: list[Series] = [[] for _ in range(grid.slices)]
        for time_s, value, scale in zip(self._times.column(0, parts), values, scales, strict=True):
            slice_index = math.floor(time_s / grid.slice_s + _SLICE_TOLERANCE) - grid.first
            if value == value and 0 <= slice_index < grid.slices:
                slices[slice_index].append(value)
                slice_scales[slice_index].append(scale)

        if own_scale:
            present = [scale for scale in chain.from_iterable(slice_scales) if scale == scale]
            return lane_of(grid, slices, math.fsum(present) / len(present) if present else None, slice_scales)
        if column < len(constants):
            return lane_of(grid, slices, constants[column])
        return lane_of(grid, slices, full_scale or _largest([*chain.from_iterable(slices)]))


class Tier:
    """The newest ``rows`` slices of ``slice_s`` seconds of ``gpus`` GPUs."""

    def __init__(self, slice_s: float, rows: int, gpus: int, columns: LaneColumns) -> None:
        self.slice_s = slice_s
        self.rows = rows
        self._columns = columns
        self._slots = array("q", [_EMPTY]) * rows  # the number of the slice in each row
        self._open: _OpenSlice | None = None
        width = gpus * len(columns.ids)
        self._count = _Table(rows, width, "H")
        self._sum = _Table(rows, width, "f")
        self._levels = _Table(rows, gpus * columns.histogram_columns * LEVELS, "H")
        self._scale_sum = _Table(rows, gpus * len(columns.scale_ids), "f")
        self._largest = _Table(rows, width - gpus * columns.histogram_columns, "f")

    def reach_s(self, newest_s: float) -> float:
        """The time from which on the tier is complete, if the newest sample is of ``newest_s``."""
        return (math.floor(newest_s / self.slice_s) - self.rows + 1) * self.slice_s

    def divides(self, slice_s: float) -> bool:
        """Return whether slices of ``slice_s`` seconds consist of whole ones of this tier."""
        parts = slice_s / self.slice_s
        return parts > 1 - _SLICE_TOLERANCE and abs(parts - round(parts)) < _SLICE_TOLERANCE

    def add(self, time_s: float, addend: _Addend) -> None:
        """Add a sample of this time to its slice; those before are over."""
        slot = math.floor(time_s / self.slice_s)
        if self._open is None or self._open.slot != slot:
            self._store()
            self._open = self._begin(slot)
        self._open.add(addend)

    def _begin(self, slot: int) -> _OpenSlice:
        """The slice of this number, as far as it is known."""
        row = slot % self.rows
        if self._slots[row] == slot:
            levels = [*map(int, self._levels[row])]
            return _OpenSlice(slot, row, self._count[row], self._sum[row], self._scale_sum[row], self._largest[row],
                              levels, int(max(self._count[row], default=0)))
        self._slots[row] = slot
        width = self._sum.width
        return _OpenSlice(slot, row, [0] * width, [0.0] * width, [0.0] * self._scale_sum.width,
                          [-math.inf] * self._largest.width, [0] * self._levels.width)

    def _store(self) -> None:
        """Write the open slice to the tables, in which it is read."""
        unstored = self._open
        if unstored is not None and not unstored.stored:
            for table, values in ((self._count, unstored.count), (self._sum, unstored.sum),
                                  (self._scale_sum, unstored.scale_sum), (self._largest, unstored.largest),
                                  (self._levels, unstored.levels)):
                table[unstored.row] = values
            unstored.stored = True

    def forget_from(self, time_s: float) -> None:
        """Drop the slices that begin after ``time_s``; the one that it lies in stays as it is."""
        self._store()
        self._open = None
        last = math.floor(time_s / self.slice_s)
        for row, slot in enumerate(self._slots):
            if slot > last:
                self._slots[row] = _EMPTY

    def means(self, column: int, slots: range) -> list[Series]:
        """The means of each GPU in these slices; NaN without a reading."""
        self._store()
        width, step = self._sum.width, len(self._columns.ids)
        cells = [row * width + column if self._slots[row := slot % self.rows] == slot else None for slot in slots]
        counts, sums = self._count.cells, self._sum.cells
        return [[sums[cell + first] / n if cell is not None and (n := counts[cell + first]) else math.nan
                 for cell in cells]
                for first in range(0, width, step)]

    def lane(self, gpu: int, column: int, grid: SliceGrid, full_scale: float | None,
             sampled: tuple[float, float]) -> Lane:
        """The lane of the slices that are kept, see :meth:`gputop.telemetry.history.History.lane`. ``sampled`` are the
        times of the first and of the newest sample."""
        constants, histogram_columns = self._columns.constants, self._columns.histogram_columns
        self._store()
        rows = [*self._rows_of(grid, *sampled)]
        width, offset = self._sum.width, gpu * len(self._columns.ids) + column
        counts, sums = self._count.cells, self._sum.cells
        count, mean = [], []
        for group in rows:
            cells = [cell for row in group if counts[cell := row * width + offset]]
            total = sum([counts[cell] for cell in cells])
            count.append(total)
            mean.append(sum([sums[cell] for cell in cells]) / total if total else math.nan)

        scale: float | None
        levels: list[Series] = []
        if column >= histogram_columns:
            # A metric without a scale has no histogram: each stored slice counts at its mean.
            unscaled = len(self._columns.ids) - histogram_columns
            scale = full_scale or _largest(self._largest.column(
                gpu * unscaled + column - histogram_columns,
                [(row, row + 1) for row in chain.from_iterable(rows)]))
            for group in rows:
                means = [(sums[row * width + offset] / n, n) for row in group if (n := counts[row * width + offset])]
                levels.append(_histogram([v for v, _ in means], [scale or 1.0] * len(means), [n for _, n in means]))
            return Lane(grid.starts_s(), count, mean, levels, scale, self.slice_s)

        shares, first, step = self._levels.cells, (gpu * histogram_columns + column) * LEVELS, self._levels.width
        filled = [[sum(level) for level in zip(*(shares[row * step + first: row * step + first + LEVELS].tolist()
                                                 for row in group), strict=True)] or [0] * LEVELS for group in rows]
        if column < len(constants):
            scale = constants[column]
        else:
            per_gpu = len(self._columns.scale_ids)
            column_of_scale = gpu * per_gpu + column - len(constants)
            readings = sum(map(sum, filled))
            scale = sum(self._scale_sum.cells[row * self._scale_sum.width + column_of_scale]
                        for row in chain.from_iterable(rows))
            scale = scale / readings if readings else None
        return Lane(grid.starts_s(), count, mean, [*map(_shares, filled)], scale, self.slice_s)

    def _rows_of(self, grid: SliceGrid, first_s: float, newest_s: float) -> Iterator[list[int]]:
        """Yield, for each slice of the grid, the rows that belong to it and hold something."""
        coarse = grid.slice_s <= self.slice_s * (1 - _SLICE_TOLERANCE)
        ratio = grid.slice_s / self.slice_s
        for number in range(grid.first, grid.first + grid.slices):
            if not coarse:
                # A stored slice belongs to the slice it starts in: exact where the lengths divide.
                slots = range(math.ceil(number * ratio - _SLICE_TOLERANCE),
                              math.ceil((number + 1) * ratio - _SLICE_TOLERANCE))
            elif first_s - grid.slice_s < number * grid.slice_s <= newest_s:
                # Finer than the stored slices: each slice shows the stored one it lies in.
                slot = math.floor((number + 0.5) * ratio)
                slots = range(slot, slot + 1)
            else:
                slots = range(0)
            yield [row for slot in slots if self._slots[row := slot % self.rows] == slot]


class Rings:
    """History of ``gpus`` GPUs: at most ``raw_samples`` single samples, and ``tiers`` as pairs of slice length in
    seconds and number of slices, finest first. Not locked: :class:`gputop.telemetry.history.History` does that.
    """

    def __init__(self, gpus: int, columns: LaneColumns, raw_samples: int, tiers: Sequence[tuple[float, int]]) -> None:
        self.columns = columns
        self.gpus = gpus
        self.first_s = math.inf
        self.newest_s = -math.inf
        self.samples = SampleRing(raw_samples, gpus, columns)
        self._tiers = [Tier(slice_s, rows, gpus, columns) for slice_s, rows in tiers]

    # -- writing ------------------------------------------------------------------------------

    def append(self, time_s: float, values: Sequence[float], scales: Sequence[float], flags: Sequence[int]) -> None:
        """Add one sample: the values of all columns GPU by GPU, the scales likewise, flags; NaN is missing."""
        if time_s < self.newest_s:
            self._forget_from(time_s)
        self.first_s = min(self.first_s, time_s)
        self.newest_s = time_s
        self.samples.append(time_s, values, scales, flags)
        # As the sample is kept: so all resolutions give the same figures.
        addend = _Addend.of(*self.samples.newest(), self.columns)
        for tier in self._tiers:
            tier.add(time_s, addend)

    def _forget_from(self, time_s: float) -> None:
        """Drop what is later than ``time_s``, to which the clock was set back: it would hide the next samples.

        Slices that began before ``time_s`` stay.
        """
        self.samples.forget_from(time_s)
        for tier in self._tiers:
            tier.forget_from(time_s)
        self.first_s = min(self.first_s, time_s)

    # -- reading ------------------------------------------------------------------------------

    @property
    def oldest_s(self) -> float:
        """Start of the oldest slice kept at any resolution, or the time of the first sample."""
        return max(self.first_s, min(tier.reach_s(self.newest_s) for tier in self._tiers))

    def tier_means(self, column: int, slice_s: float, slots: range) -> list[Series]:
        """The means of each GPU in these slices of the tier with slices of that length; NaN without a reading, and
        where no tier has such slices."""
        tier = next((tier for tier in self._tiers if tier.slice_s == slice_s), None)
        return [[math.nan] * len(slots)] * self.gpus if tier is None else tier.means(column, slots)

    def lane(self, gpu: int, column: int, grid: SliceGrid, full_scale: float | None) -> Lane:
        """See :meth:`gputop.telemetry.history.History.lane`."""
        begin_s = max(grid.begin_s, self.first_s)
        raw_covers = begin_s > self.samples.overwritten_s
        if raw_covers and column >= self.columns.histogram_columns:
            return self.samples.lane(gpu, column, grid, full_scale)
        covering = [tier for tier in self._tiers if begin_s >= tier.reach_s(self.newest_s)]
        tier = next((tier for tier in reversed(covering) if tier.divides(grid.slice_s)), None)
        if tier is None:
            if raw_covers:
                return self.samples.lane(gpu, column, grid, full_scale)
            tier = covering[0] if covering else self._tiers[-1]
        return tier.lane(gpu, column, grid, full_scale, (self.first_s, self.newest_s))


def lane_of(grid: SliceGrid, values: Sequence[Series], full_scale: float | None,
            scales: Sequence[Series] | None = None) -> Lane:
    """The lane of single readings, those of each slice of the grid; ``scales``: of each reading, if they differ."""
    if scales is None:
        scales = [[full_scale or 1.0] * len(readings) for readings in values]  # without a scale all values are zero
    return Lane(grid.starts_s(), [len(readings) for readings in values],
                [sum(readings) / len(readings) if readings else math.nan for readings in values],
                [_histogram(readings, of_slice) for readings, of_slice in zip(values, scales, strict=True)],
                full_scale, 0.0)


def _largest(values: Sequence[float]) -> float | None:
    """The largest value above zero; None where there is none."""
    return max([v for v in values if v > 0], default=None)


def _histogram(values: Sequence[float], scales: Sequence[float], weights: Sequence[float] | None = None) -> Series:
    """Share of ``values`` (by weight) at each level of their scales; those without one are left out."""
    filled = [0.0] * LEVELS
    for value, scale, weight in zip(values, scales, weights or [1] * len(values), strict=True):
        if (ratio := value / scale) == ratio:
            filled[level_of(ratio)] += weight
    return _shares(filled)


def _shares(filled: Sequence[float]) -> Series:
    """Each divided by their sum; zeros stay zero."""
    total = sum(filled) or 1
    return [one / total for one in filled]
