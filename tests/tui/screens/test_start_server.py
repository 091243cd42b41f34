"""Without a profiler server the keys of a capture offer to start one, and the capture follows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gputop.core.errors import GputopError
from gputop.core.proc import user_name
from gputop.core.samples import ZOMBIE
from gputop.launch import attach, serve, target
from gputop.launch.attach import Announcement
from gputop.profiler.capture.records import CaptureRecord, CaptureStatus, Server
from gputop.profiler.capture.request import CaptureRequest, answered
from gputop.profiler.kineto.guard import ProfilesItself
from gputop.trace.readers.capture_file import CaptureFile, write_capture
from gputop.tui.monitor.messages import OFFER, panel_intro
from gputop.tui.screens import capture_questions
from gputop.tui.screens.capture_questions import StartServer
from gputop.tui.widgets.dialog_frame import DialogFrame
from tests.fakes import StillSession
from tests.records import replace
from tests.tui.found import box_text, piloted, text_of
from tests.tui.textual_private import messages

FORBIDDEN = GputopError("process 7 belongs to bob", "Run gputop as that user")


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> StillSession:
    def examine(pid: int) -> target.Target:
        if pid == 7:
            raise FORBIDDEN
        return target.Target(pid, "", 0, "", 900, True)

    monkeypatch.setattr(capture_questions, "examine", examine)
    session = StillSession()
    (process,) = session.feed.sample.processes
    return session.holding(*(replace(process, pid=pid, command=f"/usr/bin/python3 /home/a/{name} --lr 1")
                             for pid, name in ((7, "other.py"), (7380, "train.py"))))


@pytest.fixture
def started(session: StillSession, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | None]]:
    """The processes that a server was to be started in."""
    asked: list[tuple[int, int | None]] = []
    monkeypatch.setattr(session.control, "start_server",
                        lambda pid, request: asked.append((pid, request.process_started)))
    return asked


@pytest.fixture
def recorded(session: StillSession, monkeypatch: pytest.MonkeyPatch) -> list[CaptureRequest]:
    """The captures that were asked for."""
    asked: list[CaptureRequest] = []
    monkeypatch.setattr(session, "start_capture", asked.append)
    return asked


@pytest.mark.parametrize("keys", ["c", "a", "T", "B", "t"])
async def test_the_keys_of_a_capture_offer_a_server(
        keys: str, session: StillSession, started: list[tuple[int, int | None]]) -> None:
    async with piloted(session) as (app, pilot):
        await pilot.press(keys)
        assert isinstance(app.screen, StartServer)
        assert "train.py (pid 7380) has no profiler server. Start one? y/N" in box_text(app)
        assert target.WHAT_STARTING_DOES.split(".")[0].split()[-1] in box_text(app)
        await pilot.press("down")
        assert "gputop cannot start one from here." in box_text(app) and FORBIDDEN.fix in box_text(app)
        await pilot.press("y", "up", "enter")
        assert not started and not isinstance(app.screen, StartServer), "only y where it is possible means yes"
        await pilot.press(keys, "y")
        assert started == [(7380, 900)], "the very process that was shown"


async def test_a_job_of_pytorch_is_offered_its_own_way(session: StillSession, monkeypatch: pytest.MonkeyPatch) -> None:
    forbidden, other = (replace(process, framework="pytorch") for process in session.feed.sample.processes)
    session.holding(forbidden)
    assert panel_intro(session)[-1] == OFFER
    async with piloted(session) as (app, pilot):
        await pilot.press("c")
        assert "jax.profiler" not in box_text(app) and FORBIDDEN.fix in box_text(app)
        assert "start one" not in str(app.screen.query_one(DialogFrame).border_subtitle)
        await pilot.press("escape")
        session.holding(other)
        monkeypatch.setattr(target, "is_pytorch", lambda _: True)
        await pilot.press("c")
        assert "has no profiler server. Start one? y/N" in box_text(app)
        assert "PyTorch's profiler" in box_text(app)


def test_a_job_that_used_torch_profiler_is_captured_after_another_question(
        session: StillSession, monkeypatch: pytest.MonkeyPatch) -> None:
    control = session.control

    def used(pid: int, stop: object, *, hold: bool, started: int | None) -> serve.Ready:
        raise serve.UsedBefore("it holds the job", "a way out")

    monkeypatch.setattr(serve, "make_ready", used)
    control._start_server(7380, control.request())
    assert control.status is None
    question = control.take_question()
    assert question is not None and question.kind == "hold" and "pauses" in question.sentence
    started: list[object] = []
    monkeypatch.setattr(control, "start_server", lambda pid, request: started.append((pid, request.hold)))
    assert control.start_capture(answered(question, "y")) is None
    assert started == [(7380, True)]


def test_a_job_that_profiles_itself_is_a_live_finding_while_it_runs(
        session: StillSession, monkeypatch: pytest.MonkeyPatch) -> None:
    control, pid = session.control, os.getpid()

    def left_on(*_: object, **__: object) -> serve.Ready:
        raise ProfilesItself(pid, 1.0, "it profiles itself", "remove it")

    assert control.profiled() is None
    monkeypatch.setattr(serve, "make_ready", left_on)
    control._start_server(pid, control.request())
    assert control.status is not None and control.status.phase == "failed"
    assert control.profiled() == {pid: 1.0}
    later_s = control._clock() + 3600.0
    monkeypatch.setattr(control, "_clock", lambda: later_s)
    assert control.profiled() == {}, "it may have ended since"
    monkeypatch.undo()
    monkeypatch.setattr("gputop.session.capture.capture_control.stat_of", lambda _: None)
    assert control.profiled() == {}, "the process has ended"


def test_gputop_by_itself_leaves_a_job_alone_that_is_ending(
        session: StillSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gputop.ranks.stacks.is_ending", lambda pid: pid == 7380)
    request = replace(session.control.request(), reason="GPU 0: SM active 3% for 5 s")
    session.control._run_capture((Server("127.0.0.1:6009", pid=7380),), request, None)
    assert session.control.status is not None and session.control.status.message == "process 7380 is exiting"


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize(("command", "again"), [
    ("PyTorch 2.13.0: /usr/bin/python3 /home/a/train.py --lr 0.1", True),
    ("PyTorch 2.13.0: /usr/bin/python3 /home/a/eval.py", False), ("", False)])
async def test_a_job_captured_before_is_asked_about_in_two_lines_and_enter_captures_it(
        command: str, again: bool, earlier: bool, session: StillSession, started: list[tuple[int, int | None]],
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if earlier:  # by a gputop that has ended
        run = session.control.options.logdir / "plugins" / "profile" / "r"
        run.mkdir(parents=True)
        (run / "t.pt.trace.json").touch()
        write_capture(run, CaptureFile(files={"t.pt.trace.json": None}, job=command))
        session.watch._closing.set()
        session.watch._watch_servers()
    else:
        session.results.captures = (CaptureRecord("kineto:41", Path("/traces"), 0.0, 1.0, 1.0, job=command, pid=41),)
    async with piloted(session) as (app, pilot):
        await pilot.press("c")
        shown = box_text(app)
        await pilot.press("enter")
        assert not isinstance(app.screen, StartServer) and started == [(7380, 900)] * again
    if again:
        assert shown.endswith("train.py --lr 1 (pid 7380) was captured before.\nCapture it? Y/n")
        assert target.WHAT_STARTING_DOES.split(".")[0] not in shown
    else:
        assert "Start one? y/N" in shown


async def test_the_question_goes_with_its_job_or_once_that_has_its_own_server(session: StillSession) -> None:
    other = Server("127.0.0.1:6010", "other.py", 99)
    server = Server("127.0.0.1:6009", "TensorFlow 2.21.0: /usr/bin/python3 /home/a/train.py", 7380)
    async with piloted(session, notifications=True) as (app, pilot):
        async def asked() -> bool:
            app._refresh_all()
            await pilot.pause()
            return isinstance(app.screen, StartServer)

        await pilot.press("c")
        assert await asked()
        session.watch.servers = (other,)
        assert await asked(), "that is another job's"
        session.watch.servers = (server,)
        assert not await asked()
        assert messages(app) == ["train.py (TensorFlow 2.21.0) now has a profiler server. Press c to capture."]
        session.watch.servers = ()
        await pilot.press("c")
        session.holding(*session.feed.sample.processes[1:])
        assert await asked()
        session.holding()
        assert not await asked()
        assert messages(app) == ["The job has ended."]


def test_the_capture_follows_the_server_or_the_reason_is_told(session: StillSession,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    control, server = session.control, Server("127.0.0.1:6009", "train.py", 7380)
    captured: list[object] = []
    monkeypatch.setattr(control, "_run_capture", lambda servers, *_: captured.extend(servers))
    monkeypatch.setattr(control.watch, "update", lambda: setattr(control.watch, "servers", (server,)))
    monkeypatch.setattr(target, "examine", lambda pid, **_: pid)
    monkeypatch.setattr(attach, "start_server", lambda pid, port: Announcement(server.address, "profiler server at …"))
    statuses: list[CaptureStatus] = []
    monkeypatch.setattr(control._receiver, "capture_changed", statuses.append)
    control._start_server(7380, control.request())
    assert [s.phase for s in statuses] == ["connecting"] and captured == [server]

    def refuse(pid: int, **_: object) -> None:
        raise FORBIDDEN

    monkeypatch.setattr(target, "examine", refuse)
    control._start_server(7380, control.request())
    assert (statuses[-1].phase, statuses[-1].message, statuses[-1].fix) == (
        "failed", FORBIDDEN.message, FORBIDDEN.fix)


BESIDE = Server("pid:900", "eval_on_cpu.py", 900)


def on_gpus(session: StillSession, **changed: object) -> None:
    """The processes of the sample are PyTorch's, of gputop's user, but for what is ``changed``."""
    changes = {"framework": "pytorch", "user": user_name(os.geteuid()), **changed}
    session.holding(*(replace(p, **changes) for p in session.feed.sample.processes))


async def test_a_job_that_holds_no_gpu_does_not_take_the_place_of_those_that_do(
        session: StillSession, recorded: list[CaptureRequest]) -> None:
    """A PyTorch job on the GPUs waits for nobody until it is asked; one on the CPU that was captured before does."""
    on_gpus(session)
    session.watch.servers = (BESIDE,)
    async with piloted(session) as (app, pilot):
        line = text_of(app._job)
        assert "no profiler server in the job on the GPUs   c: start one" in line and "eval_on_cpu" not in line
        await pilot.press("c")
        assert isinstance(app.screen, StartServer) and "train.py (pid 7380)" in box_text(app)
        await pilot.press("escape")
        session.watch.choose_job(BESIDE)  # the user means that one
        await pilot.press("c")
        assert not isinstance(app.screen, StartServer) and len(recorded) == 1


async def test_c_captures_from_the_selected_process_although_another_one_has_a_server(
        session: StillSession, recorded: list[CaptureRequest]) -> None:
    session.watch.servers = (Server("pid:7", "other.py", 7),)
    async with piloted(session) as (app, pilot):
        await pilot.press("tab")
        while app._processes.selected is None or app._processes.selected.pid != 7380:
            await pilot.press("down")
        await pilot.press("c")
        assert isinstance(app.screen, StartServer) and box_text(app).startswith("train.py (pid 7380)")
        await pilot.press("escape", "up", "c")
        assert not isinstance(app.screen, StartServer) and len(recorded) == 1
        assert session.watch.job.server is not None and session.watch.job.server.pid == 7


@pytest.mark.parametrize("changed", [{"framework": ""}, {"user": "bob"}, {"gpus": {}}])
def test_only_jobs_of_ones_own_that_train_on_gpus_come_before_a_server(
        changed: dict[str, object], session: StillSession) -> None:
    on_gpus(session)
    session.watch.servers = (BESIDE,)
    assert [p.pid for p in session.processes_to_serve()] == [7, 7380]
    session.watch.servers = (replace(BESIDE, asked=True),)
    assert session.processes_to_serve() == (), "the user named it"
    session.watch.servers = (BESIDE, Server("pid:7", "other.py", 7))
    assert session.processes_to_serve() == (), "one of them has a server"
    session.watch.servers = (BESIDE,)
    on_gpus(session, **changed)
    assert session.processes_to_serve() == ()


def test_no_process_is_offered_where_a_server_answers_or_nothing_is_real(
        session: StillSession, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [p.pid for p in session.processes_to_serve()] == [7, 7380]
    session.watch.servers = (Server("127.0.0.1:6009"),)
    assert session.processes_to_serve() == ()
    session.watch.servers = (Server("127.0.0.1:6009", problem="nothing listens"),)
    assert session.processes_to_serve()
    session.holding(*(replace(p, reason=ZOMBIE if p.pid == 7 else None) for p in session.feed.sample.processes))
    assert [p.pid for p in session.processes_to_serve()] == [7380], "one that has ended can have none"
    monkeypatch.setattr(session.feed.source, "simulated", True)
    assert session.processes_to_serve() == ()
