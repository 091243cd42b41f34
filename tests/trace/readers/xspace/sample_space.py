"""An XSpace with one of each that the reader knows."""

from __future__ import annotations

from tests.trace.readers.xspace.reference import Builder


def sample() -> Builder:
    """Two GPUs, one of them unused, launches and copies."""
    b = Builder()
    gpu = b.plane("/device:GPU:0")
    b.plane("/device:GPU:1")
    for name, value in (("compute_cap_major", 9), ("compute_cap_minor", 0), ("memory_size", 80 << 30)):
        b.stat(gpu, gpu.stats.add(), name, value)
    stream, copies = b.line("/device:GPU:0", "Stream #13(Kernel)", 1000), b.line("/device:GPU:0", "Stream #14", 2000)
    b.event("/device:GPU:0", stream, "gemm_bf16_tensorop", 500, 100, correlation_id=1, tf_op=("layer/MatMul:MatMul",))
    b.event("/device:GPU:0", stream, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 700, 50, correlation_id=2,
            tf_op="XlaModule:", hlo_op=("all-reduce.1",), hlo_module=("jit_step",))
    b.event("/device:GPU:0", copies, "MemcpyH2D", 0, 10, correlation_id=3,
            memcpy_details=("kind_src:pageable kind_dst:device size:4096 dest:0 async:1",))
    b.event("/device:GPU:0", copies, "MemcpyD2H", 20, 10, correlation_id=9, memcpy_details="num_bytes:77",
            annotation=("Mean/_9:_Send#from=Mean,to=#::#edge_name=e",))
    thread = b.line("/host:CPU", "tf_Compute/-5", 900)
    b.event("/host:CPU", thread, "cuLaunchKernel", 100, 5, correlation_id=1, device_id=0)
    b.event("/host:CPU", thread, "cuLaunchKernel", 120, 5, correlation_id=2, device_id=0)
    b.event("/host:CPU", thread, "cuMemcpyHtoDAsync_v2", 140, 6, correlation_id=3, device_id=0)
    python = b.line("/host:CPU", "python", 0)
    b.event("/host:CPU", python, "train", 0, 3000, step_num=4, _r=1)
    return b
