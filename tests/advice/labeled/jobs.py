"""Healthy jobs of many kinds, drawn by seed: what faults are put into."""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from gputop.simulation.job import Copy, GpuModel, SimulatedJob

# Each with the rate of its host link in GB/s.
GPUS: dict[str, tuple[GpuModel, float]] = {
    "V100": (GpuModel((7, 0), 16_160, 898, 80, 1_530_000), 11.8),
    "T4": (GpuModel((7, 5), 15_360, 320, 40, 1_590_000), 11.2),
    "A100": (GpuModel((8, 0), 40_536, 1555, 108, 1_410_000), 23.5),
    "RTX3090": (GpuModel((8, 6), 24_268, 936, 82, 1_695_000), 23.0),
    "A10": (GpuModel((8, 6), 22_731, 600, 72, 1_695_000), 22.0),
    "L4": (GpuModel((8, 9), 23_034, 300, 58, 2_040_000), 22.5),
    "H100": (GpuModel((9, 0), 81_559, 3352, 132, 1_980_000), 51.0),
}
KERAS_STYLES = ("keras2", "keras3", "spe")
JAX_STYLES = ("jax_step", "jax_pjit")

_ARCHITECTURES = {"V100": "volta", "T4": "turing", "A100": "ampere", "RTX3090": "ampere", "A10": "ampere", "L4": "ada",
                  "H100": "hopper"}
_DTYPES = {
    "volta": ("fp16",), "turing": ("fp16",), "ampere": ("bf16", "fp16", "tf32"), "ada": ("bf16", "tf32"),
    "hopper": ("bf16", "bf16", "tf32")}
_STYLES = (
    ("keras2", (2, 10)), ("keras2", (2, 13)), ("keras2", (2, 15)), ("keras3", (2, 16)), ("keras3", (2, 18)),
    ("keras3", (2, 21)), ("custom", (2, 15)), ("custom", (2, 19)), ("spe", (2, 20)), ("jax_step", (2, 21)),
    ("jax_pjit", (2, 21)))
_EVENTS = 22_000  # device events of a trace


class SyncCopy(Copy, frozen=True):
    """A copy whose call lasts as long as it does."""


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


class LabeledJob(SimulatedJob, frozen=True):
    """A job of any model, number type and way to write the loop on any GPU; the demo's has one of each."""

    style: str = "keras3"  # keras2, keras3, spe, custom, eager, jax_step, jax_pjit
    version: tuple[int, int] = (2, 19)
    gpu: str = "A100"
    idle_gpus: int = 0  # visible to the process, never used
    cpu_only: bool = False
    per_execution: int = 4  # optimizer steps per call, style "spe" (Keras' steps_per_execution)
    mid_step: tuple[MidStepWork, ...] = ()
    loss_scale_kernels: int = 0
    loss_scale_ms: float = 0.0
    loss_scale_blocks: bool = False
    fragmentation: float = 0.04
    allocator_share: float = 0.925

    # Kernels. matmul_names may be unaligned, unaligned_bf16 or fp16_scudnn; "": those of the dtype.
    family: str = "transformer"  # transformer, cnn, mlp, rnn
    dtype: str = "bf16"
    kernels: int = 400
    elementwise: float = 0.14
    jitter: float = 0.01
    kernel_gap_us: float = 1.0
    chained_elementwise: int = 0  # more element-wise ops per layer, one feeding the next
    matmul_factor: float = 1.0  # multiplies the time of matmuls and convolutions
    matmul_names: str = ""
    softmax_factor: float = 1.0  # multiplies the time of softmaxes between two matmuls
    layout_ms: float = 0.0  # conversions between NCHW and NHWC, one per layer and pass, beside compute_ms
    apply_kernels: int = 0  # of the optimizer, 2.5 µs each beside compute_ms; 0: a twelfth of the kernels
    small_grids: bool = False  # kernels have fewer blocks than the GPU has SMs

    # Launches, and Python between steps.
    function_start_ms: float = 0.05
    launch_us: float = 9.0
    gap_ms: float = 0.3
    launch_jitter: float = 0.2
    latency_us: float = 4.5
    thread_stagger_us: float = 0.0
    run_ahead: int = 1  # steps by which the host may lead the device; 0: it waits for each step's result
    private_threads: bool = False  # TF_GPU_THREAD_MODE=gpu_private
    stall_share: float = 0.0  # share of the launches that are delayed by ``stall_us`` in the mean
    stall_us: float = 0.0
    gap_every: int = 1  # steps from one gap between steps to the next; between the others 0.3 ms
    gap_events: tuple[str, ...] = ()
    retrace_every: int = 0  # steps; 0: never
    retrace_ms: float = 0.0
    warm_up: float = 0.0  # milliseconds that the first step takes longer

    # Batches.
    produce_ms: float = 20.0
    prefetch: int = 2
    input_workers: int = 4
    readers: int = 0
    cpu_budget: int = 32
    input_jitter: float = 0.08
    h2d_gb_per_s: float = 0.0  # 0: as fast as the GPU's link
    buffer_full: bool = True  # at the first step
    burst_every: int = 0  # every so many batches one takes ``burst_ms`` longer
    burst_ms: float = 0.0
    map_parallel: bool = True
    pinned: bool = True

    # Several GPUs, and unevenness among them.
    comm_count: int = 8
    comm_latency_us: float = 18.0
    comm_skew_us: float = 4.0
    late_ms: float = 0.0  # launches to one GPU begin later by this
    late_gpu: int = -1  # -1: another one each step
    gpu_factor: tuple[float, ...] = ()  # relative compute time of each GPU
    one_thread: bool = False  # one thread launches to all GPUs, one after the other
    serial: bool = False  # model parallelism: the layers are spread over the GPUs

    # What is recorded.
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

    def replace(self, **changes: object) -> LabeledJob:
        return replace(self, **changes)

    @property
    def architecture(self) -> str:
        return _ARCHITECTURES[self.gpu]

    @property
    def jax(self) -> bool:
        return self.style in JAX_STYLES

    @property
    def iterations(self) -> int:
        """Optimizer steps of one call from Python."""
        return self.per_execution if self.style == "spe" else 1

    @property
    def model(self) -> GpuModel:
        return GPUS[self.gpu][0]

    @property
    def link_gb_per_s(self) -> float:
        return GPUS[self.gpu][1]

    @property
    def captured_gpus(self) -> int:
        """Number of the GPUs that the job uses which are in the trace."""
        return 0 if self.cpu_only else self.seen_gpus or self.gpus


def random_job(seed: int, **wanted: object) -> LabeledJob:
    """A job with nothing wrong: launches well ahead of the GPUs, batches ready, gradients moved behind the compute."""
    rng = np.random.default_rng([seed, 77])
    style, version = _STYLES[int(rng.integers(len(_STYLES)))]
    gpu = list(GPUS)[int(rng.integers(len(GPUS)))]
    gpus = int(rng.choice([1, 1, 2, 4, 8]))
    style = str(wanted.get("style", style))
    version = wanted.get("version", version)  # type: ignore[assignment]
    gpu, gpus = str(wanted.get("gpu", gpu)), int(wanted.get("gpus", gpus))  # type: ignore[call-overload]
    dtype = str(rng.choice(_DTYPES[_ARCHITECTURES[gpu]]))
    family = str(rng.choice(["transformer", "cnn", "mlp", "transformer", "cnn"]))
    compute = float(wanted.get("compute_ms", np.exp(rng.uniform(np.log(22), np.log(320)))))  # type: ignore[arg-type]
    drawn = np.clip(compute * 1000 / rng.uniform(70, 220), 60, min(1600, _EVENTS / gpus / 9))
    kernels = int(wanted.get("kernels", drawn))  # type: ignore[call-overload]
    jax = style.startswith("jax")
    xla = bool(rng.random() < 0.2)
    xla = bool(wanted.get("xla", jax or xla))
    launch = float(rng.uniform(3.5, 6) if xla else rng.uniform(7, 14))
    per_execution = 4 if style == "spe" else 1
    comm = compute * float(rng.uniform(0.08, 0.3)) if gpus > 1 else 0.0
    steps = int(np.clip(_EVENTS / (kernels * gpus * per_execution), 6 if per_execution > 1 else 9, 24))
    job = LabeledJob(seed).replace(
        style=style, version=version, gpu=gpu, gpus=gpus, family=family, dtype=dtype, compute_ms=compute,
        kernels=kernels, elementwise=float(rng.uniform(0.06, 0.15)) * (1.0 if xla else 0.5), xla=xla, launch_us=launch,
        steps=steps, per_execution=per_execution, jitter=float(rng.uniform(0.004, 0.02)),
        produce_ms=compute * float(rng.uniform(0.2, 0.6)), prefetch=int(rng.integers(1, 6)),
        map_parallel=bool(rng.random() < 0.75), input_workers=int(rng.integers(2, 9)),
        batch_mb=min(float(rng.uniform(1, 80)), compute * 0.4 * GPUS[gpu][1]), comm_ms=comm,
        comm_count=int(rng.integers(8, 16)), memory=float(rng.uniform(0.8, 0.895)), gap_ms=float(rng.uniform(0.1, 0.6)),
        private_threads=bool(rng.random() < 0.3) and not jax, noise=bool(rng.random() < 0.7),
        op_events=bool(rng.random() < 0.8), warm_up=compute * 3 if rng.random() < 0.2 else 0.0,
        run_ahead=int(rng.choice([1, 1, 1, 2])), idle_gpus=int(rng.choice([0, 0, 0, 1])) if gpus < 8 else 0,
        old_details=version < (2, 11) and not jax)
    return job.replace(**wanted)
