"""How much of a GPU its kernels use, against plain counting."""

from __future__ import annotations

import gzip
import json
import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gputop.analysis.gpu.device_time import timelines
from gputop.analysis.gpu.sm_use import launch_width, narrow_kernels, sm_use
from gputop.analysis.results import SmUse
from gputop.analysis.steps.steps import find_steps
from gputop.trace.model import LaunchShape, TraceGpu
from tests.analysis.gpu.launch_traces import H100, HUGE, SMS, STEP, STEPS, job, on, shape
from tests.diagnosis.real_traces import analyzed, files_of, needs_data
from tests.trace.build import Builder


def of(b: Builder, gpu: TraceGpu = H100) -> SmUse:
    trace = on(b, gpu)
    (own,) = sm_use(trace, timelines(trace), find_steps(trace))
    return own


@pytest.mark.parametrize(("launched", "width", "tail"), [
    (shape(24), 24 / SMS, 1), (shape(1), 1 / SMS, 1), (shape(SMS), 1, 1), (shape(2 * SMS), 1, 1),
    (shape(24, 64), 24 * 2 / (4 * SMS), 1),  # two warps occupy two of an SM's four schedulers
    (shape(SMS, 32), 1 / 4, 1), (shape(4 * SMS, 32), 1, 1), (shape(SMS + 66, 32), 3 / 8, 1),
    (shape(4 * SMS), 1, 1), (shape(2 * SMS + 33), 1, (1 + 1 / 4) / 2),  # two waves, the second on a quarter of the SMs
    (shape(20 * SMS + 1), 1, (10 + 1 / SMS) / 11),
])
def test_the_part_of_the_gpu_that_a_launch_uses(launched: LaunchShape, width: float, tail: float) -> None:
    assert launch_width(launched, H100) == (pytest.approx(width), pytest.approx(tail))


def test_where_it_is_not_known_what_an_sm_holds_only_sms_without_a_block_are_empty() -> None:
    for gpu, launched in ((TraceGpu("node", 0, compute_capability=(6, 1), sms=20), shape(5, 32)),
                          (TraceGpu("node", 0, sms=20), shape(5)),
                          (TraceGpu("node", 0, compute_capability=(9, 0), sms=20), LaunchShape((5, 1, 1), (32, 1, 1)))):
        assert launch_width(launched, gpu) == (0.25, 1.0)


@settings(max_examples=50)
@given(st.integers(1, 4000), st.integers(1, 1024))
def test_the_width_against_dealing_out_warps_one_by_one(blocks: int, threads: int) -> None:
    room = 64 // math.ceil(threads / 32)  # blocks that 64 warps leave room for, with few registers
    room = min(room, 32)
    sms = [0] * SMS
    for i in range(min(blocks, room * SMS)):
        sms[i % SMS] += math.ceil(threads / 32)
    assert launch_width(LaunchShape((blocks, 1, 1), (threads, 1, 1), 1, 0), H100)[0] == pytest.approx(
        sum(min(warps, 4) for warps in sms) / (4 * SMS) * min(threads, 32) / 32)  # lanes of a warp that have a thread


def test_kernels_of_few_blocks_that_fill_the_time() -> None:
    own = of(job((0, 980, "gemm", shape(24))))
    assert own.compute_s == pytest.approx(980e-6) and own.used_s == pytest.approx(980e-6 * 24 / SMS)
    assert own.known == 1 and own.tail_s == pytest.approx(0)
    (narrow,) = own.narrow
    assert (narrow.name, narrow.blocks, narrow.threads, narrow.count_per_step) == ("gemm", 24, 1024, 1)
    assert narrow.time_s_per_step == pytest.approx(980e-6) and narrow.width == pytest.approx(24 / SMS)


def test_kernels_side_by_side_share_the_gpu() -> None:
    b = job((100, 400, "gemm", shape(SMS // 2)))
    for i in range(STEPS):
        b.run(0, i * STEP + 200, 400, "other", shape=shape(SMS // 2), stream=2)
        b.run(0, i * STEP + 300, 100, "third", shape=shape(SMS // 2), stream=3)  # more than there is
    own = of(b)
    assert own.compute_s == pytest.approx(500e-6)
    assert own.used_s == pytest.approx((100 / 2 + 300 + 100 / 2) * 1e-6)


def test_what_is_not_known_counts_as_full() -> None:
    own = of(job((100, 300, "gemm", shape(33)), (500, 100, "gemm", None)))
    assert own.known == pytest.approx(0.75) and own.used_s == pytest.approx((300 / 4 + 100) * 1e-6)
    for how, gpu in ((None, H100), (shape(33), TraceGpu("node", 0))):
        missing = of(job((100, 300, "gemm", how)), gpu)
        assert missing.used_s is None and missing.compute_s == pytest.approx(300e-6) and missing.narrow == ()


def test_only_narrow_kernels_are_named_and_no_grid_is_too_large() -> None:
    trace = on(job((100, 300, "gemm", shape(33)), (500, 100, "gemm", shape(SMS))))
    steps = find_steps(trace)
    rows = narrow_kernels(trace, timelines(trace), steps)
    assert {trace.launch_shapes[i].grid[0] for i in trace.device.shape[rows]} == {33}
    assert steps is not None and len(rows) == steps.count
    own = of(job((100, 8, "huge", HUGE)))
    assert own.used_s == pytest.approx(8e-6) and own.tail_s == pytest.approx(0, abs=1e-12)


@needs_data
@pytest.mark.parametrize("name", ["a100", "v100"])
def test_real_traces(name: str) -> None:
    """Instant by instant over the events of the JSON, by the figures that kineto itself computes."""
    (path,) = files_of(name)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    found = analyzed(name)
    assert found.steps is not None
    marks = sorted((e["ts"], e["ts"] + e["dur"]) for e in events
                   if e.get("name", "").startswith("ProfilerStep#") and e.get("cat") == "user_annotation")
    begin, end = marks[-found.steps.count][0], marks[-1][1]  # of V100 the first one, a start, is left out
    kernels = [e for e in events if e.get("cat", "").lower() == "kernel" and "nccl" not in e["name"]]
    edges: list[tuple[float, float]] = []
    for e in kernels:
        if begin <= e["ts"] < end:
            # Kineto's own figures: blocks and warps of the whole launch, divided by the number of SMs.
            blocks, warps = (e["args"][f"{what} per SM"] for what in ("blocks", "warps"))
            width = min(warps / 4, blocks, 1.0)
            edges += [(e["ts"], width), (e["ts"] + e["dur"], -width)]
    edges.sort()
    level = empty = 0.0
    running = 0
    for (at, change), (until, _) in pairwise(edges):
        level, running = level + change, running + (1 if change > 0 else -1)
        empty += (until - at) * (1 - min(level, 1)) if running else 0.0
    (own,) = found.sm_use
    assert own.used_s is not None and found.steps.count >= 2
    assert (own.compute_s - own.used_s) * found.steps.count == pytest.approx(empty * 1e-6, rel=0.03)
