"""Markdown: gputop's own pages as plain text for a terminal, and text of others so that it brings no marks along."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from gputop.text.units import printable, wrap

_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
# A word with one of these might be taken for a mark, a link, or the name of a person or an issue.
_RISKY = re.compile(r"[\\`*{}\[\]<>#|@~&]|^_|_$|__|://|^www\.|^:\w+:$")
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


def without_marks(text: str) -> str:
    """The text, with each word that Markdown, HTML or a chat could take for a mark as code."""
    return " ".join(as_code(word) if _RISKY.search(word) else word for word in printable(text).split(" "))


def as_code(word: str) -> str:
    """A word as code, between more backticks than it has in a row."""
    longest = max(map(len, re.findall("`+", word)), default=0)
    return f"{'`' * (longest + 1)} {word} {'`' * (longest + 1)}" if longest else f"`{word}`"
