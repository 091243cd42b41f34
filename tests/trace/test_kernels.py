from __future__ import annotations

import pytest

from gputop.trace.kernels import classify, copy_details, copy_way, memory_kind
from gputop.trace.model import Kind, MemoryKind


@pytest.mark.parametrize(("name", "kind"), [
    ("MemcpyH2D", Kind.H2D), ("MemcpyD2H", Kind.D2H), ("MemcpyD2D", Kind.D2D), ("MemcpyP2P", Kind.P2P),
    ("MemcpyOther", Kind.COPY_OTHER), ("Memset", Kind.MEMSET), ("CopyDeviceToDevice", Kind.D2D),
    ("__amd_rocclr_copyBuffer.kd", Kind.COPY_OTHER), ("__amd_rocclr_fillBufferAligned.kd", Kind.MEMSET),
    ("Memcpy HtoD (Pageable -> Device)", Kind.H2D), ("Memcpy DtoH (Device -> Pinned)", Kind.D2H),
    ("Memcpy PtoP (Device -> Device)", Kind.P2P), ("Memset (Device)", Kind.MEMSET),
    ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", Kind.COLLECTIVE),
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", Kind.COLLECTIVE),
    ("void NCCLallreduce()", Kind.COLLECTIVE), ("rcclGenericKernel<1>", Kind.COLLECTIVE),
    ("loop_transpose_fusion.kd", Kind.COMPUTE), ("memcpy_kernel<float>", Kind.COMPUTE), ("", Kind.COMPUTE),
    ("MemcpyH2DX", Kind.COMPUTE),
])
def test_kinds(name, kind):
    assert classify(name).kind is kind


@pytest.mark.parametrize(("name", "dtype", "tensor_core"), [
    ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nn", "bf16", True),
    ("volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn", "fp16", True),
    ("turing_h1688gemm_128x128_ldg8_nn", "fp16", True),
    ("cutlass_80_tensorop_s1688gemm_128x256_16x3_nn_align4", "tf32", True),
    ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc", "tf32", True),
    ("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", "bf16", True),
    ("nvjet_hsh_64x8_64x16_4x1_v_bz_TNN", "fp16", True),
    ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128", "fp8", True),
    ("turing_int8_i8816gemm_int8_256x128_ldg16_relu_nn", "int8", True),
    ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, cutlass::half_t>>", "unknown", True),
    ("ampere_sgemm_128x64_tn", "fp32", False),
    ("volta_sgemm_128x64_nn", "fp32", False),
    ("volta_dgemm_64x64_nn", "fp64", False),
    ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_simt_ffma_tilesize64x64x8", "fp32", False),
    ("volta_scudnn_128x64_relu_interior_nn_v1", "fp32", False),
    ("void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>", "fp32", False),
    ("void tensorflow::BiasNHWCKernel<float>", "fp32", None),
    ("loop_add_fusion", "unknown", None),
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "unknown", None),
])
def test_types_and_tensor_cores(name, dtype, tensor_core):
    assert classify(name)[1:] == (dtype, tensor_core)


def test_copy_details():
    text = "kind_src:pageable kind_dst:device size:4096 dest:0 async:1"
    assert copy_details(text) == (4096, MemoryKind.PAGEABLE, MemoryKind.DEVICE)
    assert copy_details("num_bytes:12") == (12, MemoryKind.UNKNOWN, MemoryKind.UNKNOWN)
    assert copy_details("kind:Unknown size:0 dest:512 async:1") == (-1, MemoryKind.UNKNOWN, MemoryKind.UNKNOWN)
    assert copy_details("") == (-1, MemoryKind.UNKNOWN, MemoryKind.UNKNOWN)
    assert copy_details("size:" + "9" * 40).bytes == -1


def test_ways_and_memory():
    assert copy_way("cuMemcpyHtoDAsync_v2") is Kind.H2D
    assert copy_way("hipMemcpyDtoDAsync") is Kind.D2D
    assert copy_way("cuLaunchKernel") is None
    assert memory_kind("Device Static") is MemoryKind.DEVICE
    assert memory_kind("") is MemoryKind.UNKNOWN
