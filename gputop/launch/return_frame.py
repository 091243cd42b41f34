"""The way back of a borrowed thread, written on its own stack, so that it needs nobody to find it.

A thread that is made to call a function must continue where it was afterwards even if gputop no longer exists to
restore its registers (kill -9, the OOM killer). The kernel has a call for this: ``rt_sigreturn`` sets all registers
of a thread from a frame on its stack, as after every signal handler. The called function returns to the C library's
own call of it. The code that is run is the process's own; none is changed.

Layout: ``struct rt_sigframe`` of the kernel's arch/x86/include/asm/sigframe.h; ``struct sigcontext``, ``_fpx_sw_bytes``
of its uapi/asm/sigcontext.h.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable

from msgspec import Struct

from gputop.core.errors import GputopError
from gputop.core.proc import Mapping
from gputop.launch.ptrace import Registers

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
