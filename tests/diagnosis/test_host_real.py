"""Real TensorFlow and JAX jobs on a CPU, against what their own scripts say they do (``tests/tf_job.py``)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from gputop.analysis.results import Analysis
from gputop.analysis.steps.model import Steps
from gputop.analysis.steps.steps import find_steps
from gputop.diagnosis.diagnose import analyze_trace
from gputop.diagnosis.report import text_report
from gputop.trace.model import Trace
from gputop.trace.readers.load import load

DATA = Path(__file__).resolve().parents[1] / "data"
LOGGED = json.loads((DATA / "steps.json").read_text())


@cache
def trace_of(name: str) -> Trace:
    return load([DATA / f"{name}.xplane.pb.gz"])


@cache
def analyzed(name: str) -> Analysis:
    return analyze_trace(trace_of(name))


def steps_of(name: str) -> Steps:
    steps = find_steps(trace_of(name))
    assert steps is not None
    return steps


@pytest.mark.parametrize("name", ["keras3_host_work", "keras3_validation", "tf_retracing"])
def test_steps_are_those_the_job_logged(name):
    ends = np.array(LOGGED[name]["step_end_unix_s"])
    origin = trace_of(name).origin_ns / 1e9
    steps = steps_of(name)
    assert steps.times.median_s == pytest.approx(LOGGED[name]["median_step_s"], rel=0.15)
    for begin, end in steps.bounds_ns:  # the job logs a step's end after its call and before the next
        assert ((ends > origin + begin / 1e9) & (ends < origin + end / 1e9 + 1e-4)).sum() == 1
    assert steps.times.phase == "training"


def test_validation_is_left_out_and_named():
    a = analyzed("keras3_validation")
    assert set(steps_of("keras3_validation").times.left_out_s) == {"evaluation"}
    assert "evaluation" in {note.id for note in a.trace.quality} and "of evaluation" in text_report(a)


def test_the_callbacks_work_fills_the_gaps():
    gaps = analyzed("keras3_host_work").gaps
    assert gaps is not None and gaps.no_event_s_per_step is not None
    assert gaps.no_event_s_per_step >= 0.005  # it sleeps for 5 ms a step
    work = {w.name: w for w in gaps.main}
    assert work["Square"].count_per_step == work["Mean"].count_per_step == 5
    sum_s = sum(w.s_per_step for w in gaps.main) + gaps.no_event_s_per_step
    assert sum_s == pytest.approx(gaps.total_s_per_step, rel=0.05)  # the rest is below the first twelve names


@pytest.mark.parametrize(("name", "eager"), [("keras3_fast", 0.0), ("keras3_slow_input", 0.0), ("tf_retracing", 0.05)])
def test_jobs_in_functions_run_next_to_nothing_eagerly(name, eager):
    ops = analyzed(name).ops
    assert ops is not None and ops.eager_share is not None and ops.eager_share <= eager


def test_jax_has_steps_and_no_tensorflow_figures():
    a = analyzed("jax_cpu")
    assert a.steps is not None and a.steps.count == 20 and a.gaps is not None
    assert a.ops is None and a.launch_threads is None and a.memory == ()
