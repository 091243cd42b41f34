"""Signals while a capture or a recording runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from gputop.cli import main
from gputop.core.errors import NoDataError
from gputop.core.proc import user_name
from gputop.core.samples import GpuProcess, ProcessSample
from gputop.core.signal_handlers import signal_handlers, termination_handlers
from gputop.profiler.capture.records import CaptureRecord, Server
from gputop.session.capture.captures import FoundServers
from gputop.session.gpu_samples import CounterWatch
from tests.fakes import StillSource, node_sample, reading
from tests.launch.jobs import GPUTOP
from tests.profiler.kineto.jobs import fake_job

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.usefixtures("analysis_in_this_process")
@pytest.mark.parametrize(("status", "arguments"), [
    (0, ["capture", "--demo", "--seconds", "0.5", "--logdir", "{}"]),
    (3, ["capture", "--attach", "127.0.0.1:1", "--logdir", "{}"]),
    (0, ["record", "--demo", "--interval", "0.1", "--seconds", "0.3", "-o", "{}/file"]),
], ids=["capture", "nothing to capture", "record"])
def test_what_handled_signals_before_does_so_again(status, arguments, tmp_path):
    before = {number: signal.getsignal(number) for number in _HANDLED}
    assert main([argument.format(tmp_path) for argument in arguments]) == status
    assert {number: signal.getsignal(number) for number in _HANDLED} == before


@pytest.mark.usefixtures("analysis_in_this_process")
def test_the_end_of_a_capture_is_told_and_a_way_that_fails_changes_nothing(tmp_path, capsys):
    file = tmp_path / "told"
    assert main(["capture", "--demo", "--seconds", "0.5", "--logdir", str(tmp_path), "--notify",
                 f"command:sh -c 'cat > {file}'", "--notify", "command:false"]) == 0
    told = json.loads(file.read_text())
    assert told["kind"] == "capture" and told["text"].startswith("SIMULATED demo-node: captured 127.0.0.1:")
    assert "--notify: false failed: the command exited with status 1" in capsys.readouterr().err


def test_what_is_no_way_to_tell_ends_the_capture_before_it_begins(tmp_path):
    assert main(["capture", "--demo", "--logdir", str(tmp_path), "--notify", "mail"]) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("process", "refused"), [
    ({}, True), ({"gpus": {}}, False), ({"user": "carol"}, False), ({"framework": ""}, False), ({"pid": 41}, False)])
def test_a_ready_job_beside_the_gpus_is_not_captured_for_the_one_on_them(
        process, refused, tmp_path, capsys, monkeypatch):
    ready = Server("127.0.0.1:6009", "python eval.py", 41)
    monkeypatch.setattr("gputop.session.capture.captures.find_named_servers", lambda *_, **__: FoundServers((ready,)))
    held = ProcessSample(7380, user_name(os.geteuid()), "python /home/a/train.py", reading(1.0), reading(1.0),
                         gpus={0: GpuProcess(7380, "C", None, reading(1e9), reading(0.5))}, framework="pytorch")
    sample = replace(node_sample(0), processes=(replace(held, **process),))
    monkeypatch.setattr("gputop.commands.common.source_of", lambda args: StillSource())
    monkeypatch.setattr(CounterWatch, "running", contextlib.nullcontext)
    monkeypatch.setattr(CounterWatch, "wait", lambda self, _: setattr(self, "sample", sample))
    captured = []
    monkeypatch.setattr("gputop.session.capture.captures.capture_and_analyze",
                        lambda servers, *_: captured.append(servers) or CaptureRecord(
                            ready.address, tmp_path, 0.0, 1.0, 1.0, problem=NoDataError("nothing", "")))
    status, err = main(["capture", "--logdir", str(tmp_path)]), capsys.readouterr().err
    assert (captured, status) == ([], 2) if refused else captured == [(ready,)]
    assert refused == ("several jobs can be captured: pid:7380 train.py; 127.0.0.1:6009 eval.py" in err)
    assert refused == ("gputop capture 7380" in err)


def test_a_job_that_profiles_itself_is_a_finding(place, tmp_path, capsys):
    with fake_job(place, "cycles") as process:
        command = ["capture", "--attach", f"pid:{process.pid}", "--logdir", str(tmp_path / "traces")]
        assert main(command) == 1
        verdict = capsys.readouterr().out
        assert f"30% of the steps of process {process.pid}    [profiler_left_on]" in verdict and "repeat=1" in verdict
        assert main([*command, "--json"]) == 1
        out, err = capsys.readouterr()
        assert not out and "starts again in 12 steps" in err
        assert process.poll() is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_capture_that_is_interrupted_keeps_its_data(number, tmp_path):
    with signal_handlers({number: signal.SIG_DFL}):  # whatever this suite was started under
        capture = subprocess.Popen([*GPUTOP, "capture", "--demo", "--seconds", "60", "--force", "--json", "--logdir",
                                    str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with capture:
        assert any("recording" in line for line in capture.stderr)
        capture.send_signal(number)
        out, err = capture.communicate(timeout=60)
    assert capture.returncode == 0, err
    trace = Path(json.loads(out)["capture"]["path"])
    assert trace.is_file() and f"trace written: {trace}" in err


def test_what_is_ignored_from_the_start_stays_ignored():
    with signal_handlers(dict.fromkeys(_HANDLED, signal.SIG_DFL)):
        assert termination_handlers(print) == dict.fromkeys(_HANDLED, print)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup gputop capture
        assert termination_handlers(print).keys() == {signal.SIGINT, signal.SIGTERM}
