"""The details of a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

from rich.text import Text
from textual.binding import BindingType

from gputop.core.findings import Finding
from gputop.render.evidence_words import evidence
from gputop.render.finding_text import DO, finding_markdown, gain_basis, kernel_rows, verdict_of
from gputop.render.palette import BOLD, DIM, GAIN, PLAIN, SEVERITY_MARK, SEVERITY_STYLE
from gputop.session.gpu_numbers import GpuNumbers
from gputop.text.units import fit, printable, ranges
from gputop.tui.keys import STACKS_TELL, key
from gputop.tui.screens.dialogs import Below, Code, Part, Popup
from gputop.tui.terminal.terminal_app import copy

_MAX_LABEL_COLUMNS = 46


class FindingPopup(Popup):
    """The details of a finding; t goes to show its place on the timeline."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("t", "place", "on the timeline", "show the finding on the timeline"),
        key("S", "app.open('stacks')", "stacks", "stacks: the line of code where each rank is"),
        key("Y", "markdown", "copy as Markdown", "copy the finding as Markdown"),
    ]

    def __init__(self, finding: Finding, go: Callable[[Finding], None], numbers: GpuNumbers | None = None,
                 *, simulated: bool = False, no_line: str = "") -> None:
        """``no_line``: why the finding names no line of Python, or how it would."""
        keys = ["t: on the timeline"] if finding.origin == "trace" else []
        keys += ["S: stacks"] if finding.id in STACKS_TELL else []
        keys += ["y: copy the code"] if finding.snippet else ["y: copy the command"] if finding.ncu else []
        keys += ["Y: as Markdown"]
        hint = [Text(f"\n{printable(no_line)}\n", DIM)] if no_line else []
        super().__init__(finding.title, *finding_parts(finding, numbers), *hint, keys=keys)
        self._finding, self._go, self._simulated = finding, go, simulated

    def copied(self) -> tuple[str, str]:
        if self._finding.snippet or not self._finding.ncu:
            return self._finding.snippet or "", "The code"
        return printable(self._finding.ncu), "The command"

    def action_markdown(self) -> None:
        copy(self.app, finding_markdown(self._finding, simulated=self._simulated), "The finding as Markdown")

    def action_place(self) -> None:
        if self._finding.origin == "trace":
            self.dismiss()
            self._go(self._finding)
        else:
            self.notify("This finding comes from live samples, so it has no place on the timeline.")


def finding_parts(finding: Finding, numbers: GpuNumbers | None = None) -> list[Part]:
    """Everything about one finding. Built with styles, never markup: names come from outside.

    ``numbers``: what the GPUs of the job are on this node; the texts of a trace have the job's own.
    """
    parts: list[Part] = []
    out = Text()
    out.append(f"{SEVERITY_MARK[finding.severity]} {finding.severity}", SEVERITY_STYLE[finding.severity])
    gpus = f"   GPU {ranges(finding.gpus, ', ')}" if finding.gpus else ""
    origin = "a trace" if finding.origin == "trace" else "live samples"
    yours = ", from a custom rule" if finding.yours else ""
    out.append(f"{gpus}   from {origin}{yours}\n\n", DIM)
    verdict = verdict_of(finding, *kernel_rows(finding))
    if verdict.fix:
        out.append(verdict.fix + "\n\n", GAIN if finding.gain.per != "sample" else PLAIN)
    for row in verdict.rows:
        out.append(f"{row.label:<6}", BOLD if row.label == DO else DIM)
        out.append(printable(row.text) + "\n")
        if row.code:
            parts += [out, Code(row.code)]
            out = Text()
    out.append("\nEstimate\n" if verdict.fix else "\nNo estimate\n", BOLD)
    out.append(f"{printable(gain_basis(finding))}\n")
    if finding.evidence:
        out.append("\nEvidence\n", BOLD)
        figures = evidence(finding)
        columns = min(_MAX_LABEL_COLUMNS, max(len(label) for label, _ in figures))
        for label, value in figures:
            out.append(f"  {fit(printable(label), columns)}  {printable(value)}\n")
    if finding.consequences:
        out.append("\nAlso explains", BOLD)
        out.append("  will disappear with it", DIM)
        parts += [out, *_consequences(finding)]
        out = Text()
    if numbers is not None and not (numbers.same and numbers.reason is None) and finding.origin == "trace" and (
            finding.gpus):
        out.append("\nGPUs  ", BOLD)
        out.append(printable(numbers.text()) + "\n")
    out.append("\nRule  ", BOLD)
    out.append(f"{finding.id}\n", PLAIN)
    out.append("Source  ", BOLD)
    out.append(printable(finding.source), DIM)
    return [*parts, out]


def _consequences(finding: Finding) -> Iterator[Part]:
    for other in finding.consequences:
        out = Text(f"  {SEVERITY_MARK[other.severity]} {printable(other.title)}", SEVERITY_STYLE[other.severity])
        out.append(f"  {other.id}{', live' if other.origin == 'live' else ''}{', yours' if other.yours else ''}", DIM)
        yield out
        yield Below(Text(printable(other.why)))
        yield from _consequences(other)
