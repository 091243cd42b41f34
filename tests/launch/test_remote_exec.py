"""The protocol against memory laid out as CPython's: of this process, so on any version. Against real ones: in
test_attach.py."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gputop.core.errors import GputopError
from gputop.launch import remote_exec

_FIRST = {14: 89, 15: 105}
_RUNTIME, _NEWER, _MAIN, _THREAD = 0, 2048, 3072, 4096  # where they are in the made-up memory
_SUPPORT, _PENDING, _PATH, _PATH_BYTES, _BREAKER, _ENABLED = 600, 8, 12, 64, 24, 320
_BREAKER_BEFORE = 0x0000_0123_4567_8911


class _Python:
    """The parts of a CPython's memory that the protocol names, two interpreters in it."""

    def __init__(self, version: int = 0x030E03F0, *, cookie: bytes = b"xdebugpy", enabled: int = 1) -> None:
        self.block = ctypes.create_string_buffer(8192)
        self.at = ctypes.addressof(self.block)
        offsets = [0] * 128
        offsets[1], offsets[5] = version, 1500
        offsets[7], offsets[8], offsets[10] = 16, 24, 40
        first = _FIRST.get(version >> 16 & 0xFF, 89)
        offsets[first:first + 6] = [_BREAKER, _SUPPORT, _ENABLED, _PENDING, _PATH, _PATH_BYTES]
        struct.pack_into("<128Q", self.block, _RUNTIME, *offsets)
        self.block[_RUNTIME:_RUNTIME + 8] = cookie
        self.put("<Q", _RUNTIME + 1500, self.at + _NEWER)
        for interpreter, number, following in ((_NEWER, 1, self.at + _MAIN), (_MAIN, 0, 0)):
            self.put("<q", interpreter + 16, number)
            self.put("<Q", interpreter + 24, following)
            self.put("<i", interpreter + _ENABLED, enabled)
        self.put("<Q", _MAIN + 40, self.at + _THREAD)
        self.put("<Q", _THREAD + _BREAKER, _BREAKER_BEFORE)

    def put(self, form: str, offset: int, value: int) -> None:
        struct.pack_into(form, self.block, offset, value)

    @property
    def pending(self) -> int:
        return int(struct.unpack_from("<i", self.block, _THREAD + _SUPPORT + _PENDING)[0])

    @property
    def path(self) -> bytes:
        return ctypes.string_at(self.at + _THREAD + _SUPPORT + _PATH)

    @property
    def breaker(self) -> int:
        return int(struct.unpack_from("<Q", self.block, _THREAD + _BREAKER)[0])


@pytest.fixture
def memory() -> Iterator[int]:
    with remote_exec.memory_of(os.getpid()) as descriptor:
        yield descriptor


@pytest.mark.parametrize("version", [0x030E00F0, 0x030E07F0, 0x030F00F0])
def test_the_main_thread_is_asked_and_a_request_is_taken_back(memory, version):
    python = _Python(version)
    slot = remote_exec.slot_at(memory, python.at)
    assert slot is not None
    before = bytes(python.block)
    remote_exec.request(memory, slot, Path("/tmp/a.py"))
    assert (python.path, python.pending) == (b"/tmp/a.py", 1)
    # Stop; look after signals, calls and exceptions; what was set stays, and so does the version above the first byte.
    assert python.breaker == _BREAKER_BEFORE | 0b101110
    changed = {i for i, (old, new) in enumerate(zip(before, bytes(python.block), strict=True)) if old != new}
    support = _THREAD + _SUPPORT
    assert changed <= {_THREAD + _BREAKER, support + _PENDING, *range(support + _PATH, support + _PATH + 10)}
    remote_exec.withdraw(memory, slot)
    assert python.pending == 0


@pytest.mark.parametrize("version", [0x030D02F0, 0x030E00A7, 0x030E00C1, 0x031400F0, 0x040E00F0])
def test_layouts_that_are_not_known_are_left_alone(memory, version):
    python = _Python(version)
    assert remote_exec.slot_at(memory, python.at) is None


def test_another_pythons_memory_is_left_alone(memory):
    python = _Python(cookie=bytes(8))
    assert remote_exec.slot_at(memory, python.at) is None


def test_where_it_is_switched_off_that_is_said(memory):
    python = _Python(enabled=0)
    with pytest.raises(GputopError, match=r"switched off in the job \(PYTHON_DISABLE_REMOTE_DEBUG"):
        remote_exec.slot_at(memory, python.at)


@pytest.mark.parametrize("starts_or_ends", [
    lambda python: python.put("<Q", _RUNTIME + 1500, 0),  # no interpreter
    lambda python: python.put("<Q", _MAIN + 40, 0),  # no main thread
    lambda python: python.put("<Q", _NEWER + 24, python.at + _NEWER)])  # a list that never ends
def test_an_interpreter_that_starts_or_ends(memory, starts_or_ends):
    python = _Python()
    starts_or_ends(python)
    with pytest.raises(GputopError, match="starting or ending"):
        remote_exec.slot_at(memory, python.at)


def test_another_tools_request_is_not_overwritten(memory):
    python = _Python()
    slot = remote_exec.slot_at(memory, python.at)
    assert slot is not None
    remote_exec.request(memory, slot, Path("/tmp/theirs.py"))
    with pytest.raises(GputopError, match="another tool's request"):
        remote_exec.request(memory, slot, Path("/tmp/ours.py"))
    assert (python.path, python.pending) == (b"/tmp/theirs.py", 1)


def test_a_path_that_is_too_long_changes_nothing(memory):
    python = _Python()
    slot = remote_exec.slot_at(memory, python.at)
    assert slot is not None
    with pytest.raises(GputopError, match="too long"):
        remote_exec.request(memory, slot, Path("/tmp", _PATH_BYTES * "a"))
    assert (python.path, python.pending, python.breaker) == (b"", 0, _BREAKER_BEFORE)


def test_a_process_that_has_ended():
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process, \
            remote_exec.memory_of(process.pid) as memory:
        slot = remote_exec.Slot(4096, 64, 8192, 16384)
        process.communicate()
        with pytest.raises(GputopError, match="has ended"):
            remote_exec.request(memory, slot, Path("/tmp/a.py"))
        remote_exec.withdraw(memory, slot)  # no matter
        assert remote_exec.find_slot(process.pid, memory) is None
    with pytest.raises(GputopError, match="cannot be written"), remote_exec.memory_of(process.pid):
        pass


def test_the_tests_own_python(memory):
    assert (remote_exec.find_slot(os.getpid(), memory) is not None) == (sys.version_info >= (3, 14))


@pytest.mark.parametrize("plant", [
    *(lambda python, at=at, value=value: python.put("<Q", at, value)
      for at in (_RUNTIME + 8 * 5, _RUNTIME + 8 * 7, _RUNTIME + 8 * 8, _RUNTIME + 8 * 10, _RUNTIME + 1500, _MAIN + 40,
                 *(_RUNTIME + 8 * (89 + i) for i in range(5)))
      for value in (1 << 63, (1 << 63) - 8, (1 << 64) - 1, 1 << 62))])
def test_offsets_that_lead_nowhere_end_in_an_error_of_the_system(memory, plant):
    python = _Python()
    plant(python)
    with pytest.raises(OSError):
        remote_exec.slot_at(memory, python.at)


def test_an_address_of_the_runtime_that_no_process_has(memory, monkeypatch):
    monkeypatch.setattr(remote_exec, "addresses_in", lambda *_: {"_PyRuntime": (1 << 64) - 8})
    with pytest.raises(GputopError, match="cannot be read"):
        remote_exec.find_slot(os.getpid(), memory)
