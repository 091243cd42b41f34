"""The epilog of the page about Slurm, run by a real Slurm, with a real Prometheus behind ``gputop report --job``."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.cluster_lab import scraping, wait_for
from tests.cluster import engines
from tests.cluster.exporters import Exporter, openmetrics, seconds
from tests.waiting import until

ROOT = Path(__file__).parents[2]


def epilog_of_the_page() -> str:
    text = (ROOT / "docs/tasks/slurm.md").read_text()
    (script,) = (block for block in re.findall(r"```sh\n(.*?)```", text, re.S) if "gputop report --job" in block
                 and block.startswith("#!"))
    return script


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus here (tests/debian_packages.sh)")
def test_the_epilog_appends_what_the_job_did_with_its_gpus_to_its_output(tmp_path: Path) -> None:
    sbatch, squeue, sinfo, scontrol = engines.needed("sbatch", "squeue", "sinfo", "scontrol")
    gputop = tmp_path / "gputop"
    gputop.write_text(f"#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m gputop \"$@\"\n")
    job, nodes, now_s = [""], ("gpu1", "gpu2"), time.time()
    past = [line for node in nodes for line in Exporter(node, "").past(f"{node}:9400", seconds(0.5, 10.0), now_s)]
    with scraping({node: lambda node=node: Exporter(node, job[0]).page() for node in nodes},  # type: ignore[misc]
                  past=openmetrics(past)) as address:
        script = epilog_of_the_page()
        for on_the_page, here in (("/opt/gputop/bin/gputop", str(gputop)), ("http://prom:9090", address),
                                  ("PATH=", f"PATH={Path(scontrol).parent}:")):
            assert on_the_page in script
            script = script.replace(on_the_page, here)
        epilog = tmp_path / "epilog"
        epilog.write_text(script)
        for file in (epilog, gputop):
            file.chmod(0o755)
        with engines.slurm(tmp_path, f"Epilog={epilog}\n") as environ:
            def said(*words: str) -> str:
                return subprocess.run(words, env=environ, capture_output=True, text=True, check=True).stdout

            go_on = tmp_path / "go-on"
            job[0] = said(sbatch, "-N2", "--gres=gpu:h100:8", "-o", f"{tmp_path}/out-%j", "--wrap",
                          f"echo trained; until [ -e {go_on} ]; do sleep 0.1; done").split()[-1]
            wait_for(address, f'count(count_over_time(DCGM_FI_PROF_SM_ACTIVE{{hpc_job="{job[0]}"}}[1m]) > 3)', 16)
            go_on.touch()
            until(lambda: not said(squeue, "-h"), "the end of the job and its epilog")
            assert said(sinfo, "-h", "-N", "-o", "%T").split() == ["idle", "idle"]
        output = (tmp_path / f"out-{job[0]}").read_text().splitlines()
        assert output[0] == "trained" and len(output) <= 21
        assert [line.partition(":")[0] for line in output].count(f"Job {job[0]}") == 1
        assert "2 nodes, 16 GPUs, " in output[1] and f"source       {address}" in output
        held = float(re.search(r"([\d.]+) held", output[2])[1])  # type: ignore[index]
        assert 0 < held <= 16 * 90 / 3600, "a job of seconds: the times are known to half a minute"
