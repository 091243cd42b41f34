"""Limits of how much of a trace is read: bounds that no real trace comes near, so that a hostile one costs little.

A reader's memory and time are a small multiple of the file's size. What a file may decide is how many planes, lines,
names and messages there are, and each of these costs far more here than the two bytes it may take there. What is beyond
a bound is left out, and a quality note says so.
"""

from __future__ import annotations

# Of one file. Traces of 8 GPUs have 20 planes and some hundred lines; JAX on many host threads some thousand lines.
MAX_PLANES = 1024
MAX_LINES = 1 << 16
# Of a Chrome trace, where a line takes a hundred bytes and no more: PyTorch's have a hundred for a rank. Some analyses
# look at all events once for each.
MAX_CHROME_LINES = 1 << 12
MAX_PLANE_STATS = 1 << 12
MAX_METADATA = 1 << 20  # entries of a plane's table of names; large XLA programs have 10^5
MAX_MESSAGES = 1000  # errors, warnings and host names, of each so many are looked at

# Fields that the monitor's own process walks one by one where it needs no more than an outline of a trace.
OUTLINE_FIELDS = 1 << 22
# Fields of the programs in one file that are walked, some 0.3 µs each: a program of 10^5 instructions has 2 * 10^6.
MAX_HLO_FIELDS = 1 << 23

# Of one trace.
MAX_NOTES = 200
MAX_NOTE_CHARS = 2000
MAX_ALLOCATORS = 1 << 12  # 8 GPUs have some ten of them
# Characters of all names together: as many as the file has, and more where names are joined (module and op).
NAME_CHARS, NAME_CHARS_PER_BYTE = 64 << 20, 4

# Bytes of memory until the trace is assembled, for the estimate before events are decoded.
LINE_BYTES, METADATA_BYTES = 2000, 500


def cut_text(text: str) -> str:
    """``text``, the end of a long one replaced by its length."""
    if len(text) <= MAX_NOTE_CHARS:
        return text
    return f"{text[:MAX_NOTE_CHARS]} … ({len(text):,} characters)"
