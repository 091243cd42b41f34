"""One monitor on a pseudo-terminal, spoken to as textual-serve does to the apps that it starts.

The monitor is the very one of a terminal, its own driver included. textual-serve expects Textual's web driver: a first
line, then packets of a letter, a length of four bytes (big-endian) and so many bytes: D what is shown or typed, M a
JSON object (``resize``, ``quit``; ``exit``).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
from collections.abc import Iterator

from gputop.core.codec import parse
from gputop.core.own_program import child_command

_FIRST_LINE = b"__GANGLION__\n"
_CHUNK_BYTES = 65536
_PACKET_MAX_BYTES = 1 << 20  # what is typed or pasted; more is no textual-serve
# What textual-serve sets for Textual's web driver, and what belongs to the terminal that it runs in itself.
_NOT_INHERITED = ("TEXTUAL_DRIVER", "TEXTUAL_FPS", "TEXTUAL_COLOR_SYSTEM", "TERM_PROGRAM", "TERM_PROGRAM_VERSION",
                  "COLUMNS", "ROWS", "LINES", "TMUX", "STY")


def main() -> int:
    """Run the monitor with the options that follow until it ends, or textual-serve says so or is gone."""
    size = _size(os.environ.get("COLUMNS"), os.environ.get("ROWS"))
    child, terminal = pty.fork()
    if child == 0:
        _resize(0, *size)
        command = child_command("gputop.__main__:command", *sys.argv[1:])
        kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        os.execve(command[0], command, {**kept, "TERM": "xterm-256color", "COLORTERM": "truecolor"})  # of xterm.js
    _carry(child, terminal)
    os.close(terminal)  # the monitor is hung up on, should it still run
    os.waitpid(child, 0)
    return 0


def _carry(child: int, terminal: int) -> None:
    """Carry what is typed to the terminal and what it shows back, until either side ends."""
    os.set_blocking(1, False)
    os.set_blocking(terminal, False)
    typed, keys, shown = bytearray(), bytearray(), bytearray(_FIRST_LINE)
    while True:
        # A browser that reads slowly leaves ``shown`` full, and a monitor that does so ``keys``: then the other side
        # waits, and the end does not.
        ready, writable, _ = select.select([0] if shown else [0, terminal],
                                           [*([1] if shown else []), *([terminal] if keys else [])], [])
        with contextlib.suppress(BlockingIOError):
            if 1 in writable:
                del shown[:os.write(1, shown)]
        with contextlib.suppress(OSError):  # it ends: what it shows says so
            if terminal in writable:
                del keys[:os.write(terminal, keys)]
        if terminal in ready:
            text = _read(terminal)
            shown += _packet(b"D", text) if text else _packet(b"M", b'{"type": "exit"}')
            if not text:
                os.set_blocking(1, True)
                os.write(1, shown)
                return
        if 0 in ready:
            data = _read(0)
            typed += data
            if not data or len(typed) + len(keys) > _PACKET_MAX_BYTES or not _take(typed, keys, child, terminal):
                return


def _take(typed: bytearray, keys: bytearray, child: int, terminal: int) -> bool:
    """Pass on the whole packets in ``typed``, the keys in them to ``keys``; False where they end the monitor."""
    for kind, payload in _packets(typed):
        if kind == b"D":
            keys += payload
            continue
        try:
            message = parse(payload)
        except ValueError:  # no textual-serve sends that; whoever is at the page loses nothing else by it
            continue
        if not isinstance(message, dict):
            continue
        if message.get("type") == "resize":
            _resize(terminal, *_size(message.get("width"), message.get("height")))
        elif message.get("type") == "quit":
            os.kill(child, signal.SIGHUP)
            return False
    return True


def _packets(typed: bytearray) -> Iterator[tuple[bytes, bytes]]:
    while len(typed) >= 5 and len(typed) >= (end := 5 + int.from_bytes(typed[1:5], "big")):
        kind, payload = bytes(typed[:1]), bytes(typed[5:end])
        del typed[:end]
        yield kind, payload


def _packet(kind: bytes, payload: bytes) -> bytes:
    return kind + len(payload).to_bytes(4, "big") + payload


def _read(file: int) -> bytes:
    try:
        return os.read(file, _CHUNK_BYTES)
    except OSError:  # EIO: nobody has the terminal open any more
        return b""


def _size(width: object, height: object) -> tuple[int, int]:
    def bounded(value: object, default: int) -> int:
        try:
            return min(max(int(str(value)), 1), 1000) if str(value).isdecimal() else default
        except ValueError:  # thousands of digits
            return default

    return bounded(width, 80), bounded(height, 24)


def _resize(terminal: int, width: int, height: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
