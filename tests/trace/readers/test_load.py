from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from pathlib import Path

import pytest

from gputop.core.errors import EXIT_USAGE, GputopError, NoDataError
from gputop.profiler.stale_files import probe_name
from gputop.trace.readers import content
from gputop.trace.readers.find_files import runs_at
from gputop.trace.readers.load import load
from tests.trace.readers.chrome.kineto_file import kineto
from tests.trace.readers.nsys_report import report
from tests.trace.readers.xspace.reference import Builder
from tests.trace.readers.xspace.sample_space import sample


def put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def host_capture(path: Path, host: str) -> Path:
    b = Builder(host)
    b.event("/host:CPU", b.line("/host:CPU", "t"), "x", 1, 1)
    return put(path, b.bytes())


def test_an_xspace_plain_and_compressed(tmp_path):
    data = sample().bytes()
    for path in (put(tmp_path / "a.xplane.pb", data), put(tmp_path / "b.xplane.pb.gz", gzip.compress(data)),
                 put(tmp_path / "no suffix", data)):
        trace = load([str(path)])
        assert (trace.format, len(trace.device), trace.paths) == ("xspace", 4, [str(path)])


def test_the_hosts_name_falls_back_to_the_files(tmp_path):
    b = sample()
    del b.space.hostnames[:]
    assert load([put(tmp_path / "node-7.xplane.pb.gz", gzip.compress(b.bytes()))]).hosts == ["node-7"]


def test_a_run_of_several_hosts(tmp_path):
    run = tmp_path / "plugins/profile/2024_01_01"
    for host in ("b", "a"):
        host_capture(run / f"{host}.xplane.pb", host)
    put(run / "a.trace.json.gz", b"not read")
    for where in (run, tmp_path, tmp_path / "plugins", tmp_path / "plugins/profile", tmp_path.parent):
        assert load([where]).hosts == ["a", "b"]


def test_a_folder_of_ranks(tmp_path):
    put(tmp_path / "rank0.json", json.dumps(kineto(0)).encode())
    put(tmp_path / "rank1.json.gz", gzip.compress(json.dumps(kineto(1)).encode()))
    put(tmp_path / "config.json", b'{"batch_size": 4}')
    trace = load([tmp_path])
    assert (trace.format, [g.rank for g in trace.gpus]) == ("chrome", [0, 1])


def test_a_report(tmp_path):
    report(tmp_path / "r.sqlite")
    assert load([tmp_path]).format == "nsys"
    assert load([tmp_path / "r.sqlite", tmp_path / "r.sqlite"]).format == "nsys"
    put(tmp_path / "s.sqlite", report(tmp_path / "t.sqlite", ("ThreadNames",)).read_bytes())
    with pytest.raises(GputopError, match="cannot combine several") as caught:
        load([tmp_path / "r.sqlite", tmp_path / "s.sqlite"])
    assert caught.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize(("name", "content", "message", "fix"), [
    ("x.xplane.pb", b"", "is empty", "Repeat it"),
    ("x.bin", b"\x7fELF" * 20, "format that gputop does not know", ".xplane.pb"),
    ("x.nsys-rep", b"whatever", "only Nsight Systems", "nsys export --type sqlite -o x.sqlite"),
    ("x.json", b"{]", "not a Chrome trace", "copy the file again"),
    ("x.json.gz", b"\x1f\x8bgarbage", "cannot be decompressed", "again"),
    ("x.sqlite", b"SQLite format 3\0" + b"\1" * 200, "x.sqlite", "nsys export"),
    ("x.xplane.pb", b"certainly no protobuf", "not an XSpace", "profiler wrote"),
])
def test_what_cannot_be_read_is_named_with_its_remedy(tmp_path, name, content, message, fix):
    with pytest.raises(GputopError, match=message) as caught:
        load([put(tmp_path / name, content)])
    assert fix in caught.value.fix
    assert caught.value.exit_code == (1 if content else 3)


def test_missing_things(tmp_path):
    with pytest.raises(GputopError, match="does not exist"):
        load([tmp_path / "nowhere.xplane.pb"])
    with pytest.raises(NoDataError, match="no trace in"):
        load([tmp_path])
    with pytest.raises(GputopError, match="No trace was given"):
        load([])
    (tmp_path / "only.nsys-rep").write_bytes(b"x")
    with pytest.raises(GputopError, match="only Nsight Systems"):
        load([tmp_path])


def test_an_unreadable_file(tmp_path, monkeypatch):
    path = put(tmp_path / "x.xplane.pb", sample().bytes())

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(content, "open_regular", refuse)
    with pytest.raises(GputopError, match="Permission denied"):
        load([path])


def test_formats_do_not_mix(tmp_path):
    with pytest.raises(GputopError, match="different formats") as caught:
        load([put(tmp_path / "a.xplane.pb", sample().bytes()),
              put(tmp_path / "b.json", json.dumps(kineto()).encode())])
    assert caught.value.exit_code == EXIT_USAGE


def test_an_xspace_without_events(tmp_path):
    with pytest.raises(NoDataError) as caught:
        load([put(tmp_path / "a.xplane.pb", Builder().bytes())])
    assert caught.value.exit_code == 3
    cut = put(tmp_path / "b.xplane.pb", Builder().bytes() + b"\x0a\x7f/device")
    with pytest.raises(NoDataError, match="truncated") as caught:
        load([cut])
    assert caught.value.message.count(str(cut)) == 1, "the file is named once"


def test_a_cut_compressed_file_keeps_its_beginning(tmp_path):
    b = sample()
    line = b.line("/host:CPU", "more")
    for i in range(3000):
        b.event("/host:CPU", line, f"operation {i % 5}", i * 37 % 1000, i * 7919 % 3001)
    data = gzip.compress(b.bytes())
    trace = load([put(tmp_path / "a.xplane.pb.gz", data[: len(data) * 3 // 4])])
    assert len(trace.device) == 4
    assert trace.quality[0].id == "truncated"


def test_several_gzip_members_and_padding(tmp_path):
    data = sample().bytes()
    whole = gzip.compress(data[:50]) + gzip.compress(data[50:]) + b"\0" * 512
    trace = load([put(tmp_path / "a.xplane.pb.gz", whole)])
    assert (len(trace.device), trace.quality) == (4, [])


def test_what_does_not_fit_in_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(content, "_MEMORY_SHARE", 0.0)
    for path in (put(tmp_path / "a.xplane.pb.gz", gzip.compress(sample().bytes())),
                 put(tmp_path / "b.json", json.dumps(kineto()).encode())):
        with pytest.raises(GputopError, match="memory") as caught:
            load([path])
        assert "more memory" in caught.value.fix


@pytest.mark.parametrize(("name", "begin", "filling"), [("a.xplane.pb.gz", b"\n", b"\0"), ("b.json.gz", b"[", b" ")])
def test_a_bomb_is_refused(tmp_path, monkeypatch, name, begin, filling):
    monkeypatch.setattr(content, "_SMALL_BYTES", 1 << 20)
    path = put(tmp_path / name, gzip.compress(begin + filling * 10**7))
    with pytest.raises(GputopError, match="200 times") as caught:
        load([path])
    assert "gunzip" in caught.value.fix


def test_bad_files_among_good_ones_are_named_and_left_out(tmp_path):
    host_capture(tmp_path / "a.xplane.pb", "a")
    put(tmp_path / "b.xplane.pb", b"")
    put(tmp_path / "c.xplane.pb", b"certainly no protobuf")
    put(tmp_path / "d.xplane.pb.gz", b"\x1f\x8bgarbage")
    trace = load([tmp_path])
    assert trace.hosts == ["a"] and trace.paths == [str(tmp_path / "a.xplane.pb")]
    notes = [q.message for q in trace.quality if q.id == "unreadable_file"]
    assert len(notes) == len(trace.quality) == 3
    assert all(any(f"{name}.xplane.pb" in note for note in notes) for name in "bcd")


def test_bad_ranks_among_good_ones(tmp_path):
    put(tmp_path / "rank0.json", json.dumps(kineto(0)).encode())
    put(tmp_path / "rank1.json", b"[1, 2")
    put(tmp_path / "rank2.json", b'{"schemaVersion": 1}')
    put(tmp_path / "rank3.json.gz", b"")
    trace = load([tmp_path])
    assert [g.rank for g in trace.gpus] == [0]
    assert [q.id for q in trace.quality] == ["unreadable_file"] * 2 + ["truncated"]


def test_nothing_but_bad_files(tmp_path):
    put(tmp_path / "a.xplane.pb", b"certainly no protobuf")
    put(tmp_path / "b.xplane.pb", b"nor is this, it seems")
    with pytest.raises(GputopError, match="not an XSpace"):
        load([tmp_path])
    put(tmp_path / "a.xplane.pb", b"")
    put(tmp_path / "b.xplane.pb", b"")
    with pytest.raises(NoDataError, match="empty"):
        load([tmp_path])


def test_an_xspace_and_its_export_count_once(tmp_path):
    space = host_capture(tmp_path / "run/h.xplane.pb", "h")
    exported = json.dumps({"traceEvents": [
        {"ph": "X", "pid": 1, "tid": 1, "ts": 1, "dur": 1, "name": "x", "args": {}}]}).encode()
    export = put(tmp_path / "run/h.trace.json.gz", gzip.compress(exported))
    assert load([tmp_path / "run"]).quality == []
    trace = load([space, export])
    assert (trace.format, trace.event_count, trace.paths) == ("xspace", 1, [str(space)])
    assert [q.id for q in trace.quality] == ["same_capture"]
    elsewhere = put(tmp_path / "other/h.trace.json.gz", gzip.compress(exported))
    with pytest.raises(GputopError, match="different formats"):
        load([space, elsewhere])


def test_one_file_given_as_two_ranks_counts_once(tmp_path):
    rank = json.dumps(kineto(rank=0)).encode()
    a, b = put(tmp_path / "rank0.json", rank), put(tmp_path / "rank1.json", rank)
    other = put(tmp_path / "rank2.json", rank.replace(b"H100", b"H200"))  # as long, and another
    trace = load([a, b, other])
    assert trace.paths == [str(a), str(other)] and len({gpu.rank for gpu in trace.gpus}) == 2
    notes = [note for note in trace.quality if note.id == "same_file"]
    assert len(notes) == 1 and str(b) in notes[0].message and f"as {a}" in notes[0].message


def test_runs_of_which_the_newest_failed(tmp_path):
    for i, run in enumerate(("old", "good", "failed")):
        path = host_capture(tmp_path / "plugins/profile" / run / "h.xplane.pb", run)
        if run == "failed":
            path.write_bytes(b"")
        os.utime(path, ns=(0, (i + 1) * 10**9))
    assert load([tmp_path]).hosts == ["good"]


def test_runs_with_chrome_traces_only(tmp_path):
    for i, run in enumerate(("one", "two")):
        document = json.dumps(kineto(0)).encode()
        for name in ("h.trace.json.gz", "perfetto_trace.json.gz"):  # JAX writes the capture twice
            path = put(tmp_path / "plugins/profile" / run / name, gzip.compress(document))
            os.utime(path, ns=(0, i * 10**9))
    trace = load([tmp_path])
    assert [Path(p).parent.name + "/" + Path(p).name for p in trace.paths] == ["two/h.trace.json.gz"]
    assert [q.id for q in trace.quality] == ["newest_run"]
    (tmp_path / "plugins/profile/two/h.trace.json.gz").unlink()
    (tmp_path / "plugins/profile/one/h.trace.json.gz").unlink()
    assert [Path(p).name for p in load([tmp_path]).paths] == ["perfetto_trace.json.gz"]


def test_captures_of_several_times_by_the_same_workers(tmp_path):
    for time in (1694128201545, 1694128299999):
        for rank in (0, 1):
            put(tmp_path / f"node_{rank}.{time + rank}.pt.trace.json", json.dumps(kineto(rank)).encode())
    trace = load([tmp_path])
    assert [Path(p).name for p in trace.paths] == ["node_0.1694128299999.pt.trace.json",
                                                   "node_1.1694128300000.pt.trace.json"]
    assert [q.id for q in trace.quality] == ["newest_run"]


def test_a_plain_trace_before_its_compressed_copy(tmp_path):
    document = json.dumps(kineto(0)).encode()
    put(tmp_path / "t.json", document)
    put(tmp_path / "t.json.gz", gzip.compress(document))
    assert [Path(p).name for p in load([tmp_path]).paths] == ["t.json"]


def test_json_is_streamed(tmp_path):
    """Far more text than memory used for it."""
    events = json.dumps(kineto())[:-2] + ", " + ", ".join(
        json.dumps({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1_700_000_000_000_000 + i,
                    "dur": 1, "args": {"Input Dims": "[[64, 64], [64, 64]]" * 10}}) for i in range(20_000)) + "]}"
    path = put(tmp_path / "t.json.gz", gzip.compress(events.encode()))
    tracemalloc.start()
    trace = load([path])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(trace.host) == 20_004
    assert peak < 0.8 * len(events)


def test_a_damaged_checksum_is_said(tmp_path):
    raw = bytearray(gzip.compress(json.dumps(kineto()).encode()))
    raw[-6] ^= 1
    trace = load([put(tmp_path / "t.json.gz", bytes(raw))])
    assert (len(trace.device), [q.id for q in trace.quality]) == (3, ["truncated"])


def logdir(tmp_path: Path) -> Path:
    """Four runs at different depths, each of a host of its name, the last the newest."""
    for i, (where, run) in enumerate((("", "first"), ("train", "second"), ("a/b/c/train", "second"),
                                      ("a/b/d/validation", "last"))):
        path = host_capture(tmp_path / where / "plugins/profile" / run / "h.xplane.pb", f"{where}-{run}")
        os.utime(path, ns=(0, (i + 1) * 10**9))
    return tmp_path


def test_runs_at_any_depth_are_listed_and_the_newest_is_taken(tmp_path):
    trace = load([logdir(tmp_path)])
    assert trace.hosts == ["a/b/d/validation-last"]
    note, = trace.quality
    assert note.id == "newest_run" and "4 profile runs" in note.message
    assert "a/b/d/validation/last. Older runs: a/b/c/train/second, train/second, first." in note.message
    assert [run.name for run in runs_at(tmp_path)] == [
        "a/b/d/validation/last", "a/b/c/train/second", "train/second", "first"]
    assert runs_at(tmp_path / "plugins/profile/first") == []


def test_a_logdir_of_several_frameworks_has_one_newest_run(tmp_path):
    path = put(logdir(tmp_path) / "plugins/profile/torch/h.pt.trace.json", json.dumps(kineto(0)).encode())
    os.utime(path, ns=(0, 9 * 10**9))
    assert load([tmp_path]).paths == [str(path)]
    assert [run.name for run in runs_at(tmp_path)][:2] == ["torch", "a/b/d/validation/last"]
    os.utime(path, ns=(0, 0))
    assert load([tmp_path]).hosts == ["a/b/d/validation-last"] and runs_at(tmp_path)[-1].name == "torch"


def test_a_test_capture_that_was_left_behind_is_no_run(tmp_path):
    host_capture(logdir(tmp_path) / probe_name() / "plugins/profile/probe/h.xplane.pb", "probe")
    assert len(runs_at(tmp_path)) == 4 and load([tmp_path]).hosts == ["a/b/d/validation-last"]


def test_a_run_is_chosen_by_its_name(tmp_path):
    assert load([logdir(tmp_path)], "first").hosts == ["-first"]
    assert load([tmp_path], "train/second").hosts == ["train-second"]
    with pytest.raises(GputopError) as several:
        load([tmp_path], "second")
    assert "Several runs" in several.value.message and "a/b/c/train/second, train/second" in several.value.fix
    with pytest.raises(GputopError) as none:
        load([tmp_path], "third")
    assert "No run" in none.value.message and "first" in none.value.fix
    with pytest.raises(GputopError):
        load([tmp_path / "plugins/profile/first"], "first")


def test_a_circle_of_links_is_not_followed(tmp_path):
    (logdir(tmp_path) / "a/again").symlink_to(tmp_path)
    assert len(runs_at(tmp_path)) == 4
