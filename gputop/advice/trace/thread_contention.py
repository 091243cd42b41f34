"""CPUs: do tf.data's threads keep those that launch kernels from running?"""

from __future__ import annotations

from msgspec.structs import replace

from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import TraceFacts, on_host, removed_host_time, waits_for_host
from gputop.advice.trace.job import Job
from gputop.advice.verdict import Explanation, Missing, Verdict
from gputop.analysis.host.gaps import ranked_work, work_in
from gputop.analysis.what_if.cure import Cure
from gputop.text.units import percent
from gputop.trace.threads import GLOBAL_POOL, INPUT, lines_of

_WORTH_NAMING = 0.05  # share of what tf.data's threads do while launches are late
_PRIVATE_LAUNCHES = "TF_GPU_THREAD_MODE=gpu_private TF_GPU_THREAD_COUNT=2 python train.py"


class ThreadContention(Verdict, frozen=True, kw_only=True):
    launch_wait_s: float  # per step: the GPU waits inside the step's call for a launch
    collective_wait_s: float  # per step: other GPUs wait in collectives for one whose launches were held up
    held_up: float  # share of the launch wait for single launches that come far later than the others
    threads_at_work: float  # of tf.data, on average
    shared: float  # of them on threads that the model's ops need as well
    cpus: int
    input_meanwhile: float  # share of the late launches during which tf.data works
    pool: str | None  # where launches come from: TensorFlow's GPU thread mode


def judge_thread_contention(facts: TraceFacts) -> ThreadContention | Missing | None:
    """Single launches are held up while tf.data's threads fill the CPUs.

    Evidence is needed for all of it: the GPU waits inside the step's call, most of that in launches that come
    far later than usual, and tf.data's threads fill the cores during most of those.
    """
    threads, host = facts.analysis.launch_threads, facts.host
    assert threads is not None and host is not None
    if facts.period_s <= 0 or host.stalled is None or threads.input_threads_at_launch is None:
        return None
    held_up = host.dispatch_s * host.stalled
    if (held_up < limit("thread_contention.share") * facts.period_s or host.stalled < limit("thread_contention.stalled")
            or (host.input_together or 0.0) < limit("thread_contention.together")):
        return None
    pool = sum(GLOBAL_POOL.match(line.name) is not None for line in facts.trace.lines)
    # Where tf.data takes the threads that launch, their number is the limit, whatever CPUs there are.
    cpus = pool if host.input_shared_threads >= limit("thread_contention.busy") * pool > 0 else threads.cpus
    if cpus is None:
        return Missing("the CPUs that the job may use (tf.data's cpu_budget in its iterators' events): launches are "
                       "late while tf.data works, but the trace does not tell whether tf.data fills the CPUs")
    at_work = host.input_threads or 0.0
    if at_work < limit("thread_contention.busy") * cpus:
        return None
    waits = facts.waits
    # GPUs that wait in a collective for the one whose launches were held up longest wait for the same CPUs: with
    # this the mean over the GPUs becomes what the last one of each collective lost.
    others_s = waits.late_by_host_s * (1 - 1 / len(waits.waiting_s)) if waits is not None else 0.0
    time_by_name = work_in(facts.trace, late := waits_for_host(facts, "dispatch"), lines_of(facts.trace, INPUT))[0]
    work = [item for item in ranked_work(time_by_name, 1) if item.s_per_step >= _WORTH_NAMING * sum(
        time for time, _ in time_by_name.values()) / 1e9]
    return ThreadContention(
        # Without times: theirs are sums over many threads.
        culprits=tuple(replace(item, time_s=None) for item in on_host(facts, work, late)),
        gpus=facts.active_numbers, share=(host.dispatch_s + host.stalled * others_s) / facts.period_s,
        launch_wait_s=host.dispatch_s, collective_wait_s=others_s, held_up=host.stalled, threads_at_work=at_work,
        shared=host.input_shared_threads, cpus=threads.cpus or pool, input_meanwhile=host.input_together or 0.0,
        pool=threads.mode, cure=Cure(host=removed_host_time(facts, "dispatch"), assumes=(
            "The threads that launch always have a CPU, and no launch comes late.")),
    )


def describe_thread_contention(v: ThreadContention, job: Job) -> Explanation:
    tensorflow = job.framework != "jax"  # which has neither that pool nor these settings
    private = v.pool == "gpu_private" or not tensorflow
    workers = max(v.cpus - 2 * max(len(v.gpus), 1) - 1, 1)
    limited = (f"options = tf.data.Options()\n"
               f"options.threading.private_threadpool_size = {min(workers, max(v.cpus // 2, 1))}\n"
               f"ds = ds.with_options(options)")
    why = (f"For {percent(v.launch_wait_s / job.period_s)} of the {job.basis} the GPU waits for a launch inside the "
           f"step. {percent(v.held_up)} of that wait is for single launches that come far later than the others. "
           f"Meanwhile {v.threads_at_work:.0f} threads of tf.data work on {v.cpus} CPUs"
           + (", and launches come from the pool that all of TensorFlow shares." if v.pool == "global" and tensorflow
              else "."))
    if tensorflow and v.shared >= 0.5:
        why += f" {v.shared:.0f} of these threads belong to that pool, and the model's ops wait until one is free."
    if v.collective_wait_s >= limit("thread_contention.share") * job.period_s:
        why += (f" For another {percent(v.collective_wait_s / job.period_s)} of the time, GPUs wait in collectives for "
                "a GPU that was delayed in this way.")
    return Explanation(
        title=f"tf.data's threads delay launches for {percent(v.share)} of the {job.basis}", why=why,
        evidence={
            "launch_wait_s": v.launch_wait_s, "collective_wait_s": v.collective_wait_s, "share_ratio": v.share,
            "held_up_ratio": v.held_up, "input_threads_at_work": v.threads_at_work, "cpus": float(v.cpus),
            "input_working_meanwhile_ratio": v.input_meanwhile,
        },
        action=("Limit tf.data's own threads, so that the threads that launch have free CPUs." if private else
                "Give each GPU its own launching threads, and limit tf.data's threads."),
        snippet=limited if private else f"{_PRIVATE_LAUNCHES}\n# and in the input pipeline:\n{limited}",
        gain="at most: all waiting for launches inside the step and for GPUs with late launches, if the launching "
             "threads always had a CPU",
        source=source("thread_contention.busy", "thread_contention.stalled")
        + "; TensorFlow's GPU performance guide: GPU host thread contention",
    )
