"""Attaching and capturing from the app: refusals, progress, the report at the end."""

from __future__ import annotations

import asyncio
import threading

import pytest
from textual.pilot import Pilot

from gputop.core.errors import GputopError
from gputop.core.findings import Advice, Gain
from gputop.profiler.capture.job_memory import Cost
from gputop.profiler.capture.plan import Plan
from gputop.profiler.capture.records import CaptureRecord, CaptureStatus, Server
from gputop.profiler.capture.request import CaptureRequest
from gputop.render.palette import DIM
from gputop.session.capture import capture_control
from gputop.session.capture.captures import FoundServers
from gputop.tui.monitor.findings_panel import ActionsPanel
from gputop.tui.monitor.gpu_table import GpuTable
from gputop.tui.monitor.messages import earlier_verdict, of_note, panel_intro
from gputop.tui.monitor.process_panel import ProcessPanel
from gputop.tui.screens.capture_questions import ChooseJob
from gputop.tui.screens.details import capture_text, job_text
from gputop.tui.screens.dialogs import Confirm
from tests.analyses import make_analysis
from tests.fakes import StillSession
from tests.records import replace
from tests.session.recurring_finding import returning
from tests.tui.found import HEAVY, SMALL, FoundSession, box_text, piloted, text_of
from tests.tui.textual_private import clear_notifications, messages
from tests.waiting import PATIENCE_S

RECORDING = CaptureStatus("recording", "127.0.0.1:6009", 10.0, 2.0)
WITH_OVERVIEW = replace(RECORDING, chosen_s=2.2, overview_s=7.8, why="about 810 steps are enough, at 44 k events/s")


async def test_capture_without_a_server_says_how_to_get_one() -> None:
    async with piloted(StillSession().holding(), notifications=True) as (app, pilot):
        panel = app.query_one(ActionsPanel)
        await pilot.press("c")
        await pilot.pause()
        assert "No profiler server found on this node." in text_of(panel) and "gputop capture PID" in text_of(panel)
        assert "HOST:PORT" in text_of(panel) and not messages(app), "it stays true: no notice that goes"
        for key, said in (("x", "No capture is running"), ("t", "No capture yet")):
            await pilot.press(key)
            await pilot.pause()
            (notice,) = messages(app)  # the one before has gone
            assert said in notice and app.screen.query_one("Toast").region.y == 0, "in its place"
        await pilot.press("v")
        await pilot.press("escape")
        await pilot.pause()
        cursor = app.query_one(GpuTable).time.cursor
        assert not messages(app) and cursor.time_s is None, "one press clears and steps back"
        await pilot.press("escape")
        assert "HOST:PORT" not in text_of(panel) and "No profiler server found" in text_of(panel)
        await pilot.press("question_mark", "y")
        await pilot.pause()
        await pilot.press("escape")
        assert len(app.screen_stack) == 1 and not messages(app)


@pytest.mark.parametrize("findings", [True, False])
async def test_why_there_was_nothing_to_capture_from_is_told_whole_until_there_is(findings: bool) -> None:
    session = FoundSession().holding()
    server, session.watch.servers = session.watch.servers, ()
    if not findings:
        session.results.last_capture = None
        session.results.refresh()
    async with piloted(session, (80, 24), notifications=True) as (app, pilot):
        panel = app.query_one(ActionsPanel)
        await pilot.press("c")
        await pilot.pause()
        told = " ".join(text_of(panel).split())
        assert "gputop --attach HOST:PORT." in told and "esc: close" in str(panel.border_subtitle)
        assert not findings or session.results.findings[0].title in told, "the finding keeps what is left"
        session.watch.servers = server
        await pilot.pause()
        app._refresh_all()
        assert "HOST:PORT" not in text_of(panel) and "esc: close" not in str(panel.border_subtitle)


async def test_before_the_first_capture_from_a_server_of_another_user_there_is_a_question(
        monkeypatch: pytest.MonkeyPatch) -> None:
    session = FoundSession()
    session.watch.servers = (replace(session.watch.servers[0], owner="bob"),)
    started: list[object] = []
    monkeypatch.setattr(session.control, "_run_capture", lambda servers, *_: started.extend(servers))
    async with piloted(session, notifications=True) as (app, pilot):
        assert "belongs to user bob" in str(job_text(session))
        await pilot.press("c")
        await pilot.pause()
        assert isinstance(app.screen, Confirm) and not started
        text = box_text(app)
        assert "This server belongs to user bob. Capture from it? y/N" in text and "127.0.0.1:6009" in text
        await pilot.press("enter")
        await pilot.pause()
        assert not isinstance(app.screen, Confirm) and not started, "only y means yes"
        await pilot.press("c", "y")
        await pilot.pause()
        assert session.control.status is not None and session.control.status.running
        assert "belongs to user bob" not in str(job_text(session))


@pytest.mark.parametrize("way", ["y", "n", "covered"])
async def test_whether_a_capture_may_end_the_job_is_asked(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session, waits = FoundSession(), threading.Event()
    accepted: list[bool] = []

    def capture(_: object, request: CaptureRequest, *__: object) -> CaptureRecord:
        accepted.append(request.accept_risk)
        raise GputopError("captured", "")

    def crash_risk(_: object) -> str:
        assert not covered or waits.wait(PATIENCE_S)
        return "it was seen to"

    covered = way == "covered"
    answered = threading.Event()
    monkeypatch.setattr(capture_control.captures, "capture_and_analyze", capture)
    monkeypatch.setattr("gputop.profiler.discovery.crash_risk", crash_risk)
    control = session.control
    session.listen(lambda change: answered.set() if control.status is None or control.status.message else None)
    async with piloted(session, (80, 24), notifications=True) as (app, pilot):
        await pilot.press("c")
        if covered:
            await pilot.press("question_mark")
            waits.set()
        assert await asyncio.to_thread(answered.wait, 30)
        await pilot.pause()
        if covered:
            assert not isinstance(app.screen, Confirm) and "Press c again" in messages(app)[0]
            await pilot.press("escape")
            await pilot.press("c")
            await pilot.pause()
            assert isinstance(app.screen, Confirm) and not accepted
            return
        assert isinstance(app.screen, Confirm)
        text = box_text(app)
        assert text == "This capture may end the job. Capture anyway? y/N\nIt was seen to."
        answered.clear()
        await pilot.press(way)
        if way == "y":
            assert await asyncio.to_thread(answered.wait, 30)
        await pilot.pause()
        assert accepted == ([True] if way == "y" else [])


async def test_of_several_jobs_one_is_chosen_from_a_list_or_by_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    session = FoundSession()
    train = replace(session.watch.servers[0], pid=1)
    evaluate = replace(train, address="127.0.0.1:6010", description="eval.py")
    session.watch.servers = (train, evaluate)
    begun: list[str] = []
    monkeypatch.setattr(session.control, "_begin_capture", lambda servers, *_: begun.append(servers[0].address))
    async with piloted(session) as (app, pilot):
        await pilot.press("c")
        await pilot.pause()
        assert isinstance(app.screen, ChooseJob) and not begun
        assert "eval.py" in box_text(app)
        await pilot.press("escape")
        panel = app.query_one(ProcessPanel)
        session.watch.servers = (train, replace(evaluate, pid=panel.selected.pid))
        panel.focus()
        await pilot.press("c")
        await pilot.pause()
        assert begun == ["127.0.0.1:6010"] and not isinstance(app.screen, ChooseJob), "that of the selected process"
        await pilot.press("tab", "c")
        assert begun == ["127.0.0.1:6010"] * 2, "it stays the one"


async def test_the_list_of_jobs_says_whose_they_are_what_they_hold_and_since_when(
        monkeypatch: pytest.MonkeyPatch) -> None:
    session = StillSession()
    now_s = session.feed.clock()
    other = Server("127.0.0.1:6011", "JAX: python /home/bob/eval.py", 11, owner="bob", user="bob", started_s=now_s - 60)
    train = Server("127.0.0.1:6009", "TensorFlow 2.21.0: python train.py --lr 1", 41231, user="ana",
                   started_s=now_s - 7200)
    idle = Server("127.0.0.1:6010", "python prepare.py", 10, user="ana")
    ended = Server("127.0.0.1:6012", "python old.py", 12, user="ana")
    session.watch.job.watch(ended)
    monkeypatch.setattr("gputop.session.capture.server_watch.find_servers",
                        lambda *_: FoundServers((other, idle, train)))
    session.watch.update()
    async with piloted(session, (80, 24)) as (app, pilot):
        await pilot.press("c")
        await pilot.pause()
        assert isinstance(app.screen, ChooseJob)
        reason, _, *jobs = box_text(app).splitlines()[:5]
        assert reason == "The job at 127.0.0.1:6012 has ended."
        assert [job.split() for job in jobs] == [
            ["›", "ana", "GPU", "0-7", "566G", "2.0", "h", "41231", "train.py", "--lr", "1"],
            ["ana", "no", "GPU", "10", "prepare.py"],
            ["bob", "no", "GPU", "60", "s", "11", "eval.py"]]


async def test_while_the_first_capture_runs_nobody_is_asked_to_start_one() -> None:
    session = FoundSession()
    session.results.last_capture, session.results.live = None, Advice()
    async with piloted(session, notifications=True) as (app, pilot):
        session.control.set_status(RECORDING)
        session.results.refresh()
        await pilot.pause()
        assert "running" in panel_intro(session)[-1]
        for key in ("t", "T", "A", "B"):
            await pilot.press(key)
            await pilot.pause()
            (notice,) = messages(app)
            assert "running" in notice and "press c" not in notice


def test_the_end_of_a_shortened_capture_takes_few_lines() -> None:
    session, done = FoundSession(), CaptureStatus("done", "a:1", 10.0)
    plan = Plan(10.0, 3.9, "about 100 steps are enough", notes=("n",), enough=True)
    session.change_capture(notices=("b:1 did not answer",), cost=Cost(6.5, 3.9), plan=plan)
    assert of_note(session, done) == ("b:1 did not answer\n3.9 s: about 100 steps are enough",)
    session.change_capture(plan=replace(plan, overview_s=6.1))
    assert of_note(session, done) == (
        "b:1 did not answer\n3.9 s in detail: about 100 steps are enough; then 6.1 s of rare events",)
    others = "4 other jobs with a profiler server were not captured: a:1, …; to capture another, use --attach."
    session.change_capture(notices=(), plan=None, uncaptured=others)
    assert of_note(session, done) == (), "the panel says what was found, and what else runs covers no verdict"
    assert others in str(capture_text(session.results.last_capture))


async def test_progress_and_failure_of_a_capture_are_on_the_job_line() -> None:
    session = FoundSession()
    async with piloted(session) as (app, pilot):
        for status, told in (
            (replace(RECORDING, elapsed_s=4.2), ("4.2 of 10 s", "x: stop")),
            (replace(RECORDING, stoppable=False), ("2.0 of 10 s",)),
            (replace(RECORDING, phase="probing"), ("a short test capture of 127.0.0.1:6009",)),
            (replace(RECORDING, chosen_s=4.1, why="it is busy"), ("2.0 of 4.1 s", "(it is busy)", "x: stop")),
            (WITH_OVERVIEW, ("2.0 of 2.2 s", "(then 7.8 s of rare events)", "x: stop")),
            (replace(WITH_OVERVIEW, phase="overview", elapsed_s=3.1),
             ("watching for rare events in 127.0.0.1:6009", "3.1 of 7.8 s", "x: stop")),
        ):
            session.control.set_status(status)
            await pilot.pause()
            job = text_of(app._job)
            assert all(text in job for text in told), job
            assert ("x: stop" in job) == ("x: stop" in told) and ("(" in job) == any("(" in text for text in told)
        session.control.set_status(replace(RECORDING, stoppable=False))
        await pilot.press("x")
        assert messages(app) == ["This recording cannot be stopped. It ends on its own, and its data is kept."]


@pytest.mark.parametrize("key", ["", "escape"])
async def test_a_failure_stays_until_escape_or_for_a_while(key: str) -> None:
    session = FoundSession()
    async with piloted(session) as (app, pilot):
        session.control.set_status(replace(RECORDING, phase="failed", message="the job died", fix="Restart it.",
                                           time_s=session.feed.clock()))
        await pilot.pause()
        assert "capture failed: the job died. Restart it." in text_of(app._job)
        assert "the job died" in text_of(app._actions)
        if key:
            await pilot.press(key)
        else:
            session.advance(40)
        await pilot.pause()
        assert "the job died" not in text_of(app._job) + text_of(app._actions)


@pytest.mark.parametrize(("key", "force"), [("c", False), ("C", True)])
async def test_the_cost_of_a_capture_is_shown_when_it_is_done(key: str, force: bool,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    session = FoundSession()
    asked: list[bool] = []
    monkeypatch.setattr(session, "start_capture", lambda request: asked.append(request.force))
    done = replace(RECORDING, phase="done", elapsed_s=8.0, message="/logs/trace")
    plan = Plan(10.0, 4.1, "the job emits 240 k events/s")
    async with piloted(session, notifications=True) as (app, pilot):
        await pilot.press(key)
        assert asked == [force]
        session.change_capture(plan=plan, cost=Cost(8.0, 4.1))
        session.control.set_status(done)
        await pilot.pause()
        (message,) = messages(app)
        assert "4.1 s: the job emits 240 k events/s" in message and "the capture call took" not in message
        assert "240 k events/s" in str(capture_text(session.results.last_capture))
        session.change_capture(plan=Plan(10.0, 10.0, "as asked"))
        session.control.set_status(replace(done, elapsed_s=10.1))
        await pilot.pause()
        assert messages(app) == [message], "no word of a capture as asked: the panel has its findings"
        assert "t: timeline   T: tables   B: compare" in str(app.query_one(ActionsPanel).border_subtitle)


async def test_attaching_to_a_dead_address_is_answered() -> None:
    session = StillSession().holding()
    async with piloted(session) as (app, pilot):
        for _ in range(2):  # asking again is answered again
            clear_notifications(app)
            await pilot.press("a", *"localhost:1", "enter")
            await asyncio.to_thread(session.watch.update)
            await pilot.pause()
            assert any("No profiler server at 127.0.0.1:1" in message for message in messages(app))


async def test_a_typo_in_an_address_keeps_the_job_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    session = FoundSession()
    (server,) = session.watch.servers

    def find(attached: tuple[str, ...], *_: object) -> FoundServers:
        return FoundServers((*(Server(a, problem="nothing listens there", asked=True) for a in attached), server))

    monkeypatch.setattr("gputop.session.capture.server_watch.find_servers", find)
    async with piloted(session, notifications=True) as (app, pilot):
        await pilot.press("a", *"localhost:1", "enter")
        await asyncio.to_thread(session.watch.update)
        await pilot.pause()
        assert messages(app) == ["Could not attach to 127.0.0.1:1: nothing listens there. Still attached to "
                                 "127.0.0.1:6009."]
        job = text_of(app._job)
        assert "● 127.0.0.1:6009" in job and "✗" not in job and "No profiler server" not in text_of(app._actions)


async def test_a_restarted_job_says_so_until_it_is_captured() -> None:
    session = FoundSession()
    (before,) = session.watch.servers
    again = replace(before, pid=before.pid + 1, started_s=session.feed.clock() - 11.8)
    session.watch.job.watch(before)
    session.watch.job.follow((again,))
    session.watch.servers = (again,)
    async with piloted(session) as (app, _):
        assert text_of(app._job).rstrip().endswith("restarted 12 s ago  c: capture a trace")
        record = replace(session.results.last_capture, time_s=session.feed.clock(), pid=again.pid,
                         started_s=again.started_s)
        session.capture_ended(record, session.watch.servers)
        app._refresh_all()
        assert "restarted" not in text_of(app._job) and "captured 0 s ago" in text_of(app._job)


async def test_a_capture_of_an_earlier_job_stands_dimmed_behind_what_the_job_does_now() -> None:
    session = FoundSession()
    (server,) = session.watch.servers
    live = replace(HEAVY, title="The GPUs are idle now", origin="live", gain=Gain(None, ""))
    session.results.live = Advice((live,))
    session.results.rules_ran_s = session.feed.clock()
    session.change_capture(pid=server.pid, started_s=session.feed.clock() - 99)
    session.results.refresh()
    titles = [f.title for f in session.results.findings]
    assert titles == [HEAVY.title, SMALL.title], "of the same job the trace knows more"
    session.watch.servers = (replace(server, started_s=session.feed.clock() - 5),)
    session.servers_changed()
    opened = session.results.last_capture
    session.capture_ended(opened, session.watch.servers)
    assert [f.title for f in session.results.findings] == [live.title, HEAVY.title, SMALL.title]
    async with piloted(session) as (app, pilot):
        app._refresh_all()
        panel = app.query_one(ActionsPanel)
        panel.focus()
        titles = {part.strip(): style for line in panel._lines for part, style in line}
        assert titles[live.title] != DIM and titles[HEAVY.title] == titles[SMALL.title] == DIM
        assert panel.selected == live
        await pilot.press("down")
        assert panel.selected is not None and panel.selected.origin == "trace", "it has the id of the live one"
        await pilot.press("down")
        assert panel.selected is not None and panel.selected.title == SMALL.title
        session.open_capture(opened)
        titles = [f.title for f in session.results.findings]
        assert titles == [HEAVY.title, SMALL.title, live.title], "it is what was asked for"


def test_the_verdict_on_an_earlier_job_is_not_said_of_the_one_that_runs() -> None:
    session = FoundSession()
    (server,) = session.watch.servers
    session.change_capture(analysis=make_analysis(findings=[]), limit="No problem found: busy 89%.", pid=server.pid,
                           started_s=1.0)
    session.results.refresh()
    session.watch.servers = (replace(server, started_s=1.0),)
    assert panel_intro(session)[-1] == "No problem found: busy 89%." and not earlier_verdict(session)
    session.watch.servers = (replace(server, pid=server.pid + 1, started_s=2.0),)
    said = " ".join(panel_intro(session))
    assert "89%" not in said and "Press c to see" in said
    assert earlier_verdict(session) == ("Earlier job: No problem found: busy 89%.",)


async def test_quitting_during_a_capture_keeps_its_data_unless_asked_twice() -> None:
    for twice in (False, True):
        session = FoundSession()
        async with piloted(session) as (app, pilot):
            session.control.set_status(RECORDING)
            await pilot.press("q")
            assert app.is_running and session.control._stop_capture.is_set()
            if twice:
                await pilot.press("q")
            else:
                session.control.set_status(replace(RECORDING, phase="done"))
            await pilot.pause()
        assert app.return_code == 0


@pytest.mark.parametrize("later", [False, True])
async def test_a_capture_of_an_earlier_job_is_not_told_as_that_of_the_one_that_runs(later: bool) -> None:
    session = FoundSession()
    record = session.results.last_capture
    first, *others = session.feed.sample.processes
    started = replace(first, started_s=record.time_s + (5 if later else -5))
    session.watch.servers = (replace(session.watch.servers[0], pid=started.local_pid or started.pid),)
    session.feed.sample = replace(session.feed.sample, processes=(started, *others))
    async with piloted(session) as (app, _):
        assert (", from an earlier job" in str(app._actions.border_title)) is later
        job = text_of(app._job)
        assert ("c: capture a trace" in job) is later and ("step time" in job) is not later


class ReturningIdle(FoundSession):
    """GPUs that are idle again in 40 s; what would be captured is noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.taken: list[bool] = []  # whether at full length
        self.results.live = Advice((returning(),))
        self.results.rules_ran_s = self.feed.clock()
        monkeypatch.setattr(capture_control.captures, "capture_and_analyze", self.note)
        self.control.update_node(self.watched_node)

    def note(self, _: object, request: CaptureRequest, *__: object) -> CaptureRecord:
        self.taken.append(request.force)
        raise GputopError("noted", "")

    async def over(self, pilot: Pilot[object]) -> None:
        while self.control.status is not None and self.control.status.running:
            await pilot.pause()
        await pilot.pause()


@pytest.mark.parametrize(("key", "taken"), [("escape", [False]), ("c", [False]), ("C", [True]), ("x", [])])
async def test_c_waits_for_idle_that_returns(monkeypatch: pytest.MonkeyPatch, key: str, taken: list[bool]) -> None:
    session = ReturningIdle(monkeypatch)
    async with piloted(session, notifications=True) as (app, pilot):
        await pilot.press("c")
        await pilot.pause()
        told = text_of(app._job)
        assert "capture waits for the idle time in about 40 s" in told and "esc: capture now  x: cancel" in told
        assert app._mode() == "waiting" and not session.taken
        await pilot.press(key)
        await session.over(pilot)
        assert session.taken == taken and app._mode() != "waiting"
        assert ("No capture was taken." in messages(app)) == (key == "x")


async def test_quitting_does_not_wait_for_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    session = ReturningIdle(monkeypatch)
    async with piloted(session, (80, 24)) as (app, pilot):
        await pilot.press("c")
        await pilot.pause()
        assert "esc: capture now" in text_of(app._job)
        await pilot.press("q")
        while app.return_value is None:
            await pilot.pause()
    assert not session.taken
