"""The question whether to start a profiler server in a running process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.screen import ModalScreen

from gputop.advice.live.node_view import name_of
from gputop.core.errors import GputopError
from gputop.core.samples import ProcessSample
from gputop.launch.serve import examine, what_it_does
from gputop.render.palette import ACCENT, BOLD, DIM, PLAIN, WARN
from gputop.text.commands import script_of, short_command
from gputop.text.units import fit, printable
from gputop.tui.keys import key
from gputop.tui.widgets.dialog_frame import DialogFrame, WrappedText

MAX_LISTED = 8  # each is examined, which takes milliseconds
NAME_AN_ADDRESS = 0  # in place of a PID


class StartServer(ModalScreen[int | None]):
    """Question which process is to get a server; dismissed with its PID here, :data:`NAME_AN_ADDRESS`, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("up,k", "move(-1)", "up", "select the process above"),
        key("down,j", "move(1)", "down", "select the process below"),
        key("y", "start", "start one", "start a profiler server in the selected process, then capture from it"),
        key("a", "address", "enter an address", "enter the HOST:PORT of a server on another machine"),
        key("enter", "answer", "the answer in capitals", "start one in a job that was captured before; otherwise "
                                                         "close"),
        key("n,escape,q", "dismiss", "no", "close without starting a server"),
        key("question_mark,f1", "app.help", "help", "show the keys of this screen"),
    ]
    HELP = "Only y confirms, or enter for a job that was captured before.\n"

    def __init__(self, processes: Sequence[ProcessSample], obsolete: Callable[[], str] = lambda: "",
                 captured: Collection[str] = ()) -> None:
        """``obsolete``: why the question need not be answered any more, else "". ``captured``: the scripts of the jobs
        that were captured before; what it does to a job has been read then."""
        super().__init__()
        self._captured = captured
        self.started: dict[int, int] = {}  # PID → when the process that is shown began (:class:`Target`)
        self._index, self._obsolete = 0, obsolete
        self._choices: list[tuple[ProcessSample, int, GputopError | None]] = []  # PID in here, why it cannot be
        for process in processes[:MAX_LISTED]:
            pid = process.local_pid or process.pid
            try:
                self.started[pid] = examine(pid).started
            except GputopError as error:
                self._choices.append((process, pid, error))
            else:
                self._choices.append((process, pid, None))
        self._choices.sort(key=lambda choice: (choice[2] is not None, not self._again(choice[0])))

    def _again(self, process: ProcessSample) -> bool:
        """Return whether it is a job that was captured before."""
        script = script_of(process.command or "")
        return script != "" and script in self._captured

    def compose(self) -> ComposeResult:
        many = ("↑↓ select",) if len(self._choices) > 1 else ()
        possible = ("y: start one",) if any(error is None for _, _, error in self._choices) else ()
        with DialogFrame("No profiler server", *possible, *many, "a: enter an address", "n, esc: no", id="popup",
                         can_focus=False):  # the arrows select
            yield WrappedText(self._text)

    def _text(self, width: int) -> Text:
        out = Text()
        if len(self._choices) > 1:
            for i, (process, pid, _) in enumerate(self._choices):
                here = i == self._index
                out.append("›" if here else " ", ACCENT)
                command = printable(short_command(process.command or ""))
                out.append(fit(f" {pid:>7}  {command}", width - 1).rstrip() + "\n", BOLD if here else PLAIN)
            out.append("\n")
        process, pid, error = self._choices[self._index]
        if error is None and self._again(process):
            out.append(f"{printable(short_command(process.command or ''))} (pid {pid}) was captured before.\n", PLAIN)
            return out.append("Capture it? Y/n", WARN)
        out.append(f"{printable(name_of(process))} has no profiler server. ", WARN)
        if error is None:
            out.append("Start one? y/N\n\n", WARN)
            out.append(f"{what_it_does(pid)} Then the capture begins.", PLAIN)
        else:
            out.append("gputop cannot start one from here.\n\n", WARN)
            out.append(f"{printable(error.message)}.\n{printable(error.fix)}\n", PLAIN)
            if process.framework == "pytorch":
                return out
            out.append("Or in the job: tf.profiler.experimental.server.start(6009) or "
                       "jax.profiler.start_server(6009).", DIM)
        return out

    def update_view(self) -> None:
        """Called with every sample: a job that was just starting may have its own server now."""
        if reason := self._obsolete():
            self.dismiss(None)
            self.app.notify(printable(reason))

    def action_move(self, by: int) -> None:
        self._index = min(len(self._choices) - 1, max(0, self._index + by))
        self.query_one(WrappedText).update_text()

    def action_answer(self) -> None:
        process, pid, error = self._choices[self._index]
        self.dismiss(pid if error is None and self._again(process) else None)

    def action_start(self) -> None:
        _, pid, error = self._choices[self._index]
        if error is None:
            self.dismiss(pid)

    def action_address(self) -> None:
        self.dismiss(NAME_AN_ADDRESS)

