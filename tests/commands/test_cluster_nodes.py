"""``gputop cluster --nodes`` from outside: a real sshd, the jobs of a real Slurm, and what gputop says on a node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gputop.cli import main
from gputop.cluster import slurm
from tests.cluster import engines
from tests.waiting import until

# The agent of a simulated node, by another name and with other GPUs for each node.
_GPUTOP = f"""\
#!/bin/sh
export PYTHONPATH={Path(__file__).parents[2]}
{sys.executable} -m gputop --source simulated "$@" |
sed -u "s/GPU-[0-9a-f]/$LC_NODE-&/g; s/\\(\\"hostname\\":\\"\\)[^\\"]*/\\1$LC_NODE/"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("ssh")
    with engines.sshd(folder, ["gpu1", "gpu2"]) as programs:
        (programs / "gputop-there").write_text(_GPUTOP)
        (programs / "gputop-there").chmod(0o755)
        yield folder


@pytest.fixture(autouse=True)
def ssh(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "COMMAND", ["no-such-squeue"])  # a squeue without a cluster looks for one by DNS
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def asked(folder: Path, nodes: str, *more: str) -> int:
    return main(["cluster", "--nodes", nodes, "--remote-command", f"{folder}/bin/gputop-there", *more])


def test_nodes_are_asked_and_those_that_fail_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(folder, "gpu[1-2],closed,stranger,locked", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["simulated"] and document["gpus"] == 16
    problems = {own["message"].partition(":")[0]: own for own in document["problems"]}
    assert {"closed", "stranger", "locked"} <= set(problems)
    assert "ssh stranger true" in problems["stranger"]["fix"] and "password" in problems["locked"]["message"]
    job, = document["jobs"]  # by its control group, without squeue
    assert job["gpus"] == 16 and job["nodes"] == 2 and job["mapped"] == "label" and 0 < job["activity"] <= 1
    assert asked(folder, "closed", "--once") == 1
    assert "no node answered. closed: the node refuses connections" in capsys.readouterr().err
    assert main(["cluster", "--nodes", "gpu1", "--remote-command", "no-such-gputop", "--once"]) == 1
    assert "--remote-command /PATH/gputop" in capsys.readouterr().err


def test_the_jobs_are_those_of_a_real_slurm(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    with engines.slurm(tmp_path) as environ:
        monkeypatch.setenv("SLURM_CONF", environ["SLURM_CONF"])
        sbatch, squeue = engines.needed("sbatch", "squeue")
        submitted = subprocess.run([sbatch, "-N2", "--gres=gpu:h100:8", "-J", "llm", "-o", "/dev/null", "--wrap",
                                    "sleep 600"], capture_output=True, text=True, env=environ, check=True)
        number = submitted.stdout.split()[-1]
        running = ["-h", "-t", "R", "-o", "%A"]
        until(lambda: number in subprocess.run([squeue, *running], env=environ, capture_output=True,
                                                       text=True).stdout.split(), "the job")
        monkeypatch.setattr(slurm, "COMMAND", [squeue, "--json"])
        assert asked(folder, "gpu[1-2]", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    job, = document["jobs"]
    assert (job["id"], job["name"], job["mapped"], job["gpus"], job["nodes"]) == (number, "llm", "node", 16, 2)
    assert job["start_s"] > 1e9 and document["free"] is None
    assert [own["message"] for own in document["problems"] if "so far" not in own["message"]] == []


def test_wrong_usage_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--nodes=-oProxyCommand=id"], ["--nodes", "n1", "--prometheus", "http://p:9090"], []):
        assert main(["cluster", *words, "--once"]) == 2, words
    assert "gputop cluster --nodes n[01-16]" in capsys.readouterr().err
