"""The question which of several jobs of this node to capture from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.screen import ModalScreen

from gputop.profiler.capture.records import Server
from gputop.render.palette import ACCENT, BOLD, DIM, PLAIN, WARN
from gputop.text.commands import short_description
from gputop.text.units import fit, printable
from gputop.tui.keys import key
from gputop.tui.widgets.dialog_frame import DialogFrame, WrappedText


class ChooseJob(ModalScreen[Server | None]):
    """Dismissed with the server of the chosen job, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("up,k", "move(-1)", "up", "select the job above"),
        key("down,j", "move(1)", "down", "select the job below"),
        key("enter,c", "choose", "capture", "capture from the selected job"),
        key("escape,q", "close", "close", "close without a capture"),
        key("question_mark,f1", "app.help", "help", "the keys of this screen"),
    ]
    HELP = "The choice is kept as long as the job runs.\n"

    def __init__(self, servers: Sequence[Server]) -> None:
        super().__init__()
        self._servers = tuple(servers)
        self._index = 0

    def compose(self) -> ComposeResult:
        with DialogFrame("Which job?", "↑↓ select", "enter: capture", "esc: close", id="popup"):
            yield WrappedText(self._text)

    def on_mount(self) -> None:
        self.query_one("#popup").focus()

    def _text(self, width: int) -> Text:
        out = Text("Several jobs have a profiler server.\n\n", WARN)
        for i, server in enumerate(self._servers):
            here = i == self._index
            pid = "" if server.pid is None else str(server.pid)
            out.append("›" if here else " ", ACCENT)
            out.append(fit(f" {pid:>7}  {printable(short_description(server.description))}", width - 1).rstrip() + "\n",
                       BOLD if here else PLAIN)
        out.append("\nOr select a process (tab) and press c: gputop then captures from its job.", DIM)
        return out

    def action_move(self, by: int) -> None:
        self._index = min(len(self._servers) - 1, max(0, self._index + by))
        self.query_one(WrappedText).update_text()

    def action_choose(self) -> None:
        self.dismiss(self._servers[self._index])

    def action_close(self) -> None:
        self.dismiss(None)
