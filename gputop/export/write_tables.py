"""Tables for other tools, as files: SQLite and Parquet have the same tables, each in its own way. Neither holds more
of them in memory than a batch of rows. CSV is for a table of the screen."""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gputop.core.errors import GputopError
from gputop.core.files import Folder, temporary_place
from gputop.core.own_program import install_command
from gputop.text.units import printable

if TYPE_CHECKING:
    import pyarrow

_COMPRESSION = "zstd"
# Where a formula would begin: at the start of a cell, and where a spreadsheet that is set to ; or tabs begins another.
_FORMULA = re.compile(r"(?:^|(?<=[;\t\r\n]))(?=[=+\-@\t\r\n＝＋－＠])")


# -- tables -----------------------------------------------------------------------------------------

# Rows that are written at once: what a writer holds in memory, and a row group of Parquet.
BATCH_ROWS = 1 << 16

# A column of a batch. Integers of an array are -1 where they are not known, unless the column is never NULL.
Values = list[Any] | npt.NDArray[Any]
Batch = Sequence[Values]


class SqlColumn(NamedTuple):
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


class SqlTable(Struct, frozen=True):
    """``rows`` says what a row is, for docs/tasks/convert.md."""

    name: str
    rows: str
    columns: tuple[SqlColumn, ...]

    @classmethod
    def of(cls, name: str, rows: str, columns: str) -> SqlTable:
        """``columns`` as SQL declares them: "id INTEGER PRIMARY KEY, name TEXT"."""
        parts = (column.split(" ", 2) for column in columns.split(", "))
        return cls(name, rows, tuple(SqlColumn(part[0], part[1], "".join(part[2:])) for part in parts))

    @property
    def declaration(self) -> str:
        return f"CREATE TABLE {self.name} ({', '.join(' '.join(column).rstrip() for column in self.columns)})"


NAMES = SqlTable.of("names", "a name that other tables refer to; only in SQLite",
                    "id INTEGER PRIMARY KEY, name TEXT NOT NULL")


class SqlTables(Struct, frozen=True):
    """Tables with their rows, some of them at a time. ``names`` is what columns of names refer to; ``views`` is SQL."""

    tables: Iterator[tuple[SqlTable, Iterator[Batch]]]
    names: Sequence[str] = ()
    views: str = ""


def batches_of(rows: int) -> Iterator[slice]:
    return (slice(i, min(i + BATCH_ROWS, rows)) for i in range(0, rows, BATCH_ROWS))


# -- files ------------------------------------------------------------------------------------------


def write_sqlite(made: SqlTables, file: BinaryIO) -> None:
    """SQLite makes the file in the folder for temporary files first. Raises OSError where there is no room."""
    with tempfile.TemporaryDirectory(prefix="gputop-", dir=temporary_place()) as folder:
        path = Path(folder) / "tables.sqlite"
        try:
            _fill(made, path)
        except sqlite3.Error as error:
            raise OSError(f"SQLite, in {folder}: {error}") from error
        with path.open("rb") as whole:
            shutil.copyfileobj(whole, file)


def _fill(made: SqlTables, path: Path) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; BEGIN")
        if made.names:
            connection.execute(NAMES.declaration)
            connection.executemany("INSERT INTO names VALUES (?, ?)", enumerate(made.names))
        for table, batches in made.tables:
            connection.execute(table.declaration)
            insert = f"INSERT INTO {table.name} VALUES ({', '.join('?' * len(table.columns))})"
            for batch in batches:
                connection.executemany(insert, zip(*map(SqlColumn.known, table.columns, batch), strict=True))
        connection.execute("COMMIT")
        connection.executescript(made.views)
    finally:
        connection.close()


def without_formulas(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """The row with an apostrophe before texts that a spreadsheet would take for a formula, such as a name of a GPU that
    somebody wrote into a recording; numbers, below zero as well, stay as they are."""
    return tuple([_FORMULA.sub("'", cell) if isinstance(cell, str) else cell for cell in row])


def need_pyarrow() -> None:
    """Raises GputopError where pyarrow is not installed. Cheap: nothing is imported."""
    if find_spec("pyarrow") is None:
        raise GputopError("pyarrow, which writes Parquet, is not installed", install_command("parquet"))


def write_parquet_folder(made: SqlTables, folder: Folder) -> None:
    """A file of each table. Raises OSError."""
    for table, batches in made.tables:
        with os.fdopen(folder.create(f"{table.name}.parquet"), "wb") as file:
            _write_parquet(table, batches, made.names, file)


def write_parquet(made: SqlTables, file: BinaryIO) -> None:
    """The only table."""
    ((table, batches),) = made.tables
    _write_parquet(table, batches, made.names, file)


def _write_parquet(table: SqlTable, batches: Iterator[Batch], names: Any, file: BinaryIO) -> None:
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema([pyarrow.field(c.name, _arrow_type(c), nullable=c.may_be_null) for c in table.columns])
    texts = np.asarray(names, object)
    with pyarrow.parquet.ParquetWriter(file, schema, compression=_COMPRESSION) as writer:
        for batch in batches:
            arrays = [_arrow(column, values, texts) for column, values in zip(table.columns, batch, strict=True)]
            writer.write_batch(pyarrow.record_batch(arrays, schema))  # a row group


def _arrow_type(column: SqlColumn) -> pyarrow.DataType:
    import pyarrow

    if column.is_name:
        return pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    return {"INTEGER": pyarrow.int64(), "REAL": pyarrow.float64(), "TEXT": pyarrow.string()}[column.type]


def _arrow(column: SqlColumn, values: Values, texts: Any) -> pyarrow.Array:
    import pyarrow

    if isinstance(values, list):
        return pyarrow.array(values, _arrow_type(column))
    present = values != -1 if column.may_be_null else np.ones(len(values), bool)
    if not column.is_name:
        return pyarrow.array(values, _arrow_type(column), mask=~present)
    used, places = np.unique(values[present], return_inverse=True)  # a row group has the names that are in it
    index = np.zeros(len(values), np.int32)
    index[present] = places
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array(index, mask=~present),
                                               pyarrow.array(texts[used].tolist(), pyarrow.string()))


def csv_text(titles: Sequence[str], rows: Iterable[Sequence[str | float | None]]) -> str:
    """Numbers stay as they are, in base units; names come from outside and lose control characters."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(titles)
    writer.writerows(without_formulas(tuple(printable(value) if isinstance(value, str) else value for value in row))
                     for row in rows)
    return out.getvalue()
