"""A still session with the findings of a capture, and what a widget of lines and a box say."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from textual.app import App
from textual.pilot import Pilot
from textual.screen import ModalScreen

from gputop.core.findings import Advice, CombinedGain, Finding, Gain
from gputop.profiler.capture.records import CaptureRecord, Server
from gputop.render.styled_text import StyledText
from gputop.session.session import Session
from gputop.tui.app import GputopApp
from gputop.tui.terminal.color_support import Preferences
from gputop.tui.widgets.cached_lines import LinesWidget
from gputop.tui.widgets.dialog_frame import WrappedText
from tests.analyses import make_analysis
from tests.fakes import START_S, StillSession
from tests.records import replace
from tests.waiting import PATIENCE_S

HEAVY = Finding(
    id="gpu0_oversubscribed", severity="high", title="GPU 0 does 2.2× the work of the others",
    why="Kernel time per step is 91 ms on GPU 0 and 41 ms on GPUs 1–7, which wait for it at every all-reduce.",
    evidence={"kernel_time_gpu0_s": 0.091, "kernel_time_others_s": 0.041, "work_ratio": 2.2},
    action="Keep metrics, variables and preprocessing off GPU 0; give each program its own GPUs.",
    source="test", gain=Gain(0.38, "all replicas as fast as the others", before_s=0.412), gpus=(0,),
    snippet='CUDA_VISIBLE_DEVICES=1 python eval.py')
SMALL = replace(HEAVY, id="copies_excessive", severity="low", title="Copies take 3% of the step",
                gain=Gain(0.03, "copies overlapped", before_s=0.412))
COMBINED = (CombinedGain((HEAVY.id, SMALL.id), 0.42),)


class FoundSession(StillSession):
    """With findings of a capture and a server that answers."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.watch.servers = (Server("127.0.0.1:6009", "python train.py --batch 256", 41231),)
        self.results.last_capture = CaptureRecord(
            "127.0.0.1:6009", Path("/traces/run/node-07.xplane.pb"), START_S + self.tick - 12, 10.0, 10.4,
            analysis=make_analysis(steps={"median_s": 0.412, "mean_s": 0.412}, findings=[HEAVY, SMALL]),
            report="breakdown of the step")
        self.results.live = Advice()
        self.results.refresh()

    def change_capture(self, **changes: object) -> None:
        """As if the last capture had said so."""
        self.results.last_capture = replace(self.results.last_capture, **changes)


@asynccontextmanager
async def piloted(session: Session, size: tuple[int, int] = (120, 40), *, preferences: Preferences | None = None,
                  notifications: bool = False) -> AsyncIterator[tuple[GputopApp, Pilot[int]]]:
    """The monitor of a session, its first frame drawn."""
    app = GputopApp(session, preferences)
    async with app.run_test(size=size, notifications=notifications) as pilot:
        await pilot.pause()
        yield app, pilot


async def until(pilot: Pilot[Any], done: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, "it did not come to that"
        await pilot.pause(0.005)
    await pilot.pause()


def line_text(runs: Iterable[StyledText]) -> str:
    return "".join(text for text, _ in runs)


def text_of(widget: LinesWidget) -> str:
    return "\n".join(map(line_text, widget._lines))


def box_text(app: App[Any]) -> str:
    """What the open box says, in the lines it has; its code is not in it."""
    assert isinstance(app.screen, ModalScreen)
    return "\n".join(str(widget.text) for widget in app.screen.query(WrappedText))
