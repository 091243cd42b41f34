"""The monitor: its main screen, and what each key does. It shows the session and asks it for actions."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from textual import events
from textual.app import ComposeResult, SystemCommand
from textual.binding import BindingType
from textual.containers import Container, VerticalScroll
from textual.screen import Screen

from gputop.core.errors import EXIT_OK, GputopError, NoDataError
from gputop.core.own_memory import seldom_search_for_garbage
from gputop.profiler.capture.records import usable
from gputop.session.session import Change, Session
from gputop.text.console import say
from gputop.tui import open_screens
from gputop.tui.keys import FOOTERS, MAIN_VIEW_ACTIONS, MONITOR, STACKS_TELL, commands
from gputop.tui.monitor import messages, status_lines
from gputop.tui.monitor.columns import METRICS, unread_lanes
from gputop.tui.monitor.findings_panel import ActionsPanel, CaptureView
from gputop.tui.monitor.gpu_table import GpuTable, HiddenGpus
from gputop.tui.monitor.layout import SIZE_CLASSES, layout
from gputop.tui.monitor.process_panel import ProcessPanel
from gputop.tui.terminal.color_support import Preferences
from gputop.tui.terminal.first_frame import ENDING_SIGNALS, FirstFrame
from gputop.tui.terminal.textual_private import DrawnOnce, one_frame
from gputop.tui.widgets.cached_lines import KeyLine, LinesWidget, MessageAbout

if TYPE_CHECKING:
    from textual.command import Provider

    from gputop.core.samples import ProcessSample
    from gputop.profiler.capture.request import CaptureQuestion, CaptureRequest
    from gputop.tui.timeline.trace_file import TraceFile

_ANSWERABLE_S = 60.0  # age up to which a question that nobody could be asked yet is still the right one
_GPUS_UNTIL_KNOWN = 8  # for which the screen is laid out before the first sample
INTERVALS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


def _palette() -> type[Provider]:
    from gputop.tui.screens.help import Commands

    return Commands


class _MainScreen(Screen[None], DrawnOnce):
    """The ground of the monitor."""

    AUTO_FOCUS = "#actions"


class _Box(VerticalScroll, DrawnOnce):
    """The lines of the GPU table that are shown."""


class _Panels(Container, DrawnOnce):
    """The recommendations and the processes."""


class GputopApp(open_screens.MonitorApp):
    """The main screen over a :class:`~gputop.session.session.Session`."""

    TITLE = "gputop"
    CSS_PATH = "gputop.tcss"
    ENABLE_COMMAND_PALETTE = True
    COMMANDS: ClassVar[set[Any]] = {_palette}
    has_output = False  # of a job that was started here
    BINDINGS: ClassVar[list[BindingType]] = MONITOR

    class Changed(MessageAbout[Change]):
        """Something in the session has changed; posted from the thread that changed it."""

    def __init__(self, session: Session, preferences: Preferences | None = None,
                 first_frame: FirstFrame | None = None) -> None:
        super().__init__(preferences, first_frame)
        self.session = session
        self.paused = False
        self._quitting = False
        self._postponed: tuple[float, CaptureQuestion] | None = None  # when it came up
        self._terminal_size = self.size
        self._laid_out: tuple[object, ...] = ()  # what the main screen is laid out for
        self._attaching: str | None = None
        self._refused: NoDataError | None = None  # why there was nothing to capture from when it was asked for
        self.error: GputopError | None = None
        self.trace: TraceFile | None = None  # of the last capture, once its timeline has been opened
        self._queued_changes: set[Change] = set()
        # Attributes, because a query by name for each sample costs as much as drawing some of them.
        self._header, self._host, self._job = (LinesWidget(id=name) for name in ("header", "host", "job"))
        self._table = GpuTable(id="gpus")
        self._table_box = _Box(id="gpus-box", can_focus=False)
        self._more = HiddenGpus(self._table_box)
        self._actions, self._processes = ActionsPanel(id="actions"), ProcessPanel(id="processes")
        self._actions.no_line = lambda finding: open_screens.no_line(finding, session.results.last_capture)
        self._keys = KeyLine()

    # -- building -----------------------------------------------------------------------------

    def get_default_screen(self) -> Screen[None]:
        # Laid out before it has widgets: each of them would be styled twice.
        main, self._terminal_size = _MainScreen(id="_default"), self.size
        self._fit(main)
        return main

    def compose(self) -> ComposeResult:
        yield self._header
        with self._table_box:
            yield self._table
        yield self._more
        yield self._host
        yield self._job
        with _Panels(id="panels"):
            yield self._actions
            yield self._processes
        yield self._keys

    def on_mount(self) -> None:
        # asyncio handles SIGINT by canceling the app wherever it is, which can leave Textual hanging.
        loop = asyncio.get_running_loop()
        for number in ENDING_SIGNALS:
            with contextlib.suppress(RuntimeError):  # only the main thread may
                loop.add_signal_handler(number, lambda: self.call_next(self.action_quit))
        if self.first_frame is not None and self.first_frame.ended:
            self.call_next(self.action_quit)
        table = self._table
        table.metric = self.preferences.metric or table.metric
        table.time.span_s = self.preferences.span_s or table.time.span_s
        self.session.listen(self._session_changed)
        self.session.start()
        self.call_after_refresh(self._after_first_frame)

    async def _after_first_frame(self) -> None:
        # What takes time and is not needed for the first frame comes after it.
        if not self.screen_stack or not self.screen_stack[0].is_attached:
            return  # the user has quit before it was drawn
        if self.screen.focused is None:  # no room for the recommendations
            self._table.focus()
        self.call_after_refresh(self.take_over)
        self.show_preference_warnings()
        self.session.ring = self.ring
        gc.enable()
        # What exists now stays until the end, so the garbage collector need not search it every few seconds.
        gc.collect()
        gc.freeze()
        seldom_search_for_garbage()

    def _session_changed(self, change: Change) -> None:
        # At most one message of a kind is queued, so that they do not pile up while the terminal is stalled.
        if change not in self._queued_changes:
            self._queued_changes.add(change)
            self.post_message(self.Changed(change))

    def on_gputop_app_changed(self, message: Changed) -> None:
        self._queued_changes.discard(message.subject)
        if message.subject == "failed":
            self.error = self.session.failure
            self.exit(self.error.exit_code if self.error else 1)
        elif not self._header.is_attached:
            pass  # the screen is being closed
        elif message.subject == "sample":
            with one_frame(self):
                self._refresh_all()
        else:
            self._refresh_job()
            if message.subject == "capture":
                self._show_capture_progress()
            elif message.subject == "servers":
                self._show_attached()

    # -- drawing ------------------------------------------------------------------------------

    def on_resize(self, event: events.Resize) -> None:
        self._terminal_size = event.size  # the app's own size changes after this event, and its widgets' later still
        self._fit(self.screen_stack[0])
        self._refresh_all()

    def _fit(self, main: Screen[Any]) -> None:
        """Lay the main screen out for terminal and node, if it is for others."""
        sample, known_gpus = self.session.feed.sample, self.session.feed.known_gpus
        width, height = self._terminal_size
        gpus = known_gpus.gpus if known_gpus is not None else ()
        needed = (width, height, len(gpus) if known_gpus is not None else _GPUS_UNTIL_KNOWN,
                  len(sample.processes) if sample is not None else 0, unread_lanes(gpus))
        if needed == self._laid_out:
            return
        self._laid_out = needed
        fitted = layout(*needed)
        main.classes = main.classes.difference(size.name for size in SIZE_CLASSES).union(fitted.classes)
        self._table.take_layout(fitted, width)
        self._processes.styles.height = fitted.process_lines
        self._processes.set_class(fitted.bare_processes, "bare")
        self._more.fit(fitted, len(gpus))

    def _refresh_all(self) -> None:
        session = self.session
        sample = session.feed.known_gpus
        replay = (session.feed.player.badge, session.feed.player.state()) if session.feed.player is not None else None
        width = self._terminal_size.width
        self._header.show([status_lines.header(sample, session.feed.interval_s, self.paused, width, replay)])
        self._refresh_job()
        if self.paused or sample is None:
            return
        update_screen = getattr(self.screen, "update_view", None)  # of a box over the monitor that shows live figures
        if update_screen is not None:
            update_screen()
        self._fit(self.screen_stack[0])
        self._table.time.note_interval(session.feed.interval_s)
        self._table.update_view(sample, session.feed.history, session.results.events)
        if session.feed.sample is None:
            return  # the host and its processes have not answered yet
        self._host.show([status_lines.host(sample, width)])
        attached = frozenset(s.pid for s in session.watch.servers if s.pid is not None)
        reasons = {g.processes_reason for g in sample.gpus if g.processes_reason}
        none = "no process holds a GPU" if sample.gpus else "no process with a profiler server on this node"
        self._processes.update_view(sample, attached, "; ".join(sorted(reasons)) or none)
        self._refresh_actions()

    def _refresh_actions(self) -> None:
        session = self.session
        record = session.results.last_capture
        title = "What to do"
        if record is not None:
            earlier = ", from an earlier job" if session.captured_before_restart else ""
            title += f" · capture {status_lines.time_ago(session.feed.clock(), record.time_s)}{earlier} + live"
        analysis = record.analysis if record is not None else None
        if self._refused is not None and (usable(session.watch.servers) or session.control.running):
            self._refused = None
        intro = (messages.panel_intro(session, self.no_server_hint()) if self._refused is None
                 else messages.refused(self._refused, self.no_server_hint()))
        panel = self._actions
        panel.numbers, panel.keyed = session.results.gpu_numbers, session.feed.player is None
        reserved = [finding for finding in session.results.findings if finding.id in messages.OF_MEMORY_COLUMN]
        self._table.note_reserved({gpu for finding in reserved for gpu in finding.gpus})
        capture = None
        if record is not None:
            earlier_lines = messages.earlier_verdict(session) if session.captured_before_restart else None
            capture = CaptureView(earlier=earlier_lines) if analysis is None else CaptureView(
                {} if analysis.breakdown is None else analysis.breakdown.known, record.median_step_s, analysis.what_if,
                bool(analysis.abstained), earlier_lines)
        panel.update_view(tuple(f for f in session.results.findings if f not in reserved), title, intro, capture,
                          answer=self._refused is not None)

    def no_server_hint(self) -> tuple[str, ...]:
        """Hint for while no profiler server is known."""
        return messages.NO_SERVER

    def _refresh_keys(self) -> None:
        known_gpus = self.session.feed.known_gpus
        lanes = known_gpus is None or bool(known_gpus.gpus)
        hangs = not STACKS_TELL.isdisjoint({finding.id for finding in self.session.results.findings})
        here = {"S": hangs, "l": self.has_output, "R": self.has_output, "D": self._is_demo, "m": lanes,
                "v": lanes or self._mode() == "Processes"}
        keys = [key for key in FOOTERS[self._mode()] if here.get(key[0], True)]
        self._keys.show_keys(keys, self._terminal_size.width)

    def _mode(self) -> str:
        """Mode of the main screen, which decides which keys are named."""
        session, panel = self.session, getattr(self.screen_stack[0].focused, "PANEL", "")
        if self._table.time.cursor.time_s is not None:
            return "cursor"
        if panel != self._actions.PANEL and panel in FOOTERS:
            return str(panel)
        if self._table.time.end_s is not None:
            return "past"
        if session.feed.player is not None:
            return "replay" if session.replayed_snapshot is None else "snapshot"
        if session.control.status is not None and session.control.status.running:
            return "capturing" if session.control.status.begun else "waiting"
        return "start" if session.results.last_capture is None else "captured"

    def on_descendant_focus(self) -> None:
        self._refresh_keys()

    def _refresh_job(self) -> None:
        self._refresh_keys()
        session = self.session
        job = self._job
        if session.feed.player is not None:
            place_s = session.feed.player.place_s if session.replayed_snapshot is None else None
            job.show([status_lines.replay_line(self._terminal_size.width, place_s, session.feed.step_period)])
            return
        record = None if session.captured_before_restart else session.results.last_capture
        state = status_lines.JobState(
            session.watch.servers, session.watch.servers_known, messages.status_shown(session), record,
            session.feed.step_period, self.coming_capture(), session.watch.ended_server, session.restarted_s,
            unserved=bool(usable(session.watch.servers) and session.processes_to_serve()))
        job.show([status_lines.job(state, session.feed.clock(), self._terminal_size.width)])

    def coming_capture(self) -> str:
        """State of a capture that is to begin by itself; "" if there is none."""
        auto_capture = self.session.control.auto_capture
        return auto_capture.state() if auto_capture is not None else ""

    def _show_attached(self) -> None:
        """Show whether there is a server at the address that was entered last."""
        for server in self.session.watch.servers:
            if server.address == self._attaching:
                self._attaching = None
                self.notify(messages.attached(server, self.session.watch.servers),
                            severity="information" if server.problem is None else "error")

    def _show_capture_progress(self) -> None:
        status = self.session.control.status
        if status is not None and status.running:
            return
        if self._quitting:
            self.exit(EXIT_OK)
            return
        self._ask_pending_question()
        if status is None:
            return
        self._refresh_actions()  # which say what came of it
        for notice in messages.of_note(self.session, status):
            self.notify(notice)

    # -- actions ------------------------------------------------------------------------------

    def _ask_pending_question(self) -> None:
        """Ask what has come up since a capture was asked for: whether to take its risk."""
        question = self.session.control.take_question()
        if question is None:
            return
        if len(self.screen_stack) > 1:  # whose keys are not for this question
            self._postponed = self.session.feed.clock(), question
            self.notify("No capture was started because it may end the job. Press c again to decide.")
        else:
            open_screens.ask_before_capture(self, question)

    def action_capture(self, force: bool = False) -> None:
        if self.session.control.capture_now(force):
            return
        request, selected = self.session.control.request(force=force), self._selected_process()
        if selected is not None and open_screens.offer_server(self, request, selected):
            return
        postponed, self._postponed = self._postponed, None
        if postponed is not None and self.session.feed.clock() - postponed[0] <= _ANSWERABLE_S:
            open_screens.ask_before_capture(self, postponed[1])
            return
        if not (usable(self.session.watch.servers) and open_screens.offer_server(self, request)):
            self.start_capture(request)

    def start_capture(self, request: CaptureRequest) -> None:
        """Start a capture, after the questions that it needs."""
        try:
            question = self.session.start_capture(request)
            if question is not None:
                open_screens.ask_before_capture(self, question)
        except GputopError as error:
            if open_screens.offer_server(self, request):
                return
            if isinstance(error, NoDataError):  # it stays so until there is a server: no notice that goes
                self._refused = error
                self._refresh_actions()
            else:
                open_screens.show_error(self, error)

    def _selected_process(self) -> ProcessSample | None:
        """The selected process, for which a capture is meant: its server is watched from now on, if it has one."""
        chosen = self._processes.selected
        if self.screen.focused is not self._processes or chosen is None:
            return None
        pid = chosen.local_pid or chosen.pid
        for server in self.session.watch.servers:
            if server.pid == pid and server.problem is None and not server.owner and not server.asked:
                self.session.watch.choose_job(server)
                break
        return chosen

    async def action_quit(self) -> None:
        """Quit; a running capture is ended first and its data kept, unless the user quits a second time."""
        status = self.session.control.status
        if status is None or not status.running or self._quitting:
            self.exit(EXIT_OK)
            return
        self._quitting = True
        self.session.control.stop_capture()
        if status.phase == "waiting":
            return  # which ends at once
        self.notify("Stopping the capture and keeping its data, then quitting. q: quit now.")

    def action_stop_capture(self) -> None:
        status = self.session.control.status
        waiting = status is not None and status.phase == "waiting"
        if status is not None and status.phase == "recording" and not status.stoppable:
            self.notify("This recording cannot be stopped. It ends on its own, and its data is kept.")
        elif self.session.control.stop_capture():
            self.notify("No capture was taken." if waiting else "Stopping the capture; its data is kept.")
        else:
            self.notify("No capture is running.")

    @property
    def shows_simulated(self) -> bool:
        """Return whether the values on the screen are simulated: of a demo, or of its recording or capture."""
        session = self.session
        record = session.results.last_capture
        known_gpus = session.feed.known_gpus
        return (session.feed.source.simulated or (known_gpus is not None and known_gpus.simulated)
                or (record is not None and record.analysis is not None and record.analysis.simulated))

    @property
    def _is_demo(self) -> bool:
        return self.session.feed.player is None and self.session.feed.source.simulated

    def action_next_job(self) -> None:
        open_screens.run_next_job(self)

    def action_recommendations(self) -> None:
        self._actions.focus()

    def on_actions_panel_opened(self, message: ActionsPanel.Opened) -> None:
        if message.finding is None:
            open_screens.open_not_judged(self)
        elif message.copy:
            open_screens.copy_finding(self, message.finding, as_markdown=message.copy == "markdown")
        else:
            open_screens.open_finding(self, message.finding)

    def on_gpu_table_opened(self, message: GpuTable.Opened) -> None:
        open_screens.open_gpu(self, message.subject)

    def on_process_panel_opened(self, message: ProcessPanel.Opened) -> None:
        (open_screens.open_signal if message.signal else open_screens.open_process)(self, message.process)

    def on_click(self, event: events.Click) -> None:
        clicked = getattr(event.widget, "id", None)
        if clicked in ("host", "job"):
            self.action_open(clicked)

    def action_open(self, what: str) -> None:
        """Open what :mod:`gputop.tui.open_screens` has by this name."""
        open_screens.BY_NAME[what](self)

    def action_help(self) -> None:
        from gputop.tui.screens import help

        monitor = self.screen is self.screen_stack[0]
        more = f"{help.READING}\n{help.HOW_TO_SERVE}" if monitor else self.screen.HELP or ""
        self.push_screen(help.help_box(self.screen, more))

    def action_attach(self) -> None:
        if not open_screens.offer_server(self):
            self.ask_address()

    def ask_address(self) -> None:
        from gputop.tui.screens.dialogs import ask_attach

        def attach(address: str | None) -> None:
            if address:
                self._attaching = self.session.watch.attach(address)
                self.notify(f"Looking for a profiler server at {self._attaching}…")

        self.push_screen(ask_attach(), attach)

    def action_filter(self) -> None:
        from gputop.tui.screens.dialogs import ask_text

        panel, hint = self._processes, "part of a PID, user or command; leave empty to show all"
        ask_text(self, "Filter processes", hint, panel.pattern, panel.show_matching)

    def action_sort(self) -> None:
        self._processes.next_sort()

    def action_metric(self, by: int) -> None:
        self._table.metric = METRICS[(METRICS.index(self._table.metric) + by) % len(METRICS)]
        self._redraw_table()

    def action_interval(self, by: int) -> None:
        if self.session.feed.player is not None:
            self.session.feed.player.change_speed(-by)
            self._refresh_all()
            return
        nearest = min(range(len(INTERVALS_S)), key=lambda i: abs(INTERVALS_S[i] - self.session.feed.interval_s))
        self.session.feed.set_interval(INTERVALS_S[min(len(INTERVALS_S) - 1, max(0, nearest + by))])
        self._refresh_all()

    def action_seek(self, by_s: float) -> None:
        """Move in a recording; a live session has none."""
        if self.session.feed.player is not None:
            self.session.feed.player.seek(by_s)

    def action_pause(self) -> None:
        if self.session.feed.player is not None:
            self.session.feed.player.toggle_pause()
        else:
            self.paused = not self.paused
        covered = not all(screen.is_modal for screen in self.screen_stack[1:])
        if covered:  # what it holds is not to be seen
            halted = self.paused if self.session.feed.player is None else self.session.feed.player.paused
            self.notify("The monitor is frozen. Press p to continue." if halted else "The monitor continues.")
        self._refresh_all()

    def action_scroll(self, by: int) -> None:
        self._table.time.scroll(by)
        self._redraw_table()

    def action_step_back(self) -> None:
        """Escape on the main screen: back to now; where that is shown, every process again."""
        if self._table.time.cursor.time_s is None and self._table.time.end_s is None:
            self.session.control.capture_now()
            self._processes.show_matching("")
            self.session.forget_failure()
            self._refused = None
            self._refresh_actions()
        self.action_scroll_to_now()

    def action_scroll_to_now(self) -> None:
        self._table.time.follow()
        self._redraw_table()

    def action_zoom(self, by: int) -> None:
        self._table.time.zoom(by)
        self._redraw_table()

    def action_cursor(self, by: int = 0) -> None:
        """Move the time cursor; with 0, switch it on or off."""
        self._table.time.move_cursor(by)
        self._redraw_table()

    def _redraw_table(self) -> None:
        """Show what the user has changed in the table; the keys depend on the time that it shows."""
        self._table.update_view(self._table.sample, self.session.feed.history, self.session.results.events)
        self._refresh_keys()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys that change the main screen have no effect while another screen covers it."""
        if action in MAIN_VIEW_ACTIONS and not all(screen.is_modal for screen in self.screen_stack[1:]):
            return False
        if action == "next_job" and not self._is_demo:
            return False
        return super().check_action(action, parameters)

    def get_system_commands(self, screen: Screen) -> Iterable[SystemCommand]:
        own_commands = list(commands(screen))
        titles = {command.title for command in own_commands} | {"Keys"}  # Textual's list of keys; the help replaces it
        yield from own_commands
        yield from (command for command in super().get_system_commands(screen) if command.title not in titles)


def tell_where_captures_are(session: Session) -> None:
    """A line on the terminal, once the screen is gone: the captures of this session, and how to see them again."""
    taken = session.results.captures_this_run
    if taken:
        from gputop.launch.xprof import logdir_of

        what = "your capture is" if len(taken) == 1 else f"your {len(taken)} captures are"
        with contextlib.suppress(GputopError):  # deleted meanwhile
            logdir = logdir_of(taken[-1].path)
            say(f"{what} in {logdir}. To open the list again: gputop --logdir {shlex.quote(str(logdir))}, then J")


def run(session: Session, preferences: Preferences | None = None, first_frame: FirstFrame | None = None) -> int:
    """Run the monitor over a started session until the user quits; returns the exit status."""
    app = GputopApp(session, preferences, first_frame)
    status = app.run()
    session.close()
    if app.error is not None:
        raise app.error
    tell_where_captures_are(session)
    return EXIT_OK if status is None else status
