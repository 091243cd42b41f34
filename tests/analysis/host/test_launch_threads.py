from __future__ import annotations

import pytest

from gputop.analysis.gpu.device_time import timelines
from gputop.analysis.host.launch_threads import launch_threads
from gputop.analysis.results import LaunchThreads
from gputop.trace.threads import role
from tests.trace.build import Builder


def threads_of(b: Builder) -> LaunchThreads | None:
    trace = b.build()
    return launch_threads(trace, timelines(trace))


def test_launches_by_thread_and_gpu():
    b = Builder(gpus=2)
    for i in range(10):
        b.run(i % 2, i * 100 + 20, 30, launch=i * 100 + 5, thread=f"tf_gpu_private_{i % 2}/77")
        b.host("ExecutorState::Process", i * 100, 50, f"tf_gpu_private_{i % 2}/77")
    found = threads_of(b)
    assert found is not None and found.mode == "gpu_private" and found.threads_per_gpu == {0: 1, 1: 1}
    assert [t.launches for t in found.threads] == [{0: 5}, {1: 5}]
    assert {t.pool for t in found.threads} == {"gpu_private"}
    assert found.threads[0].launch_s == pytest.approx(25e-6) and found.threads[0].other_s == pytest.approx(225e-6)
    assert found.input_busy_late is None and found.input_threads_at_launch is None and found.cpus is None


@pytest.mark.parametrize(("thread", "mode", "pool"), [
    ("tf_Compute/12", "global", "global"), ("gpu_private_0", "gpu_private", "gpu_private"),
    ("tf_gpu_shared/3", "gpu_shared", "gpu_shared"), ("python/1", "unknown", "python"), ("worker", "unknown", "other"),
])
def test_thread_mode_is_read_off_the_pool(thread, mode, pool):
    found = threads_of(Builder().run(0, 20, 30, launch=5, thread=thread))
    assert found is not None and found.mode == mode and found.threads[0].pool == pool


def test_contention_compares_late_launches_with_the_rest():
    b = Builder()
    for i in range(10):  # idle from 50 on; the next kernel is launched at 90
        b.run(0, i * 100 + 10, 40, launch=i * 100 + (90 - 100 if i else 0), thread="tf_Compute/1")
        b.host("parse/Decode:DecodeJpeg", i * 100 + 50, 30, "tf_data_private_threadpool/2")
        b.host("Iterator::Root::Prefetch::ParallelMapV2", i * 100, 99, "tf_data_iterator_resource/3")  # waits
        b.host("ExecutorState::Process", i * 100 + 92, 4, "tf_data_private_threadpool/4")
    b.host("Iterator::Root", 0, 5, "tf_data_iterator_get_next/1", cpu_budget=8)
    found = threads_of(b)
    assert found is not None and found.late_s == pytest.approx(9 * 60e-6) and found.cpus == 8
    assert found.input_busy_late == pytest.approx(34 / 60) and found.input_busy == pytest.approx(0)
    # the launching thread itself, and at 92-95 of 90-95 one of tf.data's
    assert found.busy_threads_at_launch == pytest.approx(1 + 27 / 50)
    assert found.input_threads_at_launch == pytest.approx(27 / 50)


def test_python_waiting_in_a_call_is_not_busy():
    b = Builder().run(0, 20, 30, launch=5, thread="tf_Compute/1").host("EagerExecute", 0, 100)
    assert threads_of(b).busy_threads_at_launch == pytest.approx(1)
    assert threads_of(Builder().run(0, 20, 30)) is None  # no launch


def test_roles():
    assert [role(name) for name in ("python", "python3", "tf_Compute/1", "tf_gpu_private_3/9", "tf_data_iterator/1",
                                    "tf_numa_-1_Eigen/4", "py_xla_execute/5", "tf_pjrt_thread_pool/1", "12",
                                    "Host Threads/2356")] == [
        "main", "main", "executor", "executor", "input", "pool", "executor", "executor", "main", "pool"]
