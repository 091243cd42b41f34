"""The questions before a capture: which job, which of many workers, and whether to start a server in the job."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import ClassVar, Literal

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.screen import ModalScreen

from gputop.advice.live.jobs import name_of
from gputop.core.errors import GputopError
from gputop.core.samples import ProcessSample
from gputop.launch.serve import examine, what_it_does
from gputop.profiler.capture.choose_workers import MAX_ALL_WORKERS, Choice
from gputop.profiler.capture.records import Server
from gputop.render.palette import ACCENT, BOLD, DIM, PLAIN, WARN
from gputop.render.table import Column, Table, table_lines
from gputop.session.capture.which_job import gpu_use
from gputop.text.commands import command_of, script_of, short_command
from gputop.text.units import bytes_, fit, printable, ranges
from gputop.tui.keys import key, up_and_down
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
        *up_and_down("job"),
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


Answer = Literal["few", "all", "none"]


class WorkersQuestion(Dialog[Answer]):
    """Dismissed with the answer."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("y", "answer('few')", "capture these", "capture the proposed workers"),
        key("a", "answer('all')", "capture all", f"capture all workers (at most {MAX_ALL_WORKERS}), even if this slows "
                                                 "them down"),
        key("n,escape,q,enter", "answer('none')", "no", "close without a capture"),
        key("question_mark,f1", "app.help", "help", "the keys of this screen"),
    ]
    HELP = "A capture slows down each worker, and all wait for the slowest one.\n"

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self._choice = choice

    def compose(self) -> ComposeResult:
        choice = self._choice
        text = Text(f"Capture {len(choice.chosen)} of {choice.of} workers? y/N\n\n", WARN)
        for address, reason in zip(choice.chosen, choice.reasons, strict=True):
            text.append(f"{printable(address)}  {printable(reason)}\n")
        text.append(f"\nChosen by {printable(choice.by)}. A capture slows down each worker; traces are similar.", DIM)
        if choice.risk:
            text.append(f"\n\nA capture may end the job: {printable(choice.risk)}.", WARN)
        more = [] if choice.of > MAX_ALL_WORKERS else [f"a: all {choice.of}"]
        with DialogFrame("Capture", "y: these", *more, "n, esc: no", id="popup"):
            yield WrappedText(text)

    def action_answer(self, answer: Answer) -> None:
        if answer != "all" or self._choice.of <= MAX_ALL_WORKERS:
            self.dismiss(answer)


MAX_LISTED = 8  # each is examined, which takes milliseconds
NAME_AN_ADDRESS = 0  # in place of a PID


class StartServer(ModalScreen[int | None]):
    """Question which process is to get a server; dismissed with its PID here, :data:`NAME_AN_ADDRESS`, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *up_and_down("process"),
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
