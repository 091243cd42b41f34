"""A and B in the app: marking, choosing, what changed; and what to do where there is nothing to compare."""

from __future__ import annotations

import gzip
import shutil
import threading
from pathlib import Path

import pytest
from textual.pilot import Pilot

from gputop.analysis.gpu.packed_series import ComparedTrace
from gputop.comparison.report_lines import ReportLine, layout
from gputop.core.codec import to_document
from gputop.core.errors import GputopError
from gputop.diagnosis import worker
from gputop.diagnosis.diagnose import analyze
from gputop.profiler.capture.records import CaptureRecord, Server
from gputop.render.step_parts import PART_BY_ID
from gputop.replay.compared_files import read_side
from gputop.session.capture.captures import CaptureRun, EarlierCaptures, analyze_saved
from gputop.session.capture.captures import analyze as capture_analyze
from gputop.session.finding_store import MAX_COMPARED
from gputop.trace.readers.capture_file import CaptureFile, write_capture
from gputop.tui.app import GputopApp
from gputop.tui.monitor.messages import compared_to_baseline
from gputop.tui.screens.compare import (
    CaptureAgain,
    CaptureList,
    CompareScreen,
    before,
    before_this_run,
    colored,
    compared,
    side_of,
)
from gputop.tui.widgets.dialog_frame import WrappedText
from tests.analyses import make_analysis
from tests.fakes import START_S
from tests.records import replace
from tests.tui.found import FoundSession, box_text, piloted, text_of, until
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
        self.results.last_capture = None
        for one in records:
            self.capture_ended(one, [SERVER])


def messages(app: GputopApp) -> str:
    return " ".join(message_text(app).split())  # they are wrapped


async def test_marking_says_what_to_do_next() -> None:
    session = Captured()
    async with piloted(session) as (app, pilot):
        async def told(key: str) -> str:
            await pilot.press(key)
            await pilot.pause()
            return messages(app)

        assert "No capture yet. Press c" in await told("A") and session.results.baseline is None
        assert "This compares two captures" in await told("B")
        session.capture_ended(record(1, 0.4), [SERVER])
        assert "and then B to see what changed" in await told("A")
        assert session.results.baseline is session.results.captures[0]
        assert "is already A" in await told("A")
        assert "there is one so far" in await told("B")


async def test_the_only_capture_is_compared_with_that_of_its_script_before_gputop_was_started_again(
        tmp_path: Path) -> None:
    session = Captured(record(1, 0.3))
    session.results.captures = (replace(session.results.captures[0], job="python train.py --workers 2"),)
    session.control.options = replace(session.control.options, logdir=tmp_path)
    session.watch.earlier = EarlierCaptures(3)
    async with piloted(session) as (app, pilot):
        for name, job, time_s in (("r1", "python train.py", START_S - 9), ("r2", "python train.py", START_S - 5),
                                  ("r3", "python eval.py", START_S - 2), ("r4", "python train.py", START_S + 9)):
            run = tmp_path / "plugins" / "profile" / name
            run.mkdir(parents=True)
            (run / "vm.xplane.pb").write_bytes(b"no trace")
            write_capture(run, CaptureFile(files={"vm.xplane.pb": None}, job=job, time_s=time_s, step_s=0.4))
            if name == "r1":
                session.results.captures = (replace(session.results.captures[0], job=""),)
                await pilot.press("B")
                await until(pilot, lambda: "there is one so far" in messages(app))
                session.results.captures = (replace(session.results.captures[0], job="python train.py --workers 2"),)
        (b,) = session.results.captures
        before_start = before_this_run(replace(b, started_s=START_S - 7), tmp_path)
        assert before_start is not None and before_start.path.parent.name == "r1"
        await pilot.press("B")
        await until(pilot, lambda: isinstance(app.screen, CompareScreen))
        a = session.results.baseline
        assert a is not None and a.path.parent.name == "r2" and session.results.captures[-1].job == b.job


async def test_a_capture_after_a_is_offered_beside_it() -> None:
    session = Captured(record(1, 0.4))
    session.results.baseline = session.results.captures[0]
    assert compared_to_baseline(session) == ()
    session.capture_ended(record(2, 0.3), [SERVER])
    assert compared_to_baseline(session) == ("401 ms/step in A, 301 ms now. Press B to see what changed.",)


def of(n: int, job: str, pid: int) -> CaptureRecord:
    return replace(record(n, 0.4), job=job, pid=pid, started_s=1.0)


TRAIN, EVALUATE = "TensorFlow 2.21.0: python train.py --lr 1", "PyTorch 2.13.0: python evaluate.py"


def test_a_is_the_last_capture_of_bs_script_before_it_was_started_again() -> None:
    first, again, other = of(1, TRAIN, 7), of(2, TRAIN, 7), of(3, EVALUATE, 8)
    fixed, twice = of(4, TRAIN.replace("1", "2"), 9), of(5, TRAIN, 9)
    assert before(fixed, (first, again, other, fixed)) is again
    assert before(twice, (first, again, other, fixed, twice)) is again
    assert before(again, (first, again)) is first  # nothing was restarted
    assert before(other, (first, again, other)) is again  # no other one of its script


async def test_two_jobs_are_named_and_compared_only_if_they_are_chosen() -> None:
    session = Captured()
    session.results.keep_capture(of(1, TRAIN, 7))
    session.results.keep_capture(of(2, EVALUATE, 8))
    async with piloted(session) as (app, pilot):
        await pilot.press("B")
        await pilot.pause()
        shown = " ".join(box_text(app).split())
        assert ("two different jobs: A is from train.py --lr 1 (TensorFlow 2.21.0), B from evaluate.py "
                "(PyTorch 2.13.0).") in shown
        assert isinstance(app.screen, CompareScreen) and app.screen._shown is None
        await pilot.press("tab", "b")
        screen = app.screen
        await until(pilot, lambda: screen._shown is not None)


def marks(app: GputopApp) -> list[str]:
    """What each capture is, oldest first."""
    captures = app.screen.query_one(CaptureList)
    return [captures.marks.get(one.path, "") for one in captures.choices]


async def test_a_and_b_are_chosen_swapped_and_kept() -> None:
    session = Captured(*(record(n, 0.4 - 0.05 * n) for n in range(1, 4)))
    first, second, third = session.results.captures
    async with piloted(session) as (app, pilot):
        await pilot.press("B")
        screen = app.screen
        captures = screen.query_one(CaptureList)
        assert marks(app) == ["", "A", "B"]  # without a mark the last two
        await pilot.press("tab", "up", "up", "a")
        assert marks(app) == ["A", "", "B"] and session.results.baseline is first
        assert " A " in text_of(captures) and "351 ms/step" in text_of(captures)
        await pilot.press("down", "b")
        assert (screen._a, screen._b) == (first, second)
        await pilot.press("x")
        assert marks(app) == ["B", "A", ""]
        await pilot.press("down", "enter")
        assert screen._b is third
        await pilot.click(CaptureList, offset=(5, 0))
        await pilot.click(CaptureList, offset=(5, 0))
        assert screen._b is first
        await pilot.press("down", "down", "A")
        assert marks(app) == ["B", "A", "+A"]
        await pilot.press("B")
        assert marks(app) == ["B", "A", "+B"]
        await pilot.press("x", "B")  # another one of B's job is one of A's after the swap, and then is B's again
        assert marks(app) == ["A", "B", "+B"]


async def shown(pilot: Pilot[int]) -> str:
    """The comparison, once it is there."""
    screen = pilot.app.screen
    assert isinstance(screen, CompareScreen)
    await until(pilot, lambda: screen._shown is not None and not screen._reading)
    return " ".join(str(screen.query_one(WrappedText).text).split())


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that were read, each time they were."""
    found: list[str] = []
    analyze_in_worker = worker.analyze_in_worker
    monkeypatch.setattr(worker, "analyze_in_worker", lambda paths, *more: (
        found.extend(paths), analyze_in_worker(paths, *more))[1])
    return found


async def test_two_real_traces_side_by_side_are_read_once(
        read: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [replace(record(n, 1.0), path=path, analysis=analyze([str(path)]))
               for n, path in enumerate((SLOW, FAST))]
    session = Captured(*records)
    async with piloted(session) as (app, pilot):
        await pilot.press("B")
        text = await shown(pilot)
        assert text.startswith("Probably faster, not proven: ") and "Press c to capture again" in text
        assert PART_BY_ID["input"].name in text and "only by its saved analysis" not in text
        assert "GONE" in text and "estimated" in text  # the advice to mend the input was followed
        await pilot.press("u")
        assert "Welch" in box_text(app)
        monkeypatch.chdir(tmp_path)  # where the captures go
        await pilot.press("y", "e")
        assert app.clipboard.startswith("gputop: Probably faster, not proven: ") and "```" in app.clipboard
        [table] = tmp_path.rglob("gputop-comparison*.csv")
        titles, *rows = table.read_text().splitlines()
        assert titles.startswith("group,id,gpu,unit,a,b,change,")
        assert any(row.startswith("steps,mean_s,") for row in rows)
        await pilot.press("x", "escape", "B")
        await shown(pilot)
        assert sorted(read) == sorted((str(SLOW), str(FAST)))
        last = session.results.last_capture
        assert last is session.results.captures[-1] and last.compared is not None


@pytest.mark.usefixtures("analysis_in_this_process")
async def test_captures_that_were_analyzed_are_compared_without_reading_them(
        read: list[str], tmp_path: Path) -> None:
    run = CaptureRun(threading.Event(), threading.Event(), lambda _: None)
    paths = [tmp_path / name for name in ("a.xplane.pb.gz", "b.xplane.pb.gz")]
    for path, trace in zip(paths, (SLOW, FAST), strict=True):
        shutil.copyfile(trace, path)
    taken = [capture_analyze(replace(record(n, 1.0), path=path, analysis=None), run) for n, path in enumerate(paths)]
    assert read == [str(path) for path in paths]
    for path in paths:
        path.unlink()  # so that nothing else can be what is shown
    session = Captured(*taken)
    async with piloted(session) as (app, pilot):
        await pilot.press("B")
        text = await shown(pilot)
        assert text.startswith("Probably faster, not proven: ") and ("only by its saved "
                                                                     "analysis") not in text and "GONE" in text
        await pilot.press("c")
        session.start_capture = lambda *_: None  # type: ignore[method-assign]
        await pilot.press("b")
        session.capture_ended(replace(taken[1], path=tmp_path / "c.xplane.pb.gz", time_s=START_S + 9), [SERVER])
        app.screen.update_view()
        assert marks(app) == ["A", "B", "+B"] and "and " in await shown(pilot)
        await pilot.press("x", "escape", "B")
        await shown(pilot)
    assert len(read) == 2


@pytest.mark.usefixtures("analysis_in_this_process")
def test_what_a_capture_found_when_it_was_taken_is_what_its_comparison_quotes(tmp_path: Path) -> None:
    (tmp_path / "a.xplane.pb").write_bytes(gzip.decompress(SLOW.read_bytes()))
    bare = replace(record(1, 1.0), path=tmp_path / "a.xplane.pb", analysis=None)
    assert analyze_saved(bare, threading.Event()).compared.findings_at_capture is None  # gputop did not capture it
    taken = capture_analyze(bare, CaptureRun(threading.Event(), threading.Event(), lambda _: None))
    assert taken.compared.findings_at_capture == taken.findings and taken.findings
    assert to_document(side_of(taken).findings_at_capture) == to_document(read_side(taken.path).findings_at_capture)


def test_only_so_many_captures_keep_what_a_comparison_needs() -> None:
    session, some = Captured(), ComparedTrace(gpu_names=("H100",))
    for n in range(MAX_COMPARED + 2):
        session.capture_ended(replace(record(n, 0.4), compared=some), [SERVER])
    for records in (session.results.captures, session.results.captures_this_run):
        assert [one.compared is some for one in records] == [False] * 2 + [True] * MAX_COMPARED


async def test_a_capture_taken_again_counts_beside_the_first_one() -> None:
    session = Captured(record(1, 0.4), record(2, 0.39))
    async with piloted(session) as (app, pilot):
        await pilot.press("B", "c")
        assert isinstance(app.screen, CaptureAgain)
        session.start_capture = lambda *_: None  # type: ignore[method-assign]
        await pilot.press("a")
        session.capture_ended(record(3, 0.41), [SERVER])
        app.screen.update_view()
        assert marks(app) == ["A", "B", "+A"]
        assert "and /gone/3.xplane.pb" in await shown(pilot)


async def test_without_the_traces_the_analyses_are_compared_and_that_is_said() -> None:
    async with piloted(Captured(record(1, 0.4), record(2, 0.3))) as (_, pilot):
        await pilot.press("B")
        text = await shown(pilot)
        assert text.startswith("FASTER, certain: 401 → 301 ms")
        assert "A is compared only by its saved analysis: its trace is no longer on disk." in text


def test_captures_without_steps_say_that_it_cannot_be_decided() -> None:
    bare = replace(record(1, 0.4), analysis=make_analysis())
    found = compared((bare, bare), 0, {})
    assert layout(found, 88, everything=False, unfold="", again="")[0].text.startswith("CANNOT BE TOLD: ")


@pytest.mark.usefixtures("analysis_in_this_process")
async def test_a_trace_that_cannot_be_read_falls_back(tmp_path: Path) -> None:
    for n in (1, 2):
        (tmp_path / f"{n}.xplane.pb").write_bytes(b"no trace")
    async with piloted(Captured(record(1, 0.4, tmp_path), record(2, 0.3, tmp_path))) as (_, pilot):
        await pilot.press("B")
        assert "A is compared only by its saved analysis: " in await shown(pilot)


def test_only_so_many_captures_are_kept_and_failed_ones_are_not() -> None:
    session = Captured(*(record(n, 0.4) for n in range(60)))
    assert len(session.results.captures) == 50 and session.results.captures[-1].time_s == START_S + 59
    session.capture_ended(replace(record(99, 0.4), analysis=None, problem=GputopError("broken", "mend it")), [SERVER])
    assert session.results.captures[-1].time_s == START_S + 59 and session.results.last_capture is not None


def test_verdicts_are_colored_and_said_in_words() -> None:
    lines = (("FASTER: shorter.", "good"), ("mean worse", "bad"), ("median noise", ""))
    text = colored([ReportLine(text, tone) for text, tone in lines])
    styles = {str(text)[s.start:s.end].strip().split()[-1]: str(s.style) for s in text.spans}
    assert styles["worse"] != styles["shorter."] != styles["noise"]
