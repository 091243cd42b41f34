"""A comparison as Markdown, as a pull request shows it: the verdict, the gates, and the report to show."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from gputop.comparison.compare import Comparison
from gputop.comparison.gates import GateResult
from gputop.comparison.report import text_report
from gputop.text.units import printable

_COLUMNS = 100
_MARKS = {"passed": "✅", "failed": "❌", "cannot be told": "❔"}


def markdown(comparison: Comparison, gates: Iterable[GateResult]) -> str:
    """What others wrote (names, paths) stands in a block of code, or has its marks taken away."""
    return "\n".join(_lines(comparison, list(gates))) + "\n"


def _lines(comparison: Comparison, gates: list[GateResult]) -> Iterator[str]:
    simulated = "SIMULATED. " if comparison.a.simulated or comparison.b.simulated else ""
    yield f"### gputop: {simulated}{_plain(comparison.headline)}"
    if gates:
        yield from ("", "| | gate | |", "|---|---|---|")
        for own in gates:
            yield f"| {_MARKS[own.outcome]} {own.outcome} | {_plain(own.gate)} | {_plain(own.why)} |"
    report = text_report(comparison, _COLUMNS)
    fence = "`" * (max(map(len, re.findall("`+", report)), default=0) + 3)
    yield from ("", "<details><summary>What changed</summary>", "", f"{fence}text", report.rstrip("\n"), fence, "",
                "</details>")


def _plain(text: str) -> str:
    """Without anything that Markdown or HTML would take for a mark."""
    return re.sub(r"([\\`*_{}\[\]<>()#!|@~&])", lambda match: f"&#{ord(match[1])};", printable(text))
