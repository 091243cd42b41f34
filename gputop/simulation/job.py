"""The parameters of a simulated training job. Everything a trace shows follows from them and the seed."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

if TYPE_CHECKING:
    from typing_extensions import Self

# (compute capability, memory MiB, memory GB/s, SMs, clock kHz, host link GB/s)
GPUS: dict[str, tuple[tuple[int, int], int, int, int, int, float]] = {
    "V100": ((7, 0), 16_160, 898, 80, 1_530_000, 11.8),
    "T4": ((7, 5), 15_360, 320, 40, 1_590_000, 11.2),
    "A100": ((8, 0), 40_536, 1555, 108, 1_410_000, 23.5),
    "RTX3090": ((8, 6), 24_268, 936, 82, 1_695_000, 23.0),
    "A10": ((8, 6), 22_731, 600, 72, 1_695_000, 22.0),
    "L4": ((8, 9), 23_034, 300, 58, 2_040_000, 22.5),
    "H100": ((9, 0), 81_559, 3352, 132, 1_980_000, 51.0),
}

# cuBLAS' and CUTLASS' own names, as they stand in traces.
_GEMM = (
    "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT",
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN",
    "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_64x4_nn_align8>(Params)",
)

KERAS_STYLES = ("keras2", "keras3", "spe")
JAX_STYLES = ("jax_step", "jax_pjit")


class Copy(Struct, frozen=True):
    """A memory copy. ``way`` is H2D, D2H, D2D or P2P; ``gb_per_s`` is its transfer rate."""

    way: str
    size: int
    gb_per_s: float
    src: str
    dst: str
    is_async: bool = True


class MidStepWork(Struct, frozen=True):
    """Copies and host work between two kernels of a step, at ``at`` (0: begin of forward, 1: end of backward).

    With ``blocks`` the host waits for the GPU before it continues. ``host_ms`` is the host's own work
    after that, recorded as the executor event ``op`` if that is given.
    """

    at: float
    copies: tuple[Copy, ...] = ()
    blocks: bool = False
    host_ms: float = 0.0
    op: str = ""
    sync_call: bool = False  # an explicit cuStreamSynchronize


class KernelWork(Struct, frozen=True):
    family: str = "transformer"  # transformer, cnn, mlp, rnn
    dtype: str = "bf16"
    compute_ms: float = 60.0
    kernels: int = 400
    elementwise: float = 0.14  # share of the compute time
    chained_elementwise: int = 0  # more element-wise ops per layer, one feeding the next
    matmul_factor: float = 1.0  # multiplies the time of matmuls and convolutions
    matmul_names: str = ""  # the matrix kernels are of another kind than the dtype's
    softmax_factor: float = 1.0  # multiplies the time of softmaxes between two matmuls
    layout_ms: float = 0.0  # conversions between NCHW and NHWC, one per layer and pass, beside compute_ms
    apply_kernels: int = 0  # of the optimizer, 2.5 µs each beside compute_ms; 0: a twelfth of the kernels
    xla: bool = False
    small_grids: bool = False  # kernels have fewer blocks than the GPU has SMs
    jitter: float = 0.01
    kernel_gap_us: float = 1.0  # between two queued kernels of one stream


class Launching(Struct, frozen=True):
    """Launches of a step, and Python between two steps."""

    function_start_ms: float = 0.05  # from the batch to the first launch
    launch_us: float = 9.0
    launch_jitter: float = 0.2
    latency_us: float = 4.5  # from the launch to the earliest start
    run_ahead: int = 1  # steps by which the host may lead the device; 0: it waits for each step's result
    thread_stagger_us: float = 0.0  # the GPUs' launching threads start one after the other
    private_threads: bool = False  # TF_GPU_THREAD_MODE=gpu_private
    stall_share: float = 0.0  # share of the launches that are delayed by ``stall_us`` in the mean
    stall_us: float = 0.0
    gap_ms: float = 0.3  # Python between two steps
    gap_every: int = 1  # steps from one such gap to the next; between the others 0.3 ms
    gap_events: tuple[str, ...] = ()
    retrace_every: int = 0  # steps; 0: never
    retrace_ms: float = 0.0
    warm_up: float = 0.0  # milliseconds that the first step takes longer


class BatchMaking(Struct, frozen=True):
    produce_ms: float = 20.0  # one batch, by all workers together
    prefetch: int = 2
    buffer_full: bool = True  # at the first step
    burst_every: int = 0  # every so many batches one takes ``burst_ms`` longer
    burst_ms: float = 0.0
    map_parallel: bool = True
    input_workers: int = 4
    readers: int = 0  # files that a ParallelInterleave stage reads at once; 0: no such stage
    cpu_budget: int = 32  # CPUs that tf.data may use
    input_jitter: float = 0.08
    batch_mb: float = 38.0
    pinned: bool = True
    h2d_overlap: bool = True
    h2d_gb_per_s: float = 0.0  # 0: the link's rate
    tf_data: bool = True


class SeveralGpus(Struct, frozen=True):
    """Work that several GPUs do together, and unevenly."""

    comm_ms: float = 0.0  # transfer time of all gradients of a step
    comm_count: int = 8
    comm_overlap: bool = True
    comm_latency_us: float = 18.0  # of each collective, beside its transfer
    comm_skew_us: float = 4.0  # a collective ends on all GPUs within this time
    late_ms: float = 0.0  # launches to one GPU begin later by this
    late_gpu: int = -1  # -1: another one each step
    gpu_factor: tuple[float, ...] = ()  # relative compute time of each GPU
    gpu0_extra_ms: float = 0.0  # kernel time of GPU 0 beside its share, between forward and backward pass
    gpu0_extra_kernels: int = 0
    gather_mb: float = 0.0  # what each other GPU sends to GPU 0 before these kernels
    one_thread: bool = False  # one thread launches to all GPUs, one after the other
    serial: bool = False  # model parallelism: the layers are spread over the GPUs


class AllocatorShares(Struct, frozen=True):
    """Memory that TensorFlow's allocator has taken, at its peak."""

    memory: float = 0.86
    gpu0_memory: float = 0.0  # on GPU 0; 0: as on the others
    fragmentation: float = 0.04
    allocator_share: float = 0.925  # of the GPU's memory that TensorFlow reserves


class Recorded(Struct, frozen=True):
    seen_gpus: int = 0  # GPUs of the captured process; 0: all
    host_plane: bool = True
    launches: bool = True  # the host's launch calls, which CUPTI records apart from the kernels
    device_events: bool = True
    allocator: bool = True
    op_events: bool = True
    noise: bool = True
    clip: bool = True
    old_details: bool = False
    errors: tuple[str, ...] = ()


class SimulatedJob(Struct, frozen=True):
    """Times are means, in milliseconds per step or microseconds per kernel; the seed varies them."""

    seed: int
    style: str = "keras3"  # keras2, keras3, spe, custom, eager, jax_step, jax_pjit
    version: tuple[int, int] = (2, 19)
    gpu: str = "A100"
    gpus: int = 1
    idle_gpus: int = 0  # visible to the process, never used
    cpu_only: bool = False
    steps: int = 16
    per_execution: int = 4  # optimizer steps per call, style "spe" (Keras' steps_per_execution)
    training: bool = True  # False: an evaluation loop, forward pass only
    work: KernelWork = KernelWork()
    host: Launching = Launching()
    input: BatchMaking = BatchMaking()
    across: SeveralGpus = SeveralGpus()
    allocation: AllocatorShares = AllocatorShares()
    recorded: Recorded = Recorded()
    mid_step: tuple[MidStepWork, ...] = ()
    loss_scale_kernels: int = 0
    loss_scale_ms: float = 0.0
    loss_scale_blocks: bool = False

    @classmethod
    def of(cls, seed: int, **values: object) -> Self:
        """A job with these parameters, those of its groups among them."""
        return cls(seed).replace(**values)

    def rng(self, what: str) -> np.random.Generator:
        """A random stream per use: changing one parameter leaves all other draws as they are."""
        return np.random.default_rng([self.seed, zlib.crc32(what.encode())])

    def replace(self, **changes: object) -> Self:
        """The job with other values of these parameters, whichever group has them."""
        for name in _GROUPS:
            group = getattr(self, name)
            changed = {field: changes.pop(field) for field in group.__struct_fields__ if field in changes}
            if changed:
                changes[name] = replace(group, **changed)
        return replace(self, **changes)

    @property
    def jax(self) -> bool:
        return self.style in JAX_STYLES

    @property
    def iterations(self) -> int:
        """Optimizer steps of one call from Python."""
        return self.per_execution if self.style == "spe" else 1

    def matrix_kernels(self, kind: str) -> tuple[str, ...]:
        """Names of the kernels of matrix products ("gemm") and of convolutions ("conv"): here of the former alone, in
        bfloat16 on an H100, for the demo's transformer has no convolution."""
        return _GEMM

    @property
    def link_gb_per_s(self) -> float:
        return GPUS[self.gpu][5]

    @property
    def captured_gpus(self) -> int:
        """Number of the GPUs that the job uses which are in the trace."""
        return 0 if self.cpu_only else self.recorded.seen_gpus or self.gpus

    @property
    def allocator_capacity_bytes(self) -> int:
        return _whole_blocks((GPUS[self.gpu][1] << 20) * self.allocation.allocator_share)

    def allocator_peak_bytes(self, gpu: int) -> int:
        used = self.allocation
        return _whole_blocks(self.allocator_capacity_bytes * ((gpu == 0 and used.gpu0_memory) or used.memory))


_GROUPS = ("work", "host", "input", "across", "allocation", "recorded")


def _whole_blocks(size_bytes: float) -> int:
    """The allocator hands out blocks of 256 bytes."""
    return int(size_bytes) // 256 * 256
