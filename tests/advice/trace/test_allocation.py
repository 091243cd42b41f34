"""Device memory that is allocated, freed or moved while the job trains."""

from __future__ import annotations

import math

import pytest

from gputop.analysis.what_if.host_waits import host_waits
from gputop.trace.model import Kind, MemoryKind
from tests.advice.trace.stalls import allocating
from tests.advice.trace.traces import STEP, STEPS, abstained, findings, healthy
from tests.trace.build import Builder


@pytest.mark.parametrize(("call", "there"), [
    ("cudaFree", True), ("cudaMalloc_v3020", True), ("cuMemUnmap", True), ("hipMalloc", True),
    ("cudaMallocAsync", False), ("cudaFreeAsync_v11020", False), ("cudaMemcpyAsync", False)])
def test_allocating_in_the_steps(call, there):
    found = findings(allocating(call))
    assert ("allocation_in_steps" in found) == there
    if there:
        own = found["allocation_in_steps"]
        assert own.gain.step_time == pytest.approx(2_000 / STEP, rel=0.1) and own.evidence["calls_per_step"] == 1
        assert own.evidence["frees_per_step"] == ("Malloc" not in call) and "expandable_segments" in (own.snippet or "")
        assert "launch_bound" not in found  # it follows from these calls


def test_the_cure_is_that_of_the_framework_and_a_cache_that_fills_needs_none():
    snippets = {name: findings(allocating(framework=call))["allocation_in_steps"].snippet or "" for name, call in (
        ("jax", "PjitFunction(f)"), ("tensorflow", "EagerExecute"))}
    assert "XLA_PYTHON_CLIENT_ALLOCATOR" in snippets["jax"] and "cuda_malloc_async" in snippets["tensorflow"]
    assert "allocation_in_steps" not in findings(allocating(steps=range(2)))  # a cache that fills is none of it
    assert "allocation_in_steps" not in findings(allocating(takes=100))
    assert "allocation_in_steps" not in findings(healthy())
    assert "cudaFree" in abstained(allocating(marked=False))["allocation_in_steps"]


def test_layers_of_a_first_pass_that_fill_the_cache_are_no_steps():
    b = Builder(format="nsys")
    for layer in range(30):
        for i in range(12):
            b.run(0, layer * 330 + i * 10 + 200, 9.9, f"kernel{i}", launch=layer * 330 + i * 10 + 195)
        b.host("cudaMalloc", layer * 330, 190, line="launch 0")
    assert "first pass" in abstained(b)["allocation_in_steps"]


def buffers(frees: bool, until: int = 60) -> Builder:
    """A program without steps that makes and frees its buffers around each of its varied kernels; those after
    ``until`` are made no more. Its results are read before they are freed, for which the host waits."""
    b, at = Builder(format="nsys"), 0.0
    for i in range(60):
        if i < until:
            b.host("cudaMallocPitch_v3020", at, 1_000, line="launch 0")
            at += 1_010
        length = 3_000 + 400 * (i * i % 11)
        b.run(0, at + 20, length, f"distances {i * i % 7}", launch=at)
        b.run(0, at + length + 30, 10, "MemcpyD2H", kind=Kind.D2H, launch=at + 10, launch_length=length + 31,
              size=600_000, src=MemoryKind.DEVICE, dst=MemoryKind.PAGEABLE)
        at += length + 50
        if frees and i < until:
            b.host("cudaFree_v3020", at, 500, line="launch 0")
            at += 510
    return b


@pytest.mark.parametrize(("frees", "until", "there"), [(True, 60, True), (False, 60, False), (True, 20, False)])
def test_a_program_without_steps_allocates_and_frees_throughout(frees: bool, until: int, there: bool) -> None:
    found = findings(buffers(frees, until))
    assert ("allocation_in_steps" in found) == there
    if there:
        f = found["allocation_in_steps"]
        assert f.title.startswith("Allocating device memory repeatedly costs 2")
        assert f.evidence["calls_per_window"] == 120 and f.evidence["frees_per_window"] == 60
        assert f.gain.step_time == pytest.approx(0.22, abs=0.02)


@pytest.mark.parametrize(("frees", "waits"), [(True, 0), (False, 60)])
def test_a_wait_before_memory_is_freed_is_no_wait_that_can_be_spared(frees: bool, waits: int) -> None:
    """cudaFree waits for the GPU as well."""
    assert len(host_waits(buffers(frees).build(), math.inf).line) == waits


def migrating(call: float | None = None, way: Kind = Kind.H2D, length: float = 60.0, prefetch: bool = False) -> Builder:
    """In each step ten migrations of 2 MB each way, beside kernels that wait for them."""
    b = healthy()
    for i in range(STEPS):
        for k in range(10):
            for kind in {Kind.H2D, way}:
                b.run(0, i * STEP + 300 + k * 1_000 + 100 * (kind == Kind.D2H), length, f"Memcpy{kind.name}", kind=kind,
                      launch=call, size=2_000_000, src=MemoryKind.MANAGED, dst=MemoryKind.MANAGED, stream=9)
    if prefetch:
        b.host("cudaMemPrefetchAsync_v8000", 50, 5)
    return b


def test_managed_memory_that_moves():
    found = findings(migrating(way=Kind.D2H))["managed_memory"]
    assert found.evidence["migrations_s"] == pytest.approx(1.2e-3) and found.gain.step_time == pytest.approx(0.06)
    assert found.evidence["to_gpu_bytes"] == found.evidence["to_host_bytes"] == 20_000_000
    assert found.evidence["migrations_count"] == 20 and "both ways" in found.why
    assert "both ways" not in findings(migrating(length=100))["managed_memory"].why
    assert "managed_memory" not in findings(migrating(call=10))  # copies that somebody asked for
    assert "managed_memory" not in findings(migrating(length=20))
    prefetched = migrating(length=600, prefetch=True)
    assert "prefetched" in abstained(prefetched)["managed_memory"] and "copies_excessive" not in findings(prefetched)
