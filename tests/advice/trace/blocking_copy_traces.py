"""Traces of a job that fetches values from the device and waits for them."""

from __future__ import annotations

from gputop.trace.model import Kind, MemoryKind
from tests.advice.trace.traces import KERNEL, STEP, STEPS, job
from tests.trace.build import Builder


def fetching(count: int, idle: float, *, sync: bool = True, call: bool = False, at_end: bool = False,
             way: Kind = Kind.D2H) -> Builder:
    """``count`` values are copied in each step; the host launches the kernels before each at once, waits for the
    copy, and needs ``idle`` µs to launch on."""
    b = job()
    name, end = f"Memcpy{way.name}", MemoryKind.PINNED
    for i in range(STEPS):
        t = i * STEP + 100
        for k in range(count + 1):
            launch = t - 8
            while t < i * STEP + 100 + (k + 1) * 17_000 / (count + 1):
                b.run(0, t, 96, KERNEL, launch=launch, launch_length=2)
                t, launch = t + 100, launch + 3
            if k < count or at_end:
                b.run(0, t, 2, name, kind=way, launch=launch, size=4, src=end, dst=end,
                      launch_length=t + 4 - launch if sync and not call else 2)
                if call:
                    b.host("cuStreamSynchronize", launch + 2, t + 2 - launch, line="launch 0")
                t += 2 + idle
    return b
