"""The timeline's screen under a pilot: every key, the mouse, small terminals, traces with little in them."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from textual import events
from textual.pilot import Pilot

from gputop.advice.finding import Finding, Gain
from gputop.captures import CaptureRecord
from gputop.cli import main
from gputop.errors import GputopError
from gputop.timeline.reader import Timeline
from gputop.tui.app import GputopApp
from gputop.tui.bubbles import BubbleList
from gputop.tui.lines import LinesWidget
from gputop.tui.screens import Popup
from gputop.tui.timeline import TimelineScreen
from gputop.tui.timeline_canvas import TimelineCanvas
from gputop.tui.timeline_open import FindingPopup, TimelineApp, TraceFile, place_of, trace_of
from gputop.tui.timeline_view import View
from tests.fakes import START_S, StillSession
from tests.trace.build import Builder
from tests.tui.timelines import STEP_NS, job, timeline_of

LAUNCH_BOUND = Finding("launch_bound", "high", "The GPUs wait for launches", "Between kernels nothing is queued.",
                       {"share_ratio": 0.4}, "Compile the step.", "test", Gain(0.4, "no gap"), (0, 1))


def trace_file(timeline: Timeline, *findings: Finding) -> TraceFile:
    return TraceFile(("/traces/run/node.xplane.pb",), "node.xplane.pb", findings, analysed=True,
                     open=lambda paths, stop: timeline)


@asynccontextmanager
async def shown(timeline: Timeline | None = None, size: tuple[int, int] = (120, 40), findings: Sequence[Finding] = (),
                ) -> AsyncIterator[tuple[Pilot, TimelineScreen, TimelineCanvas]]:
    app = TimelineApp(trace_file(timeline or timeline_of(job()), *findings))
    async with app.run_test(size=size, notifications=True) as pilot:
        await until(pilot, lambda: isinstance(app.screen, TimelineScreen) and app.screen._canvas.timeline is not None)
        screen = app.screen
        assert isinstance(screen, TimelineScreen)
        yield pilot, screen, screen._canvas


async def until(pilot: Pilot, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, "it did not come to that"
        await pilot.pause(0.005)
    await pilot.pause()


async def refused(pilot: Pilot) -> None:
    """Wait until the trace has been found to be unreadable."""
    def there() -> bool:
        return isinstance(pilot.app.screen, TimelineScreen) and pilot.app.screen._problem is not None

    await until(pilot, there)


def text_of(widget: LinesWidget) -> str:
    return "\n".join("".join(text for text, _ in line) for line in widget._lines)


def told(screen: TimelineScreen) -> str:
    return text_of(screen.query_one("#told", LinesWidget))


def picture(canvas: TimelineCanvas) -> list[str]:
    return [canvas.render_line(y).text for y in range(canvas.size.height)]


def line_of(canvas: TimelineCanvas, label: str) -> str:
    return next(line for line in picture(canvas) if label in line[:canvas.label_cells])


def notes(pilot: Pilot) -> str:
    return "\n".join(n.message for n in pilot.app._notifications)


async def press_to(pilot: Pilot, canvas: TimelineCanvas, label: str) -> None:
    """Go down to the row of this label."""
    for _ in range(len(canvas.places)):
        if canvas.place is not None and canvas.place.label.strip() == label:
            return
        await pilot.press("down")
    raise AssertionError(f"no row {label}")


LOOKS = {"whole": (), "zoomed": ("plus", "plus", "down", "full_stop", "full_stop"), "idle": ("b", "down"),
         "details": ("full_stop", "full_stop", "enter")}


@pytest.mark.parametrize(("size", "look"), [
    ((80, 24), "whole"), ((120, 40), "zoomed"), ((120, 40), "idle"), ((200, 60), "whole"), ((40, 10), "whole"),
    ((80, 24), "idle"), ((100, 30), "details")], ids=lambda x: x if isinstance(x, str) else f"{x[0]}x{x[1]}")
def test_what_it_looks_like(snap_compare: Callable[..., bool], size: tuple[int, int], look: str) -> None:
    app = TimelineApp(replace(trace_file(timeline_of(job(gpus=4)), LAUNCH_BOUND), timeline=timeline_of(job(gpus=4))))
    assert snap_compare(app, terminal_size=size, press=LOOKS[look])


async def test_the_whole_capture_is_shown_first() -> None:
    async with shown() as (_, screen, canvas):
        assert canvas.view.is_whole and canvas.has_focus
        lines = picture(canvas)
        assert "step 1" in lines[2] and "step 3" in lines[2]
        assert "0 ms" in lines[1] and "busy" in lines[1]
        assert "▇" in line_of(canvas, "GPU 0") and "train" in line_of(canvas, "python")
        assert line_of(canvas, "GPU 0").rstrip().endswith("%")
        header = text_of(screen.query_one("#timeline-header", LinesWidget))
        assert "node.xplane.pb" in header and "3 steps" in header and "SIMULATED" not in header
        assert "4.0 ms shown" in told(screen) and "idle places" in told(screen)


async def test_pan_zoom_and_the_way_back() -> None:
    async with shown() as (pilot, _, canvas):
        window = canvas.view.window_ns
        await pilot.press("plus", "plus")
        zoomed = canvas.view
        assert zoomed.span_ns == pytest.approx((window[1] - window[0]) / 4, abs=4)
        assert zoomed.start_ns == window[0], "about the cursor, which is at the begin"
        for later, earlier, share in (("right", "left", 0.125), ("l", "h", 0.125), ("shift+right", "shift+left", 1),
                                      ("L", "H", 1)):
            await pilot.press(later)
            assert canvas.view.start_ns - zoomed.start_ns == pytest.approx(share * zoomed.span_ns, rel=0.07)
            await pilot.press(earlier)
            assert canvas.view == zoomed
        await pilot.press("end")
        assert canvas.view.end_ns == window[1] and canvas.view.span_ns == zoomed.span_ns
        await pilot.press("home")
        assert canvas.view == zoomed
        await pilot.press("0")
        assert canvas.view.is_whole
        await pilot.press("u")
        assert canvas.view == zoomed
        await pilot.press("left_square_bracket", "minus", "minus")
        assert canvas.view.is_whole
        await pilot.press("right_square_bracket")
        assert not canvas.view.is_whole
        for _ in range(60):
            canvas.action_zoom(-1)
        assert canvas.view.span_ns == 200
        picture(canvas)
        for _ in range(99):
            canvas.action_back()
        await pilot.pause()
        assert "No zoom or jump" in notes(pilot)


async def test_zoomed_in_ranges_have_their_names() -> None:
    async with shown() as (pilot, _, canvas):
        canvas.look(View.whole(canvas.view.window_ns).at(300_000, 450_000))
        await pilot.pause()
        line = "\n".join(picture(canvas))
        assert "sgemm_0" in line and "sgemm_1" in line and "ncclDevKernel_A" in line
        await pilot.press("0")
        assert "sgemm_0" not in "\n".join(picture(canvas))


async def test_ranges_gaps_and_details_by_key() -> None:
    async with shown() as (pilot, screen, canvas):
        await press_to(pilot, canvas, "GPU 0")
        await pilot.press("full_stop")
        assert canvas.selected is not None and canvas.selected.name == "MemcpyH2D"
        assert "MemcpyH2D" in told(screen) and "30.0 µs" in told(screen) and "copy host → device" in told(screen)
        assert "step 1 +20.0 µs" in told(screen)
        await pilot.press("full_stop")
        assert canvas.selected is not None and canvas.selected.name == "sgemm_0"
        assert "op model/dense_0/MatMul" in told(screen) and "launched 10.0 µs before by launch 0" in told(screen)
        await pilot.press("comma")
        assert canvas.selected is not None and canvas.selected.name == "MemcpyH2D"
        await pilot.press("comma")
        assert "No earlier range on GPU 0" in notes(pilot)

        await pilot.press("n")
        assert canvas.gap == (60_000, 310_000) and canvas.selected is None
        assert "idle on GPU 0" in told(screen) and "250 µs" in told(screen)
        assert "the next launch is late" in told(screen) and canvas.linked is not None
        assert canvas.linked.name == "sgemm_0", "what ended it; o goes there"
        await pilot.press("n")
        assert canvas.gap == (710_000, 1_030_000), "the gaps of 5 µs are less than a cell at this zoom"
        await pilot.press("N")
        assert canvas.gap == (60_000, 310_000)
        await pilot.press("z")
        assert canvas.view.start_ns < 60_000 < 310_000 < canvas.view.end_ns and canvas.view.span_ns < 600_000
        await pilot.press("enter")
        assert isinstance(pilot.app.screen, Popup)
        await pilot.press("escape", "plus", "n")
        assert canvas.gap == (405_000, 410_000), "now they are a cell wide"
        await pilot.press("full_stop", "enter")
        assert isinstance(pilot.app.screen, Popup)
        await pilot.press("escape", "0", "N", "N", "N")
        assert "No earlier gap of" in notes(pilot)


async def test_from_a_kernel_to_its_launch_and_back() -> None:
    async with shown() as (pilot, screen, canvas):
        await press_to(pilot, canvas, "GPU 1")
        await pilot.press("o")
        assert "Nothing is selected" in notes(pilot)
        await pilot.press("full_stop", "full_stop")
        kernel = canvas.selected
        assert kernel is not None and canvas.linked is not None
        await pilot.press("o")
        assert canvas.place is not None and canvas.place.label == "launch 1"
        assert canvas.selected is not None and canvas.selected.name == "cuLaunchKernel"
        assert "starts sgemm_0 on GPU 1" in told(screen)
        await pilot.press("o")
        assert canvas.selected == kernel and canvas.place.rows[0].gpu == 1
        await press_to(pilot, canvas, "python")
        await pilot.press("full_stop", "o")
        assert "no other end" in notes(pilot)


async def test_rows_fold_and_unfold() -> None:
    async with shown(size=(100, 16)) as (pilot, _, canvas):
        labels = [p.label for p in canvas.places]
        assert "  Stream #1" not in labels, "eight lines more than there are"
        await press_to(pilot, canvas, "GPU 0")
        await pilot.press("e")
        assert [p.label for p in canvas.places][1:4] == ["  Stream #1", "  Stream #2", "  Stream #3"]
        await pilot.press("down", "e")
        assert [p.label for p in canvas.places] == labels and canvas.place is not None
        assert canvas.place.label == "GPU 0", "from a stream to the GPU it went into"
        await pilot.press("E")
        assert sum(p.label.startswith("  Stream") for p in canvas.places) == 6
        await pilot.press("E")
        assert [p.label for p in canvas.places] == labels
        await press_to(pilot, canvas, "python")
        assert [p.depth for p in canvas.places][-3:] == [0, 1, 2], "there was room for that from the first"
        await pilot.press("space")
        assert [p.depth for p in canvas.places][-1:] == [None]
        await pilot.press("space")
        canvas.look(canvas.view.at(10_000, 1_000_000))
        await pilot.press("down", "down")
        canvas.cursor_ns = 100_000
        await pilot.press("up", "down")
        assert canvas.selected is not None and canvas.selected.name == "MatMul", "what is at the level one is on"
        await pilot.press("enter")
        assert isinstance(pilot.app.screen, Popup)
        await pilot.press("q")
        assert line_of(canvas, "python").count("train") == 1
        assert any("EagerExecute" in line for line in picture(canvas))
        await pilot.press("up")
        assert canvas.selected is not None and canvas.selected.name == "EagerExecute"
        await pilot.press("pageup", "pageup")
        assert canvas.index == 0
        await press_to(pilot, canvas, "launch 0")
        await pilot.press("e")
        assert "nothing within launch 0" in notes(pilot)


async def test_search_goes_round() -> None:
    async with shown() as (pilot, screen, canvas):
        await pilot.press("greater_than_sign")
        await pilot.press(*"DENSE_1", "enter")
        first = canvas.selected
        assert first is not None and first.name == "sgemm_1" and first.tf_op == "model/dense_1/MatMul"
        seen = []
        for _ in range(8):
            seen.append((canvas.selected.row, canvas.selected.index))
            await pilot.press("greater_than_sign")
            assert canvas.selected is not None
        assert canvas.selected == first and len(set(seen)) == 8, "four steps on two GPUs"
        await pilot.press("less_than_sign")
        assert (canvas.selected.row, canvas.selected.index) == seen[-1]
        await pilot.press("slash")
        await pilot.press(*["backspace"] * 7, *"no such [b]", "enter")
        await pilot.pause()
        assert "No range or op with “no such [b]”" in notes(pilot)
        assert screen.is_current


async def test_the_idle_places() -> None:
    other = replace(LAUNCH_BOUND, id="input_bound", title="Another")
    async with shown(findings=[other, LAUNCH_BOUND]) as (pilot, screen, canvas):
        timeline = canvas.timeline
        assert timeline is not None and timeline.bubbles[0].finding == "launch_bound"
        await pilot.press("b")
        bubbles = screen.query_one(BubbleList)
        assert bubbles.display and bubbles.has_focus
        worst = timeline.bubbles[0]
        assert canvas.gap == (worst.start_ns, worst.end_ns) and canvas.idle_gpus == (0, 1)
        assert canvas.view.start_ns < worst.start_ns and worst.end_ns < canvas.view.end_ns < 2 * STEP_NS
        text = text_of(bubbles)
        assert "640 µs" in text and "GPU 0-1" in text and "The GPUs wait for launches" in text
        assert "ended by  MemcpyH2D, launched by launch 0" in text and "the host meanwhile" in text
        assert "idle on GPUs 0-1" in told(screen)
        await pilot.press("down")
        assert bubbles.at == 1 and canvas.gap == (timeline.bubbles[1].start_ns, timeline.bubbles[1].end_ns)
        await pilot.press("pagedown", "pagedown", "pagedown")
        assert bubbles.at == len(timeline.bubbles) - 1
        await pilot.press("home", "up")
        assert bubbles.at == 0
        await pilot.press("enter")
        assert isinstance(pilot.app.screen, FindingPopup)
        await pilot.press("t")
        assert screen.is_current and bubbles.at == 0
        await pilot.press("tab")
        assert canvas.has_focus and bubbles.display
        await pilot.press("o")
        assert canvas.selected is not None and canvas.selected.name == "MemcpyH2D", "what ended it"
        await pilot.press("b")
        assert bubbles.has_focus
        await pilot.press("escape")
        assert not bubbles.display and canvas.has_focus and screen.is_current


async def test_a_place_without_a_finding_tells_of_itself() -> None:
    async with shown() as (pilot, _, _canvas):
        await pilot.press("g", "enter")
        assert isinstance(pilot.app.screen, Popup) and not isinstance(pilot.app.screen, FindingPopup)


async def test_the_mouse() -> None:
    async with shown() as (pilot, screen, canvas):
        canvas.look(canvas.view.at(300_000, 450_000))
        await pilot.pause()
        y = next(y for y, line in enumerate(picture(canvas)) if "sgemm_1" in line)
        x = picture(canvas)[y].index("sgemm_1")
        await pilot.click(canvas, offset=(x, y))
        assert canvas.selected is not None and canvas.selected.name == "sgemm_1"
        await pilot.click(canvas, offset=(x, y))
        assert isinstance(pilot.app.screen, Popup)
        await pilot.press("escape")
        before = canvas.view
        under = before.time(x - canvas.label_cells + 0.5, canvas.cells)
        scroll = {"x": x, "y": y, "delta_x": 0, "delta_y": 0, "button": 0, "shift": False, "meta": False,
                  "ctrl": False, "screen_x": x, "screen_y": y}
        canvas.post_message(events.MouseScrollUp(canvas, **scroll))
        await pilot.pause()
        assert canvas.view.span_ns < before.span_ns
        assert canvas.view.time(x - canvas.label_cells + 0.5, canvas.cells) == pytest.approx(under, abs=2000)
        canvas.post_message(events.MouseScrollDown(canvas, **scroll))
        canvas.post_message(events.MouseScrollDown(canvas, **{**scroll, "shift": True}))
        await pilot.pause()
        assert canvas.view.start_ns > before.start_ns and canvas.view.span_ns == pytest.approx(before.span_ns, abs=2)

        start = canvas.view.start_ns
        await pilot.mouse_down(canvas, offset=(x, y))
        await pilot.hover(canvas, offset=(x - 10, y))
        await pilot.mouse_up(canvas, offset=(x - 10, y))
        assert canvas.view.start_ns - start == pytest.approx(10 * canvas.view.span_ns / canvas.cells, rel=0.02)
        assert canvas.selected is not None and canvas.selected.name == "sgemm_1", "a drag selects nothing"

        await pilot.press("0")
        idle = canvas.view.column(900_000, canvas.cells) + canvas.label_cells
        y = next(i for i, line in enumerate(picture(canvas)) if "GPU 1" in line[:canvas.label_cells])
        await pilot.click(canvas, offset=(idle, y))
        assert canvas.gap == (710_000, 1_030_000) and canvas.place is not None and canvas.place.label == "GPU 1"
        await pilot.click(canvas, offset=(1, y))
        assert not canvas.places[canvas.index].folded or canvas.places[canvas.index].fold is not None
        await pilot.press("plus", "plus")
        await pilot.click(canvas, offset=(canvas.label_cells + canvas.cells // 2, 0))
        assert canvas.view.start_ns < 2_000_000 < canvas.view.end_ns, "a click on the line above goes there"
        await pilot.press("b")
        bubbles = screen.query_one(BubbleList)
        await pilot.click(bubbles, offset=(5, 3))
        assert bubbles.at == 2
        await pilot.click(bubbles, offset=(5, 3))
        assert isinstance(pilot.app.screen, Popup)


async def test_report_help_and_leaving() -> None:
    async with shown() as (pilot, screen, _):
        for key in ("r", "question_mark"):
            await pilot.press(key)
            assert isinstance(pilot.app.screen, Popup)
            await pilot.press("escape")
            assert screen.is_current
        await pilot.press("q")
        await pilot.pause()
        assert not screen.is_attached


def described_keys() -> set[str]:
    keys = set()
    for widget in (TimelineScreen, TimelineCanvas, BubbleList):
        for binding in widget.BINDINGS:
            keys |= set(binding.key.split(","))  # type: ignore[union-attr]
    return keys


def test_the_keys_do_not_clash_between_screen_and_picture() -> None:
    screen, canvas = ({k for b in w.BINDINGS for k in b.key.split(",")}  # type: ignore[union-attr]
                      for w in (TimelineScreen, TimelineCanvas))
    assert not screen & canvas


SIZES = [(1, 1), (20, 5), (40, 10), (80, 24), (120, 40), (200, 60)]


@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
async def test_every_key_at_every_size(size: tuple[int, int]) -> None:
    async with shown(size=size, findings=[LAUNCH_BOUND]) as (pilot, screen, canvas):
        for key in sorted(described_keys() - {"q", "escape", "slash", "greater_than_sign", "less_than_sign"}):
            await pilot.press(key)
            while not screen.is_current:
                await pilot.press("escape")
                await pilot.pause()
            assert all(strip.cell_length == canvas.size.width
                       for strip in (canvas.render_line(y) for y in range(canvas.size.height)))
        await pilot.resize_terminal(30, 8)
        await pilot.resize_terminal(120, 40)
        await pilot.pause()
        assert "GPU 0" in "\n".join(picture(canvas))


def empty() -> Timeline:
    return timeline_of(Builder(gpus=0).build())


def no_host_events() -> Timeline:
    b = Builder()
    for i in range(50):
        b.run(0, 100.0 * i, 60, "kernel")
    return timeline_of(b.build())


def no_gpu() -> Timeline:
    b = Builder(gpus=0)
    for i in range(5):
        b.host("train", 100.0 * i, 60, step_num=i, _r=1)
    return timeline_of(b.build())


def one_event_of_no_length() -> Timeline:
    return timeline_of(Builder().run(0, 5, 0, "[red]a[/] \x1b[31m").build())


@pytest.mark.parametrize("make", [empty, no_host_events, no_gpu, one_event_of_no_length])
async def test_traces_with_little_in_them(make: Callable[[], Timeline]) -> None:
    async with shown(make()) as (pilot, screen, canvas):
        for key in sorted(described_keys() - {"q", "escape", "slash", "greater_than_sign", "less_than_sign"}):
            await pilot.press(key)
            while not screen.is_current:
                await pilot.press("escape")
                await pilot.pause()
            assert "\x1b" not in "".join(picture(canvas))
        await pilot.press("slash", *"train", "enter")
        await pilot.pause()
        assert screen.is_current


# -- reading ----------------------------------------------------------------------------------


async def test_reading_can_be_given_up() -> None:
    began, asked = threading.Event(), []

    def read(paths: Sequence[str], stop: threading.Event) -> Timeline:
        asked.append(stop)
        began.set()
        stop.wait(20)
        raise GputopError("The timeline was stopped.")

    app = TimelineApp(replace(trace_file(timeline_of(job())), open=read))
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
    for error in (GputopError("The file is [b]cut[/b] off.", "Capture again."), ValueError("odd")):
        def read(paths: Sequence[str], stop: threading.Event, error: Exception = error) -> Timeline:
            raise error

        app = TimelineApp(replace(trace_file(timeline_of(job())), open=read))
        async with app.run_test() as pilot:
            await refused(pilot)
            shown_text = text_of(app.screen.query_one("#reading", LinesWidget))
            assert "[b]cut[/b]" in shown_text or "gputop's own fault" in shown_text
            assert "/traces/run/node.xplane.pb" in shown_text
            await pilot.press("n", "b", "plus", "escape")


async def test_a_lost_file_says_so_and_a_real_one_is_read_in_a_worker(tmp_path: Path) -> None:
    from gputop.simulation.loop import TrainingLoop
    from gputop.simulation.scenarios import find_scenario
    from gputop.simulation.xspace import build_xspace

    path = tmp_path / "node.xplane.pb"
    app = TimelineApp(TraceFile((str(path),), path.name))
    async with app.run_test() as pilot:
        await refused(pilot)
    second = 1_000_000_000
    path.write_bytes(build_xspace(TrainingLoop(find_scenario("input-bound")), 3 * second, 4 * second, 0, "node"))
    trace = TraceFile((str(path),), path.name)
    app = TimelineApp(trace)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: trace.analysed)
        screen = app.screen
        assert isinstance(screen, TimelineScreen)
        assert "SIMULATED" in text_of(screen.query_one("#timeline-header", LinesWidget))
        assert "Prefetch" in "\n".join(picture(screen._canvas))
        await until(pilot, lambda: bool(screen._bubbles.titles))
        assert trace.timeline is not None and screen._bubbles.titles["input_bound"]
        assert "tf_Compute" in "\n".join(picture(screen._canvas))


# -- where findings are -----------------------------------------------------------------------


def test_the_place_of_a_finding() -> None:
    timeline = timeline_of(job())
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


class CapturedSession(StillSession):
    def __init__(self) -> None:
        super().__init__()
        self.last_capture = CaptureRecord(
            "127.0.0.1:6009", Path("/traces/run/node.xplane.pb"), START_S + self.tick - 12, 10.0, 10.4,
            analysis={"findings": [LAUNCH_BOUND.to_json()]}, report="where the step goes")
        self._refresh_findings()


async def test_from_the_monitor_and_from_a_finding() -> None:
    session = CapturedSession()
    app = GputopApp(session)
    timeline = timeline_of(job())
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert session.last_capture is not None
        app.trace = trace_of(session.last_capture, None)
        app.trace.timeline = timeline
        await pilot.press("t")
        assert isinstance(app.screen, TimelineScreen) and app.screen._canvas.timeline is timeline
        assert trace_of(session.last_capture, app.trace) is app.trace and app.trace.title == "run/node.xplane.pb"
        session.feed()
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
        assert app.screen._bubbles.display and app.screen._canvas.gap is not None
        await pilot.press("q")
        live = replace(LAUNCH_BOUND, origin="live")
        app.push_screen(FindingPopup(live, lambda f: pytest.fail("a live finding has no place")))
        await pilot.press("t")
        assert "live figures" in notes(pilot)
        lost = replace(session.last_capture, path=Path("/other"))
        assert trace_of(lost, app.trace).timeline is None
        with pytest.raises(AttributeError):  # the one before was closed
            timeline.coverage(0, 0, 1, 1)


async def test_without_a_trace_the_text_is_shown() -> None:
    session = CapturedSession()
    assert session.last_capture is not None
    session.last_capture = replace(session.last_capture, problem=GputopError("cut off", "again"))
    app = GputopApp(session)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("t")
        assert isinstance(app.screen, Popup) and not isinstance(app.screen, TimelineScreen)
        await pilot.press("escape")
        session.last_capture = None
        await pilot.press("t")
        assert "No capture yet" in notes(pilot)


def test_on_the_command_line_it_needs_a_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["analyze", str(tmp_path), "--timeline"]) == 2
    assert "--timeline needs a terminal" in capsys.readouterr().err
