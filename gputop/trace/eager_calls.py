"""Calls of ops from Python, by the names that each version of TensorFlow gives them.

Newer versions write ``EagerExecute`` with the stats ``eager_op`` and ``is_func``. Older ones (seen in 2.2 to 2.4)
write ``EagerExecute: <op>``; others only ``EagerKernelExecute`` or ``TFE_Py_FastPathExecute_C``, which do not tell the
op.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from gputop.trace.model import HostEvents
from gputop.trace.nesting import begun_within

_NAMED = re.compile(r"EagerExecute: (\S+)")
_UNNAMED = ("EagerKernelExecute", "TFE_Py_FastPathExecute_C")
_FUNCTION = re.compile(r"__(?:inference|forward|backward)_")
_RUNS_FUNCTION = "FunctionRun"


def add_eager_stats(host: HostEvents, names: Sequence[str], number_of: Callable[[str], int]) -> None:
    """Give such calls the stats of newer versions, where no event has them. ``host`` is sorted by start."""
    if not len(host) or len(host.stats.get("eager_op", ((),))[0]):
        return
    op_of: dict[int, tuple[int, int]] = {}  # by name of the event: its op, and whether that is a function
    for i, name in enumerate(list(names)):
        if match := _NAMED.match(name):
            op_of[i] = number_of(match[1]), int(_FUNCTION.match(match[1]) is not None)
    if op_of:
        rows = np.flatnonzero(np.isin(host.name, list(op_of)))
        values = np.array([op_of[i] for i in host.name[rows].tolist()], np.int64).reshape(-1, 2)
        host.stats["eager_op"], host.stats["is_func"] = (rows, values[:, 0]), (rows, values[:, 1])
        return
    numbers = {name: i for i, name in enumerate(names) if name in (*_UNNAMED, _RUNS_FUNCTION)}
    for name in _UNNAMED:
        if name in numbers:
            rows = np.flatnonzero(host.name == numbers[name])
            runs = np.flatnonzero(host.name == numbers.get(_RUNS_FUNCTION, -1))
            host.stats["eager_op"] = rows, np.full(len(rows), numbers[name], np.int64)
            holds = begun_within(host, rows, host.line[runs], host.start_ns[runs]) > 0
            host.stats["is_func"] = rows, holds.astype(np.int64)
            return
