"""The app of ``gputop cluster``: the screen, the thread that asks, and programs that take the terminal.

The screen shows what the thread knows, and says what it wants to see.
"""

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
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Footer

from gputop.advice.fleet.advise import FleetReport
from gputop.cluster.collect import FleetCollector
from gputop.cluster.model import Fleet, FleetView
from gputop.core.errors import EXIT_OK, GputopError
from gputop.core.files import write_new_files
from gputop.core.findings import Problem
from gputop.core.own_program import gputop_command
from gputop.export.cluster import render
from gputop.render.palette import ACCENT, PLAIN
from gputop.render.styled_text import StyledText
from gputop.text.console import note, say
from gputop.text.programs import NO_SUCH_PROGRAM
from gputop.text.units import printable
from gputop.tui.cluster import fleet_rows as rows
from gputop.tui.cluster.fleet_rows import Commands, FleetRow, State
from gputop.tui.keys import key
from gputop.tui.screens.dialogs import Popup, ask_text
from gputop.tui.screens.help import help_box
from gputop.tui.terminal.color_support import Preferences
from gputop.tui.terminal.terminal_app import TerminalApp
from gputop.tui.widgets.cached_lines import DrawnLines, LinesWidget, MessageAbout
from gputop.tui.widgets.dialog_frame import Dialog, DialogFrame, WrappedText

SOON_S = 0.3  # between two refreshes while something is still wanted
MakeReport = Callable[[Fleet], FleetReport]


class Asker:
    """Refreshes in a thread of its own, every ``period_s`` and where other rows are wanted."""

    def __init__(self, collector: FleetCollector, make: MakeReport, view: FleetView, period_s: float) -> None:
        self.view = view
        self._collector, self._make, self._period_s = collector, make, period_s
        self._wake, self._ended = threading.Event(), threading.Event()
        self._listener: Callable[[FleetReport | GputopError], object] = lambda _: None
        threading.Thread(target=self._run, name="gputop-cluster", daemon=True).start()

    def listen(self, listener: Callable[[FleetReport | GputopError], object]) -> None:
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

    class Answered(MessageAbout[FleetReport | GputopError]):
        """The thread has an answer, or why there is none."""

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
        self._asker.listen(lambda answer: self.post_message(self.Answered(answer)))
        self.show_preference_warnings()

    def on_cluster_app_answered(self, message: Answered) -> None:
        if isinstance(message.subject, GputopError):
            # The job that was asked for is not there any more: what is known stays.
            old = self._state.report
            problem = Problem(message.subject.message, message.subject.fix)
            self._state.report = replace(old, fleet=replace(old.fleet, problems=(problem,)))
        else:
            self._state.report = message.subject
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


_DETAIL_LINES = 7
_LATE_S = 5.0  # beyond the period: an answer of a busy server takes seconds
_HELP = """\
Each row is a job with its activity over the past hours, from left to right. A dot means that nothing was measured. A \
* marks coarse activity (any kernel ran), and a ~ values of whole nodes that the job shares. Press enter to show a \
job's nodes, and space on a node to show its GPUs. After your first key press, rows keep their order; press o to sort.
"""


class FleetTable(DrawnLines, can_focus=True):
    """The rows that fit, around the selected one; below them what was found of its job."""

    PANEL = "Jobs"
    BINDINGS: ClassVar[list[BindingType]] = [
        key("up,k", "move(-1)", "up", "the row above"),
        key("down,j", "move(1)", "down", "the row below"),
        key("pageup", "move(-10)", "up a page", "ten rows up"),
        key("pagedown", "move(10)", "down a page", "ten rows down"),
        key("home", "move(-100000)", "first", "the first row"),
        key("end", "move(100000)", "last", "the last row"),
        key("space", "unfold", "unfold", "show or hide the nodes of a job, the GPUs of a node"),
        key("right", "unfold(True)", "unfold", "show the rows below this one"),
        key("left", "unfold(False)", "fold", "hide the rows below this one"),
        key("enter", "open", "nodes; on a node: open", "on a job: show its nodes; on a node: open it", footer=True),
    ]

    class Wanted(Message):
        """Other rows are shown: others are to be asked for."""

    class Opened(MessageAbout[str]):
        """A node of this name is to be opened."""

    def __init__(self, state: State) -> None:
        super().__init__(id="fleet")
        self.state = state
        self.rows: list[FleetRow] = []
        self.shown: list[FleetRow] = []
        self._top = 0

    def draw(self) -> None:
        width, height = self.size.width, self.size.height
        if width <= 0 or height <= 2:
            return
        self.rows = self.state.rows()
        index = self.state.place(self.rows)
        about = min(_DETAIL_LINES, max(0, height - 6))
        room = height - 1 - about
        self._top = min(max(self._top, index - room + 1), index, max(0, len(self.rows) - room))
        self.shown = self.rows[self._top:self._top + room]
        lines: list[list[StyledText]] = [rows.heading(self.state, width)]
        lines += [rows.line(self.state, row, width, self._top + i == index) for i, row in enumerate(self.shown)]
        lines += [[]] * (1 + room - len(lines))
        if about:
            lines += rows.details(self.state, self.rows[index] if self.rows else None, width, about)
        self.show(lines)

    def changed(self) -> None:
        self.draw()
        self.post_message(self.Wanted())

    def on_resize(self) -> None:
        self.changed()

    def on_click(self, event: events.Click) -> None:
        i = event.y - 1
        if 0 <= i < len(self.shown):
            self.state.hold()
            self.state.at = self.shown[i].key
            self.changed()

    def action_move(self, by: int) -> None:
        if self.rows:
            self.state.hold()
            self.state.at = self.rows[min(max(self.state.place(self.rows) + by, 0), len(self.rows) - 1)].key
            self.changed()

    def action_unfold(self, wanted: bool | None = None) -> None:
        if not self.rows:
            return
        self.state.hold()
        row = self.rows[self.state.place(self.rows)]
        self.state.at = row.key
        if wanted is False and row.node is not None and (row.gpu is not None or
                                                         (row.job.id, row.node.name) not in self.state.open_nodes):
            row = FleetRow(row.job, row.node) if row.gpu is not None else FleetRow(row.job)
            self.state.at = row.key
        self.state.unfold(row, wanted)
        self.changed()

    def action_open(self) -> None:
        if not self.rows:
            return
        row = self.rows[self.state.place(self.rows)]
        if row.node is None:
            self.action_unfold()
        else:
            self.post_message(self.Opened(row.node.name))


class OpenNode(Dialog[list[str] | None]):
    """Question how a node is opened; dismissed with the command, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("enter", "run_command('enter')", "run", "run the first command"),
        key("a", "run_command('a')", "attach", "run the second command"),
        key("question_mark,f1", "app.help", "help", "show the keys of this screen"),
        key("escape,q", "run_command('')", "back", "run nothing"),
    ]
    HELP = "This screen returns when the command ends.\n"

    def __init__(self, node: str, commands: dict[str, list[str]]) -> None:
        super().__init__()
        self._node, self._commands = node, commands

    def compose(self) -> ComposeResult:
        with DialogFrame(f"Open {printable(self._node)}", "enter: run", "a: attach", "esc: back", id="popup"):
            out = Text()
            for keys, what in (("enter", "open the monitor on the node"),
                               ("a", "capture from the node's profiler servers, from this machine")):
                out.append(f"{keys:>6}  ", ACCENT)
                out.append(f"{what}\n        {shlex.join(self._commands[keys])}\n", PLAIN)
            yield WrappedText(out)

    def action_run_command(self, which: str) -> None:
        self.dismiss(self._commands.get(which))


class ClusterScreen(Screen[None]):
    """Header, table, and the keys that concern all of it."""

    HELP = _HELP
    BINDINGS: ClassVar[list[BindingType]] = [
        key("o", "sort", "sort", "sort by findings, job number, user, GPUs, activity or power", footer=True),
        key("slash", "filter", "filter", "show only jobs that match a text by number, name, user, node or finding",
            footer=True),
        key("v", "cursor", "cursor", "time cursor: activity at a past moment; press again to turn it off"),
        key("shift+left", "cursor(1)", "cursor back", "move the cursor back by one column"),
        key("shift+right", "cursor(-1)", "cursor on", "move the cursor forward by one column"),
        key("s", "app.snapshot", "snapshot", "save a snapshot as text, JSON and HTML", footer=True),
        key("p", "problems", "problems", "show what could not be read, and how to fix it"),
        key("question_mark,f1", "app.help", "help", "show the keys of this screen, and how to read it", footer=True),
    ]

    def __init__(self, state: State, commands: Commands, period_s: float = 15.0) -> None:
        super().__init__()
        self.state, self._commands, self._period_s = state, commands, period_s
        self._answered_s = time.monotonic()
        self.table = FleetTable(state)
        self._header = LinesWidget(id="fleet-header")

    def compose(self) -> ComposeResult:
        yield self._header
        yield self.table
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.table.focus()
        self.update_view()
        self.set_interval(1.0, self.show_age)

    def on_resize(self) -> None:
        self._draw_header()

    def update_view(self) -> None:
        """Show the state of now."""
        self._draw_header()
        self.table.draw()

    def answered(self) -> None:
        self._answered_s = time.monotonic()
        self.state.late_s = 0.0

    def show_age(self) -> None:
        """Show the age: where an answer does not come, what is shown gets older all the same."""
        waited_s = time.monotonic() - self._answered_s
        if waited_s > self._period_s + _LATE_S:
            self.state.late_s = waited_s
            self._draw_header()

    def _draw_header(self) -> None:
        lines = rows.header(self.state, self.app.size.width)
        self._header.styles.height = len(lines)
        self._header.show(lines)

    def on_fleet_table_opened(self, message: FleetTable.Opened) -> None:
        if commands := self._commands(message.subject):
            self.app.push_screen(OpenNode(message.subject, commands), self._run)
        else:
            self.notify(f"{printable(message.subject)!r} is not a valid name for ssh.", severity="warning")

    def _run(self, command: list[str] | None) -> None:
        if command is not None:
            self.app.exit(command)

    def action_sort(self) -> None:
        self.state.sort()
        self.table.changed()

    def action_filter(self) -> None:
        def apply(pattern: str) -> None:
            self.state.pattern = pattern
            self.table.changed()

        ask_text(self.app, "Filter jobs", "part of a number, name, user, node or finding; leave empty to show all",
                 self.state.pattern, apply)

    def action_cursor(self, by: int = 0) -> None:
        if by == 0:
            self.state.cursor = None if self.state.cursor is not None else 0
        else:
            most = max(0, rows.history_columns(self.state, self.table.size.width) - 1)
            self.state.cursor = min(max((self.state.cursor or 0) + by, 0), most)
        self.table.draw()

    def action_problems(self) -> None:
        self.app.push_screen(Popup("Problems", Text.assemble(*rows.problems(self.state.report))))
