"""A trace and its analysis as tables. docs/tasks/convert.md lists them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gputop.advice.trace.facts import TraceFacts
from gputop.core.version import __version__
from gputop.export.write_tables import NAMES, Batch, SqlTable, SqlTables, batches_of
from gputop.trace.model import TEXT_STATS, Kind, MemoryKind, Trace

ABOUT = SqlTable.of("about", (
    "a fact: gputop's version, the source's format, `simulated`, `origin_unix_ns`, and `analysis` (the output of "
    "`gputop analyze --json`)"), "name TEXT PRIMARY KEY, value TEXT")
GPUS = SqlTable.of("gpus", "a GPU; `ordinal` is its number in the job", (
    "id INTEGER PRIMARY KEY, host TEXT, ordinal INTEGER, rank INTEGER, name TEXT, sms INTEGER, memory_bytes INTEGER"))
LINES = SqlTable.of("lines", "a stream of a GPU, or a thread of a host", (
    "id INTEGER PRIMARY KEY, host TEXT, gpu INTEGER REFERENCES gpus, name TEXT"))
DEVICE_EVENTS = SqlTable.of("device_events", (
    "a kernel (`kind` compute), collective, copy or memset; `op` is the TensorFlow or XLA op, and `launch_…` the call "
    "that started it"), (
    "id INTEGER PRIMARY KEY, gpu INTEGER NOT NULL REFERENCES gpus, line INTEGER REFERENCES lines, kind TEXT NOT NULL, "
    "name INTEGER REFERENCES names, op INTEGER REFERENCES names, start_ns INTEGER NOT NULL, end_ns INTEGER NOT NULL, "
    "launch_line INTEGER REFERENCES lines, launch_ns INTEGER, launch_end_ns INTEGER, correlation INTEGER, "
    "bytes INTEGER, source_memory TEXT, target_memory TEXT"))
HOST_EVENTS = SqlTable.of("host_events", "an event of a host thread", (
    "id INTEGER PRIMARY KEY, line INTEGER REFERENCES lines, name INTEGER REFERENCES names, start_ns INTEGER NOT NULL, "
    "end_ns INTEGER NOT NULL"))
HOST_STATS = SqlTable.of("host_stats", "additional values of a host event", (
    "event INTEGER NOT NULL REFERENCES host_events, stat TEXT NOT NULL, value INTEGER, text TEXT"))
ALLOCATOR_EVENTS = SqlTable.of("allocator_events", "a change in memory use", (
    "time_ns INTEGER NOT NULL, allocator INTEGER REFERENCES names, in_use_bytes INTEGER, available_bytes INTEGER, "
    "peak_bytes INTEGER, op INTEGER REFERENCES names"))
STEPS = SqlTable.of("steps", "a training step", (
    "number INTEGER PRIMARY KEY, start_ns INTEGER NOT NULL, end_ns INTEGER NOT NULL"))
FINDINGS = SqlTable.of("findings", "a finding, most severe first; `saves_ratio` is the share of the step", (
    "rank INTEGER PRIMARY KEY, id TEXT, severity TEXT, title TEXT, why TEXT, action TEXT, saves_ratio REAL, "
    "gain_by TEXT"))
TRACE_TABLES = (ABOUT, NAMES, GPUS, LINES, DEVICE_EVENTS, HOST_EVENTS, HOST_STATS, ALLOCATOR_EVENTS, STEPS, FINDINGS)

_VIEWS = """
CREATE VIEW gpu_work AS
  SELECT e.id, g.host, g.ordinal AS gpu, l.name AS stream, e.kind, n.name, o.name AS op, e.start_ns, e.end_ns,
         e.end_ns - e.start_ns AS duration_ns, e.launch_ns, e.bytes
  FROM device_events e JOIN gpus g ON g.id = e.gpu LEFT JOIN lines l ON l.id = e.line
       LEFT JOIN names n ON n.id = e.name LEFT JOIN names o ON o.id = e.op;
CREATE VIEW host_work AS
  SELECT e.id, l.host, l.name AS thread, n.name, e.start_ns, e.end_ns, e.end_ns - e.start_ns AS duration_ns
  FROM host_events e LEFT JOIN lines l ON l.id = e.line LEFT JOIN names n ON n.id = e.name;
"""


def trace_tables(facts: TraceFacts) -> SqlTables:
    return SqlTables(_tables(facts), facts.trace.names, _VIEWS)


def _tables(facts: TraceFacts) -> Iterator[tuple[SqlTable, Iterator[Batch]]]:
    trace = facts.trace
    host, allocator = trace.host, trace.allocator
    yield ABOUT, _columns([
        ("gputop", __version__), ("format", trace.format), ("simulated", "yes" if trace.simulated else "no"),
        ("origin_unix_ns", str(trace.origin_ns)), ("analysis", json.dumps(facts.analysis.to_json()))])
    yield GPUS, _columns([(i, g.host, g.ordinal, g.rank, g.name or None, g.sms, g.memory_bytes)
                          for i, g in enumerate(trace.gpus)])
    yield LINES, _columns([(i, line.host, None if line.gpu < 0 else line.gpu, line.name)
                           for i, line in enumerate(trace.lines)])
    yield DEVICE_EVENTS, _device(trace)
    yield HOST_EVENTS, ((np.arange(batch.start, batch.stop), host.line[batch], host.name[batch],
                         host.start_ns[batch], host.end_ns[batch])
                        for batch in batches_of(len(host)))
    yield HOST_STATS, _host_stats(trace)
    yield ALLOCATOR_EVENTS, ((allocator.time_ns[batch], allocator.allocator[batch], allocator.in_use_bytes[batch],
                              allocator.available_bytes[batch], allocator.peak_bytes[batch], allocator.tf_op[batch])
                             for batch in batches_of(len(allocator)))
    bounds = facts.steps.bounds_ns if facts.steps is not None else ()
    yield STEPS, _columns([(i, start, end) for i, (start, end) in enumerate(bounds)])
    yield FINDINGS, _columns([(i, f.id, f.severity, f.title, f.why, f.action, f.gain.step_time, f.gain.by or None)
                              for i, f in enumerate(facts.analysis.findings)])


def _device(trace: Trace) -> Iterator[Batch]:
    d = trace.device
    kinds = [kind.name.lower() for kind in Kind]
    memories = [None, *(kind.name.lower() for kind in list(MemoryKind)[1:])]
    for batch in batches_of(len(d)):
        yield (np.arange(batch.start, batch.stop), d.gpu[batch], d.line[batch],
               [kinds[kind] for kind in d.kind[batch].tolist()], d.name[batch], d.tf_op[batch],
               d.start_ns[batch], d.end_ns[batch], d.launch_line[batch], d.launch_ns[batch], d.launch_end_ns[batch],
               d.correlation[batch], d.bytes[batch], [memories[kind] for kind in d.src[batch].tolist()],
               [memories[kind] for kind in d.dst[batch].tolist()])


def _host_stats(trace: Trace) -> Iterator[Batch]:
    for stat, (rows, values) in trace.host.stats.items():
        for batch in batches_of(len(rows)):
            numbers, unknown = values[batch].tolist(), [None] * (batch.stop - batch.start)
            texts = [trace.names[number] for number in numbers] if stat in TEXT_STATS else None
            yield rows[batch], [stat] * len(numbers), numbers if texts is None else unknown, texts or unknown


def _columns(rows: Sequence[tuple[Any, ...]]) -> Iterator[Batch]:
    for batch in batches_of(len(rows)):
        yield [list(column) for column in zip(*rows[batch], strict=True)]
