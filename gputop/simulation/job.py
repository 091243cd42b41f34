"""The parameters of the demo's training job. Everything a trace shows follows from them and the seed."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

if TYPE_CHECKING:
    from typing_extensions import Self


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


class KernelWork(Struct, frozen=True):
    compute_ms: float = 60.0
    kernels: int = 400
    elementwise: float = 0.14  # share of the compute time
    xla: bool = False
    jitter: float = 0.01
    kernel_gap_us: float = 1.0  # between two queued kernels of one stream


class Launching(Struct, frozen=True):
    """Launches of a step, and Python between two steps."""

    function_start_ms: float = 0.05  # from the batch to the first launch
    launch_us: float = 9.0
    launch_jitter: float = 0.2
    latency_us: float = 4.5  # from the launch to the earliest start
    thread_stagger_us: float = 0.0  # the GPUs' launching threads start one after the other
    gap_ms: float = 0.3  # Python between two steps


class BatchMaking(Struct, frozen=True):
    produce_ms: float = 20.0  # one batch, by all workers together
    prefetch: int = 2
    input_workers: int = 4
    readers: int = 0  # files that a ParallelInterleave stage reads at once
    cpu_budget: int = 32  # CPUs that tf.data may use
    input_jitter: float = 0.08
    batch_mb: float = 38.0
    h2d_gb_per_s: float = 0.0


class SeveralGpus(Struct, frozen=True):
    """Work that several GPUs do together, and unevenly."""

    comm_ms: float = 0.0  # transfer time of all gradients of a step
    comm_count: int = 8
    comm_overlap: bool = True
    comm_latency_us: float = 18.0  # of each collective, beside its transfer
    comm_skew_us: float = 4.0  # a collective ends on all GPUs within this time
    gpu0_extra_ms: float = 0.0  # kernel time of GPU 0 beside its share, between forward and backward pass
    gpu0_extra_kernels: int = 0
    gather_mb: float = 0.0  # what each other GPU sends to GPU 0 before these kernels


class AllocatorShares(Struct, frozen=True):
    """Memory that TensorFlow's allocator has taken, at its peak."""

    memory: float = 0.86
    gpu0_memory: float = 0.0  # on GPU 0; 0: as on the others
    fragmentation: float = 0.04
    allocator_share: float = 0.925  # of the GPU's memory that TensorFlow reserves


class SimulatedJob(Struct, frozen=True):
    """Times are means, in milliseconds per step or microseconds per kernel; the seed varies them."""

    seed: int
    gpus: int = 1
    steps: int = 16
    training: bool = True  # False: an evaluation loop, forward pass only
    work: KernelWork = KernelWork()
    host: Launching = Launching()
    input: BatchMaking = BatchMaking()
    across: SeveralGpus = SeveralGpus()
    allocation: AllocatorShares = AllocatorShares()

    @classmethod
    def of(cls, seed: int, **values: object) -> Self:
        """A job with these parameters, those of its groups among them."""
        return cls(seed).replace(**values)

    def rng(self, what: str) -> np.random.Generator:
        """A random stream per use: changing one parameter leaves all other draws as they are."""
        return np.random.default_rng([self.seed, zlib.crc32(what.encode())])

    def replace(self, **changes: object) -> Self:
        """The job with other values of these parameters, whichever group has them."""
        for name in self.__struct_fields__:
            group = getattr(self, name)
            if isinstance(group, Struct):
                changed = {field: changes.pop(field) for field in group.__struct_fields__ if field in changes}
                if changed:
                    changes[name] = replace(group, **changed)
        return replace(self, **changes)

    @property
    def model(self) -> GpuModel:
        return _H100

    @property
    def allocator_capacity_bytes(self) -> int:
        return _whole_blocks((self.model.memory_mib << 20) * self.allocation.allocator_share)

    def allocator_peak_bytes(self, gpu: int) -> int:
        used = self.allocation
        return _whole_blocks(self.allocator_capacity_bytes * ((gpu == 0 and used.gpu0_memory) or used.memory))


def _whole_blocks(size_bytes: float) -> int:
    """The allocator hands out blocks of 256 bytes."""
    return int(size_bytes) // 256 * 256
