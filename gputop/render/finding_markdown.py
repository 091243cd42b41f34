"""A finding as Markdown, for a ticket, a pull request or a chat."""

from __future__ import annotations

import re

from gputop.core.findings import Finding
from gputop.render.evidence_words import evidence
from gputop.render.finding_text import culprits_text, gain_text
from gputop.text.markdown_text import as_code, without_marks
from gputop.text.units import printable, ranges


def finding_markdown(finding: Finding, *, simulated: bool = False) -> str:
    """Title, reason, action, code and evidence. Names come from outside: what Markdown or a chat would take for a
    mark or a mention stands as code."""
    gain = gain_text(finding)
    gpus = f", GPU {ranges(finding.gpus)}" if finding.gpus else ""
    lines = [f"**{without_marks(finding.title)}** ({finding.severity}{gpus}{f', {gain}' if gain else ''})"
             + " SIMULATED" * simulated, "", without_marks(finding.why)]
    culprits = culprits_text(finding)
    lines += [without_marks(culprits)] if culprits else []
    lines += ["", f"What to do: {without_marks(finding.action)}"]
    for code in filter(None, (finding.snippet, finding.ncu)):
        fence = "`" * (max(map(len, re.findall("`+", code)), default=0) + 3)
        lines += ["", fence, *map(printable, code.splitlines()), fence]
    figures = [f"- {without_marks(label)}: {without_marks(value)}" for label, value in evidence(finding)]
    lines += ["", *figures] if figures else []
    return "\n".join([*lines, "", f"gputop, rule {as_code(printable(finding.id))}"]) + "\n"
