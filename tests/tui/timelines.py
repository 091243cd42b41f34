"""Timelines for tests of their screen: small jobs, read back from the file that a worker would write; and the screen
with one of them under a pilot."""

from __future__ import annotations

import functools
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from textual.pilot import Pilot

from gputop.advice.trace.facts import TraceFacts
from gputop.core.findings import Finding, Gain
from gputop.diagnosis.diagnose import analyze_to_facts
from gputop.timeline.build import RowsWritten
from gputop.timeline.file_layout import Extent
from gputop.timeline.read_timeline import Timeline
from gputop.trace.model import Kind, Trace
from gputop.tui.timeline.canvas import TimelineCanvas
from gputop.tui.timeline.timeline_screen import TimelineScreen
from gputop.tui.timeline.trace_file import TraceFile
from gputop.tui.timeline_app import TimelineApp
from gputop.tui.widgets.cached_lines import LinesWidget
from tests.timeline.make import build
from tests.trace.build import Builder
from tests.tui.found import text_of, until
from tests.tui.textual_private import message_text

STEP_NS = 1_000_000
LAUNCH_BOUND = Finding(id="launch_bound", severity="high", title="The GPUs wait for launches",
                       why="Between kernels nothing is queued.",
                       evidence={"share_ratio": 0.4}, action="Compile the step.", source="test",
                       gain=Gain(0.4, "no gap"), gpus=(0, 1))


def job_timeline(steps: int = 4, gpus: int = 2) -> Timeline:
    """The timeline of :func:`job`, which is analyzed once."""
    return opened(*_built_job(steps, gpus))


def built(facts: TraceFacts) -> tuple[bytes, Extent]:
    with tempfile.TemporaryFile() as file:
        section = build(facts, file)
        file.seek(0)
        return file.read(), section


@functools.cache
def _built_job(steps: int, gpus: int) -> tuple[bytes, Extent]:
    return built(analyze_to_facts(job(steps, gpus)))


def opened(content: bytes, section: Extent) -> Timeline:
    """A timeline that was built, to be closed by who shows it."""
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(content)
        return Timeline.open(file, section)


def rows_and_rest(trace: Trace) -> tuple[Timeline, Timeline]:
    """What is there before the analysis, and all of it."""
    facts = analyze_to_facts(trace)
    with tempfile.TemporaryFile(buffering=0) as file:
        written = RowsWritten(facts.trace, facts.steps, file)
        rows = Timeline.open(file, written.describe(facts.trace))
        return rows, Timeline.open(file, written.finish(facts))


def job(steps: int = 4, gpus: int = 2) -> Trace:
    """Steps of 1 ms that begin at 10 µs: a copy, three kernels, a collective, then nothing for 320 µs."""
    b = Builder(gpus=gpus)
    for step in range(steps):
        begin = step * 1000.0 + 10
        b.host("train", begin, 950, step_num=step, _r=1)
        b.host("EagerExecute", begin + 5, 300)
        b.host("MatMul", begin + 50, 100)
        for gpu in range(gpus):
            b.run(gpu, begin + 20, 30, "MemcpyH2D", kind=Kind.H2D, stream=3, launch=begin + 15 + gpu, size=1000)
            for i in range(3):
                b.run(gpu, begin + 300 + 100 * i, 95, f"sgemm_{i}", launch=begin + 290 + 10 * i + gpu,
                      op=f"model/dense_{i}/MatMul")
            b.run(gpu, begin + 620, 80, "ncclDevKernel_AllReduce", kind=Kind.COLLECTIVE, stream=2,
                  launch=begin + 330 + gpu)
    return b.build()


class ReadHere(TraceFile, kw_only=True):
    """A trace that ``reader`` reads instead of a worker process."""

    reader: Callable[[threading.Event, Callable[[Timeline], None]], Timeline]

    def read(self, stop: threading.Event, on_rows: Callable[[Timeline], None]) -> Timeline:
        return self.reader(stop, on_rows)


def trace_file(timeline: Timeline, *findings: Finding) -> ReadHere:
    return ReadHere(("/traces/run/node.xplane.pb",), "node.xplane.pb", findings, analyzed=True,
                    reader=lambda stop, on_rows: timeline)


@asynccontextmanager
async def shown(timeline: Timeline | None = None, size: tuple[int, int] = (120, 40), findings: Sequence[Finding] = (),
                trace: TraceFile | None = None) -> AsyncIterator[tuple[Pilot, TimelineScreen, TimelineCanvas]]:
    """The rows of a timeline, or of a ``trace``, in an app of their own."""
    app = TimelineApp(trace or trace_file(timeline or job_timeline(), *findings))
    async with app.run_test(size=size, notifications=True) as pilot:
        await until(pilot, lambda: isinstance(app.screen, TimelineScreen) and app.screen._canvas.timeline is not None)
        screen = app.screen
        yield pilot, screen, screen._canvas


async def refused(pilot: Pilot) -> None:
    """Wait until the trace has been found to be unreadable."""
    def there() -> bool:
        return isinstance(pilot.app.screen, TimelineScreen) and pilot.app.screen._problem is not None

    await until(pilot, there)


def header_of(screen: TimelineScreen) -> str:
    return text_of(screen.query_one("#timeline-header", LinesWidget))


def details(screen: TimelineScreen) -> str:
    return text_of(screen.query_one("#detail", LinesWidget))


def picture(canvas: TimelineCanvas) -> list[str]:
    return [canvas.render_line(y).text for y in range(canvas.size.height)]


def line_of(canvas: TimelineCanvas, label: str) -> str:
    return next(line for line in picture(canvas) if label in line[:canvas.label_cells])


def notes(pilot: Pilot) -> str:
    return message_text(pilot.app)


async def press_to(pilot: Pilot, canvas: TimelineCanvas, label: str) -> None:
    """Go down to the row of this label."""
    for _ in range(len(canvas.places)):
        if canvas.place is not None and canvas.place.label.strip() == label:
            return
        await pilot.press("down")
    raise AssertionError(f"no row {label}")
