"""The one way from a command to the terminal: text made printable, messages made short.

Messages hold what others wrote: the error text of a server, names inside a trace, file names, command lines. On a
terminal, an escape code in it would set the title, fill the clipboard or turn the direction of the text, and a server
can answer with 50 MB of text. So nothing else in gputop prints; what draws the screen is :mod:`gputop.tui.terminal`.

A standard stream that is closed takes nothing. A stream that cannot be written to raises OSError.
"""

from __future__ import annotations

import os
import re
import sys
from typing import TextIO

from gputop.core.errors import GputopError
from gputop.text.units import printable, wrap

MESSAGE_CHARS = 2000  # of one message; its end is left out
LINE_CHARS = 4000  # of one line of a report
FIX_LINES = 40  # of what to do about an error: commands to paste, one a line
_LEAST_WIDTH = 20  # minimum columns for whole words
_COLOR = re.compile(r"(\x1b\[(?:0|3[1-7])m)")


def one_line(message: object, max_chars: int = MESSAGE_CHARS) -> str:
    """``message`` as one printable line of at most ``max_chars``; what is left out is told by its length."""
    text = str(message)
    if len(text) <= max_chars:
        return printable(text)
    left_out = f" … ({len(text):,} characters)"
    return printable(text[:max_chars - len(left_out)]) + left_out


def clean(text: str, max_line_chars: int | None = None) -> str:
    """``text`` whose lines are printable: white space becomes a space, anything else U+FFFD. Line ends stay."""
    return "\n".join(_clean_line(line, max_line_chars) for line in text.split("\n"))


def say(message: object) -> None:
    """A message on standard error, which names the program: one line, or on a terminal as many as it needs."""
    _write(sys.stderr, _fitted(f"gputop: {one_line(message)}", "  ") + "\n")


def print_error(error: GputopError) -> None:
    """The cause and the way out of an error, on standard error."""
    say(error.message)
    if error.fix:
        note("  " + "\n".join(error.fix.split("\n", FIX_LINES)[:FIX_LINES]))


def note(text: str) -> None:
    """Text on standard error, such as a question, without the program's name. Several lines stay as they are: they may
    be commands to paste."""
    lines = clean(text, MESSAGE_CHARS).rstrip("\n")
    if "\n" not in lines:
        lines = _fitted(lines, " " * (len(lines) - len(lines.lstrip())))
    _write(sys.stderr, lines + "\n")


def write_text(text: str, *, end: str = "\n") -> None:
    """A report on standard output; a line longer than any screen is cut."""
    _write(sys.stdout, clean(text, LINE_CHARS) + end)


def write_document(text: str) -> None:
    """A whole document on standard output, such as SVG or HTML: printable, nothing cut."""
    _write(sys.stdout, clean(text))


def write_json(document: object) -> None:
    """One JSON document on standard output, in ASCII. Raises ValueError for a number that is none."""
    stream = sys.stdout
    if stream is not None:
        import json  # not for the first frame

        from gputop.core.codec import to_document

        json.dump(to_document(document), stream, indent=1, allow_nan=False)
        stream.write("\n")


def write_raw(data: bytes) -> None:
    """Write what the user's own job has written, on standard output as it would have gone there without gputop."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def write_colored(text: str) -> None:
    """A report in colors on standard output. Only codes for colors pass; the caller has cleaned what is between."""
    parts = _COLOR.split(text)
    _write(sys.stdout, "".join(part if number % 2 else clean(part, LINE_CHARS) for number, part in enumerate(parts)))


def _clean_line(line: str, max_chars: int | None) -> str:
    if max_chars is not None and len(line) > max_chars:
        line = line[:max_chars - 1] + "…"
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in line)


def _fitted(line: str, rest: str) -> str:
    """``line`` between words, in lines as wide as the terminal that standard error is; elsewhere in one line. ``rest``
    stands before all but the first."""
    try:
        if sys.stderr is None or not sys.stderr.isatty():
            return line
        width = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return line
    if not _LEAST_WIDTH <= width < len(line):
        return line

    margin = line[:len(line) - len(line.lstrip())]
    return "\n".join(wrap(line.lstrip(), width, margin, rest))


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:
        return
    try:
        stream.write(text)
    except UnicodeEncodeError:  # the stream's own encoding, where cli.main has not told it to replace
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "replace").decode(encoding))
