"""Markdown of gputop's own pages as plain text for a terminal: paragraphs wrapped, code as it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from gputop.text.units import printable
from gputop.text.wrapping import wrap

_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
_RULE_OF_TABLE = re.compile(r"\|[|\- ]+")


def plain_lines(markdown: str, width: int) -> Iterator[str]:
    """Lines of at most ``width`` columns, but for code. Headings, paragraphs, lists, quotes, code, and tables whose
    rows are a name, a value and a text."""
    paragraph: list[str] = []
    in_code = False
    lines = (*markdown.splitlines(), "", "")
    for line, following in pairwise(lines):
        if line.startswith("```"):
            in_code = not in_code
        elif in_code:
            yield printable(f"      {line}") if line else ""
        elif paragraph and (not line or line[0] in "#|->"):
            yield from wrap(_LINK.sub(r"\1", " ".join(paragraph)), width, "  ")
            paragraph = []
        if in_code or line.startswith("```"):
            continue
        if not line:
            yield ""
        elif line.startswith("#"):
            yield from wrap(line.lstrip("# "), width)
        elif line.startswith(("- ", "> ")):
            yield from wrap(_LINK.sub(r"\1", line), width, "  ", "    ")
        elif line.startswith("|"):
            if not (_RULE_OF_TABLE.fullmatch(line) or _RULE_OF_TABLE.fullmatch(following)):  # nor the heading above it
                yield from _row(line, width)
        else:
            paragraph.append(line)


def _row(line: str, width: int) -> Iterator[str]:
    name, value, *rest = (cell.strip() for cell in line.strip("| ").split(" | "))
    yield from wrap("   ".join((f"{name.strip('`')} = {value}", *rest)), width, "  ", "      ")
