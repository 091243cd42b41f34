"""Every screen as text, some in every form of colors: golden files of two sizes, see :mod:`tests.tui.goldens`. At other
sizes a screen is drawn that no other test draws there (test_app, test_timeline, test_dialog_frame), and nothing is
compared.

Each screen is opened anew at each size, in one app that is resized. Compared are the cells that go to the terminal.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from textual.pilot import Pilot
from textual.widget import Widget

from gputop.analysis.results import HostStacks
from gputop.core.codec import from_document
from gputop.profiler.capture.choose_workers import Choice, choose_workers
from gputop.profiler.capture.records import CaptureStatus
from gputop.profiler.capture.request import ask_workers
from gputop.ranks.model import RasReport
from gputop.tui import open_screens
from gputop.tui.app import GputopApp
from gputop.tui.monitor.findings_panel import ActionsPanel
from gputop.tui.monitor.gpu_table import GpuTable
from gputop.tui.monitor.process_panel import ProcessPanel
from gputop.tui.terminal.color_support import Preferences
from tests.records import replace
from tests.tui.goldens import FOLDER, FORMS, Goldens, cells, wear
from tests.tui.scenes import (
    ADDRESS,
    Scene,
    recorded,
    snapshot_of,
    trace_of,
    with_coarse,
    with_faults,
    with_mig,
    with_only,
    with_sixteen,
    without_gpus,
)
from tests.tui.screens.tabled import STACKS
from tests.tui.textual_private import draw_when_settled

TINY, SMALL, USUAL, WIDE, HUGE = (20, 5), (40, 12), (80, 24), (120, 40), (200, 50)
SIZES = (TINY, SMALL, USUAL, WIDE, HUGE)
BOTH = (USUAL, WIDE)
USUAL_FORMS = {form: FORMS[form] for form in ("256", "16", "none", "ascii", "light", "contrast")}
FEW_FORMS = {form: FORMS[form] for form in ("16", "ascii", "light")}
GLYPHS = {"ascii": FORMS["ascii"]}  # where other screens have each pair of colors in the other forms


@dataclass(frozen=True)
class Screen:
    """One of them: over which session, what opens it, at which sizes it is drawn and in which forms."""

    over: str | Callable[[Path], Any] = "faulty"
    keys: tuple[str, ...] = ()
    sizes: Sequence[tuple[int, int]] = (USUAL,)
    forms: Mapping[str, Preferences] = field(default_factory=dict)
    in_forms: Sequence[tuple[int, int]] = ()  # the sizes at which these are drawn; colors are held there and at USUAL
    focus: type[Widget] = ActionsPanel
    prepare: Callable[[Any], Any] = lambda app: None  # before the keys
    notices: bool = False
    anew: bool = False  # in an app of its own at each size: its keys change the main screen


def capturing(app: GputopApp) -> None:
    app.session.control.set_status(CaptureStatus("recording", ADDRESS, 10.0, 3.2, chosen_s=4.1,
                                          why="the job emits 240 k events/s"))


def compared() -> Scene:
    scene = Scene("healthy")
    scene.capture("input-bound", 95.0)
    scene.results.baseline = scene.results.captures[0]
    scene.capture("healthy", 12.0)
    return scene


def epoch_ended() -> Scene:
    """A capture of the healthy job in which an epoch ends: with an evaluation, and a checkpoint that all GPUs wait for.
    """
    scene = Scene("healthy")
    scene.capture(epoch=True)
    return scene


def hanging() -> Scene:
    """A job of which NCCL has told for a minute and a half that a rank does not come."""
    scene = Scene("hang")
    answer = replace(scene._simulated_ranks.ask((), frozenset()), time_s=scene.now_s)
    first = replace(answer, time_s=scene.now_s - 90.0)
    scene.rank_watch.report = RasReport(first, answer, hosts=scene._simulated_ranks.hosts())
    scene.advance()
    return scene


def captured(scenario: str) -> Scene:
    scene = Scene(scenario)
    scene.capture()
    return scene


MADE: dict[str, Callable[[], Scene]] = {
    "faulty": lambda: captured("gpu0-oversubscribed"), "healthy": lambda: captured("healthy"),
    "input-bound": lambda: captured("input-bound"), "epoch": epoch_ended, "compared": compared, "hanging": hanging,
    "lost": lambda: Scene("input-bound", with_faults), "unserved": lambda: Scene("input-bound", served=False),
    "capturing": lambda: Scene("healthy"), "waiting": lambda: Scene(watched=False),
    "no-gpu": lambda: Scene(change=without_gpus), "mig": lambda: Scene(change=with_mig),
    "sixteen": lambda: Scene(change=with_sixteen), "coarse": lambda: Scene("input-bound", with_coarse),
    **{name: partial(Scene, "input-bound", with_only(count)) for name, count in (("one", 1), ("two", 2), ("four", 4))},
}


@cache
def node(name: str) -> Scene:
    """The sessions; screens that change nothing in them share one."""
    return MADE[name]()


def asked_which(app: GputopApp) -> None:
    workers = [f"n{number:02}:6009" for number in range(1, 33)]
    figures = {worker: 0.9 - 0.01 * number for number, worker in enumerate(workers)}
    choice = choose_workers(workers, figures, "SM active of the last 60 s", lambda value: f"{value:.0%}")
    ask_which(app, choice)


def waiting_for_idle(app: GputopApp) -> None:
    app.session.control.set_status(CaptureStatus("waiting", "a:6009", 10.0,
                                                         message="the idle time in about 40 s"))


def ask_which(app: GputopApp, choice: Choice) -> None:
    open_screens.ask_before_capture(app, ask_workers(app.session.control.request(), (), choice))


def asked_which_without_figures(app: GputopApp) -> None:
    choice = choose_workers([f"n{number:02}:6009" for number in range(1, 129)], {})
    ask_which(app, choice)


def with_stacks(app: GputopApp) -> None:
    """As if the capture had been of a job on this node, and py-spy were there."""
    record = app.session.results.last_capture
    stacks = from_document(STACKS, HostStacks, "stacks")
    app.session.results.last_capture = replace(
        record, analysis=structs.replace(record.analysis, stacks=stacks))


SCREENS = {
    "main": Screen("faulty", sizes=(USUAL, WIDE, HUGE), forms=FORMS, in_forms=(WIDE,)),
    "healthy": Screen("healthy", sizes=BOTH),
    "epoch": Screen("epoch", sizes=BOTH),
    "lost": Screen("lost", sizes=BOTH),
    "sixteen": Screen("sixteen", sizes=SIZES),
    "one": Screen("one", sizes=BOTH, forms=FEW_FORMS, in_forms=(USUAL,)),
    "two": Screen("two", sizes=BOTH),
    "four": Screen("four", sizes=BOTH),
    "coarse": Screen("coarse", sizes=BOTH),
    "one-metric": Screen("one", (*"mm", "v", *["left"] * 9), (WIDE,), anew=True),
    "mig": Screen("mig", sizes=BOTH),
    "no-gpu": Screen("no-gpu", sizes=(TINY, USUAL, WIDE)),
    "waiting": Screen("waiting", sizes=(TINY, USUAL)),
    "unserved": Screen("unserved"),
    "capturing": Screen("capturing", prepare=capturing, sizes=BOTH),
    "cursor": Screen("lost", ("v", *["left"] * 12), BOTH, anew=True),
    "metric": Screen("lost", (*"mmmmmm", "space")),
    "tree": Screen("mig", ("v",), BOTH, focus=ProcessPanel, anew=True),
    "recommendations": Screen("faulty", ("r", "down"), BOTH, anew=True),
    "replay": Screen(lambda _: recorded(), sizes=BOTH),
    "snapshot-replayed": Screen(lambda folder: snapshot_of(node("faulty"), folder), sizes=BOTH),
    "snapshot-written": Screen("faulty", ("s",), notices=True),

    "finding": Screen("faulty", ("r", "enter"), BOTH, FEW_FORMS, in_forms=(USUAL,)),
    "gpu": Screen("faulty", ("enter",), (SMALL, USUAL), focus=GpuTable),
    "gpu-lost": Screen("lost", ("down", "down", "down", "enter"), focus=GpuTable),
    "process": Screen("faulty", ("enter",), focus=ProcessPanel),
    "signals": Screen("faulty", ("K",), focus=ProcessPanel),
    "signal-asked": Screen("faulty", ("K", "down", "down", "enter"), focus=ProcessPanel),
    "host": Screen("faulty", ("h",), BOTH),
    "hang": Screen("hanging", sizes=BOTH),
    "stacks": Screen("hanging", ("S",), (SMALL, *BOTH)),
    "workers": Screen("faulty", prepare=asked_which, sizes=(SMALL, *BOTH)),
    "workers-unasked": Screen("faulty", prepare=asked_which_without_figures, sizes=BOTH),
    "capture-waiting": Screen("faulty", prepare=waiting_for_idle, anew=True),
    "job": Screen("faulty", ("i",)),
    "captures": Screen("compared", ("J", "down"), BOTH, FEW_FORMS, in_forms=(USUAL,)),
    "attach": Screen("faulty", ("a",)),
    "filter": Screen("faulty", ("slash", *"py")),
    "palette": Screen("faulty", ("ctrl+p",)),
    "help": Screen("faulty", ("question_mark",), BOTH, GLYPHS, in_forms=(USUAL,)),
    "help-signals": Screen("faulty", ("K", "question_mark"), focus=ProcessPanel),
    "help-tables": Screen("faulty", ("T", "question_mark")),
    "help-timeline": Screen("faulty", ("t", "question_mark")),
    "help-compare": Screen("compared", ("B", "question_mark")),
    "compare": Screen("compared", ("B",), (SMALL, *BOTH), GLYPHS, in_forms=(USUAL,)),
    "report": Screen("faulty", ("t", "r")),

    "tables-kernels": Screen("faulty", ("T", "1"), (TINY, SMALL, *BOTH), USUAL_FORMS, in_forms=(WIDE,)),
    "tables-row": Screen("faulty", ("T", "1", "enter")),
    "tables-time": Screen("input-bound", ("T", "W"), BOTH),
    "tables-time-epoch": Screen("epoch", ("T", "W"), BOTH),
    "tables-path": Screen("input-bound", ("T", "P"), BOTH),
    "tables-python": Screen("input-bound", ("T", "shift+tab"), BOTH, prepare=with_stacks, anew=True),
    "tables-ranks": Screen("faulty", ("T", "R")),
    **{f"tables-{name}": Screen("input-bound", ("T", key), BOTH) for key, name in zip(
        "234567890", ("ops", "collectives", "memory", "copies", "host", "functions", "input", "layers", "limit"),
        strict=True)},

    "timeline": Screen("faulty", ("t",), BOTH, FEW_FORMS, in_forms=(USUAL,)),
    "timeline-zoomed": Screen("faulty", ("t", "z", "plus"), BOTH, USUAL_FORMS, in_forms=(WIDE,)),
    "timeline-unfolded": Screen("faulty", ("t", "E"), (WIDE,)),
    "timeline-details": Screen("faulty", ("t", "down", "full_stop", "enter")),
    "idle-gaps": Screen("input-bound", ("t", "b", "right", "down"), (TINY, *BOTH),
                        {f: FORMS[f] for f in ("16", "ascii")}, in_forms=(USUAL,)),
    "idle-gap-details": Screen("input-bound", ("t", "b", "enter", "down", "enter")),
}


def groups() -> dict[str, list[str]]:
    """The screens by the app that shows them: those over one session share it, as apps are slow to start."""
    found: dict[str, list[str]] = {}
    for name, screen in SCREENS.items():
        own = callable(screen.over) or screen.anew or screen.notices
        found.setdefault(name if own else str(screen.over), []).append(name)
    return found


@asynccontextmanager
async def app_of(screens: Sequence[Screen], folder: Path) -> AsyncIterator[tuple[GputopApp, Pilot[int]]]:
    """The app over the session of these screens, at the usual size."""
    screen = screens[0]
    session = screen.over(folder) if callable(screen.over) else node(screen.over)
    session._listeners.clear()  # of the apps before
    app = GputopApp(session)
    draw_when_settled(app)
    async with app.run_test(size=USUAL, notifications=screen.notices) as pilot:
        await pilot.pause()
        if any("t" in each.keys for each in screens):
            app.trace = trace_of(session.results.last_capture)
        yield app, pilot
    if app.trace is not None and app.trace.timeline is not None:
        app.trace.timeline.close()


async def show(screen: Screen, app: GputopApp, pilot: Pilot[int]) -> None:
    """Open the screen anew."""
    while len(app.screen_stack) > 1:
        app.pop_screen()
    app.query_one(screen.focus).focus()
    screen.prepare(app)
    await pilot.press(*screen.keys)
    await app.workers.wait_for_complete()
    await pilot.pause()
    while screen.notices and not app.screen.query("Toast"):  # it comes with a message of its own
        await pilot.pause()
    await pilot.pause()


async def check(screen: Screen, goldens: Goldens, app: GputopApp, pilot: Pilot[int], size: tuple[int, int]) -> None:
    """Compare what is shown, in all its forms."""
    if size not in BOTH and (screen, size) != (SCREENS["main"], HUGE):
        grid = cells(app)
        assert len(grid) == size[1] and all(len(line) == size[0] for line in grid)
        return
    held = size in screen.in_forms
    for form, preferences in ({"": Preferences()} | (dict(screen.forms) if held else {})).items():
        if app.preferences != preferences:
            await wear(app, pilot, preferences)
        grid = cells(app)
        assert len(grid) == size[1] and all(len(line) == size[0] for line in grid)
        goldens.check(grid, form, colors=bool(screen.forms) and (held or size == USUAL))
    if app.preferences != Preferences():
        await wear(app, pilot, Preferences())


@pytest.mark.parametrize("group", groups())
async def test_what_is_on_the_screen(group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                     request: pytest.FixtureRequest) -> None:
    monkeypatch.chdir(tmp_path)
    names = groups()[group]
    first = SCREENS[names[0]]
    update = request.config.getoption("update_snapshots")
    goldens = {name: Goldens(name, update) for name in names}
    sizes = [size for size in SIZES if any(size in SCREENS[name].sizes for name in names)]
    for together in [[size] for size in sizes] if first.anew else [sizes]:
        async with app_of([SCREENS[name] for name in names], tmp_path) as (app, pilot):
            for size in together:
                await pilot.resize_terminal(*size)
                await pilot.pause()
                for name in names:
                    if size in SCREENS[name].sizes:
                        await show(SCREENS[name], app, pilot)
                        await check(SCREENS[name], goldens[name], app, pilot, size)
    problems = [problem for one in goldens.values() for problem in one.done()]
    assert not problems, "\n\n".join([*problems, "If all of that is meant: pytest tests/tui --snapshot-update"])


def test_no_screen_is_gone() -> None:
    assert {folder.name for folder in FOLDER.iterdir()} == set(SCREENS)
