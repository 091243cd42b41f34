from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from gputop.diagnosis.diagnose import analyze_trace
from gputop.simulation.loop import StepKind
from gputop.simulation.scenarios import SCENARIOS, GiB
from gputop.simulation.xspace import build_xspace
from gputop.trace.readers.xspace.reader import read_xspaces
from tests import xspace_messages as messages
from tests.simulation.conftest import SECOND
from tests.simulation.loop_truth import loop_truth
from tests.simulation.simulated_capture import ORIGIN, capture


def _stat(plane: Any, event: Any, name: str) -> Any:
    for stat in event.stats:
        if plane.stat_metadata[stat.metadata_id].name == name:
            kind = stat.WhichOneof("value")
            value = getattr(stat, kind)
            return plane.stat_metadata[value].name if kind == "ref_value" else value
    return None


@pytest.fixture(scope="module")
def space() -> Any:
    return messages.XSpace.FromString(capture("gpu0-oversubscribed", 2.0)[3])


def _plane(space: Any, name: str) -> Any:
    return next(p for p in space.planes if p.name == name)


def test_planes_and_marks(space: Any) -> None:
    assert [p.name for p in space.planes] == [
        *(f"/device:GPU:{i}" for i in range(8)), "/host:CPU", "/host:metadata", "Task Environment", "/gputop:simulated"]
    assert list(space.hostnames) == ["demo-node"]
    mark = _plane(space, "/gputop:simulated")
    assert _stat(mark, mark, "scenario") == "gpu0-oversubscribed"
    environment = _plane(space, "Task Environment")
    _, start, end, _ = capture("gpu0-oversubscribed", 2.0)
    assert _stat(environment, environment, "profile_start_time") == ORIGIN + start
    assert _stat(environment, environment, "profile_stop_time") == ORIGIN + end
    gpu = _plane(space, "/device:GPU:3")
    assert (_stat(gpu, gpu, "compute_cap_major"), _stat(gpu, gpu, "compute_cap_minor")) == (9, 0)


def test_device_lines_look_like_cuptis(space: Any) -> None:
    gpu = _plane(space, "/device:GPU:1")
    lines = {line.name: line for line in gpu.lines}
    kernels = {"Stream #13(Kernel)", "Stream #24(Kernel)"}
    assert set(lines) == {*kernels, "Stream #14(MemcpyH2D)", "Stream #16(MemcpyP2P)"}
    assert {line.name for line in _plane(space, "/device:GPU:0").lines} == {
        *kernels, "Stream #14(MemcpyH2D)", "Stream #15(MemcpyD2H)"}
    copy = next(e for e in lines["Stream #14(MemcpyH2D)"].events if e.duration_ps > 10**9)
    assert gpu.event_metadata[copy.metadata_id].name == "MemcpyH2D"
    size = 160 * 224 * 224 * 3 * 4
    assert _stat(gpu, copy, "memcpy_details") == f"kind_src:pinned kind_dst:device size:{size} dest:1 async:1"
    kernel = lines["Stream #13(Kernel)"].events[5]
    assert _stat(gpu, kernel, "kernel_details").startswith("regs:")
    assert _stat(gpu, kernel, "context_id") == "$$1"
    assert _stat(gpu, kernel, "tf_op").startswith("replica_1/")
    names = {gpu.event_metadata[e.metadata_id].name for e in lines["Stream #24(Kernel)"].events}
    assert names == {"ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"}


def test_every_launch_has_its_operation_and_comes_before_it(space: Any) -> None:
    host = _plane(space, "/host:CPU")
    for g in (0, 6):
        gpu = _plane(space, f"/device:GPU:{g}")
        start_ps = {
            _stat(gpu, e, "correlation_id"): line.timestamp_ns * 1000 + e.offset_ps
            for line in gpu.lines for e in line.events}
        line, = (x for x in host.lines if any(_stat(host, e, "device_id") == g for e in x.events))
        assert line.name.startswith("tf_Compute/")
        launches = {
            _stat(host, e, "correlation_id"): line.timestamp_ns * 1000 + e.offset_ps + (
                # The call of a copy to pageable memory lasts as long as the copy.
                0 if "dst:pageable" in (_stat(host, e, "memcpy_details") or "") else e.duration_ps)
            for e in line.events if _stat(host, e, "device_id") == g}
        assert len(start_ps) == sum(len(x.events) for x in gpu.lines)  # unique
        both = launches.keys() & start_ps.keys()
        assert len(both) > 0.6 * len(start_ps)
        assert all(launches[c] < start_ps[c] for c in both)
        # Launched before the capture or ended after it: the edges of a real one.
        assert start_ps.keys() - launches.keys() and launches.keys() - start_ps.keys()


def test_host_anchors_of_keras_3(space: Any) -> None:
    loop, start, end, _ = capture("gpu0-oversubscribed", 2.0)
    host = _plane(space, "/host:CPU")
    python = next(line for line in host.lines if line.name == "python")
    count = Counter(host.event_metadata[e.metadata_id].name for e in python.events)
    whole = [s for s in loop.steps(start, end) if s.kind is StepKind.TRAIN]
    assert len(whole) - 2 <= count["EagerExecute"] <= len(whole)
    execute = next(e for e in python.events if host.event_metadata[e.metadata_id].name == "EagerExecute")
    assert _stat(host, execute, "is_func") == 1
    assert _stat(host, execute, "eager_op").startswith("__inference_multi_step_on_iterator_")
    assert "train" not in {m.name for m in host.event_metadata.values()}  # no marker of a step


def test_allocator_events_add_up_to_what_is_reserved(space: Any) -> None:
    host = _plane(space, "/host:CPU")
    job = SCENARIOS["gpu0-oversubscribed"].job
    peaks = {}
    for line in host.lines:
        for event in line.events:
            if host.event_metadata[event.metadata_id].name == "MemoryAllocation":
                used, free = (_stat(host, event, name) for name in ("bytes_allocated", "bytes_available"))
                assert used + free == job.allocator_capacity_bytes
                assert 0 < used <= _stat(host, event, "peak_bytes_in_use")
                peaks[_stat(host, event, "allocator_name")] = _stat(host, event, "peak_bytes_in_use")
    assert peaks == {f"GPU_{i}_bfc": job.allocator_peak_bytes(i) for i in range(8)}
    assert [round(peaks[f"GPU_{i}_bfc"] / GiB, 3) for i in range(8)] == [67] + [41] * 7


def test_events_lie_within_the_capture() -> None:
    _, start, end, data = capture("input-bound", 2.0)
    for plane in messages.XSpace.FromString(data).planes:
        for line in plane.lines:
            for event in line.events:
                begin = line.timestamp_ns * 1000 + event.offset_ps
                assert begin >= 0 and begin + event.duration_ps <= (end - start) * 1000 + 400_000  # an instant event


def test_a_capture_of_an_instant_is_valid() -> None:
    loop, start, _, _ = capture("healthy", 2.0)
    space = messages.XSpace.FromString(build_xspace(loop, start, start + 1_000, ORIGIN, "demo-node"))
    assert sum(len(line.events) for plane in space.planes for line in plane.lines) < 10
    assert len(space.planes) == 12


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_the_analysis_finds_what_the_loop_did(name: str) -> None:
    loop, start, end, data = capture(name, 2.0)
    analysis = analyze_trace(read_xspaces([("demo.xplane.pb", "demo-node", data)]))
    assert analysis.simulated
    steps = analysis.steps
    assert steps is not None and steps.confidence == "high"
    whole = [s for s in loop.steps(start, end) if s.start_ns >= start]
    truth = loop_truth(loop, whole[0].start_ns, whole[steps.count - 1].next_ns)
    assert truth.steps == steps.count
    assert steps.mean_s == pytest.approx(truth.step_s, rel=0.005)
    for gpu in analysis.gpus:
        assert gpu.compute_s_per_step == pytest.approx(truth.compute_s[gpu.gpu], rel=0.02)
    assert analysis.input is not None
    assert analysis.input.wait_ratio == pytest.approx(truth.input_wait_ratio, abs=0.005)
    assert analysis.input.wait_s_per_step == pytest.approx(truth.input_wait_s, rel=0.1)
    assert analysis.breakdown is not None and analysis.breakdown.total == pytest.approx(steps.mean_s, rel=0.01)
    assert analysis.breakdown.h2d == pytest.approx(sum(truth.h2d_s) / len(truth.h2d_s), rel=0.05)
    assert analysis.collectives is not None and analysis.collectives.waiting is not None
    assert [f.id for f in analysis.findings if f.severity != "low"] == {
        "gpu0-oversubscribed": ["gpu0_oversubscribed"], "input-bound": ["input_bound"],
        "launch-bound": ["launch_bound"], "slow-callback": ["step_gap_host"], "healthy": [],
        "hang": [], "slow-checkpoint": [],
        "three-causes": ["gpu0_oversubscribed", "step_gap_host", "communication_exposed"],
    }[name]


def test_live_figures_agree_with_the_trace() -> None:
    """SM activity of a minute is the trace's kernel time, each kernel by its share of the GPU."""
    loop, start, _, _ = capture("healthy", 2.0)
    truth = loop_truth(loop, start, start + 40 * SECOND)
    figures = (loop.gpu_integrals(2, start + 40 * SECOND) - loop.gpu_integrals(2, start)) / 40
    assert figures[1] == pytest.approx(truth.compute_s[2] / truth.step_s, abs=0.02)  # gr_active
    assert figures[0] == pytest.approx(0.965 * truth.compute_s[2] / truth.step_s, abs=0.02)  # sm_active
