"""Number types: do matrix kernels use tensor cores, and do they use them well?

All of it rests on kernel names (:mod:`gputop.trace.kernel_names`), of the kernels that the table of the analysis
lists by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from gputop.advice import savings
from gputop.advice.fix_code import code
from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import TraceFacts, kernels_named
from gputop.advice.trace.job import Job
from gputop.advice.trace.kernel_rows import batched_products
from gputop.advice.verdict import Explanation, Missing, Verdict
from gputop.analysis.layers.culprits import Events
from gputop.analysis.results import KernelRow
from gputop.analysis.what_if.cure import Cure
from gputop.text.units import listed, percent, reads_zero
from gputop.trace.kernel_names import short_kernel

_HAVE_TENSOR_CORES = (7, 0)
_TF32 = (8, 0)
# GPUs that say 7.5 and have none.
_WITHOUT = re.compile(r"GTX 16\d\d|\bT(4|5|6)00\b|MX4\d\d|MX550", re.IGNORECASE)
# The library's own kernels for a generation run on it and on later ones.
_BUILT_FOR = re.compile(r"(?:^|[^a-z])(?:sm|cutlass_)_?(\d\d\d?)(?:_|\b)|(volta|turing|ampere|ada|hopper|blackwell)_",
                        re.IGNORECASE)
_GENERATIONS = {"volta": (7, 0), "turing": (7, 5), "ampere": (8, 0), "ada": (8, 9), "hopper": (9, 0),
                "blackwell": (10, 0)}
# 16-bit matrix kernels of the ordinary cores that the test for tensor cores does not tell apart.
_SIXTEEN_BIT_PLAIN = re.compile(r"(?<![a-z])hgemm|gemmSN|gemmk1|gemvx?::|gemv2|grouped_direct|direct_group",
                                re.IGNORECASE)
# What converts or moves numbers is no product, whatever types its name has.
_NO_PRODUCT = re.compile(r"convert|(?<!broad)cast|copy|quanti[sz]e|codec|elementwise|pointwise|transpose|multi_tensor|"
                         r"nccl", re.IGNORECASE)
_FLASH = re.compile(r"flash_?(?:fwd|bwd)", re.IGNORECASE)  # runs in 16 or 8 bits only
_SIXTEEN_BITS = ("fp16", "bf16")
_ATTENTION = re.compile(r"fmha|attention", re.IGNORECASE)
_ALIGNED = re.compile(r"align(?:a)?(\d{1,4})(?!\d)|_ldg(\d)_", re.IGNORECASE)
_ALIGNED_BYTES = 16
_BYTES = {"fp16": 2, "bf16": 2, "tf32": 4, "fp8": 1, "int8": 1}


class Matmuls(Struct, frozen=True):
    """Shares of the compute kernels' summed time."""

    plain_fp32: float  # FP32 on the ordinary cores
    plain_16: float  # 16-bit on the ordinary cores
    tensor: float
    attention_32: float  # fused attention in FP32, or in products of TF32 that give FP32
    tensor_32: float  # other products on tensor cores that read 32 bits: TF32
    sixteen_bit: float  # matrix and attention kernels in 16 or 8 bits
    unaligned: float
    known: float  # tensor-core kernels whose name tells how operands are aligned
    least_bytes: int | None
    unaligned_bytes: int  # of an element of the narrowest type among the unaligned kernels
    names: Mapping[str, tuple[str, ...]]  # of the kernels of plain_fp32 to tensor_32, and unaligned


def _matmuls(facts: TraceFacts) -> Matmuls | None:
    table = facts.analysis.kernels
    rows = [row for row in table.by_name if not row.collective] if table else []
    whole = sum(row.time_s for row in rows)
    if whole <= 0:
        return None
    times = dict.fromkeys(("plain_fp32", "plain_16", "tensor", "attention_32", "tensor_32", "sixteen_bit",
                           "unaligned", "known"), 0.0)
    names: dict[str, tuple[str, ...]] = {}
    least: int | None = None
    element = max(_BYTES.values())
    for row in rows:
        if row.names > 1 or not row.name:
            continue  # the rest, whose types and cores are mixed
        dtype = next(iter(row.types), "")
        parts = _parts(row, dtype)
        alignments = [int(a or b) for a, b in _ALIGNED.findall(row.name.split("(", 1)[0])]
        if "tensor" in parts and alignments and dtype in _BYTES:
            aligned = min(alignments) * _BYTES[dtype]  # that a thread may load at once, by the kernel's name
            parts.append("known")
            if aligned <= limit("dims_unaligned.bytes"):
                parts.append("unaligned")
                least = aligned if least is None else min(least, aligned)
                element = min(element, _BYTES[dtype])
        for part in parts:
            times[part] += row.time_s / whole
            names[part] = (*names.get(part, ()), row.name)
    return Matmuls(**times, least_bytes=least, unaligned_bytes=element, names=names)


def _parts(row: KernelRow, dtype: str) -> list[str]:
    """The parts of :class:`Matmuls` that a kernel's time counts for; none for what is no product."""
    if _NO_PRODUCT.search(short_kernel(row.name)):
        return []
    sixteen = dtype in _SIXTEEN_BITS
    if dtype == "fp32" and row.tensor_core != 0 and _ATTENTION.search(short_kernel(row.name)):
        return ["tensor", "attention_32"] if row.tensor_core else ["attention_32"]
    if row.tensor_core == 0 or (row.tensor_core is None and sixteen and _SIXTEEN_BIT_PLAIN.search(row.name)):
        return ["plain_16", "sixteen_bit"] if sixteen else ["plain_fp32"] if dtype == "fp32" else []
    if not row.tensor_core:
        return []
    return ["tensor"] + (["sixteen_bit"] if dtype in _SIXTEEN_BITS or dtype in ("fp8", "int8") else
                         ["tensor_32"] if dtype in ("tf32", "fp32") and not _FLASH.search(row.name) else [])


def _kernels(facts: TraceFacts, names: Sequence[str], what: str, factor: float) -> dict[str, Any]:
    """The compute kernels with one of these names, and as the cure that they take less time by the factor."""
    rows = kernels_named(facts, names)
    return {"events": Events(rows), "claim": "about", "cure": Cure(
        scaled=((rows, 1 / factor),),
        assumes=f"Assumes that these matrix kernels take {percent(1 / factor)} of the time {what}; memory-bound "
                "kernels gain less.")}


def tensor_cores(facts: TraceFacts) -> tuple[int, int] | Literal[False] | None:
    """The least compute capability of the GPUs; False where they have no tensor cores, None where it is not known."""
    if any(_WITHOUT.search(gpu.name) for gpu in facts.trace.gpus):
        return False
    if (least := facts.least_capability) is not None:
        return least if least >= _HAVE_TENSOR_CORES else False
    table = facts.analysis.kernels
    built = [m for row in (table.by_name if table else ()) if (m := _BUILT_FOR.search(row.name)) is not None]
    versions = [(int(m[1][:-1]), int(m[1][-1])) if m[1] else _GENERATIONS[m[2].lower()] for m in built]
    return max((version for version in versions if version >= _HAVE_TENSOR_CORES), default=None)


def _compute_s(facts: TraceFacts) -> float:
    """Mean time of a GPU's compute kernels per step, or in the window; no more than the breakdown has for it."""
    gpus = facts.active
    kernels_s = sum(gpu.compute * gpu.window_s if gpu.compute_s_per_step is None else gpu.compute_s_per_step
                    for gpu in gpus) / len(gpus)
    return min(kernels_s, facts.shares["compute"] * facts.period_s)


def _mixed(matmuls: Matmuls) -> bool:
    return matmuls.sixteen_bit >= limit("precision.sixteen_bit")


class TensorCoresUnused(Verdict, frozen=True, kw_only=True):
    """``share`` is what the estimate saves: tensor cores where they are unused, and 16 bits."""

    matmuls: Matmuls
    mixed: bool  # other matrix kernels run in 16 bits already
    plain_fp32: float  # share of the kernels' time in FP32 on the ordinary cores; 0 where ``mixed``
    fp32_s: float  # the seconds per step of this and of what reads 32 bits on tensor cores
    tf32: bool  # the GPUs have TF32


def judge_tensor_cores_unused(facts: TraceFacts) -> TensorCoresUnused | Missing | None:
    """Matrix and attention kernels run in 32 bits on GPUs that have tensor cores: in FP32 on the ordinary cores
    (tensor_cores_unused), or on tensor cores (sixteen_bit_unused).

    Where mixed precision is on, FP32 on the ordinary cores is fp16_fallback's.
    """
    matmuls = _matmuls(facts)
    if matmuls is None:
        return None
    mixed = _mixed(matmuls)
    plain = 0.0 if mixed else matmuls.plain_fp32
    capability = tensor_cores(facts)
    part = plain + matmuls.attention_32 + matmuls.tensor_32
    if not part or capability is False:
        return None
    if capability is None:
        return Missing("to know the compute capability of the GPUs, which neither the trace nor any kernel name shows")
    compute_s = _compute_s(facts)
    share = savings.faster((plain + matmuls.attention_32) * compute_s, limit("precision.speedup"), facts.period_s)
    share += savings.faster(matmuls.tensor_32 * compute_s, limit("precision.tf32_speedup"), facts.period_s)
    # What little compute there is may still be wholly on the wrong cores: worth knowing, if not worth much.
    if share < limit("precision.share") and plain < 0.5:
        return None
    slow = kernels_named(facts, (*(() if mixed else matmuls.names.get("plain_fp32", ())),
                                 *matmuls.names.get("attention_32", ())))
    tf32 = kernels_named(facts, matmuls.names.get("tensor_32", ()))
    return TensorCoresUnused(
        gpus=facts.active_numbers, share=share, claim="about",
        id=None if plain >= matmuls.attention_32 + matmuls.tensor_32 else "sixteen_bit_unused",
        # TF32 is the default and uses tensor cores: how much 16 bits bring beyond it only a test shows.
        severity="low" if matmuls.tensor_32 > part / 2 else None,
        matmuls=matmuls, mixed=mixed, plain_fp32=plain, fp32_s=part * compute_s, tf32=capability >= _TF32,
        events=Events(np.concatenate((slow, tf32))), cure=Cure(
            scaled=((slow, 1 / limit("precision.speedup")), (tf32, 1 / limit("precision.tf32_speedup"))),
            assumes=f"Assumes that {_assumed(bool(len(slow)), bool(len(tf32)))}."))


def _assumed(fp32: bool, tf32: bool) -> str:
    """Assumption of the estimate for 16 bits, in words."""
    parts = ([f"FP32 kernels take about {percent(1 / limit('precision.speedup'))}"] if fp32 else []) + (
        [f"TF32 kernels take about {percent(1 / limit('precision.tf32_speedup'))}"] if tf32 else [])
    return (f"in 16-bit precision, {' and '.join(parts)} of the time; memory-bound kernels gain less, large matmuls "
            "gain more")


def describe_tensor_cores_unused(v: TensorCoresUnused, job: Job) -> Explanation:
    attention, products = v.matmuls.attention_32, v.matmuls.tensor_32
    taking = [f"{what} take {percent(part)}" for part, what in (
        (v.plain_fp32, "FP32 matmuls on CUDA cores (FFMA)"),
        (attention, "FP32 attention kernels"), (products, "TF32 matmuls"))
        if not reads_zero(part)]
    kinds = f"{listed(taking)} of the kernel time"
    sixteen = "BF16" if v.tf32 else "FP16"
    if v.id is None:
        title = f"FP32 without tensor cores takes {percent(v.plain_fp32)} of the kernel time"
        why = (f"{kinds}. The tensor cores of these GPUs are several times as fast in "
               f"{'TF32 or BF16' if v.tf32 else 'FP16'}.")
        if v.tf32 and job.framework == "tensorflow":
            why += " TensorFlow uses TF32 by default, so a setting must be disabling it or forcing another type."
    else:
        title = (f"Attention in FP32 takes {percent(attention)}" if attention >= products else
                 f"Matrix kernels in TF32 take {percent(products)}") + " of the kernel time"
        why = f"{kinds}. In {sixteen}, these kernels read half the bytes and multiply faster."
        if v.mixed:
            why += " Other matmuls already run in 16-bit precision, so mixed precision does not cover these layers."
    why += " Only a test shows how much 16-bit precision saves."
    kind = "fp16" if not v.tf32 else "tf32" if v.id is None else "bf16"
    if job.trains is False:
        action = f"Run the model in {sixteen}, and compare its outputs with the current outputs."
        kind = "run" if job.framework == "pytorch" else kind
    elif not v.tf32:
        action = "Train in mixed precision with FP16 and dynamic loss scaling; keep the softmax in FP32."
    else:
        action = (f"{'Let FP32 matmuls run as TF32 and train' if v.id is None else 'Train'} in mixed precision with "
                  "BF16, which needs no loss scaling.")
    return Explanation(
        title=title, why=why,
        evidence={name: value for name, value in (
            ("fp32_matmul_of_kernels_ratio", v.plain_fp32), ("fp32_attention_of_kernels_ratio", attention),
            ("tf32_matmul_of_kernels_ratio", products), ("matmul_32_bit_s" if v.id else "fp32_matmul_s", v.fp32_s),
            ("share_ratio", v.fp32_s / job.period_s), ("tensor_core_of_kernels_ratio", v.matmuls.tensor))
            if not reads_zero(value) or not name.endswith("_kernels_ratio") or name == "tensor_core_of_kernels_ratio"},
        action=action,
        snippet=code("tensor_cores_unused", f"{job.framework}-{kind}", TYPE="bfloat16" if v.tf32 else "float16"),
        source=source("precision.share", "precision.speedup", "precision.tf32_speedup"))


class Fp16Fallback(Verdict, frozen=True, kw_only=True):
    """``share`` is what tensor cores would save."""

    matmuls: Matmuls
    fallback_s: float  # seconds per step of those that fall back


def judge_fp16_fallback(facts: TraceFacts) -> Fp16Fallback | None:
    """Mixed precision is on, yet matrix kernels run on the ordinary cores: in 16 bits or back in FP32."""
    matmuls = _matmuls(facts)
    if matmuls is None or not _mixed(matmuls) or tensor_cores(facts) is False:
        return None
    fallback_s = (matmuls.plain_16 + matmuls.plain_fp32) * _compute_s(facts)
    share = savings.faster(fallback_s, limit("precision.speedup"), facts.period_s)
    if share < limit("precision.share"):
        return None
    return Fp16Fallback(gpus=facts.active_numbers, share=share, matmuls=matmuls, fallback_s=fallback_s,
                        **_kernels(facts, matmuls.names.get("plain_16", ()) + matmuls.names.get("plain_fp32", ()),
                                   "on tensor cores", limit("precision.speedup")))


def describe_fp16_fallback(v: Fp16Fallback, job: Job) -> Explanation:
    plain_16, plain_fp32, sixteen_bit = v.matmuls.plain_16, v.matmuls.plain_fp32, v.matmuls.sixteen_bit
    part = plain_16 + plain_fp32
    return Explanation(
        title=f"Mixed precision is on, but {percent(part)} of the kernel time does not use tensor cores",
        why=f"16-bit matrix kernels take {percent(sixteen_bit)} of the kernel time. Matrix kernels on CUDA cores take "
            f"{percent(part)} of the kernel time ({percent(plain_16)} in 16-bit precision, {percent(plain_fp32)} in "
            "FP32).",
        evidence={"fallback_of_kernels_ratio": part, "fallback_16_bit_ratio": plain_16,
                  "fallback_fp32_ratio": plain_fp32, "sixteen_bit_ratio": sixteen_bit,
                  "share_ratio": v.fallback_s / job.period_s},
        action="In the layers that run these kernels, use channel and unit counts that are multiples of 8, the NHWC "
               "layout, regular rather than depthwise convolutions, and inputs in the compute type.",
        snippet=code("fp16_fallback", job.framework),
        source=source("precision.share", "precision.sixteen_bit", "precision.speedup")
        + "; DLProf: reports eligible ops that do not use tensor cores")


_SMALL_PART = 0.1  # share of these kernels' time
_CONVOLUTION = re.compile(r"conv|fprop|dgrad|wgrad|implicit", re.IGNORECASE)
_DIMENSIONS = {
    "attention": "the sequence length or the head size", "convolutions": "the number of channels",
    "other matmuls": "the number of units, the vocabulary size, or the batch size"}
_PAD = {
    "attention": "Pad sequences to a multiple of {0} (64 is even better) and mask the padding; use a head size that is "
                 "a multiple of {0}. Padding the vocabulary does not change attention.",
    "convolutions": "Use channel counts that are multiples of {0} in convolutions and in the input images.",
    "other matmuls": "Pad the batch size, the vocabulary, and the units to multiples of {0} (64 is even better).",
}


class DimsUnaligned(Verdict, frozen=True, kw_only=True):
    """``share`` is what aligned dimensions would save."""

    matmuls: Matmuls
    unaligned_s: float  # per step
    multiple: int  # of which aligned dimensions are one: 16 bytes of the kernels' narrowest type
    products: Sequence[str]  # keys of _DIMENSIONS: what these kernels are, longest first, without small parts


def judge_dims_unaligned(facts: TraceFacts) -> DimsUnaligned | Missing | None:
    """Tensor-core kernels that load one or two values at a time, since dimensions are no multiples of 8."""
    matmuls = _matmuls(facts)
    if matmuls is None or not matmuls.tensor:
        return None
    if not matmuls.known:
        return Missing("kernel names that show the alignment of the operands (CUTLASS: align8, align1)")
    unaligned_s = matmuls.unaligned * _compute_s(facts)
    share = savings.faster(unaligned_s, limit("dims_unaligned.speedup"), facts.period_s)
    if share < limit("precision.share"):
        return None
    return DimsUnaligned(gpus=facts.active_numbers, share=share, matmuls=matmuls, unaligned_s=unaligned_s,
                         multiple=_ALIGNED_BYTES // matmuls.unaligned_bytes,
                         products=_products(facts, matmuls.names.get("unaligned", ())),
                         **_kernels(facts, matmuls.names.get("unaligned", ()), "with aligned operands",
                                    limit("dims_unaligned.speedup")))


def _products(facts: TraceFacts, names: Sequence[str]) -> tuple[str, ...]:
    """Kinds of the kernels of these names: of many matrices at once, as attention's, convolutions, or others."""
    trace = facts.trace
    rows = kernels_named(facts, names)
    kernels = [(trace.names[name], trace.names[op] if op >= 0 else "") for name, op in zip(
        trace.device.name[rows].tolist(), trace.device.tf_op[rows].tolist(), strict=True)]
    convolution = np.array([any(map(_CONVOLUTION.search, kernel)) for kernel in kernels], bool)
    attention = np.array([any(map(_ATTENTION.search, kernel)) for kernel in kernels], bool)
    if facts.framework != "jax":  # its ops do not say how many matrices they multiply
        attention |= batched_products(trace, rows)
    length = trace.device.end_ns[rows] - trace.device.start_ns[rows]
    times = {"attention": int(length[attention & ~convolution].sum()), "convolutions": int(length[convolution].sum()),
             "other matmuls": int(length[~(attention | convolution)].sum())}
    return tuple(sorted((kind for kind, time in times.items() if time >= _SMALL_PART * length.sum()),
                        key=lambda kind: -times[kind]))


def describe_dims_unaligned(v: DimsUnaligned, job: Job) -> Explanation:
    matmuls = v.matmuls
    kinds = v.products if len(v.products) > 1 else [kind.removeprefix("other ") for kind in v.products]
    dimensions = "".join(f" In {kind}, the dimension is {_DIMENSIONS[of]}."
                         for kind, of in zip(kinds, v.products, strict=True))
    return Explanation(
        title=f"Unaligned dimensions slow down kernels that take {percent(matmuls.unaligned)} of the kernel time",
        why=f"Matrix kernels that take {percent(matmuls.unaligned)} of the kernel time use slower tensor core variants "
            f"because their operands are aligned to only {matmuls.least_bytes} bytes. The reason is a dimension that "
            f"is not a multiple of {v.multiple} (16 bytes).{dimensions}",
        evidence={"unaligned_of_kernels_ratio": matmuls.unaligned, "unaligned_s": v.unaligned_s,
                  "aligned_bytes": float(matmuls.least_bytes or 0), "tensor_core_of_kernels_ratio": matmuls.tensor,
                  "share_ratio": v.unaligned_s / job.period_s},
        action=" ".join(_PAD[kind].format(v.multiple) for kind in v.products),
        snippet=code("dims_unaligned", job.framework if v.products[:1] == ("attention",) else "units",
                     MULTIPLE=v.multiple),
        source=source("precision.share", "dims_unaligned.bytes", "dims_unaligned.speedup"))
