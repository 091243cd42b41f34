"""The join of device events with the host calls that launched them, by correlation id."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gputop.trace.lookups import Mask, distinct, rows_of
from gputop.trace.model import I32, I64, DeviceEvents

# Correlation ids are CUPTI's uint32 counters. Larger ones are not joined, so that a key of id and device fits an int64.
_MAX_CORRELATION = 1 << 40
_DEVICES = 1 << 20
_SPARSE = 4  # as many ids as calls, and more, are too many for a table


class Launches:
    """Host calls by correlation id; of several with the same id the one that starts first.

    Device ids (-1: unknown) are part of the key if all of them are among ``devices``, the numbers of the
    trace's own GPUs. ROCm's tracer numbers devices differently on the host's side; there the correlation id
    alone is the key, which is unique in a process.
    """

    def __init__(self, correlation: I64, device_id: I32 | I64, start_ns: I64, devices: Iterable[int]) -> None:
        numbers = set(distinct(np.maximum(device_id, -1)).tolist()) - {-1}
        by_device = bool(numbers) and numbers <= set(devices)
        self._exact = _Keys(correlation, device_id, start_ns) if by_device else None
        self._plain = None
        if not by_device:
            self._plain = _Keys(correlation, None, start_ns)
        elif (without := device_id < 0).any():
            self._plain = _Keys(np.where(without, correlation, -1), None, start_ns)

    def find(self, correlation: I64, device_id: I64) -> npt.NDArray[np.intp]:
        """Row of the call that launched each device event, or -1."""
        row = np.full(len(correlation), -1, np.intp) if self._plain is None else self._plain.find(correlation, None)
        if self._exact is None:
            return row
        exact = self._exact.find(correlation, device_id)
        return exact if self._plain is None else np.where(exact >= 0, exact, row)


def set_launches(device: DeviceEvents, call: I64, start_ns: I64, end_ns: I64, line: I32) -> I64:
    """Set by which call each event was launched, and return the rows of those that have one. ``call`` is a row of the
    other columns for each event, or -1."""
    rows = np.flatnonzero(call >= 0)
    call = call[rows]
    device.launch_ns[rows], device.launch_end_ns[rows] = start_ns[call], end_ns[call]
    device.launch_line[rows] = line[call]
    return rows


class _Keys:
    """Rows by (correlation, device): as a table by the id where ids are distinct and lie close together, as CUPTI
    counts them; else as one sorted integer.
    """

    def __init__(self, correlation: I64, device_id: I32 | I64 | None, start_ns: I64) -> None:
        usable = _usable(correlation, device_id)
        self._device_id = device_id
        self._table = _Table.of(correlation, usable)
        if self._table is not None:
            return
        keys, rows = _key(correlation, device_id), np.flatnonzero(usable)
        # Ids count up on each thread: the stable sort makes use of that.
        self._rows = rows[np.argsort(keys[rows], kind="stable")]
        self._keys = keys[self._rows]
        if (self._keys[1:] == self._keys[:-1]).any():
            self._rows = rows[np.lexsort((start_ns[rows], keys[rows]))]

    def find(self, correlation: I64, device_id: I64 | None) -> npt.NDArray[np.intp]:
        if self._table is not None:
            row = self._table.find(correlation)
            return row if self._device_id is None else np.where(self._device_id[row] == device_id, row, -1)
        wanted = _key(correlation, device_id)
        if not len(self._keys):
            return np.full(len(wanted), -1, np.intp)
        index = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        return np.where((self._keys[index] == wanted) & (wanted >= 0), self._rows[index], -1)


class _Table(Struct, frozen=True):
    """Row of each id from ``first`` on, -1 where there is none; the last entry answers for all ids outside."""

    first: int
    rows: I32

    @classmethod
    def of(cls, ids: I64, usable: Mask) -> _Table | None:
        """None where ids lie far apart or are not distinct."""
        rows = rows_of(usable)
        usable_ids = ids[rows]
        first, last = (int(usable_ids.min()), int(usable_ids.max())) if len(usable_ids) else (0, 0)
        if last - first >= _SPARSE * len(usable_ids):
            return None
        table = np.full(last - first + 2, -1, np.int32)
        table[usable_ids - first] = np.arange(len(ids))[rows]
        return cls(first, table) if np.count_nonzero(table >= 0) == len(usable_ids) else None

    def find(self, ids: I64) -> npt.NDArray[np.intp]:
        outside = np.uint64(len(self.rows) - 1)
        return self.rows.take(np.minimum((ids - self.first).view(np.uint64), outside).view(np.int64)).astype(np.intp)


def _usable(correlation: I64, device_id: I32 | I64 | None) -> Mask:
    usable: Mask = (correlation > 0) & (correlation < _MAX_CORRELATION)
    return usable if device_id is None else usable & (device_id >= 0) & (device_id < _DEVICES)


def _key(correlation: I64, device_id: I32 | I64 | None) -> I64:
    """-1 where there is no usable id."""
    keys = correlation if device_id is None else correlation * _DEVICES + device_id
    return np.where(_usable(correlation, device_id), keys, -1)
