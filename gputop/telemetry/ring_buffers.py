"""The arrays behind :mod:`gputop.telemetry.history`: ring buffers of a fixed set of GPUs at several resolutions.

One ring keeps every sample; each tier keeps count, sum, minimum, maximum and a histogram of
levels per slice of time. A slice's number is ``floor(time / length)`` and its row that number
modulo the ring's size, so nothing is shifted and a gap in time costs nothing: a row whose
stored number differs from the requested one is empty.

The finest tier is not written as long as the single samples reach as far back as it would: at one sample a second it
never is, and would be three quarters of what an hour takes.

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
from dataclasses import dataclass
from itertools import chain
from operator import add, truediv
from typing import Any, Literal

LEVELS = 8

# In slices. Slice numbers of times like 0.3 / 0.1 may miss the whole number by a rounding error,
# which stays below this for Unix times and slices of at least 0.1 s.
_SLICE_TOLERANCE = 1e-5

_EMPTY = -2**63  # the slot number of a row that holds nothing
_MAX_COUNT = 2**16 - 1  # readings counted in a slice: the tables hold 16 bits
_CAUGHT_UP_AT_ONCE = 20  # samples that are added to the finest tier with a new one, so that none takes long

Series = list[float]


@dataclass(frozen=True, slots=True)
class Lane:
    """One metric of one GPU over consecutive slices of time, oldest first.

    ``count`` is the number of readings in each slice; ``mean``, ``min`` and ``max`` are in the
    metric's unit, NaN where there is no reading. ``levels[i][k]`` is the share of the readings
    of slice i between k/8 and (k+1)/8 of full scale; a row sums to 1, or to 0 where no reading
    had a scale. ``full_scale`` is 100% in the metric's unit, averaged over the view (for a
    metric without one the largest reading in view); None where it is not known.
    ``resolution_s`` is the length of the stored slices behind it, 0 for single samples.
    """

    start_s: Series
    count: list[int]
    mean: Series
    min: Series
    max: Series
    levels: list[Series]
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

    def starts_s(self) -> Series:
        return [number * self.slice_s for number in range(self.first, self.first + self.slices)]


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
    """``rows`` slices of ``slice_s`` seconds, kept in rows ``offset`` and up of the common tables."""

    slice_s: float
    rows: int
    offset: int


class _Table:
    """Rows of ``width`` numbers of one type (array's code), zero at first. A page takes memory when it is written."""

    def __init__(self, rows: int, width: int, code: Literal["d", "f", "H", "I"]) -> None:
        self.width, self._code = width, code
        self.nbytes = rows * width * array(code).itemsize
        memory = mmap.mmap(-1, max(mmap.PAGESIZE, self.nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages does not know the advice
            # One row written here and there would take 2 MB each, 30 MB at the first sample.
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        self.cells: memoryview[Any] = memoryview(memory)[:self.nbytes].cast(code)

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


@dataclass(slots=True)
class _OpenSlice:
    """The slice of a tier that samples are added to. Lists are quicker to add to than tables, in which it is stored
    once it is over or asked for. The least of nothing is infinite, and so is the largest."""

    slot: int
    row: int
    count: Sequence[float]
    sum: Sequence[float]
    min: Sequence[float]
    max: Sequence[float]
    scale_sum: Sequence[float]
    levels: list[int]
    samples: int = 0
    stored: bool = False


def level_of(ratio: float) -> int:
    """Level 0 to LEVELS-1 of a finite ratio; one above full scale has the highest level."""
    return LEVELS - 1 if ratio >= 1 else int(ratio * LEVELS) if ratio > 0 else 0


class Rings:
    """History of ``gpus`` GPUs. Not locked: :class:`gputop.telemetry.history.History` does that."""

    def __init__(self, gpus: int, columns: Columns, raw_samples: int, tiers: Sequence[tuple[float, int]]) -> None:
        metrics, scales, histogram_columns = len(columns.ids), len(columns.scale_ids), columns.histogram_columns
        self.columns = columns
        self.gpus = gpus
        self.first_s = math.inf
        self.newest_s = -math.inf

        self._raw_samples = raw_samples
        self._times = _Table(raw_samples, 1, "d")
        self._values = _Table(raw_samples, gpus * metrics, "f")
        self._scales = _Table(raw_samples, gpus * scales, "f")
        self._flags = _Table(raw_samples, gpus, "I")
        self._head = 0  # where the next sample goes
        self._kept = 0
        self._overwritten_s = -math.inf  # time of the newest sample the ring has lost

        offset = 0
        self._tiers: list[Tier] = []
        for slice_s, rows in tiers:
            self._tiers.append(Tier(slice_s, rows, offset))
            offset += rows
        self._lagging = 0  # of the single samples the newest ones, which the finest tier does not hold yet
        self._slots = array("q", [_EMPTY]) * offset
        self._open: list[_OpenSlice | None] = [None] * len(self._tiers)
        self._count = _Table(offset, gpus * metrics, "H")
        self._sum = _Table(offset, gpus * metrics, "f")
        self._min = _Table(offset, gpus * metrics, "f")
        self._max = _Table(offset, gpus * metrics, "f")
        self._levels = _Table(offset, gpus * histogram_columns * LEVELS, "H")
        self._scale_sum = _Table(offset, gpus * scales, "f")
        self.reserved_bytes = 8 * offset + sum(t.nbytes for t in vars(self).values() if isinstance(t, _Table))

    # -- writing ------------------------------------------------------------------------------

    def append(self, time_s: float, values: Sequence[float], scales: Sequence[float], flags: Sequence[int]) -> None:
        """Add one sample: the values of all columns GPU by GPU, the scales likewise, flags; NaN is missing."""
        if time_s < self.newest_s:
            self._forget_from(time_s)
        finest = self._tiers[0]
        samples_reach_s = (time_s - self.newest_s) * self._raw_samples  # at this interval
        self.first_s = min(self.first_s, time_s)
        self.newest_s = time_s
        if samples_reach_s < finest.slice_s * finest.rows:
            self._catch_up(_CAUGHT_UP_AT_ONCE)
        elif self._lagging == self._raw_samples:
            self._catch_up(1)
        head = self._head
        if self._kept == self._raw_samples:
            self._overwritten_s = self._times.cells[head]
        self._times.cells[head] = time_s
        self._values[head] = values
        self._scales[head] = scales
        self._flags[head] = flags
        self._head = (head + 1) % self._raw_samples
        self._kept = min(self._raw_samples, self._kept + 1)
        lags = self._lagging > 0 or samples_reach_s >= finest.slice_s * finest.rows
        self._lagging += lags
        # As the tables hold them, in 32 bits: so all resolutions give the same figures.
        self._add_to_tiers(time_s, self._values[head], self._scales[head], range(int(lags), len(self._tiers)))

    def _catch_up(self, samples: int) -> None:
        """Add to the finest tier the oldest ``samples`` of those that it lacks, as far as it reaches."""
        for _ in range(min(samples, self._lagging)):
            row = (self._head - self._lagging) % self._raw_samples
            time_s = self._times.cells[row]
            if time_s >= self._reach_s(self._tiers[0]):
                self._add_to_tiers(time_s, self._values[row], self._scales[row], range(1))
            self._lagging -= 1

    def _add_to_tiers(self, time_s: float, values: Sequence[float], scales: Sequence[float], tiers: range) -> None:
        places, scaled = self._levels_of(values, scales)
        present = [v == v for v in values]
        counted = [v if v == v else 0.0 for v in values]
        low = [v if v == v else math.inf for v in values]
        high = [v if v == v else -math.inf for v in values]
        for number in tiers:
            tier, open_slice = self._tiers[number], self._open[number]
            slot = math.floor(time_s / tier.slice_s)
            if open_slice is None or open_slice.slot != slot:
                self._store(open_slice)
                open_slice = self._open[number] = self._begin(tier, slot)
            if open_slice.samples == _MAX_COUNT:  # a clock that stands still
                continue
            open_slice.samples, open_slice.stored = open_slice.samples + 1, False
            open_slice.count = [*map(add, open_slice.count, present)]
            open_slice.sum = [*map(add, open_slice.sum, counted)]
            open_slice.min = [a if a < b else b for a, b in zip(open_slice.min, low, strict=True)]
            open_slice.max = [a if a > b else b for a, b in zip(open_slice.max, high, strict=True)]
            open_slice.scale_sum = [*map(add, open_slice.scale_sum, scaled)]
            levels = open_slice.levels
            for cell in places:
                levels[cell] += 1

    def _begin(self, tier: Tier, slot: int) -> _OpenSlice:
        """The slice of this number, as far as it is known."""
        row = tier.offset + slot % tier.rows
        if self._slots[row] == slot:
            levels = [*map(int, self._levels[row])]
            return _OpenSlice(slot, row, self._count[row], self._sum[row], self._min[row], self._max[row],
                              self._scale_sum[row], levels, int(max(self._count[row], default=0)))
        self._slots[row] = slot
        width = self._sum.width
        return _OpenSlice(slot, row, [0] * width, [0.0] * width, [math.inf] * width, [-math.inf] * width,
                          [0.0] * self._scale_sum.width, [0] * self._levels.width)

    def _store(self, stored: _OpenSlice | None) -> None:
        if stored is not None and not stored.stored:
            for table, values in ((self._count, stored.count), (self._sum, stored.sum), (self._min, stored.min),
                                  (self._max, stored.max), (self._scale_sum, stored.scale_sum),
                                  (self._levels, stored.levels)):
                table[stored.row] = values
            stored.stored = True

    def _levels_of(self, values: Sequence[float], scales: Sequence[float]) -> tuple[list[int], list[float]]:
        """The cells of the histograms that a sample falls into, and its scales, 0 where its metric has no value: both
        are then means of the same samples."""
        constants, metrics, per_gpu = self.columns.constants, len(self.columns.ids), len(self.columns.scale_ids)
        places: list[int] = []
        scaled: list[float] = []
        first_cell = 0
        for gpu in range(self.gpus):
            of_gpu = scales[gpu * per_gpu: (gpu + 1) * per_gpu]
            ratios = [*map(truediv, values[gpu * metrics: (gpu + 1) * metrics], (*constants, *of_gpu))]
            for ratio in ratios:
                if ratio == ratio:
                    places.append(first_cell + level_of(ratio))
                first_cell += LEVELS
            scaled += [scale if ratio == ratio else 0.0
                       for scale, ratio in zip(of_gpu, ratios[len(constants):], strict=True)]
        return places, scaled

    def _forget_from(self, time_s: float) -> None:
        """Drop what is later than ``time_s``, to which the clock was set back: it would hide the next samples.

        Slices that began before ``time_s`` stay.
        """
        oldest = self._head - self._kept
        self._kept = sum(stop - start for start, stop in self._raw_parts(-math.inf, time_s))
        self._head = (oldest + self._kept) % self._raw_samples
        self._lagging = min(self._lagging, self._kept)
        for number, tier in enumerate(self._tiers):
            self._store(self._open[number])
            self._open[number] = None
            last = math.floor(time_s / tier.slice_s)
            for row in range(tier.offset, tier.offset + tier.rows):
                if self._slots[row] > last:
                    self._slots[row] = _EMPTY
        self.first_s = min(self.first_s, time_s)

    # -- reading ------------------------------------------------------------------------------

    def _raw_parts(self, begin_s: float, end_s: float, closed: bool = False) -> list[tuple[int, int]]:
        """The index ranges with begin_s <= time < end_s (<= with ``closed``), in order of time."""
        size, times = self._raw_samples, self._times.cells
        oldest = (self._head - self._kept) % size
        stop = oldest + self._kept
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
        return self._times.column(0, self._raw_parts(begin_s, end_s, closed=True))

    def values(self, gpu: int, column: int, begin_s: float, end_s: float) -> Series:
        """The readings at :meth:`times`."""
        cell = gpu * len(self.columns.ids) + column
        return self._values.column(cell, self._raw_parts(begin_s, end_s, closed=True))

    def all_values(self, column: int, begin_s: float, end_s: float, scale: bool = False) -> list[Series]:
        """The readings at :meth:`times` of each GPU; with ``scale`` those of ``scale_ids[column]``."""
        parts, table = self._raw_parts(begin_s, end_s, closed=True), self._scales if scale else self._values
        step = table.width // self.gpus
        return [table.column(gpu * step + column, parts) for gpu in range(self.gpus)]

    def tier_means(self, column: int, slice_s: float, slots: range) -> list[Series]:
        """The means of each GPU in these slices of the tier with slices of that length; NaN without a reading, and
        where no tier has such slices."""
        number = next((i for i, tier in enumerate(self._tiers) if tier.slice_s == slice_s), None)
        if number is None:
            return [[math.nan] * len(slots)] * self.gpus
        tier = self._tiers[number]
        if number == 0:
            self._catch_up(self._lagging)
        self._store(self._open[number])
        width, step = self._sum.width, len(self.columns.ids)
        cells = [row * width + column if self._slots[row := tier.offset + slot % tier.rows] == slot else None
                 for slot in slots]
        counts, sums = self._count.cells, self._sum.cells
        return [[sums[cell + first] / n if cell is not None and (n := counts[cell + first]) else math.nan
                 for cell in cells]
                for first in range(0, self.gpus * step, step)]

    def flags(self, gpu: int, begin_s: float, end_s: float) -> list[int]:
        """The flags at :meth:`times`."""
        return self._flags.column(gpu, self._raw_parts(begin_s, end_s, closed=True))

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
        if self._lagging and raw_covers:
            covering = [tier for tier in covering if tier is not self._tiers[0]]
        elif self._tiers[0] in covering:
            self._catch_up(self._lagging)
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
        constants, histogram_columns = self.columns.constants, self.columns.histogram_columns
        values = self._values.column(gpu * len(self.columns.ids) + column, parts)
        own_scale = len(constants) <= column < histogram_columns
        scales = (self._scales.column(gpu * len(self.columns.scale_ids) + column - len(constants), parts) if own_scale
                  else [math.nan] * len(values))

        slices: list[Series] = [[] for _ in range(grid.slices)]
        slice_scales: list[Series] = [[] for _ in range(grid.slices)]
        for time_s, value, scale in zip(self._times.column(0, parts), values, scales, strict=True):
            slice_index = math.floor(time_s / grid.slice_s + _SLICE_TOLERANCE) - grid.first
            if value == value and 0 <= slice_index < grid.slices:
                slices[slice_index].append(value)
                slice_scales[slice_index].append(scale)

        high = [max(one, default=math.nan) for one in slices]
        if column < len(constants):
            mean_scale: float | None = constants[column]
        elif own_scale:
            present = [scale for scale in chain.from_iterable(slice_scales) if scale == scale]
            mean_scale = math.fsum(present) / len(present) if present else None
        else:
            mean_scale = full_scale or _largest(high)
        if not own_scale:
            slice_scales = [[mean_scale or 1.0] * len(one) for one in slices]  # without a scale all values are zero
        return Lane(grid.starts_s(), [*map(len, slices)], [sum(one) / len(one) if one else math.nan for one in slices],
                    [min(one, default=math.nan) for one in slices], high,
                    [_histogram(one, scale) for one, scale in zip(slices, slice_scales, strict=True)], mean_scale, 0.0)

    def _lane_of_tier(self, gpu: int, column: int, grid: Grid, full_scale: float | None, tier: Tier) -> Lane:
        constants, histogram_columns = self.columns.constants, self.columns.histogram_columns
        self._store(self._open[self._tiers.index(tier)])
        rows = [*self._tier_rows(grid, tier)]
        width, offset = self._sum.width, gpu * len(self.columns.ids) + column
        counts, sums, least, most = self._count.cells, self._sum.cells, self._min.cells, self._max.cells
        count, mean, low, high = [], [], [], []
        for group in rows:
            cells = [cell for row in group if counts[cell := row * width + offset]]
            total = sum([counts[cell] for cell in cells])
            count.append(total)
            mean.append(sum([sums[cell] for cell in cells]) / total if total else math.nan)
            low.append(min([least[cell] for cell in cells], default=math.nan))
            high.append(max([most[cell] for cell in cells], default=math.nan))

        scale: float | None
        levels: list[Series] = []
        if column >= histogram_columns:
            # A metric without a scale has no histogram: each stored slice counts at its mean.
            scale = full_scale or _largest(high)
            for group in rows:
                means = [(sums[row * width + offset] / n, n) for row in group if (n := counts[row * width + offset])]
                levels.append(_histogram([v for v, _ in means], [scale or 1.0] * len(means), [n for _, n in means]))
            return Lane(grid.starts_s(), count, mean, low, high, levels, scale, tier.slice_s)

        shares, first, step = self._levels.cells, (gpu * histogram_columns + column) * LEVELS, self._levels.width
        filled = [[sum(level) for level in zip(*(shares[row * step + first: row * step + first + LEVELS].tolist()
                                                 for row in group), strict=True)] or [0] * LEVELS for group in rows]
        if column < len(constants):
            scale = constants[column]
        else:
            per_gpu = len(self.columns.scale_ids)
            column_of_scale = gpu * per_gpu + column - len(constants)
            readings = sum(map(sum, filled))
            scale = sum(self._scale_sum.cells[row * self._scale_sum.width + column_of_scale]
                        for row in chain.from_iterable(rows))
            scale = scale / readings if readings else None
        return Lane(grid.starts_s(), count, mean, low, high, [*map(_shares, filled)], scale, tier.slice_s)

    def _tier_rows(self, grid: Grid, tier: Tier) -> Iterator[list[int]]:
        """Yield, for each slice of the grid, the rows of the tier that belong to it and hold something."""
        coarse = grid.slice_s <= tier.slice_s * (1 - _SLICE_TOLERANCE)
        ratio = grid.slice_s / tier.slice_s
        for number in range(grid.first, grid.first + grid.slices):
            if not coarse:
                # A stored slice belongs to the slice it starts in: exact where the lengths divide.
                slots = range(math.ceil(number * ratio - _SLICE_TOLERANCE),
                              math.ceil((number + 1) * ratio - _SLICE_TOLERANCE))
            elif self.first_s - grid.slice_s < number * grid.slice_s <= self.newest_s:
                # Finer than the stored slices: each slice shows the stored one it lies in.
                slot = math.floor((number + 0.5) * ratio)
                slots = range(slot, slot + 1)
            else:
                slots = range(0)
            yield [row for slot in slots if self._slots[row := tier.offset + slot % tier.rows] == slot]


def lane_of(grid: Grid, values: Sequence[Series]) -> Lane:
    """The lane of single readings of a ratio, those of each slice of the grid."""
    nothing = math.nan
    mean = [sum(readings) / len(readings) if readings else nothing for readings in values]
    return Lane(grid.starts_s(), [len(readings) for readings in values], mean,
                [min(readings, default=nothing) for readings in values],
                [max(readings, default=nothing) for readings in values],
                [_histogram(readings, [1.0] * len(readings)) for readings in values], 1.0, 0.0)


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
