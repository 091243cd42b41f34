"""Files made to cost much more than their size: each is read within bounds, and what was left out is told."""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gputop.core.errors import GputopError
from gputop.profiler.xprof.outline import count_events, outline, session_window_ns
from gputop.trace import limits
from gputop.trace.model import Kind, Trace
from gputop.trace.readers.load import load
from gputop.trace.readers.xspace import wire, xplane
from tests.trace.readers.xspace.wire_encoding import encoded

NS = 10**18


def part(number: int, content: bytes) -> bytes:
    return encoded(number, wire.LENGTH, content)


def whole(number: int, value: int) -> bytes:
    return encoded(number, wire.VARINT, value)


def named(number: int, id_: int, name: bytes) -> bytes:
    """An entry of a plane's table of names of events (4) or of stats (5)."""
    return part(number, whole(1, id_) + part(2, whole(1, id_) + part(2, name)))


def event(id_: int, start_ns: int, more: bytes = b"") -> bytes:
    return part(4, whole(1, id_) + whole(2, start_ns * 1000) + whole(3, 500) + more)


def line(name: bytes, events: bytes) -> bytes:
    return part(3, part(2, name) + whole(3, NS) + events)


def plane(name: bytes, *contents: bytes) -> bytes:
    return part(1, part(2, name) + b"".join(contents))


HONEST = plane(b"/host:CPU", named(4, 1, b"op"), line(b"main", b"".join(event(1, i) for i in range(100))))


def read(tmp_path: Path, data: bytes, name: str = "host.xplane.pb") -> Trace:
    path = tmp_path / name
    path.write_bytes(data)
    return load([path])


def notes(trace: Trace, id_: str) -> list[str]:
    return [note.message for note in trace.quality if note.id == id_]


@pytest.mark.parametrize(("data", "said"), [
    (HONEST + b"\x0a\x00" * 100_000, f"{100_001 - limits.MAX_PLANES:,} planes"),
    (HONEST + plane(b"/host:x", b"\x1a\x00" * 100_000), f"{100_001 - limits.MAX_LINES:,} lines"),
    (HONEST + plane(b"/host:x", b"\x32\x00" * 10_000), f"{10_000 - limits.MAX_PLANE_STATS:,} stats of planes"),
    (HONEST + b"".join(part(4, b"%d" % i) for i in range(5000)), f"{5000 - limits.MAX_MESSAGES:,} host names"),
], ids=["planes", "lines", "stats", "hosts"])
def test_of_too_many_parts_the_first_are_read_and_the_rest_is_told(tmp_path, data, said):
    trace = read(tmp_path, data)
    assert len(trace.host) == 100
    assert [said in message for message in notes(trace, "left_out")] == [True]


def test_eight_kilobytes_of_gzip_become_no_gigabytes(tmp_path):
    """A future for each of four million empty planes took 8.7 GB."""
    bomb = gzip.compress(HONEST + b"\x0a\x00" * 4_000_000, 9)
    assert len(bomb) < 10_000
    trace = read(tmp_path, bomb, "host.xplane.pb.gz")
    assert len(trace.host) == 100 and notes(trace, "left_out")


def test_lines_are_counted_over_all_planes(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MAX_LINES", 1_000)
    first, second = (b"".join(line(b"t", event(1, i)) for i in range(begin, begin + 600)) for begin in (1, 1_001))
    trace = read(tmp_path, b"".join(plane(b"/host:CPU", named(4, 1, b"op"), lines) for lines in (first, second)))
    assert len(trace.lines) == 1_000 == len(trace.host)
    assert "200 lines" in notes(trace, "left_out")[0]


def test_short_lines_decoded_together_are_what_they_are_alone(tmp_path, monkeypatch):
    """Beyond some hundred lines short ones are decoded together."""
    rng = np.random.default_rng(7)
    lines = []
    for i in range(400):
        ids = rng.integers(1, 5, int(rng.integers(0, 9))).tolist()
        lines.append(line(b"thread %d" % i, b"".join(event(id_, int(rng.integers(0, 10**6))) for id_ in ids)))
    names = [named(4, id_, b"ThreadpoolListener::x" if id_ == 4 else b"op %d" % id_) for id_ in range(1, 4 + 1)]
    data = plane(b"/host:CPU", *names, *lines) + plane(b"/device:GPU:0", *names[:2], *lines)

    def facts(trace: Trace) -> list[tuple]:
        return sorted((trace.lines[at].name, trace.lines[at].gpu, trace.names[name], start, end)
                      for events in (trace.host, trace.device)
                      for at, name, start, end in zip(events.line.tolist(), events.name.tolist(),
                                                      events.start_ns.tolist(), events.end_ns.tolist(), strict=True))

    together = read(tmp_path, data)
    monkeypatch.setattr("gputop.trace.readers.xspace.space._MANY_LINES", 1 << 30)
    alone = read(tmp_path, data)
    assert facts(together) == facts(alone) and [ln.name for ln in together.lines] == [ln.name for ln in alone.lines]
    assert len(together.host) > 100 and len(together.device) > 100
    assert together.quality == alone.quality


def test_an_event_with_very_many_fields_is_malformed(tmp_path):
    """Each field of the longest event is a pass over all events: a million of them took minutes."""
    trace = read(tmp_path, HONEST + plane(b"/host:x", named(4, 1, b"op"), line(
        b"a", event(1, 0, b"\x22\x00" * 1_000_000) + event(1, 1, b"\x22\x00" * 50))))
    assert len(trace.host) == 101
    assert notes(trace, "left_out") == ["gputop left out malformed events: 1."]


def test_sixty_thousand_errors_become_a_bounded_number_of_short_notes(tmp_path):
    errors = b"".join(part(2, b"error %d" % i) for i in range(60_000)) + part(3, b"warning " * 1_000_000)
    trace = read(tmp_path, HONEST + errors)
    assert limits.MAX_NOTES <= len(trace.quality) < limits.MAX_NOTES + 10
    assert max(len(note.message) for note in trace.quality) < limits.MAX_NOTE_CHARS + 100
    assert len(notes(trace, "more_notes")) == 1


def test_names_that_are_joined_do_not_outgrow_the_file(tmp_path):
    """A module's long name is in the file once, and would be part of each op's."""
    stats = named(5, 1, b"hlo_op") + named(5, 2, b"hlo_module") + named(5, 3, b"M" * 1_000_000)
    ops = b"".join(named(5, 10 + i, b"op%d" % i) for i in range(1000))
    events = b"".join(event(1, i, part(4, whole(1, 1) + whole(7, 10 + i)) + part(4, whole(1, 2) + whole(7, 3)))
                      for i in range(1000))
    with pytest.raises(GputopError, match="names in this trace need far more memory"):
        read(tmp_path, plane(b"/device:GPU:0", named(4, 1, b"k"), stats, ops, line(b"Stream #1", events)))


def test_many_names_of_copies_and_launches_cost_no_pass_each(tmp_path):
    n = 30_000

    def calls(name: bytes) -> bytes:
        return plane(b"/host:CPU", named(5, 1, b"correlation_id"),
                     *(named(4, i, name + b"%d" % i) for i in range(1, n)),
                     line(b"main", b"".join(event(i, i, part(4, whole(1, 1) + whole(3, i))) for i in range(1, n))))
    device = plane(b"/device:GPU:0", named(5, 1, b"correlation_id"), named(4, 1, b"MemcpyOther"), line(
        b"Stream #1", b"".join(event(1, i, part(4, whole(1, 1) + whole(3, i))) for i in range(1, n))))
    trace = read(tmp_path, calls(b"cuMemcpyDtoHAsync") + device)
    assert set(trace.device.kind.tolist()) == {Kind.D2H}
    trace = read(tmp_path, calls(b"cuLaunchKernel") + plane(b"/device:GPU:0", line(b"Stream #1", b"")))
    assert f"{n - 1} launches and copies" in notes(trace, "empty_device_plane")[0]


def test_the_outline_of_any_answer_is_small(monkeypatch):
    """It is made in the process that captures: 40 MB took 3.4 GB and 91 s."""
    for data in (b"\x0a\x00" * 300_000, plane(b"/host:x", b"\x1a\x00" * 300_000), b"\x78\x01" * 300_000,
                 plane(b"/host:x", b"\x1a\x00\x22\x00" * 100_000)):
        about = outline(HONEST + data)
        assert about.has_events and not about.errors
    monkeypatch.setattr(limits, "OUTLINE_FIELDS", 1000)
    about = outline(b"\x78\x01" * 10_000)
    assert about.has_events and "did not check all of them" in about.warnings[0]
    assert count_events(plane(b"/host:x", line(b"a", b"")) * 5000 + HONEST) == (0, 0)


def test_the_outline_walks_no_further_than_it_must(monkeypatch):
    walked = []

    def noting(data, begin, end, *args, **more):
        walked.append(end - begin)
        return wire.read_fields(data, begin, end, *args, **more)

    monkeypatch.setattr("gputop.profiler.xprof.outline.read_fields", noting)
    texts = outline(HONEST * 3 + b"".join(part(2, b"e%d " % i * 5000) for i in range(100))).errors
    assert len(texts) == 20 and max(map(len, texts)) == limits.MAX_NOTE_CHARS
    assert len(walked) <= 3  # the trace, a plane, a line with events


def test_events_are_counted_without_being_noted():
    assert count_events(plane(b"/host:x", line(b"a", b"\x22\x00" * 300_000)) + HONEST) == (300_100, 0)


def test_a_window_is_found_among_many_stats(tmp_path):
    path = tmp_path / "a.xplane.pb"
    task = plane(b"Task Environment", part(6, whole(1, 1) + whole(3, 5)), part(6, whole(1, 2) + whole(3, 9)),
                 named(5, 1, b"profile_start_time"), named(5, 2, b"profile_stop_time"), b"\x32\x00" * 10_000)
    path.write_bytes(b"\x0a\x00" * 100 + task)
    assert session_window_ns(path) == (5, 9)


@pytest.mark.parametrize("name", ["a.xplane.pb", "a.json", "a.sqlite"])
def test_a_sparse_file_is_refused_before_it_is_read(tmp_path, name):
    path = tmp_path / name
    path.write_bytes({"a.xplane.pb": HONEST, "a.json": b'{"traceEvents":[', "a.sqlite": b"SQLite format 3\0"}[name])
    os.truncate(path, 6 << 30)
    with pytest.raises(GputopError, match="is a sparse file"):
        load([path])


def test_json_that_is_all_brackets_or_empty_objects(tmp_path):
    head = b'{"traceEvents":[{"ph":"X","ts":1,"dur":1,"name":"a"},'
    assert len(read(tmp_path, head + b"[" * 5_000_000, "a.json").host) == 1
    assert len(read(tmp_path, head + b"{}," * 1_000_000 + b"{}]}", "a.json").host) == 1
    assert len(read(tmp_path, head + b'{"ph":"X","ts":' + b"9" * 1_000_000 + b"}]}", "a.json").host) == 1


def test_json_whose_names_outgrow_it_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "NAME_CHARS", 1000)
    monkeypatch.setattr(limits, "NAME_CHARS_PER_BYTE", 0)
    events = [{"ph": "X", "ts": i, "dur": 1, "name": f"event number {i}"} for i in range(1000)]
    with pytest.raises(GputopError, match="names in this trace"):
        read(tmp_path, json.dumps({"traceEvents": events}).encode(), "a.json")


# Nsight Systems

KERNELS = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "demangledName", "shortName")


def report(tmp_path: Path, fill: Callable[[sqlite3.Connection], object]) -> Path:
    path = tmp_path / "a.sqlite"
    with sqlite3.connect(path) as connection:
        fill(connection)
    connection.close()
    return path


def kernels(connection: sqlite3.Connection, count: int, row: Callable[[int], tuple[int, ...]]) -> None:
    connection.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL({', '.join(KERNELS)})")
    connection.execute("CREATE TABLE StringIds(id INTEGER PRIMARY KEY, value TEXT)")
    connection.executemany("INSERT INTO StringIds VALUES(?,?)", ((i, f"kernel{i}") for i in range(count)))
    connection.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES(?,?,?,?,?,?,?,?)", map(row, range(count)))


def test_each_kernel_on_a_stream_and_with_a_name_of_its_own(tmp_path):
    """A pass over all kernels for each stream, and for each name, took minutes."""
    n = 60_000
    path = report(tmp_path, lambda c: kernels(c, n, lambda i: (i * 10, i * 10 + 5, i % 3, i, i, 1 << 24, i, i)))
    trace = load([path])
    device = trace.device
    assert [trace.names[i] for i in device.name[:3]] == ["kernel0", "kernel3", "kernel6"]  # of one GPU after the other
    assert [trace.gpus[g].ordinal for g in device.gpu[::n // 6]] == [0, 0, 1, 1, 2, 2]
    assert [trace.lines[at].name for at in device.line[[0, 259, n - 1]]] == ["Stream #0", "Stream #777",
                                                                            f"Stream #{n - 1}"]
    assert all(trace.lines[at].gpu == gpu for at, gpu in zip(device.line[:9], device.gpu[:9], strict=True))


@pytest.mark.parametrize("what", ["view", "generated", "virtual"])
def test_what_a_report_computes_is_not_read(tmp_path, what):
    endless = "WITH RECURSIVE r(start) AS (SELECT 1 UNION ALL SELECT start + 1 FROM r)"

    def fill(connection: sqlite3.Connection) -> None:
        connection.execute("CREATE TABLE StringIds(id INTEGER PRIMARY KEY, value TEXT)")
        connection.execute("CREATE TABLE NVTX_EVENTS(start, end, eventType, globalTid, text)")
        connection.execute("INSERT INTO NVTX_EVENTS VALUES(1, 2, 59, 1, 'a')")
        if what == "view":
            connection.execute(f"CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS {endless} "
                               "SELECT start, start AS end, 0 AS deviceId FROM r")
        elif what == "generated":
            connection.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL(start, end, deviceId, streamId, "
                               "correlationId AS (length(hex(zeroblob(20000000)))))")
            connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES(1, 2, 0, 0)")
        else:
            connection.execute("CREATE VIRTUAL TABLE CUPTI_ACTIVITY_KIND_KERNEL USING fts4(start, end, deviceId)")

    trace = load([report(tmp_path, fill)])
    assert len(trace.host) == 1
    assert trace.device.correlation.tolist() == ([-1] if what == "generated" else [])


def test_a_report_that_takes_endless_steps_is_cut_and_said_to_be_damaged(tmp_path, monkeypatch):
    path = report(tmp_path, lambda c: kernels(c, 50_000, lambda i: (i, i + 1, 0, 0, 0, 0, 0, 0)))
    monkeypatch.setattr("gputop.trace.readers.nsys._STEPS", 300_000)
    monkeypatch.setattr("gputop.trace.readers.nsys._STEPS_PER_BYTE", 0)
    try:
        said = " ".join(note.message for note in load([path]).quality)
    except GputopError as error:
        said = error.message
    assert "many more steps than the file size allows" in said


def test_the_fields_of_a_run_are_capped_in_the_serial_and_in_the_parallel_walk():
    for count in (10, 100_000, 3_000_000):
        data = b"\x22\x00" * count
        found = wire.read_fields(data, 0, len(data), {xplane.tags.LINE_EVENT}, {xplane.tags.LINE_EVENT: 7})
        assert len(found.spans[xplane.tags.LINE_EVENT]) == 14 and found.surplus == {xplane.tags.LINE_EVENT: count - 7}
        begin, end = found.pairs(xplane.tags.LINE_EVENT)
        assert begin.tolist() == end.tolist() == [2, 4, 6, 8, 10, 12, 14]
