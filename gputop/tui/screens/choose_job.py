"""The question which of several jobs of this node to capture from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType

from gputop.core.samples import ProcessSample
from gputop.profiler.capture.records import Server
from gputop.render.palette import ACCENT, BOLD, DIM, PLAIN, WARN
from gputop.render.table import Column, Table, table_lines
from gputop.session.capture.which_job import gpu_use
from gputop.text.commands import command_of, short_command
from gputop.text.units import bytes_, fit, printable, ranges
from gputop.tui.keys import key
from gputop.tui.monitor.status_lines import time_ago
from gputop.tui.widgets.dialog_frame import Dialog, DialogFrame, WrappedText

_COLUMNS = (Column("", most=1000),) * 6  # without titles: each figure says what it is; cut where the dialog ends


def job_row(server: Server, processes: Sequence[ProcessSample], now_s: float) -> tuple[str, ...]:
    """A job in the list: user, GPUs, GPU memory, age, PID and command."""
    use = gpu_use(server, processes)
    gpus = f"GPU {ranges(use.gpus)}" if use.gpus else "no GPU"
    memory = "" if use.memory_bytes is None else bytes_(use.memory_bytes)
    age = "" if server.started_s is None else time_ago(now_s, server.started_s).removesuffix(" ago")
    return (printable(server.user or server.owner), gpus, memory, age,
            "" if server.pid is None else str(server.pid),
            printable(short_command(command_of(server.description))) or server.address)


class ChooseJob(Dialog[Server | None]):
    """Dismissed with the server of the chosen job, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("up,k", "move(-1)", "up", "select the job above"),
        key("down,j", "move(1)", "down", "select the job below"),
        key("enter,c", "choose", "capture", "capture from the selected job"),
        key("escape,q", "dismiss", "close", "close without capturing"),
        key("question_mark,f1", "app.help", "help", "show the keys of this screen"),
    ]
    HELP = "gputop remembers the choice while the job is running.\n"

    def __init__(self, servers: Sequence[Server], reason: str = "", processes: Sequence[ProcessSample] = (),
                 now_s: float = 0.0) -> None:
        """``reason``: why it is asked. ``processes``: those of the newest sample, which hold the GPUs."""
        super().__init__()
        self._servers = tuple(servers)
        self._reason = reason
        self._jobs = Table("Jobs", _COLUMNS, tuple(job_row(server, processes, now_s) for server in servers), "")
        self._index = 0

    def compose(self) -> ComposeResult:
        with DialogFrame("Which job?", "↑↓ select", "enter: capture", "esc: close", id="popup"):
            yield WrappedText(self._text)

    def _text(self, width: int) -> Text:
        out = Text(printable(self._reason) + "\n\n" if self._reason else "", WARN)
        for i, line in enumerate(table_lines(self._jobs, width)[1:]):
            here = i == self._index
            out.append("›" if here else " ", ACCENT)
            out.append(fit(f" {line}", width - 1).rstrip() + "\n", BOLD if here else PLAIN)
        out.append("\nOr select a process (tab) and press c to capture its job.", DIM)
        return out

    def action_move(self, by: int) -> None:
        self._index = min(len(self._servers) - 1, max(0, self._index + by))
        self.query_one(WrappedText).update_text()

    def action_choose(self) -> None:
        self.dismiss(self._servers[self._index])

