"""``gputop cluster`` from outside, on a real Prometheus that scrapes 25 nodes (benchmarks/cluster_lab.py)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import cluster_lab
from gputop.cli import main
from gputop.cluster import slurm
from gputop.commands.cluster import wanted_job
from tests.cluster import engines


@pytest.fixture(scope="module")
def prometheus() -> Iterator[str]:
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        pytest.skip("no prometheus here (tests/debian_packages.sh unpacks it)")
    with cluster_lab.running(25, 1) as address:
        yield address


@pytest.fixture(autouse=True)
def without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "COMMAND", ["no-such-squeue"])
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def test_victoria_metrics_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("victoria-metrics") is None:
        pytest.skip("no victoria-metrics here (tests/debian_packages.sh unpacks it)")
    with cluster_lab.running(25, 1, engine="victoria-metrics") as address:
        test_what_is_planted_is_found_and_nothing_else(address, capsys)


def test_what_is_planted_is_found_and_nothing_else(prometheus: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "--prometheus", prometheus, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    found = {(own["job"], own["id"]): own for own in document["findings"]}
    pods = {("team-a/notebook-a", "held_idle"), ("team-a/notebook-b", "held_idle")}  # idle, and free nodes are no job
    assert set(found) == {("4001", "straggler_gpu"), ("4002", "held_idle"), ("4003", "partly_used_job"),
                          ("4004", "slow_node"), ("4005", "activity_drop"), ("4006", "low_clock_gpu"), *pods}
    straggler = found["4001", "straggler_gpu"]
    assert straggler["places"] == ["n004:3"] and "1110 MHz" in straggler["why"] and "too hot" in straggler["why"]
    low = found["4006", "low_clock_gpu"]
    assert low["places"] == ["n022:5"] and "power is limited" in low["why"]
    assert low["since_exact"] and low["evidence"]["lasts_s"] == pytest.approx(1800, abs=300)
    assert found["4002", "held_idle"]["evidence"]["lasts_s"] == pytest.approx(43 * 60, abs=300)
    assert found["4004", "slow_node"]["places"] == ["n014"]
    jobs = {own["id"]: own for own in document["jobs"]}
    assert jobs["4003"]["idle_gpus"] == 16 and jobs["4005"]["nodes"] == 4
    assert max(v for v in jobs["4002"]["history"]["values"] if v is not None) > 0.8
    assert jobs["4001"]["memory_used_bytes"] / jobs["4001"]["memory_total_bytes"] == pytest.approx(0.9, abs=0.01)
    # MIG: two instances, not a whole GPU; time-slicing: one GPU in two pods; both once in the sum.
    assert document["gpus"] == 25 * 8 + 1 and jobs["team-a/notebook-a"]["gpus"] == 1
    assert document["problems"] == [] and document["bytes"] < 100_000


def test_prometheus_is_reached_through_a_real_sshd(prometheus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    with engines.sshd(tmp_path, ["login"]) as programs:
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        assert main(["cluster", "--prometheus", f"ssh://login/{prometheus}", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["source"].startswith("ssh://login/http://127.0.0.1") and document["gpus"] == 25 * 8 + 1
        assert main(["cluster", "--prometheus", f"ssh://stranger/{prometheus}", "--json"]) == 1
    assert "Host key verification failed" in capsys.readouterr().err


def test_one_job_alone(prometheus: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4005")
    monkeypatch.setenv("GPUTOP_PROMETHEUS_TOKEN", "s3cret")  # which this Prometheus does not ask for
    assert main(["cluster", "--prometheus", prometheus, "--once"]) == 0
    out, err = capsys.readouterr()
    assert "4005" in out and "4001" not in out and "fell 90% → 40%" in out and "s3cret" not in out + err
    assert main(["cluster", "--prometheus", prometheus, "--job", "99"]) == 3
    assert "no job 99 has GPU metrics" in capsys.readouterr().err


def test_into_a_file(prometheus: str, tmp_path: Path) -> None:
    assert main(["cluster", "--prometheus", prometheus, "-o", str(tmp_path / "fleet.html")]) == 0
    page = (tmp_path / "fleet.html").read_text()
    assert "straggler n004:3" in page and "<svg" in page


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster"]) == 2
    assert "--prometheus http://HOST:9090" in capsys.readouterr().err
    assert main(["cluster", "--prometheus", "http://ada:s3cret@prom:9090"]) == 2
    assert "s3cret" not in capsys.readouterr().err
    assert main(["cluster", "--prometheus", "http://127.0.0.1:1", "--once"]) == 1
    assert "cannot reach" in capsys.readouterr().err


def test_inside_of_a_job_it_is_that_job() -> None:
    assert wanted_job(None, {"SLURM_JOB_ID": "4711"}) == "4711" and wanted_job("all", {"SLURM_JOB_ID": "4711"}) == ""
    assert wanted_job("8", {"SLURM_JOB_ID": "4711"}) == "8" and wanted_job(None, {"SLURM_JOB_ID": "x y"}) == ""
