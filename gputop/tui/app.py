"""The monitor. It reads the session and asks it for actions; it never reads hardware."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
from collections.abc import Iterable
from typing import ClassVar

from textual import events
from textual.app import ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Container, VerticalScroll
from textual.message import Message
from textual.screen import Screen

from gputop.advice.finding import EXPLANATIONS, Finding
from gputop.errors import EXIT_OK, GputopError
from gputop.session import Change, Session
from gputop.text import printable
from gputop.tui import rows
from gputop.tui.actions import ActionsPanel
from gputop.tui.columns import METRICS, lines_per_gpu
from gputop.tui.first_frame import FirstFrame
from gputop.tui.gpu_table import GpuTable
from gputop.tui.lines import LinesWidget
from gputop.tui.preferences import Preferences
from gputop.tui.processes import ProcessPanel
from gputop.tui.terminal import TerminalApp

FAILURE_SHOWN_S = 30.0
INTERVALS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
SPANS_S = (60.0, 120.0, 240.0, 600.0, 1800.0, 3600.0, 4 * 3600.0, 12 * 3600.0)


class GputopApp(TerminalApp):
    """The main screen over a :class:`~gputop.session.Session`."""

    TITLE = "gputop"
    CSS_PATH = "gputop.tcss"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "capture", "capture"),
        Binding("C", "capture(True)", "capture all that is asked", show=False),
        Binding("x", "stop_capture", "stop capture", show=False),
        Binding("t", "last_capture", "trace"),
        Binding("r", "recommendations", "recommend", show=False),
        Binding("s", "snapshot", "snapshot"),
        Binding("m", "metric(1)", "metric"),
        Binding("M", "metric(-1)", "previous metric", show=False),
        Binding("a", "attach", "attach"),
        Binding("plus,equals_sign", "interval(-1)", "faster", show=False),
        Binding("minus", "interval(1)", "slower", show=False),
        Binding("space", "pause", "pause", show=False),
        Binding("left", "scroll(-1)", "back in time", show=False),
        Binding("right", "scroll(1)", "forward in time", show=False),
        Binding("end", "scroll_to_now", "back to now", show=False),
        Binding("left_square_bracket", "zoom(1)", "more time", show=False),
        Binding("right_square_bracket", "zoom(-1)", "less time", show=False),
        Binding("comma", "seek(-60)", "back in the recording", show=False),
        Binding("full_stop", "seek(60)", "on in the recording", show=False),
        Binding("o", "sort", "sort", show=False),
        Binding("slash", "filter", "filter", show=False),
        Binding("question_mark", "help", "help"),
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", "suspend", show=False),
    ]

    class Changed(Message):
        """Something in the session is new; posted from the thread that made it."""

        def __init__(self, change: Change) -> None:
            super().__init__()
            self.change = change

    def __init__(self, session: Session, preferences: Preferences | None = None,
                 first_frame: FirstFrame | None = None) -> None:
        super().__init__(preferences, first_frame)
        self.session = session
        self.paused = False
        self._quitting = False
        self._terminal = self.size
        self._attaching: str | None = None
        self.error: GputopError | None = None
        self._span = SPANS_S.index(240.0)
        self._queued: set[str] = set()

    # -- building -----------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        yield LinesWidget(id="header")
        with VerticalScroll(id="gpus-box", can_focus=False):
            yield GpuTable(id="gpus")
        yield LinesWidget(id="host")
        yield LinesWidget(id="job")
        with Container(id="panels"):
            yield ActionsPanel(id="actions")
            yield ProcessPanel(id="processes")

    def on_mount(self) -> None:
        # A job scheduler's or a closing terminal's signal ends as q does, the terminal given back.
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            with contextlib.suppress(RuntimeError):  # only the main thread may
                loop.add_signal_handler(number, lambda: self.call_next(self.action_quit))
        table = self.query_one(GpuTable)
        table.metric = self.preferences.metric or table.metric
        table.span_s = self.preferences.span_s or table.span_s
        self.session.listen(self._session_changed)
        self.session.start()
        self.call_after_refresh(self._after_first_frame)

    async def _after_first_frame(self) -> None:
        # What costs time and is not needed to draw comes after the first frame.
        from textual.widgets import Footer

        await self.mount(Footer(show_command_palette=False))
        self.query_one("#actions").focus()
        self._refresh_all()
        self.tell_preferences()
        # What exists by now stays until the end: the collector need not look at it every few seconds.
        gc.collect()
        gc.freeze()

    def _session_changed(self, change: Change) -> None:
        # One message of a kind at a time: a stalled terminal must not pile them up.
        if change not in self._queued:
            self._queued.add(change)
            self.post_message(self.Changed(change))

    def on_gputop_app_changed(self, message: Changed) -> None:
        self._queued.discard(message.change)
        if message.change == "failed":
            self.error = self.session.failure
            self.exit(self.error.exit_code if self.error else 1)
        elif not self.query("#header"):
            pass  # the screen is being taken down
        elif message.change == "sample":
            if self.picture_due():
                self._refresh_all()
        else:
            self._refresh_job()
            if message.change == "capture":
                self._tell_capture()
            elif message.change == "servers":
                self._tell_attached()

    # -- drawing ------------------------------------------------------------------------------

    def on_resize(self, event: events.Resize) -> None:
        self._terminal = event.size  # the app's own size changes only after this event
        self._fit()
        self._refresh_all()

    def _fit(self) -> None:
        """Lines per GPU and which panels there are, from the size of the terminal."""
        width, height = self._terminal
        base = self.screen_stack[0]
        base.set_class(width < 120, "narrow")
        base.set_class(height < 20, "short")
        base.set_class(height < 12 or width < 40, "tiny")
        gpus = len(self.session.sample.gpus) if self.session.sample else 8
        table = self.query_one(GpuTable)
        table.resize_rows(lines_per_gpu(height, gpus))
        processes = self.query_one(ProcessPanel)
        held = len(self.session.sample.processes) if self.session.sample else 1
        # Stacked, the processes take what they need and no more than two fifths.
        rows_of_processes = min(max(1, held) + 3, max(4, (height - 13) * 2 // 5))
        processes.styles.height = rows_of_processes if base.has_class("narrow") else None
        box = self.query_one("#gpus-box")
        reserve = 1 if base.has_class("tiny") else 4 if base.has_class("short") else 11
        box.styles.max_height = max(2, height - reserve)

    def _refresh_all(self) -> None:
        session = self.session
        sample = session.sample
        header = self.query_one("#header", LinesWidget)
        replay = (session.player.badge, session.player.state()) if session.player is not None else None
        header.show([rows.header(sample, session.interval_s, self.paused, header.size.width, replay)])
        self._refresh_job()
        if self.paused or sample is None:
            return
        table = self.query_one(GpuTable)
        if table.sample is None:
            self._fit()
        table.update_view(sample, session.history)
        host = self.query_one("#host", LinesWidget)
        host.show([rows.host(sample, host.size.width)])
        attached = frozenset(s.pid for s in session.servers if s.pid is not None)
        reasons = {g.processes_reason for g in sample.gpus if g.processes_reason}
        self.query_one(ProcessPanel).update_view(sample.processes, attached, "; ".join(sorted(reasons)))
        self._refresh_actions()

    def _refresh_actions(self) -> None:
        session = self.session
        record = session.last_capture
        title = "What to do"
        if record is not None:
            title += f" · capture {rows.since(session.clock(), record.time_s)} + live"
        breakdown = record.analysis.get("breakdown") if record is not None and record.analysis else None
        self.query_one(ActionsPanel).update_view(session.findings, title, self._lead(), breakdown)

    def _lead(self) -> tuple[str, ...]:
        """What to say before the findings: that nothing is wrong and what the limit is, or how to learn more."""
        session = self.session
        record = session.last_capture
        if record is not None and record.analysis is None:
            return ("The trace could not be analysed; it is kept on disk. Press t for why.",)
        if any(f.severity != "low" for f in session.findings):
            return ()
        if record is not None:
            return (record.limit,)
        nothing: tuple[str, ...] = ()
        if all(f.id in EXPLANATIONS for f in session.findings):
            nothing = (f"Nothing found in the live figures so far that costs time. {session.live.limit}".rstrip(),)
        if session.player is not None:
            return nothing  # a recording has no job that could be asked for more
        if any(s.problem is None for s in session.servers):
            return (*nothing, "Press c to capture a trace: it tells where the step's time goes.")
        return (*nothing, "A trace tells more, but no profiler server was found.",
                "In the job: tf.profiler.experimental.server.start(6009), or press a to attach to HOST:PORT.")

    def _refresh_job(self) -> None:
        session = self.session
        job = self.query_one("#job", LinesWidget)
        if session.player is not None:
            job.show([rows.replay_keys(job.size.width, snapshot=session.told is not None)])
            return
        status = session.status
        if status is not None and status.phase == "failed" and session.clock() - status.time_s > FAILURE_SHOWN_S:
            status = None  # said long enough; what matters now is whether there is a server
        job.show([rows.job(session.servers, session.servers_known, status, session.last_capture,
                           session.clock(), job.size.width)])

    def _tell_attached(self) -> None:
        """What came of the address given last."""
        for server in self.session.servers:
            if server.address == self._attaching:
                self._attaching = None
                if server.problem is None:
                    self.notify(f"Attached to {server.address}: c captures from it.", timeout=5, markup=False)
                else:
                    self.notify(printable(server.problem), title=f"No profiler server at {server.address}",
                                severity="error", timeout=12, markup=False)

    def _tell_capture(self) -> None:
        status = self.session.status
        if status is None or status.running:
            return
        if self._quitting:
            self.exit(EXIT_OK)
            return
        if status.phase == "failed":
            self.notify(f"{printable(status.message)}\n{printable(status.fix)}", title="Capture failed",
                        severity="error", timeout=15, markup=False)
        else:
            record = self.session.last_capture
            # Over the panel it is to be short: what is as asked, and the whole path, t tells.
            shortened = record is not None and record.plan is not None and record.plan.shortened
            lines = [*(record.remarks if record and shortened else ()), "t: where the step's time goes, and the trace."]
            self.notify("\n".join(map(printable, lines)), title="Trace captured", timeout=10, markup=False)
            self._refresh_actions()

    # -- actions ------------------------------------------------------------------------------

    def _try(self, error: GputopError) -> None:
        self.notify(f"{printable(error.message)}\n{printable(error.fix)}", severity="warning", timeout=10, markup=False)

    def action_capture(self, force: bool = False) -> None:
        try:
            self.session.start_capture(force=force)
        except GputopError as error:
            self._try(error)

    async def action_quit(self) -> None:
        """Quit; a running capture is ended first and its data kept, unless asked twice."""
        status = self.session.status
        if status is None or not status.running or self._quitting:
            self.exit(EXIT_OK)
            return
        self._quitting = True
        self.session.stop_capture()
        self.notify("Ending the capture to keep its data, then quitting; q again quits at once.", timeout=30)

    def action_stop_capture(self) -> None:
        if self.session.stop_capture():
            self.notify("Stopping the capture; what it has is kept.", timeout=4)
        else:
            self.notify("No capture is running.", timeout=4)

    def action_last_capture(self) -> None:
        from rich.text import Text

        from gputop.tui.screens import Popup

        record = self.session.last_capture
        if record is None:
            self.notify("No capture yet: press c.", timeout=5)
            return
        parts = [*map(printable, record.remarks), *(f"profiler: {printable(n)}" for n in record.notes)]
        parts += [record.report] if record.problem is None else [
            str(record.path), printable(record.problem.message), record.problem.fix]
        self.push_screen(Popup("Last capture", Text("\n".join(parts))))

    def action_recommendations(self) -> None:
        self.query_one("#actions").focus()

    def on_actions_panel_opened(self, message: ActionsPanel.Opened) -> None:
        self._open_finding(message.finding)

    def _open_finding(self, finding: Finding) -> None:
        from gputop.tui.screens import Popup, finding_parts

        self.push_screen(Popup(finding.title, *finding_parts(finding)))

    def on_gpu_table_opened(self, message: GpuTable.Opened) -> None:
        from gputop.tui.screens import Popup, gpu_text

        self.push_screen(Popup(f"GPU {message.gpu.info.label}", gpu_text(message.gpu)))

    def action_help(self) -> None:
        from gputop.tui.screens import Popup, help_text

        self.push_screen(Popup("Help", help_text()))

    def action_attach(self) -> None:
        from gputop.tui.screens import Ask

        def attach(address: str | None) -> None:
            if address:
                self._attaching = self.session.attach(address)
                self.notify(f"Looking for a profiler server at {self._attaching}…", timeout=3, markup=False)

        def problem(address: str) -> str | None:
            from gputop.profiler.client import parse_address

            try:
                parse_address(address)
            except GputopError as error:
                return f"{error.message} {error.fix}"
            return None

        hint = ("The profiler server of a TensorFlow or JAX process. In the job:\n"
                "tf.profiler.experimental.server.start(6009) or jax.profiler.start_server(6009)")
        self.push_screen(Ask("Attach to HOST:PORT", hint, placeholder="localhost:6009", check=problem), attach)

    def action_filter(self) -> None:
        from gputop.tui.screens import Ask

        panel = self.query_one(ProcessPanel)

        def apply(pattern: str | None) -> None:
            if pattern is not None:
                panel.pattern = pattern
                panel.draw()

        hint = "part of a pid, user or command; empty shows all"
        self.push_screen(Ask("Filter processes", hint, panel.pattern), apply)

    def action_sort(self) -> None:
        self.query_one(ProcessPanel).next_sort()

    def action_snapshot(self) -> None:
        from gputop.export.snapshot import write_snapshot

        try:
            paths = write_snapshot(self.session, self.session.options.logdir)
        except GputopError as error:
            self._try(error)
        else:
            self.notify("\n".join(str(p) for p in paths), title="Snapshot written", timeout=8, markup=False)

    def action_metric(self, by: int) -> None:
        table = self.query_one(GpuTable)
        table.metric = METRICS[(METRICS.index(table.metric) + by) % len(METRICS)]
        self._redraw_table()

    def action_interval(self, by: int) -> None:
        if self.session.player is not None:
            self.session.player.change_speed(-by)
            self._refresh_all()
            return
        nearest = min(range(len(INTERVALS_S)), key=lambda i: abs(INTERVALS_S[i] - self.session.interval_s))
        self.session.set_interval(INTERVALS_S[min(len(INTERVALS_S) - 1, max(0, nearest + by))])
        self._refresh_all()

    def action_seek(self, by_s: float) -> None:
        """Go through a recording; a live session has nothing to seek in."""
        if self.session.player is not None:
            self.session.player.seek(by_s)

    def action_pause(self) -> None:
        if self.session.player is not None:
            self.session.player.toggle_pause()
        else:
            self.paused = not self.paused
        self._refresh_all()

    def action_scroll(self, by: int) -> None:
        """A quarter of the picture at a time; past the newest sample it follows again."""
        table, history = self.query_one(GpuTable), self.session.history
        if history is None or history.newest_s is None or history.oldest_s is None:
            return
        newest, span = history.newest_s, table.span_shown_s
        end = (table.end_s if table.end_s is not None else newest) + by * span / 4
        table.end_s = None if end >= newest else max(end, min(newest, history.oldest_s + span / 4))
        self._redraw_table()

    def action_scroll_to_now(self) -> None:
        self.query_one(GpuTable).end_s = None
        self._redraw_table()

    def action_zoom(self, by: int) -> None:
        self._span = min(len(SPANS_S) - 1, max(0, self._span + by))
        self.query_one(GpuTable).span_s = SPANS_S[self._span]
        self._redraw_table()

    def _redraw_table(self) -> None:
        table = self.query_one(GpuTable)
        table.update_view(table.sample, self.session.history)

    def get_system_commands(self, screen: Screen) -> Iterable[SystemCommand]:
        yield from super().get_system_commands(screen)
        for title, text, action in (
            ("Capture", "Capture a trace and analyse it", self.action_capture),
            ("Capture all that is asked", "No probe, no shortening, whatever it costs the job",
             lambda: self.action_capture(True)),
            ("Stop capture", "End the running capture, keeping what it has", self.action_stop_capture),
            ("Last capture", "Where the step's time goes, GPU by GPU", self.action_last_capture),
            ("Attach", "Attach to a profiler server, HOST:PORT", self.action_attach),
            ("Snapshot", "Write what is on screen to files", self.action_snapshot),
            ("Filter processes", "Show only some processes", self.action_filter),
        ):
            yield SystemCommand(title, text, action)


def run(session: Session, preferences: Preferences | None = None, first_frame: FirstFrame | None = None) -> int:
    """Run the monitor over a started session until the user quits; returns the exit status."""
    app = GputopApp(session, preferences, first_frame)
    status = app.run()
    session.close()
    if app.error is not None:
        raise app.error
    return EXIT_OK if status is None else status

