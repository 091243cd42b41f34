"""A finding as Markdown, for a ticket, a pull request or a chat."""

from __future__ import annotations

import re

from gputop.core.findings import Finding
from gputop.render.evidence_words import evidence
from gputop.render.finding_text import culprits_text, gain_text
from gputop.text.units import printable, ranges

_MARKS = re.compile(r"([\\`*_\[\]<>#|~])")


def finding_markdown(finding: Finding, step_s: float | None = None, *, simulated: bool = False) -> str:
    """Title, reason, action, code and evidence; ``step_s``: the step time of its capture. Names come from outside: what
    Markdown would take for a mark is escaped."""
    gain = gain_text(finding, step_s)
    gpus = f", GPU {ranges(finding.gpus)}" if finding.gpus else ""
    lines = [f"**{_plain(finding.title)}** ({finding.severity}{gpus}{f', {gain}' if gain else ''})"
             + " SIMULATED" * simulated, "", _plain(finding.why)]
    culprits = culprits_text(finding)
    lines += [_plain(culprits)] if culprits else []
    lines += ["", f"What to do: {_plain(finding.action)}"]
    for code in filter(None, (finding.snippet, finding.ncu)):
        fence = "`" * (max(map(len, re.findall("`+", code)), default=0) + 3)
        lines += ["", fence, *map(printable, code.splitlines()), fence]
    figures = [f"- {_plain(label)}: {_plain(value)}" for label, value in evidence(finding)]
    lines += ["", *figures] if figures else []
    return "\n".join([*lines, "", f"gputop, rule `{printable(finding.id)}`"]) + "\n"


def _plain(text: str) -> str:
    return _MARKS.sub(r"\\\1", printable(text))
