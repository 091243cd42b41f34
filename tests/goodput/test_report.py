"""``gputop report``: recordings written as gputop record does, read as one line of time."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from gputop.cli import main
from gputop.core.samples import NodeSample
from gputop.goodput import recorded
from gputop.goodput.recorded import report
from gputop.replay.writer import RecordingWriter
from tests.export.test_schemas import problems
from tests.fakes import node_sample
from tests.goodput.days import GIB, START_S, node

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, samples: list[NodeSample]) -> Path:
        with closing(RecordingWriter(tmp_path / name)) as writer:
            for sample in samples:
                writer.append(sample)
        return tmp_path / name
    return write


def minutes(what: str, first: int, count: int, **more: object) -> list[NodeSample]:
    return [node(START_S + 60 * (first + i), what, rss=(8 + 0.02 * (first + i)) * GIB, **more)  # type: ignore[arg-type]
            for i in range(count)]


def test_several_recordings_are_one_time_line(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    late = write("late.rec", minutes("train", 400, 200))
    early = write("early.rec", [*minutes("train", 0, 201), *minutes("wait", 201, 30)])
    copy = write("copy.rec", minutes("train", 100, 50))
    assert main(["report", str(late), str(early), str(copy), "--price-per-kwh", "0.5", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert not problems("report", document)
    assert document["recorded_s"] == (230 + 199) * 60 and document["not_recorded_s"] == 170 * 60
    assert document["total"]["states_s"] == {"training": 2 * 60 * 399, "waiting": 2 * 60 * 30}
    kwh = 2 * (399 * 600 + 30 * 150) / 60e3
    assert document["cost"] == pytest.approx(kwh / 2) and "50 samples are left out" in document["notes"][0]
    assert [Path(part["path"]).name for part in document["recordings"]] == ["early.rec", "copy.rec", "late.rec"]
    assert [creep["pid"] for creep in document["creep"]] == [100]
    assert "every 60 s" in document["worst_hours"][0]["not_judged"]
    assert main(["report", str(late), str(early)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in ("Not recorded: 2.8 h, 28%", "waiting 1.0 7%", "python train.py (ana, GPU 0,1)",
                  "If it goes on so, the 256G of the node are full", "Findings: N/A"):
        assert words in text


def test_findings_of_the_worst_hour(write: Write) -> None:
    hang = [node(START_S + 5 * i, "hang") for i in range(400)]
    worst, = report([write("a.rec", hang)]).worst_hours
    assert worst.not_judged is None and "spinning" in {finding.id for finding in worst.findings}
    assert all(finding.held_ratio > 0.8 for finding in worst.findings if finding.id == "spinning")


def test_of_very_many_samples_some_are_read(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("a.rec", minutes("train", 0, 301))
    monkeypatch.setattr(recorded, "MAX_SAMPLES", 101)
    done = report([path])
    assert done.read_every == 3 and done.total.states_s == {"training": 2 * 300 * 60.0}


def test_recordings_of_two_nodes_are_refused(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    here, there = write("a.rec", minutes("train", 0, 3)), write("b.rec", [node_sample(0)])
    assert main(["report", str(here), str(there)]) == 2
    assert "several nodes: node-07, node-1" in capsys.readouterr().err


def test_one_sample_and_simulated_figures(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """No time is recorded: nothing is divided by it, and simulated figures say so."""
    path = write("a.rec", [replace(node(START_S, "train"), simulated=True)])
    assert main(["report", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("SIMULATED") and "Goodput: N/A" in text
    assert main(["report", str(path), "--price-per-kwh", "0.3", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["total"]["goodput_ratio"] is None and document["hours"] == []


@pytest.mark.parametrize("price", ["0", "-1", "nan", "cheap"])
def test_a_price_is_a_number(price: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["report", "a.rec", "--price-per-kwh", price])
    assert stopped.value.code == 2
