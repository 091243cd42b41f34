"""Steps of which each does more than the one before, or takes longer."""

from __future__ import annotations

import random

import pytest

from gputop.core.captured_samples import JobCpus
from tests.advice.trace.traces import findings
from tests.trace.build import Builder


def job(calls: list[int], us: list[float], *, pytorch: bool = True) -> Builder:
    """Steps with so many calls of an op, and so long."""
    b = Builder(gpus=0, format="chrome" if pytorch else "xspace")
    at = 0.0
    for i, (count, length) in enumerate(zip(calls, us, strict=True)):
        if pytorch:
            b.host(f"ProfilerStep#{i}", at, length - 10, step_num=i).host("aten::linear", at + 2, 3)
        else:
            b.host("EagerExecute", at, length - 10, is_func=1, eager_op="__inference_one_step_on_iterator_7")
        for k in range(count):
            b.host("aten::mm" if pytorch else "MatMul:MatMul", at + 10 + k * (length - 30) / count, 4)
        at += length
    return b


def grown(b: Builder, cpus: JobCpus | None = None):
    trace = b.build()
    trace.job_cpus = cpus
    f = findings(trace).get("long_steps")
    return f if f is not None and f.title.startswith("Each step") else None


@pytest.mark.parametrize("noise", [0.0, 0.4])
@pytest.mark.parametrize("pytorch", [True, False])
def test_calls_that_rise_by_a_constant_are_what_is_carried_on(noise, pytorch):
    """As a hidden state that is not detached, on a machine whose steps also vary for other reasons."""
    rng = random.Random(7)
    calls = [400 + 20 * i for i in range(14)]
    f = grown(job(calls, [10_000 * (1 + noise * rng.random()) for _ in calls], pytorch=pytorch))
    assert f is not None and f.severity in ("high", "medium") and f.evidence["more_calls_per_step"] == pytest.approx(20)
    assert ("detach" in f"{f.action}{f.snippet}") == pytorch and f.culprits[0].name in ("aten::mm", "MatMul:MatMul")
    assert f.gain.step_time is not None and f.gain.step_time > 0.9


def test_few_long_steps_show_what_is_carried_on_if_each_makes_as_many_calls_more():
    """As of a job whose hidden state is carried on for hundreds of steps: 3 of them are in a recording of a second."""
    f = grown(job([5000, 5020, 5040], [220_000.0] * 3))
    assert f is not None and f.evidence["more_calls_per_step"] == pytest.approx(20) and "each of the 3" in f.why


@pytest.mark.parametrize("calls", [
    [100] * 14,
    [100, 160, 90, 140, 100, 150, 95, 170, 100, 130, 90, 150, 110, 190],  # batches of several lengths
    [100] * 7 + [180] * 7,  # another phase
    [100 + 20 * (i % 7) for i in range(14)],  # buckets
    [200 - 5 * i for i in range(14)],
    [100 + 20 * i for i in range(7)],  # too few
    [5000, 5020],
    [5000, 5020, 5041],
])
def test_calls_that_do_not_rise_all_the_time_are_no_growth(calls):
    assert grown(job(calls, [10_000.0] * len(calls))) is None


@pytest.mark.parametrize(("times", "there"), [
    ([10_000 + 800 * i for i in range(16)], True),
    ([10_000 + 800 * i for i in range(8)], False),  # too few
    ([10_000 + 100 * i for i in range(16)], False),  # too little
    ([10_000.0] * 12 + [40_000.0] * 4, False),
    ([random.Random(3).uniform(8_000, 30_000) for _ in range(16)], False),
])
def test_times_that_rise_all_the_time_are_growth(times, there):
    f = grown(job([50] * len(times), times))
    assert (f is not None) == there
    if f is not None:
        assert "from 10.0 ms to 22.0 ms" in f.title and f.gain.step_time == pytest.approx(0.375, abs=0.01)
        assert grown(job([50] * len(times), times), JobCpus(2.0, used=0.4, others=1.6)) is None, "others may take more"
