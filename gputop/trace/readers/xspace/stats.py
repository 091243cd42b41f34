"""The stats of a chunk of an XSpace's events as full columns, names resolved."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from gputop.trace import kernel_names
from gputop.trace.builder import Names
from gputop.trace.int_map import IntMap
from gputop.trace.lookups import distinct
from gputop.trace.model import F64, I32, I64, DeviceEvents
from gputop.trace.readers.xspace.xplane import Chunk, Stats, XPlane

_Column = TypeVar("_Column", I64, F64)


def lookups(plane: XPlane, names: Names) -> tuple[IntMap, IntMap]:
    """Maps from event metadata ids, and from stat metadata ids used as references, to indices of names."""
    return (IntMap({i: names[name] for i, name in plane.event_names.items()}),
            IntMap({i: names[name] for i, name in plane.stat_names.items()}))


def indices_in(column: I32 | I64) -> list[int]:
    """The distinct indices in order, without -1."""
    return [i for i in distinct(column).tolist() if i >= 0]


def integers(chunk: Chunk, stat: str, n: int) -> I64:
    """A stat as a full column, -1 where absent."""
    return _set(np.full(n, -1, np.int64), chunk, stat, Stats.integers)


def floats(chunk: Chunk, stat: str, n: int) -> F64:
    """A stat as a full column, NaN where absent."""
    return _set(np.full(n, np.nan), chunk, stat, Stats.floats)


def strings(chunk: Chunk, stat: str, n: int, names: Names, references: IntMap) -> I64:
    """A stat as indices of names, a full column, -1 where absent."""
    return _set(np.full(n, -1, np.int64), chunk, stat, lambda some: some.strings(names, references))


def _set(out: _Column, chunk: Chunk, stat: str, read: Callable[[Stats], tuple[I64, _Column]]) -> _Column:
    if stat in chunk.stats:
        rows, values = read(chunk.stats[stat])
        out[rows] = values
    return out


def whole_numbers(stats: Stats, names: Names, references: IntMap) -> tuple[I64, I64]:
    """Rows and values of integers, also of those that TraceMe wrote as strings."""
    rows, values = stats.integers()
    text_rows, texts = stats.strings(names, references)
    numbers = [(row, int(names.list[i])) for row, i in zip(text_rows.tolist(), texts.tolist(), strict=True)
               if re.fullmatch(r"-?\d{1,18}", names.list[i])]
    if numbers:
        extra = np.array(numbers, np.int64)
        rows, values = np.concatenate([rows, extra[:, 0]]), np.concatenate([values, extra[:, 1]])
        order = np.argsort(rows, kind="stable")
        rows, values = rows[order], values[order]
    return rows, values


def set_copies(out: DeviceEvents, details: I32 | I64, names: Names) -> None:
    """Set bytes and both ends of copies, from CUPTI's ``memcpy_details``."""
    rows = np.flatnonzero(details >= 0)
    if len(rows):
        texts, where = np.unique(details[rows], return_inverse=True)
        parsed = [kernel_names.copy_details(names.list[i]) for i in texts.tolist()]
        out.bytes[rows], out.src[rows], out.dst[rows] = np.array(parsed, np.int64).T[:, where]


def op_names(chunk: Chunk, n: int, names: Names, references: IntMap) -> I64:
    """``tf_op``, or ``module/op`` for XLA, whose tf_op is always "XlaModule:"; or what older TensorFlow annotated."""
    op = strings(chunk, "tf_op", n, names, references)
    for nothing in ("", "XlaModule:"):
        op[op == names[nothing]] = -1
    hlo = strings(chunk, "hlo_op", n, names, references)
    if "annotation" in chunk.stats and ((op < 0) & (hlo < 0)).any():
        texts = strings(chunk, "annotation", n, names, references)
        op_of = np.full(len(names.list) + 1, -1, np.int64)  # the extra last entry answers index -1
        for i in indices_in(texts):
            annotated_op = kernel_names.op_of_annotation(names.list[i])
            op_of[i] = names[annotated_op] if annotated_op else -1
        op = np.where((op < 0) & (hlo < 0), op_of[texts], op)
    if "hlo_op" not in chunk.stats:
        return op
    module = strings(chunk, "hlo_module", n, names, references)
    rows = np.flatnonzero((op < 0) & (hlo >= 0))
    if len(rows):
        pair = (module[rows] + 1) * (len(names.list) + 1) + hlo[rows]
        _, first, where = np.unique(pair, return_index=True, return_inverse=True)
        joined = [names[names.list[m] + "/" + names.list[h] if m >= 0 else names.list[h]]
                  for m, h in zip(module[rows[first]].tolist(), hlo[rows[first]].tolist(), strict=True)]
        op[rows] = np.array(joined, np.int64)[where]
    return op
