"""Screens that open over the monitor by a key or a click. Where there is nothing to open, the user is told why.

Screens are imported when they are first opened: the monitor's first frame does without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from signal import Signals
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from rich.text import Text
from textual.app import App

from gputop.core.errors import GputopError
from gputop.core.findings import Finding, ids_by_missing
from gputop.core.own_program import install_command
from gputop.core.samples import GpuSample, ProcessSample
from gputop.profiler.capture.records import usable
from gputop.profiler.capture.request import answered
from gputop.render.finding_text import finding_markdown
from gputop.text.commands import command_of, script_of, short_description
from gputop.text.units import printable
from gputop.tui.monitor.messages import begun_as_sentence, no_capture
from gputop.tui.terminal.terminal_app import TerminalApp, copy

if TYPE_CHECKING:
    from gputop.profiler.capture.records import CaptureRecord
    from gputop.profiler.capture.request import CaptureQuestion, CaptureRequest
    from gputop.session.session import Session
    from gputop.timeline.model import Range
    from gputop.timeline.read_timeline import Timeline
    from gputop.tui.timeline.trace_file import TraceFile


_HOST_HISTORY_S = 300.0
_OF_HOST = ("host", "input", "between", "open", "no_steps")  # parts of an account in which Python runs, or is awaited


class MonitorApp(TerminalApp):
    """App that screens are opened from."""

    session: Session
    trace: TraceFile | None  # of the last capture, once its timeline has been opened

    def start_capture(self, request: CaptureRequest) -> None: ...

    def ask_address(self) -> None: ...


def show_error(app: App[Any], error: GputopError) -> None:
    app.notify(f"{begun_as_sentence(printable(error.message))}\n{printable(error.fix)}", severity="warning")


def open_finding(app: MonitorApp, chosen: Finding) -> None:
    from gputop.tui.screens.finding import FindingPopup

    def go(_: Finding) -> None:
        record = app.session.results.last_capture
        # As the trace's analysis has it: the timeline has the job's own GPU numbers.
        from_trace = next((f for f in record.findings if f.id in chosen.ids), chosen) if record is not None else chosen
        open_timeline(app, from_trace)

    numbers = None if app.session.replayed_snapshot is not None else app.session.results.gpu_numbers
    record = app.session.results.last_capture
    app.push_screen(FindingPopup(chosen, go, numbers, simulated=app.session.feed.source.simulated,
                                 no_line=no_line(chosen, record)))


def no_line(finding: Finding, record: CaptureRecord | None) -> str:
    """Hint how to learn the line of Python of a finding about the host; "" if it is known, or the finding is of the
    GPU."""
    of_host_s = sum(finding.claims.get(part, 0.0) for part in _OF_HOST)
    analysis = record.analysis if record is not None else None
    if (not of_host_s or of_host_s < sum(finding.claims.values()) / 2 or analysis is None
            or any(culprit.kind == "line" for culprit in finding.culprits)
            or (analysis.stacks is not None and analysis.stacks.flame)):
        return ""
    if analysis.stacks is not None and analysis.stacks.reason:
        return f"The line of Python code is unknown. {analysis.stacks.reason}"
    return f"To see it: {install_command('stacks')}, then press c again."


def open_timeline(
    app: MonitorApp, finding: Finding | None = None, find_range: Callable[[Timeline], Range | None] | None = None,
) -> None:
    """The timeline of the last capture, at the place of ``finding`` or at ``find_range``; where there is no trace, the
    capture's text."""
    record = app.session.results.last_capture
    if record is None:
        tell_no_capture(app, no_capture(app.session))
    elif app.session.replayed_snapshot is not None or record.problem is not None:
        from gputop.tui.screens.details import capture_text
        from gputop.tui.screens.dialogs import Popup

        app.push_screen(Popup("Last capture", capture_text(record)))
    else:
        from gputop.tui.timeline.timeline_screen import TimelineScreen
        from gputop.tui.timeline.trace_file import trace_of

        app.trace = trace_of(record, app.trace)
        app.push_screen(TimelineScreen(app.trace, finding, find_range))


def open_gpu(app: MonitorApp, chosen: GpuSample) -> None:
    from gputop.tui.screens.details import gpu_text
    from gputop.tui.screens.dialogs import LivePopup

    def now() -> GpuSample:
        sample = app.session.feed.sample
        return next((g for g in sample.gpus if g.info.uuid == chosen.info.uuid), chosen) if sample else chosen

    app.push_screen(LivePopup(f"GPU {chosen.info.label}", lambda width: gpu_text(now(), width)))


def open_process(app: MonitorApp, chosen: ProcessSample) -> None:
    from gputop.tui.screens.details import process_text
    from gputop.tui.screens.process_screens import ProcessPopup

    def now() -> ProcessSample | None:
        sample = app.session.feed.sample
        if sample is None:
            return chosen
        return next((p for p in sample.processes if p.pid == chosen.pid and p.started_s == chosen.started_s), None)

    def text(width: int) -> Text:
        current = now()
        return process_text(current or chosen, app.session.feed.clock(), current is None, width)

    app.push_screen(ProcessPopup(chosen, text, lambda: open_signal(app, chosen)))


def open_signal(app: MonitorApp, chosen: ProcessSample) -> None:
    """The question which signal to send to a process."""
    from gputop.tui.screens.process_screens import SignalScreen

    def send(number: Signals | None) -> None:
        if number is None:
            return
        try:
            app.session.signal(chosen, number)
        except GputopError as error:
            show_error(app, error)
        else:
            app.notify(f"{number.name} was sent to process {chosen.pid}.")

    app.push_screen(SignalScreen(chosen), send)


def ask_before_capture(app: MonitorApp, question: CaptureQuestion) -> None:
    """The question that somebody has to answer before a capture begins; then the capture."""
    def start(key: str | None) -> None:
        if key is not None:
            app.start_capture(answered(question, key))

    if question.kind == "job":
        from gputop.tui.screens.capture_questions import ChooseJob

        sample = app.session.feed.sample
        app.push_screen(ChooseJob(question.servers, question.details, sample.processes if sample is not None else (),
                                  app.session.feed.clock()),
                        lambda server: start(server.address if server else None))
    elif question.choice is not None:
        from gputop.tui.screens.capture_questions import WorkersQuestion

        app.push_screen(WorkersQuestion(question.choice), lambda key: start(key if key != "none" else None))
    else:
        from gputop.tui.screens.dialogs import Confirm

        server = question.servers[0] if question.servers else None
        about = f"{server.address}  {short_description(server.description)}\n\n" if server is not None else ""
        app.push_screen(Confirm("Capture", f"{question.sentence} y/N",
                                f"{about}{begun_as_sentence(question.details).rstrip('.')}."),
                        lambda yes: start("y" if yes else None))


def offer_server(app: MonitorApp, request: CaptureRequest | None = None, chosen: ProcessSample | None = None) -> bool:
    """Ask, where processes hold GPUs and no profiler server answers in one of them, or in the ``chosen`` one, whether
    to start one, and then to capture. Returns whether there is such a process."""
    processes = app.session.processes_to_serve(chosen)
    if not processes or app.session.control.running:
        return False
    from gputop.tui.screens.capture_questions import NAME_AN_ADDRESS, StartServer

    pids = {p.local_pid or p.pid for p in processes}

    def obsolete() -> str:
        session = app.session
        for server in usable(session.watch.servers):
            if server.asked or server.pid in pids:  # not that of another job
                return (f"{short_description(server.description) or server.address} now has a profiler server. Press c "
                        "to capture.")
        sample = session.feed.sample
        running = sample is None or any((p.local_pid or p.pid) in pids for p in sample.processes)
        return "" if running else "The job has ended."

    def answered(pid: int | None) -> None:
        if pid == NAME_AN_ADDRESS:
            app.ask_address()
        elif pid is not None:
            capture = request or app.session.control.request()
            app.session.control.start_server(pid, replace(capture, process_started=screen.started[pid]))

    screen = StartServer(processes, obsolete, app.session.watch.earlier.scripts.union(
        script_of(command_of(record.job)) for record in app.session.results.captures))
    app.push_screen(screen, answered)
    return True


def tell_no_capture(app: MonitorApp, message: str) -> None:
    """Notify that there is no capture yet: the way to one, if only a server is missing; else ``message``."""
    if app.session.results.last_capture is not None or not offer_server(app):
        app.notify(message)


def open_host(app: MonitorApp) -> None:
    from gputop.tui.screens.details import host_text
    from gputop.tui.screens.dialogs import LivePopup

    def text(width: int) -> Text:
        sample = app.session.feed.sample
        history = app.session.feed.history
        if sample is None or history is None:
            return Text("No sample yet.")
        return host_text(sample, width, history.host(_HOST_HISTORY_S))

    app.push_screen(LivePopup("Host", text))


def open_job(app: MonitorApp) -> None:
    from gputop.tui.screens.details import job_text
    from gputop.tui.screens.dialogs import LivePopup

    app.push_screen(LivePopup("Job", lambda _: job_text(app.session)))


def open_stacks(app: MonitorApp, native: bool = False) -> None:
    """Show where the processes that hold GPUs stand, read in a thread. It is asked first where they are held meanwhile,
    or belong to another user."""
    from gputop.ranks.stacks import WHAT_NATIVE_DOES, others_of

    try:
        pids = app.session.pids_to_read
    except GputopError as error:
        show_error(app, error)
        return
    if not pids:
        app.notify("No process holds a GPU, or the driver lists none. To find other jobs: gputop stacks.")
        return
    others = others_of(pids)
    if not native and not others:
        _read_stacks(app, pids, native)
        return
    from gputop.tui.screens.dialogs import Confirm

    reasons = [WHAT_NATIVE_DOES] * native
    if others:
        reasons.append(f"These processes belong to other users: {', '.join(map(str, others))}.")
    app.push_screen(Confirm("Stacks", "Read the stacks? y/N", "\n\n".join(reasons)),
                    lambda yes: _read_stacks(app, pids, native) if yes else None)


def _read_stacks(app: MonitorApp, pids: Sequence[int], native: bool) -> None:
    from gputop.tui.screens.process_screens import StacksPopup

    def read() -> None:
        try:
            processes = app.session.read_stacks(pids, native)
        except GputopError as error:
            app.call_from_thread(show_error, app, error)
            processes = ()
        dumps = app.session.read_flight_recorder(pids)
        if processes or dumps:
            popup = StacksPopup(processes, app.session.results.findings, lambda deep: open_stacks(app, deep), dumps)
            app.call_from_thread(app.push_screen, popup)

    app.notify("Reading the stacks…")
    app.run_worker(read, group="stacks", thread=True)


def open_captures(app: MonitorApp) -> None:
    from gputop.tui.screens.captures import CapturesScreen

    app.push_screen(CapturesScreen(app.session))


def open_tables(app: MonitorApp) -> None:
    record = app.session.results.last_capture
    if record is None:
        tell_no_capture(app, no_capture(app.session, "Its kernels, memory and layers then appear here."))
        return
    from gputop.tui.screens.tables_screen import TablesScreen

    def go(table: str, row: Sequence[object]) -> None:
        from gputop.tui.timeline.trace_file import place_of_row

        open_timeline(app, find_range=lambda timeline: place_of_row(timeline, table, row))

    app.push_screen(TablesScreen(record, go, app.session.control.options.logdir))


def open_comparison(app: MonitorApp) -> None:
    """Compare this run's captures; the only one with the last of its script that an earlier run of gputop took."""
    from gputop.tui.screens.compare import CompareScreen, before_this_run, why_not

    session, reason = app.session, why_not(app.session)
    if reason is None:
        app.push_screen(CompareScreen(session))
        return
    if not session.results.captures or not session.watch.earlier.count:
        tell_no_capture(app, reason)
        return
    b, logdir = session.results.captures[-1], session.control.options.logdir

    def compare(a: CaptureRecord | None) -> None:
        if a is None:
            app.notify(reason)
            return
        session.compare_captures(a, b)
        app.push_screen(CompareScreen(session, b))

    app.run_worker(lambda: app.call_from_thread(compare, before_this_run(b, logdir)), group="comparison", thread=True)


def mark_capture(app: MonitorApp) -> None:
    """Make the last capture A, with which later ones are compared."""
    from gputop.tui.screens.compare import mark_last

    app.notify(mark_last(app.session))


def write_snapshot(app: MonitorApp) -> None:
    """Write a snapshot in a thread: its pictures take a third of a second, in which keys and samples must not wait."""
    def write() -> None:
        from gputop.export.snapshot import write_snapshot

        paths = write_snapshot(app.session, app.session.control.options.logdir)
        ends = " ".join(path.suffix for path in paths)
        app.notify(f"{paths[0].with_suffix('')}\n{ends}", title="Snapshot written")

    _in_thread(app, "snapshot", write)


def run_next_job(app: MonitorApp) -> None:
    """Restart the job of the demo with its cure, in a thread: it takes a quarter of a second."""
    def run() -> None:
        title = app.session.run_next_job()
        app.notify(f"The simulated job was restarted. {title}.\nc: capture it   B: compare with the previous one")

    _in_thread(app, "next job", run)


def _in_thread(app: MonitorApp, group: str, work: Callable[[], None]) -> None:
    """Do ``work`` in a thread, or show why it could not be done."""
    def run() -> None:
        try:
            work()
        except GputopError as error:
            show_error(app, error)

    app.run_worker(run, group=group, thread=True)


def copy_finding(app: MonitorApp, chosen: Finding, *, as_markdown: bool) -> None:
    """The code of a finding, or where it has none or that is asked for the finding as Markdown, into the clipboard of
    the terminal."""
    if chosen.snippet and not as_markdown:
        copy(app, chosen.snippet, "The code of the finding")
        return
    copy(app, finding_markdown(chosen, simulated=app.session.feed.source.simulated), "The finding as Markdown")


def open_not_judged(app: MonitorApp) -> None:
    """The causes that the last capture does not let judge, by what is missing for them."""
    from gputop.tui.screens.dialogs import Popup

    record = app.session.results.last_capture
    if record is None or record.analysis is None:
        return
    out = Text()
    for what, ids in ids_by_missing(record.analysis.abstained).items():
        out.append(", ".join(ids) + "\n", "bold")
        out.append(f"  needs {printable(what)}\n")
    app.push_screen(Popup("Causes that could not be checked", out))


# By the name that the action ``open`` has in gputop.tui.keys.
BY_NAME: dict[str, Callable[[MonitorApp], None]] = {
    "timeline": open_timeline, "tables": open_tables, "comparison": open_comparison, "mark": mark_capture,
    "host": open_host, "job": open_job, "captures": open_captures, "stacks": open_stacks, "snapshot": write_snapshot}
