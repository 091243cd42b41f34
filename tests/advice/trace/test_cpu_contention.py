"""CPUs that other processes take from the job, and what is not blamed on the job's Python then."""

from __future__ import annotations

import pytest

from gputop.advice.trace.input_fixes import InputFix
from gputop.advice.verdict import Missing
from gputop.core.captured_samples import CpuUser, JobCpus
from gputop.trace.model import Trace
from tests.advice.trace.host_jobs import BF16, contended, found, gap, missing
from tests.advice.trace.long_step_traces import COUNT, job
from tests.advice.trace.traces import STEP, STEPS, abstained, findings, input_bound, verdict
from tests.analysis.host.stack_samples import sampled
from tests.analysis.host.traces_of_epochs import MS, train
from tests.trace.build import Builder, keras_steps

HOGS = (CpuUser(71, "mypy", 0.9), CpuUser(72, "python", 0.7, True))
TAKEN = JobCpus(2.0, used=0.4, others=1.6, children=0.0, ranks=0.0, gputop=0.0, busiest=HOGS, held_up=0.4)


def recorded(b: Builder, cpus: JobCpus | None = TAKEN) -> Trace:
    trace = b.build()
    trace.job_cpus = cpus
    return trace


def on_cpu() -> Builder:
    return keras_steps(Builder(gpus=0), 12, 1000, 990)


def test_other_programs_are_named_with_their_cpus_and_the_jobs_own_processes_are_told_apart():
    f = findings(recorded(on_cpu()))["cpu_contention"]
    assert f.evidence["other_programs_cpus"] == 1.6 and f.evidence["job_cpus"] == 0.4
    assert f.evidence["main_thread_held_up_ratio"] == 0.4 and f.severity == "high"
    assert "1.6 of 2 CPUs" in f.title and "mypy" in f.why and "renice 19 71" in (f.snippet or "")
    assert 0.7 < (f.gain.step_time or 0.0) <= 0.8
    own = JobCpus(2.0, used=0.4, others=1.6, children=1.5, ranks=0.0, gputop=0.0, busiest=HOGS)
    f = findings(recorded(on_cpu(), own))["cpu_contention"]
    assert f.evidence["child_processes_cpus"] == 1.5 and f.snippet is None
    assert "started by the job" in f.why and "Other programs" not in f.title


@pytest.mark.parametrize(("waits_ms", "main", "held_up", "most"), [
    (40, 0.1, 0.4, 0.1), (40, 0.1, 0.7, 0.64),  # three fifths of these waits are waits for a CPU
    (2, 0.1, 0.4, 0.8)])  # the workers are ahead
def test_at_the_pace_of_workers_that_sleep_others_cost_no_more_than_the_workers_wait_for_a_cpu(
        waits_ms, main, held_up, most):
    b = Builder(gpus=0, format="chrome")
    for i in range(20):
        b.host("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", i * 80_000, waits_ms * 1000)
        b.host("aten::mm", i * 80_000 + waits_ms * 1000, 79_000 - waits_ms * 1000)
        b.host("Optimizer.step#SGD.step", i * 80_000 + 79_000, 990, annotation=1)
    cpus = JobCpus(2.0, used=0.2, others=1.8, children=0.2, ranks=0.0, gputop=0.0, held_up=held_up, main=main,
                   waited=1.0, asleep=0.1, children_waited=0.1)
    judged = verdict(recorded(b, cpus), "cpu_contention")
    assert judged.share == pytest.approx(most, abs=0.02)


@pytest.mark.parametrize("cpus", [
    JobCpus(2.0, used=1.7, others=0.2),  # a shell and a monitor
    JobCpus(8.0, used=0.4, others=1.6),  # CPUs are idle
    JobCpus(8.0, quota=2.0, used=2.0, others=6.0),  # its own limit, not others, holds it up
    JobCpus(2.0, used=0.4, others=1.6, ranks=1.5),  # the other ranks of the job
    JobCpus(2.0, used=1.4, others=0.6, gputop=0.5),  # what gputop takes ends with the capture
])
def test_a_job_that_gets_the_cpus_it_asks_for_is_left_alone(cpus):
    assert "cpu_contention" not in findings(recorded(on_cpu(), cpus))


@pytest.mark.parametrize("cpus", [None, JobCpus(2.0), JobCpus(2.0, used=1.0)])
def test_without_the_cpu_times_it_is_not_judged(cpus):
    assert "captures" in abstained(recorded(on_cpu(), cpus))["cpu_contention"]


def test_a_gpu_that_never_waits_and_a_job_with_a_few_workers_lose_nothing():
    b = keras_steps(Builder(), 12, 1000, 990)
    for i in range(12):
        b.run(0, i * 1000 + 5, 994, launch=max(i * 1000 - 900, 0))
    assert "cpu_contention" not in findings(recorded(b))
    hog, worker = CpuUser(7, "mypy", 0.9), CpuUser(8, "pt_data_worker", 0.8, child=True)
    mixed = JobCpus(2.0, used=0.2, others=1.8, children=0.8, ranks=0.0, gputop=0.0, busiest=(hog, worker))
    v = verdict(recorded(on_cpu(), mixed), "cpu_contention")
    assert (v.programs, v.used, v.busiest) == (pytest.approx(1.0), pytest.approx(1.0), (hog,))
    assert "worker" not in findings(recorded(on_cpu(), mixed))["cpu_contention"].why
    little = JobCpus(2.0, used=1.5, others=0.5, children=0.24, ranks=0.0, gputop=0.0, busiest=(worker,))
    assert "cpu_contention" not in findings(recorded(on_cpu(), little)), "0.26 of 2 CPUs are others'"


def test_what_the_main_thread_does_is_held_up_no_more_than_it_waited():
    held_up = JobCpus(2.0, used=0.9, others=1.1, held_up=0.1)
    b = Builder(gpus=0)
    for i in range(12):  # the main thread traces all the time
        b.host("step", i * 10_000, 9_900, tf_function_call="traced-nonXla", tracing_count=1)
        b.host("tf.function-graph_building", i * 10_000 + 1, 9_890)
    assert verdict(recorded(b, held_up), "cpu_contention").share < 0.12


LONG = {4: 6_000.0, 9: 7_000.0, 21: 6_500.0}


@pytest.mark.parametrize(("cpus", "blamed"), [
    (None, ""), (TAKEN, "other processes kept 1.6 of 2 CPUs"), (JobCpus(2.0, used=1.7, others=0.2), ""),
    (JobCpus(2.0, used=0.4, others=1.6, held_up=0.001), ""), (JobCpus(2.0, used=1.0, others=0.2, held_up=0.5), ""),
    (JobCpus(2.0, used=1.7, others=0.2, held_up=0.5), "it had none for 50% of the time, as the job's other threads")])
def test_steps_that_other_threads_lengthen_are_not_put_down_to_python(cpus, blamed):
    trace = recorded(job(LONG), cpus)
    assert ("long_steps" in findings(trace)) == (not blamed) and blamed in abstained(trace).get("long_steps", "")


@pytest.mark.parametrize(("usual_line", "blamed"), [("train.py:50 log", True), ("data.py:7 swap", False)])
def test_long_steps_in_which_a_line_of_their_own_runs_stay(usual_line, blamed):
    """A thread that others keep from running stops wherever it is, as in the other steps."""
    b, stacks, at = Builder(gpus=0), [], 0.0
    for i in range(24):
        gap_s = 0.26 if i in (5, 9, 18) else 0.02
        b.host("EagerExecute", at * 1e6, 79_000, is_func=1, eager_op="__inference_multi_step_on_iterator_42")
        stacks += [(at + 0.002, "train.py:9 main > tensorflow/python/execute.py:53 quick_execute"),
                   (at + 0.082, "train.py:9 main > " + ("data.py:7 swap" if gap_s > 0.1 else usual_line))]
        at += 0.08 + gap_s
    trace = recorded(b)
    trace.origin_ns = 1000 * 10 ** 9
    trace.stacks = (sampled({"MainThread": stacks}, at, rate_hz=200.0),)
    assert ("long_steps" in findings(trace)) == blamed


@pytest.mark.parametrize(("long", "name"), [
    (LONG, "gc"), (LONG, "SaveV2"), (dict.fromkeys(range(2, COUNT, 5), 7_000.0), "")])
def test_long_steps_with_evidence_of_their_own_stay(long, name):
    assert "long_steps" in findings(recorded(job(long, name)))


@pytest.mark.parametrize(("cpus", "blamed"), [(None, True), (TAKEN, False),
                                              (JobCpus(2.0, used=0.4, others=1.6, held_up=0.001), True)])
def test_silence_at_an_edge_that_others_may_have_made_is_no_unfinished_step(cpus, blamed):
    b = Builder(gpus=0)
    end = train(b, 0, 500)
    trace = recorded(b, cpus)
    trace.rank_windows_ns = {0: (0, round((end + 1_500 * MS) * 1000))}
    assert ("unfinished_step" in findings(trace)) == blamed
    if not blamed:
        assert "other processes kept 1.6 of 2 CPUs" in abstained(trace)["unfinished_step"]


@pytest.mark.parametrize(("cpus", "blamed"), [(None, True), (TAKEN, False)])
@pytest.mark.parametrize("events", [(), ("SaveV2",)])
def test_silence_between_steps_now_and_then_may_be_that_of_others(cpus, blamed, events):
    b, at = Builder(gpus=0), 0.0
    for count in (30, 17, 40):
        at = train(b, at, count)
        for name in events:
            b.host(name, at + 100, 120 * MS)
        at += 150 * MS
    train(b, at, 3)
    judged = verdict(recorded(b, cpus), "time_outside_steps")
    assert isinstance(judged, Missing) != (blamed or bool(events))


def test_batches_that_are_late_now_and_then_may_be_so_by_others(monkeypatch):
    def slow(fast_enough: bool) -> InputFix:
        return InputFix("Prefetch more batches.", "", None, "", fast_enough=fast_enough)

    b = input_bound()
    for fast_enough in (True, False):
        monkeypatch.setattr("gputop.advice.trace.input_wait.input_fix", lambda *_, own=fast_enough: slow(own))
        assert ("input_bound" in findings(recorded(b, TAKEN))) == (not fast_enough)
        assert "input_bound" in findings(recorded(b, None))


@pytest.mark.parametrize(("share", "job_of", "blamed"), [
    (0.05, {"silent": True}, False), (0.1, {"silent": True}, True),  # 0.6 of it without the waits of the main thread
    (0.15, {"name": "Mean"}, False), (0.3, {"name": "Mean"}, True),  # may wait for a thread without a CPU: 0.2 of it
    (0.3, {"name": "SaveV2"}, True)])
def test_a_gap_between_steps_is_the_jobs_where_it_is_named_or_would_be_long_without_others(share, job_of, blamed):
    trace = recorded(gap(share, **job_of))
    assert ("step_gap_host" in findings(trace)) == blamed
    if not blamed:
        assert "other processes kept 1.6 of 2 CPUs" in abstained(trace)["step_gap_host"]


# -- tf.data's threads against the launching ones -----------------------------------------------------

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


# -- launching threads of PyTorch that stop in the middle of calls ------------------------------------

CALLS = ("aten::mm", "aten::empty", "aten::view", "aten::add", "aten::reshape", "aten::expand", "aten::slice")


def interrupted(kinds: int, pause: float = 8_000.0, every: int = 20) -> Builder:
    """Kernels of 90 µs, each launched in time, but one of ``every`` times the thread stops in one of so many calls."""
    b, at, stops = Builder(gpus=1, format="chrome"), 0.0, 0
    for i in range(STEPS):
        b.host(f"ProfilerStep#{i}", at, 100 * len(CALLS) * 10 + 3.5 * pause, step_num=i)
        for k in range(70):
            name = CALLS[k % len(CALLS)]
            stopped = k % every == 7
            if stopped:
                name, stops = CALLS[stops % kinds], stops + 1
            b.host(name, at, 60 + pause * stopped)
            at += pause * stopped
            b.run(0, at + 62, 90, BF16, launch=at + 55, launch_length=3, thread="python")
            at += 100
    return b


def test_calls_of_many_kinds_in_which_the_launching_thread_stops():
    f = findings(interrupted(7))
    assert next(iter(f)) == "thread_contention" and "host_placement" not in f
    assert "7 kinds of calls" in f["thread_contention"].why and "top -H" in (f["thread_contention"].snippet or "")
    assert f["thread_contention"].evidence["longest_pause_s"] == pytest.approx(8.06e-3)


@pytest.mark.parametrize("job", [interrupted(2), interrupted(7, pause=500), interrupted(7, pause=150_000)],
                         ids=["one kind has a reason", "short", "too long for a wait for a CPU"])
def test_other_long_calls_are_no_wait_for_a_cpu(job):
    assert "thread_contention" not in findings(job)
