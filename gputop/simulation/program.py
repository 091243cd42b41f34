"""The kernels that one GPU runs in a step: name, TensorFlow op, phase and mean time, in launch order.

The names are those of real traces of a transformer in bfloat16 on an H100: cuBLAS' and CUTLASS' matrix kernels,
TensorFlow's generated element-wise kernels, and XLA's fusions.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gputop.simulation.job import SimulatedJob

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]


class Phase(IntEnum):
    """Parts of a step. Kernels of the extra phase run on GPU 0 alone, between forward and backward pass."""

    FORWARD = 0
    BACKWARD = 1
    APPLY = 2
    EXTRA = 3


# cuBLAS' and CUTLASS' own names, as they stand in traces.
_GEMM = (
    "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT",
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN",
    "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_64x4_nn_align8>(Params)",
)
# (kind, op name in the layer, op type) of the forward and of the backward pass of one layer; weight by kind below.
LAYER = (
    (("norm", "layer_norm", "FusedBatchNormV3"), ("gemm", "attention/qkv", "MatMul"), ("bias", "attention/qkv",
                                                                                       "BiasAdd"),
     ("gemm", "attention/scores", "BatchMatMulV2"), ("softmax", "attention/softmax", "Softmax"),
     ("gemm", "attention/values", "BatchMatMulV2"), ("gemm", "attention/output", "MatMul"), ("ew", "add", "AddV2"),
     ("norm", "layer_norm_1", "FusedBatchNormV3"), ("gemm", "mlp/dense", "MatMul"), ("act", "mlp/gelu", "Erf"),
     ("gemm", "mlp/dense_1", "MatMul")),
    (("gemm", "mlp/dense_1/MatMul", "MatMul"), ("gemm", "mlp/dense_1/MatMul_1", "MatMul"),
     ("reduce", "mlp/dense_1/BiasAddGrad", "BiasAddGrad"), ("ew", "mlp/gelu/mul", "Mul"),
     ("gemm", "mlp/dense/MatMul", "MatMul"), ("gemm", "mlp/dense/MatMul_1", "MatMul"),
     ("norm", "layer_norm_1", "FusedBatchNormGradV3"), ("gemm", "attention/output/MatMul", "MatMul"),
     ("gemm", "attention/output/MatMul_1", "MatMul"), ("gemm", "attention/values/MatMul", "BatchMatMulV2"),
     ("ew", "attention/softmax/mul", "Mul"), ("gemm", "attention/scores/MatMul", "BatchMatMulV2"),
     ("gemm", "attention/qkv/MatMul", "MatMul"), ("gemm", "attention/qkv/MatMul_1", "MatMul"),
     ("reduce", "attention/qkv/BiasAddGrad", "BiasAddGrad"), ("norm", "layer_norm", "FusedBatchNormGradV3")))
Row = tuple[str, str, str, Phase]  # kind, op name, op type
LayerOp = tuple[str, str, str]
KERNEL_KINDS = ("gemm", "norm", "bias", "softmax", "ew", "act", "reduce", "loss", "mean", "apply")
_EXTRA_MATMUL_WEIGHT = 8.0  # time of one of GPU 0's extra matmuls against one of the kernels beside them


class StepProgram(Struct, frozen=True):
    """One GPU's kernels of a step, one row per kernel in launch order.

    ``name`` indexes ``names`` and ``details`` (CUPTI's text on the launch), ``op`` indexes ``ops``,
    ``kind`` indexes :data:`KERNEL_KINDS`.
    """

    names: list[str]
    details: list[str]
    ops: list[str]
    name: I64
    op: I64
    kind: I64
    phase: I64
    mean_ns: I64

    def rows(self, phase: Phase) -> I64:
        return np.flatnonzero(self.phase == phase)


def flash_name(phase: Phase, element: str) -> str:
    return (f"void flash_{'fwd' if phase == Phase.FORWARD else 'bwd'}_kernel<Flash_kernel_traits<128, 64, 64, 4, "
            f"cutlass::{element}>, true>(Flash_params)")


def fusion_name(kind: str, k: int) -> str:
    stem = {"norm": "input_reduce_fusion", "reduce": "input_reduce_fusion", "softmax": "triton_softmax",
            "loss": "input_exponential_reduce_fusion", "mean": "wrapped_reduce", "bias": "loop_add_fusion",
            "act": "loop_multiply_fusion", "ew": "loop_add_multiply_fusion",
            "apply": "loop_multiply_subtract_fusion"}[kind]
    return f"{stem}_{k}"


def tensorflow_name(kind: str, op_type: str, data_type: str, lower: str) -> str:
    """Name of TensorFlow's kernel for a number type as TensorFlow names it (DT_…) and as C++ does."""
    generated = f"{op_type}_GPU_DT_{data_type}_DT_{data_type}_kernel"
    return {
        "norm": f"void tensorflow::(anonymous namespace)::LayerNormKernel<{lower}, float>({lower} const*, float*)",
        "reduce": f"void tensorflow::functor::ColumnReduceSimpleKernel<{lower} const*, {lower}*, gpuprim::Sum>"
                  f"({lower} const*, {lower}*, int, int, int, gpuprim::Sum)",
        "softmax": f"void tensorflow::(anonymous namespace)::GenerateNormalizedProb<{lower}, float, 8>({lower} const*)",
        "bias": f"void tensorflow::BiasNHWCKernel<{lower}>(int, {lower} const*, {lower} const*, {lower}*, int)",
        "act": generated,
        "ew": generated,
        "loss": "void tensorflow::functor::SparseXentGradKernel<float, long long>(float const*, long long const*)",
        "mean": "void tensorflow::functor::BlockReduceKernel<float*, float*, 256, "
                "tensorflow::functor::MeanOp<float> >(float*)",
        "apply": "void tensorflow::functor::ApplyAdamKernel<float>(int, float*, float*, float*, float const*)",
    }[kind]


class ProgramBuilder:
    """Makes the kernels of a step. Their times sum to ``compute_ms``; the extra kernels of GPU 0 come on top."""

    kinds: tuple[str, ...] = KERNEL_KINDS
    matmuls: tuple[str, ...] = ("gemm",)
    layer: tuple[tuple[LayerOp, ...], ...] = LAYER

    def __init__(self, job: SimulatedJob) -> None:
        self.job = job

    def of_gpus(self, count: int) -> list[StepProgram]:
        first = self.build(0)
        others = self.build(1) if self.job.gpu0_extra_kernels and count > 1 else first
        return [first] + [others] * (count - 1)

    def build(self, gpu: int) -> StepProgram:
        rng = self.job.rng("program")
        rows = self.rows()
        mean_ns = self.mean_ns(rows)
        if gpu == 0 and self.job.gpu0_extra_kernels:
            rows, mean_ns = self._add_extra(rows, mean_ns)
        names: dict[str, int] = {}
        ops: dict[str, int] = {}
        details: list[str] = []
        name, op = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        for i, (kind, op_name, op_type, phase) in enumerate(rows):
            text = self.kernel_name(kind, op_name, op_type, phase, i)
            if text not in names:
                names[text] = len(names)
                details.append(self._details(rng, kind))
            name[i] = names[text]
            op[i] = ops.setdefault(self.full_op_name(op_name, op_type), len(ops))
        return StepProgram(
            list(names), details, list(ops), name, op,
            np.array([self.kinds.index(kind) for kind, *_ in rows], np.int64),
            np.array([phase for *_, phase in rows], np.int64), np.maximum(mean_ns, 900).astype(np.int64))

    def optimizer_kernels(self) -> int:
        return max(2, round(0.08 * self.job.kernels)) if self.job.training else 0

    def rows(self) -> list[Row]:
        training, apply_count = self.job.training, self.optimizer_kernels()
        forward, backward = self.layer
        per_layer = len(forward) + (len(backward) if training else 0)
        layers = range(max(1, round((self.job.kernels - apply_count) / per_layer)))
        rows = [(kind, f"block_{layer}/{op}", t, Phase.FORWARD) for layer in layers for kind, op, t in forward]
        # Once per step.
        rows += [("loss", "compile_loss/xent", "SparseSoftmaxCrossEntropyWithLogits", Phase.FORWARD),
                 ("mean", "compile_loss/mean", "Mean", Phase.FORWARD)]
        if training:
            rows += [(kind, f"gradient_tape/block_{layer}/{op}", t, Phase.BACKWARD)
                     for layer in reversed(layers) for kind, op, t in backward]
        return rows + [("apply", f"adam/update_{i}", "ResourceApplyAdam", Phase.APPLY) for i in range(apply_count)]

    def weights(self, rows: list[Row]) -> F64:
        """Weight of each kernel in the time of all matmuls, or of all others."""
        return self.job.rng("weights").lognormal(0.0, 0.35, len(rows))

    def mean_ns(self, rows: list[Row]) -> F64:
        matmul = np.array([kind in self.matmuls for kind, *_ in rows])
        weight, share = self.weights(rows), self.job.elementwise
        mean_ns = np.empty(len(rows))
        for group, part in ((matmul, 1 - share), (~matmul, share)):
            mean_ns[group] = weight[group] / weight[group].sum() * self.job.compute_ms * 1e6 * part
        return mean_ns

    def _add_extra(self, rows: list[Row], mean_ns: F64) -> tuple[list[Row], F64]:
        """GPU 0's extra kernels, after the forward pass: a teacher's matmuls and metrics."""
        extra = [("ew", f"teacher/metrics_{i}", "TopKV2", Phase.EXTRA) if i % 3 else
                 ("gemm", f"teacher/dense_{i}", "MatMul", Phase.EXTRA)
                 for i in range(self.job.gpu0_extra_kernels)]
        weight = np.array([_EXTRA_MATMUL_WEIGHT if kind == "gemm" else 1.0 for kind, *_ in extra])
        position = sum(phase == Phase.FORWARD for *_, phase in rows)
        extra_ns = weight / weight.sum() * self.job.gpu0_extra_ms * 1e6
        return rows[:position] + extra + rows[position:], np.concatenate(
            (mean_ns[:position], extra_ns, mean_ns[position:]))

    def full_op_name(self, op_name: str, op_type: str) -> str:
        return f"StatefulPartitionedCall/model_1/{op_name}:{op_type}"

    def kernel_name(self, kind: str, op_name: str, op_type: str, phase: Phase, row: int) -> str:
        xla = self.job.xla
        if kind == "gemm" and xla and ("scores" in op_name or "values" in op_name):
            return flash_name(phase, "bfloat16_t")
        if kind == "gemm":
            return _GEMM[row % len(_GEMM)]
        return fusion_name(kind, row % 97) if xla else tensorflow_name(kind, op_type, "BFLOAT16", "Eigen::bfloat16")

    def blocks(self, rng: np.random.Generator, kind: str) -> str:
        """Thread blocks of a kernel, in each dimension."""
        if kind in self.matmuls:
            return f"{rng.integers(64, 512)},{rng.integers(1, 8)},1"
        return f"{rng.integers(256, 8192)},1,1"

    def _details(self, rng: np.random.Generator, kind: str) -> str:
        blocks = self.blocks(rng, kind)
        if kind in self.matmuls:
            return (f"regs:{rng.integers(96, 240)} static_shared:0 dynamic_shared:{rng.integers(4, 96) * 1024} "
                    f"grid:{blocks} block:256,1,1 occ_pct:{rng.integers(1, 6) * 6.25:g}")
        return (f"regs:{rng.integers(16, 48)} static_shared:0 dynamic_shared:0 grid:{blocks} "
                f"block:{rng.choice([128, 256, 512, 1024])},1,1 occ_pct:{rng.integers(4, 9) * 12.5:g}")
