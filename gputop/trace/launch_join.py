"""The join of device events with the host calls that launched them, by correlation id."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gputop.trace.int_map import IntMap
from gputop.trace.model import I32, I64, DeviceEvents

# Correlation ids are CUPTI's uint32 counters. Larger ones are not joined, so that a key of
# id and device fits an int64.
_MAX_CORRELATION = 1 << 40
_DEVICES = 1 << 20
_SPARSE = 4  # as many ids as calls, and more, are too many for a table


class Launches:
    """Host calls by correlation id; of several with the same id the one that starts first.

    Device ids (-1: unknown) are part of the key if all of them are among ``devices``, the numbers of the
    trace's own GPUs. ROCm's tracer numbers devices differently on the host's side; there the correlation id
    alone is the key, which is unique in a process.
    """

    def __init__(self, correlation: I64, device_id: I64, start_ns: I64, devices: Iterable[int]) -> None:
        has_device = device_id >= 0
        ours = IntMap(dict.fromkeys(devices, 1), 0)(device_id) == 1
        by_device = bool(has_device.any() and ours[has_device].all())
        self._exact = _Keys(correlation, device_id, start_ns) if by_device else None
        plain = np.where(has_device, -1, correlation) if by_device else correlation
        self._plain = None if by_device and has_device.all() else _Keys(plain, None, start_ns)

    def find(self, correlation: I64, device_id: I64) -> npt.NDArray[np.intp]:
        """For each device event the row of the call that launched it, or -1."""
        found = np.full(len(correlation), -1, np.intp) if self._plain is None else self._plain.find(correlation, None)
        if self._exact is None:
            return found
        exact = self._exact.find(correlation, device_id)
        return exact if self._plain is None else np.where(exact >= 0, exact, found)


def set_launches(
    device: DeviceEvents, call: npt.NDArray[np.intp], start_ns: I64, end_ns: I64, line: I64 | I32,
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Set by which call each event was launched. ``call`` is a row of the other columns, as :meth:`Launches.find` has
    found it for each event, or -1. Returns the rows of the events that have one, and theirs."""
    rows = np.flatnonzero(call >= 0)
    call = call[rows]
    device.launch_ns[rows], device.launch_end_ns[rows] = start_ns[call], end_ns[call]
    device.launch_line[rows] = line[call]
    return rows, call


class _Keys:
    """Rows by (correlation, device): as a table by the id where ids are distinct and lie close together, as CUPTI
    counts them; else as one sorted integer.
    """

    def __init__(self, correlation: I64, device_id: I64 | None, start_ns: I64) -> None:
        keys = _key(correlation, device_id)
        rows = np.flatnonzero(keys >= 0)
        self._device_id = device_id
        self._table = _Table.of(correlation, rows)
        if self._table is not None:
            return
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
        at = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        return np.where((self._keys[at] == wanted) & (wanted >= 0), self._rows[at], -1)


class _Table(NamedTuple):
    """For each id from ``first`` on its row, -1 where there is none; the last entry answers for all ids outside."""

    first: int
    rows: I64

    @classmethod
    def of(cls, ids: I64, rows: I64) -> _Table | None:
        """None where ids lie far apart or are not distinct."""
        if not len(rows):
            return None
        own = ids[rows]
        first, last = int(own.min()), int(own.max())
        if last - first >= _SPARSE * len(rows):
            return None
        table = np.full(last - first + 2, -1, np.int64)
        table[own - first] = rows
        return cls(first, table) if np.count_nonzero(table >= 0) == len(rows) else None

    def find(self, ids: I64) -> npt.NDArray[np.intp]:
        outside = np.uint64(len(self.rows) - 1)
        return self.rows.take(np.minimum((ids - self.first).view(np.uint64), outside).view(np.int64))


def _key(correlation: I64, device_id: I64 | None) -> I64:
    """-1 where there is no usable id."""
    usable = (correlation > 0) & (correlation < _MAX_CORRELATION)
    if device_id is None:
        return np.where(usable, correlation, -1)
    usable &= (device_id >= 0) & (device_id < _DEVICES)
    return np.where(usable, correlation * _DEVICES + device_id, -1)
