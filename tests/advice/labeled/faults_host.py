"""Faults of the host: input, Python, launches."""

from __future__ import annotations

from gputop.simulation.job import Copy
from tests.advice.labeled.fault import COMM, IMBALANCE, Fault, loop_style, step_ms
from tests.advice.labeled.jobs import MidStepWork, random_job


def input_bound(seed: int, share: float) -> Fault:
    """Batches are made more slowly than the GPUs use them: the step sits in IteratorGetNext with all GPUs idle.

    Either tf.data makes a batch only when asked (no prefetch, serial map), so that its time adds to the
    step; or it prefetches but is slower than the step, so that its time becomes the step. The fix is the
    pipeline: with idle GPUs the batch size or the launches say nothing, whatever memory is free.
    """
    job = random_job(
        seed, memory=0.45 if seed % 3 == 0 else 0.85, warm_up=0.0, **loop_style(seed, "keras3", "keras2", "jax_step",
        "custom", "spe"))
    step = step_ms(job)
    if seed % 4 == 3:  # a shard is opened every few batches, which takes longer than the buffer lasts
        wait = step * 4 * share / (1 - share) + step * 0.8
        slow = job.replace(burst_every=4, burst_ms=wait, produce_ms=step * 0.2, prefetch=1, run_ahead=0, steps=24)
        return Fault(
            slow, slow.replace(burst_every=0), must_not=("batch_size_headroom", "launch_bound", "step_gap_host", *COMM,
            *IMBALANCE))
    if seed % 2:
        slow = job.replace(prefetch=0, map_parallel=False, run_ahead=0, produce_ms=step * share / (1 - share))
        return Fault(
            slow, slow.replace(prefetch=2, produce_ms=step * 0.3, run_ahead=0),
            must_not=("batch_size_headroom", "launch_bound", "step_gap_host", *COMM, *IMBALANCE))
    slow = job.replace(produce_ms=step / (1 - share), buffer_full=False)
    return Fault(slow, job, must_not=("batch_size_headroom", "launch_bound", "step_gap_host", *COMM, *IMBALANCE))


def step_gap_host(seed: int, share: float) -> Fault:
    """Between two calls of the step function Python works (metrics, callbacks, logging) while the GPUs are idle.

    The loop waits for each step's result, so the queue is empty when the gap begins. The wait for input
    within the step is short and launches are quick, so neither is to blame.
    """
    job = random_job(
        seed, run_ahead=0, warm_up=0.0, **loop_style(seed, "keras2", "keras3", "custom", "jax_step", "spe"),
        per_execution=2, steps=12)
    names = (
        (), ("EagerLocalExecute: ReadVariableOp", "EagerLocalExecute: Mean", "convert_to_tensor"),
        ("EagerLocalExecute: SaveV2",),
        ("EagerLocalExecute: WriteScalarSummary", "EagerLocalExecute: AssignAddVariableOp"))
    gap = step_ms(job) * job.iterations * share / (1 - share) + job.gap_ms
    return Fault(
        job.replace(gap_ms=gap, gap_events=names[seed % 4]), job,
        must_not=("input_bound", "launch_bound", "batch_size_headroom", *COMM, *IMBALANCE))


def long_steps(seed: int, share: float) -> Fault:
    """Every few steps Python does something that takes long (a checkpoint, a summary), and the GPUs are idle.

    The mean over all steps is that of no step: most have no gap at all.
    """
    every = (4, 5, 6)[seed % 3]
    job = random_job(
        seed, run_ahead=0, warm_up=0.0, **loop_style(seed, "keras2", "keras3", "custom", "jax_step"), jitter=0.01,
        steps=6 * every, gap_ms=0.3)
    names = ((), ("EagerLocalExecute: SaveV2",), ("EagerLocalExecute: WriteScalarSummary",))
    gap = step_ms(job) * share / (1 - share) * every + 0.3
    return Fault(
        job.replace(gap_ms=gap, gap_every=every, gap_events=names[seed % 3]), job, ("step_gap_host",),
        must_not=("input_bound", "launch_bound", "batch_size_headroom", "retracing", *COMM, *IMBALANCE))


def thread_contention(seed: int, share: float) -> Fault:
    """tf.data's workers, more of them than there are cores free, push the launching threads off the CPU.

    Single launches are late by fractions of a millisecond all over the step while the workers run; the GPU
    drains its queue and waits. Launches come from the global pool (tf_Compute); batches are ready in time.
    """
    job = random_job(
        seed, **loop_style(seed, "keras2", "keras3", "custom"), xla=False, private_threads=False, input_workers=24,
        map_parallel=True, warm_up=0.0, prefetch=3, gpus=1 + seed % 2)
    step = step_ms(job)
    count = job.kernels
    launch = 0.5 * job.compute_ms * 1000 / count
    extra = (step / (1 - share) - 0.5 * job.compute_ms) * 1000 / (0.2 * count)
    calm = job.replace(launch_us=launch, produce_ms=step * 0.55)
    return Fault(
        calm.replace(stall_share=0.2, stall_us=extra, produce_ms=step / (1 - share) * 0.86), calm,
        ("launch_bound", "collective_waiting"), ("input_bound", "step_gap_host", "small_kernels", "eager_execution",
        *IMBALANCE))


def launch_bound(seed: int, share: float) -> Fault:
    """The host needs longer to launch an op than the GPU to run it, for all of the step.

    The GPU idles between kernels, and each starts as soon as it is launched. Kernels are of ordinary
    length (slow CPU, a debugger, Python dispatching) or, for odd seeds, short beside it.
    """
    short = bool(seed % 2)
    job = random_job(
        seed, warm_up=0.0, xla=False, **loop_style(seed, "keras2", "keras3", "custom", "keras3"), run_ahead=1,
        gpus=(1, 2, 1, 4)[seed % 4], kernels=700, compute_ms=14.0 if short else 60.0, steps=12, batch_mb=2.0,
        produce_ms=4.0, comm_ms=0.0)
    if job.gpus > 1:
        job = job.replace(comm_ms=2.0)
    step = step_ms(job)
    slow = job.replace(launch_us=step * 1000 / (1 - share) / job.kernels)
    return Fault(
        slow, job, ("small_kernels", "xla_off", "batch_size_headroom") if short else ("xla_off",),
        ("input_bound", "step_gap_host", "eager_execution", "retracing", "thread_contention", *IMBALANCE),
        main=("small_kernels",) if short else ())


def small_kernels(seed: int, share: float) -> Fault:
    """The step is thousands of kernels of a few microseconds, each below what launching one takes.

    Launched one by one the GPU waits for most of them; as one CUDA graph they run back to back and
    still lose the pause between any two. The same work in fewer, larger kernels is the fix.
    """
    graph = seed % 3 == 0
    count = (1200, 2000, 900)[seed % 3]
    work = count * (4.0 if graph else 5.0) / 1000  # ms
    lost = work * share / (1 - share)
    job = random_job(
        seed, warm_up=0.0, family=("rnn", "mlp", "transformer")[seed % 3], kernels=count, compute_ms=work, steps=12,
        gpus=1, run_ahead=1, batch_mb=0.5, produce_ms=1.0, gap_ms=0.05, xla=graph, elementwise=0.4,
        style="jax_pjit" if graph else ("keras3", "custom")[seed % 2], version=(2, 19))
    large = job.replace(kernels=count // 10, launch_us=4.0)
    if graph:
        # Pauses: what is lost, spread over all kernels.
        return Fault(
            job.replace(launch_us=1.5, kernel_gap_us=lost * 1000 / count + 0.3), large, ("launch_bound", "xla_off"),
            ("input_bound", "step_gap_host", "eager_execution", *COMM, *IMBALANCE))
    return Fault(
        job.replace(launch_us=(work + lost) * 1000 / count), large, ("launch_bound", "xla_off", "batch_size_headroom"),
        ("input_bound", "step_gap_host", "eager_execution", *COMM, *IMBALANCE), main=("launch_bound",))


def eager_execution(seed: int, share: float) -> Fault:
    """No tf.function: Python dispatches every op, and each launch costs 40-100 µs of Python.

    Each op is an EagerExecute with is_func 0 on the thread ``python``, which launches too. Without it the
    same ops in a function would be launched in a few microseconds.
    """
    work = 700 * 0.035
    job = random_job(
        seed, warm_up=0.0, **loop_style(seed, "eager"), xla=False, gpus=1, kernels=700, compute_ms=work, steps=10,
        run_ahead=1, batch_mb=2.0, produce_ms=3.0, op_events=True, idle_gpus=0, jitter=0.01)
    step = step_ms(job.replace(launch_us=8.0))
    return Fault(
        job.replace(launch_us=step * 1000 / (1 - share) / 700), job.replace(style="custom", launch_us=8.0),
        ("launch_bound", "small_kernels", "xla_off"), ("input_bound", "retracing", "thread_contention", *COMM,
        *IMBALANCE))


def retracing(seed: int, share: float) -> Fault:
    """The step function is traced anew every few calls: a shape or a Python value changes.

    Those calls take as long as building the graph takes, say so (traced-…), their tracing_count grows and
    the concrete function has a new name; meanwhile the GPUs have nothing to do.
    """
    job = random_job(
        seed, warm_up=0.0, **loop_style(seed, "custom", "keras2", "keras3", "custom", "jax_pjit"), run_ahead=0,
        steps=15)
    every = (1, 3, 2)[seed % 3]
    cost = step_ms(job) * share / (1 - share) * every
    return Fault(
        job.replace(retrace_every=every, retrace_ms=cost), job, ("step_gap_host", "launch_bound", "eager_execution"),
        ("input_bound", *COMM, *IMBALANCE))


def host_placement(seed: int, share: float) -> Fault:
    """Ops without a GPU kernel run on the CPU in the midst of the step: their inputs come down, results go up.

    The executor shows the op for its whole time on a host thread while the GPU is idle.
    """
    job = random_job(
        seed, warm_up=0.0, **loop_style(seed, "keras2", "keras3", "custom"), gpus=1, xla=False, run_ahead=1,
        op_events=True)
    count = 1 + seed % 4
    each = step_ms(job) * share / (1 - share) / count
    ops = (
        "unique_with_counts:UniqueWithCounts", "PyFunc:EagerPyFunc", "non_max_suppression:NonMaxSuppressionV5",
        "sparse_lookup:SparseSegmentMean", "string_to_hash:StringToHashBucketFast")
    points = tuple(
        MidStepWork((i + 1) / (count + 1), (Copy("D2H", 1 << 20, 11.0, "device", "pinned"),
        Copy("H2D", 1 << 19, 11.0, "pinned", "device")), blocks=True, host_ms=each,
        op="StatefulPartitionedCall/" + ops[(seed + i) % len(ops)]) for i in range(count))
    return Fault(
        job.replace(mid_step=points), job, ("sync_copies", "copies_excessive", "launch_bound"),
        ("input_bound", "step_gap_host", "eager_execution", "copies_pageable", *COMM, *IMBALANCE))
