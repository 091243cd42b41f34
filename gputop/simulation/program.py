"""The kernels that one GPU runs in a step: name, TensorFlow op, phase and mean time, in launch order.

The names are those of real traces: cuBLAS', cuDNN's and CUTLASS' matrix kernels for the GPU's
generation and number type, TensorFlow's generated element-wise kernels, and XLA's fusions.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gputop.simulation.job import SimulatedJob

I64 = npt.NDArray[np.int64]


class Phase(IntEnum):
    """Parts of a step. Kernels of the extra phase run on GPU 0 alone, between forward and backward pass."""

    FORWARD = 0
    BACKWARD = 1
    APPLY = 2
    EXTRA = 3


_SUFFIX = {"fp32": ("FLOAT", "float"), "tf32": ("FLOAT", "float"), "fp16": ("HALF", "Eigen::half"),
           "bf16": ("BFLOAT16", "Eigen::bfloat16")}

# (kind, op name in the layer, op type) of one layer; weight by kind below.
_LAYERS = {
    "transformer": (
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
         ("reduce", "attention/qkv/BiasAddGrad", "BiasAddGrad"), ("norm", "layer_norm", "FusedBatchNormGradV3"))),
    "cnn": (
        (("conv", "conv2d", "Conv2D"), ("norm", "batch_norm", "FusedBatchNormV3"), ("act", "relu", "Relu"),
         ("ew", "add", "AddV2")),
        (("act", "relu", "ReluGrad"), ("norm", "batch_norm", "FusedBatchNormGradV3"),
         ("conv", "conv2d/Conv2DBackpropInput", "Conv2DBackpropInput"),
         ("conv", "conv2d/Conv2DBackpropFilter", "Conv2DBackpropFilter"))),
    "mlp": (
        (("gemm", "dense", "MatMul"), ("bias", "dense", "BiasAdd"), ("act", "dense/relu", "Relu")),
        (("act", "dense/relu", "ReluGrad"), ("reduce", "dense/BiasAddGrad", "BiasAddGrad"), ("gemm", "dense/MatMul",
                                                                                             "MatMul"),
         ("gemm", "dense/MatMul_1", "MatMul"))),
    "rnn": (
        (("gemm", "lstm_cell/MatMul", "MatMul"), ("gemm", "lstm_cell/MatMul_1", "MatMul"), ("bias", "lstm_cell",
                                                                                            "BiasAdd"),
         ("act", "lstm_cell/Sigmoid", "Sigmoid"), ("ew", "lstm_cell/mul", "Mul"), ("act", "lstm_cell/Tanh", "Tanh"),
         ("ew", "lstm_cell/add", "AddV2")),
        (("ew", "lstm_cell/mul_grad", "Mul"), ("act", "lstm_cell/TanhGrad", "TanhGrad"),
         ("act", "lstm_cell/SigmoidGrad", "SigmoidGrad"), ("gemm", "lstm_cell/MatMul/MatMul", "MatMul"),
         ("gemm", "lstm_cell/MatMul/MatMul_1", "MatMul"), ("reduce", "lstm_cell/BiasAddGrad", "BiasAddGrad"))),
}
_Row = tuple[str, str, str, Phase]  # kind, op name, op type
_CHAIN = ("Mul", "AddV2", "Sqrt", "RealDiv", "Sub", "Square", "Maximum", "Exp", "Log1p", "Neg")
_APPLY_NS = 2_500
_CONVERSION = "conv2d-0-Transpose"
_LOSS_SCALING = "loss_scale_optimizer"
_MATMULS = ("gemm", "conv")
KERNEL_KINDS = (*_MATMULS, "norm", "bias", "softmax", "ew", "act", "reduce", "loss", "mean", "apply", "layout")
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


def _small_name(kind: str, op_type: str, job: SimulatedJob, k: int) -> str:
    upper, lower = _SUFFIX[job.work.dtype]
    if job.work.xla or job.jax:
        stem = {"norm": "input_reduce_fusion", "reduce": "input_reduce_fusion", "softmax": "triton_softmax",
                "loss": "input_exponential_reduce_fusion", "mean": "wrapped_reduce", "bias": "loop_add_fusion",
                "act": "loop_multiply_fusion", "ew": "loop_add_multiply_fusion",
                "apply": "loop_multiply_subtract_fusion"}[kind]
        return f"{stem}_{k}"
    norm = f"void tensorflow::(anonymous namespace)::LayerNormKernel<{lower}, float>({lower} const*, float*)"
    if job.work.family == "cnn":
        way = "bw" if "Grad" in op_type else "fw"
        norm = f"void cudnn::bn_{way}_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1>(cudnn::cudnnTensorStruct)"
    return {
        "norm": norm,
        "reduce": f"void tensorflow::functor::ColumnReduceSimpleKernel<{lower} const*, {lower}*, gpuprim::Sum>"
                  f"({lower} const*, {lower}*, int, int, int, gpuprim::Sum)",
        "softmax": f"void tensorflow::(anonymous namespace)::GenerateNormalizedProb<{lower}, float, 8>({lower} const*)",
        "bias": f"void tensorflow::BiasNHWCKernel<{lower}>(int, {lower} const*, {lower} const*, {lower}*, int)",
        "act": f"{op_type}_GPU_DT_{upper}_DT_{upper}_kernel",
        "ew": f"{op_type}_GPU_DT_{upper}_DT_{upper}_kernel",
        "layout": "void tensorflow::functor::SwapDimension1And2InTensor3UsingTiles<unsigned int, 256, 32, 32, false>"
                  "(unsigned int const*, tensorflow::functor::Dimension<3>, unsigned int*)",
        "loss": "void tensorflow::functor::SparseXentGradKernel<float, long long>(float const*, long long const*)",
        "mean": "void tensorflow::functor::BlockReduceKernel<float*, float*, 256, "
                "tensorflow::functor::MeanOp<float> >(float*)",
        "apply": "void tensorflow::functor::ApplyAdamKernel<float>(int, float*, float*, float*, float const*)",
    }[kind]

def build_program(job: SimulatedJob, gpu: int = 0) -> StepProgram:
    """One GPU's kernels of a step. Their times sum to ``compute_ms``, with ``matmul_factor`` 1.

    The checks of loss scaling after the backward pass and the extra kernels of GPU 0 come on top.
    """
    rng = job.rng("program")
    rows = _model_rows(job)
    mean_ns = _times(job, rows)
    if gpu == 0 and job.across.gpu0_extra_kernels:
        rows, mean_ns = _add_extra(job, rows, mean_ns)
    names: dict[str, int] = {}
    ops: dict[str, int] = {}
    details: list[str] = []
    name, op = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    scope = {"keras2": "model/", "custom": "model/", "eager": ""}.get(job.style, "StatefulPartitionedCall/model_1/")
    for i, (kind, op_name, op_type, phase) in enumerate(rows):
        text = _kernel_name(job, kind, op_name, op_type, phase, i)
        if text not in names:
            names[text] = len(names)
            details.append(_details(rng, kind, job.work.small_grids))
        name[i] = names[text]
        full = f"jit(train_step)/{op_name}" if job.jax else f"{scope}{op_name}:{op_type}"
        op[i] = ops.setdefault(full, len(ops))
    return StepProgram(
        list(names), details, list(ops), name, op, np.array([KERNEL_KINDS.index(kind) for kind, *_ in rows], np.int64),
        np.array([phase for *_, phase in rows], np.int64), np.maximum(mean_ns, 900).astype(np.int64))


def _model_rows(job: SimulatedJob) -> list[_Row]:
    forward, backward = _LAYERS[job.work.family]
    chain = tuple(("ew", f"custom_{i}", _CHAIN[i % len(_CHAIN)]) for i in range(job.work.chained_elementwise))
    forward, backward = forward + chain[::2], backward + chain[1::2]
    if job.work.layout_ms:
        forward += (("layout", f"{_CONVERSION}NHWCToNCHW-LayoutOptimizer", "Transpose"),)
        backward += (("layout", f"{_CONVERSION}NCHWToNHWC-LayoutOptimizer", "Transpose"),)
    apply_count = (job.work.apply_kernels or max(2, round(0.08 * job.work.kernels))) if job.training else 0
    per_layer = len(forward) + (len(backward) if job.training else 0)
    layers = range(max(1, round((job.work.kernels - apply_count) / per_layer)))
    rows = [(kind, f"block_{layer}/{op}", t, Phase.FORWARD) for layer in layers for kind, op, t in forward]
    # Once per step.
    rows += [("loss", "compile_loss/xent", "SparseSoftmaxCrossEntropyWithLogits", Phase.FORWARD),
             ("mean", "compile_loss/mean", "Mean", Phase.FORWARD)]
    if job.training:
        rows += [(kind, f"gradient_tape/block_{layer}/{op}", t, Phase.BACKWARD)
                 for layer in reversed(layers) for kind, op, t in backward]
    for i in range(job.loss_scale_kernels):
        check, op_type = ("IsFinite", "IsFinite") if i % 2 else ("mul", "Mul")
        rows.append(("ew", f"{_LOSS_SCALING}/{check}_{i // 2}", op_type, Phase.BACKWARD))
    return rows + [("apply", f"adam/update_{i}", "ResourceApplyAdam", Phase.APPLY) for i in range(apply_count)]


def _times(job: SimulatedJob, rows: list[_Row]) -> npt.NDArray[np.float64]:
    """Mean time of each kernel, in nanoseconds."""
    matmul = np.array([kind in _MATMULS for kind, *_ in rows])
    check = np.array([op.startswith(_LOSS_SCALING) for _, op, *_ in rows])
    layout = np.array([kind == "layout" for kind, *_ in rows])
    apply = np.array([kind == "apply" for kind, *_ in rows]) & bool(job.work.apply_kernels)
    weight = np.where(check | layout | apply, 0.0, job.rng("weights").lognormal(0.0, 0.35, len(rows)))
    share = job.work.elementwise if matmul.any() else 1.0
    mean_ns = np.empty(len(rows))
    for group, part in ((matmul, 1 - share), (~matmul, share)):
        mean_ns[group] = weight[group] / weight[group].sum() * job.work.compute_ms * 1e6 * part
    mean_ns[matmul] *= job.work.matmul_factor
    mean_ns[["/softmax" in op for _, op, *_ in rows]] *= job.work.softmax_factor
    mean_ns[apply] = _APPLY_NS
    if job.work.layout_ms:
        mean_ns[layout] = job.work.layout_ms * 1e6 / layout.sum()
    if job.loss_scale_kernels:
        mean_ns[check] = job.loss_scale_ms * 1e6 / job.loss_scale_kernels
    return mean_ns


def _add_extra(
    job: SimulatedJob, rows: list[_Row], mean_ns: npt.NDArray[np.float64],
) -> tuple[list[_Row], npt.NDArray[np.float64]]:
    """GPU 0's extra kernels, after the forward pass: a teacher's matmuls and metrics."""
    count = job.across.gpu0_extra_kernels
    extra = [("ew", f"teacher/metrics_{i}", "TopKV2", Phase.EXTRA) if i % 3 else
             ("gemm", f"teacher/dense_{i}", "MatMul", Phase.EXTRA) for i in range(count)]
    weight = np.array([_EXTRA_MATMUL_WEIGHT if kind == "gemm" else 1.0 for kind, *_ in extra])
    position = sum(phase == Phase.FORWARD for *_, phase in rows)
    extra_ns = weight / weight.sum() * job.across.gpu0_extra_ms * 1e6
    return rows[:position] + extra + rows[position:], np.concatenate((mean_ns[:position], extra_ns, mean_ns[position:]))


def _kernel_name(job: SimulatedJob, kind: str, op_name: str, op_type: str, phase: Phase, row: int) -> str:
    flash = job.work.xla and job.work.family == "transformer" and job.work.dtype in ("bf16", "fp16") and (
        not job.work.matmul_names)
    if kind == "gemm" and flash and ("scores" in op_name or "values" in op_name):
        return (f"void flash_{'fwd' if phase == Phase.FORWARD else 'bwd'}_kernel<Flash_kernel_traits<128, 64, 64, 4, "
                f"cutlass::{'bfloat16_t' if job.work.dtype == 'bf16' else 'half_t'}>, true>(Flash_params)")
    if kind in _MATMULS:
        names = job.matrix_kernels(kind)
        return names[(row if kind == "gemm" else 0 if phase == Phase.FORWARD else 1 + row) % len(names)]
    return _small_name(kind, op_type, job, row % 97)


def _details(rng: np.random.Generator, kind: str, small: bool) -> str:
    if kind in _MATMULS:
        blocks = f"{rng.integers(2, 24)},1,1" if small else f"{rng.integers(64, 512)},{rng.integers(1, 8)},1"
        return (f"regs:{rng.integers(96, 240)} static_shared:0 dynamic_shared:{rng.integers(4, 96) * 1024} "
                f"grid:{blocks} block:256,1,1 occ_pct:{rng.integers(1, 6) * 6.25:g}")
    blocks = str(rng.integers(2, 40) if small else rng.integers(256, 8192))
    return (f"regs:{rng.integers(16, 48)} static_shared:0 dynamic_shared:0 grid:{blocks},1,1 "
            f"block:{rng.choice([128, 256, 512, 1024])},1,1 occ_pct:{rng.integers(4, 9) * 12.5:g}")
