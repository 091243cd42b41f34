"""Make a running process call one function, on a thread that sleeps, while all others continue. Linux on x86-64.

A debugger would stop every thread, for as long as it reads symbols, and an old one on a processor with AMX ends the
job: GDB 13 cannot write the registers of a Sapphire Rapids back, and the system call it interrupted fails with errno
514 (seen so). This takes one thread that sleeps in a system call, lets it make two calls more, and puts it back into
its sleep: :func:`_borrow` stops it; its own ``syscall`` instruction makes the call for memory and marks where the
called function returns to, so that no code is changed and no signal is used; the interrupted call is made again, as
the kernel itself does after a stop.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from gputop.core.errors import GputopError

# sys/ptrace.h
_GETREGS, _SETREGS, _DETACH, _SYSCALL = 12, 13, 17, 24
_GETREGSET, _SETREGSET, _SEIZE, _INTERRUPT = 0x4204, 0x4205, 0x4206, 0x4207
_O_TRACESYSGOOD = 1
_WALL = 0x40000000
_NT_X86_XSTATE = 0x202
_XSTATE_BYTES = 1 << 16  # AMX's tiles alone are 8 KiB
_AT_SYSCALL = 0x80 | 5  # SIGTRAP as TRACESYSGOOD marks it
# struct user_regs_struct of sys/user.h
_REGISTERS = ("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi",
              "orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs")
_LAYOUT = struct.Struct(f"<{len(_REGISTERS)}Q")
_USER64 = 0x33  # code segment of 64-bit programs
_SYSCALL_CODE = b"\x0f\x05"
_MMAP, _RESTART_SYSCALL = 9, 219
# Calls that are made again without the program noticing, those that sleep longest first: futex, clock_nanosleep,
# nanosleep, poll, ppoll, select, pselect6. epoll_wait is not among them: it ends with EINTR.
_RESTARTABLE = (202, 230, 35, 7, 271, 23, 270)
_RESTART_ERRORS = {-512, -513, -514}  # ERESTARTSYS, ERESTARTNOINTR, ERESTARTNOHAND of linux/errno.h
_RESTART_BLOCK_ERROR = -516  # ERESTART_RESTARTBLOCK
_STOP_S = 3.0  # a sleeping thread stops at once
_CALL_S = 5.0
_PERIOD_S = 0.002
_RED_ZONE = 128  # below the stack pointer, the interrupted function's own (x86-64 ABI)

Registers = dict[str, int]


class _Libc:
    def __init__(self) -> None:
        self._ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        self._ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
        self._ptrace.restype = ctypes.c_long

    def __call__(self, request: int, tid: int, address: object = None, data: object = None) -> None:
        if self._ptrace(request, tid, address, data) == -1:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


class _IoVector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def call_with_text(pid: int, function: int, first: int, text: bytes) -> int:
    """``function(first, address of text)`` in process ``pid``; returns its int. The text, and the page it lies in,
    stay. All arguments are addresses. Blocks for milliseconds. Raises GputopError; the process goes on regardless."""
    libc = _Libc()
    deadline = time.monotonic() + _STOP_S
    while time.monotonic() < deadline:
        for tid in _sleepers(pid):
            with _borrow(libc, tid) as registers:
                if registers is not None:
                    return _call(libc, pid, tid, registers, function, first, text)
        time.sleep(_PERIOD_S)
    raise GputopError(f"no thread of process {pid} sleeps where it can be borrowed",
                      "Frozen (by a container's pause, say) or busy through and through; try again.")


def _sleepers(pid: int) -> list[int]:
    """Threads in a system call that can be restarted, best first."""
    found = []
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        raise GputopError(f"process {pid} has ended", "Nothing was done.") from None
    for task in tasks:
        with contextlib.suppress(OSError, ValueError):
            number = int((task / "syscall").read_text().split()[0])  # "running" for those that are
            found.append((_RESTARTABLE.index(number), task.name == str(pid), int(task.name)))
    return [tid for *_, tid in sorted(found)]


@contextlib.contextmanager
def _borrow(libc: _Libc, tid: int) -> Iterator[Registers | None]:
    """Stop a thread in its system call, yield its registers, restore it; yields None where it is in none."""
    try:
        libc(_SEIZE, tid, None, _O_TRACESYSGOOD)
    except OSError as error:
        raise GputopError(f"the kernel does not let gputop take hold of thread {tid}: {error.strerror}",
                          "A debugger or strace may have it; else see gputop attach as root.") from None
    stopped = False
    try:
        libc(_INTERRUPT, tid)
        _wait(tid, _STOP_S)
        stopped = True
        registers = _get(libc, tid)
        with open(f"/proc/{tid}/mem", "rb", buffering=0) as memory:  # noqa: PTH123
            memory.seek(max(0, registers["rip"] - 2))
            in_call = (memory.read(2) == _SYSCALL_CODE and registers["cs"] == _USER64
                       and _signed(registers["orig_rax"]) in _RESTARTABLE)
        if not in_call:
            yield None
            return
        state = ctypes.create_string_buffer(_XSTATE_BYTES)
        vector = _IoVector(ctypes.addressof(state), _XSTATE_BYTES)
        libc(_GETREGSET, tid, _NT_X86_XSTATE, ctypes.byref(vector))
        try:
            yield registers
        finally:
            # The kernel set the vector's length to what this processor has.
            libc(_SETREGSET, tid, _NT_X86_XSTATE, ctypes.byref(vector))
            _set(libc, tid, _resumed(registers))
    except ProcessLookupError:
        raise GputopError(f"thread {tid} ended meanwhile", "Try again if the process is still there.") from None
    finally:
        if stopped:
            with contextlib.suppress(OSError):
                libc(_DETACH, tid)
        # A thread that did not stop is let go by the kernel when gputop ends.


def _resumed(registers: Registers) -> Registers:
    """The registers with which the kernel would continue the thread after an interruption without a signal."""
    result = _signed(registers["rax"])
    if result in _RESTART_ERRORS:
        return {**registers, "rip": registers["rip"] - 2, "rax": registers["orig_rax"]}
    if result == _RESTART_BLOCK_ERROR:
        return {**registers, "rip": registers["rip"] - 2, "rax": _RESTART_SYSCALL}
    return registers


def _call(libc: _Libc, pid: int, tid: int, registers: Registers, function: int, first: int, text: bytes) -> int:
    no_restart = {**registers, "orig_rax": _unsigned(-1)}
    mark = registers["rip"]  # the instruction pointer of a stop at our syscall instruction
    length = (len(text) + 1 + 4095) & ~4095
    # Anonymous, private, readable and writable (sys/mman.h).
    _set(libc, tid, {**no_restart, "rip": mark - 2, "rax": _MMAP, "rdi": 0, "rsi": length, "rdx": 3, "r10": 0x22,
                     "r8": _unsigned(-1), "r9": 0})
    _run_to_call(libc, tid, mark)
    libc(_SYSCALL, tid)
    _wait_for_call(libc, tid)
    page = _get(libc, tid)["rax"]
    if _signed(page) < 0:
        raise GputopError(f"process {pid} gets no memory: {os.strerror(-_signed(page))}", "Its limits may be reached.")
    stack = ((registers["rsp"] - _RED_ZONE) & ~15) - 8
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:  # noqa: PTH123
        memory.seek(page)
        memory.write(text + b"\0")
        memory.seek(stack)
        memory.write(struct.pack("<Q", mark - 2))  # it returns to the syscall instruction
    _set(libc, tid, {**no_restart, "rip": function, "rsp": stack, "rdi": first, "rsi": page, "rax": 0})
    returned = _run_to_call(libc, tid, mark)
    _set(libc, tid, {**_get(libc, tid), "orig_rax": _unsigned(-1)})  # this system call is skipped
    libc(_SYSCALL, tid)
    _wait_for_call(libc, tid)
    return ctypes.c_int(returned & 0xFFFFFFFF).value


def _run_to_call(libc: _Libc, tid: int, mark: int) -> int:
    """Continue to our own syscall instruction; returns the accumulator there. Other system calls pass."""
    entered = True
    libc(_SYSCALL, tid)
    while True:
        _wait_for_call(libc, tid)
        registers = _get(libc, tid)
        if entered and registers["rip"] == mark:
            return registers["orig_rax"]
        entered = not entered
        libc(_SYSCALL, tid)


def _wait_for_call(libc: _Libc, tid: int) -> None:
    """Wait for the next entry to or exit from a system call; forward signals meanwhile."""
    deadline = time.monotonic() + _CALL_S
    while True:
        try:
            status = _wait(tid, deadline - time.monotonic())
        except GputopError:
            libc(_INTERRUPT, tid)  # it must be stopped when its registers are restored
            _wait(tid, _STOP_S)
            raise
        number = os.WSTOPSIG(status)
        if number == _AT_SYSCALL:
            return
        libc(_SYSCALL, tid, None, 0 if status >> 16 else number)


def _wait(tid: int, timeout_s: float) -> int:
    """Wait until the thread stops; its wait status."""
    deadline = time.monotonic() + timeout_s
    while True:
        found, status = os.waitpid(tid, os.WNOHANG | _WALL)
        if found:
            if not os.WIFSTOPPED(status):
                raise ProcessLookupError
            return status
        if time.monotonic() > deadline:
            raise GputopError(f"thread {tid} does not stop within {timeout_s:.0f} s",
                              "It is frozen or hangs in the kernel; nothing was changed.")
        time.sleep(_PERIOD_S)


def _get(libc: _Libc, tid: int) -> Registers:
    buffer = ctypes.create_string_buffer(_LAYOUT.size)
    libc(_GETREGS, tid, None, buffer)
    return dict(zip(_REGISTERS, _LAYOUT.unpack(buffer.raw), strict=True))


def _set(libc: _Libc, tid: int, registers: Registers) -> None:
    libc(_SETREGS, tid, None, ctypes.create_string_buffer(_LAYOUT.pack(*registers.values()), _LAYOUT.size))


def _signed(value: int) -> int:
    return ctypes.c_int64(value).value


def _unsigned(value: int) -> int:
    return ctypes.c_uint64(value).value
