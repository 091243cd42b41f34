"""Stacks of the ranks of this node, those that stand alike together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.text import Text
from textual.binding import BindingType

from gputop.core.findings import Finding
from gputop.ranks.stack_groups import jobs, report
from gputop.ranks.stacks import ProcessStacks
from gputop.render.palette import ACCENT, BOLD, DIM, WARN
from gputop.text.units import printable
from gputop.tui.keys import key
from gputop.tui.screens.dialogs import Popup

_ON_HANGS = ("collective_hang", "spinning")


class StacksPopup(Popup):
    """The stacks; r reads them again, n with native frames."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("r", "again(False)", "read again", "read the stacks again"),
        key("n", "again(True)", "native frames…", "read native frames, after confirmation"),
    ]

    def __init__(self, processes: Sequence[ProcessStacks], findings: Sequence[Finding],
                 read: Callable[[bool], None], dumps: Sequence[str] = ()) -> None:
        """``read`` opens the stacks anew, with native frames or without. ``dumps`` are lines on those of PyTorch's
        flight recorder."""
        self._lines = [*dumps, *[""] * bool(dumps), *report(jobs(processes))]
        super().__init__("Stacks", stacks_text(self._lines, findings),
                         keys=("r: again", "n: native frames…", "y: copy"))
        self._read = read

    def copied(self) -> tuple[str, str]:
        return "\n".join(self._lines), "The stacks,"

    def action_again(self, native: bool) -> None:
        self.dismiss()
        self._read(native)


def stacks_text(lines: Sequence[str], findings: Sequence[Finding]) -> Text:
    """The report with what the live figures and NCCL say of a hang above it."""
    out = Text()
    for finding in findings:
        if finding.id in _ON_HANGS:
            out.append(f"{printable(finding.title)}\n", WARN)
    for line in lines:
        style = ACCENT if line.startswith("  →") else DIM if line.startswith("    ") else BOLD
        out.append(f"{printable(line)}\n", style)
    return out
