"""The monitor beside a job that ``gputop run`` started: its state, its output, and no quitting by mistake."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.message import Message
from textual.screen import ModalScreen

from gputop.core.errors import GputopError
from gputop.core.samples import NodeSample
from gputop.launch.job import FORWARDED, StartedJob
from gputop.profiler.capture.records import Server, usable
from gputop.render.palette import ACCENT, BAD, BOLD, DIM, PLAIN, WARN
from gputop.render.styled_text import StyledText, justify
from gputop.session.capture.which_job import gpu_use
from gputop.session.session import Session
from gputop.session.watched_node import AfterRestart
from gputop.text.units import printable
from gputop.tui import open_screens
from gputop.tui.app import GputopApp, tell_where_captures_are
from gputop.tui.keys import key
from gputop.tui.terminal.color_support import Preferences
from gputop.tui.widgets.cached_lines import LinesWidget
from gputop.tui.widgets.dialog_frame import Dialog, DialogFrame, WrappedText

OUTPUT_LINES = 500
OUTPUT_PERIOD_S = 0.5


class RunApp(GputopApp):
    """:class:`GputopApp` with a job of its own."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("l", "output", "output of the job", "show the last lines of the job's output"),
        key("R", "restart", "restart the job", "restart the command and capture it once it is training")]
    has_output = True

    class JobChanged(Message):
        """The job has ended, or its profiler server has started."""

    def __init__(self, session: Session, job: StartedJob, preferences: Preferences | None = None) -> None:
        super().__init__(session, preferences)
        self.job = job
        self._server_known = self._end_shown = False
        self.restarting = False  # it is waited for its end
        self._after_restart: AfterRestart | None = None  # a capture is to follow

    async def _after_first_frame(self) -> None:
        await super()._after_first_frame()
        loop = asyncio.get_running_loop()
        for number in FORWARDED:
            with contextlib.suppress(RuntimeError):  # only the main thread may
                loop.add_signal_handler(number, self._on_signal, number)
        self.job.watch(lambda: self.post_message(self.JobChanged()))
        self.on_run_app_job_changed()

    def _on_signal(self, number: int) -> None:
        """Pass a signal on to the job; one that ends gputop as well restores the terminal first."""
        self.job.send(number)
        if number not in (signal.SIGUSR1, signal.SIGUSR2):
            self.exit()

    def on_run_app_job_changed(self) -> None:
        job = self.job
        if job.server is not None and not self._server_known:
            self._server_known = True
            self._attaching = job.server  # the base class shows whether there is a server
        if job.ended.is_set() and not self._end_shown and not self.restarting:
            self._end_shown = True
            self._after_restart = None
            last = job.tail(1)[0] if job.returncode else []  # an exception's name, mostly
            self.notify("\n".join([f"The job {job.state()}. l: output, q: quit.", *last]),
                        severity="error" if job.returncode else "information")
        if self.query("#job"):
            self._refresh_job()
            self._refresh_actions()

    def no_server_hint(self) -> tuple[str, ...]:
        if self.job.ended.is_set():
            return ("The job has ended. Press l to see its output.",)
        if self.job.problem is not None:
            return ("The job's profiler server did not start, so the job cannot be captured. l: why.",)
        return ("Press c once the job has imported TensorFlow, JAX or PyTorch.",)

    def _refresh_job(self) -> None:
        status = self.session.control.status
        capturing = status is not None and status.running
        attached = any(s.asked or s.address in self.job.addresses for s in usable(self.session.watch.servers))
        if capturing or (attached and not self.job.ended.is_set()):
            super()._refresh_job()
        else:
            line = self.query_one("#job", LinesWidget)
            line.show([job_line(self.job, self._terminal_size.width, self.restarting)])

    def coming_capture(self) -> str:
        return "captured when it trains, x: cancel" if self._after_restart is not None else super().coming_capture()

    def action_restart(self) -> None:
        """Ask, then end the job if it runs, start it again, and capture it once it trains."""
        from gputop.tui.screens.dialogs import Confirm

        job, status = self.job, self.session.control.status
        if status is not None and status.running:
            self.notify("A capture is running. Press x to stop it.", severity="warning")
        elif self.restarting:
            self.push_screen(Confirm("Restart the job", "The job has not ended yet. Kill it? y/N",
                                     "SIGKILL ends its processes immediately, and they save nothing."),
                             lambda yes: job.kill() if yes else None)
        else:
            begin = ("The job has ended. Start it again and capture it?" if job.ended.is_set() else
                     "End the job, start it again and capture it?")
            first = "" if job.ended.is_set() else "The job gets SIGTERM first. "
            self.push_screen(Confirm("Restart the job", f"{begin} y/N", (
                f"{job.command}\n\n{first}Arguments, environment and folder stay the same, and output is appended to "
                f"{job.log}. The capture begins once it is training.")), lambda yes: self._restart() if yes else None)

    def _restart(self) -> None:
        job = self.job
        self.restarting, self._after_restart = True, AfterRestart()
        if not job.ended.is_set():
            job.end()

        def start() -> None:
            job.ended.wait()
            if not self.restarting:
                return  # the user has left
            self.session.watch.expect_restart(job.addresses)
            try:
                job.restart()
            except GputopError as error:
                self.call_from_thread(self._restarted, error)
            else:
                self.call_from_thread(self._restarted)

        # Not one of the app's workers, which would hold up its end as long as the job takes.
        threading.Thread(target=start, name="gputop-restart", daemon=True).start()
        self._refresh_job()

    def _restarted(self, error: GputopError | None = None) -> None:
        self.restarting = self._server_known = False
        self._end_shown = error is not None
        if error is not None:
            self._after_restart = None
            open_screens.show_error(self, error)
        else:
            self.notify(f"The job was restarted (pid {self.job.pid}). A capture begins as soon as it is training. c: "
                        "as soon as its server answers, x: no capture.")
        self.on_run_app_job_changed()

    def _refresh_all(self) -> None:
        super()._refresh_all()
        waits = self._after_restart
        if waits is None or self.restarting or self.session.feed.sample is None:
            return
        server = next((s for s in usable(self.session.watch.servers) if s.address in self.job.addresses), None)
        activity = None if server is None else highest_activity(self.session.feed.sample, server)
        if waits.is_due(self.session.feed.clock(), answers=server is not None, activity=activity):
            self.action_capture()

    def action_capture(self, force: bool = False) -> None:
        self._after_restart = None
        super().action_capture(force)

    def action_stop_capture(self) -> None:
        if self._after_restart is None:
            super().action_stop_capture()
        else:
            self._after_restart = None
            self.notify("gputop will not capture after the restart.")

    def action_output(self) -> None:
        if not isinstance(self.screen, Output):
            self.push_screen(Output(self.job))

    async def action_quit(self) -> None:
        """Quit; while the job runs, ask first what is to become of it."""
        if self.job.ended.is_set() or isinstance(self.screen, Leave):
            await super().action_quit()
            return

        async def answered(answer: str | None) -> None:
            if answer == "end":
                self.job.end()
            if answer is not None:
                await super(RunApp, self).action_quit()

        self.push_screen(Leave(self.job), answered)


def highest_activity(sample: NodeSample, server: Server) -> float | None:
    """Highest activity of the GPUs which the job of the server holds; None where it holds none, or it is not known."""
    held = gpu_use(server, sample.processes).gpus
    values = [value for gpu in sample.gpus if gpu.info.index in held and (value := gpu.activity()[1].value) is not None]
    return max(values, default=None)


def job_line(job: StartedJob, width: int, restarting: bool = False) -> list[StyledText]:
    """The state of the started job while it has no profiler server that answers. ``restarting``: it is started again
    once it has ended."""
    left: list[StyledText] = [(" Job  ", BOLD)]
    right: list[StyledText] = [("l: its output ", ACCENT)]
    if restarting:
        left += [("▶ ", ACCENT), (f"pid {job.pid} was asked to exit (R: kill it); gputop then restarts it  ", PLAIN),
                 (job.command, DIM)]
    elif job.ended.is_set():
        left += [("■ ", PLAIN if job.returncode == 0 else BAD), (f"{job.state()}  ", PLAIN), (job.command, DIM)]
    elif job.problem is not None:
        left += [("▶ ", ACCENT), (printable(job.problem), WARN)]
    else:
        waits = "starting its profiler server" if job.server else "no TensorFlow, JAX or PyTorch imported yet"
        left += [("▶ ", ACCENT), (f"pid {job.pid} is running, {waits}  ", PLAIN), (job.command, DIM)]
    return justify(left, right, width)


class Output(ModalScreen[None]):
    """The end of the job's output, as it grows."""

    BINDINGS: ClassVar[list[BindingType]] = [key("escape,q,l", "dismiss", "close", "back to the monitor")]

    def __init__(self, job: StartedJob) -> None:
        super().__init__()
        self._job = job

    def compose(self) -> ComposeResult:
        with DialogFrame(f"Output of the job · {self._job.log}", "↑↓ scroll", "esc: close", id="popup"):
            yield WrappedText(lambda _: Text("\n".join(self._job.tail(OUTPUT_LINES)[0]) or "no output yet"))

    def on_mount(self) -> None:
        self.set_interval(OUTPUT_PERIOD_S, self._show)
        box = self.query_one("#popup", DialogFrame)
        box.focus()
        self.call_after_refresh(box.scroll_end, animate=False)

    def _show(self) -> None:
        box = self.query_one("#popup", DialogFrame)
        follows = box.scroll_offset.y >= box.max_scroll_y
        self.query_one(WrappedText).update_text()
        if follows:
            self.call_after_refresh(box.scroll_end, animate=False)


class Leave(Dialog[str | None]):
    """The question what is to become of the job: "stay" (it goes on), "end", or None (do not quit)."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("enter,w", "answer('stay')", "wait", "leave the monitor and wait for the job"),
        key("k", "answer('end')", "end it", "ask the job to exit (SIGTERM), then wait for it"),
        key("escape", "answer(None)", "back", "back to the monitor"),
    ]

    def __init__(self, job: StartedJob) -> None:
        super().__init__()
        self._job = job

    def compose(self) -> ComposeResult:
        with DialogFrame("The job is running", "enter: wait for it", "k: end it", "esc: back", id="popup"):
            out = Text()
            out.append(f"{self._job.command}\n\n", DIM)
            for keys, what in (("enter", "leave the monitor; the job continues, and its output appears here"),
                               ("k", "ask the job to exit (SIGTERM) and wait for it"),
                               ("esc", "back to the monitor")):
                out.append(f"{keys:>6}  ", ACCENT)
                out.append(what + "\n")
            out.append(f"\nFull output: {printable(str(self._job.log))}", DIM)
            yield WrappedText(out)


def run(session: Session, job: StartedJob, preferences: Preferences | None = None) -> None:
    """Run the monitor beside ``job`` until the user leaves it; raises what made the monitor fail."""
    app = RunApp(session, job, preferences)
    app.run()
    app.restarting = False  # a job that has not ended yet is not started again
    if app.error is not None:
        raise app.error
    tell_where_captures_are(session)
