"""Hostile files: every reader ends with a trace or a clear error, in memory of a multiple of the file's size.

The multiples hold for the most compact events there can be. Those of real traces are larger,
and so is the file in relation to what is made of it.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.core.errors import GputopError
from gputop.diagnosis.diagnose import analyze_trace
from gputop.diagnosis.report import text_report
from gputop.trace.model import Trace
from gputop.trace.readers.chrome import json_stream
from gputop.trace.readers.load import load
from tests.diagnosis.small_traces import few, tiny
from tests.trace.readers.chrome.kineto_file import kineto
from tests.trace.readers.nsys_report import PROCESS, report
from tests.trace.readers.xspace.reference import Builder
from tests.trace.readers.xspace.wire_encoding import encoded

# Bytes in memory per byte of the file, and what a reader needs whatever the file.
MULTIPLE = {"x.xplane.pb": 100, "x.json": 25, "x.sqlite": 30}
FIXED_BYTES = 12 << 20


def read(path: Path, raw: bytes) -> Trace | None:
    """The trace, or None where there was a clear error."""
    path.write_bytes(raw)
    try:
        trace = load([path])
    except GputopError as error:
        assert error.message and len(error.message) < 2000
        return None
    assert (trace.device.end_ns >= trace.device.start_ns).all()
    assert (trace.host.end_ns >= trace.host.start_ns).all()
    for name in (*trace.names, *trace.hosts, *(line.name for line in trace.lines), *(n.message for n in trace.quality)):
        name.encode()  # can be written out
    return trace


def read_in_bounds(path: Path, raw: bytes) -> Trace | None:
    """The same; what it takes in memory is checked on the way, but for what SQLite holds itself."""
    tracemalloc.start()
    try:
        return read(path, raw)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < FIXED_BYTES + MULTIPLE[path.name] * len(raw)


SAMPLES = {"x.xplane.pb": tiny(), "x.json": few(), "x.xplane.pb.gz": gzip.compress(tiny()),
           "x.json.gz": gzip.compress(few())}


@pytest.mark.parametrize("name", SAMPLES)
def test_cut_off_at_every_byte(tmp_path, name):
    whole = SAMPLES[name]
    complete = read(tmp_path / name, whole)
    assert complete is not None and complete.quality == []
    counts = []
    for size in range(len(whole)):
        trace = read(tmp_path / name, whole[:size])
        if trace is not None:
            counts.append(trace.event_count)
            # A protobuf cut between two fields is a whole, shorter one. Every other cut is noted.
            assert "truncated" in {q.id for q in trace.quality} or name == "x.xplane.pb"
    assert counts and max(counts) <= complete.event_count
    if "json" in name:
        assert counts == sorted(counts) and counts[-1] == complete.event_count


@pytest.mark.parametrize("name", [*SAMPLES, "x.sqlite"])
@given(flips=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 7)), min_size=1, max_size=12))
def test_flipped_bits(tmp_path, name, flips):
    whole = tmp_path / "whole.sqlite"
    if name == "x.sqlite" and not whole.exists():
        report(whole)
    raw = bytearray(SAMPLES.get(name) or whole.read_bytes())
    for place, bit in flips:
        raw[place % len(raw)] ^= 1 << bit
    read(tmp_path / name, bytes(raw))


# Protobuf: any fields at any depth, of the numbers that mean something, with lengths and values that mislead.

VARINT = st.one_of(st.integers(0, 30), st.integers(2**62, 2**64 - 1), st.just(2**63))
HOSTILE: st.SearchStrategy[bytes] = st.recursive(
    st.one_of(st.binary(max_size=12), st.just(b"\xff" * 11), st.sampled_from(
        (b"/device:GPU:0", b"/host:CPU", b"Task Environment", b"correlation_id", b"train", b"MemoryAllocation"))),
    lambda inner: st.lists(st.one_of(
        st.tuples(st.integers(1, 12), st.just(2), inner), st.tuples(st.integers(1, 12), st.just(0), VARINT),
        st.tuples(st.integers(1, 7), st.just(1), st.integers(0, 2**64 - 1)),
    ), max_size=6).map(lambda fields: b"".join(encoded(*f) for f in fields)),
    max_leaves=25,
)
MISLEADING = st.sampled_from((b"", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x0a\x80\x80\x80\x80\x80\x10",
                              b"\x22\xff\xff\xff\xff\x0f", b"\xff" * 20))


@given(st.lists(HOSTILE, max_size=3), MISLEADING)
def test_any_protobuf(tmp_path, planes, tail):
    read(tmp_path / "x.xplane.pb", b"".join(encoded(1, 2, plane) for plane in planes) + tail)


def test_stats_that_refer_to_themselves_and_to_nothing(tmp_path):
    b = Builder()
    gpu = b.plane("/device:GPU:0")
    for i, name in ((1, "tf_op"), (2, "hlo_op"), (3, "memory_size")):
        gpu.stat_metadata[i].id, gpu.stat_metadata[i].name = i, name
    gpu.stats.add(metadata_id=3, ref_value=3)
    line = b.line("/device:GPU:0", "Stream #1(Kernel)")
    event = b.event("/device:GPU:0", line, "k", 1, 1)
    event.stats.add(metadata_id=1, ref_value=1)
    event = b.event("/device:GPU:0", line, "k", 2, 1)
    event.stats.add(metadata_id=1, ref_value=2**64 - 1)
    event.stats.add(metadata_id=2, ref_value=99)
    trace = read(tmp_path / "x.xplane.pb", b.bytes())
    assert [trace.names[i] if i >= 0 else None for i in trace.device.tf_op] == ["tf_op", None]


@pytest.mark.parametrize("event", [b"", encoded(2, 0, 2**64 - 1), encoded(4, 2, encoded(1, 0, 1)),
                                   encoded(4, 2, b"\x08\x01\x2a\x01a")])
def test_memory_for_many_tiny_events(tmp_path, event):
    """Two bytes an event, all of them named, is the most that can be made of a file."""
    count = 100_000
    names = encoded(4, 2, encoded(1, 0, 0) + encoded(2, 2, encoded(2, 2, b"k")))
    stats = encoded(5, 2, encoded(1, 0, 1) + encoded(2, 2, encoded(2, 2, b"eager_op")))
    line = encoded(3, 2, encoded(4, 2, event) * count)
    for plane in (b"/device:GPU:0", b"/host:CPU"):
        trace = read_in_bounds(tmp_path / "x.xplane.pb", encoded(1, 2, encoded(2, 2, plane) + names + stats + line))
        assert trace is not None and (trace.event_count == count or trace.quality)


# JSON

SCALAR = st.one_of(st.none(), st.booleans(), st.integers(), st.sampled_from((10**400, -(2**63), 2**64, 0, 1)),
                   st.floats(), st.text(max_size=8), st.sampled_from(("\ud800", "X", "M", "kernel", "process_name")))
VALUE = st.recursive(SCALAR, lambda inner: st.one_of(
    st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)), max_leaves=6)
KEYS = ("ph", "ts", "dur", "name", "cat", "pid", "tid", "args", "device", "stream", "correlation", "bytes", "grid",
        "block", "step_num", "rank", "kernel_details", "dtype", "In msg nelems", "labels", "id", "totalGlobalMem")


@given(st.data())
def test_json_of_the_wrong_types(tmp_path, data):
    document = kineto()
    for _ in range(data.draw(st.integers(1, 6))):
        at: Any = data.draw(st.sampled_from([document, *document["traceEvents"], *(
            e["args"] for e in document["traceEvents"] if isinstance(e.get("args"), dict))]))
        at[data.draw(st.sampled_from((*at, *KEYS)))] = data.draw(VALUE)
        if not isinstance(document.get("traceEvents"), list):
            break
        document["traceEvents"] = [e for e in document["traceEvents"] if isinstance(e, dict)]
    read(tmp_path / "x.json", json.dumps(document).encode())


# What TensorFlow's own exports say of host events, as text; numbers that refer to each other among them.
NUMBER = st.one_of(st.integers(0, 4).map(str), SCALAR,
                   st.sampled_from(("-1", "", "x", str(2**61), str(2**62), "1" * 18, "1e3")))
CALL = st.fixed_dictionaries({}, optional={
    **dict.fromkeys(("is_func", "tracing_count", "iter_num", "buffered_elements", "id", "parent_id", "parallelism",
                     "buffer_limit", "cpu_budget", "step_num"), NUMBER),
    "eager_op": st.sampled_from(("__inference_f_1", "__inference_f_2", "IteratorGetNext", "MatMul", "\ud800")),
    "tf_function_call": st.sampled_from(("traced-nonXla", "concrete")), "name": VALUE, "shapes": VALUE})
HOST_NAMES = st.sampled_from((
    "EagerExecute", "Iterator::Root::Map", "Iterator::Root::Map::Batch", "IteratorGetNextOp::DoCompute", "f", "train",
    "scope/MatMul:MatMul", "ParallelMapProduce", "FunctionRun"))


@given(st.lists(st.tuples(HOST_NAMES, CALL, st.integers(0, 300), st.integers(0, 200), st.integers(0, 2)), max_size=25),
       st.lists(st.tuples(st.integers(0, 300), st.integers(0, 60)), max_size=6))
def test_stats_of_tensorflow_s_exports(tmp_path, calls, kernels):
    """Any numbers, references in circles among them: there is a trace, an analysis and a report."""
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}}]
    events += [{"ph": "X", "pid": 701, "tid": tid, "name": name, "ts": ts, "dur": dur, "args": args}
               for name, args, ts, dur, tid in calls]
    events += [{"ph": "X", "pid": 1, "tid": 7, "name": "gemm", "ts": ts, "dur": dur, "args": {"tf_op": "a/b:MatMul"}}
               for ts, dur in kernels]
    trace = read(tmp_path / "x.json", json.dumps({"traceEvents": events}).encode())
    if trace is not None:
        analysis = analyze_trace(trace)
        json.dumps(analysis.to_json(), allow_nan=False)
        text_report(analysis).encode()


@given(st.binary(max_size=200), st.sampled_from((b"", b"[", b'{"traceEvents": [', b'[{"ph":"X","ts":1,"name":"a"},')))
def test_any_text_after_a_beginning_of_json(tmp_path, tail, head):
    if head:
        read(tmp_path / "x.json", head + tail)


@pytest.mark.parametrize("middle", [
    b"[" * 100_000, b'{"a":' * 100_000, b'"' + b"a" * (1 << 20), b"9" * 100_000, b"{},[],0," * 10_000, b"," * 100_000,
    b" " * (1 << 20), b'{"ph":"X","ts":1},' * 20_000, b'"\\ud800",' * 1000, b"nul", b"-", b"1e", b"NaN,Infinity,",
    b"".join(b'{"ph":"X","ts":1,"name":"%x"},' % i for i in range(15_000)),
    b"".join(b'{"ph":"M","name":"thread_name","tid":%d,"args":{"name":"a"}},' % i for i in range(10_000)),
    b"".join(b'{"ph":"X","ts":1,"tid":%d},' % i for i in range(15_000)),
    b'{"ph":"X","ts":1,"cat":"kernel","device":0,"name":"\\ud83d\\udc00\\udc00","args":{"device":0}},',
], ids=lambda m: m[:24].decode())
def test_odd_json(tmp_path, middle):
    first = b'[{"ph":"X","ts":1,"dur":1,"pid":1,"tid":1,"name":"first"},'
    for tail, read_it in ((b"", read), (b"]", read), (b"0]", read_in_bounds)):
        assert "first" in read_it(tmp_path / "x.json", first + middle + tail).names


def test_an_endless_value_ends_the_reading(tmp_path, monkeypatch):
    monkeypatch.setattr(json_stream, "MAX_VALUE", 1 << 16)
    first = b'[{"ph":"X","ts":1,"dur":1,"pid":1,"tid":1,"name":"first"},'
    trace = read_in_bounds(tmp_path / "x.json", first + b'"' + b"a" * (1 << 20) + b'"' + first[:0:-1] + b"]")
    assert trace is not None and [q.id for q in trace.quality] == ["truncated"]


# SQLite

HOSTILE_SQL = {
    "wrong types": "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'x', deviceId = X'00', streamId = 1e300",
    "wrong types of tables": "UPDATE TARGET_INFO_CUDA_DEVICE SET gpuId = 'a', pid = NULL, cudaId = X'ff'",
    "wrong types of GPUs": "UPDATE TARGET_INFO_GPU SET id = X'01', name = 7, totalMemory = 'much', computeMajor = 1.5",
    "wrong types of threads": "UPDATE ThreadNames SET nameId = 'a', globalTid = X'00'",
    "huge numbers": "UPDATE CUPTI_ACTIVITY_KIND_MEMCPY SET bytes = 9223372036854775807, start = 0, "
                    "end = 9223372036854775807, correlationId = -9223372036854775808",
    "largest times": "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 0, end = 2305843009213693951",
    "negative numbers": "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET deviceId = -1, streamId = -5, globalPid = -7",
    "a long string": "INSERT INTO StringIds VALUES (9, printf('%.*c', 1000000, 'x'))",
    "control characters": "UPDATE StringIds SET value = char(27) || '[2J' || char(0) || 'k'",
    "a view for a table": "DROP TABLE NVTX_EVENTS; CREATE VIEW NVTX_EVENTS AS WITH RECURSIVE c(start) AS "
                          "(SELECT 1 UNION ALL SELECT start + 1 FROM c) SELECT start, start AS end FROM c",
    "a trigger": "CREATE TRIGGER t AFTER INSERT ON StringIds BEGIN DELETE FROM StringIds; END",
    "a computed column": "DROP TABLE NVTX_EVENTS; CREATE TABLE NVTX_EVENTS (a INTEGER, "
                         "start AS (zeroblob(100000000)), end AS (hex(zeroblob(100000000)))); "
                         "INSERT INTO NVTX_EVENTS VALUES (1)",
    "a computing table": "DROP TABLE ThreadNames; CREATE VIRTUAL TABLE ThreadNames USING fts5(nameId, globalTid)",
    "no tables": "DROP TABLE StringIds; DROP TABLE TARGET_INFO_GPU; DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME",
    "odd names": 'CREATE TABLE "a""; DROP TABLE x; --" (x); CREATE TABLE "\x01" (y)',
}


@pytest.mark.parametrize("how", HOSTILE_SQL)
def test_hostile_reports(tmp_path, how):
    path = report(tmp_path / "r.sqlite")
    database = sqlite3.connect(path)
    database.executescript(HOSTILE_SQL[how])
    database.close()
    before = path.read_bytes()
    read_in_bounds(tmp_path / "x.sqlite", before)
    assert path.read_bytes() == before


def test_pages_that_refer_to_each_other(tmp_path):
    """Two interior pages, every child of the one the other: rows almost without end from a small file."""
    path = report(tmp_path / "r.sqlite")
    database = sqlite3.connect(path)
    database.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, 3)",
                         [(2000 + i, 2001 + i, PROCESS[0] + 500, 100 + i) for i in range(20_000)])
    database.commit()
    find = "SELECT rootpage FROM sqlite_master WHERE name = 'CUPTI_ACTIVITY_KIND_RUNTIME'"
    (root,), (size,) = database.execute(find).fetchone(), database.execute("PRAGMA page_size").fetchone()
    database.close()
    raw = bytearray(path.read_bytes())
    page = memoryview(raw)[(root - 1) * size:root * size]
    assert page[0] == 5, "an interior page of a table"
    cells = [int.from_bytes(page[12 + 2 * i:14 + 2 * i], "big") for i in range(int.from_bytes(page[3:5], "big"))]
    middle, leaf = (bytes(page[place:place + 4]) for place in cells[:2])
    for children in (leaf, middle):
        for place in cells:
            page[place:place + 4] = children
        if children == leaf:
            at = (int.from_bytes(middle, "big") - 1) * size
            raw[at:at + size] = page
    trace = read_in_bounds(tmp_path / "x.sqlite", bytes(raw))
    assert trace is not None and [q.id for q in trace.quality] == ["truncated"]
    assert "more rows than the file can contain" in trace.quality[0].message
