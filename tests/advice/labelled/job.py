"""A training job as its parameters. Everything a trace shows follows from these and the seed."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace

import numpy as np

# (architecture, compute capability, memory MiB, memory GB/s, SMs, clock kHz, host link GB/s)
GPUS: dict[str, tuple[str, tuple[int, int], int, int, int, int, float]] = {
    "V100": ("volta", (7, 0), 16_160, 898, 80, 1_530_000, 11.8),
    "T4": ("turing", (7, 5), 15_360, 320, 40, 1_590_000, 11.2),
    "A100": ("ampere", (8, 0), 40_536, 1555, 108, 1_410_000, 23.5),
    "RTX3090": ("ampere", (8, 6), 24_268, 936, 82, 1_695_000, 23.0),
    "A10": ("ampere", (8, 6), 22_731, 600, 72, 1_695_000, 22.0),
    "L4": ("ada", (8, 9), 23_034, 300, 58, 2_040_000, 22.5),
    "H100": ("hopper", (9, 0), 81_559, 3352, 132, 1_980_000, 51.0),
}

KERAS_STYLES = ("keras2", "keras3", "spe")
JAX_STYLES = ("jax_step", "jax_pjit")


@dataclass(frozen=True)
class Copy:
    """One copy. ``way`` is H2D, D2H, D2D or P2P; ``gb_per_s`` its rate while it moves."""

    way: str
    size: int
    gb_per_s: float
    src: str
    dst: str
    is_async: bool = True


@dataclass(frozen=True)
class Point:
    """Something between two kernels of a step, at ``at`` (0 begin of forward, 1 end of backward).

    With ``blocks`` the host waits for the GPU before it goes on; ``host_ms`` is what the host
    then does itself, shown as an executor event ``op`` where that is given.
    """

    at: float
    copies: tuple[Copy, ...] = ()
    blocks: bool = False
    host_ms: float = 0.0
    op: str = ""
    sync_call: bool = False  # an explicit cuStreamSynchronize


@dataclass(frozen=True)
class Job:
    """Times are milliseconds per step or microseconds per kernel, of the healthy mean; the seed varies them."""

    seed: int
    style: str = "keras3"  # keras2, keras3, spe, custom, eager, jax_step, jax_pjit
    version: tuple[int, int] = (2, 19)
    gpu: str = "A100"
    gpus: int = 1
    idle_gpus: int = 0  # listed by the process, never used
    cpu_only: bool = False
    steps: int = 16
    per_execution: int = 4  # iterations of one anchor, style "spe"
    training: bool = True  # else an evaluation loop: forward only

    # what one GPU computes
    family: str = "transformer"  # transformer, cnn, mlp, rnn
    dtype: str = "bf16"
    compute_ms: float = 60.0
    kernels: int = 400
    elementwise: float = 0.14  # share of the compute time
    chained_elementwise: int = 0  # more element-wise ops per layer, one feeding the next
    matmul_factor: float = 1.0  # matmuls and convolutions take so much longer
    matmul_names: str = ""  # instead of the dtype's own: fp32, unaligned, fp16_scudnn
    xla: bool = False
    small_grids: bool = False  # kernels of fewer blocks than the GPU has SMs
    jitter: float = 0.01
    kernel_gap_us: float = 1.0  # between two kernels of one stream that are both queued

    # how the host launches
    launch_us: float = 9.0
    launch_jitter: float = 0.2
    latency_us: float = 4.5
    run_ahead: int = 1  # steps the host may be ahead of the device; 0 waits for each step's result
    private_threads: bool = False
    stall_share: float = 0.0  # of launches that are held up
    stall_us: float = 0.0
    gap_ms: float = 0.3  # Python between two steps
    gap_events: tuple[str, ...] = ()
    retrace_every: int = 0
    retrace_ms: float = 0.0
    warm_up: float = 0.0  # the first step takes so many ms more

    # input pipeline
    produce_ms: float = 20.0  # one batch, all workers together
    prefetch: int = 2
    buffer_full: bool = True  # when the capture begins
    burst_every: int = 0  # batches; each such one takes burst_ms more
    burst_ms: float = 0.0
    map_parallel: bool = True
    input_workers: int = 4
    input_jitter: float = 0.08
    batch_mb: float = 38.0
    pinned: bool = True
    h2d_overlap: bool = True
    h2d_gb_per_s: float = 0.0  # 0: the link's
    tf_data: bool = True

    # several GPUs
    comm_ms: float = 0.0  # transfer time of all gradients of a step
    comm_count: int = 8
    comm_overlap: bool = True
    comm_latency_us: float = 18.0  # of each collective, beside its transfer
    late_ms: float = 0.0  # launches to one GPU begin so much later
    late_gpu: int = -1  # -1: another one each step
    gpu_factor: tuple[float, ...] = ()  # compute time of each GPU against the others'
    gpu0_extra_ms: float = 0.0
    gpu0_extra_kernels: int = 0
    one_thread: bool = False  # one thread launches to all GPUs, one after the other
    serial: bool = False  # the model's layers lie on the GPUs one after the other

    points: tuple[Point, ...] = ()
    loss_scale_kernels: int = 0
    loss_scale_ms: float = 0.0
    loss_scale_blocks: bool = False

    # memory: peak as a share of the allocator's capacity
    memory: float = 0.86
    memory_lifetime: float = 0.0  # 0: the same
    fragmentation: float = 0.04

    # what the capture has
    seen_gpus: int = 0  # the others belong to processes that were not captured; 0: all
    host_plane: bool = True
    launches: bool = True  # the host's calls, which CUPTI records apart from the kernels
    device_events: bool = True
    allocator: bool = True
    op_events: bool = True
    tf_ops: bool = True
    noise: bool = True
    clip: bool = True
    old_details: bool = False
    errors: tuple[str, ...] = field(default=())

    def rng(self, what: str) -> np.random.Generator:
        """A stream of its own per use, so that one parameter's change leaves all other draws as they are."""
        return np.random.default_rng([self.seed, zlib.crc32(what.encode())])

    def but(self, **changes: object) -> Job:
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def jax(self) -> bool:
        return self.style in JAX_STYLES

    @property
    def iterations(self) -> int:
        """Optimizer steps of one call from Python."""
        return self.per_execution if self.style == "spe" else 1

    @property
    def architecture(self) -> str:
        return GPUS[self.gpu][0]

    @property
    def link_gb_per_s(self) -> float:
        return GPUS[self.gpu][6]
