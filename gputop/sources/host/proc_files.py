"""The files of /proc/PID: read with few system calls, parsed without trust.

A process can end between any two calls, put anything into its name and command line, and belong to another user. So
every read may fail with any OSError, and every parser accepts any bytes.
"""

from __future__ import annotations

import errno

from msgspec import Struct

from gputop.core.proc import ENVIRON_BYTES as ENVIRON_BYTES
from gputop.core.proc import Stat as Stat
from gputop.core.proc import parse_stat as parse_stat
from gputop.core.proc import read as read
from gputop.core.samples import ENDED
from gputop.text.units import printable

DENIED = "access denied: run gputop as root or as the process's user"
UNPARSABLE = "/proc returned malformed data"
FIRST = "first sample: a rate needs two samples"

SMALL_BYTES = 4096  # stat, io: less than half of it
LARGE_BYTES = 1 << 16  # status and cgroup may hold long lists; a command line is cut there
_COMMAND_CHARS = 4096
_VARIABLE_CHARS = 4096


def reason_of(error: OSError) -> str:
    if error.errno in (errno.ENOENT, errno.ESRCH):
        return ENDED
    if error.errno in (errno.EACCES, errno.EPERM):
        return DENIED
    return f"could not be read: {error.strerror or error}"


def parse_io(text: bytes) -> tuple[int, int] | None:
    """Bytes that the process fetched from storage and sent there, from /proc/PID/io (proc(5)).

    Page cache hits do not count, and writes count when a page is dirtied. Block devices are
    counted exactly; network and FUSE file systems may not be.
    """
    counts = dict(line.split(b": ", 1) for line in text.splitlines() if b": " in line)
    try:
        return int(counts[b"read_bytes"]), int(counts[b"write_bytes"])
    except (KeyError, ValueError):
        return None


class Status(Struct, frozen=True):
    """The part of /proc/PID/status that is used here."""

    uid: int | None  # real
    pids: tuple[int, ...]  # its PID in each PID namespace, from that of /proc down to its own
    cpus: str = ""  # that it may use, as a list: "0-31,64-95"


def parse_status(text: bytes) -> Status:
    """Parse /proc/PID/status (proc(5)); a missing or malformed field is None or empty."""
    uid: int | None = None
    pids: tuple[int, ...] = ()
    cpus = ""
    for line in text.splitlines():
        key, _, value = line.partition(b":")
        try:
            if key == b"Uid":
                uid = int(value.split()[0])
            elif key == b"NSpid":
                pids = tuple([int(word) for word in value.split()])
            elif key == b"Cpus_allowed_list":
                cpus = printable(value).strip()
        except (ValueError, IndexError):
            continue
    return Status(uid, pids, cpus)


def command(cmdline: bytes, name: bytes) -> str:
    """One line from /proc/PID/cmdline; a kernel thread has none and is shown by its name in brackets.

    A very long one is cut and ends with "…".
    """
    text = printable(cmdline.rstrip(b"\0").replace(b"\0", b" "))
    if len(text) > _COMMAND_CHARS:
        text = text[: _COMMAND_CHARS - 1] + "…"
    return text or f"[{printable(name)}]"


def variable(environ: bytes, name: bytes) -> str | None:
    """One variable of /proc/PID/environ, as it was when the program started; None: not set."""
    for entry in environ.split(b"\0"):
        key, equals, value = entry.partition(b"=")
        if equals and key == name:
            return printable(value)[:_VARIABLE_CHARS]
    return None
