"""Figures of single steps: their means are those of the analysis."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gputop.analysis.gpu.step_series import StepArrays, step_series
from gputop.analysis.results import Analysis
from gputop.diagnosis.diagnose import analyze_to_facts
from gputop.simulation.loop import SimulatedLoop
from gputop.simulation.scenarios import find_scenario
from gputop.simulation.xspace import build_xspace
from gputop.trace.model import Kind, Trace
from gputop.trace.readers.load import load
from tests.trace.build import Builder, keras_steps

KERAS = Path(__file__).resolve().parents[2] / "data" / "keras3_slow_input.xplane.pb.gz"


def both(trace: Trace) -> tuple[Analysis, StepArrays]:
    facts = analyze_to_facts(trace)
    assert facts.steps is not None
    return facts.analysis, step_series(facts.trace, facts.steps, facts.gpu_timelines, facts.parts)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "node.xplane.pb"
    loop = SimulatedLoop(find_scenario("gpu0-oversubscribed"))
    path.write_bytes(build_xspace(loop, 20 * 10**9, 22 * 10**9, 1_700_000_000 * 10**9, "node"))
    return path


@pytest.mark.parametrize("which", ["simulated", "keras"])
def test_parts_sum_to_each_step_and_their_means_are_the_breakdown(which, simulated):
    analysis, series = both(load([KERAS if which == "keras" else simulated]))
    assert np.sum(list(series.parts.values()), axis=0) == pytest.approx(series.step_s)
    means = {name: values.mean() for name, values in series.parts.items()}
    assert {name: mean for name, mean in means.items() if mean} == pytest.approx(
        {name: mean for name, mean in analysis.breakdown.known.items() if mean})
    assert analysis.steps.durations_s == pytest.approx(series.step_s.tolist())
    if which == "keras":  # without events of a GPU
        assert series.gpus == {} and series.waiting is None


def test_gpu_figures_are_those_of_the_analysis(simulated):
    analysis, series = both(load([simulated]))
    for use in analysis.gpus:
        own = series.gpus[use.gpu]
        for name in ("busy", "compute", "collectives", "collectives_exposed", "copies"):
            assert own[name].mean() == pytest.approx(getattr(use, name), abs=0.07)  # steps against the window
        assert (own["compute"] * series.step_s).mean() == pytest.approx(use.compute_s_per_step)
        assert own["idle"] == pytest.approx(1 - own["busy"])
        assert np.median(own["launch_delay_s"]) == pytest.approx(use.launch_delay_median_s, rel=0.2)
        assert np.nanmean(own["tensor_core_time"]) == pytest.approx(use.tensor_core_time, abs=0.02)
    assert np.nanmean(series.waiting) == pytest.approx(analysis.collectives.waiting, abs=0.05)


def test_figures_of_each_step_by_hand():
    b = Builder(gpus=2)
    for i in range(4):
        at = 1000.0 * i
        b.host("train", at, 900, step_num=i)
        b.run(0, at + 100, 100, "volta_h884gemm_128x64", launch=at + 50, launch_length=10)
        b.run(0, at + 300, 300, "volta_sgemm_128x64_nn", launch=at + 90, launch_length=10)
        for gpu, wait in ((0, 300), (1, 100)):
            b.run(gpu, at + 900 - wait, wait, "ncclKernel_AllReduce", kind=Kind.COLLECTIVE)
    b.run(0, 4100, 100, "volta_h884gemm_128x64")  # after the last step
    analysis, series = both(b.build())
    assert analysis.steps.count == 3
    own = series.gpus[0]
    assert own["kernels"].tolist() == [3, 3, 3] and series.gpus[1]["kernels"].tolist() == [1, 1, 1]
    assert own["compute"] == pytest.approx([0.4] * 3) and own["collectives_exposed"] == pytest.approx([0.3] * 3)
    assert own["launch_delay_s"] == pytest.approx([(40 + 200) / 2 * 1e-6] * 3)
    assert own["tensor_core_time"] == pytest.approx([0.25] * 3)
    assert np.isnan(series.gpus[1]["launch_delay_s"]).all() and np.isnan(series.gpus[1]["tensor_core_time"]).all()
    assert series.waiting == pytest.approx([0.5] * 3)  # 2 × 100 µs of 400 µs move data


def test_the_launch_delay_of_a_step_is_unknown_where_its_kernels_begin_before_their_calls() -> None:
    b = keras_steps(Builder(), 6, 10_000, 9_000)
    for i in range(6):
        for k in range(20):
            at = 10_000 * i + 400 * k + 100
            b.run(0, at + 10, 300, launch=at + (20 if i == 3 else 6))
    _, series = both(b.build())
    delays = series.gpus[0]["launch_delay_s"]
    assert np.isnan(delays).sum() == 1 and np.nanmax(delays) == 0, "a call of 5 µs ends 1 µs after its kernel begins"
