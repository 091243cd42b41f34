from __future__ import annotations

import io
import os
import resource
import shutil
import sys
from pathlib import Path

import pytest

from gputop.core.errors import GputopError
from gputop.core.proc import Mapping
from gputop.launch import elf
from gputop.launch.elf import addresses_in, functions_of
from tests.launch.elf_files import elf_file, symbol, with_symbols

_NAMES = ("Py_AddPendingCall", "PyRun_SimpleString")


def test_addresses_are_those_the_loader_gave():
    import ctypes

    own = {name: ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for name in _NAMES}
    assert addresses_in(os.getpid(), _NAMES) == own


def test_a_function_that_is_not_there():
    with pytest.raises(GputopError, match="is not Python"):
        addresses_in(os.getpid(), ("Py_NoSuchFunction",))


@pytest.mark.parametrize("size", [0, 4, 16, 63, 64, 200, 1000])
def test_a_truncated_file_is_reported(size):
    data = Path(sys.executable).resolve().read_bytes()[:size]
    with pytest.raises(ValueError, match="ELF"):
        functions_of(io.BytesIO(data), _NAMES)


def test_another_kind_of_file_is_reported():
    with pytest.raises(ValueError, match="not a 64-bit"):
        functions_of(io.BytesIO(b"\x7fELF\x01\x01" + bytes(200)), _NAMES)
    shell = shutil.which("sh")
    assert shell is not None
    assert functions_of(io.BytesIO(Path(shell).read_bytes()), _NAMES)[0] == {}


def test_pages_of_64_kib_as_some_kernels_for_aarch64_have(monkeypatch):
    segments = [(0x2FD10, 0x3FD10), (0x4FE80, 0x6FE80)]
    for page, start in ((1 << 12, 0xFFFF8003F000), (1 << 16, 0xFFFF80030000)):
        monkeypatch.setattr(elf, "_IN_PAGE", page - 1)
        mapped = [Mapping(start, start + page, "r-xp", 0x2FD10 & -page, "/lib/libpython3.14.so.1.0")]
        assert elf._shift(mapped, "/lib/libpython3.14.so.1.0", segments) == 0xFFFF80000000


# -- files of a job that attacks ----------------------------------------------------------------------

_FAR = (1 << 63) + 8


def test_a_file_made_by_hand_is_read() -> None:
    names = b"\0x" + _NAMES[0].encode() + b"\0" + _NAMES[1].encode() + b"\0"
    symbols = symbol(2, 4711) + symbol(2 + len(_NAMES[0]) + 1, 4712)
    assert functions_of(io.BytesIO(with_symbols(symbols, names)), _NAMES) == (
        {_NAMES[0]: 4711, _NAMES[1]: 4712}, [(0, 0)], True)


@pytest.mark.parametrize("data", [
    elf_file([(2, _FAR, 24, 0)]), elf_file([(3, 0, 64, 0), (2, 64, _FAR, 0)]),
    elf_file([(3, _FAR, _FAR, 0), (2, 64, 24, 0)]), elf_file([(2, 64, 24, 7)]), elf_file([], at=_FAR),
    elf_file([], loads=65535), elf_file([(3, 0, 64, 0), (2, 64, 1 << 40, 0)]),
])
def test_numbers_that_lead_out_of_the_file_are_damage(data: bytes) -> None:
    with pytest.raises(ValueError, match="damaged ELF file"):
        functions_of(io.BytesIO(data), _NAMES)


@pytest.mark.parametrize("data", [
    with_symbols(symbol(1, 1) * 40_000, b"\0" + b"x" * 1_000_000, tables=60_000),  # names without an end
    with_symbols(symbol(1, 1) * 40_000, b"Py_AddPendingCall\0" * 60_000, tables=60_000),
])
def test_many_tables_of_symbols_are_one(data: bytes) -> None:
    class Counted(io.BytesIO):
        reads = 0

        def read(self, size: int | None = -1, /) -> bytes:
            self.reads += 1
            return super().read(size)

    file = Counted(data)
    functions_of(file, _NAMES)
    assert file.reads == 5, "header, segments, sections, names, symbols"


def _library(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job has mapped that file, by what the kernel says."""
    maps = f"7f0000000000-7f0000001000 r-xp 00000000 00:00 1    {path}\n"
    monkeypatch.setattr(elf, "read_maps", lambda pid: maps.encode())


@pytest.fixture(params=["pipe", "device", "folder", "link", "link on the way", "sparse"])
def planted(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "libpython3.12.so.1.0"
    if request.param == "link on the way":
        (tmp_path / "real").mkdir()
        (tmp_path / "lib").symlink_to("real")
        path = tmp_path / "lib" / path.name
        path.write_bytes(elf_file([]))
    elif request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "device":
        path.symlink_to("/dev/zero")
    elif request.param == "folder":
        path.mkdir()
    elif request.param == "link":
        (tmp_path / "real").write_bytes(elf_file([]))
        path.symlink_to(tmp_path / "real")
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    return path


def test_what_a_job_has_put_in_the_place_of_its_library_is_refused_at_once(
        planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _library(planted, monkeypatch)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(GputopError, match="cannot read"):
        addresses_in(os.getpid(), _NAMES)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_an_address_that_no_process_has_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libpython3.12.so"
    library.write_bytes(with_symbols(symbol(1, (1 << 64) - 8), b"\0_PyRuntime\0"))
    _library(library, monkeypatch)
    with pytest.raises(GputopError, match="is not Python"):
        addresses_in(os.getpid(), ("_PyRuntime",))
