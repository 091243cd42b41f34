"""The protocol against memory laid out as CPython's: of this process, so on any version. Against real ones: in
test_attach.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gputop.core.errors import GputopError
from gputop.launch import remote_exec
from tests.launch.python_memory import (
    BREAKER,
    BREAKER_BEFORE,
    MAIN,
    NEWER,
    PATH,
    PATH_BYTES,
    PENDING,
    RUNTIME,
    SUPPORT,
    THREAD,
    PythonMemory,
)
from tests.processes import asleep


@pytest.fixture
def memory() -> Iterator[int]:
    with remote_exec.memory_of(os.getpid()) as descriptor:
        yield descriptor


def _slot(memory: int, python: PythonMemory) -> remote_exec.Slot:
    slot = remote_exec.slot_at(memory, python.at)
    assert slot is not None
    return slot


@pytest.mark.parametrize("version", [0x030E00F0, 0x030E07F0, 0x030F00F0])
def test_the_main_thread_is_asked_and_a_request_is_taken_back(memory, version):
    python = PythonMemory(version)
    slot = _slot(memory, python)
    before = bytes(python.block)
    remote_exec.request(memory, slot, Path("/tmp/a.py"))
    assert (python.path, python.pending) == (b"/tmp/a.py", 1)
    # Stop; look after signals, calls and exceptions; what was set stays, and so does the version above the first byte.
    assert python.breaker == BREAKER_BEFORE | 0b101110
    changed = {i for i, (old, new) in enumerate(zip(before, bytes(python.block), strict=True)) if old != new}
    support = THREAD + SUPPORT
    assert changed <= {THREAD + BREAKER, support + PENDING, *range(support + PATH, support + PATH + 10)}
    remote_exec.withdraw(memory, slot)
    assert python.pending == 0


@pytest.mark.parametrize("python", [
    *map(PythonMemory, (0x030D02F0, 0x030E00A7, 0x030E00C1, 0x031400F0, 0x040E00F0)), PythonMemory(cookie=bytes(8))])
def test_layouts_that_are_not_known_are_left_alone(memory, python):
    assert remote_exec.slot_at(memory, python.at) is None


def test_where_it_is_switched_off_that_is_said(memory):
    python = PythonMemory(enabled=0)
    with pytest.raises(GputopError, match=r"disabled in the job \(PYTHON_DISABLE_REMOTE_DEBUG"):
        remote_exec.slot_at(memory, python.at)


@pytest.mark.parametrize("starts_or_ends", [
    lambda python: python.put("<Q", RUNTIME + 1500, 0),  # no interpreter
    lambda python: python.put("<Q", MAIN + 40, 0),  # no main thread
    lambda python: python.put("<Q", NEWER + 24, python.at + NEWER)])  # a list that never ends
def test_an_interpreter_that_starts_or_ends(memory, starts_or_ends):
    python = PythonMemory()
    starts_or_ends(python)
    with pytest.raises(GputopError, match="starting or exiting"):
        remote_exec.slot_at(memory, python.at)


def test_another_tools_request_is_not_overwritten(memory):
    python = PythonMemory()
    slot = _slot(memory, python)
    remote_exec.request(memory, slot, Path("/tmp/theirs.py"))
    with pytest.raises(GputopError, match="a request from another tool"):
        remote_exec.request(memory, slot, Path("/tmp/ours.py"))
    assert (python.path, python.pending) == (b"/tmp/theirs.py", 1)


def test_a_path_that_is_too_long_changes_nothing(memory):
    python = PythonMemory()
    slot = _slot(memory, python)
    with pytest.raises(GputopError, match="too long"):
        remote_exec.request(memory, slot, Path("/tmp", PATH_BYTES * "a"))
    assert (python.path, python.pending, python.breaker) == (b"", 0, BREAKER_BEFORE)


def test_a_process_that_has_ended():
    with asleep() as process, remote_exec.memory_of(process.pid) as memory:
        slot = remote_exec.Slot(4096, 64, 8192, 16384)
        process.kill()
        process.wait()
        with pytest.raises(GputopError, match="has ended"):
            remote_exec.request(memory, slot, Path("/tmp/a.py"))
        remote_exec.withdraw(memory, slot)  # no matter
        assert remote_exec.find_slot(process.pid, memory) is None
    with pytest.raises(GputopError, match="cannot write"), remote_exec.memory_of(process.pid):
        pass


def test_the_tests_own_python(memory):
    assert (remote_exec.find_slot(os.getpid(), memory) is not None) == (sys.version_info >= (3, 14))


@pytest.mark.parametrize("plant", [
    *(lambda python, at=at, value=value: python.put("<Q", at, value)
      for at in (RUNTIME + 8 * 5, RUNTIME + 8 * 7, RUNTIME + 8 * 8, RUNTIME + 8 * 10, RUNTIME + 1500, MAIN + 40,
                 *(RUNTIME + 8 * (89 + i) for i in range(5)))
      for value in (1 << 63, (1 << 63) - 8, (1 << 64) - 1, 1 << 62))])
def test_offsets_that_lead_nowhere_end_in_an_error_of_the_system(memory, plant):
    python = PythonMemory()
    plant(python)
    with pytest.raises(OSError):
        remote_exec.slot_at(memory, python.at)


def test_an_address_of_the_runtime_that_no_process_has(memory, monkeypatch):
    monkeypatch.setattr(remote_exec, "addresses_in", lambda *_: {"_PyRuntime": (1 << 64) - 8})
    with pytest.raises(GputopError, match="cannot read"):
        remote_exec.find_slot(os.getpid(), memory)
