"""The options of DCGM on the command line."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from pathlib import Path

import pytest

from gputop.cli import main
from gputop.commands.snapshot import _status
from gputop.core.errors import EXIT_NO_DATA, EXIT_OK
from gputop.core.samples import FAILED
from tests.commands.run_gputop import gputop
from tests.dcgm_double import PROFILING, install
from tests.fakes import StillSession, node_sample
from tests.listening import free_port
from tests.records import replace


def test_a_snapshot_in_which_no_gpu_gave_a_value_has_a_status_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    session = StillSession(4)
    assert _status(session) == EXIT_OK
    failed = tuple(replace(gpu, state=FAILED, message="the connection was lost", readings={})
                   for gpu in node_sample(0).gpus)
    session.feed.sample = replace(node_sample(0), gpus=(failed[0], *node_sample(0).gpus[1:]))
    assert _status(session) == EXIT_OK, "the others gave theirs"
    session.feed.sample = replace(node_sample(0), gpus=failed)
    assert _status(session) == EXIT_NO_DATA and "the connection was lost" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "message"), [
    *(([*command, "--dcgm", "node:port"], "--dcgm node:port is not the address")
      for command in (["snapshot"], ["snapshot", "--source", "dcgm"], ["doctor"])),
    *((["snapshot", "--source", "nvml", *option], "conflicts")  # with the driver alone
      for option in (["--dcgm-watch"], ["--dcgm", "node"], ["--dcgm-bindings", "/x"]))])
def test_wrong_usage(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2 and message in capsys.readouterr().err


def test_the_price_of_consent_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--dcgm-watch" in text and "Xid 119" in text and "ncu, nsys" in text


def test_no_host_engine_is_said_with_the_command_that_starts_it(capsys: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    assert main(["--source", "dcgm", "--dcgm", address]) == 1, "before the screen is taken"
    err = capsys.readouterr().err
    assert f"no host engine answers at {address}" in err and "systemctl start nvidia-dcgm" in err


def snapshot_of_an_engine(folder: Path, *options: str, **engine: object) -> subprocess.CompletedProcess[str]:
    install(folder, 4)
    bindings = folder / "usr/share/datacenter-gpu-manager-4/bindings/python3"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        setting = {"port": port, "gpus": [{"id": 0, "uuid": "GPU-0"}], "watched": sorted(PROFILING),
                   "figures": {"1002": 0.5, "155": 300.0}, **engine}
        return gputop("snapshot", "--source", "dcgm", "--dcgm", f"127.0.0.1:{port}", "--dcgm-bindings", str(bindings),
                      "--interval", "0.1", *options,
                      env={"DCGM_DOUBLE": json.dumps(setting),
                           "LD_LIBRARY_PATH": str(next(folder.rglob("libdcgm.so.4")).parent)})


def test_a_snapshot_of_a_host_engine_alone(tmp_path: Path) -> None:
    done = snapshot_of_an_engine(tmp_path, "--format", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["source"].startswith("DCGM 4.6 host engine at 127.0.0.1")
    gpu = document["gpus"][0]
    assert gpu["readings"]["sm_active"]["value"] == 0.5 and gpu["readings"]["power_w"]["value"] == 300.0
    assert document["host"]["readings"]["memory_total_bytes"]["value"]


def test_a_snapshot_whose_host_engine_dies_meanwhile(tmp_path: Path) -> None:
    done = snapshot_of_an_engine(tmp_path, answers=3)
    assert done.returncode == EXIT_NO_DATA and re.search("no GPU returned values: .*DCGM", done.stderr)
    assert re.search("failed: .*DCGM", done.stdout) and "No problem found so far" not in done.stdout
