"""Launches: does the GPU wait for the host to hand it kernels?"""

from __future__ import annotations

from statistics import median

from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import TraceFacts
from gputop.advice.trace.kernels import launch_pace_s
from gputop.core.findings import Abstained, Finding, Gain, at_most, severity_of
from gputop.text.units import percent, seconds

_SNIPPETS = {
    "tensorflow": "model.compile(optimizer, loss, jit_compile=True)  # custom loop: @tf.function(jit_compile=True)",
    # Keras does not compile whole steps under tf.distribute; clusters leave the collectives out.
    "tensorflow, several GPUs": "TF_XLA_FLAGS=--tf_xla_auto_jit=2 python train.py",
    "jax": "train_step = jax.jit(train_step, donate_argnums=0)  # the whole step, update included",
    "pytorch": 'model = torch.compile(model, mode="reduce-overhead")  # fuses kernels, replays them as a CUDA graph',
}


def launch_bound(facts: TraceFacts) -> Finding | Abstained | None:
    """The GPU runs out of work while the host is busy launching more.

    Idle time that another cause explains (input wait, waiting for another GPU, copies, host
    work between launches) is not in the share ``launch``, so this fires for launches alone.
    """
    gpus = facts.active
    if not gpus or facts.shares is None:
        return Abstained("launch_bound", "GPU activity in the trace")
    if all(gpu.idle_host_fault is None for gpu in gpus) and min(gpu.busy for gpu in gpus) < 1:
        return Abstained("launch_bound", (
            "the host calls that launched the kernels (correlation ids); capture with host tracing on"))
    share = facts.shares["launch"]
    delays = [gpu.launch_delay_median_s for gpu in gpus if gpu.launch_delay_median_s is not None]
    if share < limit("launch_bound.share") or (delays and min(delays) >= limit("launch_bound.deep_queue_s")):
        return None
    kernel_s = median(gpu.kernel_median_s for gpu in gpus if gpu.kernel_median_s is not None)
    evidence = {
        "launch_wait_s": share * facts.period_s, "share_ratio": share, "kernel_median_s": kernel_s,
        "kernels_per_s": sum(gpu.kernels_per_s for gpu in gpus) / len(gpus),
    }
    if delays:
        evidence["launch_delay_median_s"] = median(delays)
    faults = [gpu.idle_host_fault for gpu in gpus if gpu.idle_host_fault is not None]
    if faults:
        evidence["idle_host_fault_ratio"] = sum(faults) / len(faults)
    short = kernel_s < limit("launch_bound.short_kernel_s")
    why = f"For {percent(share)} of the {facts.basis} a GPU is idle and its next kernel is not launched yet."
    pace_s = launch_pace_s(facts)
    if pace_s is not None:
        evidence["launch_pace_s"] = pace_s
    if short:
        why += f" Half of the kernels run for less than {seconds(kernel_s)}, while "
        why += (f"the host launches one every {seconds(pace_s)}." if pace_s is not None and pace_s > kernel_s else
                "launching one takes 20-40 µs.")
    severity = severity_of(share)
    if facts.small_sample_caveat:
        severity = at_most(severity, "medium")
        why += f" {facts.small_sample_caveat}"
    return Finding(
        id="launch_bound", severity=severity,
        title=f"GPU waits for launches {percent(share)} of the {facts.basis}", why=why, evidence=evidence,
        action="Launch fewer, larger kernels: compile the step so that kernels are fused; then raise the batch size "
               "if memory allows.",
        snippet=_SNIPPETS.get(f"{facts.framework}, several GPUs" if len(gpus) > 1 else facts.framework,
                              _SNIPPETS.get(facts.framework)),
        gain=Gain(share, "at most: all gaps between launches, if kernels were always queued ahead"),
        gpus=tuple(gpu.gpu for gpu in gpus),
        source=source("launch_bound.share", "launch_bound.short_kernel_s") + "; HTA: idle by fault of the host",
    )
