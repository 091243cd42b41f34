"""Names of matrix kernels in traces, by number type and GPU generation ("": all others).

They are cuBLAS', cuDNN's and CUTLASS' own: FFMA kernels (sgemm, scudnn, simt), tensor-core kernels of
each type, tensor-core kernels for unaligned dimensions, and FP16 kernels without tensor cores.
"""

from __future__ import annotations

Table = dict[str, dict[str, tuple[str, ...]]]

GEMM: Table = {
    "fp32": {
        "volta": ("volta_sgemm_128x64_nn", "volta_sgemm_128x128_tn", "volta_sgemm_64x64_nt"),
        "turing": ("volta_sgemm_128x64_nn", "turing_sgemm_128x64_tn"),
        "": (
            "ampere_sgemm_128x128_nn", "ampere_sgemm_128x64_tn", "ampere_sgemm_64x64_nt",
            "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nt_align1>(Params)"),
    },
    "tf32": {
        "hopper": (
            "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize1x1x1_execute_segment_k_off_"
            "kernel__5x_cublas",
            "sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x16_stage4_warpsize2x2x1_tensor16x8x8_kernel"),
        "": (
            "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4>(Params)",
            "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x64x32_stage3_warpsize2x2x1_tensor16x8x8_kernel",
            "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_256x64_16x4_nt_align4>(Params)"),
    },
    "fp16": {
        "volta": (
            "volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn", "volta_h884gemm_256x64_ldg8_tn",
            "volta_fp16_s884gemm_fp16_64x64_ldg8_f2f_nt"),
        "turing": ("turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn", "turing_fp16_s1688gemm_fp16_64x64_ldg8_f2f_nn"),
        "hopper": (
            "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", "nvjet_hsh_192x192_64x4_2x1_v_bz_coopB_TNT",
            "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_kernel"),
        "": (
            "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_64x3_nn",
            "ampere_fp16_s16816gemm_fp16_64x64_ldg8_f2f_stages_64x5_tn",
            "void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_relu_f16_256x128_32x3_nt_align8>(Params)"),
    },
    "bf16": {
        "hopper": (
            "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN",
            "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT",
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_64x4_nn_align8>(Params)"),
        "": (
            "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_nn",
            "ampere_bf16_s16816gemm_bf16_256x64_ldg8_f2f_stages_64x3_tn",
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256_32x3_nt_align8>(Params)"),
    },
    "unaligned": {"": (
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_f16_s161616gemm_f16_32x32_32x1_nn_align2>(Params)",
        "void cutlass::Kernel2<cutlass_75_wmma_tensorop_h161616gemm_64x64_32x1_tn_align1>(Params)",
        "void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_f16_64x64_32x6_nt_align2>(Params)")},
    "unaligned_bf16": {"": (
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_64x2_nn_align1>(Params)",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_64x64_32x6_tn_align2>(Params)")},
    "fp16_scudnn": {"": (
        "void gemmSN_NN_kernel<__half, 128, 2, 4, 8, 4, 4, false, cublasGemvTensorStridedBatched<__half const> "
        ">(cublasGemmSmallNParams<cublasGemvTensorStridedBatched<__half const> >)",
        "volta_hgemm_128x64_nn", "volta_sgemm_fp16_128x64_nt")},
}
CONV: Table = {
    "fp32": {
        "volta": (
            "volta_scudnn_128x64_relu_interior_nn_v1", "volta_scudnn_128x128_stridedB_splitK_xregs_large_nn_v1",
            "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(Params)"),
        "turing": (
            "turing_scudnn_128x64_relu_medium_nn_v1", "volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1"),
        "": (
            "ampere_scudnn_128x64_relu_xregs_large_nn_v1",
            "ampere_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1",
            "void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, false, true, true>(Params)"),
    },
    "tf32": {"": (
        "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16_stage4_warpsize2x2x1_"
        "g1_tensor16x8x8_execute_kernel__5x_cudnn",
        "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_s1688dgrad_optimized_tf32_128x128_16x4_nhwc_unity_"
        "align4>(Params)",
        "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_s1688wgrad_optimized_tf32_256x64_16x4_nhwc_"
        "align4>(Params)")},
    "fp16": {
        "volta": (
            "volta_fp16_s884cudnn_fp16_256x128_ldg8_relu_f2f_exp_interior_nhwc_tn_v1",
            "volta_fp16_s884cudnn_fp16_128x128_ldg8_dgrad_f2f_exp_small_nhwc_tt_v1",
            "volta_fp16_s884cudnn_fp16_256x64_ldg8_wgrad_idx_exp_interior_nhwc_nt_v1"),
        "turing": (
            "turing_fp16_s1688cudnn_fp16_128x128_ldg8_relu_f2f_exp_small_nhwc_tn_v1",
            "turing_fp16_s1688cudnn_fp16_256x64_ldg8_wgrad_idx_exp_interior_nhwc_nt_v1"),
        "": (
            "sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_stage3_warpsize2x2x1_"
            "g1_tensor16x8x16_execute_kernel__5x_cudnn",
            "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_f16_s16816wgrad_optimized_f16_256x128_32x3_nhwc_"
            "align8>(Params)",
            "sm80_xmma_dgrad_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize256x64x32_stage3_kernel__5x_cudnn"),
    },
    "bf16": {"": (
        "sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_stage3_kernel__5x_"
        "cudnn",
        "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816wgrad_optimized_bf16_128x128_32x4_nhwc_"
        "align8>(Params)",
        "sm80_xmma_dgrad_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x64x32_stage5_kernel__5x_"
        "cudnn")},
    "unaligned": {"": (
        "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_f16_s16816fprop_optimized_f16_64x64_32x5_nhwc_"
        "align2>(Params)",
        "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_f16_s16816wgrad_analytic_f16_64x64_32x5_nhwc_"
        "align1>(Params)")},
    "unaligned_bf16": {"": (
        "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_analytic_bf16_64x64_32x5_nhwc_"
        "align1>(Params)",)},
    "fp16_scudnn": {"": (
        "volta_fp16_scudnn_fp16_128x64_relu_interior_nn_v1", "volta_fp16_scudnn_fp16_128x128_stridedB_interior_nn_v1",
        "void cudnn::cnn::wgrad2d_grouped_direct_kernel<__half, float, __half, float, 3, 3>(Params)")},
}


def kernel_names(table: Table, kind: str, architecture: str) -> tuple[str, ...]:
    """The kernels of that number type on that GPU generation."""
    by_architecture = table[kind]
    return by_architecture.get(architecture) or by_architecture[""]
