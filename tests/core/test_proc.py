"""What a process says of itself in /proc is read in bounds, and no link of its user's is followed there."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from gputop.core import proc
from gputop.core.files import folder_of_process
from gputop.core.proc import Mapping, mappings, read, read_maps

PACKAGE = Path(__file__).resolve().parents[2] / "gputop"


def test_the_maps_of_this_process() -> None:
    found = list(mappings(read_maps(os.getpid())))
    assert any(m.path == "[stack]" for m in found) and any(m.permissions == "r-xp" and ".so" in m.path for m in found)
    assert all(m.start < m.end for m in found) and found == sorted(found)


def test_a_line_of_maps() -> None:
    text = (b"55d0-55d8 r-xp 00000a00 08:01 12   /a b/c (deleted)\n7f00-7f10 rw-p 00000000 00:00 0 \n"
            b"nonsense\n\nx-y r-xp z 0 0 /p\n7f20-7f30 r--p 0000")
    assert list(mappings(text)) == [Mapping(0x55D0, 0x55D8, "r-xp", 0xA00, "/a b/c (deleted)"),
                                    Mapping(0x7F00, 0x7F10, "rw-p", 0, "")]


def test_paths_made_to_be_slow_take_linear_time() -> None:
    """A pattern without a beginning looked from each of their characters on: 8 million times in each of these lines."""
    line = b"7f0000000000-7f0000001000 r-xp 00000000 08:01 1 /" + b"ab" * 2000 + b"\n"
    assert len(list(mappings(line * 5000))) == 5000


def test_what_a_process_makes_long_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "maps").symlink_to("/dev/zero")  # as long as it likes
    monkeypatch.setattr(proc, "MAPS_BYTES", 1 << 20)
    assert len(read_maps(7, tmp_path)) == 1 << 20
    assert len(read(f"{tmp_path}/7/maps", 5)) == 5


def test_a_folder_of_a_process_s_root_is_entered_without_links(tmp_path: Path) -> None:
    root = tmp_path / "7" / "root"
    (root / "var" / "tmp").mkdir(parents=True)
    (tmp_path / "host").mkdir()
    with folder_of_process(7, Path("/var/tmp"), tmp_path) as folder:
        assert folder.names() == []
    (root / "tmp").symlink_to(tmp_path / "host")
    (root / "lib").symlink_to("var")
    for path in ("/tmp", "/lib/tmp", "/../../host", "/var/../../../host"):
        with pytest.raises(OSError):
            folder_of_process(7, Path(path), tmp_path)


def test_no_source_reads_these_files_without_a_bound() -> None:
    unbounded = re.compile(r"""/?["'](?:maps|smaps|environ|cmdline)["']\)?\)?\.(?:read_bytes|read_text|open)\(""")
    named = re.compile(r"""/proc/\{[^}]*\}/(?:maps|smaps|environ|cmdline)["']\)\.(?:read_bytes|read_text|open)\(""")
    found = [str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py")
             if unbounded.search(text := file.read_text()) or named.search(text)]
    assert found == []
