"""Rules on how copies are done, and on memory."""

from __future__ import annotations

import pytest

from gputop.diagnosis.diagnose import analyze
from gputop.trace.model import Kind, MemoryKind
from tests.advice.trace.stalls import GIB, fetching, waiting_for
from tests.advice.trace.traces import KERNEL, STEP, STEPS, abstained, copying, findings, healthy, job, verdict
from tests.trace.build import Builder, keras_steps
from tests.trace.shares import NEEDS_SHARED, SHARED


@pytest.mark.parametrize(("length", "there"), [(500, False), (800, True), (6_000, True)])
def test_pageable_copies(length, there):
    found = findings(copying(Kind.H2D, length, MemoryKind.PAGEABLE))
    assert ("copies_pageable" in found) == there
    if there:
        assert found["copies_pageable"].gain.step_time == pytest.approx(length / STEP, abs=0.003)


@pytest.mark.parametrize(("sooner", "size", "saved"), [
    (-15, 100_000_000, 0.82), (4, 100_000_000, 0.82), (4, 1_100_000_000, 0.6)])
def test_a_call_that_lasts_as_long_as_its_pageable_copy_holds_the_host(sooner, size, saved):
    """By the clocks it may return before the copy has ended. Pinned, 1.1 GB take 20 ms, more than the kernels do."""
    b = Builder(format="chrome")
    for i in range(10):
        at = 50_000 * i
        b.host(f"ProfilerStep#{i}", at, 49_900, step_num=i).host("aten::copy_", at, 49_000)
        b.run(0, at + 9_000, 40_000, "MemcpyH2D", kind=Kind.H2D, launch=at + 1_000, launch_length=48_000 - sooner,
              size=size, src=MemoryKind.PAGEABLE, dst=MemoryKind.DEVICE)
        b.run(0, at + 49_100, 8_900, KERNEL, launch=at + 49_090, launch_length=5)
    f = findings(b)["copies_pageable"]
    assert f.gain.by == "replay" and f.gain.step_time == pytest.approx(saved, abs=0.04)


def batch_first(sooner: float, held: str) -> Builder:
    """Eight steps of 70 ms begin with the batch's copy of 28 ms, nothing beside it and its memory not told; then run
    kernels. Until ``sooner`` µs before its end the host is in the copy's call, or in a kernel's launch behind it, or in
    nothing that is recorded (``held``: "copy", "launch", "pause")."""
    b = Builder()
    for i in range(8):
        at, copy, kernel = 70_000.0 * i + 100, 28_000 + 37 * (i % 3), 600
        end = at + 700 + copy
        call = end - sooner - at if held == "copy" else 500.0
        b.run(0, at + 700, copy, "MemcpyH2D", kind=Kind.H2D, launch=at, launch_length=call, size=96_000_000, stream=2)
        launch = at + 600 if held == "launch" else end - sooner + 1
        for k in range(68):
            length = end - sooner - launch if held == "launch" and not k else 5
            b.run(0, end + 5 + kernel * k, kernel - 5, KERNEL, launch=launch, launch_length=length)
            launch += length + 1
        b.host("EagerExecute", at - 90, 69_900, is_func=1, eager_op="__inference_one_step_on_iterator_7")
    return b


@pytest.mark.parametrize("held", ["copy", "launch", "pause"])
@pytest.mark.parametrize("sooner", [6, 8, 20, 60, 140, 300])
def test_the_host_waits_for_a_batch_whose_call_returns_before_its_end(held, sooner):
    """The driver takes the last part of a copy and returns: 4 to 180 µs sooner in real traces."""
    f = findings(batch_first(sooner, held))["copies_excessive"]
    assert f.severity == "high" and f.gain.step_time == pytest.approx(0.4, abs=0.06)


@pytest.mark.parametrize("call", [20, 90])
def test_a_copy_beside_which_the_host_works_is_not_waited_for(call):
    """Asynchronous, from pinned memory: the host needs the whole step for its launches and gains nothing without it."""
    b = keras_steps(Builder(format="chrome"), STEPS, STEP, STEP - 50).host("aten::copy_", 0, 1)
    for i in range(STEPS):
        at = i * STEP + 50.0
        b.run(0, at + call - 5, 8_000, "MemcpyH2D", kind=Kind.H2D, launch=at, launch_length=call, size=400_000_000,
              src=MemoryKind.PINNED, dst=MemoryKind.DEVICE, stream=2)
        for k in range(100):
            b.run(0, at + 8_100 + 110 * k, 10, KERNEL, launch=at + 8_095 + 110 * k, launch_length=5)
    assert not {"copies_excessive", "copies_pageable", "sync_copies"} & findings(b).keys()


@pytest.mark.skipif(not SHARED.is_dir(), reason=NEEDS_SHARED)
def test_a_blocking_copy_of_the_batch_leads():
    (f,) = analyze(SHARED / "cases_more/tf_blocking_batch_copy.xplane.pb").findings
    assert f.id == "copies_excessive" and f.severity == "high"
    assert f.gain.step_time == pytest.approx(0.4, abs=0.01) and f.gain.by == "replay"


def reading(values: int, kernels: int) -> Builder:
    """A step of 20 ms whose second half reads values, each of so many kernels, one every 40 µs or more."""
    b = job()
    b.host("aten::item", 0, 1)
    for i in range(STEPS):
        at = i * STEP + 100.0
        b.run(0, at, 9_000, KERNEL, launch=at - 10, launch_length=2)
        at += 9_100
        for _ in range(values):
            for _ in range(kernels):
                b.run(0, at, 3, KERNEL, launch=at - 5, launch_length=2)
                at += 20
            b.run(0, at, 2, "MemcpyD2H", kind=Kind.D2H, launch=at - 6, launch_length=9, size=8, src=MemoryKind.DEVICE,
                  dst=MemoryKind.PINNED)
            at += 20
    return b


@pytest.mark.parametrize(("values", "kernels", "there"), [(200, 1, True), (8, 1, False), (40, 10, False)])
def test_values_of_a_loop_are_read_one_by_one(values, kernels, there):
    """A few values per step are none, nor those that each take a model's work, as a policy's actions."""
    several = findings(reading(values, kernels)).values()
    titles = [f.title for f in several if "one by one" in f.title]
    assert bool(titles) == there
    if there:
        assert titles[0].startswith("Reading 200 values")


def test_pinned_small_and_unknown_copies_are_not_cured_by_pinning():
    assert "copies_pageable" not in findings(copying(Kind.H2D, 6_000))
    assert "copies_pageable" not in findings(copying(Kind.H2D, 6_000, MemoryKind.PAGEABLE, size=60_000))
    assert "kind_src" in abstained(copying(Kind.H2D, 6_000, MemoryKind.UNKNOWN))["copies_pageable"]


@pytest.mark.parametrize("call", [True, False])
def test_waiting_for_copies_within_the_step(call):
    f = findings(fetching(4, 400, call=call))["sync_copies"]
    assert f.gain.step_time == pytest.approx(4 * 400 / STEP, abs=0.01)
    assert f.evidence["copies_per_step"] == pytest.approx(4) and "numpy" in (f.snippet or "")


def test_copies_to_the_gpu_have_a_cure_of_their_own_and_sizes_are_told_by_direction():
    f = findings(fetching(4, 400, way=Kind.H2D))["sync_copies"]
    assert "send" in f.action and "read" not in f.action
    own = verdict(waiting_for((Kind.H2D, 4), (Kind.H2D, 4), (Kind.D2H, 50_000_000)), "sync_copies")
    assert {way: (copies.count, copies.mean_bytes) for way, copies in own.copies.items()} == {
        "h2d": (pytest.approx(2), 4), "d2h": (pytest.approx(1), 50_000_000)}
    found = findings(waiting_for((Kind.H2D, 4), (Kind.H2D, 4), (Kind.D2H, 50_000_000)))["sync_copies"]
    assert "small values" in found.action and found.evidence["mean_bytes"] == 4
    assert "47.7 MiB each" in found.why and "(4 B each" in found.why


def slow_after_wait(pace: float, wait: bool) -> Builder:
    """A GPU works a step's second half with a launch every ``pace`` µs, for kernels of 60 µs; the first half was
    launched at once and, with ``wait``, synchronized."""
    b = Builder()
    for i in range(STEPS):
        begin = i * STEP
        half = begin + (100 * 90 if wait else 0)
        launch = begin + 50.0
        for k in range(90):
            b.run(0, begin + 60 + 100 * k, 100, KERNEL, launch=launch + 2 * k, launch_length=2)
        launch = begin + 50 + 2 * 90
        if wait:
            b.host("cudaStreamSynchronize", launch, half + 62 - launch, line="launch 0")
            launch = half + 62
        free = begin + 60 + 9_000
        for _ in range(80):
            start = max(free, launch + 4)
            b.run(0, start, 60, KERNEL, launch=launch, launch_length=2)
            free, launch = start + 60, launch + pace
        b.host("EagerExecute", begin, launch - begin, line="launch 0", is_func=1, eager_op="__inference_train_42")
    return b


def test_waits_are_charged_with_what_they_cost():
    """Without the wait the 80 launches of 90 µs each were done while the first half ran."""
    f = findings(slow_after_wait(90, True))["sync_copies"]
    assert f.evidence["idle_after_copies_s"] == pytest.approx(79 * 30e-6, rel=0.05)
    assert f.evidence["syncs_per_step"] == pytest.approx(1) and "copies" not in f.title
    assert "sync_copies" not in findings(slow_after_wait(90, False))
    found = findings(launch_bound_with_a_fetch())  # launching that is slow by itself is not charged to a short wait
    assert "launch_bound" in found and "sync_copies" not in found
    assert "sync_copies" in findings(partners(both_wait=True))
    assert "sync_copies" not in findings(partners(both_wait=False))


def launch_bound_with_a_fetch() -> Builder:
    """Kernels of 10 µs launched every 40 µs, and four fetched values a step whose copies take 2 µs."""
    b = job()
    for i in range(STEPS):
        for k in range(480):
            t = i * STEP + 100 + 40 * k
            if k % 120 == 60:
                b.run(0, t, 2, "MemcpyD2H", kind=Kind.D2H, launch=t - 3, launch_length=9, size=4, dst=MemoryKind.PINNED)
            else:
                b.run(0, t, 10, KERNEL, launch=t - 8, launch_length=5)
    return b


def partners(both_wait: bool) -> Builder:
    """Two ranks with an AllReduce at the end of each of their steps; rank 1 launches late all along, and one of them
    or both also wait for a copy."""
    b = keras_steps(Builder(gpus=2), STEPS, STEP, STEP - 50)
    for i in range(STEPS):
        ends = []
        for gpu in range(2):
            waits = gpu == 0 or both_wait
            t, launch = i * STEP + 100, i * STEP + 50.0
            for k in range(40):
                b.run(gpu, t, 200, KERNEL, launch=launch + 2 * k, launch_length=1)
                t += 200
            if waits:
                b.run(gpu, t, 2, "MemcpyD2H", kind=Kind.D2H, launch=launch + 90, launch_length=t - launch - 86, size=4,
                      dst=MemoryKind.PINNED)
            launch, t = t + 1_000, t + 1_004
            for k in range(20):
                b.run(gpu, t, 200, KERNEL, launch=launch + 2 * k, launch_length=1)
                t += 200
            ends.append(t)
        for gpu, end in enumerate(ends):
            b.run(gpu, end, max(ends) + 100 - end, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", kind=Kind.COLLECTIVE,
                  launch=end - 900, launch_length=1)
    return b


@pytest.mark.parametrize("b", [
    fetching(4, 50),  # one per cent
    fetching(4, 400, sync=False),  # nobody waited for them
    fetching(0, 400, at_end=True),  # the loss, at the end of the step
], ids=["short", "async", "end"])
def test_copies_that_cost_nothing_within_the_step(b):
    assert "sync_copies" not in findings(b)


def test_neither_is_judged_without_its_events():
    b = healthy()
    b.run(0, 50, 2, "MemcpyD2H", kind=Kind.D2H, size=4)
    assert "correlation" in abstained(b)["sync_copies"]
    assert "GPU_<n>_bfc" in abstained(healthy())["memory_pressure"]  # memory is not judged without the allocator


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


@pytest.mark.skipif(not (SHARED / "cases").is_dir(), reason=NEEDS_SHARED)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_waits_per_step_and_gpu_do_not_depend_on_the_number_of_ranks(ranks):
    found = analyze([str(SHARED / "cases" / "ddp_sigterm" / f"rank{i}.pt.trace.json.gz") for i in range(ranks)])
    first = found.findings[0]
    assert first.id == "sync_copies" and first.evidence["syncs_per_step"] == pytest.approx(1.0)
    assert " at these calls (per GPU): 1 synchronizing call. " in first.why


@pytest.mark.parametrize("way", [Kind.H2D, Kind.D2H])
def test_large_copies_are_no_small_values(way):
    found = findings(waiting_for(*[(way, 50_000_000)] * 3))["sync_copies"]
    assert "small" not in found.action and "Do not read values" not in found.action and "large" in found.action


def test_a_loop_of_pageable_copies_alone_is_judged_and_large_results_have_their_own_fix():
    b = Builder(format="chrome")
    for i in range(10):
        at = 67_000 * i
        b.host(f"ProfilerStep#{i}", at, 66_900, step_num=i).host("aten::copy_", at, 66_000)
        for way, begin, length in ((Kind.D2H, at + 20, 34_000), (Kind.H2D, at + 34_100, 32_000)):
            b.run(0, begin, length, f"Memcpy{way.name}", kind=way, launch=begin - 10, launch_length=length + 15,
                  size=150 << 20,
                  src=MemoryKind.DEVICE if way is Kind.D2H else MemoryKind.PAGEABLE,
                  dst=MemoryKind.PAGEABLE if way is Kind.D2H else MemoryKind.DEVICE)
    f = findings(b)["copies_pageable"]
    assert f.severity == "high" and f.gpus == (0,) and "to pinned memory" in f.action
    assert "non_blocking=True" in (f.snippet or "")
