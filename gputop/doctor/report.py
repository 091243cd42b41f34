"""The outcome of ``gputop doctor``: all checks in order, as text, as a document, and the exit status."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap

from msgspec import Struct

from gputop.core.errors import EXIT_FAILED, EXIT_NO_DATA, EXIT_OK
from gputop.doctor.check import Check
from gputop.text import console

_COLORS = {"ok": "32", "warn": "33", "fail": "31", "unknown": "35"}


class DoctorDocument(Struct, frozen=True, tag_field="schema", tag="gputop.doctor/1"):
    """gputop doctor --json."""

    checks: tuple[Check, ...]


class Report(Struct, frozen=True):
    """All checks, and whether there is anything to monitor at all."""

    checks: tuple[Check, ...]
    no_gpu: bool

    @property
    def exit_code(self) -> int:
        """3 without a driver or GPU, else 1 if a check failed, else 0."""
        if self.no_gpu:
            return EXIT_NO_DATA
        return EXIT_FAILED if any(check.status == "fail" for check in self.checks) else EXIT_OK


def to_text(report: Report, width: int = 100, *, color: bool = False) -> str:
    """One aligned entry per check, its fix below."""
    margin = max(len(check.title) for check in report.checks) + 12
    lines: list[str] = []
    for check in report.checks:
        word = check.status.ljust(8)
        if color:
            word = f"\x1b[{_COLORS[check.status]}m{word}\x1b[0m"
        shown = console.one_line(check.detail, console.LINE_CHARS)
        detail = textwrap.wrap(shown, max(30, width - margin), break_on_hyphens=False) or [""]
        lines.append(f"{word}  {check.title.ljust(margin - 12)}  {detail[0]}".rstrip())
        lines += [" " * margin + rest for rest in detail[1:]]
        if check.fix:
            lines += ["", *(" " * margin + fix for fix in console.clean(check.fix).split("\n")), ""]
    if lines[-1]:
        lines.append("")
    return "\n".join([*lines, _summary(report)]) + "\n"


def print_report(report: Report, *, as_json: bool) -> None:
    """Print to stdout; in colors on a terminal that has them, unless NO_COLOR is set."""
    if as_json:
        console.write_json(DoctorDocument(report.checks))
        return
    tty = sys.stdout.isatty()
    width = min(120, shutil.get_terminal_size((100, 24)).columns) if tty else 100
    color = tty and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    text = to_text(report, width, color=color)
    console.write_colored(text)


def _summary(report: Report) -> str:
    counts = {status: sum(check.status == status for check in report.checks) for status in _COLORS}
    words = {"ok": "ok", "warn": "with limits", "fail": "failed", "unknown": "unknown"}
    text = ", ".join(f"{count} {words[status]}" for status, count in counts.items() if count)
    if report.no_gpu:
        text += ". No GPU to look at here; gputop --demo shows a simulated node"
    return text + "."
