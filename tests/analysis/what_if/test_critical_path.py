"""The critical path and its slack, against a simulation of the same graph event by event."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gputop.analysis.gpu.device_time import timelines
from gputop.analysis.results import Analysis, CriticalPath
from gputop.analysis.steps.steps import find_steps
from gputop.analysis.what_if import critical_path as path
from gputop.analysis.what_if.critical_path import _segments, _Times
from gputop.analysis.what_if.dependencies import NEG_INF, POS_INF
from gputop.analysis.what_if.graph import Graph
from gputop.analysis.what_if.replay import replay_window
from gputop.trace.model import I64, Trace
from tests.analyses import make_analysis
from tests.analysis.what_if.paced_traces import STEP, STEPS, any_job, gpu_paced, host_paced, late_batches, unexplained
from tests.trace.build import Builder, keras_steps


def found(trace: Trace) -> CriticalPath:
    steps = find_steps(trace)
    out = path.critical_path(replay_window(trace, timelines(trace), steps), steps)
    assert out is not None
    return out


def times(found: CriticalPath) -> dict[str, float]:
    """ms by kind, of those that have any."""
    return {kind.id: round(1e3 * kind.time_s, 1) for kind in found.kinds if kind.time_s > 5e-5}


def ends_with(graph: Graph, ends: I64, event: dict[int, int], launch: dict[int, int], wait: dict[int, int]) -> int:
    """When the last of the events ``ends`` ends if some events, launches or returns of waits come later (ns)."""
    events, launches, delays, collectives, waits = (
        graph.events, graph.launches, graph.delays, graph.collectives, graph.waits)
    n, count = len(events.row), len(waits.lane)
    order = np.lexsort((np.repeat((0, 1, 2), (count, n, len(collectives.begun))), np.concatenate(
        (waits.end, events.start, collectives.begun))))
    start, end = [0] * n, [0] * n
    late, lane_late = [0] * (count + 1), [0] * graph.lanes.size
    for node in order.tolist():
        if node < count:
            on, came = int(waits.on[node]), int(waits.begin[node]) + lane_late[waits.lane[node]]
            ready = int(waits.end[node]) if on < 0 else end[on] + int(waits.end[node] - events.end[on])
            late[node] = max(came, ready) - int(waits.end[node]) + wait.get(node, 0)
            lane_late[waits.lane[node]] = late[node]
        elif node < count + n:
            i = node - count
            since = [NEG_INF]
            if launches.begin[i] > NEG_INF:
                since.append(int(launches.begin[i] + delays.after_launch[i]) + late[graph.pieces.after_wait[i]]
                             + launch.get(i, 0))
            if i and events.stream[i] == events.stream[i - 1]:
                since.append(end[i - 1] + int(delays.after_previous[i]))
            if delays.source[i] >= 0:
                since.append(end[delays.source[i]] + int(delays.since_source[i]))
            start[i] = max(since)
            end[i] = start[i] + int(events.work[i]) + event.get(i, 0)
        else:
            members = np.flatnonzero(collectives.of_event == node - count - n).tolist()
            for i in members:
                end[i] = max(start[j] for j in members) + int(collectives.transfer[i]) + event.get(i, 0)
    return max(end[i] for i in ends)


@pytest.mark.parametrize("seed", range(6))
def test_what_has_slack_may_be_later_by_it_and_no_more(seed: int) -> None:
    trace, rng = any_job(seed).build(), random.Random(seed)
    steps = find_steps(trace)
    replay = replay_window(trace, timelines(trace), steps)
    assert steps is not None and replay is not None
    graph = replay.graph
    _, lo, hi, horizon = path._typical(graph, steps)
    ends = path._begun_last(graph, horizon)
    last = int(graph.events.end[ends].max())
    assert ends_with(graph, ends, {}, {}, {}) == last
    walk = path._Walk(graph, lo, hi)
    walk.back_from(int(ends[np.argmax(graph.events.end[ends])]))
    near = np.flatnonzero((graph.events.end > lo) & (graph.events.start < horizon))
    slack = path.slack(graph, ends)
    waits = np.flatnonzero((graph.waits.end > lo) & (graph.waits.end < hi))
    assert len(graph.collectives.begun) > 3 and (graph.delays.source >= 0).any() and len(waits) > 2
    on_path = near[walk.on_path[near] & (graph.events.work[near] > 0)].tolist()
    for i in rng.sample(on_path, min(len(on_path), 8)):
        less = int(graph.events.work[i]) // 2
        assert last - less <= ends_with(graph, ends, {i: -less}, {}, {}) <= last
    checked = 0
    for what, rows in enumerate((near, near[graph.launches.begin[near] > NEG_INF], waits)):
        for i in rng.sample(rows.tolist(), min(len(rows), 15)):
            changes: list[dict[int, int]] = [{}, {}, {}]
            left = int(slack[what][i])
            changes[what][i] = min(left, 10 ** 9)
            assert ends_with(graph, ends, *changes) == last
            if left < POS_INF // 2:
                changes[what][i] = left + 1_000
                assert ends_with(graph, ends, *changes) == last + 1_000
                checked += 1
    assert checked > 24


@pytest.mark.parametrize("seed", range(6))
def test_the_path_fills_the_step(seed: int) -> None:
    out = found(any_job(seed).build())
    assert sum(kind.time_s for kind in out.kinds) == pytest.approx((out.end_ns - out.start_ns) / 1e9)
    edges = [(segment.start_ns, segment.end_ns) for segment in out.segments]
    assert edges[0][0] == out.start_ns and edges[-1][1] == out.end_ns
    assert [a for _, a in edges[:-1]] == [b for b, _ in edges[1:]]


def test_a_host_that_paces_the_job_is_the_path() -> None:
    out = found(host_paced())
    by_kind = {kind.id: kind for kind in out.kinds}
    assert by_kind["host"].time_s + by_kind["launch"].time_s == pytest.approx(STEP / 1e6, rel=0.01)
    assert by_kind["launch"].time_s == pytest.approx(199 * 5e-6, rel=0.05)
    kernels = next(row for row in out.slack if row.kind == "kernel")
    assert kernels.time_s == pytest.approx(199 * 20e-6, rel=0.02)
    # The last of the step can be later by all pauses of the next step.
    assert kernels.slack_s == pytest.approx(199 * 80e-6 + 100e-6)


def test_kernels_that_the_host_waits_for_are_the_path() -> None:
    out = found(gpu_paced())
    assert times(out) == {"host": 2.0, "kernel": 18.0}
    launches = next(row for row in out.slack if row.kind == "launch")
    assert launches.place == "launch 0" and 0 < launches.slack_s < 100e-6
    assert {segment.place for segment in out.segments if segment.kind == "kernel"} == {"GPU 0 Stream #1"}


def test_a_batch_that_comes_late_is_the_path_from_one_batch_to_the_next() -> None:
    out = found(late_batches())
    assert times(out)["input"] == 20.0
    assert min(row.slack_s for row in out.slack if row.kind == "launch") == pytest.approx(8e-3, rel=0.01)


def test_what_a_replay_does_not_explain_has_no_path() -> None:
    out = found(unexplained())
    assert not out.kinds and "the trace does not show everything that the GPUs wait for" in out.reason


def test_short_stretches_are_told_as_one() -> None:
    b = keras_steps(Builder(), STEPS, STEP, STEP - 50)
    for i in range(STEPS):
        for k in range(1_900):
            b.run(0, i * STEP + 100 + 10 * k, 9, "other" if k % 4 == 3 else "gemm", launch=i * STEP + 90 + k)
    out = found(b.build())
    assert len(out.segments) <= 2 * path._MAX_SEGMENTS + 1
    assert sum(segment.stretches for segment in out.segments) > 3_000
    assert {segment.name for segment in out.segments if segment.kind == "kernel" and segment.stretches > 8} == {"gemm"}
    document = make_analysis(critical_path=out).to_json()
    assert Analysis.from_json(document).critical_path == out
    del document["critical_path"]  # as before there was one
    assert Analysis.from_json(document).critical_path is None


def test_a_path_of_nothing_has_no_segments() -> None:
    """Found by fuzzing: a damaged file has steps in which nothing was waited for."""
    nothing = np.empty(0, np.int64)
    assert list(_segments(_Times(nothing, nothing, nothing, nothing, nothing), [], [], 0, 100)) == []
