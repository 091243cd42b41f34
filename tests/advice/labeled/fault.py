"""A fault in a job, and helpers of the functions that make one."""

from __future__ import annotations

from dataclasses import dataclass

from tests.advice.labeled.case import Window, call_ms
from tests.advice.labeled.jobs import LabeledJob, random_job

IMBALANCE = ("replica_imbalance", "gpu0_oversubscribed")
COMM = ("communication_exposed", "allreduce_count", "allreduce_slow", "collective_waiting")
PRECISION = ("tensor_cores_unused", "fp16_fallback", "dims_unaligned", "loss_scaling")


@dataclass(frozen=True)
class Fault:
    """A job with the fault and without. The other fields are those of :class:`~tests.advice.labeled.case.Case`."""

    job: LabeledJob
    fixed: LabeledJob
    consequences: tuple[str, ...] = ()
    must_not: tuple[str, ...] = ()
    window: Window | None = None  # of severities, where they do not follow from the cost
    params: int | None = None
    partly_fixed: LabeledJob | None = None
    main: tuple[str, ...] = ()  # ids that may come first, besides the fault's own


def step_ms(job: LabeledJob) -> float:
    """Length of one iteration, in milliseconds."""
    return call_ms(job) / job.iterations


_VERSIONS = {
    "keras2": ((2, 10), (2, 13), (2, 15)), "keras3": ((2, 16), (2, 18), (2, 19), (2, 21)), "spe": ((2, 20),),
    "custom": ((2, 12), (2, 16), (2, 19)), "eager": ((2, 11), (2, 15), (2, 19)), "jax_step": ((2, 21),),
    "jax_pjit": ((2, 21),)}


def loop_style(seed: int, *styles: str) -> dict[str, object]:
    """One of these ways to write a training loop, and a TensorFlow version that has it."""
    style = styles[seed % len(styles)]
    return {"style": style, "version": _VERSIONS[style][seed // len(styles) % len(_VERSIONS[style])]}


def multi_gpu_job(seed: int, **wanted: object) -> LabeledJob:
    """A healthy job on several GPUs. Collectives that are not overlapped are short."""
    job = random_job(seed, **{"gpus": (2, 4, 8, 8, 4)[seed % 5], "idle_gpus": 0, "warm_up": 0.0, **wanted})
    return job if job.comm_overlap or "comm_ms" in wanted else job.replace(comm_ms=0.02 * job.compute_ms)
