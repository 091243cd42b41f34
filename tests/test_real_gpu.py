"""A real GPU (NVIDIA H200, driver 580, CUDA 13): what its driver answered, and what the profilers recorded of it.

The jobs are those of ``benchmarks/h200``; what their own logs say stands at each test.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gputop.advice.trace_rules import TRACE_RULES
from gputop.analysis.steps.steps import find_steps
from gputop.core.captured_samples import CounterLane, GpuCounters
from gputop.diagnosis.diagnose import analyze
from gputop.diagnosis.report import text_report
from gputop.profiler.capture.records import CaptureRecord
from gputop.replay.reader import open_recording
from gputop.session.gpu_samples import remarks_of_activity
from gputop.trace.readers.load import load
from tests.analyses import make_analysis

DATA = Path(__file__).parent / "data"
CAPTURE_S, BEGAN_S = (1795766929.57, 1795766930.11), 1795766923.2  # what the trace covers; when it was asked for


def test_gpm_gives_all_its_values_while_cupti_records() -> None:
    with open_recording(DATA / "h200_metrics.gputop") as recording:
        samples = [recording.sample(i) for i in range(len(recording))]
    assert len(samples) == 78 and {gpu.info.name for sample in samples for gpu in sample.gpus} == {"NVIDIA H200"}
    gpus = [sample.gpus[0].readings for sample in samples]
    for metric in ("sm_active", "tensor_active", "dram_active", "pcie_rx_bytes_per_s"):
        first = next(i for i, readings in enumerate(gpus) if readings[metric].value is not None)
        assert first <= 2 and all(readings[metric].value is not None for readings in gpus[first:]), metric
        assert not any(readings[metric].coarse for readings in gpus[first:])
    assert gpus[-1]["power_limit_w"].value == 700
    assert all(sample.processes[0].gpus[0].memory_bytes.value for sample in samples[-3:])


def test_the_gpus_activity_shows_how_much_a_recording_slowed_its_job() -> None:
    """By its log a step took 11.2 ms before and 25.9 ms in the recording."""
    with open_recording(DATA / "h200_metrics.gputop") as recording:
        times = tuple(recording.times_s)
        activity = tuple(recording.sample(i).gpus[0].readings["sm_active"].value for i in range(len(recording)))
    begin_s, end_s = CAPTURE_S
    analysis = make_analysis(trace={"start_s": begin_s, "window_s": end_s - begin_s},
                             steps={"median_s": 0.026, "mean_s": 0.026})
    record = CaptureRecord("pid:445", Path("x"), end_s, 2.0, 2.0, analysis=analysis)
    counters = GpuCounters(times, 0.2, {0: {"sm_active": CounterLane(activity)}})
    (said,) = remarks_of_activity(counters, record, BEGAN_S)
    step_ms = float(said.split("about ")[1].split(" ms")[0])
    assert "2.0 times as active" in said and 11.2 <= step_ms <= 14


def test_steps_of_a_queue_that_the_recording_does_not_see_emptied() -> None:
    """84.7 ms a step by the log; the host filled the queue with 17 steps in 2.5 ms each."""
    steps = find_steps(load([str(DATA / "h200_full_queue.pt.trace.json.gz")]))
    assert steps is not None and steps.times.median_s == pytest.approx(84.7e-3, rel=0.005)
    findings = analyze([str(DATA / "h200_full_queue.pt.trace.json.gz")]).findings
    assert [finding.id for finding in findings] == ["dims_unaligned"]


@pytest.mark.parametrize("name", ["h200_full_queue", "pytorch_h200_metrics", "pytorch_h200_pageable"])
@pytest.mark.parametrize("part", [0.3, 0.6, 0.9])
def test_a_file_that_is_cut_off_is_not_judged(tmp_path: Path, name: str, part: float) -> None:
    """Of the first GPU, which was busy all the time, 60 % of the kernels are left: idle for 60 % of the step, and of
    30 % of the file a step of 2.7 ms for 84.8."""
    cut = tmp_path / "cut.pt.trace.json.gz"
    whole = (DATA / f"{name}.pt.trace.json.gz").read_bytes()
    cut.write_bytes(whole[:int(part * len(whole))])
    result = analyze([str(cut)])
    assert {"truncated", "incomplete"} <= {note.id for note in result.trace.quality}
    assert not result.findings and result.steps is result.breakdown is result.wall_time is None
    assert len(result.abstained) == len(TRACE_RULES)
    text = " ".join(text_report(result).split())
    assert "NO VERDICT" in text and "Step not evaluated" in text
    assert "idle" not in text.replace("look like idle time", "")


def test_kernels_that_the_profiler_lost() -> None:
    """GPM showed the GPU busy all the time; a third of its kernels are in the file."""
    trace = load([str(DATA / "h200_lost_kernels.pt.trace.json.gz")])
    assert [note.id for note in trace.quality] == ["lost_kernels"] and not len(trace.device)
    analysis = analyze([str(DATA / "h200_lost_kernels.pt.trace.json.gz")])
    assert not analysis.findings and analysis.steps is not None
    assert analysis.steps.median_s == pytest.approx(46.3e-3, rel=0.02)


def test_a_jax_job_that_computes_in_python_between_its_steps() -> None:
    """33.0 ms a step by the log, 30 of them Python."""
    analysis = analyze([str(DATA / "h200_jax_host_work.xplane.pb.gz")])
    assert analysis.steps is not None and analysis.steps.median_s == pytest.approx(33.0e-3, rel=0.005)
    (finding,) = analysis.findings
    assert finding.id == "step_gap_host" and finding.gain.step_time == pytest.approx(0.90, abs=0.01)
