"""The command line from outside: what each command prints where, and with which exit status."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from gputop.cli import main
from gputop.commands import common, completion
from gputop.commands.arguments import parser
from gputop.core.errors import GputopError
from gputop.core.own_memory import NUMPY_SETTINGS
from gputop.profiler.capture.records import Server
from gputop.session.capture.captures import FoundServers
from tests.commands.run_gputop import ROOT, gputop
from tests.listening import free_port

DATA = Path(__file__).parents[1] / "data"
# A snapshot of one GPU of the demo, as soon as it has two samples.
SNAPSHOT = ("snapshot", "--demo", "healthy", "--seconds", "0.2", "--interval", "0.1", "--gpus", "0")


@pytest.mark.parametrize("args", [[], ["snapshot", "--format", "json"]])
def test_without_a_driver_it_says_so_and_offers_the_demo(args: list[str], tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")  # whatever this machine has
    done = gputop(*args, env={"LD_LIBRARY_PATH": str(tmp_path)})
    assert done.returncode == 3 and done.stdout == ""
    assert "driver" in done.stderr and "gputop --demo" in done.stderr


@pytest.mark.parametrize("args", [
    ["--interval", "0"], ["--interval", "soon"], ["nonsense"], ["--source", "magic"], ["analyze"],
    ["capture", "--seconds", "-1"], ["snapshot", "--format", "pdf"], ["capture", "--attach", "no:port"],
    ["--demo", "no-such-scenario", "snapshot"], ["--demo", "healthy", "--gpus", "99", "snapshot"],
])
def test_wrong_usage_is_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(args)
    except SystemExit as ending:  # argparse's
        status = ending.code
    assert status == 2 and "gputop:" in capsys.readouterr().err


def test_without_a_terminal_the_monitor_is_one_snapshot_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--demo", "--interval", "0.2", "--gpus", "0"]) == 0
    output = capsys.readouterr()
    assert "standard output is not a terminal" in output.err and "gputop snapshot" in output.err
    assert "SIMULATED" in output.out and "What to do" in output.out and "\x1b" not in output.out


def test_options_count_before_and_after_the_command() -> None:
    before = parser().parse_args(["--interval", "0.5", "--attach", "a:1", "snapshot"])
    after = parser().parse_args(["snapshot", "--interval", "0.5", "--attach", "a:1"])
    assert before.interval == after.interval == 0.5 and before.attach == after.attach == ["a:1"]
    assert parser().parse_args(["snapshot"]).interval is None, "the config file may say"
    assert parser().parse_args(["--demo"]).demo == "default"
    assert parser().parse_args(["--demo", "healthy"]).demo == "healthy"


def test_demo_list_names_the_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--demo", "list"]) == 0
    out = capsys.readouterr().out
    for scenario in ("healthy", "input-bound", "gpu0-oversubscribed", "launch-bound"):
        assert scenario in out


def test_snapshot_of_the_demo_is_one_json_document_marked_simulated(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*SNAPSHOT, "--format", "json", "-o", "-"]) == 0
    doc = json.loads(capsys.readouterr().out)
    assert not list(tmp_path.iterdir()), "a dash is standard output"
    assert doc["schema"] == "gputop.snapshot/1" and doc["simulated"] is True and len(doc["gpus"]) == 1
    assert doc["gpus"][0]["readings"]["sm_active"]["source"] == "simulated"


def test_snapshot_as_text_into_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "node.txt"
    assert main(["snapshot", "--demo", "--seconds", "0.2", "--interval", "0.1", "--gpus", "0,2-3",
                 "-o", str(target)]) == 0
    output = capsys.readouterr()
    assert output.out == "" and str(target) in output.err
    text = target.read_text()
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("GPU "))
    assert text.startswith("*** SIMULATED") and lines[3].startswith("What to do")
    assert [line[:1] for line in lines[at + 1:at + 4]] == ["0", "2", "3"]


def test_capture_from_the_demo_names_its_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capture", "--demo", "input-bound", "--seconds", "2", "--logdir", str(tmp_path), "--json"]) == 0
    shown = capsys.readouterr()
    doc = json.loads(shown.out)
    assert doc["schema"] == "gputop.analysis/1" and doc["simulated"] is True
    assert doc["findings"][0]["id"] == "input_bound" and doc["findings"][0]["severity"] == "high"
    trace = Path(doc["capture"]["path"])
    assert trace.is_file() and trace.parent.parent.parts[-2:] == ("plugins", "profile")
    assert (doc["capture"]["asked_s"], doc["capture"]["chosen_s"]) == (2, 2)
    assert doc["capture"]["probe"]["device_events_per_s"] > 1000 and "events/s" in doc["capture"]["why"]
    assert doc["capture"]["cost"]["recorded_s"] == 2
    assert f"for 2 s ({doc['capture']['why']}); ctrl-c" in shown.err and "to record 2.0 s" in shown.err
    assert list(tmp_path.rglob("*.xplane.pb")) == [trace], "the probe is not kept"
    assert main(["analyze", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == doc["findings"]


@pytest.mark.usefixtures("analysis_in_this_process")
def test_forced_capture_has_no_probe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capture", "--demo", "--seconds", "1.2", "--force", "--logdir", str(tmp_path), "--json"]) == 0
    output = capsys.readouterr()
    plan = json.loads(output.out)["capture"]
    assert plan["probe"] is None and plan["chosen_s"] == 1.2 and "no probe" in plan["why"]
    assert "recording" in output.err and "probing" not in output.err


def test_capture_where_nothing_listens_has_nothing_to_show(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    done = gputop("capture", "--attach", address, "--logdir", str(tmp_path))
    assert done.returncode == 3, done.stderr
    assert address in done.stderr and "server.start(6009)" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_capture_from_a_server_of_another_user_has_to_be_named(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    bob = Server("127.0.0.1:6009", "python train.py", 7, owner="bob")
    monkeypatch.setattr("gputop.session.capture.captures.find_servers", lambda *_, **__: FoundServers((bob,)))
    assert main(["capture", "--logdir", str(tmp_path)]) == 1
    output = capsys.readouterr().err
    assert "belongs to user bob" in output and "--attach 127.0.0.1:6009" in output and not any(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "content", "status"), [
    ("missing.xplane.pb", None, 1), ("empty.xplane.pb", b"", 3), ("notes.txt", b"hello", 1),
    ("cut.json.gz", b"\x1f\x8bgarbage", 1), ("trace.nsys-rep", b"xx", 1),
])
def test_analyze_of_what_is_no_trace(tmp_path: Path, name: str, content: bytes | None, status: int,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert main(["analyze", str(path), "--json"]) == status
    shown = capsys.readouterr()
    assert shown.out == "" and name in shown.err


def test_a_full_disk_behind_stdout_is_a_message() -> None:
    for command in ("rules list --json", "--demo list"):  # in the midst of a document, and at its end
        done = subprocess.run(["bash", "-c", f"{sys.executable} -m gputop {command} > /dev/full"],
                              capture_output=True, text=True, timeout=60, cwd=ROOT)
        assert done.returncode == 1 and "No space left" in done.stderr and "Traceback" not in done.stderr


def test_a_terminal_without_unicode_still_gets_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["analyze", str(DATA / "keras3_slow_input.xplane.pb.gz")]) == 0
    terminal.seek(0)
    shown = terminal.read()
    assert "input_bound" in shown and "?" in shown


def test_output_names_decide_the_format_and_no_folder_is_made(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def snapshot(name: str, *more: str) -> tuple[int, str]:
        return main([*SNAPSHOT, "-o", str(tmp_path / name), *more]), capsys.readouterr().err

    assert snapshot("a.json")[0] == 0
    assert json.loads((tmp_path / "a.json").read_text())["schema"] == "gputop.snapshot/1"
    _, said = snapshot("a.json", "--format", "html")
    assert "and replaced the old file" in said and (tmp_path / "a.json").read_text().startswith("<!DOCTYPE")
    status, said = snapshot("a.svg")
    assert status == 2 and ".html" in said and not (tmp_path / "a.svg").exists()
    assert snapshot("a.log")[0] == 0, "text, whatever the name"
    status, said = snapshot("none/a.json")
    assert status == 1 and "cannot write" in said and not (tmp_path / "none").exists()


@pytest.mark.parametrize(("hangs", "limit", "status", "said"), [
    ("gputop.export.snapshot.render", "RENDER_S", 1, "no snapshot: writing the snapshot as text took longer than"),
    ("gputop.session.capture.server_watch.ServerWatch.update", "SERVERS_S", 0,
     "continuing without profiler servers: looking for profiler servers took longer than"),
])
def test_what_follows_the_samples_of_a_snapshot_has_a_deadline(
        hangs: str, limit: str, status: int, said: str, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    released = threading.Event()
    monkeypatch.setattr(hangs, lambda *_: released.wait(60.0) and "late")
    monkeypatch.setattr(f"gputop.commands.snapshot.{limit}", 0.2)
    got = main([*SNAPSHOT, "--attach", "127.0.0.1:1"])
    released.set()
    output = capsys.readouterr()
    assert got == status and said in output.err and "; it is in " in output.err
    assert bool(output.out) == (status == 0)


def test_what_took_long_after_the_samples_of_a_snapshot_is_named(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("gputop.commands.snapshot._SLOW_S", -1.0)
    assert main(SNAPSHOT) == 0
    assert re.search(r"writing the snapshot as text took \d+ s$", capsys.readouterr().err, re.MULTILINE)


def test_a_server_asked_for_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SNAPSHOT, "--attach", (address := f"127.0.0.1:{free_port()}")]) == 0
    assert f"no profiler server at {address}" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "status"), [
    (["rules", "list"], 0), (["analyze", str(DATA / "keras3_fast.xplane.pb.gz"), "--fail-on", "high"], 1)])
def test_a_reader_that_leaves_is_no_error_and_a_gate_that_nobody_reads_has_not_passed(
        arguments: list[str], status: int) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run([sys.executable, "-m", "gputop", *arguments], stdout=theirs, stderr=subprocess.PIPE,
                          text=True, check=False, cwd=ROOT)
    os.close(theirs)
    assert done.returncode == status and "Traceback" not in done.stderr


@pytest.mark.parametrize("chosen", [None, "2"])
def test_numpy_takes_neither_a_thread_for_each_cpu_nor_huge_pages_unless_told(chosen):
    script = ("from gputop import cli\n"
              "def main():\n    import os, numpy\n"
              f"    print([os.environ[name] for name in {[*NUMPY_SETTINGS]}])\n    return 0\n"
              "cli.main = main\ncli.command()")
    env = {k: v for k, v in os.environ.items() if k not in NUMPY_SETTINGS} | dict.fromkeys(
        NUMPY_SETTINGS if chosen else (), chosen)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT, env=env)
    assert done.stdout.strip() == str([chosen or setting for setting in NUMPY_SETTINGS.values()])


@pytest.mark.parametrize(("simulated", "cause"), [(True, "This host has no CPU"), (False, "If nvidia-smi does not")])
def test_without_a_sample_only_a_real_driver_is_suspected(simulated: bool, cause: str) -> None:
    feed = SimpleNamespace(interval_s=-15.0, source=SimpleNamespace(simulated=simulated))  # no time to wait
    session = SimpleNamespace(feed=feed, listen=lambda _: None, start=lambda: None)
    with pytest.raises(GputopError, match="no sample within 0 s") as caught:
        common.start(session, -30.0)  # type: ignore[arg-type]
    assert caught.value.fix.startswith(cause)


def test_a_clone_is_a_working_copy_whatever_an_installation_left_in_it(tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "gputop" / "completion"
    monkeypatch.setattr(completion, "folder", lambda: installed)
    assert next(completion.versions()) == completion.WORKING_COPY
    installed.mkdir(parents=True)
    (installed / completion.BUILD).write_text("commit 0123456789ab, not a release")
    assert next(completion.versions()) == "commit 0123456789ab, not a release"
    (tmp_path / ".git").mkdir()
    assert next(completion.versions()) == completion.WORKING_COPY
