"""Copies that take long."""

from __future__ import annotations

import pytest

from gputop.trace.model import Kind, MemoryKind
from tests.advice.trace.stalls import one_stream
from tests.advice.trace.traces import STEP, STEPS, abstained, copying, findings, healthy, launched_ahead, verdict
from tests.trace.build import Builder


def test_pinned_copies_are_not_advised_to_pin():
    f = findings(copying(Kind.H2D, 6_000))["copies_excessive"]
    assert f.severity == "high" and f.evidence["pageable_ratio"] == 0
    assert f.evidence["h2d_bytes_per_s"] == pytest.approx(200e6 / 6e-3)
    assert f.evidence["h2d_bytes_per_step"] == pytest.approx(200e6, rel=0.25)  # six copies in five whole steps
    assert f.gain.step_time == pytest.approx(0.3, abs=0.02)
    v = verdict(copying(Kind.H2D, 6_000), "copies_excessive")
    assert v.worst == "h2d" and v.compute >= v.share  # all of it can hide


def test_copies_of_steps_without_a_kernel_hide_behind_nothing():
    b = Builder(gpus=1, format="chrome")
    for i in range(12):
        b.host(f"ProfilerStep#{i}", 10_000 * i, 9_900, "python").run(
            0, 10_000 * i + 50, 9_800, "MemcpyH2D", kind=Kind.H2D, launch=10_000 * i + 10, size=147 << 20,
            src=MemoryKind.PINNED, thread="python")
    f = findings(b)["copies_excessive"]
    assert f.gain.step_time is None and "no kernel runs" in f.gain.how and f.severity == "high"
    assert "overlap" not in f.why + f.action and "next batch" not in f.action


def test_copies_hide_behind_compute_and_pageable_ones_are_pinned():
    f = findings(copying(Kind.H2D, 18_000))["copies_excessive"]
    assert f.gain.step_time == pytest.approx(0.9, abs=0.02)
    v = verdict(copying(Kind.H2D, 18_000), "copies_excessive")
    assert v.compute == pytest.approx(0.09, abs=0.005) and "9%" in f.gain.how
    (f,) = findings(copying(Kind.H2D, 6_000, MemoryKind.PAGEABLE))["copies_pageable"].consequences
    assert f.id == "copies_excessive" and f.evidence["pageable_ratio"] == 1
    f = findings(copying(Kind.D2H, 2_500))["copies_excessive"]  # reading back has its own cure
    assert f.severity == "medium" and verdict(copying(Kind.D2H, 2_500), "copies_excessive").worst == "d2h"


def test_copies_within_the_gpu():
    f = findings(copying(Kind.D2D, 4_000))["copies_excessive"]
    assert verdict(copying(Kind.D2D, 4_000), "copies_excessive").worst == "d2d"
    # They are known as a share of the device window alone.
    assert "of the step" not in f"{f.title} {f.why}" and f.evidence["d2d_of_window_ratio"] == f.gain.step_time


def test_what_is_no_loop_that_copies_too_much():
    assert findings(copying(Kind.H2D, 700)) == {}
    b = healthy()
    for i in range(STEPS):
        b.run(0, i * STEP + 100, 15_000, "MemcpyH2D", kind=Kind.H2D, stream=2, launch=i * STEP + 10)
    assert "copies_excessive" not in findings(b)
    f = findings(copying(Kind.H2D, 6_000, MemoryKind.UNKNOWN, size=-1))["copies_excessive"]
    assert "pageable_ratio" not in f.evidence and "h2d_bytes_per_s" not in f.evidence
    assert verdict(copying(Kind.H2D, 6_000, MemoryKind.UNKNOWN, size=-1), "copies_excessive").pageable is None
    # Weights and buffers go to the GPU before the first kernel: nothing computes beside which they could hide.
    b = Builder(format="nsys").host("ncclCommInitRank", 0, 300_000)
    for i in range(7):
        b.run(0, 300_000 + 30_000 * i, 2_800, "MemcpyH2D", kind=Kind.H2D, launch=299_000 + 30_000 * i, size=1 << 25,
              src=MemoryKind.PINNED, dst=MemoryKind.DEVICE)
    assert "start" in abstained(b)["copies_excessive"]
    b.run(0, 520_000, 500, launch=519_000)
    assert "copies_excessive" in findings(b), "one that computes is judged"


@pytest.mark.parametrize(("op", "words"), [
    ("image_summary/write:WriteImageSummary", "summaries"), ("model/EagerPyFunc:EagerPyFunc", "an op on the host"),
    ("metrics/mean/div:DivNoNan", "Read results back less often")])
def test_copies_to_the_host_are_told_with_the_ops_that_ask_for_them(op, words):
    b = copying(Kind.D2H, 4_000)
    for event in b._device:
        if event["kind"] == Kind.D2H:
            event["op"] = op
    f = findings(b)["copies_excessive"]
    assert words in f.action and op.split(":")[0] == f.culprits[0].name and "feed" not in f.action


def test_copies_to_the_host_and_of_micro_batches_have_their_cure():
    for size, action in ((500_000, "Read results back less often"), (200_000_000, "large results")):
        f = findings(copying(Kind.D2H, 4_000, MemoryKind.PAGEABLE, size))["copies_pageable"]
        assert "Feed" not in f.action and action in f.action
        assert "prefetch" not in (f.snippet or "")
    assert "CPU offload" in (f := findings(layers(None))["copies_excessive"]).action and "uint8" in f.action
    assert "CPU offload" not in findings(layers(None, count=4))["copies_excessive"].action
    # The inputs of a sharded model are copied by what prepares it, once a step.
    assert "CPU offload" not in findings(layers("FSDP::root_pre_forward", count=4))["copies_excessive"].action


def test_copies_on_the_stream_of_the_kernels():
    found = findings(launched_ahead(one_stream()))
    own = found["default_stream"]
    assert own.gain.step_time == pytest.approx(0.1, rel=0.02) and own.gain.by == "replay" and "Stream #1" in own.why
    assert "torch.cuda.Stream" in (own.snippet or "") and own.consequences[0].id == "copies_excessive"
    for none in (one_stream(stream=2), one_stream(MemoryKind.PAGEABLE), one_stream(length=300),
                 one_stream(framework="EagerExecute"), healthy()):
        assert "default_stream" not in findings(none)


def layers(fetched_by: str | None, *, count: int = 16, sizes: tuple[int, ...] = (8 << 20, 4 << 20)) -> Builder:
    """Steps in which the weights of each layer come from pinned memory before its kernels, as with CPU offload."""
    b = Builder(format="chrome")
    for i in range(STEPS):
        b.host(f"ProfilerStep#{i}", i * STEP, STEP - 1).host("cudaDeviceSynchronize", i * STEP + 120, STEP - 130)
        for k in range(count):
            at, launch = i * STEP + 150 + k * (STEP - 200) / count, i * STEP + 5 + k * 6
            if fetched_by:
                b.host(fetched_by.format(k), launch, 4)
            for n, size in enumerate(sizes):
                b.run(0, at + 20 + n * 400, 390, "Memcpy HtoD (Pinned -> Device)", kind=Kind.H2D, size=size,
                      src=MemoryKind.PINNED, launch=launch + 1 + n, launch_length=1,
                      thread="python")
            b.run(0, at + 20 + len(sizes) * 400, 300, "ampere_bf16_gemm", launch=launch + 4.5, launch_length=0.2,
                  thread="python")
    return b


@pytest.mark.parametrize("name", ["FSDP::pre_forward (layers.{})", "FSDP::pre_backward (layers.{})",
                                  "accelerate/hooks.py(354): pre_forward"])
def test_parameters_that_lie_in_the_hosts_memory(name):
    found = findings(layers(name))
    assert "CPU offload" in found["copies_excessive"].action and "uint8" not in found["copies_excessive"].action
    assert "default_stream" not in found and "CPUOffloadPolicy" in (found["copies_excessive"].snippet or "")


@pytest.mark.parametrize("returned", [50_000_000, 40_000_000])
@pytest.mark.parametrize("memory", [MemoryKind.PAGEABLE, MemoryKind.PINNED])
def test_arrays_that_come_back_before_the_next_kernel_are_to_stay(returned: int, memory: MemoryKind) -> None:
    """Data that goes to the host after each kernel and comes back, byte for byte, and a batch of another size."""
    b = Builder(format="nsys")
    for i in range(12):
        at = 20_000 * i
        b.run(0, at + 10, 6_000, "MemcpyH2D", kind=Kind.H2D, launch=at, size=returned, src=memory,
              dst=MemoryKind.DEVICE, launch_length=6_000)
        b.run(0, at + 6_100, 2_000, f"solve {i * i % 7}", launch=at + 6_050)
        b.run(0, at + 8_200, 6_000, "MemcpyD2H", kind=Kind.D2H, launch=at + 8_150, size=50_000_000,
              src=MemoryKind.DEVICE, dst=memory, launch_length=6_000)
    f = findings(b)["copies_pageable" if memory == MemoryKind.PAGEABLE else "copies_excessive"]
    assert f.action.startswith("Keep the data on the GPU") == (returned == 50_000_000)
    assert "11 times" in f.action or returned != 50_000_000
    assert memory == MemoryKind.PAGEABLE or (f.action.startswith("Keep") and "uint8" not in f.action)


def test_tensors_that_are_swapped_to_the_host_are_told():
    b = copying(Kind.H2D, 6_000)
    assert findings(b)["copies_excessive"].action.startswith("Move fewer bytes to the GPU")
    b.host("swap_out_a:_CopyFromGpuToHost", 0, 5).host("swap_in_a:_CopyFromHostToGpu", 10, 5)
    assert findings(b)["copies_excessive"].action.startswith("The step swaps tensors to host memory")
