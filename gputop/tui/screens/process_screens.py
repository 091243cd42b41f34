"""The details of a process, the question before a signal is sent to it, and the stacks of the ranks of this node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from signal import Signals
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.geometry import Size
from textual.screen import ModalScreen

from gputop.core.findings import Finding
from gputop.core.samples import ProcessSample
from gputop.ranks.stack_groups import jobs, report
from gputop.ranks.stacks import ProcessStacks
from gputop.render.palette import ACCENT, BOLD, DIM, PLAIN, WARN
from gputop.render.styled_text import StyledText, wrap
from gputop.session.process_signals import SIGNALS
from gputop.text import redaction
from gputop.text.commands import short_command
from gputop.text.units import fit, printable
from gputop.tui.keys import key, up_and_down
from gputop.tui.screens.dialogs import LivePopup, Popup
from gputop.tui.widgets.cached_lines import DrawnLines, WheelMoves
from gputop.tui.widgets.dialog_frame import DialogFrame


class ProcessPopup(LivePopup):
    """The details of a process; K asks for a signal to it."""

    BINDINGS: ClassVar[list[BindingType]] = [key("K", "signal", "signal…", "send a signal, after confirmation")]

    def __init__(self, process: ProcessSample, make: Callable[[int], Text], ask: Callable[[], None]) -> None:
        super().__init__(f"Process {process.pid}", make, keys=("K: signal…", "y: copy the command"))
        self._process, self._ask = process, ask

    def copied(self) -> tuple[str, str]:
        return printable(redaction.command(self._process.command or "")), "The command, with secrets hidden,"

    def action_signal(self) -> None:
        self.dismiss()
        self._ask()


class SignalList(DrawnLines, can_focus=True):
    """The signals, one of them selected; once the user takes it, a question is below them.

    On a low terminal the process is left out first, then what the signals do, then signals in favor of the question.
    """

    def __init__(self, process: ProcessSample) -> None:
        super().__init__(id="signals")
        self.process = process
        self.index = 0
        self.asked = False
        self.line_of: dict[int, int] = {}  # line of each visible signal, by its index

    @property
    def number(self) -> Signals:
        return SIGNALS[self.index][0]

    def _head(self, width: int) -> list[str]:
        p = self.process
        command = printable(short_command(p.command)) if p.command is not None else "command not known"
        return wrap(f"{p.pid}  {printable(p.user or '?')}  {command}", width, 2)

    def _explanation(self, width: int) -> list[str]:
        """Explanation of the selected signal, or the question, in as many lines as the longest of these texts needs."""
        texts = [wrap(what, width, 3) for _, what in SIGNALS]
        lines = texts[self.index]
        if self.asked:
            question, keys = f"Send {self.number.name} to {self.process.pid}?", "y: send   n, esc: no"
            lines = [f"{question}   {keys}"]
            if len(lines[0]) > width:
                lines = [*wrap(question, width, 2), keys if len(keys) <= width else "y: send  n: no"]
        return lines + [""] * (max(map(len, texts)) - len(lines))

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return min(viewport.height - 2, len(self._head(width)) + 1 + len(SIGNALS) + 1 + len(self._explanation(width)))

    def draw(self) -> None:
        width, height = self.size
        if width <= 0:
            return
        explanation = self._explanation(width)
        shown = max(0, min(len(SIGNALS), height - len(explanation) if self.asked else height))
        explanation = explanation[:height - shown]
        head = self._head(width)[:height - shown - len(explanation)]
        blank = height - shown - len(explanation) - len(head)
        first = min(max(0, self.index - shown // 2), len(SIGNALS) - shown)
        lines: list[list[StyledText]] = [[(text, BOLD)] for text in head]
        lines += [[]] * (blank > 1)
        self.line_of = {}
        for i, (number, what) in list(enumerate(SIGNALS))[first:first + shown]:
            chosen = i == self.index
            self.line_of[i] = len(lines)
            name = f"{number.value:>2} {number.name:<8} "
            lines.append([("› " if chosen else "  ", ACCENT), (name, BOLD if chosen else PLAIN),
                          (fit(what, width - 14) if width >= 24 else "", DIM)])
        lines += [[]] * (blank > 0)
        self.show([*lines, *([(text, WARN if self.asked else DIM)] for text in explanation)])


class SignalScreen(WheelMoves, ModalScreen[Signals | None]):
    """The question which signal to send; dismissed with it, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *up_and_down("signal"),
        key("enter", "ask", "choose", "choose the selected signal; gputop then asks for confirmation"),
        key("y", "send", "send it", "send the signal when gputop asks"),
        key("n,escape,q", "back", "no", "do not send the signal; press again to close"),
        key("question_mark,f1", "app.help", "help", "show the keys of this screen"),
    ]
    HELP = ("Before sending, gputop checks that the PID still belongs to the process on the screen. A later process "
            "with the same PID gets no signal. Processes of other users need root.\n")

    KEYS = ("↑↓ select", "enter: choose", "esc: close")  # the question names its keys itself

    def __init__(self, process: ProcessSample) -> None:
        super().__init__()
        self._process = process

    def compose(self) -> ComposeResult:
        with DialogFrame(f"Signal to process {self._process.pid}", *self.KEYS, id="signal", can_focus=False):
            yield SignalList(self._process)

    def on_mount(self) -> None:
        self.query_one(SignalList).focus()

    def action_move(self, by: int) -> None:
        signals = self.query_one(SignalList)
        if not signals.asked:
            signals.index = min(len(SIGNALS) - 1, max(0, signals.index + by))
            signals.draw()

    def action_send(self) -> None:
        signals = self.query_one(SignalList)
        if signals.asked:
            self.dismiss(signals.number)

    def action_back(self) -> None:
        if self.query_one(SignalList).asked:
            self.action_ask(False)
        else:
            self.dismiss(None)

    def action_ask(self, asked: bool = True) -> None:
        """Ask whether to send the selected signal, or no longer."""
        signals = self.query_one(SignalList)
        signals.asked = asked
        signals.draw()
        self.query_one(DialogFrame).name_keys(*(() if asked else self.KEYS))

    def on_click(self, event: events.Click) -> None:
        """A click on a signal selects it, on the selected one it asks; only the key sends it."""
        signals = self.query_one(SignalList)
        offset = event.get_content_offset(signals)
        chosen = next((i for i, line in signals.line_of.items() if offset is not None and line == offset.y), None)
        if chosen is None or signals.asked:
            return
        if chosen == signals.index:
            self.action_ask()
        signals.index = chosen
        signals.draw()


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
