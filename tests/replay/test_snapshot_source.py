"""A snapshot in the monitor: its sample, the minutes before, its findings, and what is no snapshot."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gputop.core.errors import GputopError
from gputop.core.samples import LOST, GpuSample
from gputop.export.snapshot import document, render
from gputop.replay.format import RecordingWriter
from gputop.replay.player import Player
from gputop.replay.snapshot_document import Snapshot, from_document
from gputop.replay.snapshot_source import SnapshotPlayer, SnapshotSamples, open_player
from gputop.session.session import Session
from gputop.text import redaction
from gputop.tui.screens.dialogs import Popup
from tests.export.scene import HOSTILE, session
from tests.fakes import StillSession, node_sample
from tests.records import replace
from tests.tui.found import piloted, text_of
from tests.waiting import PATIENCE_S


def snapshot_of(watched: StillSession) -> Snapshot:
    return from_document(document(watched))


@contextmanager
def shown(snapshot: Snapshot) -> Iterator[Session]:
    """A session that has taken all of a snapshot."""
    player = SnapshotPlayer(snapshot)
    out, done = Session(player, replayed_snapshot=snapshot), threading.Event()

    def listener(change: str) -> None:
        if out.feed.sample is not None and out.feed.sample.time_s == snapshot.sample.time_s:
            done.set()

    out.listen(listener)
    out.start()
    try:
        assert done.wait(PATIENCE_S)
        yield out
    finally:
        out.close()


def test_the_sample_the_findings_and_the_capture_are_the_snapshots() -> None:
    watched = session()
    snapshot = snapshot_of(watched)
    with shown(snapshot) as out:
        assert out.feed.sample == snapshot.sample and out.feed.interval_s == 1.0
        assert out.results.findings == watched.results.findings and out.watch.servers[0].address == "localhost:6009"
        last, before = out.results.last_capture, watched.results.last_capture
        assert last is not None and before is not None and last.step_s == before.step_s
        with pytest.raises(GputopError, match="recording"):
            out.start_capture()


def test_the_minutes_before_are_the_means_of_the_history() -> None:
    watched = StillSession(ticks=300)
    with shown(snapshot_of(watched)) as out:
        end_s = watched.feed.sample.time_s // 5 * 5  # type: ignore[union-attr]
        for metric in ("sm_active", "power_w", "memory_used_bytes"):
            lanes = [h.lane("GPU-test-3", metric, end_s=end_s, slice_s=5.0, slices=50)
                     for h in (watched.feed.history, out.feed.history)]
            assert lanes[1].mean == pytest.approx(lanes[0].mean, rel=1e-4)
            assert lanes[1].full_scale == pytest.approx(lanes[0].full_scale)
        assert lanes[1].count == [5] * 50


def test_samples_of_the_history_are_coarse() -> None:
    samples = SnapshotSamples(snapshot_of(StillSession(ticks=60)))
    before = samples.sample(10)
    assert before.gpus[0]["sm_active"].coarse and before.gpus[0]["sm_active"].source == "snapshot, mean over 5 s"
    assert before.host["cpu_ratio"].value is None and before.processes == ()
    assert samples.index_at(samples.times_s[10] + 0.1) == 10 and samples.index_at(0) == 0
    assert samples.times_s[-1] - samples.times_s[-2] >= 0.5


def test_a_gpu_that_was_lost_at_the_end_was_there_before() -> None:
    def lose(gpu: GpuSample, tick: int) -> GpuSample:
        gone = tick > 30 and gpu.info.index == 0
        return replace(gpu, state=LOST, message="fell off the bus", readings={}) if gone else gpu

    samples = SnapshotSamples(snapshot_of(StillSession(ticks=60, gpus=2, change=lose)))
    assert samples.sample(5).gpus[0].state == "ok" and samples.sample(len(samples) - 1).gpus[0].state == LOST
    assert samples.sample(len(samples) - 2).gpus[0].state == LOST, "nothing was measured then"


def test_without_history_there_is_the_one_sample() -> None:
    snapshot = replace(snapshot_of(StillSession(ticks=3)), history=None)
    samples = SnapshotSamples(snapshot)
    assert len(samples) == 1 and samples.sample(0) == snapshot.sample


@pytest.mark.parametrize("kind", ["json", "html"])
def test_a_file_is_opened_by_what_is_in_it(tmp_path: Path, kind: str) -> None:
    watched = session()
    (tmp_path / "s").write_text(render(watched, kind))
    player, snapshot = open_player(tmp_path / "s", 0.0, 1.0, pytest.fail)
    assert isinstance(player, SnapshotPlayer) and snapshot is not None and snapshot.findings == watched.results.findings
    writer = RecordingWriter(tmp_path / "r")
    writer.append(redaction.sample(node_sample(0)))
    writer.close()
    player, snapshot = open_player(tmp_path / "r", 0.0, 1.0, pytest.fail)
    assert type(player) is Player and snapshot is None
    player.recording.close()


@pytest.mark.parametrize("name", ["", HOSTILE])
async def test_the_screen_says_snapshot_and_shows_it(name: str) -> None:
    snapshot = snapshot_of(session(name=name))
    out = Session(SnapshotPlayer(snapshot), replayed_snapshot=snapshot)
    ready = threading.Event()
    out.listen(lambda change: ready.set() if out.feed.sample is not None else None)
    async with piloted(out, (140, 40)) as (app, pilot):
        assert ready.wait(PATIENCE_S)
        await pilot.pause()
        assert " SNAPSHOT " in text_of(app._header) and "2027-01-15" in text_of(app._header)
        assert "Snapshot" in text_of(app._job)
        picture = app.export_screenshot()
        assert ("Input" in picture) != bool(name) and "\x1b" not in picture
        await pilot.press("t")
        await pilot.pause()
        assert isinstance(app.screen, Popup)
        await pilot.press("escape", "comma", "full_stop", "space", "plus", "left", "c", "r", "enter")
        await pilot.pause()
        assert app.is_running
    out.close()
