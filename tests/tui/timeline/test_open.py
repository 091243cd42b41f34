"""How a timeline comes to the screen: read from a file, from the monitor, at the place of a finding."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.app import App, ComposeResult

from gputop.cli import main
from gputop.core.errors import GputopError
from gputop.core.findings import Culprit
from gputop.diagnosis.diagnose import analyze_to_facts
from gputop.timeline.read_timeline import Timeline
from gputop.trace.readers.load import load
from gputop.tui.screens.dialogs import Popup
from gputop.tui.screens.finding import FindingPopup
from gputop.tui.timeline.canvas import TimelineCanvas
from gputop.tui.timeline.timeline_screen import TimelineScreen
from gputop.tui.timeline.trace_file import TraceFile, place_of, place_of_row, trace_of
from gputop.tui.timeline_app import TimelineApp
from gputop.tui.widgets.cached_lines import LinesWidget
from tests.analyses import make_analysis
from tests.records import replace
from tests.timeline.make import timeline_of
from tests.tui.found import FoundSession, piloted
from tests.tui.timelines import (
    LAUNCH_BOUND,
    details,
    header_of,
    job,
    job_timeline,
    notes,
    picture,
    refused,
    rows_and_rest,
    shown,
    text_of,
    trace_file,
    until,
)
from tests.waiting import PATIENCE_S

DATA = Path(__file__).resolve().parents[2] / "data"


async def test_a_place_is_gone_to_once_the_picture_is_laid_out() -> None:
    """On a loaded machine the layout comes after the callbacks that follow a refresh; there were no rows to go to."""
    canvas, shown = TimelineCanvas(lambda: None), list[int]()

    class Hidden(App[None]):
        def compose(self) -> ComposeResult:
            canvas.display = False
            yield canvas

    async with Hidden().run_test() as pilot:
        canvas.show(job_timeline())
        canvas.once_sized(lambda: shown.append(len(canvas.places)))
        await pilot.pause()
        assert not shown and not canvas.places
        canvas.display = True
        await pilot.pause()
        assert shown == [len(canvas.places)] and canvas.places
        canvas.once_sized(lambda: shown.append(0))
        assert len(shown) == 2


# -- reading ----------------------------------------------------------------------------------


async def test_reading_can_be_given_up() -> None:
    began, asked = threading.Event(), []

    def read(stop: threading.Event, _: object) -> Timeline:
        asked.append(stop)
        began.set()
        stop.wait(PATIENCE_S)
        raise GputopError("The timeline was stopped.")

    app = TimelineApp(replace(trace_file(job_timeline()), reader=read))
    async with app.run_test() as pilot:
        await until(pilot, began.is_set)
        screen = app.screen
        assert "Reading the trace" in text_of(screen.query_one("#reading", LinesWidget))
        await pilot.press("n", "plus", "b", "slash", "greater_than_sign", "enter")
        assert app.screen is screen
        await pilot.press("r")
        assert isinstance(app.screen, Popup)
        await pilot.press("escape", "escape")
        assert asked[0].is_set()


async def test_what_cannot_be_read_says_why() -> None:
    for error, words in ((GputopError("The file is [b]cut[/b] off.", "Capture again."), "[b]cut[/b]"),
                         (ValueError("odd"), "internal error in gputop")):
        def read(stop: threading.Event, _: object, error: Exception = error) -> Timeline:
            raise error

        app = TimelineApp(replace(trace_file(job_timeline()), reader=read))
        async with app.run_test() as pilot:
            await refused(pilot)
            shown_text = text_of(app.screen.query_one("#reading", LinesWidget))
            assert words in shown_text
            assert "/traces/run/node.xplane.pb" in shown_text
            await pilot.press("n", "b", "plus", "escape")


async def test_a_lost_file_says_so_and_a_real_one_is_read_in_a_worker(tmp_path: Path) -> None:
    from gputop.simulation.loop import SimulatedLoop
    from gputop.simulation.scenarios import find_scenario
    from gputop.simulation.xspace import build_xspace

    path = tmp_path / "node.xplane.pb"
    app = TimelineApp(TraceFile((str(path),), path.name))
    async with app.run_test() as pilot:
        await refused(pilot)
    path.write_bytes(build_xspace(SimulatedLoop(find_scenario("input-bound")), 3_000_000_000, 3_400_000_000, 0, "node"))
    trace = TraceFile((str(path),), path.name)
    app = TimelineApp(trace)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: trace.analyzed)
        screen = app.screen
        assert "SIMULATED" in header_of(screen)
        assert "Prefetch" in "\n".join(picture(screen._canvas))
        await until(pilot, lambda: bool(screen._idle_gaps.titles))
        assert trace.timeline is not None and screen._idle_gaps.titles["input_bound"]
        assert "tf_Compute" in "\n".join(picture(screen._canvas))


class Slowly:
    """Reads a timeline whose rest comes, or fails to, once it is let."""

    def __init__(self, failure: GputopError | None = None) -> None:
        self.rows, self.rest = rows_and_rest(job())
        self.go_on, self._failure = threading.Event(), failure
        self.trace = replace(trace_file(self.rest, LAUNCH_BOUND), reader=self.read)

    def read(self, stop: threading.Event, on_rows: Callable[[Timeline], None]) -> Timeline:
        on_rows(self.rows)
        self.go_on.wait(PATIENCE_S)
        if self._failure is not None:
            raise self._failure
        return self.rest


async def test_the_rows_are_there_first_and_nothing_moves_when_the_rest_comes() -> None:
    slowly = Slowly()
    async with shown(size=(120, 16), trace=slowly.trace) as (pilot, screen, canvas):
        assert "reading idle gaps, critical path" in header_of(screen)
        assert "critical path" in "\n".join(picture(canvas)) and "train" in "\n".join(picture(canvas))
        await pilot.press("b")
        assert "still being analyzed" in text_of(screen._idle_gaps)
        await pilot.press("escape", "e", "down", "down", "down", "plus", "plus", "n")
        assert "the cause is unknown" in details(screen)
        await pilot.press("full_stop")
        before = canvas.where, canvas._scrolled.top, [line[:12] for line in picture(canvas)]
        assert canvas.selected is not None and canvas.place is not None and canvas.view != canvas.view.whole(
            canvas.timeline.window_ns)
        slowly.go_on.set()
        await until(pilot, lambda: canvas.timeline is slowly.rest)
        assert (canvas.where, canvas._scrolled.top, [line[:12] for line in picture(canvas)]) == before
        assert "reading" not in header_of(screen) and screen.trace.timeline is slowly.rest
        await pilot.press("b")
        assert "Idle gaps by cause" in str(screen._idle_gaps.border_title) and screen._idle_gaps.entries


@pytest.mark.parametrize("moved", [False, True])
async def test_a_finding_is_gone_to_when_its_place_is_known_unless_the_user_has_moved(moved: bool) -> None:
    slowly = Slowly()
    screen = TimelineScreen(slowly.trace, LAUNCH_BOUND)
    async with shown() as (pilot, _, _):
        pilot.app.push_screen(screen)
        await until(pilot, lambda: screen.is_mounted and screen._canvas.timeline is slowly.rows
                    and bool(screen._canvas.places))
        if moved:
            await pilot.press("plus")
        view = screen._canvas.view
        slowly.go_on.set()
        await until(pilot, lambda: screen._canvas.timeline is slowly.rest)
        assert (screen._canvas.gap is None and screen._canvas.view == view) if moved else screen._idle_gaps.display


async def test_the_rows_stay_where_the_analysis_fails() -> None:
    slowly = Slowly(GputopError("It ran out of memory.", "Use another machine."))
    async with shown(trace=slowly.trace) as (pilot, screen, canvas):
        slowly.go_on.set()
        await until(pilot, lambda: screen._problem is not None)
        assert "ran out of memory" in notes(pilot) and "rows only" in header_of(screen)
        await pilot.press("b")
        assert "could not be analyzed" in text_of(screen._idle_gaps)
        assert "GPU 0" in "\n".join(picture(canvas)) and screen.trace.timeline is None


# -- where findings are -----------------------------------------------------------------------


def test_the_place_of_a_finding() -> None:
    timeline = job_timeline()
    assert place_of(timeline, LAUNCH_BOUND) == 0
    parent = replace(LAUNCH_BOUND, id="other", consequences=(LAUNCH_BOUND,))
    assert place_of(timeline, parent) == 0, "a place of what it explains is its own"
    collective = place_of(timeline, replace(LAUNCH_BOUND, id="communication_exposed"))
    assert not isinstance(collective, int) and collective is not None and collective.kind == "collective"
    on_one = place_of(timeline, replace(LAUNCH_BOUND, id="copies_excessive", gpus=(1,)))
    assert not isinstance(on_one, int) and on_one is not None and timeline.rows[on_one.row].gpu == 1
    named = place_of(timeline, replace(LAUNCH_BOUND, id="small_kernels", why="Most of them are “sgemm_2”, small."))
    assert not isinstance(named, int) and named is not None and named.name == "sgemm_2"
    assert place_of(timeline, replace(LAUNCH_BOUND, id="memory_pressure")) is None
    culprit = Culprit("sgemm_2", "op", gpu=timeline.rows[named.row].gpu, at_s=named.start_ns / 1e9)
    assert place_of(timeline, replace(LAUNCH_BOUND, culprits=(culprit,))) == named, "rather than a gap"
    assert place_of(timeline, replace(LAUNCH_BOUND, culprits=(replace(culprit, at_s=1e6),))) == 0


def test_without_a_gpu_the_place_of_waiting_for_input_is_the_longest_wait_for_a_batch() -> None:
    trace = load([str(DATA / "keras3_slow_input.xplane.pb.gz")])
    found = {finding.id: finding for finding in analyze_to_facts(trace).analysis.findings}["input_bound"]
    place = place_of(timeline_of(trace), replace(found, culprits=()))  # as where lines of Python are the culprits
    assert not isinstance(place, int) and place is not None
    waits = [(end - start, start) for start, end, name in zip(
        trace.host.start_ns.tolist(), trace.host.end_ns.tolist(), trace.host.name.tolist(), strict=True)
        if trace.names[name] == "IteratorGetNextOp::DoCompute"]
    assert (place.name, place.end_ns - place.start_ns) == ("IteratorGetNextOp::DoCompute", max(waits)[0])


def captured() -> FoundSession:
    session = FoundSession()
    session.change_capture(path=Path("/traces/run/node.xplane.pb"), analysis=make_analysis(findings=[LAUNCH_BOUND]))
    session.results.refresh()
    return session


async def test_from_the_monitor_and_from_a_finding() -> None:
    session, timeline = captured(), job_timeline()
    record = session.results.last_capture
    async with piloted(session, notifications=True) as (app, pilot):
        app.trace = trace_of(record, None)
        app.trace.timeline = timeline
        await pilot.press("t")
        assert isinstance(app.screen, TimelineScreen) and app.screen._canvas.timeline is timeline
        assert trace_of(record, app.trace) is app.trace
        assert app.trace.title == "run/node.xplane.pb"
        session.advance()
        await pilot.press("r")
        assert isinstance(app.screen, Popup)
        await pilot.press("escape", "escape")
        await pilot.pause()
        assert not isinstance(app.screen, TimelineScreen)
        await pilot.press("r", "enter")
        assert isinstance(app.screen, FindingPopup)
        await pilot.press("t")
        await pilot.pause()
        assert isinstance(app.screen, TimelineScreen), "the place of the finding"
        assert app.screen._idle_gaps.display and app.screen._canvas.gap is not None
        await pilot.press("q")
        live = replace(LAUNCH_BOUND, origin="live")
        app.push_screen(FindingPopup(live, lambda f: pytest.fail("a live finding has no place")))
        await pilot.press("t")
        assert "live samples" in notes(pilot)
        assert trace_of(replace(record, path=Path("/other")), app.trace).timeline is None
        with pytest.raises(AttributeError):  # the one before was closed
            timeline.coverage.picture([0], 0, 1, 1)


async def test_without_a_trace_the_text_is_shown() -> None:
    session = captured()
    session.change_capture(problem=GputopError("cut off", "again"))
    async with piloted(session) as (app, pilot):
        await pilot.press("t")
        assert isinstance(app.screen, Popup) and not isinstance(app.screen, TimelineScreen)
        app.clear_notifications()  # esc would clear them first
        await pilot.press("escape")
        session.results.last_capture = None
        await pilot.press("t")
        assert "No capture yet" in notes(pilot)


def test_on_the_command_line_it_needs_a_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["analyze", str(tmp_path), "--timeline"]) == 2
    assert "--timeline needs a terminal" in capsys.readouterr().err


def test_the_place_of_a_row_of_the_tables() -> None:
    timeline = job_timeline()
    path = next(row for row in timeline.rows if row.kind == "path")
    segments = timeline.ranges(path.key, *timeline.window_ns)
    longest = max((r for r in segments if r.name.startswith("host work")), key=lambda r: r.end_ns - r.start_ns)
    assert place_of_row(timeline, "Path", ("host work", 1.0, "Python and ops on the host")) == longest
    kernel = place_of_row(timeline, "Kernels", (0.5, 12, "sgemm_1"))
    assert kernel is not None and kernel.name == "sgemm_1"
    assert place_of_row(timeline, "Kernels", (0.5, "none of this name")) is None
    assert place_of_row(timeline, "Kernels", ()) is None
