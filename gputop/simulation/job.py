"""The parameters of the demo's training job. Everything a trace shows follows from them and the seed."""

from __future__ import annotations

import zlib
from typing import ClassVar

import numpy as np
from msgspec import Struct


class GpuModel(Struct, frozen=True):
    capability: tuple[int, int]
    memory_mib: int
    memory_gb_per_s: int
    sms: int
    clock_khz: int


_H100 = GpuModel((9, 0), 81_559, 3352, 132, 1_980_000)


class Copy(Struct, frozen=True):
    """An asynchronous memory copy. ``way`` is H2D, D2H or P2P; ``gb_per_s`` is its transfer rate."""

    way: str
    size: int
    gb_per_s: float
    src: str
    dst: str


ALLOCATOR_MIB = 77_200  # of an H100's memory, what TensorFlow reserves


class SimulatedJob(Struct, frozen=True):
    """Times are means, in milliseconds per step or microseconds per kernel; the seed varies them."""

    elementwise: ClassVar[float] = 0.155  # share of the compute time
    jitter: ClassVar[float] = 0.012
    kernel_gap_us: ClassVar[float] = 0.9  # between two queued kernels of one stream
    function_start_ms: ClassVar[float] = 0.8  # from the batch to the first launch
    launch_jitter: ClassVar[float] = 0.15
    latency_us: ClassVar[float] = 2.0  # from the launch to the earliest start
    thread_stagger_us: ClassVar[float] = 40.0  # the GPUs' launching threads start one after the other
    readers: ClassVar[int] = 8  # files that a ParallelInterleave stage reads at once
    cpu_budget: ClassVar[int] = 224  # CPUs that tf.data may use
    input_jitter: ClassVar[float] = 0.12
    h2d_gb_per_s: ClassVar[float] = 50.0
    comm_count: ClassVar[int] = 6  # collectives of a step
    comm_latency_us: ClassVar[float] = 0.0  # of each collective, beside its transfer
    comm_skew_us: ClassVar[float] = 0.0  # a collective ends on all GPUs within this time
    fragmentation: ClassVar[float] = 0.031  # of the memory that TensorFlow's allocator has taken
    allocator_share: ClassVar[float] = ALLOCATOR_MIB / _H100.memory_mib

    seed: int
    gpus: int = 1
    steps: int = 16
    training: bool = True  # False: an evaluation loop, forward pass only
    compute_ms: float = 60.0
    kernels: int = 444
    xla: bool = False
    launch_us: float = 22.0
    gap_ms: float = 2.5  # Python between two steps
    produce_ms: float = 150.0  # one batch, by all workers together
    prefetch: int = 4
    input_workers: int = 64
    batch_mb: float = 38.0
    comm_ms: float = 0.0  # transfer time of all gradients of a step
    comm_overlap: bool = True
    gpu0_extra_ms: float = 0.0  # kernel time of GPU 0 beside its share, between forward and backward pass
    gpu0_extra_kernels: int = 0
    gather_mb: float = 0.0  # what each other GPU sends to GPU 0 before these kernels
    memory: float = 0.86  # that TensorFlow's allocator has taken at its peak, as a share of what it may
    gpu0_memory: float = 0.0  # on GPU 0; 0: as on the others

    def rng(self, what: str) -> np.random.Generator:
        """A random stream per use: changing one parameter leaves all other draws as they are."""
        return np.random.default_rng([self.seed, zlib.crc32(what.encode())])

    @property
    def model(self) -> GpuModel:
        return _H100

    @property
    def allocator_capacity_bytes(self) -> int:
        return _whole_blocks((self.model.memory_mib << 20) * self.allocator_share)

    def allocator_peak_bytes(self, gpu: int) -> int:
        return _whole_blocks(self.allocator_capacity_bytes * ((gpu == 0 and self.gpu0_memory) or self.memory))


def _whole_blocks(size_bytes: float) -> int:
    """The allocator hands out blocks of 256 bytes."""
    return int(size_bytes) // 256 * 256
