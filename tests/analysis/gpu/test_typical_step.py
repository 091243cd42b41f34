from __future__ import annotations

import itertools
import json

import pytest

from gputop.analysis.gpu.breakdown import SLOTS, parts_by_gpu, typical_step
from gputop.analysis.gpu.device_time import timelines
from gputop.analysis.results import StepTimes
from gputop.analysis.steps.model import Steps
from gputop.core.codec import to_document
from gputop.diagnosis.diagnose import analyze_trace
from tests.trace.build import Builder


def _steps(*bounds: tuple[int, int]) -> Steps:
    return Steps(bounds, StepTimes("test", "high", len(bounds), median_s=1e-3, mean_s=1e-3, p95_s=1e-3))


def _trace() -> Builder:
    """Two steps of 400 and 1000 µs; in the second GPU 0 computes first, GPU 1 last."""
    b = Builder(gpus=2)
    b.run(0, 0, 400).run(1, 0, 400)
    return b.run(0, 400, 500).run(1, 900, 500)


def test_the_runs_say_when_each_gpu_did_what() -> None:
    trace = _trace().build()
    bounds = (0, 400_000), (400_000, 1_400_000), (400_000, 1_400_000)
    step = typical_step(trace, timelines(trace), _steps(*bounds), parts_by_gpu(trace, timelines(trace), bounds))
    assert step is not None and (step.step, step.duration_s) == (1, pytest.approx(1e-3))
    gpus = {gpu.gpu: gpu.runs for gpu in step.gpus}
    assert gpus[0][0] == ("compute", 0, SLOTS // 2) and gpus[1][-1] == ("compute", SLOTS // 2, SLOTS)
    for runs in gpus.values():
        assert runs[0][1] == 0 and runs[-1][2] == SLOTS
        assert all(a[2] == b[1] and a[0] != b[0] for a, b in itertools.pairwise(runs))
    assert json.loads(json.dumps(to_document(step)))["gpus"][0]["runs"][0] == ["compute", 0, SLOTS // 2]


def test_without_steps_or_gpus_there_is_none() -> None:
    trace = _trace().build()
    assert typical_step(trace, timelines(trace), None, {}) is None
    host = Builder(gpus=0).host("step", 0, 100).build()
    assert typical_step(host, timelines(host), _steps((0, 100_000)), {}) is None
    assert analyze_trace(host).to_json()["typical_step"] is None
