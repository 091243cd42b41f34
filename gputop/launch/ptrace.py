"""ptrace(2) for one thread of another process: stop it, read and write its registers, let it go. Linux on x86-64.

Requests must come from the thread that took hold of the other one. A held thread is released by the kernel as well
when its holder ends, in whatever way; it then continues with the registers it has (PTRACE_O_EXITKILL is never set).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import time

from gputop.core.errors import os_errors_as
from gputop.core.proc import status_fields
from gputop.launch.deadline import Deadline, TooLate

# sys/ptrace.h
GETREGS, SETREGS, DETACH, SYSCALL = 12, 13, 17, 24
GETREGSET, SETREGSET, SEIZE, INTERRUPT, GETSIGMASK = 0x4204, 0x4205, 0x4206, 0x4207, 0x420A
_O_TRACESYSGOOD = 1
_EVENT_STOP = 128
_WALL = 0x40000000
_ENDED = (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED)
_NT_X86_XSTATE = 0x202
_XSTATE_BYTES = 1 << 16  # AMX's tiles alone are 8 KiB
_AT_SYSCALL = 0x80 | 5  # SIGTRAP as TRACESYSGOOD marks it
# struct user_regs_struct of sys/user.h
_REGISTERS = ("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi",
              "orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs")
_LAYOUT = struct.Struct(f"<{len(_REGISTERS)}Q")
STOP_S = 3.0  # a sleeping thread stops at once
CALL_S = 5.0
_SPIN_S = 0.0003  # most stops come sooner than a sleep would end
_MIN_POLL_S, _MAX_POLL_S = 0.00002, 0.002

Registers = dict[str, int]


class _IoVector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Tracee:
    """One thread, from :meth:`seize` to :meth:`detach`."""

    def __init__(self, tid: int) -> None:
        self.tid = tid
        self.held = self.stopped = False
        self.at_syscall = self.event_stop = self.interrupted = False  # what the thread has stopped for
        self._signal = 0  # one that the thread stopped for, and that has not been delivered to it
        self._ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        self._ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
        self._ptrace.restype = ctypes.c_long
        # Allocated before the thread is stopped.
        self._xstate = ctypes.create_string_buffer(_XSTATE_BYTES)
        self._vector = _IoVector(ctypes.addressof(self._xstate), _XSTATE_BYTES)
        self._buffer = ctypes.create_string_buffer(_LAYOUT.size)

    def request(self, number: int, address: object = None, data: object = None) -> None:
        if self._ptrace(number, self.tid, address, data) == -1:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))

    def seize(self) -> None:
        with os_errors_as(f"the kernel does not allow gputop to stop thread {self.tid}",
                          "A debugger or strace may hold the thread. If not, run gputop attach as root."):
            self.request(SEIZE, None, _O_TRACESYSGOOD)
        self.held = True

    def interrupt(self, deadline: Deadline) -> bool:
        """Stop the thread; False where it is in a group stop (SIGSTOP, ctrl-z). Signals that arrive first are
        delivered. Raises TooLate."""
        self.request(INTERRUPT)
        while True:
            self._wait(deadline)
            if self.event_stop:
                return self.interrupted
            deadline.check()
            self._resume()

    def stop(self, deadline: Deadline) -> None:
        """Stop the thread wherever it is, unless it is stopped. Raises TooLate."""
        if not self.stopped:
            self.request(INTERRUPT)
            self._wait(deadline)

    def next_syscall_stop(self, deadline: Deadline) -> None:
        """Continue to the next entry to or exit from a system call. Signals meanwhile are delivered. Raises TooLate."""
        while True:
            deadline.check()
            self._resume()
            self._wait(deadline)
            if self.at_syscall:
                return

    def detach(self, deadline: Deadline) -> None:
        """Release the thread, with the signal it stopped for; one that runs is stopped first. A thread that does not
        stop is released by the kernel when gputop ends. Raises TooLate."""
        if self.held:
            try:
                self.stop(deadline)
                self.request(DETACH, None, self._signal)
            except ProcessLookupError:
                self.reap(deadline)
            self.held = self.stopped = False

    def registers(self) -> Registers:
        self.request(GETREGS, None, self._buffer)
        return dict(zip(_REGISTERS, _LAYOUT.unpack(self._buffer.raw), strict=True))

    def set_registers(self, registers: Registers) -> None:
        self.request(SETREGS, None, ctypes.create_string_buffer(_LAYOUT.pack(*registers.values()), _LAYOUT.size))

    def save_xstate(self) -> bytes:
        """The state of the floating-point and vector units; kept for :meth:`restore_xstate`, too."""
        self.request(GETREGSET, _NT_X86_XSTATE, ctypes.byref(self._vector))
        return ctypes.string_at(self._xstate, self._vector.length)  # the length that the kernel has set

    def restore_xstate(self) -> None:
        self.request(SETREGSET, _NT_X86_XSTATE, ctypes.byref(self._vector))

    def signal_mask(self) -> int:
        """The signals that the thread blocks, those restored after its system call included."""
        mask = ctypes.c_uint64()
        self.request(GETSIGMASK, 8, ctypes.byref(mask))
        return mask.value

    def _resume(self) -> None:
        number, self._signal = self._signal, 0
        self.stopped = False
        self.request(SYSCALL, None, number)

    def _wait(self, deadline: Deadline) -> None:
        """Wait until the thread stops, and note for what. Raises TooLate, and ProcessLookupError where it has ended;
        its end is left to be waited for."""
        spin_until = time.monotonic() + _SPIN_S
        pause_s = _MIN_POLL_S
        while True:
            try:
                stop = os.waitid(os.P_PID, self.tid, os.WSTOPPED | os.WNOHANG | _WALL)
                # A stop is reported here as well, whatever is asked for.
                end = stop or os.waitid(os.P_PID, self.tid, os.WEXITED | os.WNOWAIT | os.WNOHANG | _WALL)
                if end is not None and end.si_code in _ENDED:
                    raise ProcessLookupError
            except ChildProcessError:  # another thread called exec
                raise ProcessLookupError from None
            if stop is not None:
                self.stopped = True
                event, number = stop.si_status >> 8, stop.si_status & 0xFF
                self.at_syscall, self.event_stop = number == _AT_SYSCALL, event == _EVENT_STOP
                self.interrupted = self.event_stop and number == signal.SIGTRAP
                self._signal = 0 if event or self.at_syscall else number
                return
            now = time.monotonic()
            if now < spin_until:
                continue
            deadline.check()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_POLL_S)

    def reap(self, deadline: Deadline) -> None:
        """A thread that is killed while it is held stays a zombie until its holder has waited for it. A process that
        gputop has started itself is waited for by whoever wants its status."""
        self.held = self.stopped = False
        with contextlib.suppress(ProcessLookupError, TooLate):
            while True:  # a stop may be waiting, too
                self._wait(deadline)
        with contextlib.suppress(OSError, KeyError):
            fields = status_fields(self.tid)
            if (fields[b"Tgid"], fields[b"PPid"]) != (b"%d" % self.tid, b"%d" % os.getpid()):
                os.waitid(os.P_PID, self.tid, os.WEXITED | os.WNOHANG | _WALL)
