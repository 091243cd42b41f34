"""The timeline's picture: what it looks like, at any size, and of traces with little in them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
from textual.pilot import Pilot

from gputop.core.findings import TraceNote
from gputop.timeline.read_timeline import Timeline
from gputop.tui.timeline.canvas import TimelineCanvas
from gputop.tui.timeline.idle_gap_list import IdleGapList
from gputop.tui.timeline.timeline_screen import TimelineScreen
from gputop.tui.timeline.viewport import View
from gputop.tui.timeline_app import TimelineApp
from tests.records import replace
from tests.timeline.make import timeline_of
from tests.trace.build import Builder
from tests.tui.timelines import (
    LAUNCH_BOUND,
    details,
    header_of,
    job,
    job_timeline,
    line_of,
    picture,
    shown,
    trace_file,
)


def test_what_it_looks_like(snap_compare: Callable[..., bool]) -> None:
    app = TimelineApp(replace(trace_file(job_timeline(gpus=4), LAUNCH_BOUND), timeline=job_timeline(gpus=4)))
    assert snap_compare(app, terminal_size=(120, 40), press=("plus", "plus", "down", "full_stop", "full_stop"))


async def test_the_whole_capture_is_shown_first() -> None:
    async with shown() as (_, screen, canvas):
        assert canvas.view.is_whole and canvas.has_focus
        lines = picture(canvas)
        assert "step 1" in lines[2] and "step 3" in lines[2]
        assert "0 ms" in lines[1] and "busy" in lines[1]
        assert "▇" in line_of(canvas, "GPU 0") and "train" in line_of(canvas, "python")
        assert line_of(canvas, "GPU 0").rstrip().endswith("%")
        header = header_of(screen)
        assert "node.xplane.pb" in header and "3 steps" in header and "SIMULATED" not in header
        assert "4.0 ms shown" in details(screen) and "costly idle gaps" in details(screen)


@pytest.mark.parametrize(("lost", "note"), [
    (("dropped_events",), " events dropped (r) "), (("no_steps",), None),
    (("clipped", "dropped_events", "clipped"), " clipped, events dropped (r) ")])
async def test_a_trace_that_lost_events_says_so(lost: tuple[str, ...], note: str | None) -> None:
    trace = job()
    trace.quality += [TraceNote(id_, "the profiler says so") for id_ in lost]
    async with shown(timeline_of(trace)) as (pilot, screen, _):
        for size in ((40, 12), (80, 24), (200, 60)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            header = header_of(screen)
            assert note in header if note else "(r)" not in header
            assert len(header) <= size[0]


async def test_a_little_is_not_nothing() -> None:
    b = Builder()
    b.run(0, 0, 2, "short", stream=1)
    b.run(0, 900, 100, "long", stream=2)
    async with shown(timeline_of(b.build())) as (_, _, canvas):
        assert line_of(canvas, "Stream #1").endswith("<1% ")
        canvas.set_view(canvas.view.at(100_000, 500_000))
        assert line_of(canvas, "Stream #1").endswith(" 0% ")


KEYS = {key for widget in (TimelineScreen, TimelineCanvas, IdleGapList) for binding in widget.BINDINGS
        for key in binding.key.split(",")}


async def every_key(pilot: Pilot[int], screen: TimelineScreen) -> AsyncIterator[str]:
    """The keys that are described, each once it was pressed and what it opened was closed."""
    for key in sorted(KEYS - {"q", "escape", "slash", "greater_than_sign", "less_than_sign"}):
        await pilot.press(key)
        while not screen.is_current:
            await pilot.press("escape")
            await pilot.pause()
        yield key


@pytest.mark.parametrize("size", [(1, 1), (20, 5), (80, 24), (200, 60)], ids=lambda s: f"{s[0]}x{s[1]}")
async def test_every_key_at_every_size(size: tuple[int, int]) -> None:
    async with shown(size=size, findings=[LAUNCH_BOUND]) as (pilot, screen, canvas):
        async for _ in every_key(pilot, screen):
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
        async for _ in every_key(pilot, screen):
            assert "\x1b" not in "".join(picture(canvas))
        await pilot.press("slash", *"train", "enter")
        await pilot.pause()
        assert screen.is_current


async def test_zoomed_in_ranges_have_their_names() -> None:
    async with shown() as (pilot, _, canvas):
        canvas.set_view(View.whole(canvas.view.window_ns).at(300_000, 450_000))
        await pilot.pause()
        line = "\n".join(picture(canvas))
        assert "dense_0/MatMul" in line and "dense_1/MatMul" in line and "ncclDevKernel_" in line
        await pilot.press("0")
        assert "dense_0/MatMul" not in "\n".join(picture(canvas))
