"""A comparison as text for a pull request or a chat: the verdict, the gates, and the report.

It uses what GitHub and Slack both show: plain lines, a list, code and blocks of code. No headings, tables or HTML.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from gputop.comparison.compare import Comparison
from gputop.comparison.document import GateResult
from gputop.comparison.report_lines import text_report
from gputop.text.markdown_text import without_marks

_COLUMNS = 100
_MARKS = {"passed": "✅", "failed": "❌", "cannot be told": "❔"}


def markdown(comparison: Comparison, gates: Iterable[GateResult]) -> str:
    """Return the comparison as Markdown. What others wrote (names, paths) stands in code."""
    return "\n".join(_lines(comparison, list(gates))) + "\n"


def _lines(comparison: Comparison, gates: list[GateResult]) -> Iterator[str]:
    simulated = "SIMULATED. " if comparison.a.simulated or comparison.b.simulated else ""
    yield f"gputop: {simulated}{without_marks(comparison.headline)}"
    if gates:
        yield ""
        for result in gates:
            yield (f"- {_MARKS[result.outcome]} {result.outcome}: {without_marks(result.gate)}: "
                   f"{without_marks(result.why)}")
    report = text_report(comparison, _COLUMNS)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", report)), default=0))
    yield from ("", fence, report.rstrip("\n"), fence)
