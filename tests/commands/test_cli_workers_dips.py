"""The command line of several workers and of dips: what is wrong usage, and one wait for a dip from begin to end."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from gputop.cli import main
from gputop.commands import common
from gputop.commands.arguments import parse
from gputop.commands.common import options_of
from gputop.commands.settings import Config, apply_settings
from gputop.core.errors import EXIT_FAILED, EXIT_NO_DATA, EXIT_USAGE, GputopError, NoDataError
from gputop.profiler.capture.records import Server
from gputop.profiler.capture.request import ask_job
from gputop.session.capture import captures
from gputop.session.capture.server_watch import ServerWatch
from gputop.sources.simulated import SimulatedSource


def read_options(words):
    args = parse(words)
    apply_settings(args, Config(None))
    return options_of(args)


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    for name in ("TF_CONFIG", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("arguments", "err"), [
    (["--attach", "a:1,b"], "port is missing"),
    (["--attach", "n[2-1]:1"], "not a list of hosts"),
    (["--profiler-port", "x", "--attach", "a"], "is not a list of ports"),
    (["--profiler-port", "6009"], "neither TF_CONFIG nor SLURM_JOB_NODELIST"),
    (["--on-dip", "sm is low"], "not a valid dip rule"),
    (["--on-dip", "--json", "--dip-max", "2"], "--json prints one document"),
    (["--on-dip", "--force"], "--force cannot be combined with --on-dip"),
    (["--dip-max", "5"], "Add --on-dip"),
])
def test_wrong_usage_is_said_before_anything_starts(arguments, err, capsys):
    assert main(["capture", "--demo", *arguments]) == EXIT_USAGE
    assert err in capsys.readouterr().err


def test_the_workers_of_a_job(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[08-09]")
    options = read_options(["capture", "--profiler-port", "6009-6010"])
    assert options.attach == ("gpu08:6009", "gpu08:6010", "gpu09:6009", "gpu09:6010")
    assert read_options(["--attach", "a:1,b:2", "--attach", "c:3"]).attach == ("a:1", "b:2", "c:3")


def test_of_many_workers_a_few_are_captured_and_of_hundreds_never_all(monkeypatch, capsys):
    def capture(servers, *_, **__):
        raise GputopError(f"captured {[s.address for s in servers]}", "")

    monkeypatch.setattr(captures, "find_named_servers", lambda attach, *_, **__: (
        tuple(Server(address, asked=True) for address in attach), (), None))
    monkeypatch.setattr(captures, "capture_and_analyze", capture)
    for more, captured in (([], ["n0:1", "n4:1", "n8:1"]), (["--all-workers"], [f"n{i}:1" for i in range(9)])):
        assert main(["capture", "--attach", "n[0-8]:1", *more]) == EXIT_FAILED
        said = capsys.readouterr().err
        assert f"captured {captured}" in said and ("3 of 9 workers" in said) == (not more)
    assert main(["capture", "--attach", "n[001-200]:1", "--all-workers"]) == EXIT_USAGE
    assert "can capture at most 64 workers at once, not 200" in capsys.readouterr().err


def test_options_of_dips():
    assert read_options([]).auto_capture is None
    options = read_options(["--on-dip"]).auto_capture
    assert options is not None and options.rule.text == "sm<0.6*median for 5s"
    assert (options.min_interval_s, options.max_captures) == (600.0, 20)
    options = read_options(["capture", "--on-dip", "power<200W", "--dip-every", "1"]).auto_capture
    assert options is not None and options.rule.level == 200.0
    assert (options.min_interval_s, options.max_captures) == (60.0, 1)


def test_a_dip_is_not_waited_for_without_a_gpu(monkeypatch, capsys):
    class Absent(SimulatedSource):
        simulated = False

        def open(self):
            raise NoDataError("there is no driver", "Install it.")

    monkeypatch.setattr(common, "source_of", lambda _: Absent())
    assert main(["capture", "--on-dip"]) == EXIT_NO_DATA
    assert "there is no driver" in capsys.readouterr().err


def test_which_of_several_jobs_is_meant_is_asked_before_a_dip_is_waited_for(monkeypatch, tmp_path, capsys):
    jobs = [Server(f"127.0.0.1:{port}", f"TensorFlow 2.21.0: /usr/bin/python {script}", port)
            for port, script in ((6009, "train.py"), (6010, "other.py"))]
    monkeypatch.setattr(ServerWatch, "question", lambda self, request: ask_job(request, jobs))
    assert main(["capture", "--demo", "--on-dip", "sm<1% for 60s", "--logdir", str(tmp_path)]) == EXIT_USAGE
    err = capsys.readouterr().err
    assert "train.py" in err and "other.py" in err and "127.0.0.1:6010" in err


@pytest.mark.usefixtures("analysis_in_this_process")
def test_a_wait_for_a_dip(tmp_path, capsys):
    """No kernel of the simulated node keeps 99% of the SMs busy. Signals are handled as before once it is over."""
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in handled}
    assert main(["capture", "--demo", "--gpus", "0", "--interval", "0.1", "--on-dip", "sm<99% for 1s",
                 "--seconds", "0.5", "--json", "--logdir", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    path = Path(document["capture"]["path"])
    assert path.is_relative_to(tmp_path / "black-box") and path.is_file()
    assert "waiting for sm<99% for 1s" in err and "automatic capture: GPU " in err
    assert {number: signal.getsignal(number) for number in handled} == before
