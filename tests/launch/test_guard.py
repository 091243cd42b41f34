"""The guard of recordings in a PyTorch job (gputop/launch/inside/gputop_kineto.py), with a torch of our own."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import struct
import threading
import time
from enum import Enum
from importlib.util import module_from_spec, spec_from_file_location
from types import SimpleNamespace

import pytest

from gputop.launch import environment
from gputop.profiler.kineto import guard as asking
from gputop.trace.complete_part import END_MARK
from tests.waiting import PATIENCE_S

_spec = spec_from_file_location("gputop_kineto_of_test", environment.INSIDE / "gputop_kineto.py")
inside = module_from_spec(_spec)
_spec.loader.exec_module(inside)
_Action = Enum("_Action", "NONE WARMUP RECORD RECORD_AND_SAVE")


class _Profile:
    def __init__(self, schedule=lambda _: _Action.RECORD, step=0):
        self.schedule, self.step_num = schedule, step

    @property
    def current_action(self):
        return self.schedule(self.step_num)


class _Torch:
    """``recorded`` is whether operators call kineto back; ``said`` what the guard did, in order."""

    def __init__(self, profilers=(), enabled=False):
        self.recorded, self.let_go, self.said = threading.Event(), threading.Event(), []
        self.blocks = ctypes.c_uint64(7)  # of events, that kineto's queues have had
        self.made = []  # kineto's pollers, by their address
        self.autograd = SimpleNamespace(profiler=SimpleNamespace(
            _is_profiler_enabled=enabled, KinetoStepTracker=SimpleNamespace(
                _step_dict={"ProfilerStep": 0} if profilers else {}),
            _prepare_profiler=lambda: None, _enable_profiler=lambda: self.said.append("enabled"),
            record_function=self._mark))
        self.profiler = SimpleNamespace(profile=_Profile, ProfilerAction=_Action,
                                        ProfilerActivity=SimpleNamespace(CPU="CPU"))
        self._C = SimpleNamespace(_autograd=SimpleNamespace(_toggle_collection_dynamic=self._toggle))

    @contextlib.contextmanager
    def _mark(self, name):
        self.said.append(name)
        yield

    def _toggle(self, on, what):
        self.said.append((on, what))
        self.recorded.clear()
        self.let_go.set()


@pytest.fixture
def torch(monkeypatch):
    made = _Torch()
    monkeypatch.setattr(inside, "_library", lambda *_: SimpleNamespace(
        **{inside._IS_RECORDED: lambda: made.recorded.is_set(), inside._LOADER: lambda: 42,
           inside._MAKE_LOADER: lambda at: made.made.append(at)}))
    monkeypatch.setattr(inside, "_block_counter", lambda torch: (torch.blocks, "most_events"))
    monkeypatch.setattr(inside.atexit, "register", lambda _: None)
    monkeypatch.setattr(inside.os, "register_at_fork", lambda **_: None)
    monkeypatch.setattr(inside._Guard, "_without_warnings", lambda _: contextlib.nullcontext())
    return made


class _Daemon:
    """gputop's end of the sockets in the folder."""

    def __init__(self, folder):
        self.folder, self.file = folder, folder / "trace.json"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(folder / "dynolog"))
        self.socket.settimeout(PATIENCE_S)

    def ask(self, guard, **other) -> str:
        """What the guard answers."""
        request = {"token": "t", "file": self.file.name, "seconds": 0.05, "rest_s": 30.0, "wait_s": 30.0, **other}
        self.tell(guard, request)
        return self.report()

    def tell(self, guard, message) -> None:
        self.socket.sendto(json.dumps(message).encode(), str(self.folder / f"{inside.GUARD_PREFIX}{guard._pid}"))

    def report(self) -> str:
        report = json.loads(self.socket.recv(4096)[struct.calcsize("=Q32s"):])
        assert report["token"] == "t"
        return report["state"]


@pytest.fixture
def daemon(tmp_path_factory):
    made = _Daemon(tmp_path_factory.mktemp("g"))
    yield made
    made.socket.close()


@pytest.fixture
def guard(torch, daemon):
    return inside._Guard(torch, str(daemon.folder)).start()


def test_names_are_the_same_on_both_sides():
    assert inside.GUARD_PREFIX == asking._PREFIX and inside.END_MARK == END_MARK


def test_operators_are_let_go_before_the_recording_ends(torch, daemon, guard):
    assert daemon.ask(guard) == "ready"
    assert torch.said == [] and not guard._over.is_set()
    torch.recorded.set()
    daemon.file.touch()
    assert guard._over.wait(PATIENCE_S)
    assert torch.said == [END_MARK, (False, {"CPU"})]


def test_a_recording_ends_at_its_number_of_events(torch, daemon, guard):
    assert daemon.ask(guard, seconds=1000.0, most_events=1024) == "ready"
    torch.recorded.set()
    torch.blocks.value += 1
    assert not torch.let_go.is_set() and not guard._over.is_set()
    torch.blocks.value += 1
    assert daemon.report() == "full" and torch.let_go.wait(PATIENCE_S)
    assert torch.said == [END_MARK, (False, {"CPU"})]


def test_a_recording_that_begins_late_ends_when_kineto_was_told(torch, daemon, guard):
    assert daemon.ask(guard, seconds=1000.0) == "ready"
    for ends_s in ("soon", None, time.time() + 30.0):
        daemon.tell(guard, {"ends_s": ends_s})
    torch.recorded.set()
    assert torch.let_go.wait(PATIENCE_S) and torch.said == [END_MARK, (False, {"CPU"})]


def test_one_that_is_over_already_is_left_alone(torch, daemon, guard):
    """Kineto has let go of the callbacks itself, where the guard was kept from running."""
    assert daemon.ask(guard, seconds=0.1, rest_s=-0.1) == "ready"
    torch.recorded.set()
    daemon.file.touch()
    assert guard._over.wait(PATIENCE_S)
    assert torch.said == [END_MARK]


def test_a_recording_that_does_not_come_is_given_up(torch, daemon, guard):
    assert daemon.ask(guard, wait_s=0.0) == "ready"
    assert guard._over.wait(PATIENCE_S) and torch.said == []
    assert daemon.ask(guard) == "ready"  # the next one
    daemon.tell(guard, {})
    assert guard._over.wait(PATIENCE_S) and torch.said == []


@pytest.mark.parametrize("request_", [b"", b"[]", b"{", b"\xff" * 5000, b'{"file": 1}', b'{"file": "x", "token": "t"}',
                                      b'{"file": "x", "token": "t", "seconds": "much", "rest_s": 0, "wait_s": 0}'])
def test_what_is_no_request_is_passed_over(torch, daemon, guard, request_):
    daemon.socket.sendto(request_, str(daemon.folder / f"{inside.GUARD_PREFIX}{guard._pid}"))
    assert daemon.ask(guard) == "ready"


def test_the_job_s_end_waits_for_the_recording_and_ends_it(torch, daemon, guard):
    assert daemon.ask(guard, seconds=3000.0) == "ready"
    ended = threading.Thread(target=guard._wait_at_exit)
    ended.start()
    assert guard._ending.wait(PATIENCE_S)
    torch.recorded.set()  # it was fetched before
    assert torch.let_go.wait(PATIENCE_S) and ended.is_alive()
    daemon.file.touch()
    ended.join(PATIENCE_S)
    assert not ended.is_alive() and torch.said == [END_MARK, (False, {"CPU"})]
    assert daemon.file.exists() and daemon.folder.exists()


def test_an_end_without_a_recording_waits_for_nothing(torch, daemon, guard):
    guard._wait_at_exit()
    assert daemon.ask(guard) == "ending" and guard._over.is_set()


def test_an_end_with_a_request_under_way_is_told_and_waits_for_gputop_s_word(torch, daemon, guard):
    assert daemon.ask(guard) == "ready"
    ended = threading.Thread(target=guard._wait_at_exit)
    ended.start()
    assert daemon.report() == "ending"
    daemon.tell(guard, {})  # it was not fetched
    ended.join(PATIENCE_S)
    assert guard._over.is_set() and torch.said == []


def test_the_job_s_own_profiler_begins_when_the_recording_is_over(torch, daemon, guard):
    module = torch.autograd.profiler
    own = module._enable_profiler
    assert daemon.ask(guard) == "ready"
    begun = threading.Thread(target=module._enable_profiler)
    begun.start()
    torch.recorded.set()
    assert torch.let_go.wait(PATIENCE_S) and "enabled" not in torch.said
    daemon.file.touch()
    begun.join(PATIENCE_S)
    assert torch.said[-1] == "enabled" and guard._over.is_set()
    daemon.file.unlink()
    assert daemon.ask(guard) == "ready"  # it is done with the first
    assert module._enable_profiler.__closure__[0].cell_contents is own


def test_one_whose_gputop_was_killed_does_not_keep_the_next_from_being_guarded(torch, daemon, guard):
    assert daemon.ask(guard, rest_s=0.2) == "ready"
    torch.recorded.set()
    assert torch.let_go.wait(PATIENCE_S)
    assert daemon.ask(guard) == "ready" and not daemon.file.exists()


def test_a_recording_of_a_killed_gputop_ends_at_once(torch, daemon, guard):
    """Nobody reads it; and kineto waits for 10 s at each message to a socket that nobody has open."""
    assert daemon.ask(guard, seconds=3000.0) == "ready"
    torch.recorded.set()
    daemon.socket.close()
    assert torch.let_go.wait(PATIENCE_S) and not (daemon.folder / "dynolog").exists()
    daemon.file.touch()
    assert guard._over.wait(PATIENCE_S)


def test_a_gputop_that_is_stopped_does_not_hold_the_job_s_end(torch, tmp_path_factory):
    daemon = _Daemon(tmp_path_factory.mktemp(inside._FOLDER[1:]))
    guard = inside._Guard(torch, str(daemon.folder))
    assert guard._is_served()
    with daemon.socket:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, pytest.raises(BlockingIOError):
            sender.setblocking(False)
            while True:
                sender.sendto(b"", str(daemon.folder / "dynolog"))
        guard._wait_at_exit()
    assert not daemon.folder.exists()


def test_a_forked_child_is_not_recorded_and_does_not_wait_for_kineto(torch, daemon, guard, monkeypatch):
    at_end = []
    monkeypatch.setattr(guard, "_call_at_end", lambda function, _: at_end.append(function.value))
    guard._in_child()
    libc = ctypes.CDLL(None)
    assert at_end == [ctypes.cast(one, ctypes.c_void_p).value for one in (libc._exit, libc.fcloseall)], "last one first"
    assert torch.said == [] and guard._over.is_set() and torch.made == [42]
    assert daemon.ask(guard, seconds=3000.0) == "ready"
    torch.recorded.set()
    guard._in_child()
    assert torch.said == [(False, {"CPU"})] and guard._over.is_set()


def test_a_job_that_closes_all_files_is_not_kept_busy(torch, daemon, monkeypatch):
    ended = threading.Event()
    run = inside._Guard._run
    monkeypatch.setattr(inside._Guard, "_run", lambda self: (run(self), ended.set()))
    guard = inside._Guard(torch, str(daemon.folder)).start()
    guard._socket.shutdown(socket.SHUT_RDWR)  # wakes its thread
    guard._socket.close()
    assert ended.wait(PATIENCE_S)


def test_the_end_of_one_that_closed_all_files_waits_for_its_recording(torch, daemon, guard, tmp_path):
    assert daemon.ask(guard, seconds=0.2) == "ready"
    torch.recorded.set()
    with (tmp_path / "of the job").open("w") as file:
        os.dup2(file.fileno(), guard._socket.fileno())
    assert torch.let_go.wait(PATIENCE_S) and not guard._over.is_set()
    assert guard._socket.fileno() == -1, "it neither reads nor closes what has its number now"
    daemon.file.touch()
    assert guard._over.wait(PATIENCE_S)


def test_two_recordings_at_once_are_refused(torch, daemon, guard):
    torch.recorded.set()
    assert daemon.ask(guard) == "observed"


def _cycles(wait):
    return lambda step: _Action.NONE if step % (wait + 5) < wait else _Action.RECORD


@pytest.mark.parametrize(("profilers", "enabled", "seconds", "state"), [
    ((), False, None, ("", "")),
    ((), True, None, ("profiling", "")),  # torch.autograd.profiler's own
    ((_Profile(),), True, None, ("profiling", " 1.000")),  # always on
    ((_Profile(_cycles(10), 11),), True, None, ("profiling", "4 0.333")),
    ((_Profile(),), False, None, ("", "")),  # not begun, or ended
    ((_Profile(lambda s: _Action.WARMUP if s == 3 else _Action.RECORD if s < 6 else _Action.NONE, 3),), False, None,
     ("profiling", "3 0.000")),
    ((_Profile(_cycles(10), 3),), False, None, ("", "")),  # the guard asks again
    ((_Profile(_cycles(10), 3),), False, 1.0, ("", "")),  # it does not step
])
def test_what_the_job_s_own_profiler_does(monkeypatch, profilers, enabled, seconds, state):
    monkeypatch.setattr(inside, "time", SimpleNamespace(sleep=lambda _: None))
    monkeypatch.setattr(inside, "gc", SimpleNamespace(get_objects=lambda: [*profilers, object(), 1]))
    assert inside._own_profiler(_Torch(profilers, enabled), seconds) == state


@pytest.mark.parametrize(("wait", "state"), [(100, ("cycles", "50 0.048")), (9000, ("", ""))])
def test_cycles_matter_where_the_next_begins_before_a_recording_is_over(monkeypatch, wait, state):
    profiler = _Profile(_cycles(wait), 40)
    monkeypatch.setattr(inside, "gc", SimpleNamespace(get_objects=lambda: [profiler]))
    monkeypatch.setattr(inside, "time", SimpleNamespace(sleep=lambda _: setattr(profiler, "step_num", 50)))
    assert inside._own_profiler(_Torch([profiler]), 5.0) == state
