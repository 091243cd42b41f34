"""Make a process run a script at the next safe point of its main thread: Python 3.14's remote execution (PEP 768).

``sys.remote_exec`` is for a Python of the very same minor version, so another one would have to be started for it:
the job's own, which as root would be to run other people's program, and from outside a container finds none of its
libraries. This speaks the protocol that CPython documents for tools
(https://docs.python.org/3/howto/remote_debugging.html): a path, a flag, and one bit that says there is something to do.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from gputop.core.errors import GputopError, os_errors_as
from gputop.launch.elf import addresses_in

# _Py_DebugOffsets, the beginning of _PyRuntime: numbers of 8 bytes each after the cookie. Where they are in it
# changes with the minor version only.
_COOKIE = b"xdebugpy"
_VERSION, _INTERPRETERS_HEAD = 1, 5
_INTERPRETER_ID, _INTERPRETER_NEXT, _THREADS_MAIN = 7, 8, 10
_SUPPORT = {14: 89, 15: 105}  # the first of struct _debugger_support, by minor version
_FINAL = 0xF  # release level in PY_VERSION_HEX; before that the layout may be any

# Of the eval breaker (pycore_ceval.h): stop; and signals, pending calls and exceptions of other threads, which are
# looked at then, whether there are any or not.
_STOP_AND_CHECK = 1 << 5 | 1 << 1 | 1 << 2 | 1 << 3
_MAX_INTERPRETERS = 1000
_END_OF_ADDRESSES = 1 << 62  # of processes; the kernel's begin above


class Slot(Struct, frozen=True):
    """The addresses in a process where its main thread takes requests."""

    path: int
    path_bytes: int
    pending: int
    eval_breaker: int


@contextlib.contextmanager
def memory_of(pid: int) -> Iterator[int]:
    """A descriptor of the process's memory, to be read and written. Raises GputopError."""
    with os_errors_as(f"cannot write to the memory of process {pid}", "Run gputop attach as root."):
        descriptor = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def find_slot(pid: int, memory: int) -> Slot | None:
    """None where its Python has no remote execution (before 3.14), or a version that gputop does not know.
    Raises GputopError where it is switched off."""
    try:
        runtime = addresses_in(pid, ("_PyRuntime",))["_PyRuntime"]
    except GputopError:
        return None
    try:
        return slot_at(memory, runtime)
    except OSError:
        raise GputopError(f"process {pid} has ended, or gputop cannot read its state", "Nothing was done.") from None


def slot_at(memory: int, runtime: int) -> Slot | None:
    """Read the slot at the address of ``_PyRuntime``, as :func:`find_slot`. Raises OSError where that is none."""
    cookie, version = _read(memory, runtime, 8), _word(memory, runtime + 8 * _VERSION)
    first = _SUPPORT.get(version >> 16 & 0xFF)
    if cookie != _COOKIE or version >> 24 != 3 or first is None or version >> 4 & 0xF != _FINAL:
        return None
    offsets = struct.unpack(f"<{first + 6}Q", _read(memory, runtime, 8 * (first + 6)))
    eval_breaker, support, enabled, pending, path, path_bytes = offsets[first:]

    interpreter = _word(memory, runtime + offsets[_INTERPRETERS_HEAD])
    for _ in range(_MAX_INTERPRETERS):  # the newest comes first, the main one last
        if not interpreter or _word(memory, interpreter + offsets[_INTERPRETER_ID]) == 0:
            break
        interpreter = _word(memory, interpreter + offsets[_INTERPRETER_NEXT])
    else:
        interpreter = 0
    thread = _word(memory, interpreter + offsets[_THREADS_MAIN]) if interpreter else 0
    if not thread:
        raise GputopError("the job's interpreter is starting or exiting", "Attach when the job is training.")
    if not _word(memory, interpreter + enabled, 4):
        raise GputopError("Python's remote execution is disabled in the job (PYTHON_DISABLE_REMOTE_DEBUG or -X "
                          "disable-remote-debug)", "Restart the job with gputop run.")
    slot = Slot(thread + support + path, path_bytes, thread + support + pending, thread + eval_breaker)
    for address in (slot.path, slot.pending, slot.eval_breaker):
        _read(memory, address, 1)
    return slot


def request(memory: int, slot: Slot, script: Path) -> None:
    """Request that ``script``, a path as the process sees it, is run. Raises GputopError."""
    path = os.fsencode(script) + b"\0"
    if len(path) > slot.path_bytes:
        raise GputopError(f"the path {script} is too long for Python's remote execution", "")
    try:
        if _word(memory, slot.pending, 4):
            raise GputopError("a request from another tool is pending in the job",
                              "The job's main thread serves that request first, when it next runs Python.")
        os.pwrite(memory, path, slot.path)
        os.pwrite(memory, struct.pack("<i", 1), slot.pending)
        # Only the lowest byte, because the others hold a version. Other threads set bits in it at any time, and one
        # set in between is lost: so this sets all bits that nobody would set again.
        (bits,) = _read(memory, slot.eval_breaker, 1)
        os.pwrite(memory, bytes([bits | _STOP_AND_CHECK]), slot.eval_breaker)
    except OSError:
        raise GputopError("the process has ended", "Nothing was done.") from None


def withdraw(memory: int, slot: Slot) -> None:
    """Withdraw a request that has not been served: otherwise it would be served later, without its script."""
    with contextlib.suppress(OSError):  # the process has ended
        os.pwrite(memory, struct.pack("<i", 0), slot.pending)


def _read(memory: int, address: int, size: int) -> bytes:
    """Raises OSError where the process has no such memory; the addresses are sums of numbers from that memory."""
    if not 0 <= address < _END_OF_ADDRESSES:
        raise OSError("the address is not valid in any process")
    data = os.pread(memory, size, address)
    if len(data) < size:  # nothing at all, once the process has ended
        raise OSError("the process's memory is gone")
    return data


def _word(memory: int, address: int, size: int = 8) -> int:
    return int.from_bytes(_read(memory, address, size), "little")
