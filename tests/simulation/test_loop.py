from __future__ import annotations

import itertools

import numpy as np
import pytest
from msgspec.structs import replace

from gputop.core.errors import GputopError
from gputop.simulation.figures import GPU_QUANTITIES
from gputop.simulation.loop import KEEP_NS, SimulatedLoop, StepKind, simulated_steps
from gputop.simulation.scenarios import DEFAULT_SCENARIO, EXAMPLE_BYTES, GPU_COUNT, SCENARIOS, find_scenario
from gputop.simulation.timeline import StreamOps
from tests.simulation.conftest import SECOND, training
from tests.simulation.loop_truth import loop_truth

COLUMN = {name: i for i, name in enumerate(GPU_QUANTITIES)}


def _clipped_seconds(ops: StreamOps, start: int, end: int) -> float:
    return float(np.maximum(np.minimum(ops.end, end) - np.maximum(ops.start, start), 0).sum()) / 1e9


def test_steps_follow_each_other_and_none_begins_before_its_batch_is_made(loop: SimulatedLoop) -> None:
    steps = loop.steps(0, 200 * SECOND)
    assert {s.kind for s in steps} == set(StepKind) - (set() if loop.scenario.eval_steps else {StepKind.EVAL})
    for step, following in itertools.pairwise(steps):
        assert step.start_ns < step.wait_ns <= step.begin_ns < step.end_ns < step.next_ns == following.start_ns
        assert step.made_from_ns <= step.made_ns <= step.begin_ns
        assert following.number == step.number + 1


def test_the_pipeline_makes_one_batch_at_a_time_and_only_with_room_in_its_buffer(loop: SimulatedLoop) -> None:
    depth = loop.scenario.job.prefetch
    steps = [s for s in loop.steps(0, 200 * SECOND) if s.kind is StepKind.TRAIN]
    for before, step in itertools.pairwise(steps):
        assert step.made_from_ns >= before.made_ns
    for earlier, step in zip(steps, steps[depth:], strict=False):
        assert step.made_from_ns >= earlier.begin_ns


def test_it_is_a_function_of_the_scenario_and_its_seed() -> None:
    scenario = SCENARIOS["input-bound"]
    a, other = SimulatedLoop(scenario), SimulatedLoop(replace(scenario, job=replace(scenario.job, seed=2)))
    simulated_steps.cache_clear()
    b = SimulatedLoop(scenario)
    b.gpu_integrals(3, 500 * SECOND)  # whatever was asked before
    assert a.steps(0, 90 * SECOND) == b.steps(0, 90 * SECOND)
    assert np.array_equal(a.gpu_integrals(3, 77 * SECOND), b.gpu_integrals(3, 77 * SECOND))
    assert a.steps(0, 90 * SECOND) != other.steps(0, 90 * SECOND)


def test_figures_of_small_windows_add_up_to_those_of_a_large_one(loop: SimulatedLoop) -> None:
    start, end = 61 * SECOND, 97 * SECOND  # with evaluation and checkpoint in it
    times = np.linspace(start, end, 331).astype(int).tolist()
    for gpu in (0, 7):
        points = np.array([loop.gpu_integrals(gpu, t) for t in times])
        assert (np.diff(points, axis=0) >= -1e-6).all()
        assert np.diff(points, axis=0).sum(axis=0) == pytest.approx(points[-1] - points[0], rel=1e-9)


def test_figures_are_the_integrals_of_the_operations(loop: SimulatedLoop) -> None:
    start, end = training(loop, 12.3)
    timeline = loop.timeline(start, end)
    for gpu in (0, 5):
        figures = loop.gpu_integrals(gpu, end) - loop.gpu_integrals(gpu, start)
        compute = _clipped_seconds(timeline.compute[gpu], start, end)
        collectives = _clipped_seconds(timeline.collectives[gpu], start, end)
        assert max(compute, collectives) <= figures[COLUMN["gr_active"]] <= min(compute + collectives, 12.3)
        # SM active: every kernel by its share of the GPU, collectives by their channels.
        most = loop.scenario.sm_fill * compute + collectives * 24 / 132
        assert figures[COLUMN["sm_active"]] == pytest.approx(most, rel=0.12)
        copied = sum(c.copy.size for c in timeline.copies[gpu]
                     if c.copy.way == "H2D" and c.start >= start and c.end <= end)
        one = loop.scenario.batch_per_gpu * EXAMPLE_BYTES
        assert copied > 0
        assert figures[COLUMN["pcie_rx_bytes"]] == pytest.approx(copied, abs=1.01 * one)


def test_host_figures_follow_the_pipeline(loop: SimulatedLoop) -> None:
    start, end = training(loop, 30)
    before, after = loop.host_integrals(start), loop.host_integrals(end)
    making = sum(
        max(0, min(s.made_ns, end) - max(s.made_from_ns, start)) for s in loop.batches(start, end)
    ) / 1e9
    assert after["input_s"] - before["input_s"] == pytest.approx(making, rel=1e-6)
    assert after["batches"] - before["batches"] == pytest.approx(len(loop.batches(start, end)), abs=2)
    assert after["write_bytes"] == before["write_bytes"]
    saved = [s for s in loop.steps(end, end + 80 * SECOND) if s.kind is StepKind.CHECKPOINT]
    longer = loop.host_integrals(end + 80 * SECOND)
    assert saved and saved[0].start_ns > end and saved[-1].end_ns < end + 80 * SECOND
    assert longer["write_bytes"] - after["write_bytes"] == pytest.approx(len(saved) * loop.scenario.checkpoint_bytes)


def test_earlier_steps_are_kept_for_a_while_and_then_dropped() -> None:
    loop = SimulatedLoop(SCENARIOS["healthy"])
    at = 400 * SECOND
    before = loop.gpu_integrals(2, at)
    loop.gpu_integrals(2, at + KEEP_NS - 100 * SECOND)
    assert np.array_equal(loop.gpu_integrals(2, at), before)
    host = loop.host_integrals(2_000 * SECOND)
    loop.gpu_integrals(2, 3 * KEEP_NS)
    assert len(loop._epochs) < 1.2 * KEEP_NS / (80 * SECOND) + 3
    later = loop.host_integrals(3 * KEEP_NS)
    assert later["batches"] > host["batches"] and later["input_s"] > host["input_s"]  # totals survive


def test_truth_needs_a_whole_training_step(loop: SimulatedLoop) -> None:
    with pytest.raises(ValueError, match="no whole training step"):
        loop_truth(loop, 0, 1_000)


def test_input_bound_waits_for_input_and_its_gpus_are_idle_meanwhile(input_loop: SimulatedLoop) -> None:
    start, end = training(input_loop, 30)
    truth = loop_truth(input_loop, start, end)
    assert 0.45 < truth.input_wait_ratio < 0.6
    active = (input_loop.gpu_integrals(4, end) - input_loop.gpu_integrals(4, start))[COLUMN["gr_active"]] / 30
    assert active == pytest.approx(1 - truth.input_wait_ratio, abs=0.04)


def test_what_each_scenario_is_about(loop: SimulatedLoop) -> None:
    truth = loop_truth(loop, *training(loop, 30))
    ratio = truth.compute_s[0] / truth.compute_s[1]
    waiting = 1 - truth.transfer_s / truth.collectives_s[3]
    expected = {
        "healthy": truth.compute_s[1] / truth.step_s > 0.95,
        "hang": truth.compute_s[1] / truth.step_s > 0.95,  # until it hangs
        "gpu0-oversubscribed": 2.1 < ratio < 2.4 and waiting > 0.9,
        "input-bound": truth.input_wait_ratio > 0.45,
        "slow-checkpoint": truth.compute_s[1] / truth.step_s > 0.95,  # while it trains
        "launch-bound": truth.compute_s[1] / truth.step_s < 0.15,
        "three-causes": 1.6 < ratio < 2.0 and truth.compute_s[0] / truth.step_s < 0.8,
        "slow-callback": truth.compute_s[1] / truth.step_s < 0.65 and truth.input_wait_ratio < 0.05}
    assert expected[loop.scenario.id]
    if loop.scenario.id not in ("gpu0-oversubscribed", "three-causes"):
        assert ratio == pytest.approx(1, abs=0.02)
    if loop.scenario.id != "input-bound":
        assert truth.input_wait_ratio < 0.01
    assert 0.15 < truth.step_s < 0.45
    assert len(truth.compute_s) == GPU_COUNT and truth.kernels[1] > 400


def test_an_unknown_scenario_lists_all() -> None:
    with pytest.raises(GputopError) as caught:
        find_scenario("fast")
    assert caught.value.exit_code == 2
    for scenario in SCENARIOS.values():
        assert scenario.id in caught.value.fix and scenario.description in caught.value.fix
    assert find_scenario("Launch_Bound").id == "launch-bound"
    assert DEFAULT_SCENARIO in SCENARIOS
