"""``gputop report``: recordings written as gputop record does, read as one line of time."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from gputop.cli import main
from gputop.core.samples import NodeSample, Reading
from gputop.goodput import recorded
from gputop.goodput.recorded import report
from gputop.goodput.text import decimals, figure
from gputop.replay.format import MAGIC, RecordingWriter, header
from gputop.replay.parts import Bounds, PartsWriter, Rotation
from gputop.replay.reader import Recording
from tests.commands.schema_problems import problems
from tests.fakes import node_sample
from tests.goodput.days import GIB, START_S, node
from tests.records import replace

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


def test_a_recording_whose_host_was_not_read_is_of_the_same_node(
        write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    unread = [replace(own, host=replace(own.host, hostname="")) for own in minutes("train", 0, 3)]
    first, second = write("a.rec", unread), write("b.rec", minutes("train", 3, 3))
    assert main(["report", str(first), str(second), "--price-per-kwh", "0.001"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("node-1, "), out
    assert ", 0.00 at" not in out


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
    for words in ("Not recorded: 2.8 h (28%", "waiting 1.0 7%", "train.py (ana, GPU 0,1)",
                  "At this rate, the 256 GiB of the node will be full", "Findings: N/A"):
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


def test_a_folder_is_read_part_by_part_and_gaps_are_not_recorded(tmp_path: Path) -> None:
    """As gputop record --rotate leaves it: with what is no recording beside, and a part that has just begun."""
    folder = tmp_path / "days"
    with closing(PartsWriter(folder, Rotation(Bounds(age_s=1800.0)))) as writer:
        for sample in minutes("train", 0, 120):
            writer.append(sample)
    (folder / "gputop-20300101T000000Z.rec").write_bytes(header())
    (folder / "notes.txt").write_text("mine")
    (folder / "broken.rec").write_bytes(MAGIC + bytes(8))
    with closing(PartsWriter(folder, Rotation())) as writer:  # after a reboot of 60 min, the job runs again
        for sample in minutes("train", 180, 61):
            writer.append(sample)
    done = report([folder])
    assert len(done.recordings) == 5 and [len(own.notes) for own in done.recordings] == [0] * 5
    assert done.total.states_s == {"training": 2 * 60 * (119 + 60)} and done.not_recorded_s == 61 * 60
    assert ["header" in note for note in done.notes] == [True]


def test_recordings_of_different_intervals(write: Write) -> None:
    """Each has gaps by its own interval, else the slower one would be nothing but gaps."""
    slow = write("slow.rec", minutes("train", 0, 61))
    fast = write("fast.rec", [node(START_S + 3700 + i, "wait") for i in range(601)])
    assert report([slow, fast]).total.states_s == {"training": 2 * 3600.0, "waiting": 2 * 600.0}


def test_a_part_that_gives_way_meanwhile_is_not_recorded(write: Write, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = write("a.rec", minutes("train", 0, 61)), write("b.rec", minutes("train", 61, 61))
    opened: list[Path] = []

    def removed_at_the_second_time(path: Path) -> Recording:
        opened.append(path)
        if opened.count(first) == 2:
            first.unlink(missing_ok=True)
        return Recording(path)

    monkeypatch.setattr(recorded, "open_recording", removed_at_the_second_time)
    done = report([tmp_path])
    assert done.total.states_s == {"training": 2 * 61 * 60.0} and f"cannot read {first}" in done.notes[0]
    assert report([last]).total.states_s == {"training": 2 * 60 * 60.0}


def test_a_thousand_parts_are_not_open_at_once(write: Write, tmp_path: Path) -> None:
    for i in range(40):
        write(f"{i}.rec", minutes("train", 2 * i, 2))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 10, before[1]))
    try:
        assert report([tmp_path]).total.states_s == {"training": 2 * 79 * 60.0}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_folder_without_recordings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 3
    assert "no recording with samples" in capsys.readouterr().err


OWN_RULES = """
[[rule]]
id = "low_power"
on = "live"
when = "power_w < 200W"
for = "60s"
severity = "low"
title = "GPUs draw little power"

[[rule]]
id = "never"
on = "live"
when = "power_w > 900W"
severity = "low"
title = "GPUs draw too much"

[[rule]]
id = "unknown"
on = "live"
when = "temperature_c > 90C"
severity = "high"
title = "GPUs are hot"
"""


def test_rules_of_ones_own_are_judged_over_all_of_the_time(write: Write, tmp_path: Path,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(OWN_RULES)
    whats = ["train"] * 100 + ["wait"] * 60 + ["train"] * 100 + ["wait"] * 30 + ["train"] * 110
    path = write("a.rec", [node(START_S + 5 * i, what) for i, what in enumerate(whats)])
    assert main(["report", str(path), "--rules", str(rules), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert not problems("report", document)
    own = {rule["id"]: rule for rule in document["own_rules"]}
    low = own["low_power"]
    assert (low["times"], low["gpus"], low["missing"]) == (2, [0, 1], None)
    assert low["held_s"] == pytest.approx(240 + 90, abs=25) and low["longest_s"] == pytest.approx(240, abs=15)
    assert low["judged_s"] == pytest.approx(5 * 400, abs=15) and low["last_s"] < START_S + 5 * 300
    assert own["never"]["held_s"] == 0 and own["never"]["last_s"] is None
    assert own["unknown"]["judged_s"] == 0 and own["unknown"]["missing"]
    assert "low_power" in {finding["id"] for hour in document["worst_hours"] for finding in hour["findings"]}
    assert main(["report", str(path), "--rules", str(rules)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "GPUs draw little power: " in text and "2 times" in text and "GPUs draw too much: never in" in text
    assert "GPUs are hot: N/A, because gputop lacks" in text


def test_recordings_of_two_nodes_are_refused(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    here, there = write("a.rec", minutes("train", 0, 3)), write("b.rec", [node_sample(0)])
    assert main(["report", str(here), str(there)]) == 2
    assert "several nodes: node-07, node-1" in capsys.readouterr().err


def test_one_sample_and_simulated_figures(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """One sample is of no time; and the first has no SM activity yet, which makes the rest no coarser."""
    first = node(START_S, "train")
    coarse = tuple(replace(gpu, readings={**gpu.readings, "sm_active": Reading.missing("ratio", "not yet")})
                   for gpu in first.gpus)
    assert main(["report", str(write("a.rec", [first]))]) == 3
    path = write("b.rec", [replace(first, simulated=True, gpus=coarse), node(START_S + 60, "train")])
    assert main(["report", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("SIMULATED") and "at 80% SM activity on average" in text


def test_without_a_gpu_nothing_is_pretended(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write("a.rec", [replace(sample, gpus=(), processes=()) for sample in minutes("train", 0, 5)])
    assert main(["report", str(path)]) == 0
    text = capsys.readouterr().out
    assert "Goodput: N/A, because no GPU time was recorded." in text and "kWh" not in text and "training  " not in text


@pytest.mark.parametrize(("column", "shown"), [
    ([0.0017, 0.001, 0.0], ["0.0017", "0.0010", "0.0000"]), ([0.99, 0.1], ["0.99", "0.10"]),
    ([1234.56, 0.3, 0.02], ["1,234.6", "0.3", "<0.1"]), ([0.0], ["0.0"]),
])
def test_a_column_has_one_number_of_decimals(column: list[float], shown: list[str]) -> None:
    assert [figure(value, decimals(column)) for value in column] == shown


@pytest.mark.parametrize("price", ["0", "-1", "nan", "cheap"])
def test_a_price_is_a_number(price: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["report", "a.rec", "--price-per-kwh", price])
    assert stopped.value.code == 2


def test_the_hour_that_comes_twice_is_told_apart(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    """The clock goes back from 03:00 (UTC+02:00) to 02:00 (UTC+01:00) after two of these four hours."""
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    try:
        what = ["wait" if 60 <= i < 110 or 130 <= i < 170 else "train" for i in range(4 * 60)]
        path = write("a.rec", [node(1_792_882_800.0 + 60 * (i + 1), own) for i, own in enumerate(what)])
        page = tmp_path / "page.html"
        assert main(["report", str(path), "--html", str(page)]) == 0
        assert main(["report", str(path)]) == 0
        out = capsys.readouterr().out
    finally:
        monkeypatch.undo()
        time.tzset()
    assert "2026-10-25 01:01:00 (UTC+02:00) to 2026-10-25 04:00:00 (UTC+01:00)" in out.replace("\n", " ")
    for text in ("2026-10-25 02:00 (UTC+02:00)  lost", "2026-10-25 02:00 (UTC+01:00)  lost",
                 "2026-10-25 .929", "the clock was set back, so 02 covers two hours"):
        assert text in out, out
    html = page.read_text()
    assert "02:00 (UTC+02:00): " in html and "02:00 (UTC+01:00): " in html
    assert "M2 " in html and "M2.5 " in html
