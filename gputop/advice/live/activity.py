"""Live rules about what the GPUs do: little work, waiting kernels, idle tensor cores, busy memory.

They come after the rules that know a cause: a GPU whose state one of those accounts for
(:meth:`NodeView.gpus_left_out`) is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import TypeVar

from msgspec import Struct

from gputop.advice.fix_code import code, code_for
from gputop.advice.live.jobs import is_inference_server, same_job, stacks_command, wait_for
from gputop.advice.live.node_view import SLICE_S, Fall, NodeView, falls, gpus_text
from gputop.advice.registry import limit, source
from gputop.advice.verdict import NO_FIGURE, Explanation, Missing, Verdict, known
from gputop.core.samples import GpuSample, ProcessSample
from gputop.text.units import counted, percent

_MOST_MINUTES = 60  # of the history, in which is looked for the begin of a wait

T = TypeVar("T")


def _judge_each(view: NodeView, rule: str, window_s: float,
                judge: Callable[[GpuSample], T | str | None]) -> list[T] | Missing | None:
    """Findings of ``judge`` on the GPUs that are at work and that the rule does not leave out, or else why nothing can
    be said; None: nothing is wrong.

    ``judge`` returns None for a GPU that is well, and for one that it cannot judge what is missing: "" if it only has
    to be watched for longer.
    """
    outcomes = {gpu.info.index: judge(gpu) for gpu in view.warmed_up_gpus}
    left_out = view.gpus_left_out(rule)
    wrong = [outcome for index, outcome in outcomes.items()
             if outcome is not None and not isinstance(outcome, str) and index not in left_out]
    if wrong:
        return wrong
    missing = [outcome for outcome in outcomes.values() if isinstance(outcome, str)]
    if reason := next(filter(None, missing), ""):
        return Missing(reason)
    return None if len(missing) < len(outcomes) else view.not_at_work(window_s)


class _Spin(Struct, frozen=True):
    gpu: GpuSample
    evidence: dict[str, float]
    quiet: bool  # next to nothing on PCIe: neither launches nor input
    fills_gpu: bool = False  # it keeps more SMs than NCCL's kernels do, and computes on none


class Spinning(Verdict, frozen=True, kw_only=True):
    window_s: float
    gpu: int  # the first of them, whose figures these are
    figures: Mapping[str, float]  # by their names in the evidence
    sure: bool  # nothing on PCIe, and SM activity known: no work in tiny kernels
    stuck: bool  # for so long, and all GPUs of the job, that it will not go on
    faulty_gpus: frozenset[int]  # others, which reported a fault
    busy_gpus: tuple[int, ...]  # others of the job, which work
    processes: tuple[ProcessSample, ...]  # on these GPUs
    minutes: int  # for which they have looked like this, of the last hour


def judge_spinning(view: NodeView) -> Spinning | Missing | None:
    """A kernel runs all the time and does nothing: GPUs that wait for each other, a busy-wait.

    Heartbeats, logs and the host's threads may go on meanwhile: only what the GPUs do counts. Ranks of an inference
    server that wait for the next request in a collective look the same, and so are not judged. A kernel that keeps all
    SMs may be work of one warp each: it counts only next to another GPU of the same state.
    """
    window_s = view.seconds("spinning.window_s")
    serving = frozenset(index for process in view.processes if is_inference_server(process) for index in process.gpus)

    def spin(gpu: GpuSample) -> _Spin | str | None:
        if gpu.info.index in serving:
            return (f"a training job; {gpus_text(serving)} belong to an inference server, whose ranks wait for "
                    "requests in a collective")
        return _spin(view, gpu, window_s)

    spins = _judge_each(view, "spinning", window_s, spin)
    if not isinstance(spins, list):
        return spins
    return None if len(spins) == 1 and spins[0].fills_gpu else _spinning(view, spins, window_s)


def _spin(view: NodeView, gpu: GpuSample, window_s: float) -> _Spin | str | None:
    """The figures of a GPU that spins, None of one that does not, or what is missing to tell."""
    index, rule = gpu.info.index, "spinning"
    util = view.mean(gpu, "gpu_util", window_s)
    if util is None:
        return f"{window_s:.0f} s of coarse utilization: {gpu['gpu_util'].reason or 'not yet seen for that long'}"
    if util < view.limit(rule, "util_", index):
        return None
    of_limit = view.share(gpu, "power_w", window_s, "power_limit_w")
    traffic = [view.mean(gpu, metric, window_s) for metric in ("pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s")]
    readable = [t for t in traffic if t is not None]
    quiet = len(readable) == 2 and sum(readable) <= view.limit(rule, "traffic_", index)
    evidence = {"window_s": window_s, "gpu_util_ratio": util}
    if len(readable) == 2:
        evidence["pcie_bytes_per_s"] = sum(readable)
    links = [view.mean(gpu, metric, window_s) for metric in ("nvlink_rx_bytes_per_s", "nvlink_tx_bytes_per_s")]
    if on_links := [t for t in links if t is not None]:
        if sum(on_links) > view.limit(rule, "nvlink_", index):
            return None
        evidence["nvlink_bytes_per_s"] = sum(on_links)
    sm = view.mean(gpu, "sm_active", window_s)
    if sm is None:  # coarse figures alone: only what is far from any work
        if of_limit is None:
            return f"power and its limit: {gpu['power_w'].reason or gpu['power_limit_w'].reason}"
        if of_limit > view.limit(rule, "coarse_power_", index):
            return None
        if len(readable) < 2:
            return f"SM activity ({gpu['sm_active'].reason}) or PCIe traffic ({gpu['pcie_rx_bytes_per_s'].reason})"
        if not quiet or _varies(view, gpu, "power_w", window_s) > view.limit(rule, "varies_", index):
            return None
        return _Spin(gpu, evidence | {"power_of_limit_ratio": of_limit}, quiet)
    fills_gpu = sm > view.limit(rule, "sm_", index)
    if fills_gpu and not (quiet and _computes_nothing(view, gpu)):
        return None
    if of_limit is not None and of_limit > view.limit(rule, "coarse_power_" if fills_gpu else "power_", index):
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
    return _Spin(gpu, evidence | {"power_of_limit_ratio": of_limit}, quiet, fills_gpu)


def _computes_nothing(view: NodeView, gpu: GpuSample) -> bool:
    """Return whether the pipes for numbers stand still now; tensor cores and memory are judged over the window."""
    most = view.limit("spinning", "tensor_", gpu.info.index)
    return all((value := gpu[metric].value) is not None and value <= most
               for metric in ("fp64_active", "fp32_active", "fp16_active"))


def _varies(view: NodeView, gpu: GpuSample, metric: str, window_s: float) -> float:
    """Standard deviation over mean of the readings."""
    values = view.values(gpu, metric, window_s)
    mean = sum(values) / len(values)
    return math.sqrt(sum([(v - mean) ** 2 for v in values]) / len(values)) / mean if mean else 0.0


def _spinning(view: NodeView, spins: list[_Spin], window_s: float) -> Spinning:
    gpus = [s.gpu for s in spins]
    indices = {g.info.index for g in gpus}
    here = [p for p in view.processes if indices & set(p.gpus)]
    job = [q for q in view.processes if any(q is p or same_job(p, q) for p in here)]
    rest = {g.info.index: g for q in job for g in view.compute_gpus(q) if g.info.index not in indices}
    busy = [i for i, g in rest.items() if (a := view.activity(g, window_s)) and a[1] > limit("spinning.sm_leave")]
    sure = all(s.quiet and "sm_active_ratio" in s.evidence for s in spins)
    stuck = sure and not busy and all(_for_long(view, g) for g in gpus)
    return Spinning(
        gpus=tuple(sorted(indices)), severity="high" if stuck else "medium", window_s=window_s,
        gpu=gpus[0].info.index, figures=spins[0].evidence, sure=sure, stuck=stuck,
        faulty_gpus=view.gpus_explained_by("hardware_error") - indices, busy_gpus=tuple(busy),
        processes=tuple(here), minutes=_minutes(view, gpus))


def _minutes(view: NodeView, gpus: Sequence[GpuSample]) -> int:
    """Number of whole minutes until now in which all these GPUs have looked as they do."""
    means_by_gpu = [view.history.slice_means(metric, SLICE_S, _MOST_MINUTES)[1]
               for metric in ("gpu_util", "tensor_active", "power_w")]
    spin_minutes = _MOST_MINUTES
    for gpu in gpus:
        allowed, column = gpu["power_limit_w"].value or math.inf, view.column(gpu)
        of_gpu = zip(*(reversed(means[column]) for means in means_by_gpu), strict=True)
        # A figure that is missing (NaN) is above no limit; without utilization nothing was seen.
        spins = (util >= limit("spinning.util_leave") and not tensor > limit("spinning.tensor_leave")
                 and not power > limit("spinning.power_leave") * allowed for util, tensor, power in of_gpu)
        spin_minutes = min(spin_minutes, sum(1 for _ in takewhile(bool, spins)))
    return spin_minutes


def _for_long(view: NodeView, gpu: GpuSample) -> bool:
    long_s = view.seconds("spinning.long_s")
    util, sm = view.mean(gpu, "gpu_util", long_s), view.mean(gpu, "sm_active", long_s)
    return (util is not None and util >= limit("spinning.util_leave")
            and sm is not None and sm <= limit("spinning.sm_leave"))


def describe_spinning(v: Spinning) -> Explanation:
    figures = v.figures
    idle = "tensor pipe, memory, and NVLink" if "nvlink_bytes_per_s" in figures else "tensor pipe and memory"
    low = f"{percent(figures['sm_active_ratio'])} SM activity ({idle} idle) " if "sm_active_ratio" in figures else ""
    lasts = f" This state has lasted for {v.minutes} min." if v.minutes > 1 else ""
    wait = (f"The GPUs may be waiting for {gpus_text(v.faulty_gpus)}, which reported a fault." if v.faulty_gpus else
            f"The GPUs {wait_for(v.busy_gpus)}" if v.busy_gpus else
            "Such values are typical of a collective that one GPU or rank never joined, or of a polling kernel.")
    if not v.sure:
        wait += " Many very small kernels, run one at a time, can look the same."
    return Explanation(
        title=f"{gpus_text(v.gpus)}: a kernel is running all the time but does nothing",
        why=f"Over the last {v.window_s:.0f} s, GPU {v.gpu} was almost constant at "
            f"{percent(figures['gpu_util_ratio'])} utilization{', ' if low else ' '}{low}and "
            f"{percent(figures['power_of_limit_ratio'])} of the power limit.{lasts} {wait}",
        evidence=known({**figures, "lasts_s": v.minutes * SLICE_S if v.minutes > 1 else None}),
        brief=f"SM activity {percent(figures['sm_active_ratio'])} at {percent(figures['gpu_util_ratio'])} utilization: "
              "the GPUs may be waiting in a collective." if "sm_active_ratio" in figures else
              f"Power is almost constant at {percent(figures['power_of_limit_ratio'])} of the limit: the GPUs may be "
              "waiting in a collective.",
        unknown="the line that each rank is executing",
        action="Look at the stacks of the ranks: the rank that is not in a collective delays the others. NCCL 2.24 "
               "and newer can report that rank through the RAS service, which gputop keeps querying on this node.",
        snippet=stacks_command(v.processes) or code("spinning", "log"),
        gain="no step completes while the ranks are waiting" if v.stuck else NO_FIGURE,
        source="NVML utilization, compared with power and with SM, tensor, and DRAM activity from GPM or DCGM; "
               + source("spinning.sm_enter", "spinning.varies_enter"))


class LowSmActive(Verdict, frozen=True, kw_only=True):
    window_s: float
    gpu: int  # the one that works least
    metric: str  # sm_active, or gpu_util where that is not known
    activity: float
    gpu_util: float | None
    busier_peers: tuple[int, ...]  # GPUs of the same job that work more
    full_cores: float  # of the host
    blocked_cores: float  # those that have nothing to do but wait for storage
    fall: Fall | None  # from what the same job reached before


def judge_low_sm_active(view: NodeView) -> LowSmActive | Missing | None:
    """GPUs that work, but little, and no live figure says why."""
    rule, window_s = "low_sm_active", view.seconds("low_sm_active.window_s")
    left_out, rest = view.gpus_left_out(rule), dict[int, float]()

    def low(gpu: GpuSample) -> tuple[GpuSample, str, float] | str | None:
        activity, index = view.activity(gpu, window_s), gpu.info.index
        if activity is None:
            return ""
        metric, mean = activity
        if index not in left_out and _mostly_low(view, gpu, metric, window_s):
            return gpu, metric, mean
        if metric == "gpu_util" and mean >= view.limit(rule, "active_", index):
            return (f"SM activity of {gpus_text([gpu])}: {gpu['sm_active'].reason}; coarse utilization does not show "
                    "how much of a GPU works")
        rest[index] = mean
        return None

    lows = _judge_each(view, rule, window_s, low)
    return _low(view, lows, rest, window_s) if isinstance(lows, list) else lows


def _mostly_low(view: NodeView, gpu: GpuSample, metric: str, window_s: float) -> bool:
    """Return whether the GPU was at work for most of the window, and that at low activity."""
    index, rule = gpu.info.index, "low_sm_active"
    slices, pause = view.slice_table(gpu, metric, window_s), limit(f"{rule}.pause")
    at_work = [mean for mean in slices if mean >= pause]
    if len(at_work) < view.limit(rule, "work_", index) * len(slices) or not at_work:
        return False
    below = view.limit(rule, "active_", index)
    return sum(mean < below for mean in at_work) >= view.limit(rule, "slices_", index) * len(at_work)


def _low(view: NodeView, low: list[tuple[GpuSample, str, float]], rest: dict[int, float],
         window_s: float) -> LowSmActive:
    worst, metric, activity = min(low, key=lambda gpu_activity: gpu_activity[2])
    peers = {g.info.index for p in view.processes if worst.info.index in p.gpus for g in view.compute_gpus(p)}
    return LowSmActive(
        gpus=tuple(sorted(gpu.info.index for gpu, _, _ in low)), severity="low", window_s=window_s,
        gpu=worst.info.index, metric=metric, activity=activity,
        gpu_util=view.mean(worst, "gpu_util", window_s), full_cores=view.full_cores(window_s),
        blocked_cores=(view.host_mean(lambda point: point.iowait_ratio, window_s) or 0.0) * (
            view.sample.host.cpu_count or 0),
        fall=falls(view).get(worst.info.index) if metric == "sm_active" else None,
        busier_peers=tuple(i for i in sorted(peers & set(rest)) if rest[i] >= 1.5 * activity))


def describe_low_sm_active(v: LowSmActive) -> Explanation:
    evidence = {"window_s": v.window_s, f"{v.metric}_ratio": v.activity}
    how, brief, unknown = "", "Live samples do not show which kernels run", "which kernels fill the time?"
    if v.gpu_util is not None and v.gpu_util < limit("low_sm_active.gaps"):
        how = (f" No kernel was running for {percent(1 - v.gpu_util)} of the time, because the GPU was waiting for "
               "input, launches, the host, or another GPU.")
        brief, unknown = f"Idle {percent(1 - v.gpu_util)} of the time", "input, launches, the host, or another GPU?"
    elif v.gpu_util is not None:
        how = (" Kernels are running almost all the time but fill only a few SMs. Typical causes are small kernels, a "
               "small batch, or waiting in NCCL.")
        brief, unknown = "Kernels are always running but fill few SMs", "small kernels, a small batch, or NCCL?"
    if v.gpu_util is not None:
        evidence["gpu_util_ratio"] = v.gpu_util
    full, blocked, also = round(v.full_cores), round(v.blocked_cores), list[str]()
    if v.busier_peers:
        also.append(f"{gpus_text(v.busier_peers)} of the same job {'is' if len(v.busier_peers) == 1 else 'are'} busier "
                    "and may delay the others")
    if v.full_cores >= 1:
        evidence["full_cpu_cores"] = v.full_cores
        also.append(f"{counted(full, 'CPU core')} {'are' if full != 1 else 'is'} fully busy")
    if v.blocked_cores >= 1:
        evidence["blocked_cpu_cores"] = v.blocked_cores
        also.append(f"{counted(blocked, 'CPU core')} {'wait' if blocked != 1 else 'waits'} for storage")
    how, brief = "".join((how, *(f" {one}." for one in also))), "; ".join((brief, *also))
    if v.fall is not None:
        evidence |= {"before_ratio": v.fall.best, "lasts_s": v.fall.lasts_s}
        how += (f" Until {v.fall.lasts_s / 60:.0f} min ago, the same job sustained {percent(v.fall.best)} for several "
                "minutes.")
    fine = v.metric == "sm_active"
    what = "SM activity" if fine else "coarse utilization, an upper bound of SM activity,"
    return Explanation(
        title=f"{gpus_text(v.gpus)} {'runs' if len(v.gpus) == 1 else 'run'} at {percent(v.activity)} "
              + ("SM activity" if fine else "utilization"),
        why=f"On GPU {v.gpu}, {what} was {percent(v.activity)} over the last {v.window_s:.0f} s.{how}",
        evidence=evidence, brief=f"{brief}.", unknown=unknown,
        action="Press c to capture a trace, which shows the cause and what to change.", gain=NO_FIGURE,
        source="SM activity from GPM or DCGM; " + source("low_sm_active.active_enter", "low_sm_active.slices_enter"))


class _Pipes(Struct, frozen=True):
    """Activity of two units of one GPU over the window."""

    gpu: int
    busy: float
    tensor: float


class TensorSpare(Verdict, frozen=True, kw_only=True):
    window_s: float
    worst: _Pipes  # ``busy`` is the device memory's (dram_bound) or the SMs' (tensor_idle)


def judge_dram_bound(view: NodeView) -> TensorSpare | Missing | None:
    """Device memory is near what it can move while the tensor cores have time: a limit, not a fault."""
    return _spare(view, "dram_bound", "dram")


def _spare(view: NodeView, rule: str, unit: str, unless: str = "") -> TensorSpare | Missing | None:
    """Judge both rules: one unit of a GPU is busy over the window, and its tensor cores are not. ``unless``: the unit
    whose work says now that tensor cores are not wanted."""
    active, window_s = f"{unit}_active", view.seconds(f"{rule}.window_s")

    def pipes(gpu: GpuSample) -> _Pipes | str | None:
        busy, tensor = (view.mean(gpu, metric, window_s) for metric in (active, "tensor_active"))
        index = gpu.info.index
        if busy is not None and busy < view.limit(rule, f"{unit}_", index):
            return None
        for metric, mean in ((active, busy), ("tensor_active", tensor)):
            if mean is None and (reason := gpu[metric].reason) is not None:
                return f"{metric} of {gpus_text([gpu])}: {reason}"
        if busy is None or tensor is None:
            return ""
        wanted = not unless or (gpu[f"{unless}_active"].value or 0.0) < view.limit(rule, f"{unless}_", index)
        return _Pipes(index, busy, tensor) if wanted and tensor <= view.limit(rule, "tensor_", index) else None

    spare = _judge_each(view, rule, window_s, pipes)
    if not isinstance(spare, list):
        return spare
    return TensorSpare(gpus=tuple(sorted(pipes.gpu for pipes in spare)), severity="low", window_s=window_s,
                       worst=max(spare, key=lambda pipes: pipes.busy))


def describe_dram_bound(v: TensorSpare) -> Explanation:
    return Explanation(
        title=f"{gpus_text(v.gpus)} limited by memory bandwidth",
        why=f"On GPU {v.worst.gpu}, device memory moved data in {percent(v.worst.busy)} of its cycles over the last "
            f"{v.window_s:.0f} s (at most about 80% is achievable). Tensor cores were busy for "
            f"{percent(v.worst.tensor)} of the time. The kernels wait for memory, not for arithmetic. This is a limit "
            "of these kernels, not a fault.",
        evidence={"window_s": v.window_s, "dram_active_ratio": v.worst.busy, "tensor_active_ratio": v.worst.tensor},
        brief=f"Memory is busy in {percent(v.worst.busy)} of its cycles, and tensor cores for "
              f"{percent(v.worst.tensor)} of the time.",
        action=f"Move fewer bytes: let {'torch.compile' if v.framework == 'pytorch' else 'XLA'} fuse element-wise "
               "operations, keep activations in 16-bit precision, and use fused attention and optimizers. A larger "
               "batch changes little.",
        snippet=code_for(v.framework, "dram_bound"),
        gain="depends on how many bytes fusion and lower precision save; " + NO_FIGURE,
        source="DRAM and tensor pipe activity from GPM or DCGM; " + source("dram_bound.dram_enter"))


def judge_tensor_idle(view: NodeView) -> TensorSpare | Missing | None:
    """SMs are busy for minutes and the tensor cores never: precision, or work that has no matrices."""
    return _spare(view, "tensor_idle", "sm", unless="fp64")


def describe_tensor_idle(v: TensorSpare) -> Explanation:
    return Explanation(
        title=f"{gpus_text(v.gpus)}: tensor cores unused",
        why=f"On GPU {v.worst.gpu}, SM activity was {percent(v.worst.busy)} over the last {v.window_s:.0f} s, but "
            f"tensor cores were active for only {v.worst.tensor * 100:.1f}% of the time. If the model has matmuls or "
            "convolutions, they run on CUDA cores at a fraction of the speed. Otherwise, nothing is wrong.",
        evidence={"window_s": v.window_s, "sm_active_ratio": v.worst.busy, "tensor_active_ratio": v.worst.tensor},
        brief=f"SM activity is {percent(v.worst.busy)}, but tensor core activity is only {v.worst.tensor * 100:.1f}%, "
              "which is fine only if the model has no matmuls.", unknown="matmuls on CUDA cores?",
        action="If the model has matmuls, use mixed precision or keep TF32 enabled, and give layers sizes that are "
               "multiples of 8. A capture names the kernels.",
        snippet=code_for(v.framework, "tensor_idle"), gain="depends on the share of matmuls; " + NO_FIGURE,
        source="tensor pipe activity from GPM or DCGM; " + source("tensor_idle.tensor_enter", "tensor_idle.window_s"))
