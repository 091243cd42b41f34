"""The client of the host engine: connecting, back-off, watches, freshness, hanging calls."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from gputop.sources.dcgm import fields
from gputop.sources.dcgm.client import HANG_TIMEOUT_S, MAX_RETRY_S, DcgmClient
from gputop.sources.dcgm.connection import Address
from gputop.sources.dcgm.engine_reader import BLANK_S, CHECK_S, REFUSED_RETRY_S, clock_text
from gputop.sources.dcgm.fields import PROFILING_IDS
from tests.dcgm_double import PROFILING
from tests.dcgm_double.scene import Scene
from tests.waiting import PATIENCE_S


@pytest.fixture
def scene(make_scene: Callable[..., Scene]) -> Scene:
    scene = make_scene()
    scene.client.subscribe([1002, 1009], None)
    return scene


# -- connecting ------------------------------------------------------------------------------------


def test_no_bindings_are_loaded_where_nothing_listens(scene: Scene) -> None:
    scene.engine.stop()
    scene.client.step()
    snapshot = scene.client.snapshot()
    assert snapshot.error == f"no host engine answers at {scene.engine.address}"
    assert "systemctl start nvidia-dcgm" in snapshot.fix and not scene.engine.calls


def test_the_cause_of_a_failed_connection_is_named(tmp_path: Path) -> None:
    client = DcgmClient(Address(path=str(tmp_path / "none.sock")), root=tmp_path, env={})
    client.step()
    assert "No such file" in (client.snapshot().error or "")


def test_a_refused_permission_names_the_socket(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Address, timeout_s: float) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Address, "reach", refuse)
    scene.client.address = Address(path="/run/dcgm.sock")
    scene.client.step()
    snapshot = scene.client.snapshot()
    assert snapshot.error == "this user is not allowed to connect to unix:///run/dcgm.sock" and "ls -l" in snapshot.fix


def test_something_else_that_listens_is_no_host_engine(scene: Scene) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        scene.client.address = Address("127.0.0.1", server.getsockname()[1])
        scene.client.step()
    assert "DCGM 4 cannot communicate with the program that listens" in (scene.client.snapshot().error or "")


def test_an_older_engine_gets_the_older_bindings_and_keeps_them(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(4, 3, version="3.3.9")
    scene.client.subscribe([155], None)
    scene.engine.watched_by_others([155])
    scene.client.step()
    assert scene.client.snapshot().error is None and scene.client.snapshot().version == "3.3.9"
    assert scene.engine.calls["dcgmConnect_v2"] == 2 and len(scene.engine.clients) == 1
    scene.engine.stop()
    scene.step()
    scene.engine.start()
    scene.step(2.0)
    assert scene.client.snapshot().error is None and scene.engine.calls["dcgmConnect_v2"] == 3


def test_older_bindings_on_a_newer_engine(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(3, version="4.6.0")
    scene.client.step()
    assert scene.client.snapshot().version == "4.6.0"


def test_newer_bindings_alone_on_an_older_engine(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(4, version="3.3.9")
    scene.client.step()
    assert "DCGM 4" in (scene.client.snapshot().error or "") and "different versions" in (
        scene.client.snapshot().error or "")


def test_bindings_that_break_give_way_to_the_next(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(4, 3)
    next(scene.root.rglob("datacenter-gpu-manager-4/bindings/python3/dcgm_agent.py")).write_text("1/0")
    scene.client.step()
    assert scene.client.snapshot().error is None


# -- losing the engine -----------------------------------------------------------------------------


def test_a_lost_engine_is_tried_again_more_and_more_rarely(scene: Scene) -> None:
    scene.engine.stop()
    scene.client.step()
    tries: list[float] = []
    reach = Address.reach

    def counted(self: Address, timeout_s: float) -> bool:
        tries.append(scene.now_s)
        return reach(self, timeout_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Address, "reach", counted)
        scene.step(0.5, times=400)
    gaps = [round(b - a) for a, b in itertools.pairwise(tries)]
    assert gaps == [2, 4, 8, 16, 32, 60, 60] and gaps[-1] == MAX_RETRY_S


@pytest.mark.parametrize(("answers", "forgotten"), [(12, True), (2, False)])
def test_a_steady_connection_forgets_the_back_off(scene: Scene, answers: int, forgotten: bool) -> None:
    scene.client.subscribe([155], None, ordinary=True)  # so that each step asks the engine
    scene.engine.stop()
    scene.step(30.0, times=8)
    scene.engine.start()
    scene.step(60.0)
    scene.step(times=answers)
    scene.engine.stop()
    scene.step()
    assert "was lost" in (scene.client.snapshot().error or "")
    scene.engine.start()
    scene.step(1.0)
    assert (scene.client.snapshot().error is None) is forgotten


@pytest.mark.parametrize("code", [fields.TIMEOUT, fields.CONNECTION_NOT_VALID, fields.UNINITIALIZED, fields.BADPARAM,
                                  fields.GENERIC_ERROR])
def test_errors_of_a_read_end_in_a_new_connection(scene: Scene, code: int) -> None:
    scene.engine.watched_by_others([1002])
    scene.step()
    scene.engine.fails["dcgmEntitiesGetLatestValues"] = code
    scene.step()
    assert f"(DCGM {code})" in str(scene.value(1002)) and not scene.engine.clients
    scene.engine.fails.clear()
    scene.step()
    assert scene.client.snapshot().error is None and len(scene.engine.clients) == 1


def test_a_connection_that_is_gone_is_not_asked_to_undo_its_watches(scene: Scene) -> None:
    scene.client.subscribe([1002], None, profiling=True)
    scene.step()
    scene.engine.fails["dcgmEntitiesGetLatestValues"] = fields.TIMEOUT
    scene.step()
    assert not scene.engine.calls["dcgmUnwatchFields"] and scene.engine.calls["dcgmDisconnect"] == 1


# -- reading and watching --------------------------------------------------------------------------


def test_without_consent_nothing_is_watched(scene: Scene) -> None:
    scene.step(times=5)
    assert scene.client.snapshot().values["GPU-0"][1002].code == fields.NOT_WATCHED
    assert not scene.engine.watched() and not scene.engine.calls["dcgmProfGetSupportedMetricGroups"]
    assert len(scene.engine.read_ids) == 1  # each such read is an error line in the engine's log
    scene.engine.watched_by_others([1002])
    scene.step(CHECK_S)
    scene.step()
    assert scene.value(1002) == 0.5


def test_an_hour_of_unwatched_fields_is_a_line_each_in_the_engines_log(scene: Scene) -> None:
    scene.client.subscribe(PROFILING_IDS, None)
    scene.step(times=3600)
    assert scene.engine.error_lines == 2 * len(PROFILING_IDS)


def test_one_gpu_that_is_watched_does_not_have_the_others_asked(scene: Scene) -> None:
    scene.engine.watched_by_others([1002, 1009], [0])
    scene.step(times=100)
    assert scene.value(1002, 0) == 0.5 and "no program watches" in str(scene.value(1002, 1))
    assert scene.engine.error_lines == 2


def test_field_groups_that_cannot_be_listed_are_asked_rarely(scene: Scene) -> None:
    scene.engine.fails["dcgmFieldGroupGetAll"] = fields.NO_PERMISSION
    scene.step(times=1205)
    assert scene.engine.error_lines == 3 * 4  # two fields of two GPUs, every ten minutes


# -- lost GPUs -------------------------------------------------------------------------------------


def test_a_gpu_that_is_lost_before_does_not_keep_the_others_from_being_watched(scene: Scene) -> None:
    scene.engine.lost.add(0)
    scene.client.subscribe([155], None, profiling=True, ordinary=True)
    scene.step(times=3)
    assert (scene.value(155, 1), scene.value(1002, 1)) == (3, 0.5)
    assert scene.value(155, 0) == "the GPU is lost (DCGM -18)"
    lines = scene.engine.error_lines
    scene.step(times=round(REFUSED_RETRY_S) - 5)
    assert scene.engine.error_lines == lines, "no value of a lost GPU is asked for"
    scene.engine.lost.clear()
    scene.step(times=10)
    assert (scene.value(155, 0), scene.value(1002, 0)) == (3, 0.5), "it came back"


def test_blanks_for_ever_of_a_gpu_that_is_not_lost(scene: Scene) -> None:
    """The hope for a second sample ends, for a field of gputop's own watch after its period."""
    scene.client.subscribe([155, 150, 1002], None, ordinary=True)
    scene.engine.watched_by_others([1002])
    scene.step()
    blank = type(next(iter(scene.engine.samples.values())))(140737488355328.0, 1)
    scene.engine.samples[0, 155] = scene.engine.samples[0, 1002] = blank
    scene.engine.stuck |= {(0, 155), (0, 1002)}
    begin_s = scene.now_s
    scene.step(times=5)
    assert scene.value(155) == f"no value since {clock_text(begin_s + 1)}" and scene.value(150) == 3
    assert "first sample" in str(scene.value(1002))
    scene.step(times=round(BLANK_S))
    assert "no value since" in str(scene.value(1002))


def test_a_reconnect_is_not_taken_for_a_slow_watch(scene: Scene) -> None:
    scene.client.subscribe([155], None, ordinary=True)
    scene.engine.watched_by_others([1002])
    scene.step(times=4)
    scene.engine.stop()
    scene.step(times=21)
    scene.engine.start()
    for _ in range(30):
        scene.step()
        assert not scene.client.snapshot().sources
    assert scene.value(155) == 3


def test_one_pause_of_the_engine_is_no_slow_watch(scene: Scene) -> None:
    scene.engine.watched_by_others([1002])
    scene.step(times=4)
    scene.now_s += 21.0
    for _ in range(5):
        scene.step()
        assert not scene.client.snapshot().sources and scene.value(1002) == 0.5


def test_times_that_cannot_be_are_no_times(scene: Scene) -> None:
    scene.engine.watched_by_others([1002])
    scene.step()
    for time_us in (-1, 1 << 62, -(1 << 63)):
        scene.engine.samples[0, 1002] = type(scene.engine.samples[0, 1002])(0.5, time_us)
        scene.engine.stuck.add((0, 1002))
        scene.step()
        assert "field 1002 was last updated" in str(scene.value(1002))


@pytest.mark.parametrize(("code", "words"), [
    (fields.REQUIRES_ROOT, "does not run as root"), (fields.IN_USE, "another program uses the counters"),
    (fields.MODULE_NOT_LOADED, "profiling module is not loaded"), (fields.NO_PERMISSION, "no permission"),
])
def test_a_refused_profiling_watch_says_why_and_the_rest_goes_on(scene: Scene, code: int, words: str) -> None:
    scene.engine.watched_by_others([155])
    scene.client.subscribe([155], None, profiling=True)
    scene.engine.fails["dcgmWatchFields"] = code
    scene.step(times=2)
    assert words in str(scene.value(1002)) and scene.value(155) == 3
    assert scene.engine.read_ids[-1] == [155], "the engine's log is spared"
    assert scene.engine.calls["dcgmWatchFields"] == 1


def test_watches_follow_the_pace_of_the_ticks(scene: Scene) -> None:
    scene.client.subscribe([1002], None, profiling=True)
    scene.step()

    def period_s() -> float:
        return min(period_us for period_us, _, _ in scene.engine.clients[0].watches.values()) / 1e6

    assert period_s() == 1.0
    for tick_s, expected_s in ((0.0, 1.0), (0.1, 1.0), (0.21, 1.0), (0.31, 0.1)):
        scene.client._pace.note(tick_s)
        scene.step(0.1)
        assert period_s() == expected_s


# -- freshness -------------------------------------------------------------------------------------


def test_a_value_whose_watch_has_ended_is_not_of_now(scene: Scene) -> None:
    scene.engine.watched_by_others([1002])
    scene.step(times=3)
    assert scene.value(1002) == 0.5
    scene.engine.watched_by_nobody_else()
    scene.step(1.0)
    assert scene.value(1002) == 0.5
    scene.step(1.0, times=3)
    assert f"was last updated at {clock_text(scene.now_s - 4)}:" in str(scene.value(1002))
    scene.engine.watched_by_others([1002])
    scene.step()
    assert scene.value(1002) == 0.5


def test_an_old_value_found_at_first_waits_for_a_newer_one(scene: Scene) -> None:
    scene.engine.watched_by_others([1002])
    scene.engine.update()
    scene.engine.update()
    scene.now_s += 20.0
    scene.client.step()
    assert f"was last updated at {clock_text(scene.now_s - 20)}:" in str(scene.value(1002))


@pytest.mark.parametrize("skew_s", [-3600.0, 3600.0])
def test_a_clock_that_is_wrong_on_the_other_machine(scene: Scene, skew_s: float) -> None:
    clock = scene.engine.clock
    scene.engine.clock = lambda: clock() + skew_s
    scene.engine.watched_by_others([1002])
    scene.step(times=4)
    assert scene.value(1002) == 0.5
    scene.engine.watched_by_nobody_else()
    scene.step(times=5)
    assert "was last updated" in str(scene.value(1002))


def test_a_snapshot_that_got_old_is_an_error(scene: Scene) -> None:
    scene.step()
    scene.now_s += 4.0
    assert f"has not answered since {clock_text(scene.now_s - 4)}" in (scene.client.snapshot().error or "")


# -- the thread ------------------------------------------------------------------------------------


def test_one_question_per_tick(scene: Scene) -> None:
    scene.engine.watched_by_others([1002, 1009])
    for tick in (1.0, 1.0, 2.0):
        scene.client.request_update(tick)
        assert scene.client.wait(PATIENCE_S)
    assert len(scene.engine.read_ids) == 2
    scene.client.close()
    assert not scene.engine.clients


def test_an_engine_that_hangs_holds_up_nobody_and_is_named(scene: Scene) -> None:
    scene.engine.watched_by_others([1002])
    scene.client.request_update(1.0)
    assert scene.client.wait(PATIENCE_S)
    scene.engine.hang("dcgmEntitiesGetLatestValues")
    scene.now_s += 60.0
    scene.client.request_update(2.0)
    assert scene.engine.await_hanging()
    assert not scene.client.wait(0.0)
    scene.now_s += HANG_TIMEOUT_S + 1
    since = clock_text(scene.now_s - HANG_TIMEOUT_S - 1)
    assert f"does not respond: a call has hung since {since}" in (scene.client.snapshot().error or "")
    scene.client.request_update(3.0)  # returns at once, as all the others do
    scene.client.close(0.0)
    scene.engine.release()
    scene.client._thread.join(PATIENCE_S)
    assert not scene.client._thread.is_alive() and not scene.engine.clients


def test_a_fault_of_gputop_itself_is_said(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene.client, "_poll", lambda reader: 1 / 0)
    scene.client.request_update(1.0)
    assert scene.client.wait(PATIENCE_S)
    assert "ZeroDivisionError" in (scene.client.snapshot().error or "")


def test_an_unknown_field_costs_only_itself(scene: Scene) -> None:
    scene.engine.watched_by_others(PROFILING)
    scene.engine.unknown.add(1009)
    scene.step(times=2)
    assert scene.value(1002) == 0.5 and "field 1009" in str(scene.value(1009))
