"""A comparison as text for a pull request or a chat: the verdict, the gates, and the report.

It uses what GitHub and Slack both show: plain lines, a list, code and blocks of code. No headings, tables or HTML.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from gputop.comparison.compare import Comparison
from gputop.comparison.gates import GateResult
from gputop.comparison.report import text_report
from gputop.text.units import printable

_COLUMNS = 100
_MARKS = {"passed": "✅", "failed": "❌", "cannot be told": "❔"}
# A word with one of these might be taken for a mark, a link, or the name of a person or an issue.
_RISKY = re.compile(r"[\\`*{}\[\]<>#|@~&]|^_|_$|__|://|^www\.|^:\w+:$")


def markdown(comparison: Comparison, gates: Iterable[GateResult]) -> str:
    """What others wrote (names, paths) stands in code."""
    return "\n".join(_lines(comparison, list(gates))) + "\n"


def _lines(comparison: Comparison, gates: list[GateResult]) -> Iterator[str]:
    simulated = "SIMULATED. " if comparison.a.simulated or comparison.b.simulated else ""
    yield f"gputop: {simulated}{_plain(comparison.headline)}"
    if gates:
        yield ""
        for result in gates:
            yield f"- {_MARKS[result.outcome]} {result.outcome}: {_plain(result.gate)}: {_plain(result.why)}"
    report = text_report(comparison, _COLUMNS)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", report)), default=0))
    yield from ("", fence, report.rstrip("\n"), fence)


def _plain(text: str) -> str:
    """The text, with each word that Markdown, HTML or a chat could take for a mark as code."""
    return " ".join(_code(word) if _RISKY.search(word) else word for word in printable(text).split(" "))


def _code(word: str) -> str:
    """A word as code, between more backticks than it has in a row."""
    longest = max(map(len, re.findall("`+", word)), default=0)
    return f"{'`' * (longest + 1)} {word} {'`' * (longest + 1)}" if longest else f"`{word}`"
