"""Themes, and the whole screen in each form of colors and glyphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from gputop.commands import settings
from gputop.commands.settings import save_setting
from gputop.core.findings import Advice
from gputop.core.samples import GpuSample, NodeSample
from gputop.diagnosis.diagnose import analyze_trace
from gputop.render.palette import SCHEMES
from gputop.trace.readers.load import load
from gputop.tui.app import GputopApp
from gputop.tui.monitor.findings_panel import ActionsPanel
from gputop.tui.terminal.color_support import DEFAULT_THEME, Preferences
from tests.records import replace
from tests.tui.found import FoundSession, piloted
from tests.tui.goldens import FORMS, cells, wear
from tests.tui.textual_private import messages, screen_strips


def shown(app: GputopApp) -> list[str]:
    """The screen's lines as they go to the terminal."""
    strips = screen_strips(app)
    return ["".join(segment.text for segment in strip).rstrip() for strip in strips]


def colors(app: GputopApp) -> set[str]:
    """The kinds of colors on the screen."""
    strips = screen_strips(app)
    found = [color for strip in strips for segment in strip if segment.style
             for color in (segment.style.color, segment.style.bgcolor) if color is not None]
    return {color.type.name for color in found if not color.is_default}


def test_the_main_screen_in_high_contrast(snap_compare: Any) -> None:
    assert snap_compare(GputopApp(FoundSession(), FORMS["contrast"]), terminal_size=(120, 40))


@pytest.mark.parametrize("form", FORMS)
async def test_an_app_starts_in_the_form_that_another_one_takes_on(form: str) -> None:
    """What each form looks like: tests/tui/test_golden.py."""
    pictures = []
    for preferences in (FORMS[form], Preferences()):
        async with piloted(FoundSession(), preferences=preferences) as (app, pilot):
            if app.preferences != FORMS[form]:
                await wear(app, pilot, FORMS[form])
            pictures.append(cells(app))
    assert pictures[0] == pictures[1]


@pytest.mark.parametrize("form", ["none", "ascii", "16", "console"])
async def test_levels_are_distinguishable_without_color(form: str) -> None:
    def half(gpu: GpuSample, tick: int) -> GpuSample:
        level = {0: 0.0, 1: 0.5, 2: 1.0}.get(gpu.info.index, float(tick % 2))
        return replace(gpu, readings={**gpu.readings, "sm_active": replace(gpu["sm_active"], value=level)})

    async with piloted(FoundSession(change=half), preferences=FORMS[form]) as (app, _):
        lines = shown(app)
        top = next(i for i, line in enumerate(lines) if line.startswith(" 0 "))
        rows = [tuple(line[30:40] for line in lines[i:i + 3]) for i in range(top, top + 12, 3)]
        assert len(set(rows)) == 4, f"idle, half busy, busy, and busy half of the time: {rows}"


async def test_a_theme_chosen_in_the_palette_is_remembered_and_all_of_the_screen_follows(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    remembered = Preferences(keep_theme=lambda name: save_setting(file, "theme", name))
    async with piloted(FoundSession(), preferences=remembered) as (app, pilot):
        before = app.export_screenshot()
        assert SCHEMES["dark"].names["strong"] in before and not file.exists()
        for theme in ("gputop-light", "gputop-contrast", "nord", DEFAULT_THEME):
            app.theme = theme
            await pilot.pause()
            assert settings.load(file)["theme"] == theme
            seen = app.export_screenshot()
            if theme == "gputop-light":
                assert SCHEMES["light"].names["strong"] in seen
                assert SCHEMES["dark"].names["text"] not in seen and SCHEMES["dark"].names["ground"] not in seen
        assert app.export_screenshot() == before


async def test_a_theme_that_cannot_be_remembered_is_worn_all_the_same() -> None:
    forgotten = Preferences(keep_theme=lambda _: "the disk is full")
    async with piloted(FoundSession(), (80, 24), preferences=forgotten, notifications=True) as (app, pilot):
        app.theme = "gputop-light"
        await pilot.pause()
        assert any("the disk is full" in message for message in messages(app))


async def test_what_is_wrong_with_the_settings_is_said_on_the_screen() -> None:
    preferences = Preferences(theme="no[such]", warnings=("/c.toml:3: interval = [b]; 1 is used",))
    async with piloted(FoundSession(), preferences=preferences, notifications=True) as (app, _):
        warnings = messages(app)
        assert any("/c.toml:3: interval = [b]" in m for m in warnings)
        assert any("no theme no[such]" in m for m in warnings)
        assert app.theme == DEFAULT_THEME


async def test_metric_and_span_begin_as_the_settings_say() -> None:
    from gputop.tui.monitor.gpu_table import GpuTable

    async with piloted(FoundSession(), preferences=Preferences(metric="tensor_active", span_s=600.0)) as (app, _):
        table = app.query_one(GpuTable)
        assert table.metric == "tensor_active" and table.time.span_s == 600.0


HOSTILE = "[bold red]\x1b[2J\x1b]0;owned\x07evil[/] \u202eabc"


class Hostile(FoundSession):
    """Everything that has a name from outside has a bad one."""

    def __init__(self) -> None:
        super().__init__(ticks=60, change=lambda gpu, _: replace(gpu, info=replace(gpu.info, name=HOSTILE)))
        make = self._make

        def named(tick: int) -> NodeSample:
            sample = make(tick)
            process = replace(sample.processes[0], user=HOSTILE, command=HOSTILE, container=HOSTILE)
            return replace(sample, host=replace(sample.host, hostname=HOSTILE), processes=(process,), source=HOSTILE)

        self._make = named
        self.advance(3)
        self.watch.servers = (replace(self.watch.servers[0], description=HOSTILE),)
        self.results.last_capture = replace(self.results.last_capture, path=Path("/tmp") / HOSTILE, report=HOSTILE,
                                            notes=(HOSTILE,))
        self.results.findings = tuple(replace(f, title=HOSTILE, why=HOSTILE, action=HOSTILE, snippet=HOSTILE,
                                      evidence={HOSTILE: 1.0}) for f in self.results.findings)
        self.results.live = Advice(limit=HOSTILE)
        self.results.refresh = lambda: None  # type: ignore[method-assign]  # the findings stay as they are


async def shown_after(app: GputopApp, pilot: Pilot[Any], *keys: str) -> str:
    """The screen after these keys, pressed on the recommendations of the main screen."""
    while len(app.screen_stack) > 1:
        app.pop_screen()
    app.query_one(ActionsPanel).focus()
    await pilot.press(*keys)
    app.notify("a note", timeout=1)
    await pilot.pause()
    text = "\n".join(shown(app))
    assert not {c for c in text if not c.isprintable() and c != "\n"}, "no control characters, no bidi overrides"
    return text


async def test_hostile_names_are_shown_literally_on_every_screen() -> None:
    async with piloted(Hostile(), (160, 50), notifications=True) as (app, pilot):
        for keys in ((), ("enter",), ("question_mark",), ("slash", *"evil"), ("tab",), ("tab", "tab", "enter"),
                     ("ctrl+p", *"cap"), ("t",), ("m", "v", "left")):
            assert "[bold red]" in await shown_after(app, pilot, *keys), keys


def _event(name: str, begin_us: float, duration_us: float, category: str, tid: int = 7,
           **args: object) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 0 if "device" in args else 7, "tid": tid, "ts": begin_us,
            "dur": duration_us, "args": args}


@pytest.fixture(scope="module")
def hostile_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a PyTorch job that chose the names of its steps, ops, kernels, groups of ranks, threads and GPU."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": name, "pid": 7, "tid": 7, "args": {"name": HOSTILE}}
                                    for name in ("process_name", "thread_name")]
    for step in range(40):
        at = 1e12 + 1e4 * step
        events += [_event(f"Optimizer.step#{HOSTILE}.step", at, 9000, "user_annotation"),
                   _event(f"aten::{HOSTILE}", at + 10, 5000, "cpu_op"),
                   _event(f"{HOSTILE}.py(3): {HOSTILE}", at + 5, 6000, "python_function", **{"Python id": step}),
                   _event(f"{HOSTILE}_gemm", at + 50, 4000, "kernel", device=0, stream=7, correlation=step),
                   _event(f"ncclDevKernel_AllReduce_{HOSTILE}", at + 5000, 3000, "kernel", 8, device=0, stream=8, **{
                       "Collective name": HOSTILE, "Process Group Name": HOSTILE, "dtype": HOSTILE})]
    path = tmp_path_factory.mktemp("hostile") / "host.pt.trace.json"
    path.write_text(json.dumps({
        "schemaVersion": 1, "baseTimeNanoseconds": 1790857026000000000,
        "deviceProperties": [{"id": 0, "name": HOSTILE}],
        "distributedInfo": {"backend": HOSTILE, "rank": 0, "world_size": 2}, "traceEvents": events}))
    return path


async def test_hostile_names_of_a_trace_are_shown_literally_on_every_screen(hostile_trace: Path) -> None:
    session = Hostile()
    session.results.last_capture = replace(session.results.last_capture, analysis=analyze_trace(load([hostile_trace])))
    session.results.findings = session.results.last_capture.findings
    async with piloted(session, (180, 60), notifications=True) as (app, pilot):
        for keys in ((*"T",), (*"T2",), (*"T4",), (*"T6",), (*"T8",), (*"T0",), (*"TR",), ("T", "enter"), (*"J",),
                     (*"i",), (*"h",), ("enter", "y"), (*"B",), (*"S",), (*"w",)):
            text = await shown_after(app, pilot, *keys)
            assert "evil" in text or keys not in (("T",), ("T", "enter")), keys
