"""Make a running process call one function, on a thread that sleeps, while all others continue. Linux on x86-64.

A debugger would stop every thread, for as long as it reads symbols, and an old one on a processor with AMX ends the
job: GDB 13 cannot write the registers of a Sapphire Rapids back, and the system call it interrupted fails with errno
514 (seen so). This takes one thread that sleeps in a system call, lets it call mmap and the function, and puts it
back into its sleep: the interrupted call is made again, as the kernel itself does after a stop.

The thread is safe at each moment, whoever ends gputop. Signals that can be blocked are held until the thread is
released. For those that cannot (SIGKILL) each state that the thread is put into leads back to its sleep by itself:
:mod:`gputop.launch.return_frame`. Code of the process is used, none is changed, no signal is sent to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import time
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from gputop.core.errors import GputopError
from gputop.core.proc import Mapping, mappings, read_maps
from gputop.core.signal_handlers import signals_held
from gputop.launch import ptrace
from gputop.launch.ptrace import Registers, Tracee
from gputop.launch.return_frame import NO_RESULT, Gadgets, ReturnFrame, frame_for, gadgets_in

_USER64 = 0x33  # code segment of 64-bit programs
_SYSCALL_CODE = b"\x0f\x05"
_MMAP, _SCHED_YIELD, _RESTART_SYSCALL = 9, 24, 219
# Calls that are made again without the program noticing, those that sleep longest first: futex, clock_nanosleep,
# nanosleep, poll, ppoll, select, pselect6. epoll_wait is not among them: it ends with EINTR.
_RESTARTABLE = (202, 230, 35, 7, 271, 23, 270)
_RESTART_ERRORS = {-512, -513, -514}  # ERESTARTSYS, ERESTARTNOINTR, ERESTARTNOHAND of linux/errno.h
_RESTART_BLOCK_ERROR = -516  # ERESTART_RESTARTBLOCK
_MINUS_ONE = (1 << 64) - 1  # in a register
_PERIOD_S = 0.002
_STACK_BYTES = 1 << 15  # free stack that a thread must have: the frame takes 4 KiB, 12 KiB with AMX


class _Sleeper(Struct, frozen=True):
    tid: int
    lowest: int  # the lowest address of its stack


class _RemoteCall(Struct, frozen=True):
    function: int  # its address
    first: int  # its first argument
    text: bytes  # its second argument is the address of this


def call_with_text(pid: int, memory: int, function: int, first: int, text: bytes) -> int:
    """``function(first, address of text)`` in process ``pid``; returns its int. The text, and the page it lies in,
    stay. ``memory`` is its open memory (:func:`gputop.launch.remote_exec.memory_of`); all arguments are addresses.
    Blocks; one thread is held for about a millisecond. Raises GputopError; the process goes on regardless."""
    _check_shadow_stack(pid)
    gadgets = gadgets_in(memory, _mappings(pid))
    deadline = time.monotonic() + ptrace.STOP_S
    while time.monotonic() < deadline:
        for sleeper in _sleepers(pid):
            with signals_held(), _borrow(pid, memory, sleeper, gadgets) as borrowed:
                if borrowed is not None:
                    return _call(memory, *borrowed, gadgets, _RemoteCall(function, first, text))
        time.sleep(_PERIOD_S)
    raise GputopError(f"no thread of process {pid} sleeps where gputop can use it for a moment",
                      "The process is frozen (a paused container?) or never sleeps. Try again.")


def _mappings(pid: int) -> list[Mapping]:
    try:
        return list(mappings(read_maps(pid)))
    except OSError:
        raise GputopError(f"process {pid} has ended", "Nothing was done.") from None


def _check_shadow_stack(pid: int) -> None:
    with contextlib.suppress(OSError):
        if re.search(r"^x86_Thread_features:.*\bshstk\b", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE):
            raise GputopError(f"process {pid} runs with a shadow stack, so gputop cannot use one of its threads",
                              "Restart the job with gputop run.")


def _sleepers(pid: int) -> list[_Sleeper]:
    """Threads in a system call that can be restarted, with room on their stack, best first."""
    sleepers = []
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        raise GputopError(f"process {pid} has ended", "Nothing was done.") from None
    stacks = [mapping for mapping in _mappings(pid) if mapping.permissions.startswith("rw")]  # by address
    starts = [mapping.start for mapping in stacks]
    for task in tasks:
        with contextlib.suppress(OSError, ValueError):
            fields = (task / "syscall").read_text().split()  # "running" for those that are
            number, pointer = int(fields[0]), int(fields[-2], 16)
            rank = _RESTARTABLE.index(number)
            stack = bisect_right(starts, pointer) - 1
            lowest = stacks[stack].start if stack >= 0 and pointer < stacks[stack].end else pointer
            if pointer - lowest >= _STACK_BYTES:
                sleepers.append((rank, task.name == str(pid), _Sleeper(int(task.name), lowest)))
    return [sleeper for *_, sleeper in sorted(sleepers, key=lambda f: (f[0], f[1], f[2].tid))]


@contextlib.contextmanager
def _borrow(
    pid: int, memory: int, sleeper: _Sleeper, gadgets: Gadgets,
) -> Iterator[tuple[Tracee, Registers, ReturnFrame] | None]:
    """Stop a thread in its system call, yield its registers and its way back, restore it; yields None where it is in
    none."""
    tracee = Tracee(sleeper.tid)
    task = Path(f"/proc/{pid}/task/{sleeper.tid}")
    tracee.seize()
    try:
        registers = tracee.registers() if tracee.interrupt() else None
        # The memory is that of the process as it was found. One that has called exec, or another one that has got its
        # number, does not have it.
        if registers is None or not (
                registers["cs"] == _USER64 and _signed(registers["orig_rax"]) in _RESTARTABLE
                and registers["rsp"] - sleeper.lowest >= _STACK_BYTES and task.exists()
                and os.pread(memory, 2, max(0, registers["rip"] - 2)) == _SYSCALL_CODE):
            yield None
            return
        frame = frame_for(_resumed(registers, alone=True), tracee.signal_mask(), tracee.save_xstate(),
                          registers["rsp"], gadgets)
        os.pwrite(memory, frame.data, frame.address)
        try:
            yield tracee, registers, frame
        except BaseException:
            # Somewhere in the function or in a call: from there by the way back.
            tracee.stop()
            tracee.set_registers({**registers, "rax": 0, "orig_rax": _SCHED_YIELD, "rip": gadgets.syscall + 2,
                                  "rsp": frame.back})
            raise
        tracee.restore_xstate()
        tracee.set_registers(_resumed(registers))
    except ProcessLookupError:
        tracee.reap()
        raise GputopError(f"thread {sleeper.tid} ended meanwhile", "Try again if the process is still there.") from None
    finally:
        tracee.detach()


def _resumed(registers: Registers, alone: bool = False) -> Registers:
    """The registers with which the kernel would continue the thread after an interruption without a signal.

    ``alone``: after rt_sigreturn, which forgets how much of a timeout had passed: the call is made anew.
    """
    result = _signed(registers["rax"])
    if result in _RESTART_ERRORS or (alone and result == _RESTART_BLOCK_ERROR):
        return {**registers, "rip": registers["rip"] - 2, "rax": registers["orig_rax"]}
    if result == _RESTART_BLOCK_ERROR:
        return {**registers, "rip": registers["rip"] - 2, "rax": _RESTART_SYSCALL}
    return registers


def _call(
    memory: int, tracee: Tracee, registers: Registers, frame: ReturnFrame, gadgets: Gadgets, call: _RemoteCall,
) -> int:
    no_restart = {**registers, "orig_rax": _MINUS_ONE}
    length = (len(call.text) + 1 + 4095) & ~4095
    # Anonymous, private, readable and writable (sys/mman.h).
    tracee.set_registers({**no_restart, "rip": gadgets.syscall, "rsp": frame.back, "rax": _MMAP, "rdi": 0,
                          "rsi": length, "rdx": 3, "r10": 0x22, "r8": _MINUS_ONE, "r9": 0})
    _run_to_call(tracee, gadgets.syscall + 2, frame.back)
    tracee.next_syscall_stop()
    page = tracee.registers()["rax"]
    if _signed(page) < 0:
        raise GputopError(f"the process cannot get memory: {os.strerror(-_signed(page))}",
                          "Its limits may be reached.")
    os.pwrite(memory, call.text + b"\0", page)
    tracee.set_registers({**no_restart, "rip": call.function, "rsp": frame.calls if gadgets.store else frame.back,
                          "rbx": frame.result, "rdi": call.first, "rsi": page, "rax": 0})
    _run_to_call(tracee, gadgets.after_sigreturn, frame.context)
    # Another call in the place of rt_sigreturn, which every seccomp filter lets pass, and after it rt_sigreturn again.
    tracee.set_registers({**tracee.registers(), "orig_rax": _SCHED_YIELD, "rip": gadgets.syscall + 2,
                          "rsp": frame.back})
    tracee.next_syscall_stop()
    result = int.from_bytes(os.pread(memory, 4, frame.result), "little", signed=True)  # 0 once the process has ended
    return 0 if result == NO_RESULT else result  # nowhere stored: whether it is called shows in time


def _run_to_call(tracee: Tracee, instruction: int, stack: int) -> None:
    """Continue to the entry to the system call before ``instruction``. Other system calls pass."""
    entered = False
    while True:
        tracee.next_syscall_stop()
        entered = not entered
        if entered:
            registers = tracee.registers()
            if registers["rip"] == instruction and registers["rsp"] == stack:
                return


def _signed(value: int) -> int:
    return ctypes.c_int64(value).value
