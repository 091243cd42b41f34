"""Make a running process call one function, on one of its threads, while all others continue. Linux on x86-64.

A debugger would stop every thread, for as long as it reads symbols, and an old one on a processor with AMX ends the
job: GDB 13 cannot write the registers of a Sapphire Rapids back, and the system call it interrupted fails with errno
514 (seen so). This takes one thread that sleeps in a system call, lets it call mmap and the function, and puts it
back into its sleep: the interrupted call is made again, as the kernel itself does after a stop. Where none sleeps, as
in a job with a single thread, the main thread is stopped at the entry to its next system call, or in the code of its
framework, where the function comes as a signal's handler would.

The thread is safe at each moment, whoever ends gputop. Signals that can be blocked are held until the thread is
released. For those that cannot (SIGKILL) each state that the thread is put into leads back to its sleep by itself
(:class:`ReturnFrame`). Code of the process is used, none is changed, no signal is sent to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import struct
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from gputop.core.errors import GputopError
from gputop.core.proc import Mapping, cpu_time_ns, environ_of, mappings, read_maps
from gputop.launch import ptrace
from gputop.launch.deadline import Deadline, TooLate, in_time
from gputop.launch.ptrace import Registers, Tracee

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
SEARCH_S = 3.0  # for a thread that can be used
# A thread that works is let run for a slice to its next system call, and then looked at where it is.
_SLICE_S, _AT_WORK_S = 0.02, 0.3
_AT_ENTRY = -38  # ENOSYS: what a system call returns until it is made
# At these the thread may have a handler's frame (rt_sigreturn, restart_syscall), come into two (clone, fork, vfork,
# clone3), end (execve, exit, exit_group, execveat), or hold its point in a queue for a lock (futex).
_UNSUITABLE = frozenset((15, 219, 56, 57, 58, 435, 59, 60, 231, 322, 202, -1))
_HANDLER_CLEARS = 1 << 8 | 1 << 10 | 1 << 16  # TF, DF and RF of eflags
# Code that Python calls, and that does not call back while it holds a lock of Python's.
_FRAMEWORK_LIBRARY = re.compile(r"/(?:torch|numpy|numpy\.libs|scipy|jaxlib|tensorflow)/(?:.*/)?[^/]*\.so[.0-9]*$")
_STACK_BYTES = 1 << 15  # free stack that a thread must have: the frame takes 4 KiB, 12 KiB with AMX


class _Thread(Struct, frozen=True):
    tid: int
    lowest: int  # the lowest address of its stack
    works: bool = False  # else it sleeps


class _Point(Struct, frozen=True):
    """Point at which a thread was stopped. ``alone`` are the registers with which it goes on by its way back,
    ``resumed`` those with which gputop lets it go on; ``entered``: at the entry to a system call, which is made only
    then."""

    registers: Registers
    alone: Registers
    resumed: Registers
    entered: bool = False


class _RemoteCall(Struct, frozen=True):
    function: int  # its address
    first: int  # its first argument
    text: bytes  # its second argument is the address of this


def call_with_text(pid: int, memory: int, function: int, first: int, text: bytes) -> int:
    """``function(first, address of text)`` in process ``pid``; returns its int. The text, and the page it lies in,
    stay. ``memory`` is its open memory (:func:`gputop.launch.remote_exec.memory_of`); all arguments are addresses.
    Blocks, for :data:`~gputop.launch.deadline.MOST_S` at most; one thread is held for about a millisecond. Raises
    GputopError; the process goes on regardless."""
    call = _RemoteCall(function, first, text)
    return in_time(pid, memory, lambda duplicate, deadline: _call_on_some_thread(pid, duplicate, call, deadline))


def _call_on_some_thread(pid: int, memory: int, call: _RemoteCall, deadline: Deadline) -> int:
    _check_shadow_stack(pid)
    gadgets = gadgets_in(memory, _mappings(pid))
    before_ns, search = cpu_time_ns(pid), deadline.within(SEARCH_S)
    while True:
        for thread in _threads(pid):
            with _borrow(pid, memory, thread, gadgets, search) as borrowed:
                if borrowed is not None:
                    return _call(memory, *borrowed, gadgets, call, deadline.within(ptrace.CALL_S))
        if search.over:
            deadline.check()
            raise _no_thread(pid, before_ns)
        time.sleep(_PERIOD_S)


def _no_thread(pid: int, before_ns: int | None) -> GputopError:
    """The error of a process of which no thread could be used, by what it did meanwhile."""
    now_ns = cpu_time_ns(pid)
    if now_ns is not None and now_ns == before_ns:
        return GputopError(f"no thread of process {pid} has run for {SEARCH_S:g} s, and none is sleeping where gputop "
                           "can use it", "The process is frozen (a paused container?) or waiting for something else.")
    return GputopError(
        f"process {pid} is computing without system calls and outside its framework's libraries, so there is no safe "
        "point at which gputop can use one of its threads",
        "Start the job with gputop run, which needs no safe point." if "GPUTOP_RUN" not in environ_of(pid) else
        "Try again once the job has imported its framework: gputop run starts a server then.")


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


def _threads(pid: int) -> list[_Thread]:
    """Threads that can be used, with room on their stack: those in a system call that can be restarted, best first; if
    there is none, the main thread where it works."""
    sleepers = []
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        raise GputopError(f"process {pid} has ended", "Nothing was done.") from None
    stacks = [mapping for mapping in _mappings(pid) if mapping.permissions.startswith("rw")]  # by address
    starts = [mapping.start for mapping in stacks]
    works = False
    for task in tasks:
        with contextlib.suppress(OSError, ValueError):
            fields = (task / "syscall").read_text().split()  # "running" for those that are
            works = works or (task.name == str(pid) and fields == ["running"])
            number, pointer = int(fields[0]), int(fields[-2], 16)
            rank = _RESTARTABLE.index(number)
            stack = bisect_right(starts, pointer) - 1
            lowest = stacks[stack].start if stack >= 0 and pointer < stacks[stack].end else pointer
            if pointer - lowest >= _STACK_BYTES:
                sleepers.append((rank, task.name == str(pid), _Thread(int(task.name), lowest)))
    if not sleepers and works:  # of the others' stacks nothing says where they end
        return [_Thread(pid, mapping.start, works=True) for mapping in stacks if mapping.path == "[stack]"]
    return [sleeper for *_, sleeper in sorted(sleepers, key=lambda f: (f[0], f[1], f[2].tid))]


@contextlib.contextmanager
def _borrow(
    pid: int, memory: int, thread: _Thread, gadgets: Gadgets, deadline: Deadline,
) -> Iterator[tuple[Tracee, Registers, ReturnFrame] | None]:
    """Stop a thread, yield its registers and its way back, restore it; yields None where it cannot be used there."""
    tracee = Tracee(thread.tid)
    tracee.seize()
    try:
        point = _at_work(pid, tracee, memory, thread, deadline) if thread.works else (
            _asleep(pid, tracee, memory, thread, deadline))
        if point is None:
            yield None
            return
        frame = frame_for(point.alone, tracee.signal_mask(), tracee.save_xstate(), point.registers["rsp"], gadgets)
        os.pwrite(memory, frame.data, frame.address)
        # From anywhere, by the way back; at the entry to a system call, by another one that every seccomp filter lets
        # pass.
        back = {**point.registers, "rax": 0, "orig_rax": _SCHED_YIELD, "rip": gadgets.syscall + 2, "rsp": frame.back}
        try:
            if point.entered:
                tracee.set_registers(back)
                tracee.next_syscall_stop(deadline)
            yield tracee, point.registers, frame
        except BaseException:
            # Somewhere in the function or in a call.
            tracee.stop(deadline.after(ptrace.STOP_S))
            tracee.set_registers(back)
            raise
        tracee.restore_xstate()
        tracee.set_registers(point.resumed)
    except ProcessLookupError:
        tracee.reap(deadline.after(ptrace.STOP_S))
        raise GputopError(f"thread {thread.tid} of process {pid} ended while gputop held it",
                          "Capture again if the process is still running.") from None
    finally:
        tracee.detach(deadline.after(ptrace.STOP_S))


def _asleep(pid: int, tracee: Tracee, memory: int, thread: _Thread, deadline: Deadline) -> _Point | None:
    """Stop a thread in the system call that it sleeps in; None where it has left it."""
    registers = tracee.registers() if tracee.interrupt(deadline.within(ptrace.STOP_S)) else None
    if registers is None or _signed(registers["orig_rax"]) not in _RESTARTABLE or not (
            _is_at_call(pid, memory, thread, registers)):
        return None
    return _Point(registers, _resumed(registers, alone=True), _resumed(registers))


def _at_work(pid: int, tracee: Tracee, memory: int, thread: _Thread, deadline: Deadline) -> _Point | None:
    """Stop a thread that computes where it holds no lock that the function could wait for: at the entry to its next
    system call, or in the code of a library of its framework. There the function is what a signal's handler would be:
    it may come between any two instructions, and keeps off the red zone.

    In Python's own code the thread may hold the lock of the pending calls, in the C library or the loader one of
    theirs, and in code without a file a restartable sequence may be under way."""
    code = [mapping for mapping in _mappings(pid)
            if mapping.permissions == "r-xp" and _FRAMEWORK_LIBRARY.search(mapping.path)]
    search = deadline.within(_AT_WORK_S)
    if not tracee.interrupt(deadline.within(ptrace.STOP_S)):
        return None
    while True:
        registers = tracee.registers()
        if tracee.at_syscall:
            if (_signed(registers["orig_rax"]) in _UNSUITABLE or _signed(registers["rax"]) != _AT_ENTRY
                    or not _is_at_call(pid, memory, thread, registers)):
                return None
            again = {**registers, "rip": registers["rip"] - 2, "rax": registers["orig_rax"], "orig_rax": _MINUS_ONE}
            return _Point(registers, again, again, entered=True)
        if (tracee.interrupted and _signed(registers["orig_rax"]) < 0 and _is_usable(pid, thread, registers)
                and any(m.start <= registers["rip"] < m.end for m in code)
                and len(os.pread(memory, 1, registers["rip"])) == 1):
            return _Point(registers, registers, registers)
        if search.over:
            return None
        with contextlib.suppress(TooLate):
            tracee.next_syscall_stop(search.within(_SLICE_S))
        tracee.stop(deadline.after(ptrace.STOP_S))


def _is_at_call(pid: int, memory: int, thread: _Thread, registers: Registers) -> bool:
    """Return whether a thread is at a system call, and usable. The memory is that of the process as it was found. One
    that has called exec, or another one that has got its number, does not have it."""
    return _is_usable(pid, thread, registers) and (os.pread(memory, 2, max(0, registers["rip"] - 2)) == _SYSCALL_CODE)


def _is_usable(pid: int, thread: _Thread, registers: Registers) -> bool:
    return (registers["cs"] == _USER64 and registers["rsp"] - thread.lowest >= _STACK_BYTES
            and Path(f"/proc/{pid}/task/{thread.tid}").exists())


def _resumed(registers: Registers, alone: bool = False) -> Registers:
    """The registers with which the kernel would continue the thread after an interruption without a signal. ``alone``:
    after rt_sigreturn, which forgets how much of a timeout had passed: the call is made anew."""
    result = _signed(registers["rax"])
    if result in _RESTART_ERRORS or (alone and result == _RESTART_BLOCK_ERROR):
        return {**registers, "rip": registers["rip"] - 2, "rax": registers["orig_rax"]}
    if result == _RESTART_BLOCK_ERROR:
        return {**registers, "rip": registers["rip"] - 2, "rax": _RESTART_SYSCALL}
    return registers


def _call(
    memory: int, tracee: Tracee, registers: Registers, frame: ReturnFrame, gadgets: Gadgets, call: _RemoteCall,
    deadline: Deadline,
) -> int:
    # As a handler of a signal is entered: a function may rely on the direction flag.
    no_restart = {**registers, "orig_rax": _MINUS_ONE, "eflags": registers["eflags"] & ~_HANDLER_CLEARS}
    length = (len(call.text) + 1 + 4095) & ~4095
    # Anonymous, private, readable and writable (sys/mman.h).
    tracee.set_registers({**no_restart, "rip": gadgets.syscall, "rsp": frame.back, "rax": _MMAP, "rdi": 0,
                          "rsi": length, "rdx": 3, "r10": 0x22, "r8": _MINUS_ONE, "r9": 0})
    _run_to_call(tracee, gadgets.syscall + 2, frame.back, deadline)
    tracee.next_syscall_stop(deadline)
    page = tracee.registers()["rax"]
    if _signed(page) < 0:
        raise GputopError(f"the process cannot allocate memory: {os.strerror(-_signed(page))}",
                          "It may have reached its limits.")
    os.pwrite(memory, call.text + b"\0", page)
    tracee.set_registers({**no_restart, "rip": call.function, "rsp": frame.calls if gadgets.store else frame.back,
                          "rbx": frame.result, "rdi": call.first, "rsi": page, "rax": 0})
    _run_to_call(tracee, gadgets.after_sigreturn, frame.context, deadline)
    # Another call in the point of rt_sigreturn, which every seccomp filter lets pass, and after it rt_sigreturn again.
    tracee.set_registers({**tracee.registers(), "orig_rax": _SCHED_YIELD, "rip": gadgets.syscall + 2,
                          "rsp": frame.back})
    tracee.next_syscall_stop(deadline)
    result = int.from_bytes(os.pread(memory, 4, frame.result), "little", signed=True)  # 0 once the process has ended
    return 0 if result == NO_RESULT else result  # nowhere stored: whether it is called shows in time


def _run_to_call(tracee: Tracee, instruction: int, stack: int, deadline: Deadline) -> None:
    """Continue to the entry to the system call before ``instruction``. Other system calls pass. Raises TooLate."""
    entered = False
    while True:
        tracee.next_syscall_stop(deadline)
        entered = not entered
        if entered:
            registers = tracee.registers()
            if registers["rip"] == instruction and registers["rsp"] == stack:
                return


def _signed(value: int) -> int:
    return ctypes.c_int64(value).value


# -- the way back -----------------------------------------------------------------------------------

# mov $15 (rt_sigreturn), %rax (or %eax); syscall
_SIGRETURN = re.compile(rb"(?:\x48\xc7\xc0|\xb8)\x0f\x00\x00\x00\x0f\x05")
_SYSCALL_RET = b"\x0f\x05\xc3"
_STORE_RESULT = b"\x89\x03\x5b\xc3"  # mov %eax, (%rbx); pop %rbx; ret
_MAX_LIBRARY_BYTES, _MAX_CODE_BYTES = 32 << 20, 256 << 20
_LIBC = re.compile(r"/(libc[.-]|ld-|libpython|python3)")

RED_ZONE_BYTES = 128  # below the stack pointer, the interrupted function's own (x86-64 ABI)
_UCONTEXT = struct.Struct("<QQQiiQ 18Q 4H 5Q 8Q Q")
_FLAGS = 1 | 2 | 4  # UC_FP_XSTATE, UC_SIGCONTEXT_SS, UC_STRICT_RESTORE_SS
_NO_STACK = 4  # no valid ss_flags: the kernel then leaves the alternate signal stack as it is
_ORDER = ("r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "rdi", "rsi", "rbp", "rbx", "rdx", "rax", "rcx",
          "rsp", "rip", "eflags")
_SOFTWARE_AT, _HEADER_AT = 464, 512  # in the XSAVE area: what the kernel adds, and which parts are in use
_MAGIC_1, _MAGIC_2 = 0x46505853, 0x46505845
_TILES = 1 << 18  # AMX: a thread's frame has room for tiles only where it was granted them
_BYTES_BEFORE_TILES = 2816
NO_RESULT = -0x67707500  # value that no function returns


class Gadgets(Struct, frozen=True):
    """Addresses of code in a process."""

    syscall: int  # syscall; ret
    sigreturn: int
    after_sigreturn: int  # what the instruction pointer is within that call
    store: int | None


class ReturnFrame(Struct, frozen=True):
    """The way back of a borrowed thread, written on its own stack, so that it needs nobody to find it.

    The thread must continue where it was even if gputop no longer exists to restore its registers (kill -9, the OOM
    killer). The kernel has a call for this: ``rt_sigreturn`` sets all registers of a thread from a frame on its stack,
    as after every signal handler. The called function returns to the C library's own call of it.

    Layout: ``struct rt_sigframe`` of the kernel's arch/x86/include/asm/sigframe.h; ``struct sigcontext``,
    ``_fpx_sw_bytes`` of its uapi/asm/sigcontext.h.
    """

    address: int
    data: bytes
    calls: int  # the stack pointer with which the function is entered
    back: int  # the stack pointer with which a return leads to rt_sigreturn at once
    context: int  # the stack pointer within rt_sigreturn
    result: int  # where the function's result is stored


def gadgets_in(memory: int, mappings: Iterable[Mapping]) -> Gadgets:
    """Find the code in the libraries of a process, by its open memory and its mappings. What is read is bounded: a
    process may map more than there is memory."""
    addresses: dict[str, int] = {}
    codes = [mapping for mapping in mappings if mapping.permissions.startswith("r") and mapping.permissions[2:] == "xp"
             and (mapping.path.startswith("/") or mapping.path == "[vdso]")]
    codes.sort(key=lambda mapping: (_LIBC.search(mapping.path) is None, mapping.end - mapping.start))
    left_bytes = _MAX_CODE_BYTES
    for start, end, *_ in codes:
        try:
            code = os.pread(memory, min(end - start, _MAX_LIBRARY_BYTES, left_bytes), start)
        except (OSError, OverflowError):  # [vsyscall] and addresses that no process has
            continue
        left_bytes -= len(code)
        if "sigreturn" not in addresses and (match := _SIGRETURN.search(code)):
            addresses |= {"sigreturn": start + match.start(), "after_sigreturn": start + match.end()}
        for name, pattern in (("syscall", _SYSCALL_RET), ("store", _STORE_RESULT)):
            if name not in addresses and (begin := code.find(pattern)) >= 0:
                addresses[name] = start + begin
        if len(addresses) == 4 or left_bytes <= 0:
            break
    if "sigreturn" not in addresses or "syscall" not in addresses:
        raise GputopError("the job's C library has no code that lets a thread resume its work",
                          "Restart the job with gputop run.")
    return Gadgets(addresses["syscall"], addresses["sigreturn"], addresses["after_sigreturn"], addresses.get("store"))


def frame_for(registers: Registers, mask: int, xstate: bytes, stack: int, gadgets: Gadgets) -> ReturnFrame:
    """The frame that leads to ``registers``, to be written below the stack pointer ``stack``."""
    floats = _signal_xstate(xstate)
    # From the lowest address: what the chain of returns pops, the context, the result, the floats.
    chain = struct.pack("<QQQ", gadgets.store or gadgets.sigreturn, 0, gadgets.sigreturn)
    head = 8 + len(chain) + _UCONTEXT.size + 8
    head = (head + 63) & ~63
    address = (stack - RED_ZONE_BYTES - head - len(floats)) & ~63
    calls = address + 8  # as after a call: 8 more than a multiple of 16
    context = calls + len(chain)
    ucontext = _UCONTEXT.pack(_FLAGS, 0, 0, _NO_STACK, 0, 0, *(registers[name] for name in _ORDER),
                              registers["cs"], 0, 0, registers["ss"], 0, 0, 0, 0, address + head, *(0,) * 8, mask)
    result = context + _UCONTEXT.size
    data = (b"\0" * 8 + chain + ucontext + struct.pack("<i", NO_RESULT)).ljust(head, b"\0") + floats
    return ReturnFrame(address, data, calls, calls + 16, context, result)


def _signal_xstate(xstate: bytes) -> bytes:
    """The state as ptrace gives it, in the form of a signal frame."""
    features = struct.unpack_from("<Q", xstate, _SOFTWARE_AT)[0]
    used = struct.unpack_from("<Q", xstate, _HEADER_AT)[0]
    if not used & _TILES:
        features &= ~_TILES
        xstate = xstate[:_BYTES_BEFORE_TILES]
    software = struct.pack("<IIQI28x", _MAGIC_1, len(xstate) + 4, features, len(xstate))
    return xstate[:_SOFTWARE_AT] + software + xstate[_HEADER_AT:] + struct.pack("<I", _MAGIC_2)
