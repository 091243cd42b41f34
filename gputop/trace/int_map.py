"""A mapping of integers to integers, applied to whole columns at once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gputop.trace.model import I64


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
        if not len(self._keys):
            return np.full(len(keys), self._default, np.int64)
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[at] == keys, self._values[at], self._default)
