"""Steps of kernels with launch shapes on an H100."""

from __future__ import annotations

from gputop.trace.model import LaunchShape, Trace, TraceGpu
from tests.trace.build import Builder, keras_steps

SMS, STEPS, STEP = 132, 4, 1000.0  # a step in µs
H100 = TraceGpu("node", 0, compute_capability=(9, 0), sms=SMS)
HUGE = LaunchShape(((1 << 32) - 1,) * 3, (1024, 1, 1), 32, 0, 1.0)  # a grid that no integer holds


def shape(blocks: int, threads: int = 1024) -> LaunchShape:
    return LaunchShape((blocks, 1, 1), (threads, 1, 1), 32, 0, 1.0)  # an SM of an H100 holds 2 of these


def job(*kernels: tuple[float, float, str, LaunchShape | None]) -> Builder:
    """Steps of 1 ms with these kernels: begin, length, name, shape."""
    b = keras_steps(Builder(), STEPS, STEP, 900)
    for i in range(STEPS):
        for begin, length, name, how in kernels:
            b.run(0, i * STEP + begin, length, name, shape=how, launch=max(i * STEP + begin - 10, 0))
    return b


def on(b: Builder, gpu: TraceGpu = H100) -> Trace:
    trace = b.build()
    trace.gpus = [gpu]
    return trace
