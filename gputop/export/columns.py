"""Parts of a table for other tools. SQLite, Parquet and CSV write the same tables, each in its own way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

# Rows that are written at once: what a writer holds in memory, and a row group of Parquet.
BATCH_ROWS = 1 << 16

# A column of a batch. Integers of an array are -1 where they are not known, unless the column is never NULL.
Values = list[Any] | npt.NDArray[Any]
Batch = Sequence[Values]


class Column(NamedTuple):
    """``type`` is SQLite's: INTEGER, REAL or TEXT; ``constraint`` is SQL. What refers to ``names`` is an index into the
    names of the trace: SQLite has them in a table, Parquet in a dictionary of the column."""

    name: str
    type: str
    constraint: str

    @property
    def is_name(self) -> bool:
        return self.constraint == "REFERENCES names"

    @property
    def may_be_null(self) -> bool:
        return not self.constraint.startswith(("NOT NULL", "PRIMARY KEY"))

    def known(self, values: Values) -> list[Any]:
        """The values as Python's, None for what is not known."""
        if isinstance(values, list):
            return values
        out = values.tolist()
        if self.may_be_null:
            for i in np.flatnonzero(values == -1).tolist():
                out[i] = None
        return out


class Table(Struct, frozen=True):
    """``rows`` says what a row is, for docs/tasks/convert.md."""

    name: str
    rows: str
    columns: tuple[Column, ...]

    @classmethod
    def of(cls, name: str, rows: str, columns: str) -> Table:
        """``columns`` as SQL declares them: "id INTEGER PRIMARY KEY, name TEXT"."""
        parts = (column.split(" ", 2) for column in columns.split(", "))
        return cls(name, rows, tuple(Column(part[0], part[1], "".join(part[2:])) for part in parts))

    @property
    def declaration(self) -> str:
        """Return the declaration in SQL."""
        return f"CREATE TABLE {self.name} ({', '.join(' '.join(column).rstrip() for column in self.columns)})"


NAMES = Table.of("names", "a name, which other tables refer to; only in SQLite",
                 "id INTEGER PRIMARY KEY, name TEXT NOT NULL")


class Tables(Struct, frozen=True):
    """Tables with their rows, some of them at a time. ``names`` is what columns of names refer to; ``views`` is SQL."""

    tables: Iterator[tuple[Table, Iterator[Batch]]]
    names: Sequence[str] = ()
    views: str = ""


def batches_of(rows: int) -> Iterator[slice]:
    return (slice(i, min(i + BATCH_ROWS, rows)) for i in range(0, rows, BATCH_ROWS))
