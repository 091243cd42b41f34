"""Number types: do matrix kernels use tensor cores, and do they use them well?

All of it rests on kernel names (:mod:`gputop.trace.kernel_names`), of the kernels that the table of the analysis
lists by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from gputop.advice import savings
from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import TraceFacts, kernels_named
from gputop.advice.trace.job import Job
from gputop.advice.verdict import Explanation, Missing, Verdict
from gputop.analysis.layers.culprits import Events
from gputop.analysis.results import KernelRow
from gputop.analysis.what_if.cure import Cure
from gputop.text.units import percent

_HAVE_TENSOR_CORES = (7, 0)
_TF32 = (8, 0)
# GPUs that say 7.5 and have none.
_WITHOUT = re.compile(r"GTX 16\d\d|\bT(4|5|6)00\b|MX4\d\d|MX550", re.IGNORECASE)
# The library's own kernels for a generation run on it and on later ones.
_BUILT_FOR = re.compile(r"(?:^|[^a-z])(?:sm|cutlass_)_?(\d\d\d?)_|(volta|turing|ampere|ada|hopper|blackwell)_",
                        re.IGNORECASE)
_GENERATIONS = {"volta": (7, 0), "turing": (7, 5), "ampere": (8, 0), "ada": (8, 9), "hopper": (9, 0),
                "blackwell": (10, 0)}
# 16-bit matrix kernels of the ordinary cores that the test for tensor cores does not tell apart.
_SIXTEEN_BIT_PLAIN = re.compile(r"(?<![a-z])hgemm|gemmSN|gemmk1|gemvx?::|gemv2|grouped_direct|direct_group",
                                re.IGNORECASE)
_ALIGNED = re.compile(r"align(?:a)?(\d+)(?!\d)|_ldg(\d)_", re.IGNORECASE)
_BYTES = {"fp16": 2, "bf16": 2, "tf32": 4, "fp8": 1, "int8": 1}

_TF32_ON = "tf.config.experimental.enable_tensor_float_32_execution(True)  # and no other setting that turns it off"
_MIXED = {
    "bf16": "keras.mixed_precision.set_global_policy('mixed_bfloat16')",
    "fp16": "keras.mixed_precision.set_global_policy('mixed_float16')  # scales the loss by itself with model.fit",
}
_SOFTMAX = "\noutputs = keras.layers.Activation('softmax', dtype='float32')(x)  # the last layer stays in float32"
_JAX_TF32 = "jax.config.update('jax_default_matmul_precision', 'tensorfloat32')  # or cast activations to jnp.bfloat16"
_TORCH_TF32 = "torch.set_float32_matmul_precision('high')  # TF32; or torch.autocast('cuda', dtype=torch.bfloat16)"
_TORCH_FP16 = ("scaler = torch.amp.GradScaler()\nwith torch.autocast('cuda', dtype=torch.float16):\n"
               "    loss = criterion(model(x), y)\nscaler.scale(loss).backward(); scaler.step(optimizer); "
               "scaler.update()")


class _Matmuls(Struct, frozen=True):
    """Shares of the compute kernels' summed time."""

    plain_fp32: float  # FP32 on the ordinary cores
    plain_16: float  # 16-bit on the ordinary cores
    tensor: float
    sixteen_bit: float  # any 16-bit kernel
    unaligned: float
    known: float  # tensor-core kernels whose name tells how operands are aligned
    least_bytes: int | None
    names: Mapping[str, tuple[str, ...]]  # of the kernels of plain_fp32, plain_16 and unaligned


def _matmuls(facts: TraceFacts) -> _Matmuls | None:
    table = facts.analysis.kernels
    rows = [row for row in table.by_name if not row.collective] if table else []
    whole = sum(row.time_s for row in rows)
    if whole <= 0:
        return None
    plain_fp32 = plain_16 = tensor = sixteen = unaligned = known = 0.0
    least: int | None = None
    names: dict[str, tuple[str, ...]] = {"plain_fp32": (), "plain_16": (), "unaligned": ()}
    for row in rows:
        kept = row.types.get("fp16", 0.0) + row.types.get("bf16", 0.0)
        sixteen += row.time_s * kept
        if row.names > 1 or not row.name:
            continue  # the rest, whose types and cores are mixed
        dtype = next(iter(row.types), "")
        if row.tensor_core == 0 or (row.tensor_core is None and kept and _SIXTEEN_BIT_PLAIN.search(row.name)):
            plain_16 += row.time_s if kept else 0.0
            plain_fp32 += row.time_s if dtype == "fp32" else 0.0
            if kept or dtype == "fp32":
                names["plain_16" if kept else "plain_fp32"] += (row.name,)
        elif row.tensor_core:
            tensor += row.time_s
            aligned = _aligned_bytes(row, dtype)
            if aligned is not None:
                known += row.time_s
                if aligned <= limit("dims_unaligned.bytes"):
                    unaligned += row.time_s
                    names["unaligned"] += (row.name,)
                    least = aligned if least is None else min(least, aligned)
    return _Matmuls(plain_fp32 / whole, plain_16 / whole, tensor / whole, sixteen / whole, unaligned / whole,
                    known / whole, least, names)


def _kernels(facts: TraceFacts, names: Sequence[str], what: str, factor: float) -> dict[str, Any]:
    """The compute kernels with one of these names, and as the cure that they take less time by the factor."""
    rows = kernels_named(facts, names)
    return {"events": Events(rows), "cure": Cure(
        scaled=((rows, 1 / factor),),
        assumes=f"{what} take 1/{factor:g} of their time; kernels bound by memory gain less.")}


def _aligned_bytes(row: KernelRow, dtype: str) -> int | None:
    """How many bytes a thread may load at once, as the kernel's name tells; None where it does not."""
    found = [int(a or b) for a, b in _ALIGNED.findall(row.name.split("(", 1)[0])]
    return min(found) * _BYTES[dtype] if found and dtype in _BYTES else None


def tensor_cores(facts: TraceFacts) -> tuple[int, int] | bool | None:
    """The least compute capability of the GPUs; False where they have no tensor cores, None where it is not known."""
    gpus = [gpu for gpu in facts.trace.gpus if gpu.compute_capability is not None]
    if any(_WITHOUT.search(gpu.name) for gpu in facts.trace.gpus):
        return False
    if gpus:
        least = min(gpu.compute_capability or (0, 0) for gpu in gpus)
        return least if least >= _HAVE_TENSOR_CORES else False
    table = facts.analysis.kernels
    built = [m for row in (table.by_name if table else ()) if (m := _BUILT_FOR.search(row.name)) is not None]
    versions = [(int(m[1][:-1]), int(m[1][-1])) if m[1] else _GENERATIONS[m[2].lower()] for m in built]
    newest = max((v for v in versions if v >= _HAVE_TENSOR_CORES), default=None)
    return newest


def _compute_s(facts: TraceFacts) -> float:
    """Mean time of a GPU's compute kernels per step, or in the window; no more than the breakdown has for it."""
    gpus = facts.active
    own = sum(gpu.compute * gpu.window_s if gpu.compute_s_per_step is None else gpu.compute_s_per_step
              for gpu in gpus) / len(gpus)
    return min(own, facts.shares["compute"] * facts.period_s) if facts.shares is not None else own


def _mixed(matmuls: _Matmuls) -> bool:
    return matmuls.sixteen_bit >= limit("precision.sixteen_bit")


def _assumes(what: str, speedup: str = "precision.speedup") -> str:
    """What the estimated saving assumes."""
    return f"assumes that {what} take 1/{limit(speedup):g} of their time; memory-bound ones gain less"


# -- tensor_cores_unused ----------------------------------------------------------------------------

class TensorCoresUnused(Verdict, frozen=True, kw_only=True):
    """``share`` is what tensor cores would save."""

    fp32_part: float  # share of the kernels' time: matrix kernels in FP32 on the ordinary cores
    fp32_s: float  # their seconds per step
    tensor_part: float  # share of the kernels' time on tensor cores
    tf32: bool  # the GPUs have TF32


def judge_tensor_cores_unused(facts: TraceFacts) -> TensorCoresUnused | Missing | None:
    """Matmuls and convolutions run in FP32 on the ordinary cores of GPUs that have tensor cores."""
    matmuls = _matmuls(facts)
    if matmuls is None or not matmuls.plain_fp32 or _mixed(matmuls):
        return None
    capability = tensor_cores(facts)
    if capability is False:
        return None
    if capability is None:
        return Missing("the GPUs' compute capability, which neither the trace nor a kernel's name tells")
    assert not isinstance(capability, bool)
    part = matmuls.plain_fp32
    fp32_s = part * _compute_s(facts)
    share = savings.faster(fp32_s, limit("precision.speedup"), facts.period_s)
    # What little compute there is may still be wholly on the wrong cores: worth knowing, if not worth much.
    if share < limit("precision.share") and part < 0.5:
        return None
    return TensorCoresUnused(gpus=facts.active_numbers, share=share, saving=share, fp32_part=part, fp32_s=fp32_s,
                             tensor_part=matmuls.tensor, tf32=capability >= _TF32,
                             **_kernels(facts, matmuls.names["plain_fp32"], "Matrix kernels that are now in FP32",
                                        limit("precision.speedup")))


def describe_tensor_cores_unused(v: TensorCoresUnused, job: Job) -> Explanation:
    why = (f"{percent(v.fp32_part)} of the kernel time is matrix multiplication in FP32 on the ordinary cores (FFMA); "
           f"these GPUs' tensor cores are several times as fast {'with TF32 or BF16' if v.tf32 else 'with FP16'}.")
    if v.tf32 and job.framework == "tensorflow":
        why += " TensorFlow uses TF32 by default, so something has turned it off or has set the type."
    return Explanation(
        title=f"FP32 without tensor cores takes {percent(v.fp32_part)} of the kernel time", why=why,
        evidence={"fp32_matmul_of_kernels_ratio": v.fp32_part, "fp32_matmul_s": v.fp32_s,
                  "share_ratio": v.fp32_s / job.period_s, "tensor_core_of_kernels_ratio": v.tensor_part},
        action="Let FP32 matmuls run as TF32 and train in mixed precision with BF16, which needs no loss scaling."
               if v.tf32 else "Train in mixed precision with FP16 and dynamic loss scaling; keep the softmax in FP32.",
        snippet=_precision_snippet(job.framework, v.tf32),
        gain=_assumes("matmuls now in FP32"), source=source("precision.share", "precision.speedup"),
    )


def _precision_snippet(framework: str, tf32: bool) -> str | None:
    if framework == "tensorflow":
        return (f"{_TF32_ON}\n{_MIXED['bf16']}" if tf32 else _MIXED["fp16"]) + _SOFTMAX
    if framework == "jax":
        return _JAX_TF32 if tf32 else "x, params = jax.tree.map(lambda a: a.astype(jnp.float16), (x, params))"
    if framework == "pytorch":
        return _TORCH_TF32 if tf32 else _TORCH_FP16
    return None


# -- fp16_fallback ----------------------------------------------------------------------------------

class Fp16Fallback(Verdict, frozen=True, kw_only=True):
    """``share`` is what tensor cores would save; the rest are shares of the kernels' time."""

    plain_16: float  # matrix kernels in 16 bits on the ordinary cores
    plain_fp32: float  # and in FP32
    sixteen_bit: float  # all kernels in 16 bits
    fallback_s: float  # seconds per step of those that fall back

    @property
    def fallback_part(self) -> float:
        return self.plain_16 + self.plain_fp32


def judge_fp16_fallback(facts: TraceFacts) -> Fp16Fallback | None:
    """Mixed precision is on, yet matrix kernels run on the ordinary cores: in 16 bits or back in FP32."""
    matmuls = _matmuls(facts)
    if matmuls is None or not _mixed(matmuls) or tensor_cores(facts) is False:
        return None
    fallback_s = (matmuls.plain_16 + matmuls.plain_fp32) * _compute_s(facts)
    share = savings.faster(fallback_s, limit("precision.speedup"), facts.period_s)
    if share < limit("precision.share"):
        return None
    return Fp16Fallback(gpus=facts.active_numbers, share=share, plain_16=matmuls.plain_16,
                        plain_fp32=matmuls.plain_fp32, sixteen_bit=matmuls.sixteen_bit, fallback_s=fallback_s,
                        **_kernels(facts, matmuls.names["plain_16"] + matmuls.names["plain_fp32"],
                                   "These matrix kernels, on tensor cores,", limit("precision.speedup")))


def describe_fp16_fallback(v: Fp16Fallback, job: Job) -> Explanation:
    part = v.fallback_part
    return Explanation(
        title=f"Mixed precision is on, but {percent(part)} of the kernel time does not use tensor cores",
        why=f"Kernels in 16 bits take {percent(v.sixteen_bit)} of the kernel time. Matrix kernels on the ordinary "
            f"cores take {percent(part)} of it ({percent(v.plain_16)} in 16 bits, {percent(v.plain_fp32)} in FP32).",
        evidence={"fallback_of_kernels_ratio": part, "fallback_16_bit_ratio": v.plain_16,
                  "fallback_fp32_ratio": v.plain_fp32, "sixteen_bit_ratio": v.sixteen_bit,
                  "share_ratio": v.fallback_s / job.period_s},
        action="Find the layers behind these kernels. Give them channels and units in multiples of 8, NHWC layout, "
               "ordinary instead of depthwise convolutions, and inputs in the compute type.",
        snippet="layer = keras.layers.Dense(units=-(-units // 8) * 8)  # multiples of 8; convolutions: filters "
                "likewise\n"
                "print(layer.compute_dtype)  # float16 or bfloat16 under the policy"
                if job.framework == "tensorflow" else None,
        gain=_assumes("these kernels on tensor cores"),
        source=source("precision.share", "precision.sixteen_bit", "precision.speedup")
        + "; DLProf: eligible ops without tensor cores",
    )


# -- dims_unaligned ---------------------------------------------------------------------------------

class DimsUnaligned(Verdict, frozen=True, kw_only=True):
    """``share`` is what aligned dimensions would save."""

    unaligned_part: float  # share of the kernels' time
    unaligned_s: float  # per step
    least_bytes: int | None  # the worst alignment
    tensor_part: float  # share of the kernels' time on tensor cores


def judge_dims_unaligned(facts: TraceFacts) -> DimsUnaligned | Missing | None:
    """Tensor-core kernels that load one or two values at a time, since dimensions are no multiples of 8."""
    matmuls = _matmuls(facts)
    if matmuls is None or not matmuls.tensor:
        return None
    if not matmuls.known:
        return Missing("kernel names that tell the operands' alignment (CUTLASS: align8, align1)")
    unaligned_s = matmuls.unaligned * _compute_s(facts)
    share = savings.faster(unaligned_s, limit("dims_unaligned.speedup"), facts.period_s)
    if share < limit("precision.share"):
        return None
    return DimsUnaligned(gpus=facts.active_numbers, share=share, unaligned_part=matmuls.unaligned,
                         unaligned_s=unaligned_s, least_bytes=matmuls.least_bytes, tensor_part=matmuls.tensor,
                         **_kernels(facts, matmuls.names["unaligned"], "These matrix kernels, aligned,",
                                    limit("dims_unaligned.speedup")))


def describe_dims_unaligned(v: DimsUnaligned, job: Job) -> Explanation:
    return Explanation(
        title=f"Unaligned dimensions slow down kernels that take {percent(v.unaligned_part)} of the kernel time",
        why=f"Matrix kernels that take {percent(v.unaligned_part)} of the kernel time use tensor cores in slower "
            f"variants, for operands that are aligned to {v.least_bytes} bytes only. The reason is a dimension that is "
            "not a multiple of 8 (16 bytes).",
        evidence={"unaligned_of_kernels_ratio": v.unaligned_part, "unaligned_s": v.unaligned_s,
                  "aligned_bytes": float(v.least_bytes or 0), "tensor_core_of_kernels_ratio": v.tensor_part,
                  "share_ratio": v.unaligned_s / job.period_s},
        action="Pad batch size, vocabulary, units and channels to multiples of 8 (64 is better still) for 16-bit "
               "types.",
        snippet="vocabulary = -(-vocabulary // 64) * 64  # pad; likewise units, channels and the batch size, to 8 "
                "at least",
        gain=_assumes("these kernels, aligned,", "dims_unaligned.speedup"),
        source=source("precision.share", "dims_unaligned.bytes", "dims_unaligned.speedup"),
    )
