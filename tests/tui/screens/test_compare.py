"""A and B in the app: marking, choosing, what changed; and what to do where there is nothing to compare."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from rich.text import Text

from gputop.core.errors import GputopError
from gputop.diagnosis.diagnose import analyze
from gputop.profiler.capture.records import CaptureRecord, Server
from gputop.render.step_parts import PART_BY_ID
from gputop.tui.app import GputopApp
from gputop.tui.monitor.messages import compared_to_baseline
from gputop.tui.screens.compare import CaptureList, CompareScreen, colored, compared
from tests.analyses import make_analysis
from tests.fakes import START_S
from tests.tui.found import FoundSession, box_text, text_of
from tests.tui.textual_private import message_text

DATA = Path(__file__).resolve().parents[2] / "data"
SLOW, FAST = DATA / "keras3_slow_input.xplane.pb.gz", DATA / "keras3_fast.xplane.pb.gz"
SERVER = Server("127.0.0.1:6009", "python train.py", 41231)


def steps(median_s: float, count: int = 40) -> dict[str, object]:
    durations = [median_s * (1 + 0.001 * (i % 5)) for i in range(count)]
    mean = sum(durations) / count
    return {"anchor": "test", "count": count, "median_s": median_s, "mean_s": mean, "p95_s": median_s * 1.004,
            "durations_s": durations}


def record(n: int, step_s: float, path: Path = Path("/gone")) -> CaptureRecord:
    found = make_analysis(steps=steps(step_s))
    return CaptureRecord(f"host-{n}:6009", path / f"{n}.xplane.pb", START_S + n, 10.0, 10.0, analysis=found)


class Captured(FoundSession):
    """With captures of this session, newest last."""

    def __init__(self, *records: CaptureRecord) -> None:
        super().__init__()
        self.last_capture = None
        for one in records:
            self.capture_ended(one, [SERVER])


def messages(app: GputopApp) -> str:
    return message_text(app)


async def until(done: object, app: GputopApp) -> None:
    for _ in range(400):
        if done():  # type: ignore[operator]
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it never came")


async def test_marking_says_what_to_do_next() -> None:
    session = Captured()
    app = GputopApp(session)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("A")
        await pilot.pause()
        assert "No capture yet: press c" in messages(app) and session.baseline is None
        await pilot.press("B")
        await pilot.pause()
        assert "Two captures are compared" in messages(app)
        session.capture_ended(record(1, 0.4), [SERVER])
        await pilot.press("A")
        await pilot.pause()
        assert "B then shows what it brought" in messages(app) and session.baseline is session.captures[0]
        await pilot.press("A")
        await pilot.pause()
        assert "is A already" in messages(app)
        await pilot.press("B")
        await pilot.pause()
        assert "One capture so far" in messages(app)


async def test_a_capture_after_a_is_offered_beside_it() -> None:
    session = Captured(record(1, 0.4))
    session.set_baseline(session.captures[0])
    assert compared_to_baseline(session) == ()
    session.capture_ended(record(2, 0.3), [SERVER])
    assert compared_to_baseline(session) == ("400 ms/step in A, 300 ms now. B: what changed, noise or not.",)


async def test_a_and_b_are_chosen_swapped_and_kept() -> None:
    session = Captured(*(record(n, 0.4 - 0.05 * n) for n in range(1, 4)))
    first, second, third = session.captures
    app = GputopApp(session)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("B")
        screen = app.screen
        assert isinstance(screen, CompareScreen)
        captures = screen.query_one(CaptureList)
        assert (captures.a, captures.b) == (second, third)  # without a mark the last two
        await pilot.press("up", "up", "a")
        assert (captures.a, captures.b) == (first, third) and session.baseline is first
        assert " A " in text_of(captures) and "350 ms/step" in text_of(captures)
        await pilot.press("down", "b")
        assert (captures.a, captures.b) == (first, second)
        await pilot.press("x")
        assert (captures.a, captures.b) == (second, first)
        await pilot.press("down", "enter")
        assert captures.b is third
        await pilot.click(CaptureList, offset=(5, 0))
        await pilot.click(CaptureList, offset=(5, 0))
        assert captures.b is first
        await pilot.press("question_mark")
        assert "beyond what one job differs by" in box_text(app)
        await pilot.press("escape", "pagedown", "pageup", "escape")
        assert app.screen is app.screen_stack[0]


async def test_two_real_traces_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Text] = []
    show_text = CompareScreen._show_text
    monkeypatch.setattr(CompareScreen, "_show_text", lambda own, text: (shown.append(text), show_text(own, text)))
    records = [replace(record(n, 1.0), path=path, analysis=analyze([str(path)]))
               for n, path in enumerate((SLOW, FAST))]
    session = Captured(*records)
    app = GputopApp(session)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("B")
        await until(lambda: len(shown) > 1, app)  # the first says that it reads
        text = str(shown[-1])
        assert "NOISE: B's" in text and "capture again" in text
        assert PART_BY_ID["input"].name in text and "From the analyses alone" not in text
        assert "GONE" in text and "promised" in text  # the advice to mend the input was followed


def test_without_the_traces_the_analyses_are_compared_and_that_is_said() -> None:
    text = str(compared(record(1, 0.4), record(2, 0.3), 88, threading.Event()))
    assert text.startswith("From the analyses alone: their traces are no longer on disk") and "BETTER" in text


def test_captures_without_steps_say_that_it_cannot_be_decided() -> None:
    bare = replace(record(1, 0.4), analysis=make_analysis())
    assert "Whether the step time changed cannot be told" in str(compared(bare, bare, 88, threading.Event()))


def test_a_trace_that_cannot_be_read_falls_back(tmp_path: Path) -> None:
    for n in (1, 2):
        (tmp_path / f"{n}.xplane.pb").write_bytes(b"no trace")
    text = str(compared(record(1, 0.4, tmp_path), record(2, 0.3, tmp_path), 88, threading.Event()))
    assert text.startswith("From the analyses alone: ") and "BETTER" in text


def test_verdicts_are_colored_and_said_in_words() -> None:
    text = colored("BETTER: B's step is shorter.\n  mean  1 s  2 s  +1 %  worse\n  median  noise\n")
    styles = {str(text)[s.start:s.end].strip().split()[-1]: str(s.style) for s in text.spans}
    assert styles["worse"] != styles["shorter."] != styles["noise"]


def test_only_so_many_captures_are_kept_and_failed_ones_are_not() -> None:
    session = Captured(*(record(n, 0.4) for n in range(60)))
    assert len(session.captures) == 50 and session.captures[-1].time_s == START_S + 59
    session.capture_ended(replace(record(99, 0.4), analysis=None, problem=GputopError("broken", "mend it")), [SERVER])
    assert session.captures[-1].time_s == START_S + 59 and session.last_capture is not None
