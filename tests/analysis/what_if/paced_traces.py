"""Traces of steps that the GPU or the host paces."""

from __future__ import annotations

import random

from gputop.trace.model import Kind, Trace
from tests.trace.build import Builder, keras_steps

STEPS, STEP = 6, 20_000.0  # µs
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def host_paced() -> Trace:
    """A kernel of 20 µs every 100 µs, each launched as late as that."""
    b = keras_steps(Builder(), STEPS, STEP, STEP - 50)
    for i in range(STEPS):
        for k in range(199):
            at = i * STEP + 50 + 100 * k
            b.run(0, at + 5, 20, launch=at)
    return b.build()


def gpu_paced(wait: bool = True) -> Trace:
    """180 kernels of 100 µs, launched in the first millisecond of the step; then the host waits for them."""
    b = keras_steps(Builder(), STEPS, STEP, STEP - 50)
    for i in range(STEPS):
        begin = i * STEP + 50
        for k in range(180):
            b.run(0, begin + 10 + 100 * k, 100, launch=begin + 5 * k, launch_length=4)
        if wait:
            b.host("cuStreamSynchronize", begin + 1_000, 18_010 - 1_000 + 5, line="launch 0")
    return b.build()


def late_batches() -> Trace:
    """Each step waits 8 ms for its batch, which takes the input pipeline 15 ms."""
    b = keras_steps(Builder(), STEPS, STEP, STEP - 50)
    for i in range(STEPS):
        b.host("IteratorGetNextOp::DoCompute", i * STEP + 20, 8_000, line="launch 0")
        b.host("Iterator::Root::Prefetch::Map", i * STEP, 15_000, line="tf_data_private_threadpool/1")
        for k in range(100):
            at = i * STEP + 8_050 + 100 * k
            b.run(0, at + 5, 95, launch=at)
    return b.build()


def unexplained() -> Trace:
    """Half of the kernels begin milliseconds after their launch, and nothing ran before them."""
    b = keras_steps(Builder(), STEPS, STEP, STEP - 50)
    for i in range(STEPS):
        b.run(0, i * STEP + 100, 100, launch=i * STEP + 90)
        b.run(0, i * STEP + 12_000, 7_500, launch=i * STEP + 110)
        b.host("cuStreamSynchronize", i * STEP + 200, 19_310, line="launch 0")
    return b.build()


def any_job(seed: int, renamed: bool = False) -> Builder:
    """Two GPUs, three streams each, collectives, waits of the host for GPUs and for batches, unknown launches.
    ``renamed``: streams, threads and kernels."""
    rng = random.Random(seed)
    b = keras_steps(Builder(gpus=2), STEPS, STEP, STEP - 50)
    kernel, threads = ("k", ("worker 9", "worker 8")) if renamed else ("kernel", ("launch 0", "launch 1"))
    host, free = [50.0, 60.0], [[0.0] * 4, [0.0] * 4]
    while max(host) < STEPS * STEP - 3_000:
        for gpu, thread in enumerate(threads):
            for _ in range(rng.randrange(4, 12)):
                host[gpu] += rng.expovariate(1 / 120)
                stream = rng.randrange(3)
                start = max(host[gpu] + 5, free[gpu][stream], rng.choice(free[gpu]))
                free[gpu][stream] = start + rng.expovariate(1 / 100)
                b.run(gpu, start, free[gpu][stream] - start, kernel, stream=7 - stream if renamed else stream,
                      launch=host[gpu] if rng.random() < 0.9 else None, thread=thread)
            if rng.random() < 0.3:
                b.host("cuStreamSynchronize", host[gpu] + 5, max(max(free[gpu]) - host[gpu], 1), line=thread)
                host[gpu] = max(max(free[gpu]), host[gpu] + 5) + 5
        came = [max(host[gpu] + 10, *free[gpu]) for gpu in range(2)]
        for gpu, thread in enumerate(threads):
            free[gpu][3] = max(came) + 80
            b.run(gpu, came[gpu], free[gpu][3] - came[gpu], NCCL, kind=Kind.COLLECTIVE, launch=host[gpu] + 5, stream=3,
                  thread=thread)
            host[gpu] += 15
        if rng.random() < 0.2:
            b.host("IteratorGetNextOp::DoCompute", host[0], 900, line=threads[0])
            b.host("Iterator::Root::Prefetch::Map", host[0] - 50, 800, line="tf_data_private_threadpool/1")
            host[0] += 905
    return b
