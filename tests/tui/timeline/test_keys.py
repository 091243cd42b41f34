"""The timeline's screen under a pilot: every key, the mouse."""

from __future__ import annotations

import pytest
from textual import events

from gputop.tui.screens.dialogs import Popup
from gputop.tui.screens.finding import FindingPopup
from gputop.tui.timeline.canvas import TimelineCanvas
from gputop.tui.timeline.idle_gap_list import IdleGapList
from gputop.tui.timeline.timeline_screen import TimelineScreen
from tests.records import replace
from tests.tui.found import box_text
from tests.tui.timelines import (
    LAUNCH_BOUND,
    STEP_NS,
    details,
    job_timeline,
    line_of,
    notes,
    picture,
    press_to,
    shown,
    text_of,
)


async def test_pan_zoom_and_the_way_back() -> None:
    async with shown() as (pilot, _, canvas):
        window = canvas.view.window_ns
        await pilot.press("plus", "plus")
        zoomed = canvas.view
        assert zoomed.span_ns == pytest.approx((window[1] - window[0]) / 4, abs=4)
        assert zoomed.start_ns == window[0], "about the cursor, which is at the begin"
        for later, earlier, share in (("right", "left", 0.125), ("L", "H", 1)):
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
        assert "no zoom or jump" in notes(pilot)


async def test_ranges_gaps_and_details_by_key() -> None:
    async with shown() as (pilot, screen, canvas):
        await press_to(pilot, canvas, "GPU 0")
        await pilot.press("full_stop")
        assert canvas.selected is not None and canvas.selected.name == "MemcpyH2D"
        assert "MemcpyH2D" in details(screen) and "30.0 µs" in details(screen)
        assert "copy host → device" in details(screen)
        assert "step 1 +20.0 µs" in details(screen)
        await pilot.press("full_stop")
        assert canvas.selected is not None and canvas.selected.name == "sgemm_0"
        assert "op model/dense_0/MatMul" in details(screen)
        assert "launched 10.0 µs earlier by launch 0" in details(screen)
        await pilot.press("comma")
        assert canvas.selected is not None and canvas.selected.name == "MemcpyH2D"
        await pilot.press("comma")
        assert "No earlier range on GPU 0" in notes(pilot)

        await pilot.press("n")
        assert canvas.gap == (60_000, 310_000) and canvas.selected is None
        assert "idle on GPU 0" in details(screen) and "250 µs" in details(screen)
        assert "the next launch is late" in details(screen) and canvas.linked is not None
        assert canvas.linked.name == "sgemm_0", "what ended it; o goes there"
        await pilot.press("n")
        assert canvas.gap == (710_000, 1_030_000), "the gaps of 5 µs are less than a cell at this zoom"
        await pilot.press("N")
        assert canvas.gap == (60_000, 310_000)
        await pilot.press("z")
        assert canvas.view.start_ns < 60_000 < 310_000 < canvas.view.end_ns and canvas.view.span_ns < 600_000
        await pilot.press("enter")
        assert isinstance(pilot.app.screen, Popup)
        pilot.app.clear_notifications()  # esc would clear them first
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
        assert "starts sgemm_0 on GPU 1" in details(screen)
        await pilot.press("o")
        assert canvas.selected == kernel and canvas.place.rows[0].gpu == 1
        await press_to(pilot, canvas, "python")
        await pilot.press("full_stop", "o")
        assert "other end is not" in notes(pilot)


async def test_rows_fold_and_unfold() -> None:
    async with shown(size=(100, 19)) as (pilot, _, canvas):
        labels = [p.label for p in canvas.places]
        assert "  Stream #1" not in labels, "eight lines more than there are"
        await press_to(pilot, canvas, "GPU 0")
        await pilot.press("e")
        assert [p.label for p in canvas.places][canvas.index + 1:][:3] == ["  Stream #1", "  Stream #2", "  Stream #3"]
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
        canvas.set_view(canvas.view.at(10_000, 1_000_000))
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
        assert "nothing inside launch 0" in notes(pilot)


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
        assert canvas.selected == first and len(set(seen)) == 8, "four steps on two GPUs"
        await pilot.press("less_than_sign")
        assert (canvas.selected.row, canvas.selected.index) == seen[-1]
        await pilot.press("slash")
        await pilot.press(*["backspace"] * 7, *"no such [b]", "enter")
        await pilot.pause()
        assert "No range or op name contains “no such [b]”" in notes(pilot)
        assert screen.is_current


async def test_the_idle_places() -> None:
    other = replace(LAUNCH_BOUND, id="input_bound", title="Another")
    async with shown(findings=[other, LAUNCH_BOUND]) as (pilot, screen, canvas):
        timeline = canvas.timeline
        assert timeline is not None and timeline.idle_gaps[0].finding == "launch_bound"
        await pilot.press("b")
        idle_gaps = screen.query_one(IdleGapList)
        assert idle_gaps.display and idle_gaps.has_focus
        worst = timeline.idle_gaps[0]
        assert canvas.gap == (worst.start_ns, worst.end_ns) and canvas.idle_gpus == (0, 1)
        assert canvas.view.start_ns < worst.start_ns and worst.end_ns < canvas.view.end_ns < 2 * STEP_NS
        text = text_of(idle_gaps)
        total = timeline.idle_totals[0]
        assert total.cause == worst.cause and f"in {total.gaps} gaps: the next launch is late" in text
        assert "The GPUs wait for launches" in text and "the host during the" in text
        assert "640 µs of GPU time on GPU 0-1" in text and "idle on GPUs 0-1" in details(screen)
        assert len(idle_gaps.entries) == len(timeline.idle_totals)
        await pilot.press("enter", "down")
        text = text_of(idle_gaps)
        assert "ended by  MemcpyH2D, launched by launch 0" in text and "the host meanwhile" in text
        assert idle_gaps.at == 1 and canvas.gap == (worst.start_ns, worst.end_ns)
        await pilot.press("down")
        own = [gap for gap in timeline.idle_gaps if total.holds(gap)]
        assert idle_gaps.at == 2 and canvas.gap == (own[1].start_ns, own[1].end_ns)
        await pilot.press("pagedown", "pagedown", "pagedown")
        assert idle_gaps.at == len(idle_gaps.entries) - 1 == len(own) + len(timeline.idle_totals) - 1
        await pilot.press("home", "down", "left")
        assert idle_gaps.at == 0 and len(idle_gaps.entries) == len(timeline.idle_totals)
        await pilot.press("right", "down", "enter")
        assert isinstance(pilot.app.screen, FindingPopup)
        await pilot.press("t")
        assert screen.is_current and idle_gaps.at == 1
        await pilot.press("tab")
        assert canvas.has_focus and idle_gaps.display
        await pilot.press("o")
        assert canvas.selected is not None and canvas.selected.name == "MemcpyH2D", "what ended it"
        await pilot.press("b")
        assert idle_gaps.has_focus
        await pilot.press("escape")
        assert not idle_gaps.display and canvas.has_focus and screen.is_current


async def test_without_a_gpu_the_list_says_where_the_gaps_are() -> None:
    async with shown(job_timeline(gpus=0)) as (pilot, screen, _):
        await pilot.press("b")
        text = text_of(screen.query_one(IdleGapList))
        assert "This trace has no GPU" in text and "T)" in text


async def test_a_gap_tells_of_its_finding_with_the_step_times_that_the_panel_has() -> None:
    timed = replace(LAUNCH_BOUND, gain=replace(LAUNCH_BOUND.gain, before_s=0.2))
    async with shown(findings=[timed]) as (pilot, _, canvas):
        await press_to(pilot, canvas, "GPU 0")
        await pilot.press("n", "enter")
        assert "The GPUs wait for launches" in box_text(pilot.app)
        await pilot.press("escape", "g", "enter", "down", "enter")
        assert isinstance(pilot.app.screen, FindingPopup) and "fix: 200 → 120 ms at best" in box_text(pilot.app)


async def test_a_place_without_a_finding_tells_of_itself() -> None:
    async with shown() as (pilot, _, _canvas):
        await pilot.press("g", "enter", "down", "enter")
        assert isinstance(pilot.app.screen, Popup) and not isinstance(pilot.app.screen, FindingPopup)


async def test_the_mouse() -> None:
    async with shown() as (pilot, _, canvas):
        canvas.set_view(canvas.view.at(300_000, 450_000))
        await pilot.pause()
        y = next(y for y, line in enumerate(picture(canvas)) if "dense_1/MatMul" in line)
        x = picture(canvas)[y].index("dense_1/MatMul")
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

        view = canvas.view
        canvas.post_message(events.MouseScrollDown(canvas, **{**scroll, "x": 2}))
        await pilot.pause()
        assert canvas.view == view, "over the labels it goes through the rows"

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


def test_the_keys_do_not_clash_between_screen_and_picture() -> None:
    screen, canvas = ({k for b in w.BINDINGS for k in b.key.split(",")}  # type: ignore[union-attr]
                      for w in (TimelineScreen, TimelineCanvas))
    assert screen & canvas == {"n", "N"}, "which go on with a search from what it found"
