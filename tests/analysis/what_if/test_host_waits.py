from __future__ import annotations

import math

from gputop.analysis.what_if.host_waits import host_waits
from gputop.trace.model import Kind, MemoryKind
from tests.trace.build import Builder


def test_a_synchronization_waits_for_the_longest_of_the_copies_before_it() -> None:
    """As OpenACC sends an array and two scalars; an event's own wait in between returns at once."""
    b = Builder(format="nsys")
    for i in range(4):
        at = 10_000 * i
        for k, (length, size) in enumerate(((2_600, 16 << 20), (2, 160), (2, 1))):
            b.run(0, at + (10 if not k else 2_620 + 5 * k), length, "MemcpyH2D", kind=Kind.H2D, launch=at + 8 * k,
                  launch_length=4, size=size, src=MemoryKind.PINNED, dst=MemoryKind.DEVICE, thread="a.out/1")
        b.host("cuEventSynchronize", at + 5, 2, line="a.out/1")
        b.host("cuStreamSynchronize", at + 30, 2_620, line="a.out/1")
        b.run(0, at + 2_700, 170, "kmeans", launch=at + 2_660, launch_length=5, thread="a.out/1")
    trace = b.build()
    waits = host_waits(trace, math.inf)
    synchronizes = waits.end_ns - waits.start_ns > 1_000_000
    assert synchronizes.sum() == 4 and (trace.device.bytes[waits.copy[synchronizes]] == 16 << 20).all()
