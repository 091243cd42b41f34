"""tf.data's threads against the launching ones."""

from __future__ import annotations

import pytest

from tests.advice.trace.host_jobs import contended, found, missing
from tests.advice.trace.traces import STEP, STEPS
from tests.trace.build import Builder


def test_launches_held_up_while_tf_data_fills_the_cpus():
    f = found(contended(6))["thread_contention"]
    assert f.severity == "high" and f.evidence["input_threads_at_work"] == pytest.approx(6)
    assert f.evidence["cpus"] == 8 and "TF_GPU_THREAD_MODE=gpu_private" in (f.snippet or "")
    private = found(contended(6, pool="gpu_private_0/1"))["thread_contention"]
    assert "GPU_THREAD" not in (private.snippet or "") and "private_threadpool_size" in (private.snippet or "")
    assert "cpu_budget" in missing(contended(6, cpus=0))["thread_contention"]
    assert "host_tracer_level" in missing(Builder(gpus=1).run(0, 0, 100))["thread_contention"]


@pytest.mark.parametrize("b", [
    contended(3), contended(6, together=0.3), contended(6, stall=20), contended(6, stall=60, every=1), contended(0),
], ids=["few threads", "another time", "hardly late", "all alike", "none"])
def test_no_contention_without_all_of_its_evidence(b):
    assert "thread_contention" not in found(b)


def test_functions_of_tf_data_on_the_threads_of_the_model():
    """No thread of tf.data's own works: its functions take three of the four threads that run the model's ops."""
    b = contended(0, cpus=16)
    for i in range(STEPS + 1):
        for thread in range(2, 5):
            b.host("InstantiatedCapturedFunction::RunAsync", i * STEP, 5, line="tf_data_iterator/1", id=90 + thread)
            b.host("ExecutorState::Process", i * STEP + 10, STEP * 0.9, line=f"tf_Compute/{thread}", id=90 + thread)
    f = found(b)["thread_contention"]
    assert "TF_GPU_THREAD_MODE=gpu_private" in (f.snippet or "") and "belong to the shared pool" in f.why
