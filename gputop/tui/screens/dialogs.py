"""The screens that open over the monitor: details of a finding, help, attach, the last capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import HorizontalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from gputop.core.errors import GputopError
from gputop.core.findings import Finding
from gputop.profiler.capture.records import CaptureRecord
from gputop.render.finding_text import gain_text
from gputop.render.palette import ACCENT, BOLD, DIM, PLAIN, SEVERITY_MARK, SEVERITY_STYLE, WARN
from gputop.session.gpu_numbers import GpuNumbers
from gputop.text.units import printable, ranges
from gputop.tui.keys import key
from gputop.tui.monitor.findings_panel import evidence_lines
from gputop.tui.widgets.dialog_frame import Frame, Told


@dataclass(frozen=True, slots=True)
class Code:
    """Lines to paste."""

    text: str


@dataclass(frozen=True, slots=True)
class Below:
    """Text that belongs to the one above it and stands further in."""

    text: Text


Part = Text | Callable[[int], Text] | Code | Below  # text as it is, or made for the columns it has


class Popup(ModalScreen[None]):
    """A box over the monitor; esc and q close it. Code among its texts scrolls sideways and never wraps."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("y", "copy", "copy", "the code into the terminal's clipboard (OSC 52: over SSH, too, where allowed)"),
        key("question_mark", "app.help", "help", "the keys of this screen"),
        key("escape,q", "dismiss", "close", "back to where you were"),
    ]
    HELP = "↑ ↓ and the wheel scroll.\n"

    def __init__(self, title: str, *content: Part, keys: Sequence[str] = ()) -> None:
        """``keys`` are named on its border, beside the one that closes."""
        super().__init__()
        self._title, self._content, self._keys = title, content, keys

    def compose(self) -> ComposeResult:
        with Frame(self._title, *self._keys, "esc: close", id="popup"):
            for part in self._content:
                if isinstance(part, Code):
                    with HorizontalScroll(classes="code"):
                        yield Static(Text("\n".join(map(printable, part.text.splitlines())), ACCENT, no_wrap=True))
                else:
                    below = isinstance(part, Below)
                    yield Told(part.text if isinstance(part, Below) else part, classes="indented" if below else None)

    def on_mount(self) -> None:
        self.query_one("#popup").focus()

    def copied(self) -> tuple[str, str]:
        """What y copies, and what it is called; empty where there is nothing."""
        return "\n".join(part.text for part in self._content if isinstance(part, Code)), "The code"

    def action_copy(self) -> None:
        from gputop.tui.terminal.clipboard import copy

        text, what = self.copied()
        if text:
            copy(self.app, text, what)
        else:
            self.notify("There is no code to copy here.", timeout=4)


class LivePopup(Popup):
    """A box whose text is made anew with each look at the node."""

    def update_view(self) -> None:
        for told in self.query(Told):
            told.tell()


def finding_parts(finding: Finding, numbers: GpuNumbers | None = None) -> list[Part]:
    """Everything about one finding. Built with styles, never markup: names come from outside.

    ``numbers``: what the GPUs of the job are on this node; the texts of a trace have the job's own.
    """
    parts: list[Part] = []
    out = Text()
    gain = gain_text(finding) or "no figure"
    out.append(f"{SEVERITY_MARK[finding.severity]} {finding.severity}", SEVERITY_STYLE[finding.severity])
    gpus = f"   GPU {ranges(finding.gpus, ', ')}" if finding.gpus else ""
    origin = "a trace" if finding.origin == "trace" else "the live figures"
    out.append(f"{gpus}   from {origin}\n\n", DIM)
    out.append(printable(finding.why) + "\n\n")
    out.append("What to do\n", BOLD)
    out.append(printable(finding.action) + "\n")
    if finding.snippet:
        parts += [out, Code(finding.snippet)]
        out = Text()
    out.append("\nGain  ", BOLD)
    out.append(gain, SEVERITY_STYLE[finding.severity])
    out.append(f"  {printable(finding.gain.how)}\n")
    if finding.evidence:
        out.append("\nEvidence\n", BOLD)
        for line in evidence_lines(finding):
            out.append("  " + printable(line) + "\n")
    if finding.consequences:
        out.append("\nAlso explains", BOLD)
        out.append("  with the cause they go, too", DIM)
        parts += [out, *_consequences(finding)]
        out = Text()
    if numbers is not None and finding.origin == "trace" and finding.gpus:
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
        out.append(f"  {other.id}{', live' if other.origin == 'live' else ''}", DIM)
        yield out
        yield Below(Text(printable(other.why)))
        yield from _consequences(other)


def capture_text(record: CaptureRecord) -> Text:
    """What a capture did and says; where it could not be analysed, why."""
    parts = [*map(printable, record.remarks), *(f"profiler: {printable(n)}" for n in record.notes)]
    parts += [record.report] if record.problem is None else [
        printable(str(record.path)), printable(record.problem.message), printable(record.problem.fix)]
    if record.path.exists():
        from gputop.launch.xprof import logdir_of, open_command

        parts.append(f"Open it in XProf: {printable(open_command(logdir_of(record.path)))}")
    return Text("\n".join(parts))


class Ask(ModalScreen[str | None]):
    """One line of input; dismissed with the text, or None on escape."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "cancel")]

    def __init__(self, title: str, hint: str, value: str = "", placeholder: str = "",
                 check: Callable[[str], str | None] = lambda _: None) -> None:
        """``check`` says what is wrong with a text, which is then asked for again."""
        super().__init__()
        self._title, self._hint, self._value, self._placeholder = title, hint, value, placeholder
        self._check = check

    def compose(self) -> ComposeResult:
        with Frame(self._title, "enter: ok", "esc: cancel", id="ask", can_focus=False):
            yield Input(value=self._value, placeholder=self._placeholder)
            yield Told(Text(self._hint), id="hint")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        text = event.value.strip()
        problem = self._check(text) if text else None
        if problem is None:
            self.dismiss(text)
        else:
            self.query_one(Told).tell(Text(printable(problem), WARN))

    def action_cancel(self) -> None:
        self.dismiss(None)


def ask_attach() -> Ask:
    """Where the profiler server is."""
    def problem(address: str) -> str | None:
        from gputop.profiler.workers import addresses

        try:
            addresses([address])
        except GputopError as error:
            return f"{error.message} {error.fix}"
        return None

    hint = ("The profiler server of a job. To start one in it:\n"
            "  tf.profiler.experimental.server.start(6009)\n"
            "  jax.profiler.start_server(6009)\n"
            "A job that runs without one is given one by:\n"
            "  gputop attach PID")
    return Ask("Attach to HOST:PORT", hint, placeholder="localhost:6009", check=problem)
