"""Faults between GPUs: collectives, and who waits for whom."""

from __future__ import annotations

from tests.advice.labeled.case import HIGH, MEDIUM
from tests.advice.labeled.fault import IMBALANCE, Fault, loop_style, multi_gpu_job, step_ms
from tests.advice.labeled.jobs import LabeledJob, random_job

# Gradients reduced per second over eight GPUs' NVLink, as NCCL's own tests measure it.
_GB_PER_S = {"V100": 75.0, "A100": 130.0, "H100": 230.0}


def _params(job: LabeledJob, gb_per_s: float) -> int:
    return int(job.comm_ms / 1000 * gb_per_s * 1e9 / 4)


def communication_exposed(seed: int, share: float) -> Fault:
    """All gradients are reduced after the backward pass: the GPUs stand still for the whole transfer.

    All arrive together and the transfer is as fast as the links are, in few large pieces: what is wrong
    is only that nothing is computed meanwhile.
    """
    job = multi_gpu_job(seed, comm_overlap=True, gpu=("A100", "H100", "V100")[seed % 3])
    lost = step_ms(job) * share / (1 - share)
    exposed = job.replace(comm_overlap=False, comm_ms=lost, comm_count=4 + seed % 5)
    return Fault(
        exposed, exposed.replace(comm_overlap=True, comm_count=32), (),
        ("collective_waiting", "allreduce_count", "allreduce_slow", "input_bound", "launch_bound", *IMBALANCE),
        params=_params(exposed, _GB_PER_S[job.gpu]) if seed % 2 else None)


def allreduce_count(seed: int, share: float) -> Fault:
    """One AllReduce for every variable: hundreds of tiny ones, each paying its latency.

    Together they move little; merged into a few they would take a fraction of the time.
    """
    job = multi_gpu_job(
        seed, comm_ms=0.8, comm_count=6, comm_overlap=False, compute_ms=14.0 + 6 * (seed % 4), kernels=150)
    count = 120 + 40 * (seed % 5)
    latency = step_ms(job) * share / (1 - share) * 1000 / count
    steps = min(job.steps, max(9, int(30_000 / (job.gpus * (job.kernels + count)))))
    latency = max(latency, 12.0)
    return Fault(
        job.replace(comm_count=count, comm_latency_us=latency, steps=steps), job,
        ("communication_exposed", "launch_bound"), ("collective_waiting", "input_bound", *IMBALANCE))


def allreduce_slow(seed: int, share: float) -> Fault:
    """The AllReduce is many times slower than its bytes over the slowest link of a node would take (1 GB/s or less).

    NCCL fell back to sockets or to a slow path. All GPUs arrive together, so it is no waiting; the number of
    parameters is given, since the trace does not show it.
    """
    job = multi_gpu_job(seed, gpu=("A100", "H100", "V100")[seed % 3], comm_overlap=False, comm_count=5, comm_ms=0.5)
    lost = step_ms(job) * share / (1 - share)
    slow = job.replace(comm_ms=lost)
    rate = 0.9 - 0.15 * (seed % 4)
    return Fault(
        slow, job, ("communication_exposed",), ("collective_waiting", "allreduce_count", "input_bound", "launch_bound",
        *IMBALANCE), params=_params(slow, rate))


def collective_waiting(seed: int, share: float) -> Fault:
    """One GPU begins its step late, always the same or another each time, and does the same work.

    Its launches come late (its process was busy), so all the others wait for it within the first collective:
    that time is in NCCL's kernels, yet the transfer, seen on the late GPU, is short.
    """
    job = multi_gpu_job(seed, run_ahead=0, comm_overlap=bool(seed % 2))
    late = step_ms(job) * share / (1 - share)
    return Fault(
        job.replace(late_ms=late, late_gpu=-1 if seed % 3 == 0 else job.gpus - 1 - seed % 2), job,
        ("launch_bound", "staggered_launch"), ("allreduce_slow", "allreduce_count", "input_bound", *IMBALANCE))


def replica_imbalance(seed: int, share: float) -> Fault:
    """One GPU, not the first, computes more per step (longer sequences, a larger shard); the others wait for it."""
    job = multi_gpu_job(seed, comm_overlap=bool(seed % 2))
    who = 1 + seed % (job.gpus - 1)
    factor = tuple(1 / (1 - share) if g == who else 1.0 for g in range(job.gpus))
    even = job.replace(gpu_factor=(sum(factor) / job.gpus,) * job.gpus)
    return Fault(
        job.replace(gpu_factor=factor), job, ("collective_waiting",),
        ("gpu0_oversubscribed", "allreduce_slow", "allreduce_count", "communication_exposed", "input_bound",
        "launch_bound", "batch_size_headroom"), partly_fixed=even)


def gpu0_oversubscribed(seed: int, share: float) -> Fault:
    """GPU 0 has work of its own beside its share (metrics, a teacher, variables): the others wait for it."""
    job = multi_gpu_job(seed, comm_overlap=bool(seed % 2))
    lost = step_ms(job) * share / (1 - share)
    return Fault(
        job.replace(gpu0_extra_ms=lost, gpu0_extra_kernels=max(6, int(lost / 0.15))), job,
        ("collective_waiting", "replica_imbalance"), ("allreduce_slow", "allreduce_count", "communication_exposed",
        "input_bound", "launch_bound"), partly_fixed=job.replace(gpu_factor=(1 + lost / job.gpus / job.compute_ms,
        ) * job.gpus))


def serial_gpus(seed: int, share: float) -> Fault:
    """The layers lie on the GPUs one after the other, without pipelining: only one GPU works at a time.

    Activations go from GPU to GPU. The fixed job does the same work with all GPUs at once.
    """
    count = 2 if share < 0.4 else 4
    job = random_job(
        seed, warm_up=0.0, gpus=count, idle_gpus=0, comm_ms=0.0, xla=False, run_ahead=0, compute_ms=45.0, kernels=240,
        steps=12, **loop_style(seed, "custom", "keras3", "keras2"))
    return Fault(
        job.replace(serial=True), job.replace(comm_ms=1.0), ("staggered_launch", "copies_excessive", "launch_bound"),
        ("input_bound", "allreduce_slow", "collective_waiting", "gpu0_oversubscribed"), (MEDIUM, HIGH))


def staggered_launch(seed: int, share: float) -> Fault:
    """One thread launches to the GPUs in turn, a whole step each: every GPU begins when the one before is served.

    They do the same work and end as they began, one after the other; the collective holds them together.
    """
    job = multi_gpu_job(
        seed, run_ahead=0, xla=False, comm_overlap=False, comm_count=4,
        **loop_style(seed, "custom", "keras2", "keras3"))
    job = job.replace(comm_ms=job.compute_ms * 0.03)
    delay = step_ms(job) * share / (1 - share) / (job.gpus - 1)
    paced = job.replace(launch_us=delay * 1000 / job.kernels)
    return Fault(
        paced.replace(one_thread=True), paced, ("launch_bound", "collective_waiting"),
        ("input_bound", "allreduce_slow", "allreduce_count", *IMBALANCE))
