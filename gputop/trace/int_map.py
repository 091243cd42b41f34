"""Mappings of integers to integers, applied to whole columns at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from gputop.trace.lookups import distinct, values_at
from gputop.trace.model import I64

_NOT_MET = np.iinfo(np.int64).min


class IntMap:
    """A mapping of integers that is applied to an array of keys; absent keys give ``default``."""

    def __init__(self, table: Mapping[int, int], default: int = -1) -> None:
        self._default = default
        self._keys = np.fromiter(table.keys(), np.int64, len(table))
        self._values = np.fromiter(table.values(), np.int64, len(table))
        order = np.argsort(self._keys)
        self._keys, self._values = self._keys[order], self._values[order]
        self._dense: I64 | None = None
        if len(table) and self._keys[0] >= 0 and self._keys[-1] < 4 * len(table) + 1024:
            self._dense = np.full(int(self._keys[-1]) + 2, default, np.int64)
            self._dense[self._keys] = self._values

    def __call__(self, keys: I64) -> I64:
        if self._dense is not None:
            # The last element answers for all keys outside. As unsigned numbers negative keys are outside, too.
            return self._dense.take(np.minimum(keys.astype(np.int64, copy=False).view(np.uint64),
                                               np.uint64(len(self._dense) - 1)).view(np.int64))
        return values_at(self._keys, self._values, keys, self._default)[1]


class LazyTable:
    """A number for each index, found by ``find`` when the index is first met in a column, in their order; index -1 has
    -1."""

    def __init__(self, find: Callable[[int], int]) -> None:
        self._find = find
        self._table = np.array([-1], np.int64)  # the last entry is that of index -1

    def __call__(self, column: npt.NDArray) -> I64:
        if (size := int(column.max(initial=-1)) + 2) > len(self._table):
            table = np.full(2 * size, _NOT_MET, np.int64)
            table[:len(self._table) - 1], table[-1] = self._table[:-1], self._table[-1]
            self._table = table
        numbers = self._table[column]
        if (new := numbers == _NOT_MET).any():
            for i in distinct(column[new]).tolist():
                self._table[i] = self._find(i)
            numbers = self._table[column]
        return numbers
