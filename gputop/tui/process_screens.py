"""The details of a process, and the question before a signal is sent to it."""

from __future__ import annotations

from collections.abc import Callable
from signal import Signals
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen

from gputop.export import redact
from gputop.samples import ProcessSample
from gputop.signals import SIGNALS
from gputop.text import fit, printable
from gputop.tui.keys import key
from gputop.tui.lines import DrawnLines
from gputop.tui.palette import ACCENT, BOLD, DIM, PLAIN, WARN
from gputop.tui.runs import Run, wrap
from gputop.tui.screens import LivePopup


class ProcessPopup(LivePopup):
    """The details of a process; K asks for a signal to it."""

    BINDINGS: ClassVar[list[BindingType]] = [key("K", "signal", "signal…", "send it a signal, after a question")]

    def __init__(self, process: ProcessSample, make: Callable[[], Text], ask: Callable[[], None]) -> None:
        super().__init__(f"Process {process.pid}", make)
        self._process, self._ask = process, ask

    def on_mount(self) -> None:
        super().on_mount()
        self.query_one("#popup").border_subtitle = "K: signal…   y: copy the command   esc: close"

    def copied(self) -> tuple[str, str]:
        return redact.command(self._process.command or ""), "The command, its secrets hidden,"

    def action_signal(self) -> None:
        self.dismiss()
        self._ask()


class SignalList(DrawnLines, can_focus=True):
    """The signals; one is selected, and once it is taken, the question stands below."""

    def __init__(self, process: ProcessSample) -> None:
        super().__init__(id="signals")
        self.process = process
        self.index = 0
        self.asked = False

    @property
    def number(self) -> Signals:
        return SIGNALS[self.index][0]

    def draw(self) -> None:
        p, width = self.process, self.size.width
        if width <= 0:
            return
        command = printable(redact.command(p.command)) if p.command is not None else "command not known"
        lines: list[list[Run]] = [[(text, BOLD)] for text in wrap(f"{p.pid}  {printable(p.user or '?')}  {command}",
                                                                  width, 2)]
        lines += [[] for _ in range(3 - len(lines))]
        for i, (number, what) in enumerate(SIGNALS):
            chosen = i == self.index
            lines.append([("› " if chosen else "  ", ACCENT), (f"{number.value:>2} {number.name:<8} ", BOLD if chosen
                          else PLAIN), (fit(what, max(0, width - 14)), DIM)])
        lines.append([])
        if not self.asked:
            lines += [[(text, DIM)] for text in wrap(SIGNALS[self.index][1], width, 2)]
        else:
            question = f"Send {self.number.name} to {p.pid}?   y: send   n, esc: do not"
            lines += [[(text, WARN)] for text in ([question] if len(question) <= width else question.split("   ", 1))]
        self.show(lines)


class SignalScreen(ModalScreen[Signals | None]):
    """Dismissed with the signal to send, None for none."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("up,k", "move(-1)", "up", "select the signal above"),
        key("down,j", "move(1)", "down", "select the signal below"),
        key("enter", "ask", "take it", "take the selected signal; a question follows"),
        key("y", "send", "send it", "send it, once it is asked"),
        key("n,escape,q", "back", "do not", "do not send it; once more closes"),
        key("question_mark", "app.help", "help", "the keys of this screen"),
    ]
    HELP = ("Before it is sent, the process is held and its start time compared with the one on screen: a later "
            "process of the same PID gets nothing. Processes of other users need root.\n")

    def __init__(self, process: ProcessSample) -> None:
        super().__init__()
        self._process = process

    def compose(self) -> ComposeResult:
        with Vertical(id="signal") as box:
            box.border_title = Content(f"Signal to process {self._process.pid}")
            box.border_subtitle = "↑↓ select   enter: take it   esc: close"
            yield SignalList(self._process)

    def on_mount(self) -> None:
        self.query_one(SignalList).focus()

    def action_move(self, by: int) -> None:
        signals = self.query_one(SignalList)
        if not signals.asked:
            signals.index = min(len(SIGNALS) - 1, max(0, signals.index + by))
            signals.draw()

    def action_ask(self) -> None:
        self._ask(True)

    def action_send(self) -> None:
        signals = self.query_one(SignalList)
        if signals.asked:
            self.dismiss(signals.number)

    def action_back(self) -> None:
        if self.query_one(SignalList).asked:
            self._ask(False)
        else:
            self.dismiss(None)

    def _ask(self, asked: bool) -> None:
        signals = self.query_one(SignalList)
        signals.asked = asked
        signals.draw()

    def on_mouse_scroll_down(self) -> None:
        self.action_move(1)

    def on_mouse_scroll_up(self) -> None:
        self.action_move(-1)

    def on_click(self, event: events.Click) -> None:
        """A signal selects, the selected one asks; it is sent by the key alone."""
        signals = self.query_one(SignalList)
        row = event.get_content_offset(signals)
        if row is None or not 0 <= row.y - 3 < len(SIGNALS) or signals.asked:
            return
        if row.y - 3 == signals.index:
            self._ask(True)
        signals.index = row.y - 3
        signals.draw()
