"""Prose in lines, for reports that are read in a terminal or a ticket."""

from __future__ import annotations

import textwrap

from gputop.text.units import printable


def wrap(text: str, width: int, first: str = "", rest: str | None = None) -> list[str]:
    """Lines of at most ``width`` columns, the first after ``first``, the others after ``rest`` or as far in.

    Words are kept whole, a path or a name that is longer than a line, too; control characters are not.
    """
    indent = " " * len(first) if rest is None else rest
    return textwrap.wrap(printable(text), width, initial_indent=first, subsequent_indent=indent,
                         break_long_words=False, break_on_hyphens=False)
