"""Kernels whose work one kernel could do: attention, layout conversions, element-wise kernels in chains, optimizers.

All of it rests on the names of kernels and ops. What a faster GPU saves is what is left of it beside the time in which
the GPU waits for launches: a job that its host paces gains nothing from shorter kernels.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from gputop.advice import savings
from gputop.advice.fix_code import code, joined
from gputop.advice.registry import limit, source
from gputop.advice.trace import kernel_rows
from gputop.advice.trace.facts import NO_GPU, TraceFacts, host_rows_in_steps, once_per_trace
from gputop.advice.trace.inputs import MISSING
from gputop.advice.trace.job import Job
from gputop.advice.trace.optimizer_time import optimizer_time
from gputop.advice.verdict import Explanation, Missing, Verdict
from gputop.analysis.layers.culprits import Events
from gputop.analysis.what_if.cure import Cure
from gputop.text.units import count, percent, seconds
from gputop.trace.host_calls import OPTIMIZER_CALL, launched_in_calls
from gputop.trace.intervals import Spans, intersect, union
from gputop.trace.lookups import Mask, computes_on_cpu, host_rows, name_mask
from gputop.trace.model import I32, I64, Kind, Trace

_SHOWN_NAMES = 2
# Of PyTorch on a CPU, and what one call leaves of them: measured with 8 to 24 tensors of 64 to 1,000,000 numbers,
# 16-31% of Adam and AdamW, 31-52% of SGD with momentum (PyTorch 2.14).
_FUSED, _FUSABLE = r"aten::_fused_\w+$", re.compile(r"Optimizer\.step#(Adam|AdamW|SGD|Adagrad)\.step$")
_LEFT = {"Adam": 0.25, "AdamW": 0.25}
_LEFT_OF_OTHERS = 0.5


# -- what the rules have in common ------------------------------------------------------------------


def _matching(trace: Trace, column: I32, pattern: str, but: str = "(?!)") -> Mask:
    """Mask of the events whose name in this column has the pattern anywhere, in any case, and not ``but``. Of many
    names only those that occur there are searched."""
    wanted, unwanted = re.compile(pattern, re.IGNORECASE).search, re.compile(but, re.IGNORECASE).search
    mask = np.zeros(len(trace.names) + 1, bool)  # the extra last entry answers index -1
    few = len(trace.names) < len(column) // 64  # quicker searched than counted
    for i in range(len(trace.names)) if few else np.flatnonzero(np.bincount(column + 1)[1:]).tolist():
        mask[i] = wanted(trace.names[i]) is not None and unwanted(trace.names[i]) is None
    return mask[column] if mask.any() else np.zeros(len(column), bool)


def _beside_launch_waits(facts: TraceFacts, seconds: float) -> float:
    """The share of the step that work of that length on the GPU costs, the launch waits taken off."""
    return savings.removed(seconds - facts.shares["launch"] * facts.period_s, facts.period_s)


def _seconds(facts: TraceFacts, rows: I64) -> float:
    """Seconds of these device events per step (or window) and GPU."""
    device = facts.trace.device
    return float((device.end_ns[rows] - device.start_ns[rows]).sum()) / _per(facts) / 1e9


def _per(facts: TraceFacts) -> int:
    return facts.steps_or_window * len(facts.active)


def _longest(facts: TraceFacts, rows: I64) -> tuple[str, ...]:
    """Plain names of these kernels, those of most time first."""
    device = facts.trace.device
    time = np.bincount(device.name[rows], weights=device.end_ns[rows] - device.start_ns[rows])
    names: dict[str, float] = {}
    for i in np.flatnonzero(time).tolist():
        name = kernel_rows.plain_name(facts.trace.names[i])
        names[name] = names.get(name, 0.0) + float(time[i])
    return tuple(sorted(names, key=lambda name: (-names[name], name)))[:_SHOWN_NAMES]


def _named(names: Sequence[str]) -> str:
    return f" Kernels: {', '.join(names)}." if names else ""


_FUSED_ATTENTION = r"fmha|flash|attention|sdpa"
_PRODUCT = r"gem[mv]|cijk_|nvjet"
_NO_PRODUCT = rf"conv|fprop|dgrad|wgrad|winograd|implicit|cudnn|splitk_?reduce|{_FUSED_ATTENTION}"
_SOFTMAX = r"soft_?max|GenerateNormalizedProb"
# Of a loss. PyTorch's kernels for short rows are those of the logarithm, too: a flag among the template's arguments.
_NO_SOFTMAX = (rf"log_?soft_?max|xent|cross_?entropy|{_FUSED_ATTENTION}|"
               r"softmax_warp_\w+<[^>]*, (?:\(int\))?\d+, (?:\(bool\)1|true)")
_SOFTMAX_OP_BUT = r"log_?soft_?max|xent|cross_?entropy"
# Nothing of the kind stands between the two products of attention, as it does in a mixture of experts or a layer.
_NOT_BETWEEN = (rf"top_?k|sort|scatter|gather|index|embedding|_?norm(?!alizedprob)|conv|nccl|{_FUSED_ATTENTION}")
_COPY = r"copy|CatArray|transpose|SwapDimension"  # of queries, keys or values: fused attention may need it as well
_BETWEEN = 8  # kernels: scale, mask and cast, two reductions and TensorFlow's softmax, dropout
_NO_FLASH_KERNEL = (
    "scaled_dot_product_attention runs as separate kernels here. Flash attention needs FP16 or BF16 and a head size "
    "of at most 256. The memory-efficient kernel also supports FP32. Check that neither kernel is disabled "
    "(sdpa_kernel, enable_mem_efficient_sdp).")


class AttentionUnfused(Verdict, frozen=True, kw_only=True):
    between_s: float  # per step and GPU: softmax, scale, mask and dropout between the two products
    softmax_s: float
    count: float  # of such sequences per step and GPU
    names: tuple[str, ...]
    in_memory: bool  # the scores of a product are larger than any cache
    fallback: bool  # PyTorch's attention function was called and has fallen back to separate kernels


@once_per_trace
def judge_attention_unfused(facts: TraceFacts) -> AttentionUnfused | None:
    """Softmax, with what scales and masks, in kernels of its own between two batched matrix products of one stream.

    A classifier's softmax is none: its products are not batched, or its loss has no second product right after.
    """
    trace, kernels = facts.trace, kernel_rows.kernels_in_steps(facts)
    device = trace.device
    softmax = _softmaxes(trace, kernels)
    if not softmax.any():
        return None
    kernels = kernel_rows.by_stream(trace, kernels)
    softmax = _softmaxes(trace, kernels)
    name = device.name[kernels]
    product = _matching(trace, name, _PRODUCT, _NO_PRODUCT)
    softmax &= ~product
    bound = product | (_matching(trace, name, _NOT_BETWEEN, _SOFTMAX) & ~softmax)
    bounds = np.flatnonzero(bound)
    first, last = bounds[:-1], bounds[1:]
    so_far = np.concatenate(([0], np.cumsum(softmax)))
    is_attention = product[first] & product[last] & (device.line[kernels[first]] == device.line[kernels[last]])
    is_attention &= (last - first <= _BETWEEN + 1) & (so_far[last] > so_far[first])
    first, last = first[is_attention], last[is_attention]
    batched = _batched_pairs(trace, kernels[first], kernels[last])
    first, last = first[batched], last[batched]
    count = len(first) / _per(facts)
    if count < limit("attention_unfused.count"):
        return None
    inside = np.zeros(len(kernels) + 1, np.int64)
    np.add.at(inside, first + 1, 1)
    np.add.at(inside, last, -1)
    between = (np.cumsum(inside[:-1]) > 0) & (softmax | ~_matching(trace, name, _COPY))
    between_s = _seconds(facts, kernels[between])
    share = _beside_launch_waits(facts, between_s)
    if share < limit("attention_unfused.share"):
        return None
    rows = kernels[between & softmax]
    in_memory = float(np.median(device.end_ns[rows] - device.start_ns[rows])) >= limit(
        "attention_unfused.in_memory_s") * 1e9
    return AttentionUnfused(
        gpus=facts.active_numbers, share=share, claim="at least" if in_memory else "about", between_s=between_s,
        softmax_s=_seconds(facts, rows), count=count, names=_longest(facts, rows),
        fallback=bool(len(host_rows(trace, "aten::_scaled_dot_product_attention_math"))),
        in_memory=in_memory, events=Events(kernels[between]), cure=Cure(
            scaled=((kernels[between], 0.0),), assumes=(
                "Assumes that the kernels between the two matmuls disappear, and the fused kernel takes as long as the "
                "matmuls do now.")))


def _softmaxes(trace: Trace, kernels: I64) -> Mask:
    name, op = trace.device.name[kernels], trace.device.tf_op[kernels]
    by_op = _matching(trace, op, "soft_?max", _SOFTMAX_OP_BUT) & ~_matching(trace, name, _FUSED_ATTENTION)
    return by_op | _matching(trace, name, _SOFTMAX, _NO_SOFTMAX)


def _batched_pairs(trace: Trace, first: I64, last: I64) -> Mask:
    """Mask of the pairs of products that are both of many matrices at once. What was launched before the recording has
    no call: such a pair counts as those with the same kernels whose calls are recorded, if these all do."""
    device = trace.device
    batched = kernel_rows.batched_products(trace, first) & kernel_rows.batched_products(trace, last)
    unseen = (device.tf_op[first] < 0) & (np.minimum(device.launch_ns[first], device.launch_ns[last]) < 0)
    if not unseen.any():
        return batched
    pair = device.name[first].astype(np.int64) << 32 | device.name[last]
    always = np.setdiff1d(pair[~unseen & batched], pair[~unseen & ~batched])
    return np.asarray(np.where(unseen, batched | np.isin(pair, always), batched), bool)


def describe_attention_unfused(v: AttentionUnfused, job: Job) -> Explanation:
    part = v.between_s / job.period_s
    action = ("Use fused attention, which does the scaling, masking, softmax, and dropout in one kernel and keeps the "
              "scores on chip.")
    return Explanation(
        title=f"Kernels between the two matmuls of unfused attention take {percent(part)} of the {job.basis}",
        why=f"Scaling, masking, and softmax run as separate kernels between two batched matmuls, {count(v.count)} "
            f"times per GPU in {job.each}, and take {percent(part)} of the {job.basis}. Each of these kernels reads "
            "and writes all scores, whose number grows with the square of the sequence length."
            + (" Fused attention also saves the reads and writes of scores in the two matmuls." if v.in_memory else "")
            + _named(v.names),
        evidence={"between_products_s": v.between_s, "softmax_s": v.softmax_s, "share_ratio": part,
                  "attentions_count": v.count},
        action=_NO_FLASH_KERNEL if v.fallback else action,
        snippet=None if v.fallback else joined(job.xla if job.framework == "tensorflow" else None,
                                               code("attention_unfused", job.framework)),
        source=source("attention_unfused.share", "attention_unfused.count", "attention_unfused.in_memory_s"))


# Kernels of cuDNN, of MIOpen, and of TensorFlow in ops that its layout optimizer has inserted or within convolutions.
_CONVERSION = r"nchw_?(?:to|2)_?nhwc|nhwc_?(?:to|2)_?nchw|batched_transpose_\d+x\d+|transpose_\w*NC?HW"
_CONVERSION_OP = r"TransposeN\w+ToN\w+-LayoutOptimizer"
# PyTorch's own kernels; those for NHWC have it in their names.
_NCHW_NORM, _NHWC_NORM = r"native::batch_norm_\w+_kernel", "channels_last"
_SWAP, _CONVOLUTION_OP = "SwapDimension", r":\w*Conv\dD"


class LayoutConversions(Verdict, frozen=True, kw_only=True):
    conversions_s: float  # per step and GPU
    norms_s: float  # the same, of PyTorch's batch normalization in NCHW
    count: float
    names: tuple[str, ...]


def judge_layout_conversions(facts: TraceFacts) -> LayoutConversions | None:
    """Tensors are transposed between NCHW and NHWC again and again, as convolutions want them one way and the model
    has them the other."""
    trace, kernels = facts.trace, kernel_rows.kernels_in_steps(facts)
    name, op = trace.device.name[kernels], trace.device.tf_op[kernels]
    conversion = _matching(trace, name, _CONVERSION) | _matching(trace, op, _CONVERSION_OP)
    conversion |= _matching(trace, name, _SWAP) & _matching(trace, op, _CONVOLUTION_OP)
    rows = kernels[conversion]
    seconds = _seconds(facts, rows)
    share = _beside_launch_waits(facts, seconds)
    if share < limit("layout_conversions.share"):
        return None
    return LayoutConversions(gpus=facts.active_numbers, share=share, claim="at least", conversions_s=seconds,
                             count=len(rows) / _per(facts), names=_longest(facts, rows), events=Events(rows),
                             norms_s=_seconds(facts, kernels[_matching(trace, name, _NCHW_NORM, _NHWC_NORM)]),
                             cure=Cure(scaled=((rows, 0.0),), assumes=(
                                 "Assumes that no tensor is converted. The speedup of NHWC is not included.")))


def describe_layout_conversions(v: LayoutConversions, job: Job) -> Explanation:
    part, norms = v.conversions_s / job.period_s, v.norms_s / job.period_s
    return Explanation(
        title=f"Conversions between NCHW and NHWC take {percent(part)} of the {job.basis}",
        why=f"In {job.each}, {count(v.count)} kernels per GPU do nothing but transpose tensors between the model's "
            "layout and the one that its convolution kernels need. These kernels take "
            f"{percent(part)} of the {job.basis}."
            + (f" Batch normalization in NCHW takes another {percent(norms)} and would be faster in NHWC."
               if norms >= limit("layout_conversions.share") else "") + _named(v.names),
        evidence={"conversions_s": v.conversions_s, "conversions_count": v.count, "share_ratio": part},
        action="Keep images in one layout throughout: NHWC for convolutions on tensor cores (16-bit types, TF32), NCHW "
               "for convolutions in FP32 without tensor cores.",
        snippet=code("layout_conversions", job.framework), source=source("layout_conversions.share"))


# Batch normalization by statistics that it does not compute is element-wise.
_TORCH_ELEMENTWISE = r"at(?:::|6)native.*(?:elementwise|batch_norm_transform_input)_kernel|cudnn.*bn_fw_inf_"
_INDUCTOR = r"triton_(?:poi|per|red|tem|for)_"


def judge_elementwise_unfused(facts: TraceFacts) -> kernel_rows.ChainedKernels | None:
    """PyTorch's element-wise kernels in a row, none of the optimizer's; torch.compile would make them one."""
    trace, kernels = facts.trace, kernel_rows.kernels_in_steps(facts)
    name = trace.device.name[kernels]
    if not Job.of(facts).compiles or _matching(trace, name, _INDUCTOR).any() or (
            not _matching(trace, name, _TORCH_ELEMENTWISE).any()):
        return None
    kernels = kernel_rows.by_stream(trace, kernels)
    chained = _matching(trace, trace.device.name[kernels], _TORCH_ELEMENTWISE)
    chained &= ~launched_in_calls(trace, kernels, OPTIMIZER_CALL)
    if (attention := judge_attention_unfused(facts)) is not None:
        chained &= ~np.isin(kernels, attention.events.rows)
    saved_s, chains = kernel_rows.chained_kernels(facts, kernels, chained)
    share = _beside_launch_waits(facts, saved_s)
    if share < limit("elementwise_unfused.share"):
        return None
    return replace(chains, share=share, severest="medium", cure=replace(
        chains.cure, host=_launched_within(facts, chains.events.rows)))


def _launched_within(facts: TraceFacts, chained: I64) -> dict[int, Spans]:
    """The host's time by GPU (index into ``Trace.gpus``) from the launch of one of these kernels to that of the next
    one: a fused chain has one launch."""
    device, out = facts.trace.device, {}
    is_chained = np.zeros(len(device), bool)
    is_chained[chained] = True
    for timeline in facts.gpu_timelines:
        rows = timeline.rows[device.launch_ns[timeline.events] >= 0]
        rows = rows[np.argsort(device.launch_ns[rows], kind="stable")]
        both = np.flatnonzero(is_chained[rows[:-1]] & is_chained[rows[1:]] & (
            device.launch_line[rows[:-1]] == device.launch_line[rows[1:]]))
        out[timeline.gpu] = union(device.launch_ns[rows[both]], device.launch_ns[rows[both + 1]])
    return out


def describe_elementwise_unfused(v: kernel_rows.ChainedKernels, job: Job) -> Explanation:
    part = v.chained_s / job.period_s
    return Explanation(
        title=f"A compiler could fuse element-wise kernels that take {percent(part)} of the {job.basis}",
        why=f"{v.chains:.0f} chains of element-wise kernels that run back to back on the same tensors take "
            f"{percent(part)} of the {job.basis}. Only a test shows how much fusion saves for this model.",
        evidence={"chained_s": v.chained_s, "chained_ratio": part, "chains_count": v.chains, "share_ratio": v.share},
        action="Part of the model is compiled, but without these kernels or with a backend that does not fuse them. "
               "Use the inductor backend, and find what breaks the graph." if job.compiled else
               "Try torch.compile on the model, and compare the step time after the slow first steps.",
        snippet=code("elementwise_unfused", "pytorch-compiled" if job.compiled else "pytorch"),
        gain=kernel_rows.UNCERTAIN, source=source("elementwise_unfused.share", "xla_off.chain"))


_APPLY_OP = r":Resource(?:Sparse)?Apply\w+$"


class OptimizerUnfused(Verdict, frozen=True, kw_only=True):
    count: float  # kernels per step and GPU
    kernels_s: float
    pauses_s: float  # per step and GPU, between two of them
    names: tuple[str, ...]


class OptimizerOnCpu(Verdict, frozen=True, kw_only=True):
    name: str  # "Adam"; empty: several
    tensors: float  # in each step
    update_s: float  # of a step without the profiler


def judge_optimizer_unfused(facts: TraceFacts) -> OptimizerUnfused | OptimizerOnCpu | Missing | None:
    """The optimizer has kernels for each variable, so short that launching them takes as long; without a GPU, ops."""
    if facts.framework == "pytorch" and computes_on_cpu(facts.trace):
        return _on_cpu(facts)
    if (missing := MISSING["gpu_activity"](facts)) is not None:
        return Missing(missing)
    trace, kernels = facts.trace, kernel_rows.kernels_in_steps(facts)
    device = trace.device
    by_optimizer = (_matching(trace, device.tf_op[kernels], _APPLY_OP)
                    | launched_in_calls(trace, kernels, OPTIMIZER_CALL))
    rows = kernels[by_optimizer & (device.kind[kernels] == Kind.COMPUTE)]
    count = len(rows) / _per(facts)
    if count < limit("optimizer_unfused.count"):
        return None
    if facts.steps is None:
        return Missing("steps to count the optimizer's kernels in each step")
    length = device.end_ns[rows] - device.start_ns[rows]
    short_ns = int(length[length < limit("optimizer_unfused.kernel_s") * 1e9].sum())
    pauses, chosen = {}, np.zeros(len(device), bool)
    chosen[rows] = True
    for timeline in facts.gpu_timelines:  # idle time between two of these kernels, with nothing else in between
        gaps, after = timeline.gaps, timeline.resumes
        both = chosen[timeline.rows[after]] & chosen[timeline.rows[after - 1]]
        pauses[timeline.gpu] = intersect(facts.analyzed_spans, Spans(gaps.start[both], gaps.end[both]))
    pauses_ns = sum(spans.total for spans in pauses.values())
    share = savings.removed((short_ns + pauses_ns) / _per(facts) / 1e9, facts.period_s)
    if share < limit("optimizer_unfused.share"):
        return None
    return OptimizerUnfused(gpus=facts.active_numbers, share=share, count=count, kernels_s=_seconds(facts, rows),
                            pauses_s=pauses_ns / _per(facts) / 1e9, names=_longest(facts, rows),
                            events=Events(rows), spans=pauses)


def _on_cpu(facts: TraceFacts) -> OptimizerOnCpu | None:
    """Judge optimizers that PyTorch can run in one call on a CPU."""
    steps, trace = facts.steps, facts.trace
    if steps is None or not facts.shares or name_mask(trace, _FUSED)[trace.host.name].any():
        return None
    names = {trace.names[i] for i in np.unique(trace.host.name[host_rows_in_steps(facts, OPTIMIZER_CALL)]).tolist()}
    fusable = {match[1] for name in names if (match := _FUSABLE.match(name))}
    update = optimizer_time(facts)
    if not fusable or len(fusable) < len(names):
        return None
    saved = min(update.saved, update.share * (1 - max(_LEFT.get(name, _LEFT_OF_OTHERS) for name in fusable)))
    if saved < limit("optimizer_unfused.cpu_share"):
        return None
    return OptimizerOnCpu(gpus=(), share=update.share, saving=saved, claim="about",
                          name=fusable.pop() if len(fusable) == 1 else "", tensors=update.tensors,
                          update_s=update.share * facts.period_s, spans={NO_GPU: update.spans})


def describe_optimizer_unfused(v: OptimizerUnfused | OptimizerOnCpu, job: Job) -> Explanation:
    if isinstance(v, OptimizerOnCpu):
        return Explanation(
            title=f"The optimizer takes {percent(v.share)} of the {job.basis}",
            why=f"{v.name or 'The optimizer'} updates {count(v.tensors)} tensors one after another, each with several "
                f"ops that read and write it again: {seconds(v.update_s)} in {job.each}, whatever the batch size.",
            evidence={"optimizer_s": v.update_s, "share_ratio": v.share},
            action="Update all parameters in one call: fused=True also works on CPUs, where foreach=True helps little. "
                   "What is left is shared among more samples by a larger batch, or by one update for several batches "
                   "(gradient accumulation).",
            snippet=code("eager_execution", "pytorch-optimizer", OPTIMIZER=v.name or "AdamW"),
            gain="assumes that one call leaves a quarter of Adam's time, or half of SGD's, as measured on CPUs",
            source=source("optimizer_unfused.cpu_share"))
    return Explanation(
        title=f"The optimizer's {v.count:,.0f} kernels cost {percent(v.share)} of the {job.basis}",
        why=f"The optimizer updates each variable with separate kernels: {v.count:,.0f} per GPU in {job.each}. The "
            f"gaps between these kernels take {percent(v.pauses_s / job.period_s)} of the {job.basis}."
            + _named(v.names),
        evidence={"kernels_per_step": v.count, "optimizer_kernels_s": v.kernels_s, "pauses_s": v.pauses_s,
                  "share_ratio": v.share},
        action="Update all variables in a few kernels, with a fused or compiled optimizer.",
        snippet=job.xla if job.framework == "tensorflow" else code("optimizer_unfused", job.framework),
        gain="assumes that the gaps and the kernels that are too short to do much work disappear",
        source=source("optimizer_unfused.share", "optimizer_unfused.count", "optimizer_unfused.kernel_s"))
