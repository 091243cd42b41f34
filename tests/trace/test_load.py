from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from gputop.errors import EXIT_USAGE, GputopError, NothingToSee
from gputop.trace import load as load_module
from gputop.trace.load import load
from tests.trace.test_chrome import kineto
from tests.trace.test_nsys import report
from tests.trace.test_xspace import Builder, sample


def put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


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
        b = Builder(host)
        b.event("/host:CPU", b.line("/host:CPU", "t"), "x", 1, 1)
        put(run / f"{host}.xplane.pb", b.bytes())
    put(run / "a.trace.json.gz", b"not read")
    for where in (run, tmp_path, tmp_path / "plugins", tmp_path / "plugins/profile", tmp_path.parent):
        assert load([where]).hosts == ["a", "b"]


def test_the_newest_run_is_taken_and_named(tmp_path):
    for i, run in enumerate(("zzz", "aaa", "mmm")):
        b = Builder(run)
        b.event("/host:CPU", b.line("/host:CPU", "t"), "x", 1, 1)
        path = put(tmp_path / "plugins/profile" / run / "h.xplane.pb", b.bytes())
        os.utime(path, ns=(0, (10, 30, 20)[i] * 10**9))
    trace = load([tmp_path])
    assert trace.hosts == ["aaa"]
    assert [q.id for q in trace.quality] == ["newest_run"]
    assert "aaa" in trace.quality[0].message


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
    report(tmp_path / "s.sqlite")
    with pytest.raises(GputopError, match="as one") as caught:
        load([tmp_path / "r.sqlite", tmp_path / "s.sqlite"])
    assert caught.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize(("name", "content", "message", "fix"), [
    ("x.xplane.pb", b"", "is empty", "again"),
    ("x.bin", b"\x7fELF" * 20, "format gputop does not know", ".xplane.pb"),
    ("x.nsys-rep", b"whatever", "only Nsight Systems", "nsys export --type sqlite -o x.sqlite"),
    ("x.json", b"{]", "not a Chrome trace", "copy it again"),
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
    with pytest.raises(NothingToSee, match="no trace in"):
        load([tmp_path])
    with pytest.raises(GputopError, match="No trace was given"):
        load([])
    (tmp_path / "only.nsys-rep").write_bytes(b"x")
    with pytest.raises(GputopError, match="only Nsight Systems"):
        load([tmp_path])


def test_an_unreadable_file(tmp_path, monkeypatch):
    path = put(tmp_path / "x.xplane.pb", sample().bytes())

    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(GputopError, match="Permission denied"):
        load([path])


def test_formats_do_not_mix(tmp_path):
    with pytest.raises(GputopError, match="several formats") as caught:
        load([put(tmp_path / "a.xplane.pb", sample().bytes()),
              put(tmp_path / "b.json", json.dumps(kineto()).encode())])
    assert caught.value.exit_code == EXIT_USAGE


def test_an_xspace_without_events(tmp_path):
    with pytest.raises(NothingToSee) as caught:
        load([put(tmp_path / "a.xplane.pb", Builder().bytes())])
    assert caught.value.exit_code == 3


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


def test_a_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(load_module, "_MEMORY_SHARE", 0.0)
    path = put(tmp_path / "a.xplane.pb.gz", gzip.compress(b"\n" + b"\0" * 10**6))
    with pytest.raises(GputopError, match="memory"):
        load([path])
