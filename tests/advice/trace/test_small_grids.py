"""Kernels with too few blocks for the GPU: found, and never where the GPU is full or nothing is known."""

from __future__ import annotations

import pytest

from gputop.advice.trace.batch_size import SmallGrids
from gputop.advice.verdict import Missing
from gputop.trace.model import LaunchShape, Trace, TraceGpu
from tests.advice.trace.traces import KERNEL, STEP, STEPS, abstained, findings, job, verdict
from tests.trace.build import Builder

SMS = 132


def shape(blocks: int, threads: int = 256) -> LaunchShape:
    return LaunchShape((blocks, 1, 1), (threads, 1, 1), 32, 0)


def trace(
    blocks: int | None, threads: int = 256, streams: int = 1, sms: int | None = SMS, until: float = STEP,
) -> Trace:
    """Steps full of kernels of 196 µs with such a grid, launched long before they run."""
    b = job()
    for i in range(STEPS):
        for k in range(int((until - 100) // 200)):
            for stream in range(streams):
                at = i * STEP + 100 + k * 200
                b.run(0, at, 196, KERNEL, stream=stream, launch=max(at - 90, 0),
                      shape=None if blocks is None else shape(blocks, threads))
    built = b.build()
    built.gpus = [TraceGpu("node", 0, compute_capability=(9, 0), sms=sms)]
    return built


def test_kernels_of_24_blocks_on_132_sms() -> None:
    own = verdict(trace(24), "small_grids")
    assert isinstance(own, SmallGrids)
    assert own.used == pytest.approx(24 / SMS) and own.compute == pytest.approx(0.97, abs=0.02)
    assert own.share == pytest.approx(own.compute * (1 - 24 / SMS)) and own.severity == "high"
    assert [(kernel.name, kernel.blocks) for kernel in own.kernels] == [(KERNEL, 24)]
    found = findings(trace(24))["small_grids"]
    assert found.severity == "high" and found.gain.step_time is None  # what spreading them saves is not known
    assert found.evidence["used_of_gpu_ratio"] == pytest.approx(24 / SMS)
    assert "small_grids" in findings(trace(24, streams=2)) and "small_grids" not in findings(trace(24, streams=5))
    assert "small_grids" not in findings(trace(24, until=STEP / 8))


@pytest.mark.parametrize(("blocks", "threads", "severity"), [
    (80, 256, "medium"), (100, 256, "low"), (SMS, 32, "high"), (SMS, 64, "medium"),
    (4096, 4, "high"), (4096, 16, "medium"),  # of each warp an eighth, a half
    (SMS, 128, None), (125, 256, None), (4096, 256, None), (8 * SMS + 1, 256, None),
])
def test_how_much_of_the_gpu_is_empty(blocks: int, threads: int, severity: str | None) -> None:
    found = findings(trace(blocks, threads)).get("small_grids")
    assert (found and found.severity) == severity


def test_last_waves_are_no_finding_and_without_grids_or_sms_it_abstains() -> None:
    assert "small_grids" not in findings(trace(8 * SMS + 1))
    own = verdict(trace(24), "small_grids")
    assert own.tail_s == 0
    for missing in (trace(None), trace(24, sms=None)):  # without grids or SMs it abstains
        assert isinstance(verdict(missing, "small_grids"), Missing)
        assert "grid sizes" in abstained(missing)["small_grids"]
    assert verdict(trace(None, until=STEP / 8), "small_grids") is None


def test_one_kernel_of_one_block_is_enough_to_judge_its_grid() -> None:
    b = Builder(format="nsys").host("cudaMalloc", 0, 100, line="add/17").run(0, 200, 9e5, "add", launch=150,
                                                                           shape=shape(1, 1), thread="add/17")
    built = b.build()
    built.gpus = [TraceGpu("node", 0, compute_capability=(8, 0), sms=108)]
    found = findings(built)["small_grids"]
    assert found.severity == "medium" and found.title == "Kernels use less than 1% of the GPU while they run"
    assert found.action.startswith("Launch kernels with more blocks and threads.")


def test_blocks_of_half_a_warp_are_named_and_need_more_threads() -> None:
    b = Builder(format="nsys").host("cudaMalloc", 0, 100, line="add/17")
    b.run(0, 200, 9e5, "Fan2(float*)", launch=150, shape=shape(10_000, 16), thread="add/17")
    built = b.build()
    built.gpus = [TraceGpu("node", 0, compute_capability=(8, 6), sms=82)]
    found = findings(built)["small_grids"]
    assert "Fan2 (10,000 blocks of 16 threads" in found.why
    assert found.action.startswith("Launch Fan2 with more threads in fewer blocks")
