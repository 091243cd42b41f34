"""Healthy jobs of many kinds, drawn by seed: what faults are put into."""

from __future__ import annotations

import numpy as np

from gputop.simulation.job import GPUS, SimulatedJob
from tests.advice.labeled.matrix_kernels import CONV, GEMM, kernel_names

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


class LabeledJob(SimulatedJob):
    """A job of any model and number type on any GPU; the demo's has one of each. ``matmul_names`` may be unaligned,
    unaligned_bf16 or fp16_scudnn."""

    @property
    def architecture(self) -> str:
        return _ARCHITECTURES[self.gpu]

    def matrix_kernels(self, kind: str) -> tuple[str, ...]:
        names = self.work.matmul_names or self.work.dtype
        return kernel_names(GEMM if kind == "gemm" else CONV, names, self.architecture)


def random_job(seed: int, **wanted: object) -> SimulatedJob:
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
    job = LabeledJob.of(
        seed=seed, style=style, version=version, gpu=gpu, gpus=gpus, family=family, dtype=dtype, compute_ms=compute,
        kernels=kernels, elementwise=float(rng.uniform(0.06, 0.15)) * (1.0 if xla else 0.5), xla=xla, launch_us=launch,
        steps=steps, per_execution=per_execution, jitter=float(rng.uniform(0.004, 0.02)),
        produce_ms=compute * float(rng.uniform(0.2, 0.6)), prefetch=int(rng.integers(1, 6)),
        map_parallel=bool(rng.random() < 0.75), input_workers=int(rng.integers(2, 9)),
        batch_mb=min(float(rng.uniform(1, 80)), compute * 0.4 * GPUS[gpu][5]), comm_ms=comm,
        comm_count=int(rng.integers(8, 16)), memory=float(rng.uniform(0.8, 0.895)), gap_ms=float(rng.uniform(0.1, 0.6)),
        private_threads=bool(rng.random() < 0.3) and not jax, noise=bool(rng.random() < 0.7),
        op_events=bool(rng.random() < 0.8), warm_up=compute * 3 if rng.random() < 0.2 else 0.0,
        run_ahead=int(rng.choice([1, 1, 1, 2])), idle_gpus=int(rng.choice([0, 0, 0, 1])) if gpus < 8 else 0,
        old_details=version < (2, 11) and not jax)
    return job.replace(**wanted)
