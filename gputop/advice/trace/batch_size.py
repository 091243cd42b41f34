"""The batch: what of a step a larger one shares out among more samples, what it fills, and whether it fits; and kernels
with too few thread blocks to fill the GPU, which is busy then while most of it has no work."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean

from msgspec.structs import replace

from gputop.advice import savings
from gputop.advice.fix_code import code
from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import TraceFacts, removed_host_time, severity_by_limits, waits_for_launches
from gputop.advice.trace.inputs import all_allocators, gpu_allocators, launch_calls
from gputop.advice.trace.job import Job, shows_training, trains
from gputop.advice.trace.kernel_rows import plain_name
from gputop.advice.verdict import Explanation, Missing, Verdict, known
from gputop.analysis.gpu.sm_use import narrow_kernels
from gputop.analysis.layers.culprits import Events
from gputop.analysis.results import AllocatorUse, FewBlocks, NarrowKernel
from gputop.core.findings import MEDIUM_SHARE
from gputop.text.units import counted, percent, seconds, size
from gputop.trace.intervals import merge
from gputop.trace.lookups import name_mask

_PAPERS = ("learning rate and batch size: Goyal et al. 2017 and Malladi et al. 2022; gradient noise scale: McCandlish "
           "et al. 2018")
_WORTH_TELLING = 0.001  # share of the step
_OF_NETWORK = r"(?i).*(?:gemm|conv|cudnn|cublas|cutlass|attention|softmax|nccl)"  # kernels


class BatchSizeHeadroom(Verdict, frozen=True, kw_only=True):
    """Times are per step and GPU. Those before ``filled_s`` do not grow with the batch; None: not known."""

    factor: float  # by which the batch can grow, or is tried to
    compute: float  # share of the time
    launch_s: float
    host_s: float
    allreduce_s: float | None  # exposed, without waiting for late GPUs
    optimizer_s: float | None
    filled_s: float  # of the time of short kernels with few blocks, what is saved per sample
    sms: int | None
    few_blocks_s: float | None
    few_blocks: tuple[FewBlocks, ...]
    last_wave_s: float | None
    under_one_wave_s: float | None
    input_s: float | None  # what the input pipeline takes for a step's samples, where that limits the saving
    memory: tuple[int, int] | None  # peak and capacity of the fullest GPU's allocator; None: not known for all

    @property
    def fixed_s(self) -> float:
        return self.launch_s + self.host_s + (self.allreduce_s or 0.0) + (self.optimizer_s or 0.0)


def judge_batch_size_headroom(facts: TraceFacts) -> BatchSizeHeadroom | None:
    """A larger batch takes less time per sample, and no allocator is known to have no room for it. JAX also runs
    programs that train nothing; those that do show a gradient. Without a framework, only a network has batches.

    The factor is a power of two that fits even if all memory in use, weights included, grew
    with the batch; in truth only activations do. Where memory is not known it is the least there is.
    """
    if facts.shares["input"] >= limit("input_bound.share") or (
            facts.framework == "jax" and not shows_training(facts)) or (
            facts.framework == "unknown" and not name_mask(facts.trace, _OF_NETWORK).any()):
        return None
    numbers, known_memory = set(facts.active_numbers), all_allocators(facts)
    factor = min((_room(use) for use in gpu_allocators(facts, numbers).values()),
                 default=limit("batch_size_headroom.factor"))
    if factor < limit("batch_size_headroom.factor"):
        return None
    factor = factor if known_memory else limit("batch_size_headroom.factor")
    scaling = [gpu_scaling for gpu_scaling in facts.analysis.batch_scaling if gpu_scaling.gpu in numbers]
    worst = max(scaling, key=lambda gpu_scaling: gpu_scaling.few_blocks_s or 0.0, default=None)
    tightest = max(known_memory or (), key=lambda use: use.peak_bytes / use.capacity_bytes, default=None)
    launch_s, host_s = _launch_and_host_s(facts)
    allreduces = facts.waits.allreduce_s if facts.waits is not None else {}
    gpus = facts.active
    headroom = BatchSizeHeadroom(
        gpus=facts.active_numbers, factor=factor, compute=sum(gpu.compute for gpu in gpus) / len(gpus),
        launch_s=launch_s, host_s=host_s, allreduce_s=_mean(allreduces.values()),
        optimizer_s=_mean(gpu_scaling.optimizer_s for gpu_scaling in scaling),
        filled_s=_mean(gpu_scaling.filled_s.get(int(factor)) for gpu_scaling in scaling) or 0.0,
        sms=worst.sms if worst else None, few_blocks=worst.few_blocks if worst else (),
        few_blocks_s=_mean(gpu_scaling.few_blocks_s for gpu_scaling in scaling),
        last_wave_s=_mean(gpu_scaling.last_wave_s for gpu_scaling in scaling),
        under_one_wave_s=_mean(gpu_scaling.under_one_wave_s for gpu_scaling in scaling), input_s=None,
        memory=(tightest.peak_bytes, tightest.capacity_bytes) if tightest else None)
    share = (savings.faster(headroom.fixed_s, factor, facts.period_s)
             + savings.removed(headroom.filled_s, facts.period_s))
    input_s = _input_s(facts)
    if share > (least := max(1 - input_s / facts.period_s, 0.0)):
        share, headroom = least, replace(headroom, input_s=input_s)
    if share < limit("batch_size_headroom.share"):
        return None
    # The same idle time is claimed once: launch_bound names its cause, this a way to live with it.
    beside = launch_calls(facts) is None and waits_for_launches(facts)
    alone = known_memory is not None and not beside and not facts.caveat
    late = removed_host_time(facts, "gap")
    fixed = {gpu: merge(parts["launch"], *([late[gpu]] if host_s and gpu in late else ()), *(
        [parts["collectives"]] if headroom.allreduce_s else ())) for gpu, parts in facts.parts.items()}
    return replace(headroom, share=share, severest="high" if alone else "medium", of_parts={
        "launch": launch_s, "host": host_s, "collectives": headroom.allreduce_s or 0.0,
        "compute": (headroom.optimizer_s or 0.0) + headroom.filled_s}, spans=fixed)


def _room(use: AllocatorUse) -> float:
    """Factor by which all memory in use can grow: a power of two, no more than is advised at once."""
    if use.peak_bytes <= 0:
        return limit("batch_size_headroom.factor_max")
    grow = limit("batch_size_headroom.memory") * use.capacity_bytes / use.peak_bytes
    return min(2.0 ** math.floor(math.log2(grow)), limit("batch_size_headroom.factor_max")) if grow >= 1 else 1.0


def _launch_and_host_s(facts: TraceFacts) -> tuple[float, float]:
    """Time per step in which GPUs wait for launches, and for the host's work between steps as far as it has a name.

    Ops on the host grow with the batch, and so may Python code without an event, or whatever else keeps a call of the
    step from launching: these are left out.
    """
    launch_s, host_s = (facts.shares[part] * facts.period_s for part in ("launch", "host"))
    causes = facts.host
    if causes is None or causes.gap_host is not None:  # one rank's own work: the others wait for it
        return launch_s, 0.0
    named_s = max((causes.gap_s or 0.0) - (causes.gap_silent_s or 0.0), 0.0)
    return max(launch_s - (causes.placement_s or 0.0), 0.0), min(named_s, host_s)


def _input_s(facts: TraceFacts) -> float:
    """Seconds that tf.data's slowest segment works for the batches of a step; 0 where that is not known."""
    waited, window_s = facts.analysis.input, facts.analysis.trace.window_s
    pipeline = next((p for p in waited.pipelines if p.batches), None) if waited is not None else None
    if pipeline is None or not pipeline.bounding_s_per_batch or window_s <= 0:
        return 0.0
    return pipeline.bounding_s_per_batch * pipeline.batches * facts.period_s / window_s


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None


def describe_batch_size_headroom(v: BatchSizeHeadroom, job: Job) -> Explanation:
    parts = {"waiting for launches": v.launch_s, "host work between steps": v.host_s,
             "exposed AllReduces": v.allreduce_s or 0.0, "optimizer kernels": v.optimizer_s or 0.0}
    named = {what: part for what, part in parts.items() if part >= _WORTH_TELLING * job.period_s}
    peak_bytes, capacity_bytes = map(float, v.memory) if v.memory is not None else (None, None)
    evidence = known({
        "factor": v.factor, "compute_ratio": v.compute, "launch_wait_ratio": v.launch_s / job.period_s,
        "fixed_s": v.fixed_s, "launch_wait_s": v.launch_s, "host_s": v.host_s, "filled_s": v.filled_s,
        "peak_bytes": peak_bytes, "capacity_bytes": capacity_bytes, "allreduce_exposed_s": v.allreduce_s,
        "optimizer_s": v.optimizer_s, "sm_count": None if v.sms is None else float(v.sms),
        "few_blocks_s": v.few_blocks_s, "last_wave_s": v.last_wave_s, "under_one_wave_s": v.under_one_wave_s,
        "input_pipeline_s": v.input_s})
    listed = ", ".join(f"{what} {seconds(part)}" for what, part in named.items())
    fixed = f"{percent(v.fixed_s / job.period_s)} of the {job.basis} does not grow with the batch size: {listed}."
    much = f"{v.factor:.0f}×"
    assumed = ["fixed costs stay the same"
               + (" (AllReduces carry only gradients)" if "exposed AllReduces" in named else "")] if named else []
    if v.filled_s >= _WORTH_TELLING * job.period_s:
        assumed.append("kernels shorter than 10 µs fill idle SMs")
    assumed.append(f"everything else takes {much} as long" + (
        ", if the input pipeline keeps up" if v.input_s is not None else ""))
    return Explanation(
        title="A larger batch takes less time per sample" + (
            f", and {much} the batch size fits in memory" if v.memory else ""),
        why=" ".join([*([fixed] if named else []), *_empty(v, job), _memory(v)]), evidence=evidence,
        action=f"Increase the batch size per GPU, {f'up to {much}' if v.memory else 'if memory allows'}. An epoch then "
               "has fewer updates: scale the learning rate with the batch size for SGD or its square root for Adam, "
               "add warmup, and watch the validation loss. Beyond the gradient noise scale, larger batches help "
               "little.",
        snippet=code("batch_size_headroom", "larger" if v.memory else job.framework, FACTOR=f"{v.factor:.0f}"),
        gain=f"assumes that, with {much} the batch size, {', '.join(assumed[:-1])}{' and ' * (len(assumed) > 1)}"
             f"{assumed[-1]}. Each step takes longer"
             + (". The saving overlaps with that of launch_bound" if "waiting for launches" in named else ""),
        per="sample", source=f"{source('batch_size_headroom.memory', 'batch_size_headroom.share')}; {_PAPERS}")


def _empty(v: BatchSizeHeadroom, job: Job) -> Iterable[str]:
    """Sentences on the part of the GPU that its kernels leave empty."""
    least = 0.01 * job.period_s
    if v.sms is not None and (v.few_blocks_s or 0.0) >= least:
        yield (f"Kernels with fewer blocks than the GPU's {v.sms} SMs run for {seconds(v.few_blocks_s or 0.0)}: "
               f"{_longest(v.few_blocks)}. Only kernels shorter than 10 µs count, because the trace "
               "does not show whether the grids grow with the batch size.")
    if (v.last_wave_s or 0.0) >= least:
        yield (f"Up to {seconds(v.last_wave_s or 0.0)} of SM time is unused because the last wave of a kernel's blocks "
               "does not fill the GPU.")
    if (v.under_one_wave_s or 0.0) >= least:
        yield f"Kernels with too few blocks to fill the GPU even once run for {seconds(v.under_one_wave_s or 0.0)}."


def _longest(kernels: Iterable[FewBlocks | NarrowKernel]) -> str:
    """Names of these kernels, those of one name and number of blocks together, with the times of the first ones."""
    times: dict[tuple[str, str], float] = {}
    for kernel in kernels:
        threads = kernel.threads if isinstance(kernel, NarrowKernel) else _WARP
        few = f" of {counted(threads, 'thread')}" if threads < _WARP else ""
        key = plain_name(kernel.name), f"{counted(kernel.blocks, 'block')}{few}"
        times[key] = times.get(key, 0.0) + kernel.time_s_per_step
    return ", ".join(f"{name} ({blocks}, {seconds(time_s)})" for (name, blocks), time_s in list(times.items())[:_SHOWN])


def _memory(v: BatchSizeHeadroom) -> str:
    if v.memory is None:
        return "The trace does not show whether a larger batch fits in memory."
    peak, capacity = v.memory
    return (f"At peak, the fullest GPU uses {percent(peak / capacity)} of the {size(capacity)} available to its "
            "allocator.")


_SHOWN, _WARP = 3, 32
_WHOLE_WARPS = ("Launch {} with more threads in fewer blocks: at least 32 threads per block, better 128 to 256. A warp "
                "has 32 lanes, and smaller blocks leave the others empty.")
_GUIDES = ("Nsight Compute: small grid, tail effect; NVIDIA, Matrix Multiplication Background: wave and tile "
           "quantization; CUDA C++ Programming Guide: four schedulers per SM")


class SmallGrids(Verdict, frozen=True, kw_only=True):
    """``share`` is the time in which the empty part of the GPU could have worked. Times are per step and GPU."""

    used: float  # share of the GPU that has a warp while kernels run
    compute: float  # share of the time in which kernels run
    empty_s: float  # compute, weighted by the part of the GPU that is empty
    tail_s: float  # further, in last waves, if all blocks of a kernel take equally long
    sms: int
    kernels: tuple[NarrowKernel, ...]  # those that leave most of it empty
    batch: bool = False  # whether another finding has what a larger batch brings


def judge_small_grids(facts: TraceFacts) -> SmallGrids | Missing | None:
    """Kernels run, yet a large part of the GPU's SMs, or of their schedulers, has no warp of them.

    What spreading them would save is not known: how many blocks a kernel has follows from its work and its tiles.
    """
    least = limit("small_grids.share") * facts.period_s
    widths = [use for use in facts.analysis.sm_use if use.gpu in facts.active_numbers]
    if not widths or fmean(use.compute_s for use in widths) < least:
        return None
    judged = [use for use in widths if use.used_s is not None and use.known >= limit("small_grids.known")]
    if not judged:
        return Missing("data on the grid sizes of the kernels, or the number of SMs of the GPU")
    empty_by_gpu = [use.compute_s - (use.used_s or 0.0) for use in judged]
    empty_s = fmean(empty_by_gpu)
    share = savings.removed(empty_s, facts.period_s)
    if share < limit("small_grids.share"):
        return None
    most = judged[empty_by_gpu.index(max(empty_by_gpu))]
    return SmallGrids(
        gpus=tuple(use.gpu for use in judged), share=share, claim=None, empty_s=empty_s,
        severity="low" if share * facts.of_recorded < MEDIUM_SHARE else severity_by_limits("small_grids", share),
        used=1 - empty_s / fmean(use.compute_s for use in judged),
        compute=fmean(use.compute_s for use in judged) / facts.period_s,
        tail_s=fmean(use.tail_s or 0.0 for use in judged), sms=most.sms or 0, kernels=most.narrow,
        batch=trains(facts) is not False and judge_batch_size_headroom(facts) is not None,
        events=Events(narrow_kernels(facts.trace, facts.gpu_timelines, facts.steps)))


def describe_small_grids(v: SmallGrids, job: Job) -> Explanation:
    longest, used = _longest(v.kernels), percent(v.used) if v.used >= 0.01 else "less than 1%"
    first = next((kernel for kernel in v.kernels[:1] if job.framework == "unknown" and kernel.threads < _WARP
                  and kernel.blocks >= v.sms), None)
    text = (f"Kernels run for {percent(v.compute)} of the {job.basis} but keep only {used} of the GPU's {v.sms} SMs "
            "busy on average, because they have too few blocks, warps, or threads. A monitor shows a GPU as busy while "
            "any block runs.")
    text += f" Most of the unused capacity is due to {longest}." if longest else ""
    if v.tail_s >= 0.01 * job.period_s:
        text += (" In other kernels, partly filled last waves waste SM time worth up to "
                 f"{percent(v.tail_s / job.period_s)} of the {job.basis}, if all blocks of a kernel take equally long.")
    batch = ("Give each kernel more work: put several requests into one batch, or run them on several streams at the "
             "same time." if job.trains is False else
             "Launch kernels with more blocks and threads." if job.framework == "unknown" else
             f"Give each kernel more work: {'' if v.batch else 'use a larger batch if the training allows it, or '}run "
             "independent branches on several streams.")
    return Explanation(
        title=f"Kernels use {used} of the GPU while they run", why=text,
        evidence={"used_of_gpu_ratio": v.used, "compute_ratio": v.compute, "empty_gpu_s": v.empty_s,
                  "share_ratio": v.share, "last_wave_s": v.tail_s, "sm_count": float(v.sms)},
        action=f"{batch} In custom kernels, use smaller tiles or split the reduction (split-K), so that the grid has "
               "at least one block per SM." if first is None else _WHOLE_WARPS.format(plain_name(first.name)),
        snippet=code("small_grids", *(["run-pytorch"] if job.framework == "pytorch" and job.trains is False else []),
                     *job.keys),
        gain="unknown, because only a test shows how far these kernels can be spread over the GPU",
        source=f"{source('small_grids.share', 'small_grids.high')}; {_GUIDES}")
