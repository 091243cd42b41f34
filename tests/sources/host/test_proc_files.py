"""The files of /proc/PID: whatever bytes stand in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gputop.sources.host import proc_files as pf
from gputop.sources.host.proc_files import Status


def test_reading_stops_at_the_limit(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 200_000)
    assert len(pf.read(f"{tmp_path}/f", 150_000)) == 150_000
    assert len(pf.read(f"{tmp_path}/f", 1 << 20)) == 200_000
    assert pf.read(f"{tmp_path}/f", 10) == b"x" * 10
    assert pf.read("/dev/null") == b""
    with pytest.raises(FileNotFoundError):
        pf.read(f"{tmp_path}/g")
    with pytest.raises(IsADirectoryError):
        pf.read(str(tmp_path))


def test_stat_of_this_process() -> None:
    stat = pf.parse_stat(pf.read("/proc/self/stat"))
    assert (stat.parent, stat.state) == (os.getppid(), "R")
    assert stat.name.decode() == Path("/proc/self/comm").read_text().strip()


REST = b" S 1 0 0 0 0 0 0 0 0 0 5 6 0 0 20 0 7 0 500 0 256 0"


@pytest.mark.parametrize("text", [
    b"", b"1 (a", b"1 (a) S 2 3", b"\xff" * 300, b"1 (a)" + REST.replace(b" 500 ", b" x "),
    b"1 (a)" + REST.replace(b" S ", b" \xff "),
])
def test_a_stat_that_makes_no_sense(text: bytes) -> None:
    assert pf.parse_stat(text) is None


def test_a_name_may_hold_anything() -> None:
    stat = pf.parse_stat(b"1 (a) R 9 (\xff))" + REST)
    assert (stat.name, stat.parent, stat.cpu_ticks, stat.threads, stat.start, stat.rss_pages) == (
        b"a) R 9 (\xff)", 1, 11, 7, 500, 256)


@pytest.mark.parametrize(("text", "found"), [
    (b"rchar: 5\nread_bytes: 7\nwrite_bytes: 8\ncancelled_write_bytes: 3\n", (7, 8)),
    (b"read_bytes: 7\n", None), (b"read_bytes: x\nwrite_bytes: 8\n", None), (b"", None), (b"\xff\n: \n", None),
])
def test_io(text: bytes, found: tuple[int, int] | None) -> None:
    assert pf.parse_io(text) == found


@pytest.mark.parametrize(("text", "found"), [
    (b"Name:\tx\nUid:\t1000\t0\t0\t0\nNSpid:\t41231\t7\n", Status(1000, (41231, 7))),
    (b"Uid:\t0\t0\t0\t0\n", Status(0, ())),  # kernels without CONFIG_PID_NS
    (b"Uid:\nNSpid:\tx\n", Status(None, ())), (b"", Status(None, ())), (b"\xff\xfe", Status(None, ())),
])
def test_status(text: bytes, found: Status) -> None:
    assert pf.parse_status(text) == found


@pytest.mark.parametrize(("cmdline", "text"), [
    (b"python\0train.py\0", "python train.py"),
    (b"title set by the program", "title set by the program"),
    (b"a\x1b[2J\0\xff\0", "a\ufffd[2J \ufffd"),
    (b"", "[name\ufffd]"), (b"\0\0", "[name\ufffd]"),
])
def test_command(cmdline: bytes, text: str) -> None:
    assert pf.command(cmdline, b"name\x1b") == text


def test_a_long_command_shows_that_it_is_cut() -> None:
    text = pf.command(b"x" * 2_000_000, b"")
    assert len(text) == 4096 and text.endswith("x…")


@pytest.mark.parametrize(("environ", "value"), [
    (b"A=1\0CUDA_VISIBLE_DEVICES=0,1\0B=2\0", "0,1"), (b"CUDA_VISIBLE_DEVICES=\0", ""),
    (b"CUDA_VISIBLE_DEVICES=a=b\x1b\0", "a=b\ufffd"),
    (b"XCUDA_VISIBLE_DEVICES=0\0CUDA_VISIBLE_DEVICES\0", None), (b"", None), (b"\xff\0=\0", None),
])
def test_variable(environ: bytes, value: str | None) -> None:
    assert pf.variable(environ, b"CUDA_VISIBLE_DEVICES") == value
