"""Traces of steps that the GPU or the host paces."""

from __future__ import annotations

from gputop.trace.model import Trace
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
