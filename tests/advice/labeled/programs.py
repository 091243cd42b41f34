"""Kernels of a step of a job of any model, number type and GPU; the demo's are those of one."""

from __future__ import annotations

import numpy as np

from gputop.simulation.program import (
    F64,
    KERNEL_KINDS,
    LAYER,
    LayerOp,
    Phase,
    ProgramBuilder,
    Row,
    StepProgram,
    flash_name,
    fusion_name,
    tensorflow_name,
)
from tests.advice.labeled.jobs import LabeledJob
from tests.advice.labeled.matrix_kernels import CONV, GEMM, kernel_names

KINDS = (*KERNEL_KINDS, "conv", "layout")
MATMULS = ("gemm", "conv")
_NUMBERS = {"fp32": ("FLOAT", "float"), "tf32": ("FLOAT", "float"), "fp16": ("HALF", "Eigen::half"),
            "bf16": ("BFLOAT16", "Eigen::bfloat16")}
_LAYERS: dict[str, tuple[tuple[LayerOp, ...], ...]] = {
    "transformer": LAYER,
    "cnn": (
        (("conv", "conv2d", "Conv2D"), ("norm", "batch_norm", "FusedBatchNormV3"), ("act", "relu", "Relu"),
         ("ew", "add", "AddV2")),
        (("act", "relu", "ReluGrad"), ("norm", "batch_norm", "FusedBatchNormGradV3"),
         ("conv", "conv2d/Conv2DBackpropInput", "Conv2DBackpropInput"),
         ("conv", "conv2d/Conv2DBackpropFilter", "Conv2DBackpropFilter"))),
    "mlp": (
        (("gemm", "dense", "MatMul"), ("bias", "dense", "BiasAdd"), ("act", "dense/relu", "Relu")),
        (("act", "dense/relu", "ReluGrad"), ("reduce", "dense/BiasAddGrad", "BiasAddGrad"),
         ("gemm", "dense/MatMul", "MatMul"), ("gemm", "dense/MatMul_1", "MatMul"))),
    "rnn": (
        (("gemm", "lstm_cell/MatMul", "MatMul"), ("gemm", "lstm_cell/MatMul_1", "MatMul"),
         ("bias", "lstm_cell", "BiasAdd"), ("act", "lstm_cell/Sigmoid", "Sigmoid"), ("ew", "lstm_cell/mul", "Mul"),
         ("act", "lstm_cell/Tanh", "Tanh"), ("ew", "lstm_cell/add", "AddV2")),
        (("ew", "lstm_cell/mul_grad", "Mul"), ("act", "lstm_cell/TanhGrad", "TanhGrad"),
         ("act", "lstm_cell/SigmoidGrad", "SigmoidGrad"), ("gemm", "lstm_cell/MatMul/MatMul", "MatMul"),
         ("gemm", "lstm_cell/MatMul/MatMul_1", "MatMul"), ("reduce", "lstm_cell/BiasAddGrad", "BiasAddGrad"))),
}
_CHAIN = ("Mul", "AddV2", "Sqrt", "RealDiv", "Sub", "Square", "Maximum", "Exp", "Log1p", "Neg")
_APPLY_NS = 2_500
_CONVERSION = "conv2d-0-Transpose"
_LOSS_SCALING = "loss_scale_optimizer"
_LAYOUT = ("void tensorflow::functor::SwapDimension1And2InTensor3UsingTiles<unsigned int, 256, 32, 32, false>"
           "(unsigned int const*, tensorflow::functor::Dimension<3>, unsigned int*)")
_SCOPES = {"keras2": "model/", "custom": "model/", "eager": ""}


class LabeledProgram(ProgramBuilder):
    """The checks of loss scaling after the backward pass come on top of ``compute_ms``, too."""

    kinds = KINDS
    matmuls = MATMULS
    job: LabeledJob

    def __init__(self, job: LabeledJob) -> None:
        super().__init__(job)
        forward, backward = _LAYERS[job.family]
        chain = tuple(("ew", f"custom_{i}", _CHAIN[i % len(_CHAIN)]) for i in range(job.chained_elementwise))
        forward, backward = forward + chain[::2], backward + chain[1::2]
        if job.layout_ms:
            forward += (("layout", f"{_CONVERSION}NHWCToNCHW-LayoutOptimizer", "Transpose"),)
            backward += (("layout", f"{_CONVERSION}NCHWToNHWC-LayoutOptimizer", "Transpose"),)
        self.layer = forward, backward

    def optimizer_kernels(self) -> int:
        fixed = self.job.apply_kernels if self.job.training else 0
        return fixed or super().optimizer_kernels()

    def rows(self) -> list[Row]:
        rows = super().rows()
        checks = [("IsFinite", "IsFinite") if i % 2 else ("mul", "Mul") for i in range(self.job.loss_scale_kernels)]
        first_apply = len(rows) - self.optimizer_kernels()
        rows[first_apply:first_apply] = [("ew", f"{_LOSS_SCALING}/{check}_{i // 2}", op_type, Phase.BACKWARD)
                                         for i, (check, op_type) in enumerate(checks)]
        return rows

    def weights(self, rows: list[Row]) -> F64:
        check, layout, apply = self._fixed(rows)
        return np.where(check | layout | apply, 0.0, super().weights(rows))

    def _fixed(self, rows: list[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Kernels whose time is no part of ``compute_ms``: checks of loss scaling, conversions, the optimizer's."""
        return (np.array([op.startswith(_LOSS_SCALING) for _, op, *_ in rows]),
                np.array([kind == "layout" for kind, *_ in rows]),
                np.array([kind == "apply" for kind, *_ in rows]) & bool(self.job.apply_kernels))

    def mean_ns(self, rows: list[Row]) -> F64:
        job, mean_ns = self.job, super().mean_ns(rows)
        check, layout, apply = self._fixed(rows)
        mean_ns[[kind in MATMULS for kind, *_ in rows]] *= job.matmul_factor
        mean_ns[["/softmax" in op for _, op, *_ in rows]] *= job.softmax_factor
        mean_ns[apply] = _APPLY_NS
        if job.layout_ms:
            mean_ns[layout] = job.layout_ms * 1e6 / layout.sum()
        if job.loss_scale_kernels:
            mean_ns[check] = job.loss_scale_ms * 1e6 / job.loss_scale_kernels
        return mean_ns

    def full_op_name(self, op_name: str, op_type: str) -> str:
        if self.job.jax:
            return f"jit(train_step)/{op_name}"
        scope = _SCOPES.get(self.job.style)
        return super().full_op_name(op_name, op_type) if scope is None else f"{scope}{op_name}:{op_type}"

    def kernel_name(self, kind: str, op_name: str, op_type: str, phase: Phase, row: int) -> str:
        job = self.job
        flash = job.xla and job.family == "transformer" and job.dtype in ("bf16", "fp16") and not job.matmul_names
        if kind == "gemm" and flash and ("scores" in op_name or "values" in op_name):
            return flash_name(phase, "bfloat16_t" if job.dtype == "bf16" else "half_t")
        if kind in MATMULS:
            names = kernel_names(GEMM if kind == "gemm" else CONV, job.matmul_names or job.dtype, job.architecture)
            return names[(row if kind == "gemm" else 0 if phase == Phase.FORWARD else 1 + row) % len(names)]
        if job.xla or job.jax:
            return fusion_name(kind, row % 97)
        if kind == "layout":
            return _LAYOUT
        if kind == "norm" and job.family == "cnn":
            return (f"void cudnn::bn_{'bw' if 'Grad' in op_type else 'fw'}_tr_1C11_kernel_NCHW<float, float, int, 512, "
                    "true, 1>(cudnn::cudnnTensorStruct)")
        return tensorflow_name(kind, op_type, *_NUMBERS[job.dtype])

    def blocks(self, rng: np.random.Generator, kind: str) -> str:
        if not self.job.small_grids:
            return super().blocks(rng, kind)
        return f"{rng.integers(2, 24 if kind in MATMULS else 40)},1,1"


def programs(job: LabeledJob) -> list[StepProgram]:
    return LabeledProgram(job).of_gpus(1 if job.cpu_only else job.gpus)
