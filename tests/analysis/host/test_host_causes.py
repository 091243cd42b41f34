"""Whose fault of the host each idle instant of the GPUs is."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from gputop.analysis.gpu.breakdown import IdleByGpu, bounds_judged, idle_by_gpu
from gputop.analysis.gpu.device_time import timelines
from gputop.analysis.host.host_causes import HostCauses, host_causes
from gputop.analysis.steps.steps import find_steps
from gputop.diagnosis.diagnose import analyze_trace
from gputop.trace.model import Kind, Trace
from gputop.trace.readers.load import load
from tests.advice.trace.host_jobs import contended, eager, gap, placed, retraced
from tests.trace.build import Builder, one_process_each

DATA = Path(__file__).resolve().parents[2] / "data"


def causes(trace: Trace) -> tuple[HostCauses, float]:
    """The division, and the host's part of the breakdown in seconds."""
    a = analyze_trace(trace)
    gpu_timelines, steps = timelines(trace), find_steps(trace)
    idle = idle_by_gpu(trace, gpu_timelines, bounds_judged(trace, gpu_timelines, steps))
    found = host_causes(trace, gpu_timelines, steps, a.ops, idle)
    assert found is not None and a.breakdown is not None
    return found, (a.breakdown.launch or 0.0) + a.breakdown.host


@pytest.mark.parametrize("b", [gap(0.3), placed(0.3), retraced(0.3), retraced(0.3, every=2), eager(80, 60),
                               contended(6), gap(0.2, gpus=1, silent=True)])
@pytest.mark.parametrize("shuffle", [None, 3])
def test_the_causes_sum_to_what_the_breakdown_calls_the_hosts_part(b, shuffle):
    trace = b.build(shuffle)
    c, total = causes(trace)
    parts = (c.tracing_s, c.eager_s, c.placement_s or 0.0, c.gap_s or 0.0, c.dispatch_s)
    assert sum(parts) == pytest.approx(total, abs=1e-9) and min(parts) >= 0
    late = idle_by_gpu(trace, timelines(trace), find_steps(trace).bounds_ns).late
    assert sum(s.total for s in late.values()) / 1e9 / analyze_trace(trace).steps.count == pytest.approx(total)


@cache
def real(name: str) -> tuple[HostCauses, float]:
    return causes(load([DATA / f"{name}.xplane.pb.gz"]))


def test_a_callbacks_work_is_the_gap_on_a_cpu_too():
    c, _ = real("keras3_host_work")
    assert c.gap_s is not None and c.gap_s >= 0.005 and c.gap_silent_s is not None and c.gap_silent_s >= 0.005
    assert {"Square", "Mean"} <= {w.name for w in c.gap_main[:3]} and c.tracing_s == c.eager_s == 0


def test_tracing_ends_where_the_function_begins_to_run():
    c, step = real("tf_retracing")
    assert 0.6 * step < c.tracing_s < 0.95 * step  # the op's own time is about a millisecond of 18
    assert c.gap_s is not None and c.gap_s < 0.05 * step


@pytest.mark.parametrize("name", ["jax_cpu", "keras3_fast", "keras2_tf215"])
def test_sound_jobs_have_next_to_no_gap(name):
    c, step = real(name)
    assert c.gap_s is not None and c.gap_s < 0.05 * step and c.tracing_s == 0


def test_no_host_or_no_device_events_no_division():
    assert host_causes(Builder(gpus=1).run(0, 0, 10).build(), [], None, None, IdleByGpu({}, {})) is None
    empty = Builder(gpus=1).host("train", 0, 10, step_num=1).build()
    assert host_causes(empty, timelines(empty), None, None, IdleByGpu({}, {})) is None


def test_what_one_rank_of_a_node_does_between_steps_is_its_own():
    """Rank 0 calls the next step's ops, and its GPU waits for rank 1's, whose host pauses for 30 of 40 ms."""
    b = Builder(gpus=2, format="chrome")
    for i in range(12):
        at = 100 + i * 40_000.0
        for rank, begin in ((0, at), (1, at + 30_000)):
            line = f"launch {rank}"
            b.host("aten::mm", begin, at + 39_900 - begin, line=line)
            b.run(rank, begin + 100, 5_000, launch=begin + 10)
            b.run(rank, begin + 5_110, at + 39_800 - begin - 5_110, "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
                  kind=Kind.COLLECTIVE, launch=begin + 30, stream=2)
            b.host("Optimizer.step#SGD.step", at + 39_900, 90, line=line, annotation=1)
    trace = one_process_each(b.build())
    trace = replace(trace, paths=["rank0.pt.trace.json", "rank1.pt.trace.json"])
    found, _ = causes(trace)
    assert (found.gap_host, found.gap_rank) == ("node", 1)
    assert found.gap_s == pytest.approx(0.03, rel=0.1)  # not before the first step
