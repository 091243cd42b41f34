"""Jobs with nothing wrong, of every kind that could be mistaken for something, and traces that lack a rule's inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gputop.simulation.job import Copy
from tests.advice.labeled.case import MEDIUM, Case, Window
from tests.advice.labeled.faults import FAULTS
from tests.advice.labeled.jobs import LabeledJob, MidStepWork, random_job

_DEVICE_IDS = frozenset(
    ("launch_bound", "small_kernels", "xla_off", "copies_excessive", "copies_pageable", "sync_copies",
    "tensor_cores_unused", "fp16_fallback", "dims_unaligned", "loss_scaling", "communication_exposed",
    "allreduce_count", "allreduce_slow", "collective_waiting", "replica_imbalance", "gpu0_oversubscribed",
    "serial_gpus", "staggered_launch"))
_HOST_IDS = frozenset(
    ("input_bound", "step_gap_host", "thread_contention", "launch_bound", "eager_execution", "retracing",
    "host_placement", "batch_size_headroom", "memory_pressure"))


def _jobs() -> Iterator[tuple[str, LabeledJob]]:
    yield "deep-queue-v100", random_job(
        301, gpu="V100", gpus=1, style="custom", version=(2, 15), dtype="fp16", run_ahead=2)
    yield "one-gpu-keras3", random_job(302, gpus=1, style="keras3", version=(2, 21), gpu="A100", dtype="bf16")
    yield "one-gpu-keras2-old", random_job(
        303, gpus=1, style="keras2", version=(2, 9), gpu="T4", dtype="fp16", old_details=True)
    yield "eight-overlapped", random_job(304, gpus=8, gpu="H100", dtype="bf16", comm_count=14)
    yield "eight-overlapped-cnn", random_job(
        305, gpus=8, gpu="A100", dtype="tf32", family="cnn", comm_count=16, style="keras2", version=(2, 13))
    yield "four-jax", random_job(306, gpus=4, gpu="A100", dtype="bf16", style="jax_step", version=(2, 21), xla=True)
    yield "tf32-by-default", random_job(
        307, gpu="A100", dtype="tf32", style="keras3", version=(2, 16), gpus=1, xla=False)
    yield "tf32-cnn", random_job(
        308, gpu="RTX3090", dtype="tf32", family="cnn", style="keras2", version=(2, 14), gpus=1, xla=False)
    yield "bf16-h100", random_job(309, gpu="H100", dtype="bf16", gpus=1)
    yield "xla-compiled", random_job(310, xla=True, style="custom", version=(2, 17), gpu="A100", dtype="bf16", gpus=1)
    yield "cuda-graph", random_job(311, xla=True, style="jax_pjit", version=(2, 21), gpus=1, launch_us=1.2, gpu="H100")
    yield "steps-per-execution", random_job(312, style="spe", version=(2, 20), gpus=2)
    yield "cpu-only", random_job(
        313, cpu_only=True, style="keras3", version=(2, 18), compute_ms=80.0, gpus=1, idle_gpus=0)
    yield "cpu-only-keras2", random_job(
        314, cpu_only=True, style="keras2", version=(2, 13), compute_ms=140.0, gpus=1, idle_gpus=0)
    yield "evaluation", random_job(315, training=False, style="keras3", version=(2, 19), gpus=1, comm_ms=0.0)
    yield "evaluation-keras2", random_job(316, training=False, style="keras2", version=(2, 12), gpus=1, comm_ms=0.0)
    yield "near-memory-limit", random_job(317, memory=0.895, gpus=1, gpu="A100", compute_ms=420.0)
    yield "unused-gpus", random_job(318, gpus=1, idle_gpus=7, gpu="A100")
    yield "two-of-eight", random_job(319, gpus=2, idle_gpus=6, gpu="H100", dtype="bf16")
    yield "callbacks-behind-queue", random_job(
        320, gpus=1, run_ahead=2, gap_ms=6.0, compute_ms=120.0, kernels=700, style="custom", version=(2, 18),
        gap_events=("EagerLocalExecute: ReadVariableOp",))
    yield "slow-pipeline-hidden", random_job(321, gpus=1, compute_ms=100.0, produce_ms=88.0, prefetch=6, batch_mb=20.0)
    yield "big-batches-pinned", random_job(322, gpus=1, gpu="A100", compute_ms=150.0, batch_mb=1200.0, pinned=True)
    yield "warm-up-in-window", random_job(323, gpus=1, warm_up=900.0, clip=False, compute_ms=60.0)
    yield "noisy", random_job(324, gpus=4, jitter=0.06, noise=True, gpu="A100", launch_jitter=0.8)
    yield "long-steps", random_job(325, gpus=1, compute_ms=900.0, kernels=1200, steps=9)
    yield "short-steps", random_job(326, gpus=1, compute_ms=26.0, kernels=160, steps=24, xla=True, gap_ms=0.1)
    yield "gpu-private", random_job(327, gpus=2, private_threads=True, style="keras3", version=(2, 19), xla=False)
    yield "small-model-busy", random_job(333, memory=0.3, gpus=1, gpu="A100", compute_ms=90.0)
    yield "few-metrics-copies", random_job(
        328, gpus=1, compute_ms=90.0, mid_step=tuple(MidStepWork(0.2 * i, (Copy("D2H", 2048, 2.0, "device", "pinned"),),
        op=f"metrics_{i}:Identity") for i in range(4)))
    yield "some-host-ops-behind-queue", random_job(
        329, gpus=1, style="custom", version=(2, 16), compute_ms=110.0, xla=False)
    yield "rnn-large", random_job(330, gpus=1, family="rnn", kernels=500, compute_ms=90.0, gpu="A100", dtype="bf16")
    for i in range(24):
        yield f"random-{i}", random_job(1000 + i)
    yield "static-loss-scale", random_job(
        331, gpus=1, gpu="V100", dtype="fp16", loss_scale_kernels=40, loss_scale_ms=0.3, xla=False)
    yield "other-host-gpus-late", random_job(332, gpus=2, gpu="A100", gpu_factor=(1.0, 1.02))


_NO_WINDOWS: Mapping[str, Window] = {}
# Memory is free, yet the GPU is busy with large kernels: a larger batch may be suggested, no more.
_OPTIONAL: dict[str, dict[str, Window]] = {"small-model-busy": {"batch_size_headroom": (None, MEDIUM)}}


def healthy() -> list[Case]:
    return [Case(f"healthy-{name}", "healthy", job, windows=_OPTIONAL.get(name, {})) for name, job in _jobs()]


def missing() -> list[Case]:
    """The rule must say what it lacks rather than accuse."""
    out = []

    def add(name: str, id_: str, abstain: frozenset[str], seed: int = 3, share: float = 0.3,
            windows: Mapping[str, Window] = _NO_WINDOWS, **changes: object) -> None:
        fault = FAULTS[id_](seed, share)
        out.append(
            Case(f"missing-{name}", "missing", fault.job.replace(**changes),
            consequences=frozenset((id_, *fault.consequences)) - abstain, must_not=frozenset(fault.must_not),
            abstain=abstain, windows=windows))

    add("host-plane-input", "input_bound", _HOST_IDS, host_plane=False)
    add("host-plane-launch", "launch_bound", _HOST_IDS, host_plane=False)
    add("host-plane-gap", "step_gap_host", _HOST_IDS, host_plane=False)
    add(
        "launches", "launch_bound", frozenset(("launch_bound", "staggered_launch", "thread_contention")),
        launches=False)
    add("allocator", "batch_size_headroom", frozenset(("memory_pressure",)), allocator=False)
    add("allocator-full", "memory_pressure", frozenset(("memory_pressure",)), allocator=False)
    add(
        "device-events", "communication_exposed", _DEVICE_IDS, device_events=False,
        errors=("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES: failed to enable activity",))
    add("device-events-quiet", "tensor_cores_unused", _DEVICE_IDS, device_events=False)
    add("copy-kinds", "copies_pageable", frozenset(("copies_pageable",)), old_details=True)
    add("parameters", "allreduce_slow", frozenset(("allreduce_slow",)))
    # What one rank shows is said as that: it does not tell whether data moves or others are waited for.
    add(
        "other-ranks", "collective_waiting", frozenset(("collective_waiting", "replica_imbalance",
        "gpu0_oversubscribed", "serial_gpus", "staggered_launch")), seen_gpus=1,
        windows={"communication_exposed": (None, MEDIUM)})
    add("steps", "step_gap_host", frozenset(("step_gap_host", "retracing")), steps=2, warm_up=0.0)
    add("cpu-only", "input_bound", _DEVICE_IDS, cpu_only=True)
    return out
