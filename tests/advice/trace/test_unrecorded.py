"""Savings by Python's samples from outside of the recording, which slows down some of a job."""

from __future__ import annotations

import pytest

from gputop.advice.trace.unrecorded import as_unrecorded
from gputop.core.captured_samples import JobCpus
from gputop.diagnosis.diagnose import analyze_to_facts, analyze_trace
from gputop.trace.model import Trace
from tests.advice.trace.traces import KERNEL, findings
from tests.analysis.host.stack_samples import sampled
from tests.records import replace
from tests.trace.build import Builder

COUNT, BEFORE_S = 40, 4.0
FIT = "train.py:90 <module> > train.py:40 fit"
STEP, WORK = f"{FIT} > keras/src/trainer.py:371 step", f"{FIT} > metrics.py:7 update"


def job(call_before_s: float, *, before_s: float = BEFORE_S, gpu: bool = False, rollout_s: float = 0.0,
        rollout: str = f"{FIT} > ppo.py:5 rollout > env.py:9 step") -> Trace:
    """While it is recorded, each step is a call of 20 ms and 20 ms of a metric in Python; before that the call takes
    ``call_before_s``, and a rollout comes first."""
    b, now = Builder(gpus=int(gpu)), rollout_s
    changes = [(0.0, rollout)] if rollout_s else []
    while now < before_s:
        changes += [(now, STEP), (now + call_before_s, WORK)]
        now += call_before_s + 0.02
    begin_s = now
    for i in range(COUNT):
        b.host("EagerExecute", i * 40_000, 20_000, is_func=1, eager_op="__inference_multi_step_on_iterator_42")
        if gpu:
            b.run(0, i * 40_000 + 60, 19_000, KERNEL, launch=i * 40_000 + 50)
        changes += [(now, STEP), (now + 0.02, WORK)]
        now += 0.04
    trace = b.build()
    trace.origin_ns = 1000 * 10 ** 9
    trace.stacks = (sampled({"MainThread": changes}, now, start_s=1000.0 - begin_s, rate_hz=1000.0),)
    return trace


def test_the_saving_is_that_of_the_job_which_nothing_records() -> None:
    """The call takes 5 ms when it is not recorded, so the metric is 80% of the step and not half of it."""
    found = findings(job(0.005))["step_gap_host"]
    assert found.evidence["share_ratio"] == pytest.approx(0.5, abs=0.03)  # of the recorded steps
    assert found.gain.step_time == pytest.approx(0.8, abs=0.03) == found.evidence["unrecorded_ratio"]
    assert found.gain.after_s is None  # the recorded step is not that of which the share is
    assert found.title == "Host work between steps takes 80% of the step" and "(50%)" in found.why
    assert "Python's samples show this for 80%" in found.why


@pytest.mark.parametrize("trace", [
    job(0.02), job(0.005, before_s=1.0), job(0.005, gpu=True),
], ids=["a job that is not slowed down", "too few samples", "a GPU, whose time is not that of Python"])
def test_the_saving_is_that_of_the_recorded_steps(trace: Trace) -> None:
    found = findings(trace)["step_gap_host"]
    assert "unrecorded_ratio" not in found.evidence and found.gain.step_time == pytest.approx(0.5, abs=0.03)


def test_code_without_a_name_that_tells_was_not_seen_and_is_not_absent() -> None:
    """An evaluation written into the loop itself: no sample shows a function of that name."""
    facts = analyze_to_facts(job(0.005))
    found = next(one for one in facts.analysis.findings if one.id == "step_gap_host")
    made = replace(found, id="evaluation_share", gain=replace(found.gain, step_time=0.15))
    assert as_unrecorded(made, facts) is made


def test_another_phase_of_the_job_that_the_recording_lacks_is_said() -> None:
    note, = (note for note in analyze_trace(job(0.02, before_s=4.0, rollout_s=2.0)).trace.quality
             if note.id == "unrecorded")
    assert "ppo.py:5 rollout for 50% of 4.00 s" in note.message
    # A line of the loop's own function that calls what the steps call, too.
    note, = (note for note in analyze_trace(job(0.02, rollout_s=2.0, rollout=STEP.replace(":40", ":50"))).trace.quality
             if note.id == "unrecorded")
    assert "train.py:50 fit for 50% of 4.00 s" in note.message
    assert not any(note.id == "unrecorded" for note in analyze_trace(job(0.02, rollout_s=0.6)).trace.quality)


def test_a_fix_in_a_job_whose_threads_compete_saves_at_least_its_time() -> None:
    """NumPy's idle threads kept those of PyTorch from two CPUs: a fix of 28% of the step made it a quarter as long."""
    trace = job(0.02)
    trace.job_cpus = JobCpus(2.0, used=1.8, others=0.1, threads=4, waited=1.0)
    assert findings(trace)["step_gap_host"].gain.claim == "at least"
    trace.job_cpus = JobCpus(2.0, used=1.8, others=0.1, threads=2, waited=0.1)
    assert findings(trace)["step_gap_host"].gain.claim == "about"
