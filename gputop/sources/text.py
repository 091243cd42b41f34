"""Text that came from outside (driver, /proc), made safe to put on a terminal and into JSON."""

from __future__ import annotations


def printable(text: str | bytes) -> str:
    """``text`` without control characters, escape codes or bytes that are not UTF-8.

    Each thing removed leaves one U+FFFD, so that a doctored name is seen to be doctored.
    White space becomes single spaces. A GPU name or a command line can hold any bytes; an
    escape sequence drawn as it is would repaint the user's terminal.
    """
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
    decoded = raw.decode("utf-8", "replace")
    if decoded.isprintable():
        return decoded.strip()
    kept = "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in decoded)
    return " ".join(kept.split())
