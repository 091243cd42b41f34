"""Playing recordings: pace, seek, pause, the session over them, and the screen."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gputop.core.errors import GputopError
from gputop.core.samples import NodeSample
from gputop.replay.format import RecordingWriter
from gputop.replay.player import MAX_SPEED, Player
from gputop.replay.reader import Recording
from gputop.session.session import Options, Session
from gputop.tui.monitor.messages import panel_intro
from tests.fakes import START_S, node_sample
from tests.records import replace
from tests.tui.found import piloted, text_of
from tests.waiting import PATIENCE_S

Change = Callable[[NodeSample], NodeSample]


def recorded(path: Path, ticks: list[float], change: Change = lambda sample: sample) -> Path:
    writer = RecordingWriter(path)
    for tick in ticks:
        writer.append(change(replace(node_sample(int(tick), 2), time_s=START_S + tick)))
    writer.close()
    return path


class Watched:
    """A player whose samples are waited for; ``step`` moves its clock."""

    def __init__(self, path: Path, **options: float) -> None:
        self.now_s = 100.0
        self.player = Player(Recording(path), clock=lambda: self.now_s, **options)  # type: ignore[arg-type]
        self.messages: queue.SimpleQueue[NodeSample | GputopError] = queue.SimpleQueue()
        self.player.connect(self.messages.put, self.messages.put)
        self.player.start()

    def tick(self) -> float:
        """Seconds into the recording of the next sample played."""
        message = self.messages.get(timeout=PATIENCE_S)
        assert isinstance(message, NodeSample)
        return message.time_s - START_S

    def step(self, seconds: float) -> None:
        self.now_s += seconds
        with self.player._changed:
            self.player._changed.notify_all()

    def quiet(self) -> bool:
        """Whether nothing more comes without a step of the clock."""
        with self.player._changed:
            return self.messages.empty() and (self.player.paused or self.now_s < self.player._due_s)


@pytest.fixture
def watch(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Watched]:
    def make(ticks: list[float], **options: float) -> Watched:
        watched = Watched(recorded(tmp_path / "node.rec", ticks), **options)
        request.addfinalizer(watched.player.stop)
        return watched

    return make


def test_it_plays_at_the_pace_of_the_recording(watch: Callable[..., Watched]) -> None:
    watched = watch([0, 1, 2, 3, 4])
    assert watched.tick() == 0
    watched.step(0.9)
    assert watched.quiet()
    watched.step(0.2)
    assert watched.tick() == 1
    watched.step(1.0)
    assert watched.tick() == 2 and watched.player.now_s() == START_S + 2


def test_twice_as_fast(watch: Callable[..., Watched]) -> None:
    watched = watch([0, 1, 2, 3, 4], speed=2.0)
    assert watched.tick() == 0
    watched.step(0.5)
    assert watched.tick() == 1
    watched.player.change_speed(1)
    assert watched.player.speed == 5.0
    watched.step(0.2)
    assert watched.tick() == 2
    watched.player.change_speed(-4)
    assert watched.player.speed == 0.25 and watched.player.state() == "0.25×"


def test_as_fast_as_it_goes_to_the_end(watch: Callable[..., Watched]) -> None:
    watched = watch([float(t) for t in range(50)], speed=MAX_SPEED)
    assert [watched.tick() for _ in range(50)] == list(range(50))
    assert watched.player.at_end and watched.player.state() == "end of recording"
    watched.player.seek(-10)
    assert [watched.tick() for _ in range(11)] == list(range(39, 50))


def test_seek_works_during_a_pause(watch: Callable[..., Watched]) -> None:
    watched = watch([float(t) for t in range(200)])
    assert watched.tick() == 0
    watched.player.toggle_pause()
    watched.step(50)
    assert watched.quiet() and watched.player.state() == "1×, paused"
    watched.player.seek(60)
    # What lies between is history; it comes first.
    assert [watched.tick() for _ in range(60)] == list(range(1, 61))
    watched.player.seek(-20)
    assert watched.tick() == 40
    watched.player.seek(-1000)
    assert watched.tick() == 0
    watched.player.toggle_pause()
    assert watched.tick() == 1


def test_start_fills_the_history_thinly(watch: Callable[..., Watched]) -> None:
    watched = watch([t / 2 for t in range(2400)], start_s=1000.0)
    ticks = []
    while not ticks or ticks[-1] != 1000:
        ticks.append(watched.tick())
    assert ticks == sorted(ticks) and ticks[0] <= 10
    assert ticks[-601:] == list(range(400, 1001))  # one a second over the last ten minutes
    assert 35 <= len(ticks) - 601 <= 41  # one in ten seconds before


def test_a_hole_is_passed_over(watch: Callable[..., Watched]) -> None:
    watched = watch([0, 1, 2, 90_000, 90_001])
    assert watched.tick() == 0
    for expected in (1, 2):
        watched.step(1.0)
        assert watched.tick() == expected
    watched.step(10.0)
    assert watched.tick() == 90_000
    watched.player.seek(-60)
    assert watched.tick() == 2
    watched.player.seek(60)
    assert watched.tick() == 90_000


def test_a_file_that_is_damaged_while_it_plays_is_said(tmp_path: Path) -> None:
    path = recorded(tmp_path / "node.rec", [float(t) for t in range(300)])
    player = Player(Recording(path), speed=MAX_SPEED)
    path.write_bytes(path.read_bytes()[:100])
    errors: queue.SimpleQueue[GputopError] = queue.SimpleQueue()
    player.connect(lambda sample: None, errors.put)
    player.start()
    assert "cannot read" in errors.get(timeout=PATIENCE_S).message
    player.stop()


def test_stop_ends_the_thread_wherever_it_is(watch: Callable[..., Watched]) -> None:
    watched = watch([0, 1000])
    watched.tick()
    watched.player.stop()
    assert watched.player._thread is not None and not watched.player._thread.is_alive()


# -- in a session -------------------------------------------------------------------------------


def test_a_session_lives_in_recorded_time(tmp_path: Path) -> None:
    path = recorded(tmp_path / "node.rec", [float(t) for t in range(120)], lambda s: replace(s, simulated=True))
    player = Player(Recording(path), start_s=60.0, speed=MAX_SPEED)
    session = Session(player, Options(discover=True))
    ended = threading.Event()
    session.listen(lambda change: ended.set() if player.at_end and session.feed.sample == last else None)
    last = replace(node_sample(119, 2), simulated=True)
    session.start()
    assert ended.wait(PATIENCE_S)
    assert session.feed.source.simulated and session.feed.sample is not None and session.feed.sample.simulated
    assert session.feed.clock() == START_S + 119 and session.feed.interval_s == 1.0
    assert session.feed.history.oldest_s == START_S and session.feed.history.newest_s == START_S + 119
    with pytest.raises(GputopError, match="recording"):
        session.start_capture()
    assert not [t for t in threading.enumerate() if t.name == "gputop-discovery"]
    session.close()


def test_going_back_forgets_what_comes_later(tmp_path: Path) -> None:
    player = Player(Recording(recorded(tmp_path / "node.rec", [float(t) for t in range(100)])), start_s=90.0)
    player.paused = True
    session = Session(player)
    shown: queue.SimpleQueue[float] = queue.SimpleQueue()
    session.listen(lambda change: shown.put(session.feed.sample.time_s - START_S) if session.feed.sample else None)
    session.start()
    while shown.get(timeout=PATIENCE_S) != 90.0:
        pass
    player.seek(-50)
    while shown.get(timeout=PATIENCE_S) != 40.0:
        pass
    assert session.feed.history is not None and session.feed.history.newest_s == START_S + 40
    times, _ = session.feed.history.window(session.feed.history.uuids[0], "sm_active", 1000.0)
    assert times[-1] == START_S + 40 and len(times) == 41
    session.close()


# -- on the screen ------------------------------------------------------------------------------


async def test_the_screen_says_replay_and_its_keys_play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recorded(tmp_path / "node.rec", [float(t) for t in range(200)], lambda s: replace(s, simulated=True))
    player = Player(Recording(path))
    session = Session(player)
    shown = threading.Event()
    session.listen(lambda change: shown.set())
    async with piloted(session, (160, 40)) as (app, pilot):
        assert shown.wait(PATIENCE_S)
        await pilot.press("space")
        await pilot.pause()
        assert player.paused and not app.paused
        intro = panel_intro(session)
        assert intro and not any("profiler server" in line for line in intro)
        header = text_of(app._header)
        assert "REPLAY" in header and "SIMULATED" in header and "2027-01-15" in header and "1×, paused" in header
        await pilot.press("plus")
        await pilot.pause()
        assert player.speed == 2.0 and "2×, paused" in text_of(app._header)
        before_s = player.now_s()
        shown.clear()
        await pilot.press("full_stop")
        assert shown.wait(PATIENCE_S)
        await pilot.pause()
        assert player.now_s() == before_s + 60
        await pilot.press("comma", "minus", "left", "right", "end")
        assert "Recording" in text_of(app._job)
        player.seek(math.inf)
        while not player.at_end:
            await pilot.pause()
        await pilot.pause()
        await pilot.press("space")
        await pilot.pause()
        assert "end of recording" in text_of(app._header)
        await pilot.press("c")
        await pilot.pause()
    session.close()
