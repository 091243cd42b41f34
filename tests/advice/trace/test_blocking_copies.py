"""Rules on how copies are done, and on memory."""

from __future__ import annotations

import pytest

from gputop.trace.model import Kind, MemoryKind
from tests.advice.trace.traces import KERNEL, STEP, STEPS, abstained, copying, findings, healthy, job
from tests.trace.build import Builder

GIB = 2**30




@pytest.mark.parametrize(("length", "there"), [(500, False), (800, True), (6_000, True)])
def test_pageable_copies(length, there):
    found = findings(copying(Kind.H2D, length, MemoryKind.PAGEABLE))
    assert ("copies_pageable" in found) == there
    if there:
        assert found["copies_pageable"].gain.step_time == pytest.approx(length / STEP, abs=0.003)


def test_pinned_copies_are_not_cured_by_pinning():
    assert "copies_pageable" not in findings(copying(Kind.H2D, 6_000))


def test_small_pageable_copies_are_staged_at_once():
    assert "copies_pageable" not in findings(copying(Kind.H2D, 6_000, MemoryKind.PAGEABLE, size=60_000))


def test_unknown_memory_is_not_judged():
    assert "kind_src" in abstained(copying(Kind.H2D, 6_000, MemoryKind.UNKNOWN))["copies_pageable"]


def fetching(count: int, idle: float, *, sync: bool = True, call: bool = False, at_end: bool = False) -> Builder:
    """``count`` values are fetched in each step; the GPU stands still for ``idle`` µs after each."""
    b = job()
    for i in range(STEPS):
        t = i * STEP + 100
        for k in range(count + 1):
            while t < i * STEP + 100 + (k + 1) * 17_000 / (count + 1):
                b.run(0, t, 96, KERNEL, launch=t - (90 if t > i * STEP + 100 and k == 0 else 8), launch_length=2)
                t += 100
            if k < count or at_end:
                b.run(0, t, 2, "MemcpyD2H", kind=Kind.D2H, launch=t - 90, size=4, dst=MemoryKind.PINNED,
                      launch_length=100 if sync and not call else 5)
                if call:
                    b.host("cuStreamSynchronize", t - 80, 90, line="launch 0")
                t += 2 + idle
    return b


@pytest.mark.parametrize("call", [True, False])
def test_waiting_for_copies_within_the_step(call):
    f = findings(fetching(4, 400, call=call))["sync_copies"]
    assert f.gain.step_time == pytest.approx(4 * 400 / STEP, abs=0.01)
    assert f.evidence["copies_per_step"] == pytest.approx(4)


@pytest.mark.parametrize("b", [
    fetching(4, 50),  # one per cent
    fetching(4, 400, sync=False),  # nobody waited for them
    fetching(0, 400, at_end=True),  # the loss, at the end of the step
], ids=["short", "async", "end"])
def test_copies_that_cost_nothing_within_the_step(b):
    assert "sync_copies" not in findings(b)


def test_copies_without_their_calls_are_not_judged():
    b = healthy()
    b.run(0, 50, 2, "MemcpyD2H", kind=Kind.D2H, size=4)
    assert "correlation" in abstained(b)["sync_copies"]


@pytest.mark.parametrize(("peak", "pieces", "severity"), [
    (36.0, 0.5, None), (37.2, 0.5, "low"), (39.0, 0.1, "medium"), (39.8, 0.1, "medium"), (39.8, 0.4, "high")])
def test_memory_pressure(peak, pieces, severity):
    b = healthy()
    used = int(peak * GIB)
    b.memory(5, "GPU_0_bfc", used, 40 * GIB - used, used, fragmentation=pieces)
    found = findings(b).get("memory_pressure")
    assert (found and found.severity) == severity
    if found:
        assert found.gain.step_time is None and found.evidence["peak_ratio"] == pytest.approx(peak / 40)


def test_memory_is_not_judged_without_the_allocator():
    assert "GPU_<n>_bfc" in abstained(healthy())["memory_pressure"]
