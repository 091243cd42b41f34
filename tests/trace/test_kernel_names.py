from __future__ import annotations

import pytest

from gputop.trace.kernel_names import (
    classify,
    copy_details,
    copy_way,
    kineto_message_bytes,
    kineto_shape,
    launch_shape,
    memory_kind,
    op_of_annotation,
    short_kernel,
    split_op,
)
from gputop.trace.model import Kind, LaunchShape, MemoryKind


@pytest.mark.parametrize(("name", "kind"), [
    ("MemcpyH2D", Kind.H2D), ("MemcpyD2H", Kind.D2H), ("MemcpyD2D", Kind.D2D), ("MemcpyP2P", Kind.P2P),
    ("MemcpyOther", Kind.COPY_OTHER), ("Memset", Kind.MEMSET), ("CopyDeviceToDevice", Kind.D2D),
    ("__amd_rocclr_copyBuffer.kd", Kind.COPY_OTHER), ("__amd_rocclr_fillBufferAligned.kd", Kind.MEMSET),
    ("Memcpy HtoD (Pageable -> Device)", Kind.H2D), ("Memcpy DtoH (Device -> Pinned)", Kind.D2H),
    ("Memcpy PtoP (Device -> Device)", Kind.P2P), ("Memset (Device)", Kind.MEMSET),
    ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", Kind.COLLECTIVE),
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", Kind.COLLECTIVE),
    ("ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16(ncclSymkDevWorkArgs4K)", Kind.COLLECTIVE),
    ("void (anonymous namespace)::multimem_all_reduce_kernel<float, 16>(float*, unsigned long)", Kind.COLLECTIVE),
    ("void c10d::symmetric_memory::(anonymous namespace)::barrier_kernel(unsigned int**)", Kind.COLLECTIVE),
    ("void (anonymous namespace)::two_shot_all_reduce_kernel<float, 16>(float**)", Kind.COLLECTIVE),
    ("void vllm::cross_device_reduce_1stage<nv_bfloat16, 8>(vllm::RankData*)", Kind.COLLECTIVE),
    ("void tensorrt_llm::kernels::oneShotAllReduceKernel<half, 8, true>(AllReduceParams)", Kind.COLLECTIVE),
    ("void stream_executor::gpu::AllReduceKernelImpl<float, 8>(AllReduceKernelParams<float>)", Kind.COLLECTIVE),
    ("mscclKernel_Sum_float_Simple_false(ncclDevComm*)", Kind.COLLECTIVE),
    ("void dpsk::ep::internode::dispatch<false, 8, false, 8>(int4*, float*, long*)", Kind.COLLECTIVE),
    ("void dpsk::ep::internode::combine<false, 8, __nv_bfloat16, 8, 2, 16, 2>(int4*)", Kind.COLLECTIVE),
    ("void uccl::ep::intranode::notify_dispatch<8>(int const*)", Kind.COLLECTIVE),
    ("void hybrid_ep::dispatch_kernel<8>(int4*)", Kind.COLLECTIVE),
    ("void mori::moe::EpCombineInterNodeKernel<__hip_bfloat16>(int)", Kind.COLLECTIVE),
    ("void pplx::AllToAllInternodeDispatch<8>(int)", Kind.COLLECTIVE),
    ("void cutlass::device_kernel<dpsk::grouped_gemm::cuda::fp8_ptp128c::Gemm<128u, 128u> >", Kind.COMPUTE),
    ("void train_step::dispatch<4>(int)", Kind.COMPUTE), ("void moe::combine_experts<4>(int)", Kind.COMPUTE),
    ("void sleep::combine<4>(int)", Kind.COMPUTE),
    # They count, check or pack on the GPU itself.
    ("void dpsk::ep::cuda::get_dispatch_layout<256, 32, 8>(long const*, int*)", Kind.COMPUTE),
    ("void deep_ep::layout::get_dispatch_layout<256, 4, 8>(long const*, int*)", Kind.COMPUTE),
    ("tensorrt_llm::kernels::moe_comm::moeA2APrepareDispatchKernel(int*, int*, int)", Kind.COMPUTE),
    ("tensorrt_llm::kernels::moe_comm::moeA2ASanitizeExpertIdsKernel(int*, int*, int)", Kind.COMPUTE),
    ("void cdpsk::ep::CUB_200302_NS::DeviceScanKernel<Policy<int> >(int*)", Kind.COMPUTE),
    ("void dpsk::ep::internode::cached_notify<false, 4>(int, int)", Kind.COLLECTIVE),
    ("void deep_ep::internode_ll::dispatch<true, false, 7168>(void*)", Kind.COLLECTIVE),
    ("void tensorrt_llm::kernels::moe_comm::moeA2ADispatchKernel<8>(int const*)", Kind.COLLECTIVE),
    ("void tensorrt_llm::kernels::fusedMoeCommKernel<true>(FusedMoeCommParams)", Kind.COLLECTIVE),
    ("a2a_combine_recv_kernel", Kind.COLLECTIVE), ("kernel_dispatch_token_intra_node", Kind.COLLECTIVE),
    ("void mscclpp::allgather<8>(mscclpp::DeviceHandle<mscclpp::MemoryChannel>*)", Kind.COLLECTIVE),
    ("nvshmemi_reducescatter_on_stream_kernel<float>(int, float*, float const*)", Kind.COLLECTIVE),
    ("void nvshmemi_barrier_on_stream_kernel<0>(int)", Kind.COLLECTIVE),
    ("void deep_ep::intranode::dispatch<8, 768>(int4*, float*)", Kind.COLLECTIVE),
    ("rcclKernel_AllGather_Sum_i8(ncclWorkElem)", Kind.COLLECTIVE),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >(ReduceOp<float>)", Kind.COMPUTE),
    ("ssymm_kernel_left_upper_256", Kind.COMPUTE),
    ("void cub::DeviceReduceSingleTileKernel<float>(float*)", Kind.COMPUTE),
    ("reduce_all_kernel", Kind.COMPUTE),
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
    ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, cutlass::half_t>>", "fp16", True),
    ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, false, "
     "false, cutlass::half_t, float>, false>(Flash_fwd_params)", "fp16", True),
    ("ampere_sgemm_128x64_tn", "fp32", False),
    ("volta_sgemm_128x64_nn", "fp32", False),
    ("volta_dgemm_64x64_nn", "fp64", False),
    ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_simt_ffma_tilesize64x64x8", "fp32", False),
    ("volta_scudnn_128x64_relu_interior_nn_v1", "fp32", False),
    ("void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>", "fp32", False),
    ("volta_cgemm_32x32_tn", "fp32", False), ("cutlass_80_tensorop_c1688cgemm_64x64_16x4_tn_align1", "fp32", True),
    ("void cudnn::cnn::wgrad_alg0_engine<float, 512, 6, 5, 3, 3, 3, false, 512>(int, int)", "fp32", False),
    ("void cudnn::detail::dgrad_engine<__half, 512, 6, 5, 3, 3, 3, false>(int, int)", "fp16", False),
    ("void cudnn::cnn::wgrad2d_grouped_direct_kernel<float, float, float>(Params)", "fp32", None),
    ("void tensorflow::BiasNHWCKernel<float>", "fp32", None),
    ("void fused_dropout_kernel_vec<float, float>(TensorInfo<float>, TensorInfo<unsigned char>)", "fp32", None),
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


def test_launch_shapes():
    text = "regs:32 static_shared:16 dynamic_shared:1024 grid:64,2,1 block:256,1,1 occ_pct:37.5"
    assert launch_shape(text) == LaunchShape((64, 2, 1), (256, 1, 1), 32, 1040, 0.375)
    # ROCm: the occupancy is not known, and there are no registers
    assert launch_shape(" grid:16,1,1 block:512,1,1 private_mem:0 group_mem:64 occ_pct:0") == LaunchShape(
        (16, 1, 1), (512, 1, 1), -1, 64, None)


def test_a_missing_occupancy_is_computed_for_nvidia():
    text = "regs:168 static_shared:1024 dynamic_shared:229376 grid:264,1,1 block:384,1,1 occ_pct:0"
    plain, h100 = launch_shape(text), launch_shape(text, (9, 0))
    assert plain is not None and plain.occupancy is None and h100 is not None and h100.occupancy == 12 / 64
    launch = launch_shape(text.replace("occ_pct:0", "occ_pct:25"), (9, 0))
    assert launch is not None and launch.occupancy == 0.25


@pytest.mark.parametrize("text", [
    "", "regs:32", "grid:1,1 block:1,1,1", "grid:0,1,1 block:1,1,1", "grid:1,1,1", "grid:a,b,c block:1,1,1",
    "grid:" + "9" * 39 + ",1,1 block:1,1,1", "grid:1.5,1,1 block:1,1,1",
])
def test_no_launch_shape(text):
    assert launch_shape(text) is None


def test_odd_figures_of_a_shape_are_unknown():
    shape = launch_shape("regs:1.2.3 static_shared:x grid:1,1,1 block:1,1,1 occ_pct:140")
    assert shape == LaunchShape((1, 1, 1), (1, 1, 1), -1, -1, None)


def test_kinetos_shapes():
    grid, block = (8, 1, 1), (544, 1, 1)
    assert kineto_shape(grid, block, 96, 4096, 3) == LaunchShape(grid, block, 96, 4096, 0.03)
    # 0 may be less than half a percent, but with much shared memory it is kineto's failure to reckon it.
    assert kineto_shape(grid, block, 96, 4096, 0) == LaunchShape(grid, block, 96, 4096, 0.0)
    failed = kineto_shape(grid, block, 96, 87_568, 0)
    assert failed is not None and failed.occupancy is None
    assert kineto_shape(grid, block, -5, 1 << 40, None) == LaunchShape(grid, block, -1, -1, None)
    for bad in ((None, None), ((0, 1, 1), block), (grid, (1, 1, 1 << 40))):
        assert kineto_shape(*bad, 96, 4096, 3) is None


@pytest.mark.parametrize(("dtype", "elements", "size"), [
    ("Float", (10, 80), 320), ("BFloat16", (10, 10), 20), ("Complicated", (10, -1), -1), ("Float", (-1, -1), -1),
    ("", (-1, -1), -1), ("Float", (0, 0), -1), ("Float", (1 << 60, -1), -1), ("Float", ("10", -1), -1), (5, (1, 1), -1),
])
def test_kinetos_messages(dtype, elements, size):
    assert kineto_message_bytes(dtype, *elements) == size


@pytest.mark.parametrize(("text", "op"), [
    ("model/dense/MatMul:MatMul", ("model/dense/MatMul", "MatMul")),
    ("replica_3/model/dense/MatMul:MatMul", ("model/dense/MatMul", "MatMul")),
    ("gradient_tape/replica_12/model/Cast:Cast", ("gradient_tape/model/Cast", "Cast")),
    ("replica_count:Identity", ("replica_count", "Identity")),
    ("jit_step/input_transpose_fusion.1", ("jit_step/input_transpose_fusion.1", "input_transpose_fusion")),
    ("jit(f)/jit(main)/dot_general:", ("jit(f)/jit(main)/dot_general", "dot_general")),
    ("fusion_2.14.1", ("fusion_2.14.1", "fusion")), ("", ("unknown", "unknown")), (":Relu", ("unknown", "Relu")),
    ("a/12", ("a/12", "12")),
])
def test_ops(text, op):
    assert split_op(text) == op


@pytest.mark.parametrize(("text", "op"), [
    ("model/conv2d/Conv2D:Conv2D", "model/conv2d/Conv2D:Conv2D"), ("MakeTensorFromProto", ""), ("", ""),
    ("bert/dropout/RandomUniform:RandomUniform#shape=(int32[3])#", "bert/dropout/RandomUniform:RandomUniform"),
    ("#edge_name=ret_0#", ""), ("XlaModule:#hlo_module=a#", ""), ("a::b", ""),
])
def test_the_op_in_an_annotation(text, op):
    assert op_of_annotation(text) == op


@pytest.mark.parametrize(("name", "short"), [
    ("void at::native::elementwise_kernel<4, at::native::(anonymous namespace)::f(int)::{lambda()#1}>(int, float*)",
     "at::native::elementwise_kernel<…>"),
    ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long)", "ncclKernel_AllReduce_RING_LL_Sum_float"),
    ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_nt_align4>(int)",
     "cutlass_80_tensorop_s1688gemm_256x64_16x4_nt_align4"),
    ("void cutlass__5x_cudnn::Kernel<cutlass_tensorop_s1688dgrad_optimized_tf32_64x64>(int)",
     "cutlass_tensorop_s1688dgrad_optimized_tf32_64x64"),
    ("void <unnamed>::softmax_kernel<float>(int)", "softmax_kernel<…>"),
    ("_ZN5Eigen8internal15EigenMetaKernelINS_15TensorEvaluatorIKNS_14TensorAssignOpE",
     "Eigen::internal::EigenMetaKernel<…>"),
    ("_Z11flip_filterIffEvPT0_PKT_iiii", "flip_filter<…>"),
    ("_ZN10tensorflow12_GLOBAL__N_16kernelEv", "tensorflow::kernel"),
    ("_ZN19cutlass_cudnn_train6KernelINS_4conv6kernel23ImplicitGemmConvolutionINS1_11threadblockE",
     "conv::kernel::ImplicitGemmConvolution<…>"),
    ("_ZN7cutlass6KernelILi4EEEvv", "cutlass::Kernel<…>"), ("_ZN7cutlass6KernelI", "cutlass::Kernel<…>"),
    ("_Znonsense", "_Znonsense"), ("_Z9999x", "x"), ("loop_fusion_3", "loop_fusion_3"), ("(", "("), ("", ""),
])
def test_short_names(name, short):
    assert short_kernel(name) == short


ADAM = ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, "
        "FusedAdamMathFunctor<{}, 4, (ADAM_MODE)0, false>, float const*, double, double, double, double, bool>(int)")


# PyTorch's normal_ takes its mean and its deviation in FP64, whatever it fills.
NORMAL = ("void at::native::<unnamed>::distribution_elementwise_grid_stride_kernel<{0}, (int)4, void "
          "at::native::templates::cuda::normal_and_transform<{0}, {0}, at::CUDAGeneratorImpl *, void "
          "at::native::templates::cuda::normal_kernel<at::CUDAGeneratorImpl *>(const at::TensorBase &, double, double"
          ", T1)::[lambda() (instance 1)]>")


@pytest.mark.parametrize("kernel", [ADAM, NORMAL])
@pytest.mark.parametrize(("element", "dtype"), [("float", "fp32"), ("double", "fp64")])
def test_types_of_a_kernel_s_parameters_are_not_its_own(kernel: str, element: str, dtype: str) -> None:
    assert classify(kernel.format(element)).dtype == dtype


@pytest.mark.parametrize("dtype", ["float", "double"])
def test_the_bounds_of_random_numbers_are_no_operands(dtype: str) -> None:
    """PyTorch's normal_ takes its mean and its deviation in FP64, whatever it fills."""
    name = (f"void at::native::<unnamed>::distribution_elementwise_grid_stride_kernel<{dtype}, (int)4, void "
            f"at::native::templates::cuda::normal_and_transform<{dtype}, {dtype}, at::CUDAGeneratorImpl *, void "
            "at::native::templates::cuda::normal_kernel<at::CUDAGeneratorImpl *>(const at::TensorBase &, double, double"
            ", T1)::[lambda() (instance 1)]>")
    assert classify(name).dtype == {"float": "fp32", "double": "fp64"}[dtype]
