"""A trace and its analysis as an SQLite file, for SQL, pandas or DuckDB. The schema is in docs/CONVERT.md."""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy.typing as npt

from gputop.advice.trace.facts import TraceFacts
from gputop.core.version import __version__
from gputop.trace.model import Kind, MemoryKind, Trace

SCHEMA = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT);
CREATE TABLE names (id INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE gpus (id INTEGER PRIMARY KEY, host TEXT, ordinal INTEGER, rank INTEGER, name TEXT, sms INTEGER,
                   memory_bytes INTEGER);
CREATE TABLE lines (id INTEGER PRIMARY KEY, host TEXT, gpu INTEGER REFERENCES gpus, name TEXT);
CREATE TABLE device_events (id INTEGER PRIMARY KEY, gpu INTEGER NOT NULL REFERENCES gpus, line INTEGER REFERENCES lines,
                            kind TEXT NOT NULL, name INTEGER REFERENCES names, op INTEGER REFERENCES names,
                            start_ns INTEGER NOT NULL, end_ns INTEGER NOT NULL, launch_line INTEGER REFERENCES lines,
                            launch_ns INTEGER, launch_end_ns INTEGER, correlation INTEGER, bytes INTEGER,
                            source_memory TEXT, target_memory TEXT);
CREATE TABLE host_events (id INTEGER PRIMARY KEY, line INTEGER REFERENCES lines, name INTEGER REFERENCES names,
                          start_ns INTEGER NOT NULL, end_ns INTEGER NOT NULL);
CREATE TABLE host_stats (event INTEGER REFERENCES host_events, stat TEXT, value INTEGER, text TEXT);
CREATE TABLE allocator_events (time_ns INTEGER NOT NULL, allocator INTEGER REFERENCES names, in_use_bytes INTEGER,
                               available_bytes INTEGER, peak_bytes INTEGER, op INTEGER REFERENCES names);
CREATE TABLE steps (number INTEGER PRIMARY KEY, start_ns INTEGER NOT NULL, end_ns INTEGER NOT NULL);
CREATE TABLE findings (rank INTEGER PRIMARY KEY, id TEXT, severity TEXT, title TEXT, why TEXT, action TEXT,
                       saves_ratio REAL, gain_by TEXT);
CREATE VIEW gpu_work AS
  SELECT e.id, g.host, g.ordinal AS gpu, l.name AS stream, e.kind, n.name, o.name AS op, e.start_ns, e.end_ns,
         e.end_ns - e.start_ns AS duration_ns, e.launch_ns, e.bytes
  FROM device_events e JOIN gpus g ON g.id = e.gpu LEFT JOIN lines l ON l.id = e.line
       LEFT JOIN names n ON n.id = e.name LEFT JOIN names o ON o.id = e.op;
CREATE VIEW host_work AS
  SELECT e.id, l.host, l.name AS thread, n.name, e.start_ns, e.end_ns, e.end_ns - e.start_ns AS duration_ns
  FROM host_events e LEFT JOIN lines l ON l.id = e.line LEFT JOIN names n ON n.id = e.name;
"""
_PIECE_BYTES = 1 << 20
# Stats of host events whose value is a name (HostEvents).
_TEXTS = frozenset(("eager_op", "tf_function_call", "function_name", "name", "shapes"))


def pieces(facts: TraceFacts) -> Iterator[bytes]:
    """The file, a piece at a time. SQLite writes it to the folder for temporary files first. Raises OSError where
    there is no room."""
    with tempfile.TemporaryDirectory(prefix="gputop-") as folder:
        path = Path(folder) / "trace.sqlite"
        try:
            _write(facts, path)
        except sqlite3.Error as error:
            raise OSError(f"SQLite, in {folder}: {error}") from error
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece


def _write(facts: TraceFacts, path: Path) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; BEGIN;" + SCHEMA)
        for table, rows in _tables(facts):
            first = next(rows, None)
            if first is not None:
                places = ", ".join("?" * len(first))
                connection.executemany(f"INSERT INTO {table} VALUES ({places})", chain([first], rows))
        connection.execute("COMMIT")
    finally:
        connection.close()


def _tables(facts: TraceFacts) -> Iterator[tuple[str, Iterator[tuple[Any, ...]]]]:
    trace = facts.trace
    yield "about", iter(_about(facts))
    yield "names", enumerate(trace.names)
    yield "gpus", ((i, g.host, g.ordinal, g.rank, g.name or None, g.sms, g.memory_bytes)
                   for i, g in enumerate(trace.gpus))
    yield "lines", ((i, line.host, None if line.gpu < 0 else line.gpu, line.name) for i, line in enumerate(trace.lines))
    yield "device_events", _device(trace)
    host, allocator = trace.host, trace.allocator
    yield "host_events", _numbered(host.line, host.name, host.start_ns, host.end_ns)
    yield "host_stats", _host_stats(trace)
    yield "allocator_events", zip(allocator.time_ns.tolist(), *(
        _known(column) for column in (allocator.allocator, allocator.in_use_bytes, allocator.available_bytes,
                                      allocator.peak_bytes, allocator.tf_op)), strict=True)
    yield "steps", ((i, a, b) for i, (a, b) in enumerate(facts.steps.bounds_ns if facts.steps is not None else ()))
    yield "findings", ((i, f.id, f.severity, f.title, f.why, f.action, f.gain.step_time, f.gain.by or None)
                       for i, f in enumerate(facts.analysis.findings))


def _about(facts: TraceFacts) -> list[tuple[str, str]]:
    trace = facts.trace
    return [("gputop", __version__), ("format", trace.format), ("simulated", "yes" if trace.simulated else "no"),
            ("origin_unix_ns", str(trace.origin_ns)), ("analysis", json.dumps(facts.analysis.to_json()))]


def _device(trace: Trace) -> Iterator[tuple[Any, ...]]:
    d = trace.device
    ends = _known(d.launch_end_ns) if len(d.launch_end_ns) == len(d) else repeat(None, len(d))
    kinds = [kind.name.lower() for kind in Kind]
    memories = [None, *(kind.name.lower() for kind in list(MemoryKind)[1:])]
    return zip(range(len(d)), d.gpu.tolist(), _known(d.line), map(kinds.__getitem__, d.kind.tolist()), _known(d.name),
               _known(d.tf_op), d.start_ns.tolist(), d.end_ns.tolist(), _known(d.launch_line), _known(d.launch_ns),
               ends, _known(d.correlation), _known(d.bytes), map(memories.__getitem__, d.src.tolist()),
               map(memories.__getitem__, d.dst.tolist()), strict=True)


def _host_stats(trace: Trace) -> Iterator[tuple[Any, ...]]:
    for stat, (rows, values) in trace.host.stats.items():
        for row, value in zip(rows.tolist(), values.tolist(), strict=True):
            yield row, stat, None if stat in _TEXTS else value, trace.names[value] if stat in _TEXTS else None


def _numbered(*columns: npt.NDArray[Any]) -> Iterator[tuple[Any, ...]]:
    lists: Sequence[list[Any]] = [column.tolist() for column in columns]
    return zip(range(len(columns[0])), *lists, strict=True)


def _known(column: npt.NDArray[Any]) -> Iterator[int | None]:
    """-1 is what is not known."""
    return (None if value == -1 else value for value in column.tolist())
