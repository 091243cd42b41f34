"""``gputop report --job``: what a job did with its GPUs, from recordings."""

from __future__ import annotations

from pathlib import Path

import pytest

from gputop.cli import main
from gputop.cluster.job_use import RecordedUse, lines
from gputop.core.errors import NoDataError
from gputop.core.samples import GpuSample, Reading
from tests.fakes import node_sample
from tests.records import replace


def test_of_recordings_only_the_gpus_that_the_job_held_count() -> None:
    used = RecordedUse("4711")

    def change(gpu: GpuSample, tick: int) -> GpuSample:
        value = 0.0 if gpu.info.index == 1 else 0.5 if tick < 60 else 1.0
        return replace(gpu, readings={**gpu.readings, "sm_active": Reading(value, "ratio", "GPM"),
                                      "power_w": Reading(400.0, "W", "NVML") if tick < 60 else
                                      Reading.missing("W", "no answer")})

    for tick in range(0, 120, 5):
        sample = node_sample(tick, gpus=4, change=change)
        held = dict.fromkeys((0, 1), sample.processes[0].gpus[0])
        process = replace(sample.processes[0], container="slurm 4711", gpus=held)
        used.add(replace(sample, time_s=1_800_000_000.0 + tick, processes=(process,)))
    text = lines(used.use("1 recording of node-07"), 0.01, "▁▂")
    assert text[0].startswith("Job 4711: 1 node, 2 GPUs, 2 min")
    assert any("idle" in line and "1 of 2 GPUs were idle the whole time: node-07:1" in line for line in text)
    assert any(line.startswith("activity") and "38% on average (SM active)" in line for line in text)
    assert any("400 W per GPU" in line and "kWh; measured in 50% of the time" in line for line in text)
    assert len(text) <= 20
    with pytest.raises(NoDataError, match="no process of job 5 held a GPU"):
        RecordedUse("5").use("nothing")


def test_a_real_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "node.gputop"
    assert main(["record", "--demo", "--interval", "0.1", "--seconds", "1", "-o", str(file)]) == 0
    capsys.readouterr()
    assert main(["report", "--job", "48213", str(file)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Job 48213: 1 node, ") and "1 recording of demo-node" in text
    assert main(["report", "--job", "48213"]) == 2 and main(["report"]) == 2
    assert main(["report", "--job", "1", str(file), "--json"]) == 2
