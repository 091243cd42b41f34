"""What opens over the monitor by a key or a click: each takes the app, and says so where there is nothing to open."""

from __future__ import annotations

from signal import Signals
from typing import TYPE_CHECKING

from rich.text import Text

from gputop.core.errors import GputopError
from gputop.core.findings import Finding
from gputop.core.samples import GpuSample, ProcessSample

if TYPE_CHECKING:
    from gputop.tui.app import GputopApp


def finding(app: GputopApp, chosen: Finding) -> None:
    from gputop.tui.timeline.open import FindingPopup, open_last

    def go(_: Finding) -> None:
        record = app.session.last_capture
        # As the trace itself tells it: the timeline has the job's own GPU numbers.
        told = next((f for f in record.findings if f.id in chosen.ids), chosen) if record is not None else chosen
        open_last(app, told)

    numbers = None if app.session.replayed_snapshot is not None else app.session.gpu_numbers
    app.push_screen(FindingPopup(chosen, go, numbers))


def gpu(app: GputopApp, chosen: GpuSample) -> None:
    from gputop.tui.screens.details import gpu_text
    from gputop.tui.screens.dialogs import LivePopup

    def now() -> GpuSample:
        sample = app.session.sample
        return next((g for g in sample.gpus if g.info.uuid == chosen.info.uuid), chosen) if sample else chosen

    app.push_screen(LivePopup(f"GPU {chosen.info.label}", lambda width: gpu_text(now(), width)))


def process(app: GputopApp, chosen: ProcessSample) -> None:
    from gputop.tui.screens.details import process_text
    from gputop.tui.screens.process_screens import ProcessPopup

    def now() -> ProcessSample | None:
        sample = app.session.sample
        if sample is None:
            return chosen
        return next((p for p in sample.processes
                     if p.pid == chosen.pid and p.started_s == chosen.started_s), None)

    def text(width: int) -> Text:
        found = now()
        return process_text(found or chosen, app.session.clock(), found is None, width)

    app.push_screen(ProcessPopup(chosen, text, lambda: signal(app, chosen)))


def signal(app: GputopApp, chosen: ProcessSample) -> None:
    from gputop.tui.screens.process_screens import SignalScreen

    def send(number: Signals | None) -> None:
        if number is None:
            return
        try:
            app.session.signal(chosen, number)
        except GputopError as error:
            app.tell(error)
        else:
            app.notify(f"{number.name} is sent to {chosen.pid}.", timeout=5, markup=False)

    app.push_screen(SignalScreen(chosen), send)


def host(app: GputopApp) -> None:
    from gputop.tui.screens.details import host_text
    from gputop.tui.screens.dialogs import LivePopup

    def text(width: int) -> Text:
        sample = app.session.sample
        return Text("Nothing was sampled yet.") if sample is None else host_text(sample, width)

    app.push_screen(LivePopup("Host", text))


def job(app: GputopApp) -> None:
    from gputop.tui.screens.details import job_text
    from gputop.tui.screens.dialogs import LivePopup

    app.push_screen(LivePopup("Job", lambda _: job_text(app.session)))


def tables(app: GputopApp) -> None:
    record = app.session.last_capture
    if record is None:
        from gputop.tui.monitor.messages import no_capture

        app.notify(no_capture(app.session, "Its kernels, collectives, memory and copies are then here."), timeout=5)
        return
    from gputop.tui.screens.tables_screen import TablesScreen

    app.push_screen(TablesScreen(record))


def mark(app: GputopApp) -> None:
    from gputop.tui.screens.compare import mark_last

    app.notify(mark_last(app.session), timeout=10, markup=False)


def comparison(app: GputopApp) -> None:
    from gputop.tui.screens.compare import CompareScreen, why_not

    reason = why_not(app.session)
    if reason is None:
        app.push_screen(CompareScreen(app.session))
    else:
        app.notify(reason, timeout=10, markup=False)


def snapshot(app: GputopApp) -> None:
    """Write one beside the screen: its pictures take a third of a second, in which keys and samples must not wait."""
    def write() -> None:
        from gputop.export.snapshot import write_snapshot

        try:
            paths = write_snapshot(app.session, app.session.options.logdir)
        except GputopError as error:
            app.tell(error)
        else:
            ends = " ".join(path.suffix for path in paths)
            app.notify(f"{paths[0].with_suffix('')}\n{ends}", title="Snapshot written", timeout=8, markup=False)

    app.run_worker(write, group="snapshot", thread=True)


def snippet(app: GputopApp, chosen: Finding | None) -> None:
    """The code of a finding into the clipboard of the terminal."""
    from gputop.tui.terminal.clipboard import copy

    if chosen is None or not chosen.snippet:
        app.notify("Nothing to copy: no finding with code is selected.", timeout=4)
    else:
        copy(app, chosen.snippet, "The code of the finding")
