"""A finding as Markdown, for a ticket, a pull request or a chat."""

from __future__ import annotations

import re

from gputop.core.findings import Finding
from gputop.render.evidence_words import evidence
from gputop.render.verdict_lines import kernel_rows, verdict_of
from gputop.text.markdown_text import as_code, without_marks
from gputop.text.units import printable, ranges


def finding_markdown(finding: Finding, *, simulated: bool = False) -> str:
    """The verdict's lines with the code, and the evidence. Names come from outside: what Markdown or a chat would take
    for a mark or a mention stands as code."""
    verdict = verdict_of(finding, *kernel_rows(finding))
    gpus = f"GPU {ranges(finding.gpus)}" if finding.gpus else ""
    about = ", ".join(filter(None, (finding.severity, gpus, verdict.fix)))
    lines = [f"**{without_marks(verdict.head)}** ({about}){' SIMULATED' * simulated}"]
    for row in verdict.rows:
        lines += ["", f"{row.label}: {without_marks(row.text)}"]
        if row.code:
            fence = "`" * (max(map(len, re.findall("`+", row.code)), default=0) + 3)
            lines += ["", fence, *map(printable, row.code.splitlines()), fence]
    figures = [f"- {without_marks(label)}: {without_marks(value)}" for label, value in evidence(finding)]
    lines += ["", *figures] if figures else []
    return "\n".join([*lines, "", f"gputop, rule {as_code(printable(finding.id))}"]) + "\n"
