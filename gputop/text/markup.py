"""Text from outside made harmless in HTML, SVG and Markdown, and gputop's own Markdown as text for a terminal."""

from __future__ import annotations

import html
import re
import time
from collections.abc import Iterator
from itertools import pairwise

from gputop.text.units import printable, wrap


def esc(text: str | None) -> str:
    """``text`` as content or attribute of HTML and XML: shown literally, without control characters."""
    return html.escape(printable(text or ""), quote=True)


def lines(text: str) -> str:
    """``text`` without control characters, its lines and their indentation kept."""
    return "\n".join(" " * (len(line) - len(line.lstrip(" "))) + printable(line.lstrip(" "))
                     for line in text.expandtabs(4).split("\n"))


def esc_lines(text: str) -> str:
    """The same as content of HTML."""
    return html.escape(lines(text), quote=True)


def titled(text: str, title: str | None, kind: str = "") -> str:
    """A figure that says on hover where it comes from, or why there is none."""
    kind = f' class="{kind}"' if kind else ""
    return f'<span{kind} title="{esc(title)}">{esc(text)}</span>'


def moment(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(time_s))


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
