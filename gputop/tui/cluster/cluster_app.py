"""The app of ``gputop cluster``: the screen, the thread that asks, and programs that take the terminal."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from msgspec.structs import replace
from textual.binding import BindingType
from textual.message import Message

from gputop.advice.fleet.report import FleetReport
from gputop.cluster.model import Fleet, FleetCollector, FleetView
from gputop.core.errors import EXIT_OK, GputopError
from gputop.core.files import write_new_files
from gputop.core.findings import Problem
from gputop.core.own_program import gputop_command
from gputop.export.cluster import render
from gputop.text.console import note, say
from gputop.text.programs import NO_SUCH_PROGRAM
from gputop.tui.cluster.cluster_screen import ClusterScreen, FleetTable
from gputop.tui.cluster.fleet_rows import Commands, State
from gputop.tui.keys import key
from gputop.tui.screens.help import help_box
from gputop.tui.terminal.preferences import Preferences
from gputop.tui.terminal.terminal_app import TerminalApp

SOON_S = 0.3  # between two refreshes while something is still wanted
MakeReport = Callable[[Fleet], FleetReport]


class Asker:
    """Refreshes in a thread of its own, every ``period_s`` and where other rows are wanted."""

    def __init__(self, collector: FleetCollector, make: MakeReport, view: FleetView, period_s: float) -> None:
        self.view = view
        self._collector, self._make, self._period_s = collector, make, period_s
        self._wake, self._ended = threading.Event(), threading.Event()
        self._listener: Callable[[FleetReport | GputopError], None] = lambda _: None
        threading.Thread(target=self._run, name="gputop-cluster", daemon=True).start()

    def listen(self, listener: Callable[[FleetReport | GputopError], None]) -> None:
        self._listener = listener
        self._wake.set()  # what is known may be old: another program had the terminal

    def want(self, view: FleetView) -> None:
        if view != self.view:
            self.view = view
            self._wake.set()

    def close(self) -> None:
        self._ended.set()
        self._wake.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._wake.wait(SOON_S if not self._collector.settled else self._period_s)
            self._wake.clear()
            if self._ended.wait(0.0):
                return
            try:
                self._listener(self._make(self._collector.refresh(self.view)))
            except GputopError as error:
                self._listener(error)
            except Exception as error:  # noqa: BLE001  thread boundary: the next answer may be readable
                self._listener(GputopError("processing an answer failed with an internal error in gputop: "
                                           f"{error!r}"[:300], "gputop will retry. Please report this."))


class ClusterApp(TerminalApp):
    """Shows a state; ends with a command to be run, or with None."""

    TITLE = "gputop"
    CSS_PATH = Path(__file__).parents[1] / "gputop.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        key("q,ctrl+q", "quit", "quit", "end gputop", footer=True),
        key("ctrl+c", "quit", "quit", "end gputop", priority=True),
    ]

    class Answered(Message):
        def __init__(self, answer: FleetReport | GputopError) -> None:
            super().__init__()
            self.answer = answer

    def __init__(self, state: State, asker: Asker, commands: Commands, folder: Path,
                 preferences: Preferences | None = None, period_s: float = 15.0) -> None:
        super().__init__(preferences)
        self._state, self._asker, self._folder = state, asker, folder
        self._main = ClusterScreen(state, commands, period_s)

    @property
    def shows_simulated(self) -> bool:
        return self._state.report.fleet.simulated

    def get_default_screen(self) -> ClusterScreen:
        return self._main

    def on_mount(self) -> None:
        self._asker.listen(self._post)
        self.show_preference_warnings()

    def _post(self, answer: FleetReport | GputopError) -> None:
        self.post_message(self.Answered(answer))

    def on_cluster_app_answered(self, message: Answered) -> None:
        if isinstance(message.answer, GputopError):
            # The job that was asked for is not there any more: what is known stays.
            old = self._state.report
            problem = Problem(message.answer.message, message.answer.fix)
            self._state.report = replace(old, fleet=replace(old.fleet, problems=(problem,)))
        else:
            self._state.report = message.answer
            self._main.answered()
        if self._main.is_attached:
            self._main.update_view()

    def on_fleet_table_wanted(self, _: FleetTable.Wanted) -> None:
        self._asker.want(self._state.asked(self._main.table.shown))

    def action_help(self) -> None:
        self.push_screen(help_box(self.screen, str(self.screen.HELP or "")))

    def action_snapshot(self) -> None:
        stem = time.strftime("gputop-cluster-%Y%m%d-%H%M%S", time.localtime(self._state.report.fleet.time_s))
        try:
            contents = {ending: render(self._state.report, form).encode()
                        for ending, form in ((".txt", "text"), (".json", "json"), (".html", "html"))}
            paths = write_new_files(self._folder, stem, contents)
        except GputopError as error:
            self.notify(str(error), severity="error")
            return
        self.notify(f"Wrote {paths[0]}, .json and .html")


def run_program(command: list[str]) -> None:
    """Give the terminal to a program; "gputop" is this one, not another of that name. What it says where it fails stays
    until somebody has read it."""
    words = [*gputop_command(), *command[1:]] if command[0] == "gputop" else command
    try:
        status = subprocess.run(words).returncode
    except OSError as error:
        status, cause = None, f"cannot start {command[0]}: {error.strerror or error}"
    else:
        cause = f"{shlex.join(command)} exited with status {status}"
    if status == 0:
        return
    say(cause)
    if status == NO_SUCH_PROGRAM:
        note("  The node has no such command. To give its path: gputop cluster --remote-command /PATH/gputop")
    note("  enter: back to the cluster")
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        input()


def run(collector: FleetCollector, make: MakeReport, view: FleetView, period_s: float, commands: Commands, folder: Path,
        preferences: Preferences) -> int:
    """Show the cluster until the user leaves it; raises the GputopError of the first refresh."""
    state = State(view, make(collector.refresh(view)))
    asker = Asker(collector, make, view, period_s)
    try:
        while True:
            command = ClusterApp(state, asker, commands, folder, preferences, period_s).run()
            if not isinstance(command, list):
                return EXIT_OK
            run_program(command)
    finally:
        asker.close()
