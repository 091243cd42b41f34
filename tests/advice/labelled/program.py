"""What one GPU runs in a step: kernels by name with their TF op, phase and share of the time.

Names are those that traces show: of matrix kernels for the GPU's generation and the number type,
of TensorFlow's generated element-wise kernels, and of XLA's fusions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tests.advice.labelled.job import Job
from tests.advice.labelled.kernel_names import CONV, GEMM, names_of

I64 = npt.NDArray[np.int64]
FORWARD, BACKWARD, APPLY = 0, 1, 2

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
_MATMULS = ("gemm", "conv")
_SMALL = ("bias", "act", "ew", "reduce", "softmax", "norm", "apply")


@dataclass(frozen=True)
class Program:
    """One GPU's kernels of a step in order of launch. ``name`` indexes ``names``, ``op`` indexes ``ops``."""

    names: list[str]
    details: list[str]  # per name
    ops: list[str]
    name: I64
    op: I64
    phase: I64
    ns: I64
    matmul: npt.NDArray[np.bool_]

    def rows(self, phase: int) -> I64:
        return np.flatnonzero(self.phase == phase)


def _small_name(kind: str, op_type: str, job: Job, k: int) -> str:
    upper, lower = _SUFFIX[job.dtype]
    if job.xla or job.jax:
        stem = {"norm": "input_reduce_fusion", "reduce": "input_reduce_fusion", "softmax": "triton_softmax",
                "loss": "input_exponential_reduce_fusion", "mean": "wrapped_reduce", "bias": "loop_add_fusion",
                "act": "loop_multiply_fusion", "ew": "loop_add_multiply_fusion",
                "apply": "loop_multiply_subtract_fusion"}[kind]
        return f"{stem}_{k}"
    norm = f"void tensorflow::(anonymous namespace)::LayerNormKernel<{lower}, float>({lower} const*, float*)"
    if job.family == "cnn":
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
        "loss": "void tensorflow::functor::SparseXentGradKernel<float, long long>(float const*, long long const*)",
        "mean": "void tensorflow::functor::BlockReduceKernel<float*, float*, 256, "
                "tensorflow::functor::MeanOp<float> >(float*)",
        "apply": "void tensorflow::functor::ApplyAdamKernel<float>(int, float*, float*, float*, float const*)",
    }[kind]


_CHAIN = ("Mul", "AddV2", "Sqrt", "RealDiv", "Sub", "Square", "Maximum", "Exp", "Log1p", "Neg")


def build(job: Job, gpu: int = 0) -> Program:
    """One GPU's kernels of a step. Their times sum to ``compute_ms`` with matmuls as fast as they could be.

    Beside it: the checks of loss scaling after the backward pass, and what only GPU 0 does.
    """
    rng = job.rng("program")
    forward, backward = _LAYERS[job.family]
    chain = tuple(("ew", f"custom_{i}", _CHAIN[i % len(_CHAIN)]) for i in range(job.chained_elementwise))
    forward, backward = forward + chain[::2], backward + chain[1::2]
    apply_count = max(2, round(0.08 * job.kernels)) if job.training else 0
    per_layer = len(forward) + (len(backward) if job.training else 0)
    layers = max(1, round((job.kernels - apply_count) / per_layer))
    rows: list[tuple[str, str, str, int]] = []
    for layer in range(layers):
        rows += [(kind, f"block_{layer}/{op}", t, FORWARD) for kind, op, t in forward]
    # What a step has only once.
    rows += [("loss", "compile_loss/xent", "SparseSoftmaxCrossEntropyWithLogits", FORWARD),
             ("mean", "compile_loss/mean", "Mean", FORWARD)]
    for layer in reversed(range(layers)) if job.training else ():
        rows += [(kind, f"gradient_tape/block_{layer}/{op}", t, BACKWARD) for kind, op, t in backward]
    checks = job.loss_scale_kernels
    rows += [("ew", f"loss_scale_optimizer/{'IsFinite' if i % 2 else 'mul'}_{i // 2}", "IsFinite" if i % 2 else "Mul",
              BACKWARD)
             for i in range(checks)]
    rows += [("apply", f"adam/update_{i}", "ResourceApplyAdam", APPLY) for i in range(apply_count)]

    scope = {"keras2": "model/", "custom": "model/", "eager": "", "jax_step": "", "jax_pjit": ""}.get(
        job.style, "StatefulPartitionedCall/model_1/")
    matmul = np.array([kind in _MATMULS for kind, _, _, _ in rows])
    added = np.array(["loss_scale_optimizer" in op for _, op, _, _ in rows])
    weight = np.where(added, 0.0, job.rng("weights").lognormal(0.0, 0.35, len(rows)))
    ns = np.empty(len(rows))
    total = job.compute_ms * 1e6
    share = job.elementwise if matmul.any() else 1.0
    ns[matmul] = weight[matmul] / weight[matmul].sum() * total * (1 - share)
    ns[~matmul] = weight[~matmul] / weight[~matmul].sum() * total * share
    ns[matmul] *= job.matmul_factor
    if checks:
        ns[added] = job.loss_scale_ms * 1e6 / checks
    if gpu == 0 and job.gpu0_extra_kernels:
        n = job.gpu0_extra_kernels
        at = int(np.sum([p == FORWARD for _, _, _, p in rows]))
        extra = [("gemm" if i % 3 == 0 else "ew", f"teacher/metrics_{i}", "MatMul" if i % 3 == 0 else "TopKV2", FORWARD)
                 for i in range(n)]
        rows[at:at] = extra
        ns = np.concatenate((ns[:at], np.full(n, job.gpu0_extra_ms * 1e6 / n), ns[at:]))
        matmul = np.array([kind in _MATMULS for kind, _, _, _ in rows])

    kind_of_matmul = job.matmul_names or job.dtype
    gemms = names_of(GEMM, kind_of_matmul, job.architecture)
    convs = names_of(CONV, kind_of_matmul, job.architecture)
    flash = job.xla and job.family == "transformer" and job.dtype in ("bf16", "fp16") and not job.matmul_names
    names: dict[str, int] = {}
    ops: dict[str, int] = {}
    details: list[str] = []
    name, op = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    for i, (kind, op_name, op_type, _) in enumerate(rows):
        if kind == "gemm":
            text = gemms[i % len(gemms)]
            if flash and ("scores" in op_name or "values" in op_name):
                text = (f"void flash_{'bwd' if rows[i][3] else 'fwd'}_kernel<Flash_kernel_traits<128, 64, 64, 4, "
                        f"cutlass::{'bfloat16_t' if job.dtype == 'bf16' else 'half_t'}>, true>(Flash_params)")
        elif kind == "conv":
            text = convs[(0 if rows[i][3] == FORWARD else 1 + i) % len(convs)]
        else:
            text = _small_name(kind, op_type, job, i % 97)
        if text not in names:
            names[text] = len(names)
            details.append(_details(rng, kind, job.small_grids))
        name[i] = names[text]
        full = f"jit(train_step)/{op_name}" if job.jax else f"{scope}{op_name}:{op_type}"
        op[i] = ops.setdefault(full, len(ops))
    phase = np.array([p for _, _, _, p in rows], np.int64)
    return Program(list(names), details, list(ops), name, op, phase, np.maximum(ns, 900).astype(np.int64), matmul)


def _details(rng: np.random.Generator, kind: str, small: bool) -> str:
    if kind in _MATMULS:
        blocks = f"{rng.integers(2, 24)},1,1" if small else f"{rng.integers(64, 512)},{rng.integers(1, 8)},1"
        return (f"regs:{rng.integers(96, 240)} static_shared:0 dynamic_shared:{rng.integers(4, 96) * 1024} "
                f"grid:{blocks} block:256,1,1 occ_pct:{rng.integers(1, 6) * 6.25:g}")
    blocks = str(rng.integers(2, 40) if small else rng.integers(256, 8192))
    return (f"regs:{rng.integers(16, 48)} static_shared:0 dynamic_shared:0 grid:{blocks},1,1 "
            f"block:{rng.choice([128, 256, 512, 1024])},1,1 occ_pct:{rng.integers(4, 9) * 12.5:g}")
