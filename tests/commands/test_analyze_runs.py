from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from gputop.cli import main
from tests.commands.schema_problems import problems
from tests.trace.readers.xspace.reference import Builder

DATA = Path(__file__).parents[1] / "data"


def run_of(logdir: Path, name: str, time_s: int, error: str = "") -> None:
    b = Builder(name)
    b.event("/host:CPU", b.line("/host:CPU", "t"), "x", 1, 1)
    if error:
        b = Builder(name)
        b.space.errors.append(error)
    path = logdir / "plugins/profile" / name / "h.xplane.pb"
    path.parent.mkdir(parents=True)
    path.write_bytes(b.bytes())
    os.utime(path, ns=(0, time_s * 10**9))


def test_one_run_or_all_of_them(tmp_path, capsys):
    run_of(tmp_path, "old", 1)
    run_of(tmp_path, "new", 2)
    assert main(["analyze", "--json", "--run", "old", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["trace"]["hosts"] == ["old"]
    assert main(["analyze", "--json", "--all", str(tmp_path)]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert {name: document["trace"]["hosts"] for name, document in runs.items()} == {"new": ["new"], "old": ["old"]}
    assert main(["analyze", "--all", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.index("Run      new") < out.index("Run      old")


def test_the_timeline_of_one_run(tmp_path, capsys, monkeypatch):
    run_of(tmp_path, "old", 1)
    run_of(tmp_path, "new", 2)
    shown = []
    monkeypatch.setattr("gputop.commands.analyze.unfit_terminal", lambda: "")
    monkeypatch.setattr("gputop.tui.timeline_app.show", lambda paths, _: shown.extend(paths) or 0)
    assert main(["analyze", "--timeline", "--run", "old", str(tmp_path)]) == 0
    assert shown == [str(tmp_path / "plugins/profile/old/h.xplane.pb")]
    assert main(["analyze", "--timeline", "--all", str(tmp_path)]) == 2
    assert "--run NAME" in capsys.readouterr().err


def test_a_run_that_cannot_be_read_does_not_end_the_others(tmp_path, capsys):
    run_of(tmp_path, "good", 1)
    run_of(tmp_path, "bad", 2, error="CUPTI failed")
    assert main(["analyze", "--json", "--all", str(tmp_path)]) == 0
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert list(document["runs"]) == ["good"] and "CUPTI failed" in said.err and not problems("analyze-all", document)
    assert "CUPTI failed" in document["unread"]["bad"]


def test_a_gate_does_not_pass_for_want_of_a_run(tmp_path, capsys):
    run_of(tmp_path / "a", "bad", 2, error="CUPTI failed")
    good = tmp_path / "a/plugins/profile/good"
    good.mkdir()
    shutil.copy(DATA / "keras3_fast.xplane.pb.gz", good / "h.xplane.pb.gz")
    for words in (["--json"], []):
        capsys.readouterr()
        assert main(["analyze", "--all", str(tmp_path / "a"), "--fail-on", "retracing", *words]) == 3
    assert "CANNOT BE TOLD: retracing: cannot read the run bad" in (out := capsys.readouterr().out)
    assert "PASSED: retracing" in out


def test_runs_of_one_name_in_two_logdirs_are_both_there(tmp_path, capsys):
    for logdir in ("a", "b"):
        for number, name in enumerate(("first", "second")):
            run_of(tmp_path / logdir, name, number)
    assert main(["analyze", "--json", "--all", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    other = tmp_path / "b/plugins/profile"
    assert list(runs) == ["second", "first", str(other / "second"), str(other / "first")]


@pytest.mark.parametrize("arguments", [["--all"], []])
def test_what_a_profiler_reports_is_printable(tmp_path, capsys, arguments):
    run_of(tmp_path, "bad", 1, error="\x1b]0;title\x07\x1b[2J\u202e dropped")
    main(["analyze", *arguments, str(tmp_path)])
    said = capsys.readouterr()
    assert "title" in said.err and not {"\x1b", "\x07", "\u202e"} & set(said.out + said.err)


def test_names_of_runs_are_printable(tmp_path, capsys):
    run_of(tmp_path, "evil\x1b[31m", 1)
    run_of(tmp_path, "new", 2)
    assert main(["analyze", str(tmp_path)]) == 0
    assert "evil" in (out := capsys.readouterr().out) and "\x1b" not in out
    assert main(["analyze", "--run", "none", str(tmp_path)]) != 0
    assert "evil" in (err := capsys.readouterr().err) and "\x1b" not in err
