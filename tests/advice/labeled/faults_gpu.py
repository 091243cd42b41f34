"""Faults on each GPU: what it computes, copies and keeps in memory."""

from __future__ import annotations

from gputop.simulation.job import Copy
from tests.advice.labeled.case import FUSED, HIGH, LOW, MEDIUM, Window
from tests.advice.labeled.fault import COMM, IMBALANCE, PRECISION, Fault, loop_style, step_ms
from tests.advice.labeled.jobs import MidStepWork, SyncCopy, random_job

# What can be found, too, where little of the time is that of matmuls.
_BESIDE_MATMULS = ("xla_off", "attention_unfused")


def xla_off(seed: int, share: float) -> Fault:
    """Long chains of element-wise ops, each a kernel that reads and writes all of its tensor.

    XLA would fuse a chain into one kernel; moving the data once instead of three to four times. GPUs are
    busy, so nothing else is to gain. The fixed job has the same matmuls and a third of that time.
    """
    part = share * 1.45  # of it 69% goes
    job = random_job(
        seed, warm_up=0.0, **loop_style(seed, "keras2", "keras3", "custom"), xla=False,
        family=("transformer", "mlp", "cnn")[seed % 3], chained_elementwise=6 + seed % 5, kernels=360, compute_ms=40.0,
        elementwise=part)
    left = 1 - part * (1 - 1 / FUSED)
    fused = job.replace(
        xla=True, chained_elementwise=0, kernels=140, compute_ms=40.0 * left, elementwise=part / FUSED / left)
    window: Window = (None, MEDIUM) if share < 0.05 else (LOW, HIGH) if share < 0.15 else (MEDIUM, HIGH)
    return Fault(
        job, fused, ("small_kernels",), ("input_bound", "launch_bound", "eager_execution", "step_gap_host", *IMBALANCE,
        *PRECISION), window)


def copies_excessive(seed: int, share: float) -> Fault:
    """Data travels that need not: activations to the host and back, a table uploaded at each step, copies on the GPU.

    Pinned, asynchronous and at the link's rate, in the compute stream's order: nothing about how they are
    done is wrong, only that they are done.
    """
    job = random_job(seed, warm_up=0.0, gpus=(1, 2)[seed % 2], old_details=False)
    count = (6, 24, 12)[seed % 3]
    each = step_ms(job) * share / (1 - share) / count
    way = ("D2H", "H2D", "D2D", "both")[seed % 4]
    rate = 450.0 if way == "D2D" else job.link_gb_per_s
    ends = {"D2H": ("device", "pinned"), "H2D": ("pinned", "device"), "D2D": ("device", "device")}
    transfers = []
    for i in range(count):
        own = ("D2H", "H2D")[i % 2] if way == "both" else way
        copy = Copy(own, int(each * 1e6 * rate), rate, *ends[own])
        transfers.append(MidStepWork(0.04 + 0.9 * i / count, (copy,), op=f"swap_{i}:Identity"))
    return Fault(
        job.replace(mid_step=tuple(transfers)), job, must_not=("copies_pageable", "sync_copies", "input_bound",
        "launch_bound", "step_gap_host", *IMBALANCE))


def copies_pageable(seed: int, share: float) -> Fault:
    """The batch lies in pageable memory: the driver stages it, at a quarter of the link's rate, and holds the host.

    The copy says kind_src:pageable and its call lasts as long as it does; no copy of the next batch can
    run beside the step. In pinned memory it would run at the link's rate behind the step before.
    """
    job = random_job(seed, warm_up=0.0, old_details=False, gpus=1, run_ahead=0)
    rate = job.link_gb_per_s * (0.2 + 0.03 * (seed % 3))
    size = step_ms(job) * share / (1 - share) * rate
    paged = job.replace(pinned=False, h2d_gb_per_s=rate, batch_mb=size)
    return Fault(
        paged, paged.replace(pinned=True, h2d_gb_per_s=0.0), ("copies_excessive", "sync_copies"),
        ("launch_bound", "step_gap_host", *COMM, *IMBALANCE))


def sync_copies(seed: int, share: float) -> Fault:
    """Values are fetched in the midst of the step (.numpy(), tf.print, a Python condition): the host waits for each.

    The copies are tiny and not asynchronous (async:0, then cuStreamSynchronize): what they cost is the
    launch queue running dry, and what the host does with the value before it launches on.
    """
    job = random_job(
        seed, warm_up=0.0, gpus=1, old_details=False, run_ahead=1, **loop_style(seed, "custom", "jax_step", "keras3"))
    count = 8 + 4 * (seed % 5)
    each = max(step_ms(job) * share / (1 - share) / count - 0.03, 0.01)
    fetches = tuple(
        MidStepWork((i + 0.5) / count, (SyncCopy("D2H", 4 << (i % 8), 0.01, "device", "pinned"),),
        blocks=True, host_ms=each, sync_call=True) for i in range(count))
    return Fault(
        job.replace(mid_step=fetches), job, ("launch_bound", "host_placement"),
        ("input_bound", "step_gap_host", "copies_pageable", "copies_excessive", *COMM, *IMBALANCE))


def tensor_cores_unused(seed: int, share: float) -> Fault:
    """Matmuls and convolutions in FP32 on the ordinary cores of a GPU that has tensor cores.

    TF32 switched off, or a GPU before it without mixed precision. The kernels say FFMA (sgemm, scudnn,
    simt), the fixed job's say tensor core and take a fraction of the time.
    """
    job = random_job(
        seed, warm_up=0.0, gpu=("V100", "A100", "H100", "T4", "A10")[seed % 5], dtype="fp32", xla=False,
        **loop_style(seed, "keras2", "custom", "keras3", "jax_step"), elementwise=0.2)
    if share < 0.05:
        job = job.replace(elementwise=0.97, matmul_factor=1.8)
    else:
        job = job.replace(matmul_factor=max(share / (1 - share) / 0.8 + 1, 1.2))
    fixed = job.replace(matmul_factor=1.0, dtype="tf32" if job.architecture not in ("volta", "turing") else "fp16")
    return Fault(
        job, fixed, _BESIDE_MATMULS, ("fp16_fallback", "dims_unaligned", "loss_scaling", "input_bound", "launch_bound"),
        (None, LOW) if share < 0.05 else (MEDIUM, HIGH))


def fp16_fallback(seed: int, share: float) -> Fault:
    """Mixed precision is on (element-wise kernels are DT_HALF), yet matmuls run without tensor cores.

    FP16 kernels of the ordinary cores (…_fp16_scudnn, hgemm) for shapes or layouts that have no tensor-core kernel.
    """
    job = random_job(
        seed, warm_up=0.0, gpu=("V100", "A100", "T4")[seed % 3], dtype="fp16", xla=False, matmul_names="fp16_scudnn",
        **loop_style(seed, "keras2", "custom", "keras3"), elementwise=0.2)
    if share < 0.05:
        job = job.replace(elementwise=0.97, matmul_factor=1.8)
    else:
        job = job.replace(matmul_factor=share / (1 - share) / 0.8 + 1)
    return Fault(
        job, job.replace(matmul_factor=1.0, matmul_names=""), ("tensor_cores_unused", *_BESIDE_MATMULS),
        ("dims_unaligned", "input_bound", "launch_bound", "step_gap_host"),
        (None, LOW) if share < 0.05 else (LOW, HIGH) if share < 0.15 else (MEDIUM, HIGH))


def dims_unaligned(seed: int, share: float) -> Fault:
    """16-bit matmuls on tensor cores whose dimensions are no multiples of 8: kernels of align1 and align2.

    They use tensor cores, at half the rate or less, because each thread loads one or two values at a time.
    """
    dtype = ("fp16", "bf16")[seed % 2]
    job = random_job(
        seed, warm_up=0.0, gpu="A100", dtype=dtype, xla=False, **loop_style(seed, "keras2", "custom", "keras3"),
        matmul_names="unaligned" if dtype == "fp16" else "unaligned_bf16", elementwise=0.2)
    if share < 0.05:
        job = job.replace(elementwise=0.97, matmul_factor=1.6)
    else:
        job = job.replace(matmul_factor=share / (1 - share) / 0.8 + 1)
    return Fault(
        job, job.replace(matmul_factor=1.0, matmul_names=""), _BESIDE_MATMULS,
        ("tensor_cores_unused", "input_bound", "launch_bound", "loss_scaling"),
        (None, LOW) if share < 0.05 else (LOW, HIGH))


def loss_scaling(seed: int, share: float) -> Fault:
    """Dynamic loss scaling: every gradient is unscaled and checked, and the host waits for the verdict.

    Two small kernels per variable after the backward pass, then a predicate copied to the host before the
    optimizer's launches, at each step. bfloat16 needs none of it, a static scale no verdict.
    """
    job = random_job(
        seed, warm_up=0.0, dtype="fp16", gpu=("V100", "A100", "T4")[seed % 3], xla=False, gpus=(1, 1, 2)[seed % 3],
        **loop_style(seed, "keras2", "custom", "keras3"), compute_ms=18.0 + 7 * (seed % 4), run_ahead=1)
    cost = max(step_ms(job) * share / (1 - share) - 0.4, 0.0)
    count = min(max(40, int(cost / 0.012)), 700)
    return Fault(
        job.replace(loss_scale_kernels=count, loss_scale_ms=cost, loss_scale_blocks=True), job,
        ("sync_copies", "small_kernels", "xla_off"), ("input_bound", "tensor_cores_unused", "fp16_fallback",
        "dims_unaligned", "step_gap_host"))


def small_grids(seed: int, share: float) -> Fault:
    """Kernels of 2 to 40 blocks on a GPU of many SMs, long enough that launching them costs nothing.

    The GPU is busy all the time, and most of it is empty. The fixed job spreads the same work over all SMs. Weak: short
    kernels of few blocks beside an input wait that takes most of the step.
    """
    if share < 0.05:
        job = random_job(seed, warm_up=0.0, gpus=1, gpu="A100", small_grids=True, compute_ms=6.0, kernels=60, xla=True,
                         memory=0.89, produce_ms=1.0, batch_mb=0.5, gap_ms=0.1, kernel_gap_us=900.0)
        return Fault(job, job, ("small_kernels", "launch_bound"), (), (None, LOW))
    job = random_job(
        seed, warm_up=0.0, gpus=(1, 2)[seed % 2], gpu=("A100", "H100")[seed % 2], small_grids=True, kernels=300,
        compute_ms=160.0, memory=0.89, batch_mb=4.0, produce_ms=4.0, run_ahead=2,
        **loop_style(seed, "keras3", "custom"))
    spread = job.replace(small_grids=False, compute_ms=job.compute_ms * (1 - share))
    return Fault(job, spread, ("xla_off",), ("input_bound", "launch_bound", "step_gap_host", "memory_pressure"),
                 (HIGH, HIGH))


def batch_size_headroom(seed: int, share: float) -> Fault:
    """The batch is far too small: most of the allocator's capacity was never used, and kernels are small for the GPU.

    Grids have fewer blocks than the GPU has SMs and kernels are so short that launching them takes as long:
    a larger batch makes them longer at nearly the same number. Weak: a fifth is free and the kernels are large.
    """
    used = {True: 0.18, False: 0.4}[share > 0.15] if share >= 0.05 else 0.78
    job = random_job(
        seed, warm_up=0.0, memory=used, **loop_style(seed, "keras2", "keras3", "custom", "keras3"), xla=False,
        gpus=(1, 1, 2)[seed % 3], compute_ms=12.0, kernels=560, small_grids=True, batch_mb=0.5, produce_ms=3.0,
        comm_ms=0.5, steps=14, run_ahead=1)
    if share < 0.05:
        job = random_job(seed, warm_up=0.0, memory=used)
        return Fault(job, job, (), ("memory_pressure", "input_bound", "step_gap_host", *IMBALANCE), (None, LOW))
    lost = 0.55 if share > 0.15 else 0.25
    slow = job.replace(launch_us=step_ms(job) * 1000 / (1 - lost) / job.kernels)
    return Fault(
        slow, slow, ("launch_bound", "small_kernels", "xla_off", "small_grids"), ("memory_pressure", "input_bound",
        "step_gap_host", *IMBALANCE), (LOW, HIGH), main=("launch_bound", "small_kernels"))


def memory_pressure(seed: int, share: float) -> Fault:
    """The allocator's peak is at its capacity and its free memory in pieces: the next larger tensor fails."""
    used = (0.992 if share > 0.15 else 0.972) if share >= 0.05 else 0.912
    job = random_job(seed, warm_up=0.0, memory=used, fragmentation=0.35 if share > 0.05 else 0.05)
    return Fault(
        job, job, (), ("batch_size_headroom", "input_bound", *IMBALANCE),
        (None, MEDIUM) if share < 0.05 else (LOW, HIGH) if share < 0.15 else (MEDIUM, HIGH))


def attention_unfused(seed: int, share: float) -> Fault:
    """Softmax and what scales and masks in kernels of their own, over scores that are read and written each time.

    Long sequences: these kernels take as long as matmuls. A fused kernel keeps the scores on the chip.
    """
    job = random_job(
        seed, warm_up=0.0, family="transformer", xla=False, gpus=1, elementwise=0.2, compute_ms=60.0, memory=0.89,
        **loop_style(seed, "keras2", "custom", "keras3"))
    fused = job.replace(softmax_factor=0.01)
    base, each = step_ms(fused), (step_ms(job.replace(softmax_factor=11.0)) - step_ms(job)) / 10
    slow = job.replace(softmax_factor=base * share / (1 - share) / each)
    return Fault(
        slow, fused, ("xla_off",), ("input_bound", "step_gap_host", "layout_conversions", *IMBALANCE, *PRECISION))


def layout_conversions(seed: int, share: float) -> Fault:
    """Convolutions want one layout, the model has the other: a transpose before and after each layer."""
    job = random_job(
        seed, warm_up=0.0, family="cnn", xla=False, gpus=1, compute_ms=60.0,
        **loop_style(seed, "keras2", "custom", "keras3"))
    return Fault(
        job.replace(layout_ms=step_ms(job) * share / (1 - share)), job, ("xla_off",),
        ("input_bound", "step_gap_host", "attention_unfused", *IMBALANCE, *PRECISION))


def optimizer_unfused(seed: int, share: float) -> Fault:
    """A kernel per variable, each so short that it does little more than begin; a fused one would do for hundreds."""
    job = random_job(
        seed, warm_up=0.0, xla=False, gpus=1, compute_ms=12.0, kernels=60, launch_us=3.0, apply_kernels=2, batch_mb=0.1,
        **loop_style(seed, "keras2", "custom", "keras3"))
    count = int(step_ms(job) * share / (1 - share) / 0.0035)
    return Fault(
        job.replace(apply_kernels=count, kernels=job.kernels + count), job.replace(kernels=job.kernels + 2),
        ("launch_bound", "small_kernels", "xla_off"),
        ("input_bound", "step_gap_host", "attention_unfused", *IMBALANCE))


def allocation_in_steps(seed: int, share: float) -> Fault:
    """Memory is freed and allocated by the driver in each step: the call waits for the GPU, which then has no work."""
    job = random_job(seed, warm_up=0.0, gpus=1, run_ahead=1, **loop_style(seed, "custom", "jax_step", "keras3"))
    count = 4 + 2 * (seed % 3)
    each = max(step_ms(job) * share / (1 - share) / count - 0.03, 0.01)
    calls = tuple(MidStepWork((i + 0.5) / count, blocks=True, host_ms=each, op=("cudaFree", "cudaMalloc")[i % 2])
                  for i in range(count))
    return Fault(
        job.replace(mid_step=calls), job, ("launch_bound", "sync_copies"),
        ("input_bound", "step_gap_host", "host_placement", *COMM, *IMBALANCE))
