"""Live rules about what the GPUs do: little work, waiting kernels, idle tensor cores, busy memory.

They come after the rules that know a cause: a GPU whose state one of those accounts for
(:meth:`View.gpus_explained_by`) is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gputop.advice.live.node_view import View, gpus_text, same_job
from gputop.advice.registry import limit, source
from gputop.core.findings import Abstained, Finding, Gain, Severity
from gputop.core.samples import GpuSample
from gputop.text.units import percent

_NO_FIGURE = "telemetry shows no steps: a capture (c) gives the figure"


# -- spinning -------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class _Spin:
    gpu: GpuSample
    evidence: dict[str, float]
    quiet: bool  # next to nothing on PCIe: neither launches nor input


def spinning(view: View) -> Finding | Abstained | None:
    """A kernel runs all the time and does nothing: GPUs that wait for each other, a busy-wait."""
    window_s = view.seconds("spinning.window_s")
    explained = view.gpus_left_out("spinning")
    spins: list[_Spin] = []
    judged, missing = False, ""
    for gpu in view.warmed_up_gpus:
        outcome = _spin(view, gpu, window_s)
        if isinstance(outcome, str):
            missing = missing or outcome
            continue
        judged = True
        if outcome is not None and gpu.info.index not in explained:
            spins.append(outcome)
    if spins:
        return _spinning(view, spins, window_s)
    if judged and not missing:
        return None
    return Abstained("spinning", missing) if missing else view.not_at_work("spinning", window_s)


def _spin(view: View, gpu: GpuSample, window_s: float) -> _Spin | str | None:
    """The figures of a GPU that spins, None of one that does not, or what is missing to tell."""
    index, rule = gpu.info.index, "spinning"
    util = view.mean(gpu, "gpu_util", window_s)
    if util is None:
        return f"{window_s:.0f} s of coarse utilization: {gpu['gpu_util'].reason or 'not yet seen for that long'}"
    if util < view.limit(rule, "util_", index):
        return None
    power, allowed = view.mean(gpu, "power_w", window_s), gpu["power_limit_w"].value
    of_limit = power / allowed if power is not None and allowed else None
    traffic = [view.mean(gpu, metric, window_s) for metric in ("pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s")]
    known = [t for t in traffic if t is not None]
    quiet = len(known) == 2 and sum(known) <= view.limit(rule, "traffic_", index)
    evidence = {"window_s": window_s, "gpu_util_ratio": util}
    if len(known) == 2:
        evidence["pcie_bytes_per_s"] = sum(known)
    sm = view.mean(gpu, "sm_active", window_s)
    if sm is None:  # coarse figures alone: only what is far from any work
        if of_limit is None:
            return f"power and its limit: {gpu['power_w'].reason or gpu['power_limit_w'].reason}"
        if of_limit > view.limit(rule, "coarse_power_", index):
            return None
        if len(known) < 2:
            return f"SM activity ({gpu['sm_active'].reason}) or PCIe traffic ({gpu['pcie_rx_bytes_per_s'].reason})"
        if not quiet or _varies(view, gpu, "power_w", window_s) > view.limit(rule, "varies_", index):
            return None
        return _Spin(gpu, evidence | {"power_of_limit_ratio": of_limit}, quiet)
    if sm > view.limit(rule, "sm_", index):
        return None
    if of_limit is not None and of_limit > view.limit(rule, "power_", index):
        return None
    evidence["sm_active_ratio"] = sm
    for metric in ("tensor", "dram"):
        mean = view.mean(gpu, f"{metric}_active", window_s)
        if mean is None:
            return f"{metric}_active: {gpu[f'{metric}_active'].reason or 'not yet seen for that long'}"
        if mean > view.limit(rule, f"{metric}_", index):
            return None
        evidence[f"{metric}_active_ratio"] = mean
    if of_limit is None:
        return f"power and its limit: {gpu['power_w'].reason or gpu['power_limit_w'].reason}"
    if _varies(view, gpu, "sm_active", window_s) > view.limit(rule, "varies_", index):
        return None
    return _Spin(gpu, evidence | {"power_of_limit_ratio": of_limit}, quiet)


def _varies(view: View, gpu: GpuSample, metric: str, window_s: float) -> float:
    """Standard deviation over mean of the readings."""
    values = view.window(metric, window_s).values[:, view.column(gpu)]
    mean = float(np.nanmean(values))
    return float(np.nanstd(values)) / mean if mean else 0.0


def _spinning(view: View, spins: list[_Spin], window_s: float) -> Finding:
    gpus = [s.gpu for s in spins]
    indices = {g.info.index for g in gpus}
    here = [p for p in view.processes if indices & set(p.gpus)]
    job = [q for q in view.processes if any(q is p or same_job(p, q) for p in here)]
    rest = {g.info.index: g for q in job for g in view.compute_gpus(q) if g.info.index not in indices}
    busy = [i for i, g in rest.items() if (a := view.activity(g, window_s)) and a[1] > limit("spinning.sm_leave")]
    sure = all(s.quiet and "sm_active_ratio" in s.evidence for s in spins)
    stuck = sure and not busy and all(_for_long(view, g) for g in gpus)
    first = spins[0].evidence
    low = f"SM activity {percent(first['sm_active_ratio'])}, tensor pipe and memory idle, " \
        if "sm_active_ratio" in first else ""
    faulty = view.gpus_explained_by("hardware_error") - indices
    wait = (f"They may wait for {gpus_text(faulty)}, which reported a fault." if faulty else
            f"They may wait for {gpus_text(busy)} of the same job, which works." if busy else
            "That is the picture of a collective some GPU or rank never joined, or of a kernel that polls.")
    if not sure:
        wait += " Work in single tiny kernels can look alike."
    severity: Severity = "high" if stuck else "medium"
    return Finding(
        id="spinning", severity=severity, origin="live", gpus=tuple(sorted(indices)), evidence=first,
        title=f"{gpus_text(gpus)}: a kernel runs all the time but does nothing",
        why=f"GPU {spins[0].gpu.info.index} over the last {window_s:.0f} s: utilization "
            f"{percent(first['gpu_util_ratio'])}, {low}{percent(first['power_of_limit_ratio'])} of the power limit, "
            f"nearly without change. {wait}",
        action="Look at where the Python threads of each rank stand: the one that is not in a collective holds up the "
               "rest. With NCCL_DEBUG=INFO a restart shows which collective was the last.",
        snippet="\n".join(f"py-spy dump --pid {p.pid}" for p in here[:8]) or "NCCL_DEBUG=INFO python train.py",
        source="NVML utilization against GPM/DCGM SM, tensor and DRAM activity and power; "
               + source("spinning.sm_enter", "spinning.varies_enter"),
        gain=Gain(None, "no step ends while they wait" if stuck else _NO_FIGURE),
    )


def _for_long(view: View, gpu: GpuSample) -> bool:
    long_s = view.seconds("spinning.long_s")
    util, sm = view.mean(gpu, "gpu_util", long_s), view.mean(gpu, "sm_active", long_s)
    return (util is not None and util >= limit("spinning.util_leave")
            and sm is not None and sm <= limit("spinning.sm_leave"))


# -- low_sm_active ----------------------------------------------------------------------------------

def low_sm_active(view: View) -> Finding | Abstained | None:
    """GPUs that work, but little, and no live figure says why."""
    rule = "low_sm_active"
    window_s = view.seconds("low_sm_active.window_s")
    explained = view.gpus_left_out(rule)
    low: dict[int, tuple[GpuSample, str, float]] = {}
    rest: dict[int, float] = {}
    judged, coarse = False, None
    for gpu in view.warmed_up_gpus:
        activity, index = view.activity(gpu, window_s), gpu.info.index
        if activity is None:
            continue
        metric, mean = activity
        if index not in explained and _mostly_low(view, gpu, metric, window_s):
            low[index] = (gpu, metric, mean)
        elif metric == "gpu_util" and mean >= view.limit(rule, "active_", index):
            coarse = coarse or gpu
            continue
        else:
            rest[index] = mean
        judged = True
    if low:
        return _low(view, low, rest, window_s)
    if coarse is not None:
        return Abstained(rule, f"SM activity of {gpus_text([coarse])}: {coarse['sm_active'].reason}; coarse "
                               "utilization does not tell how much of a GPU works")
    return None if judged else view.not_at_work(rule, window_s)


def _mostly_low(view: View, gpu: GpuSample, metric: str, window_s: float) -> bool:
    """Whether the GPU was at work for most of the window, and that at low activity."""
    index, rule = gpu.info.index, "low_sm_active"
    slices = view.slice_table(metric, window_s)[:, view.column(gpu)].tolist()
    at_work = [mean for mean in slices if mean >= limit(f"{rule}.pause")]
    if len(at_work) < view.limit(rule, "work_", index) * len(slices) or not at_work:
        return False
    below = view.limit(rule, "active_", index)
    return sum(mean < below for mean in at_work) >= view.limit(rule, "slices_", index) * len(at_work)


def _low(view: View, low: dict[int, tuple[GpuSample, str, float]], rest: dict[int, float],
         window_s: float) -> Finding:
    worst, metric, activity = min(low.values(), key=lambda found: found[2])
    fine = metric == "sm_active"
    evidence = {"window_s": window_s, f"{metric}_ratio": activity}
    util = view.mean(worst, "gpu_util", window_s)
    if util is None:
        how = ""
    elif util < limit("low_sm_active.gaps"):
        evidence["gpu_util_ratio"] = util
        how = (f" No kernel ran in {percent(1 - util)} of the time: the GPU waits for input, for launches or for the "
               "host.")
    else:
        evidence["gpu_util_ratio"] = util
        how = " Kernels run nearly all the time but fill few SMs: small kernels, a small batch, or waiting in NCCL."
    peers = {g.info.index for p in view.processes if worst.info.index in p.gpus for g in view.compute_gpus(p)}
    busier = [i for i in sorted(peers & set(rest)) if rest[i] >= 1.5 * activity]
    if busier:
        how += f" {gpus_text(busier)} of the same job work more: the others may wait for them."
    full = view.full_cores(window_s)
    if full >= 1:
        evidence["full_cpu_cores"] = full
        how += f" Meanwhile {full:.0f} CPU core{'s have' if round(full) != 1 else ' has'} no time left."
    what = "SM activity" if fine else "coarse utilization, which SM activity cannot exceed,"
    return Finding(
        id="low_sm_active", severity="low", origin="live", gpus=tuple(sorted(low)), evidence=evidence,
        title=f"{gpus_text(low)} {'works' if len(low) == 1 else 'work'} at {percent(activity)} "
              + ("SM activity" if fine else "utilization"),
        why=f"GPU {worst.info.index} over the last {window_s:.0f} s: {what} was {percent(activity)}.{how}",
        action="Capture a trace (c): it tells which of these it is and what to change.",
        source="GPM/DCGM SM activity. " + source("low_sm_active.active_enter", "low_sm_active.slices_enter"),
        gain=Gain(None, _NO_FIGURE),
    )


# -- tensor_idle and dram_bound ---------------------------------------------------------------------

def dram_bound(view: View) -> Finding | Abstained | None:
    """Device memory is near what it can move while the tensor cores have time: a limit, not a fault."""
    rule, window_s = "dram_bound", view.seconds("dram_bound.window_s")
    bound: dict[int, dict[str, float]] = {}
    judged, missing = False, ""
    for gpu in view.warmed_up_gpus:
        means = {m: view.mean(gpu, m, window_s) for m in ("dram_active", "tensor_active")}
        dram, tensor = means["dram_active"], means["tensor_active"]
        index = gpu.info.index
        if dram is None or (tensor is None and dram >= view.limit(rule, "dram_", index)):
            missing = missing or _without(view, gpu, means)
            continue
        judged = True
        if (tensor is not None and dram >= view.limit(rule, "dram_", index)
                and tensor <= view.limit(rule, "tensor_", index)):
            bound[index] = {"window_s": window_s, "dram_active_ratio": dram, "tensor_active_ratio": tensor}
    if not bound:
        return None if judged and not missing else Abstained(rule, missing) if missing else view.not_at_work(
            rule, window_s)
    index, evidence = max(bound.items(), key=lambda found: found[1]["dram_active_ratio"])
    return Finding(
        id="dram_bound", severity="low", origin="live", gpus=tuple(sorted(bound)), evidence=evidence,
        title=f"{gpus_text(bound)} limited by device memory",
        why=f"GPU {index} over the last {window_s:.0f} s: memory moved data in "
            f"{percent(evidence['dram_active_ratio'])} of its cycles, and about 80 % is all it can; tensor cores were "
            f"busy {percent(evidence['tensor_active_ratio'])} of the time. The kernels wait for memory, not for "
            "arithmetic: that is a limit of the work, not a fault.",
        action="Move fewer bytes: let XLA fuse elementwise operations, keep activations in 16 bit, use fused attention "
               "and optimizers. A larger batch changes little.",
        snippet='tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")\n'
                "model.compile(…, jit_compile=True)",
        source="GPM/DCGM DRAM and tensor pipe activity; " + source("dram_bound.dram_enter"),
        gain=Gain(None, "depends on how many bytes fusion and precision save; " + _NO_FIGURE),
    )


def tensor_idle(view: View) -> Finding | Abstained | None:
    """SMs are busy for minutes and the tensor cores never: precision, or work that has no matrices."""
    rule, window_s = "tensor_idle", view.seconds("tensor_idle.window_s")
    explained = view.gpus_left_out(rule)
    idle: dict[int, dict[str, float]] = {}
    judged, missing = False, ""
    for gpu in view.warmed_up_gpus:
        means = {m: view.mean(gpu, m, window_s) for m in ("sm_active", "tensor_active")}
        sm, tensor = means["sm_active"], means["tensor_active"]
        if sm is None or tensor is None:
            missing = missing or _without(view, gpu, means)
            continue
        judged, index = True, gpu.info.index
        if (sm >= view.limit(rule, "sm_", index) and tensor <= view.limit(rule, "tensor_", index)
                and index not in explained and (gpu["fp64_active"].value or 0.0) < view.limit(rule, "fp64_", index)):
            idle[index] = {"window_s": window_s, "sm_active_ratio": sm, "tensor_active_ratio": tensor}
    if not idle:
        return None if judged and not missing else Abstained(rule, missing) if missing else view.not_at_work(
            rule, window_s)
    index, evidence = max(idle.items(), key=lambda found: found[1]["sm_active_ratio"])
    return Finding(
        id="tensor_idle", severity="low", origin="live", gpus=tuple(sorted(idle)), evidence=evidence,
        title=f"{gpus_text(idle)}: tensor cores unused",
        why=f"GPU {index} over the last {window_s:.0f} s: {percent(evidence['sm_active_ratio'])} SM activity, but "
            f"{evidence['tensor_active_ratio']:.1%} on the tensor pipe. If the model has matrix products or "
            "convolutions, they run on the ordinary cores, at a fraction of the speed; if it has none, this is as it "
            "should be.",
        action="If there are matrix products: use mixed precision or leave TF32 on, and give layers sizes that are "
               "multiples of 8. A capture (c) names the kernels.",
        snippet='tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")\n'
                "# or, for float32 on Ampere and newer:\ntf.config.experimental.enable_tensor_float_32_execution(True)",
        source="GPM/DCGM tensor pipe activity; " + source("tensor_idle.tensor_enter", "tensor_idle.window_s"),
        gain=Gain(None, "depends on the share of matrix products; " + _NO_FIGURE),
    )


def _without(view: View, gpu: GpuSample, means: dict[str, float | None]) -> str:
    """Which of the metrics is missing and why; nothing where they only have to be watched for longer."""
    for metric, mean in means.items():
        reason = gpu[metric].reason
        if mean is None and reason is not None:
            return f"{metric} of {gpus_text([gpu])}: {reason}"
    return ""
