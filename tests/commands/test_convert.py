"""A trace or a recording for other tools: what they read is what it holds."""

from __future__ import annotations

import csv
import json
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from gputop.cli import main
from gputop.core.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from gputop.diagnosis.diagnose import analyze
from gputop.replay.reader import open_recording
from gputop.trace.model import Kind
from gputop.trace.readers.load import load
from tests.simulation.test_xspace import capture

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the simulated job: steps, launches, copies and collectives on eight GPUs."""
    path = tmp_path_factory.mktemp("convert") / "demo.xplane.pb"
    path.write_bytes(capture("gpu0-oversubscribed", 1.0)[3])
    return str(path)


def convert(source: str, target: Path) -> Path:
    assert main(["convert", source, "-o", str(target)]) == EXIT_OK
    assert target.stat().st_mode & 0o777 == 0o600
    return target


def test_the_tables_hold_each_event_and_the_analysis(trace_file: str, tmp_path: Path) -> None:
    trace, analysis = load([trace_file]), analyze(trace_file)
    with sqlite3.connect(convert(trace_file, tmp_path / "t.sqlite")) as tables:
        def asked(query: str) -> list[tuple[object, ...]]:
            return tables.execute(query).fetchall()

        time_ns = {kind: int((trace.device.end_ns - trace.device.start_ns)[trace.device.kind == kind].sum())
                   for kind in Kind if (trace.device.kind == kind).any()}
        assert dict(asked("SELECT kind, SUM(duration_ns) FROM gpu_work GROUP BY kind")) == {
            kind.name.lower(): time for kind, time in time_ns.items()}
        names = Counter(trace.names[i] for i in trace.host.name.tolist())
        assert dict(asked("SELECT name, COUNT(*) FROM host_work GROUP BY name")) == names
        launched = trace.device.launch_ns[trace.device.launch_ns >= 0]
        assert asked("SELECT COUNT(launch_ns), SUM(launch_ns) FROM device_events") == [(len(launched), launched.sum())]
        assert [row for (row,) in asked("SELECT id FROM findings ORDER BY rank")] == [f.id for f in analysis.findings]
        assert analysis.steps is not None and asked("SELECT COUNT(*) FROM steps") == [(analysis.steps.count,)]
        about = dict(asked("SELECT * FROM about"))
        assert about["simulated"] == "yes" and json.loads(str(about["analysis"])) == analysis.to_json()


@pytest.mark.parametrize("ending", ["json", "json.gz"])
def test_a_viewer_s_format_read_again_gives_the_same_figures(trace_file: str, tmp_path: Path, ending: str) -> None:
    before, after = analyze(trace_file), analyze(str(convert(trace_file, tmp_path / f"t.{ending}")))
    assert [(use.gpu, use.kernels, use.busy) for use in after.gpus] == [
        (use.gpu, use.kernels, pytest.approx(use.busy, abs=1e-6)) for use in before.gpus]
    assert before.launch_threads is not None and after.launch_threads is not None
    assert after.launch_threads.threads_per_gpu == before.launch_threads.threads_per_gpu


def test_launches_are_tied_to_what_they_started(trace_file: str, tmp_path: Path) -> None:
    events = json.loads(convert(trace_file, tmp_path / "t.json").read_text())["traceEvents"]
    begun = {e["id"]: e["ts"] for e in events if e["ph"] == "s"}
    ended = [(e["id"], e["ts"]) for e in events if e["ph"] == "f"]
    assert ended and all(ts >= begun[number] for number, ts in ended)


def test_a_recording_is_a_row_for_each_sample_and_gpu(tmp_path: Path) -> None:
    source = DATA / "v0_1_0" / "demo.gputop"
    rows = list(csv.DictReader(convert(str(source), tmp_path / "r.csv").read_text().splitlines()))
    with open_recording(source) as recording:
        sample = recording.sample(len(recording) - 1)
        assert len(rows) == sum(len(recording.sample(i).gpus) for i in range(len(recording)))
    for row, gpu in zip(rows[-len(sample.gpus):], sample.gpus, strict=True):
        assert row["uuid"] == gpu.info.uuid and float(row["power_w"]) == gpu["power_w"].value
        unknown = [metric for metric, reading in gpu.readings.items() if reading.value is None]
        assert all(row[metric] == "" for metric in unknown)


@pytest.mark.parametrize(("source", "target", "status"), [
    ("TRACE", "t.xlsx", EXIT_USAGE), ("TRACE", "r.csv", EXIT_FAILED), ("missing", "t.json", EXIT_FAILED),
    ("TRACE", "no/such/folder/t.json", EXIT_FAILED),
])
def test_what_cannot_be_converted_leaves_no_file(
        trace_file: str, tmp_path: Path, source: str, target: str, status: int,
        capsys: pytest.CaptureFixture[str]) -> None:
    path = trace_file if source == "TRACE" else str(tmp_path / source)
    assert main(["convert", path, "-o", str(tmp_path / target)]) == status
    assert capsys.readouterr().err.startswith("gputop: ") and not list(tmp_path.iterdir())
