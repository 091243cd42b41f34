"""All rules on a trace together."""

from __future__ import annotations

import pytest

from gputop.core.findings import Finding
from gputop.diagnosis.diagnose import analyze_to_facts, analyze_trace
from tests.advice.trace.host_jobs import HOST_RULES, found, missing
from tests.advice.trace.stalls import with_memory
from tests.advice.trace.traces import KERNEL, STEP, findings, healthy, launch_bound
from tests.trace.build import Builder, keras_steps


def test_without_a_host_nobody_is_accused_and_the_worst_comes_first():
    bare = Builder(gpus=1)
    for i in range(50):
        bare.run(0, i * 100, 90, "Mul_GPU_DT_FLOAT_DT_FLOAT_kernel")
    assert found(bare) == {} and set(missing(bare)) == HOST_RULES
    a = analyze_trace(with_memory(launch_bound(), 38).build())  # worst comes first
    assert [f.id for f in a.findings] == ["launch_bound", "memory_pressure"]


@pytest.mark.parametrize("gpus", [1, 4])
def test_healthy_job_has_no_findings(gpus):
    assert findings(healthy(gpus)) == {}


def test_few_kernels_make_nothing_high_and_a_handful_nothing_but_low():
    def micro(kernels: int, steps: int) -> tuple[dict[str, Finding], str | None]:
        b = keras_steps(Builder(), steps, STEP, STEP - 50) if steps else Builder()
        for i in range(kernels):
            t = 50 + i * min(STEP * max(steps, 1) / kernels, 800)
            b.run(0, t, 10, KERNEL, launch=t - 8)
            b.host("gap", t + 20, 5)
        facts = analyze_to_facts(with_memory(b, 1).build())
        return findings(facts.analysis), facts.caveat

    for kernels, steps in ((25, 0), (150, 2)):
        few, caveat = micro(kernels, steps)
        assert {f.severity for f in few.values()} == {"medium"} and set(few) == {"launch_bound"}
        assert caveat and all(caveat in f.why for f in few.values())
    assert micro(15, 0)[0]["launch_bound"].severity == micro(15, 1)[0]["launch_bound"].severity == "low"
    tiny_steps = analyze_to_facts(keras_steps(Builder(), 5, STEP, STEP - 50).run(0, 50, 10, KERNEL).build())
    assert not tiny_steps.hardly_any_kernels  # seen several times, they are the job
    many, caveat = micro(400, 0)
    assert many["launch_bound"].severity == "high" and caveat is None
