"""What the simulated model runs on a GPU: kernel types and the order of one training step.

The model is a vision transformer in mixed bfloat16, run by TensorFlow without XLA. Each
kernel type has its activity figures (shares of the whole GPU while it runs), in the range
such kernels show on an H100.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelType:
    """``name`` as CUPTI shows it on the device, ``symbol`` as the launch carries it (None: the same).

    ``weight`` is its length against the others'. The activity figures are ratios while it runs.
    """

    name: str
    weight: float
    sm: float
    occupancy: float
    tensor: float
    dram: float
    fp32: float
    fp16: float
    details: str
    symbol: str | None = None


def _details(registers: int, shared: int, grid: str, block: int, occupancy_percent: float) -> str:
    return (
        f"regs:{registers} static_shared:0 dynamic_shared:{shared} "
        f"grid:{grid} block:{block},1,1 occ_pct:{occupancy_percent:g}"
    )


KERNELS: dict[str, KernelType] = {
    "gemm": KernelType(
        "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", 9.0, 0.97, 0.18, 0.72, 0.30, 0.02, 0.0,
        _details(168, 214016, "132,1,1", 384, 18.75)),
    "gemm_wide": KernelType(
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN", 14.0, 0.98, 0.18, 0.78, 0.34, 0.02, 0.0,
        _details(168, 230400, "264,1,1", 384, 18.75)),
    "gemm_batched": KernelType(
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_64x4_nn_align8>"
        "(cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_64x4_nn_align8::Params)",
        5.5, 0.94, 0.12, 0.45, 0.42, 0.03, 0.0, _details(230, 131072, "2,2,2560", 128, 6.25),
        "_ZN7cutlass7Kernel2I63cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_64x4_nn_align8EEvNT_6ParamsE"),
    "softmax": KernelType(
        "void tensorflow::(anonymous namespace)::GenerateNormalizedProb<Eigen::bfloat16, float, 8>"
        "(Eigen::bfloat16 const*, float const*, Eigen::bfloat16 const*, Eigen::bfloat16*, int, int, bool)",
        3.0, 0.96, 0.71, 0.0, 0.78, 0.11, 0.02, _details(32, 0, "98304,1,1", 128, 100),
        "_ZN10tensorflow12_GLOBAL__N_122GenerateNormalizedProbIN5Eigen8bfloat16EfLi8EEEvPKT_PKT0_S5_PS3_iib"),
    "layernorm": KernelType(
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>"
        "(cudnn::cudnnTensorStruct, float const*, cudnn::cudnnTensorStruct, float*, float const*, float const*, "
        "float, float, float*, float*, float*, float*, float, float)",
        2.6, 0.92, 0.44, 0.0, 0.70, 0.14, 0.0, _details(40, 1024, "50432,1,1", 512, 75),
        "_ZN5cudnn26bn_fw_tr_1C11_kernel_NCHWIffiLi512ELb1ELi1ELb1EEEv17cudnnTensorStructPKT_S1_PS2_PKT0_S7_S5_S5_"),
    "bias": KernelType(
        "void tensorflow::BiasNHWCKernel<Eigen::bfloat16>"
        "(int, Eigen::bfloat16 const*, Eigen::bfloat16 const*, Eigen::bfloat16*, int)",
        1.4, 0.95, 0.80, 0.0, 0.82, 0.03, 0.05, _details(18, 0, "1056,1,1", 256, 100),
        "_ZN10tensorflow14BiasNHWCKernelIN5Eigen8bfloat16EEEviPKT_S5_PS3_i"),
    "gelu": KernelType(
        "Erf_GPU_DT_BFLOAT16_DT_BFLOAT16_kernel", 1.7, 0.96, 0.82, 0.0, 0.80, 0.20, 0.0,
        _details(28, 0, "197120,1,1", 256, 100)),
    "add": KernelType(
        "AddV2_GPU_DT_BFLOAT16_DT_BFLOAT16_kernel", 1.2, 0.95, 0.84, 0.0, 0.86, 0.02, 0.06,
        _details(16, 0, "49280,1,1", 256, 100)),
    "mul": KernelType(
        "Mul_GPU_DT_BFLOAT16_DT_BFLOAT16_kernel", 1.2, 0.95, 0.84, 0.0, 0.86, 0.02, 0.06,
        _details(16, 0, "49280,1,1", 256, 100)),
    "reduce": KernelType(
        "void tensorflow::functor::ColumnReduceSimpleKernel<Eigen::bfloat16 const*, Eigen::bfloat16*, "
        "gpuprim::Sum>(Eigen::bfloat16 const*, Eigen::bfloat16*, int, int, int, gpuprim::Sum)",
        1.5, 0.88, 0.52, 0.0, 0.66, 0.08, 0.02, _details(32, 0, "3072,1,1", 128, 87.5),
        "_ZN10tensorflow7functor24ColumnReduceSimpleKernelIPKN5Eigen8bfloat16EPS3_N7gpuprim3SumEEEvT_T0_iiiT1_"),
    "cast": KernelType(
        "Cast_GPU_DT_BFLOAT16_DT_FLOAT_kernel", 0.9, 0.93, 0.78, 0.0, 0.80, 0.02, 0.02,
        _details(20, 0, "1056,1,1", 256, 100)),
    "adam": KernelType(
        "void tensorflow::functor::ApplyAdamKernel<float>(int, float*, float*, float*, float const*, float const*, "
        "float const*, float const*, float const*, float const*, float const*, bool)",
        1.0, 0.96, 0.75, 0.0, 0.90, 0.09, 0.0, _details(30, 0, "4224,1,1", 1024, 100),
        "_ZN10tensorflow7functor15ApplyAdamKernelIfEEviPT_S3_S3_PKS2_S5_S5_S5_S5_S5_S5_b"),
    "topk": KernelType(
        "void tensorflow::impl::TopKKernel<float, int>(float const*, int, int, bool, float*, int*)",
        4.0, 0.90, 0.40, 0.0, 0.48, 0.16, 0.0, _details(48, 16384, "1280,1,1", 256, 62.5),
        "_ZN10tensorflow4impl10TopKKernelIfiEEvPKT_iibPS2_PT0_"),
}

KERNEL_KEYS: tuple[str, ...] = tuple(KERNELS)

# A collective is resident on as many SMs as it has channels (24 of 132 here), moving or waiting.
NCCL_NAME = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
NCCL_SYMBOL = "_Z39ncclDevKernel_AllReduce_Sum_f32_RING_LL24ncclDevKernelArgsStorageILm4096EE"
NCCL_DETAILS = _details(96, 87296, "24,1,1", 544, 26.5625)
NCCL_SM = 24 / 132
NCCL_OCCUPANCY = NCCL_SM * 17 / 64  # 17 of 64 warps
NCCL_TRANSFER_DRAM = 0.16

# (kernel type, op within the layer). Forward and backward of one encoder block, then its optimizer.
FORWARD = (
    ("layernorm", "layer_norm_1/FusedBatchNormV3:FusedBatchNormV3"),
    ("gemm", "attention/query_key_value/MatMul:MatMul"),
    ("bias", "attention/query_key_value/BiasAdd:BiasAdd"),
    ("gemm_batched", "attention/einsum_scores/BatchMatMulV2:BatchMatMulV2"),
    ("softmax", "attention/softmax/Softmax:Softmax"),
    ("gemm_batched", "attention/einsum_values/BatchMatMulV2:BatchMatMulV2"),
    ("gemm", "attention/output/MatMul:MatMul"),
    ("add", "add_1/AddV2:AddV2"),
    ("layernorm", "layer_norm_2/FusedBatchNormV3:FusedBatchNormV3"),
    ("gemm_wide", "mlp/dense_1/MatMul:MatMul"),
    ("gelu", "mlp/dense_1/gelu/Erf:Erf"),
    ("gemm_wide", "mlp/dense_2/MatMul:MatMul"),
)
BACKWARD = (
    ("gemm_wide", "mlp/dense_2/MatMul_grad/MatMul:MatMul"),
    ("gemm_wide", "mlp/dense_2/MatMul_grad/MatMul_1:MatMul"),
    ("reduce", "mlp/dense_2/BiasAdd_grad/BiasAddGrad:BiasAddGrad"),
    ("mul", "mlp/dense_1/gelu/Erf_grad/Mul:Mul"),
    ("gemm_wide", "mlp/dense_1/MatMul_grad/MatMul:MatMul"),
    ("gemm_wide", "mlp/dense_1/MatMul_grad/MatMul_1:MatMul"),
    ("reduce", "mlp/dense_1/BiasAdd_grad/BiasAddGrad:BiasAddGrad"),
    ("layernorm", "layer_norm_2/FusedBatchNormV3_grad/FusedBatchNormGradV3:FusedBatchNormGradV3"),
    ("add", "add_1/AddN:AddN"),
    ("gemm", "attention/output/MatMul_grad/MatMul:MatMul"),
    ("gemm", "attention/output/MatMul_grad/MatMul_1:MatMul"),
    ("gemm_batched", "attention/einsum_values/BatchMatMulV2_grad/BatchMatMulV2:BatchMatMulV2"),
    ("gemm_batched", "attention/einsum_values/BatchMatMulV2_grad/BatchMatMulV2_1:BatchMatMulV2"),
    ("mul", "attention/softmax/Softmax_grad/Mul:Mul"),
    ("reduce", "attention/softmax/Softmax_grad/Sum:Sum"),
    ("gemm_batched", "attention/einsum_scores/BatchMatMulV2_grad/BatchMatMulV2:BatchMatMulV2"),
    ("gemm_batched", "attention/einsum_scores/BatchMatMulV2_grad/BatchMatMulV2_1:BatchMatMulV2"),
    ("gemm", "attention/query_key_value/MatMul_grad/MatMul:MatMul"),
    ("gemm", "attention/query_key_value/MatMul_grad/MatMul_1:MatMul"),
    ("reduce", "attention/query_key_value/BiasAdd_grad/BiasAddGrad:BiasAddGrad"),
    ("layernorm", "layer_norm_1/FusedBatchNormV3_grad/FusedBatchNormGradV3:FusedBatchNormGradV3"),
    ("add", "add_2/AddN:AddN"),
)
APPLY = (
    ("cast", "gradient_cast/Cast:Cast"),
    ("adam", "kernel/ResourceApplyAdam:ResourceApplyAdam"),
    ("adam", "bias/ResourceApplyAdam:ResourceApplyAdam"),
)
# What GPU 0 does beside its share where a scenario says so: a teacher's forward pass and metrics.
EXTRA = (
    ("gemm_wide", "teacher/dense_1/MatMul:MatMul"),
    ("gelu", "teacher/dense_1/gelu/Erf:Erf"),
    ("gemm_wide", "teacher/dense_2/MatMul:MatMul"),
    ("softmax", "teacher/softmax/Softmax:Softmax"),
    ("topk", "compute_metrics/top_5_accuracy/TopKV2:TopKV2"),
    ("reduce", "compute_metrics/confusion/Sum:Sum"),
)
