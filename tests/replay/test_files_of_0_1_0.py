"""Files that gputop 0.1.0 wrote are read as they were meant."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

import gputop
from gputop.analysis.results import Analysis
from gputop.replay.reader import Recording
from gputop.replay.snapshot_document import Snapshot, read
from gputop.replay.snapshot_source import SnapshotPlayer
from gputop.session.session import Session

DATA = Path(__file__).parents[1] / "data" / "v0_1_0"
SM_ACTIVE = [0.9433, 0.5369, 0.5368, 0.5371, 0.5357, 0.5377, 0.5353, 0.5353]


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    file = tmp_path / "snapshot.json"
    file.write_bytes(gzip.decompress((DATA / "snapshot.json.gz").read_bytes()))
    return read(file)


def test_a_recording() -> None:
    recording = Recording(DATA / "demo.gputop")
    assert recording.notes == () and len(recording) == 7
    assert recording.times_s[0] == pytest.approx(1795355593.957761)
    sample = recording.sample(6)
    assert [round(gpu.readings["sm_active"].value or 0.0, 4) for gpu in sample.gpus] == SM_ACTIVE
    power = sample.gpus[0].readings["power_w"]
    assert (power.value, power.unit, power.source) == (pytest.approx(577.59711655305), "W", "simulated")
    assert sample.gpus[0].info.name == "NVIDIA H100 80GB HBM3" and sample.host.hostname == "demo-node"
    assert sample.processes[0].command == "python train.py --model vit_b16 --strategy mirrored" and sample.simulated
    recording.close()


def test_a_recording_by_the_python_api() -> None:
    with gputop.open_recording(DATA / "demo.gputop") as recording:
        assert isinstance(recording, gputop.Recording) and len(recording) == 7
    with pytest.raises(gputop.GputopError, match="cannot read"):
        gputop.open_recording(DATA / "none")


def holds(now: object, old: object) -> bool:
    """Whether a document has all that an older one has, at the same places; it may have more keys."""
    if isinstance(now, dict) and isinstance(old, dict):
        return all(key in now and holds(now[key], value) for key, value in old.items())
    if isinstance(now, list) and isinstance(old, list):
        return len(now) == len(old) and all(map(holds, now, old))
    return now == old


def test_a_saved_analysis() -> None:
    document = json.loads((DATA / "analysis.json").read_text())
    saved, now = Analysis.from_json(document), gputop.analyze(DATA.parent / "keras3_slow_input.xplane.pb.gz")
    assert holds(saved.to_json(), document)
    assert (saved.steps, saved.input, saved.gpus) == (now.steps, now.input, now.gpus)
    assert now.breakdown.known == pytest.approx(saved.breakdown.known)  # summed in another order
    assert gputop.compare(DATA / "analysis.json", DATA / "analysis.json").verdict == "noise"
    del document["typical_step"], document["steps"]["phase"]
    older = Analysis.from_json({**document, "key_of_a_later_version": [1]})
    assert older.steps is not None and older.steps.phase == "unknown" and older.typical_step is None


def test_a_snapshot_with_a_capture(snapshot: Snapshot) -> None:
    assert snapshot.version == "0.1.0" and len(snapshot.sample.gpus) == 8 and snapshot.sample.simulated
    assert [f.id for f in snapshot.findings] == ["gpu0_oversubscribed"]
    capture = snapshot.capture
    assert capture is not None and capture.problem is None and capture.report
    assert [f.id for f in capture.findings][:1] == ["gpu0_oversubscribed"]
    assert capture.median_step_s == pytest.approx(0.344694605)
    assert snapshot.history is not None and snapshot.history.slices > 0 and snapshot.spectrogram is not None


def test_a_snapshot_in_a_session(snapshot: Snapshot) -> None:
    player = SnapshotPlayer(snapshot)
    session = Session(player, replayed_snapshot=snapshot)
    assert session.results.findings == snapshot.findings and session.results.last_capture is snapshot.capture
    session.feed.on_sample(player.recording.sample(len(player.recording) - 1))
    assert session.feed.sample is snapshot.sample and session.feed.history is not None
    assert session.results.findings == snapshot.findings, "the live rules leave them alone"
