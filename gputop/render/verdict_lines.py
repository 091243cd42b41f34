"""A verdict as lines in the order in which they are read: the head, what to do, why, which line, and where it is from.

One value describes them; the console, the panel, the page, the picture and Markdown lay it out. The head says what is
wrong and what its fix brings. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct

from gputop.core.findings import Finding
from gputop.render.finding_text import PROFILE_KERNEL, culprits_text, gain_text
from gputop.render.styled_text import wrap_sentences
from gputop.text.markdown_text import as_code, without_marks
from gputop.text.units import printable, ranges, wrap

DO, WHY = "Do", "Why"
_INDENT = 8  # of texts and code
_IN_PYTHON = "In Python: "
_WORD = re.compile(r"\(?[A-Z]?[a-z]+(?:['’-][a-z]*)*\)?[,:;]?")  # no name: no dot, underscore, capitals
_UNITS = ("ms", "s", "min", "h")


class VerdictRow(Struct, frozen=True):
    """A labeled text of a verdict, with the code that belongs to it."""

    label: str  # Do, Why, Line, Where, Seen, From; five letters at most
    text: str
    code: str = ""


class VerdictLines(Struct, frozen=True):
    head: str  # what is wrong, with its share: "Input wait takes 48% of the step"; or "NO VERDICT"
    about: str = ""  # behind a head that is no sentence: "10 steps seen, 20 needed"
    fix: str = ""  # what the fix brings: "fix: 95 → 49 ms at best"
    rule: str = ""
    rows: tuple[VerdictRow, ...] = ()

    @property
    def text(self) -> str:
        """The verdict as a text of one line for its head and one for each row."""
        head = f"{self.head}: {self.about}" if self.about else self.head
        return "\n".join([head, *(f"{row.label}: {row.text}" for row in self.rows)])


def verdict_of(finding: Finding, *more: VerdictRow) -> VerdictLines:
    """The lines of a finding. Texts may come from outside: who draws them makes them printable."""
    rows = [VerdictRow(DO, finding.action, finding.snippet or ""), VerdictRow(WHY, finding.why), *where_rows(finding),
            *more]
    return VerdictLines(finding.title, "", gain_text(finding), finding.id + (", yours" if finding.yours else ""),
                        tuple(row for row in rows if row.text))


def where_rows(finding: Finding) -> list[VerdictRow]:
    """The row of the lines, ops or layers that the finding is about."""
    text = culprits_text(finding)
    if text.startswith(_IN_PYTHON):
        return [VerdictRow("Line", text.removeprefix(_IN_PYTHON))]
    return [VerdictRow("Where", text)] if text else []


def kernel_rows(finding: Finding) -> list[VerdictRow]:
    """The row with the command that has Nsight Compute profile the finding's longest kernel."""
    return [VerdictRow("Then", PROFILE_KERNEL, finding.ncu)] if finding.ncu else []


def plain_lines(verdict: VerdictLines, width: int, first: str = "", *, loud: bool = False,
                most: int | None = None) -> Iterator[str]:
    """The verdict as plain text of at most ``width`` columns, but for code and names. ``first`` stands before the head.
    ``loud``: the head in capitals, as there is no other type. ``most`` lines of a reason, by whole sentences; what to
    do is never cut."""
    head = _in_capitals(verdict.head) if loud else verdict.head
    lines = wrap(f"{head}  {verdict.about}" if verdict.about else head, width, first)
    behind = "  ".join(filter(None, (verdict.fix, f"[{verdict.rule}]" if verdict.rule else "")))
    if behind and len(lines[-1]) + 4 + len(behind) <= width:
        lines[-1] += f"    {behind}"
    elif behind:
        lines += wrap(behind, width, " " * max(2, len(first)))
    yield from lines
    for row in verdict.rows:
        label = f"  {row.label:<{_INDENT - 2}}"
        if most is None or row.label == DO:
            yield from wrap(row.text, width, label)
        else:
            text = wrap_sentences(printable(row.text), width - _INDENT, most)
            yield from (f"{' ' * _INDENT if i else label}{line}" for i, line in enumerate(text))
        yield from (" " * _INDENT + printable(line) for line in row.code.splitlines())


def _in_capitals(head: str) -> str:
    """The words up to a share in capitals; names and units stay as they are written."""
    words, sign, share = head.partition("%")
    return " ".join(word.upper() if _WORD.fullmatch(word) and word not in _UNITS else word
                    for word in words.split(" ")) + sign + share


def finding_markdown(finding: Finding, *, simulated: bool = False) -> str:
    """The verdict's lines with the code, and the evidence. Names come from outside: what Markdown or a chat would take
    for a mark or a mention stands as code."""
    from gputop.render.evidence_words import evidence

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
