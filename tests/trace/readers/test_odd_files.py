"""Files that are legal though unusual, and files that are something else: named as what they are."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from gputop.core.errors import GputopError
from gputop.trace.quality import is_cut_off
from gputop.trace.readers.load import load
from tests.trace.readers.chrome.kineto_file import kineto
from tests.trace.readers.xspace.sample_space import sample


def events(**changed: Any) -> list[dict[str, Any]]:
    found = kineto(rank=0)["traceEvents"]
    return [{**event, **{name: change(event[name]) for name, change in changed.items() if name in event}}
            for event in found]


def counts(path: Path, content: str | bytes) -> tuple[int, int, int]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    trace = load([path])
    return len(trace.device), len(trace.host), int(trace.device.end_ns.max())


@pytest.mark.parametrize("end", ["", ",", ",\n", " \n"])
def test_an_array_may_lack_its_closing_bracket(tmp_path, end):
    path, text = tmp_path / "t.json", json.dumps(events())
    whole = counts(path, text)
    assert counts(path, text[:-1] + end) == whole and not is_cut_off(load([path]))
    path.write_text(text[:-9])
    assert is_cut_off(load([path]))


def test_a_list_in_an_object_may_not(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": events()})[:-2])
    assert is_cut_off(load([path]))


@pytest.mark.parametrize("spell", [str, lambda number: f" {number:.3f}", lambda number: f"{number:.17e}"])
def test_times_may_be_strings(tmp_path, spell):
    path = tmp_path / "t.json"
    assert counts(path, json.dumps(events(ts=spell, dur=spell))) == counts(path, json.dumps(events()))


@pytest.mark.parametrize("ts", ["", "soon", "1e9999", "nan", "0x10", "1_0", "९"])
def test_a_string_that_is_no_time_is_no_event(tmp_path, ts):
    path = tmp_path / "t.json"
    assert counts(path, json.dumps([*events(), {"ph": "X", "name": "x", "pid": 1, "tid": 1, "ts": ts, "dur": 1}])) == (
        counts(path, json.dumps(events())))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"])
def test_the_encoding_of_a_windows_shell(tmp_path, encoding):
    path, text = tmp_path / "t.json", json.dumps({"traceEvents": events(), "é": "…"}, ensure_ascii=False)
    assert counts(path, text.encode(encoding)) == counts(path, text)


def perfetto() -> bytes:
    """A clock snapshot, and a packet with a time (field 8) and the number of its writer (field 10)."""
    snapshot = b"\x32\x06\x0a\x04\x08\x06\x10\x01\x50\x01"
    return b"".join(b"\x0a" + bytes([len(packet)]) + packet for packet in (snapshot, b"\x40\x05\x50\x02"))


@pytest.mark.parametrize(("name", "data", "what", "fix"), [
    ("trace.pftrace", perfetto(), "a Perfetto trace", "traceconv json"),
    ("host.xplane.pb", perfetto(), "a Perfetto trace", "traceconv json"),
    ("local.trace", b"\x0a\x14\x08\x00\x12\x10\x0a\x09/host:CPU\x1a\x03\x12\x01a", "TensorFlow 2.0", "2.2 or newer"),
    ("host.xplane.pb", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "Git LFS pointer",
     "git lfs pull"),
    ("trace.json.xz", lzma.compress(b"{}"), "a compressed file or an archive", "Unpack it"),
    ("trace.json.gz", gzip.compress(gzip.compress(b"{}", mtime=0), mtime=0), "a compressed file or an archive",
     "Unpack it"),
    ("traces.tar.gz", gzip.compress(bytes(257) + b"ustar", mtime=0), "a compressed file or an archive", "Unpack it"),
    ("r.sqlite", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "Git LFS pointer",
     "git lfs pull"),
    ("host.xplane.pb", b"\n\xef\xbf\xbd\xef\xbf\xbd\x06\x08\x02\x12\x0a/host:CPU", "by copying it as text", "binary"),
    ("r.nsys-rep", b"NVIDIA Tegra Profiler Report", "Nsight Systems report", "2024 and later"),
    ("r.nsys-rep", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer", "git lfs pull"),
    ("r.nsys-rep", b"", "is empty", "Repeat it"), ("t.json", b" \r\n", "is empty", "Repeat it"),
    ("t.json", b"/annex/objects/SHA256E-s1--00.json\n", "git-annex pointer", "git annex get"),
    ("t.json", b"\n<!DOCTYPE html>\n<html>", "an HTML or XML page", "download the trace again"),
    ("host.xplane.pb", b'<?xml version="1.0"?><Error>', "an HTML or XML page", "download the trace again"),
    ("t.json", b'{"ph": "X"}\n{"ph": "X"}\n', "one per line", "one JSON list"),
])
def test_another_file_is_named_as_what_it_is(tmp_path, name, data, what, fix):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(GputopError) as error:
        load([path])
    assert what in error.value.message and fix in (error.value.fix or "")


def test_an_xspace_is_no_perfetto_trace(tmp_path):
    path = tmp_path / "no name"
    path.write_bytes(sample().bytes())
    assert load([path]).format == "xspace"
