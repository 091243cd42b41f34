"""Recordings as files: written whole or cut at any byte, damaged, of another version, on a full disk."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputop.core.errors import EXIT_NO_DATA, GputopError, NoDataError
from gputop.core.samples import NodeSample
from gputop.replay.format import HEADER, RECORD, SEGMENT, SEGMENT_SAMPLES, SYNC, SYNC_PERIOD_S, RecordingWriter, header
from gputop.replay.format import record as record_bytes
from gputop.replay.parts import record
from gputop.replay.reader import Recording
from gputop.sources.simulated import SimulatedSource
from tests.fakes import START_S, node_sample


def write(path: Path, ticks: int, gpus: int = 1) -> list[int]:
    """A recording of so many samples; the size of the file after each."""
    writer = RecordingWriter(path)
    sizes = []
    for tick in range(ticks):
        writer.append(node_sample(tick, gpus))
        sizes.append(path.stat().st_size)  # it is in the file at once
    writer.close()
    return sizes


def read(path: Path) -> list[NodeSample]:
    with Recording(path) as recording:
        return [recording.sample(i) for i in range(len(recording))]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "node.rec"
    write(path, 30, gpus=8)
    assert read(path) == [node_sample(tick) for tick in range(30)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Recording(path).notes == ()


def test_samples_are_found_by_number_and_time(tmp_path: Path) -> None:
    path = tmp_path / "node.rec"
    write(path, SEGMENT_SAMPLES + 20)
    recording = Recording(path)
    for index in (5, 3, SEGMENT_SAMPLES + 7, SEGMENT_SAMPLES - 1, SEGMENT_SAMPLES, 0):
        assert recording.sample(index) == node_sample(index, 1)
    assert recording.index_at(START_S - 100) == 0
    assert recording.index_at(START_S + 41.9) == 41
    assert recording.index_at(START_S + 1e6) == SEGMENT_SAMPLES + 19
    with pytest.raises(IndexError):
        recording.sample(len(recording))


def test_a_clock_that_was_set_back_is_kept_and_can_be_sought_in(tmp_path: Path) -> None:
    path = tmp_path / "node.rec"
    writer = RecordingWriter(path)
    for tick in (0, 1, 2, 3, 1, 2, 3, 4, 5):
        writer.append(node_sample(tick, 1))
    writer.close()
    recording = Recording(path)
    assert [t - START_S for t in recording.times_s] == [0, 1, 2, 3, 1, 2, 3, 4, 5]
    assert recording.index_at(START_S + 4.5) == 7 and recording.index_at(START_S + 0.5) == 0


def test_cut_at_any_byte_everything_before_is_there(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.rec", tmp_path / "cut.rec"
    sizes = write(whole, 4)
    data = whole.read_bytes()
    expected = read(whole)
    for size in range(len(data)):
        cut.write_bytes(data[:size])
        kept = sum(end <= size for end in sizes)
        if not kept:
            with pytest.raises(NoDataError) as caught:
                Recording(cut)
            assert caught.value.exit_code == EXIT_NO_DATA
            continue
        recording = Recording(cut)
        assert [recording.sample(i) for i in range(len(recording))] == expected[:kept]
        assert bool(recording.notes) == (size not in sizes)
        assert all("truncated" in note for note in recording.notes)
        recording.close()


@given(st.data())
def test_any_damage_gives_true_samples_and_a_note_or_a_clear_error(
        tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("damage") / "node.rec"
    write(path, 4)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at:at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    changed = bytes(raw) != path.read_bytes()
    path.write_bytes(raw)
    try:
        recording = Recording(path)
    except GputopError as error:
        assert changed and str(path) in error.message and error.fix
        return
    samples = [recording.sample(i) for i in range(len(recording))]
    assert samples == [node_sample(tick, 1) for tick in range(4)][:len(samples)]
    assert len(samples) == 4 or recording.notes


def test_behind_damage_it_goes_on_at_the_next_segment(tmp_path: Path) -> None:
    path = tmp_path / "node.rec"
    sizes = write(path, 2 * SEGMENT_SAMPLES + 10)
    raw = bytearray(path.read_bytes())
    raw[sizes[20] - 3] ^= 0xFF
    path.write_bytes(raw)
    recording = Recording(path)
    assert len(recording) == 20 + SEGMENT_SAMPLES + 10
    assert recording.sample(19) == node_sample(19, 1)
    assert recording.sample(20) == node_sample(SEGMENT_SAMPLES, 1)
    assert recording.sample(len(recording) - 1) == node_sample(2 * SEGMENT_SAMPLES + 9, 1)
    assert len(recording.notes) == 1 and "skipped" in recording.notes[0] and "checksum" in recording.notes[0]


def test_damage_at_very_many_places_is_counted(tmp_path: Path) -> None:
    """A file of 10 MB took a minute, and each place a line."""
    path = tmp_path / "a.rec"
    write(path, 1)
    damage = b"\x03\x00\x00\x00\x00abcd" + record_bytes(SEGMENT, SYNC)
    path.write_bytes(path.read_bytes() + damage * 30)
    with Recording(path) as opened:
        assert len(opened) == 1 and len(opened.notes) == 21
        assert opened.notes[-1] == "the recording is damaged in 10 more places"


def test_a_length_without_end_is_damage_not_memory(tmp_path: Path) -> None:
    path = tmp_path / "node.rec"
    write(path, 2)
    with path.open("ab") as file:
        file.write(RECORD.pack(3, 0xFFFFFFF0, 0) + b"x" * 100)
    recording = Recording(path)
    assert len(recording) == 2 and "truncated or damaged" in recording.notes[0]


@pytest.mark.parametrize(("content", "says"), [
    (b"hello, this is a note", "not a gputop recording"), (b"\x1f\x8b" + bytes(40), "not a gputop recording"),
    (HEADER.pack(header()[:8], 9, 0, 0), "header"), (header()[:12] + bytes(4), "header"),
])
def test_what_is_no_recording_is_said(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(GputopError, match=says) as caught:
        Recording(path)
    assert caught.value.exit_code == 1 and caught.value.fix


def test_a_newer_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "node.rec"
    with monkeypatch.context() as later:
        later.setattr("gputop.replay.format.VERSION", 7)
        write(path, 2)
    with pytest.raises(GputopError, match="format 7") as caught:
        Recording(path)
    assert "newer" in caught.value.fix and caught.value.exit_code == 1


def test_a_file_that_is_not_there_or_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.rec", tmp_path):
        with pytest.raises(GputopError, match="cannot read"):
            Recording(path)


def test_damage_after_opening_is_said(tmp_path: Path) -> None:
    path = tmp_path / "node.rec"
    sizes = write(path, 10)
    recording = Recording(path)
    os.truncate(path, sizes[4])
    assert recording.sample(4) == node_sample(4, 1)
    with pytest.raises(GputopError, match="cannot read"):
        recording.sample(8)
    assert recording.sample(2) == node_sample(2, 1)


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "node.rec"
    path.write_text("precious")
    with pytest.raises(GputopError, match="never overwrites") as caught:
        RecordingWriter(path)
    assert caught.value.exit_code == 1 and "-o" in caught.value.fix and path.read_text() == "precious"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(GputopError, match="cannot write"):
        RecordingWriter(tmp_path / "file" / "node.rec")


def test_the_disk_is_asked_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    now = [0.0]
    writer = RecordingWriter(tmp_path / "node.rec", clock=lambda: now[0])
    synced.clear()  # its name
    for tick in range(100):
        now[0] = tick
        writer.append(node_sample(tick, 1))
    assert len(synced) == int(99 // SYNC_PERIOD_S)
    writer.close()
    assert len(synced) == int(99 // SYNC_PERIOD_S) + 1


def test_a_full_disk_ends_the_recording_and_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "node.rec"
    # Not by preexec_fn: where gRPC runs in this process, its handlers for a fork can abort the child.
    limited = ("import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)); "
               "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])")
    done = subprocess.run(
        [sys.executable, "-c", limited, "-m", "gputop", "record", "--demo", "--interval", "0.1", "--seconds", "60",
         "-o", str(path)], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})  # half a module would stay behind
    assert done.returncode == 1, done.stderr
    assert "cannot write" in done.stderr and "Free some space" in done.stderr and "Traceback" not in done.stderr
    recording = Recording(path)
    assert len(recording) >= 5 and recording.notes == ()
    assert f"the {len(recording)} samples before the error are saved" in done.stderr
    assert all(recording.sample(i).simulated for i in range(len(recording)))


def test_record_stops_on_request_and_drops_nothing(tmp_path: Path) -> None:
    path, stop, messages = tmp_path / "node.rec", threading.Event(), []

    def say(message: str) -> None:
        messages.append(message)
        stop.set()

    record(SimulatedSource(), 0.1, path, 0.5, threading.Event(), messages.append)
    times = list(Recording(path).times_s)
    assert 0.45 <= times[-1] - times[0] < 2.0 and "samples" in messages[-1] and str(path) in messages[-1]
    again = tmp_path / "stopped.rec"
    record(SimulatedSource(), 0.1, again, None, stop, say)
    assert not again.exists() or len(Recording(again)) >= 1


def test_a_source_that_does_not_open_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "node.rec"
    with pytest.raises(GputopError, match="99"):
        record(SimulatedSource(gpus=("99",)), 0.1, path, 1.0, threading.Event(), lambda message: None)
    assert not path.exists()
