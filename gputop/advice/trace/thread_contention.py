"""CPUs: do tf.data's threads keep those that launch kernels from running?"""

from __future__ import annotations

from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import HOST_EVENTS, TraceFacts
from gputop.core.findings import Abstained, Finding, Gain
from gputop.text.units import percent

_PRIVATE_LAUNCHES = "TF_GPU_THREAD_MODE=gpu_private TF_GPU_THREAD_COUNT=2 python train.py"


def thread_contention(facts: TraceFacts) -> Finding | Abstained | None:
    """Single launches are held up while tf.data's threads fill the CPUs.

    Evidence is needed for all of it: the GPU waits inside the step's call, most of that in launches that come
    far later than usual, and tf.data's threads fill the cores during most of those.
    """
    if facts.framework == "pytorch":
        return None
    threads, host = facts.analysis.launch_threads, facts.host
    if threads is None or host is None:
        return Abstained("thread_contention", f"the host's threads and the launches on them{HOST_EVENTS}")
    if facts.period_s <= 0 or host.stalled is None or threads.input_threads_at_launch is None:
        return None
    held_up = host.dispatch_s * host.stalled
    if (held_up < limit("thread_contention.share") * facts.period_s or host.stalled < limit("thread_contention.stalled")
            or (host.input_together or 0.0) < limit("thread_contention.together")):
        return None
    if threads.cpus is None:
        return Abstained("thread_contention", (
            "the CPUs that the job may use (tf.data's cpu_budget in its iterators' events): launches are held up while "
            "tf.data works, but whether it fills the CPUs is not told"))
    at_work = host.input_threads or 0.0
    if at_work < limit("thread_contention.busy") * threads.cpus:
        return None
    waits = facts.waits
    # GPUs that wait in a collective for the one whose launches were held up longest wait for the same CPUs: with
    # this the mean over the GPUs becomes what the last one of each collective lost.
    others_s = waits.late_by_host_s * (1 - 1 / len(waits.waiting_s)) if waits is not None else 0.0
    share = (host.dispatch_s + host.stalled * others_s) / facts.period_s
    private = threads.mode == "gpu_private"
    workers = max(threads.cpus - 2 * max(len(facts.active), 1) - 1, 1)
    limited = (f"options = tf.data.Options()\n"
               f"options.threading.private_threadpool_size = {min(workers, max(threads.cpus // 2, 1))}\n"
               f"ds = ds.with_options(options)")
    own = host.dispatch_s / facts.period_s
    why = (f"For {percent(own)} of the {facts.basis} the GPU waits inside the step for a launch, "
           f"{percent(host.stalled)} of that for single launches that come far later than the others. Meanwhile "
           f"{at_work:.0f} threads of tf.data work on {threads.cpus} CPUs"
           + ("." if private else ", and launches come from the pool that all of TensorFlow shares."
              if threads.mode == "global" else "."))
    if others_s >= limit("thread_contention.share") * facts.period_s:
        why += f" For another {percent(others_s / facts.period_s)} GPUs wait in collectives for one that it held up."
    return Finding(
        id="thread_contention", severity=facts.capped_severity(share),
        title=f"tf.data's threads hold launches up {percent(share)} of the {facts.basis}", why=facts.with_caveat(why),
        evidence={
            "launch_wait_s": host.dispatch_s, "collective_wait_s": others_s, "share_ratio": share,
            "held_up_ratio": host.stalled,
            "input_threads_at_work": at_work, "cpus": float(threads.cpus),
            "input_working_meanwhile_ratio": host.input_together or 0.0,
        },
        action=("Leave CPUs to the threads that launch: limit tf.data's own threads." if private else
                "Give the GPUs launching threads of their own, and limit tf.data's threads."),
        snippet=limited if private else f"{_PRIVATE_LAUNCHES}\n# and in the input pipeline:\n{limited}",
        gain=Gain(share, "at most: all waiting for launches inside the step, and for GPUs whose launches came late, "
                         "if the launching threads always had a CPU"),
        gpus=tuple(gpu.gpu for gpu in facts.active),
        source=source("thread_contention.busy", "thread_contention.stalled")
        + "; TensorFlow's GPU performance guide: GPU host thread contention",
    )
