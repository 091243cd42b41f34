from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gputop.simulation.loop import TrainingLoop
from gputop.simulation.program import Phase, StepKind, Stream
from gputop.simulation.step import STREAM_GAP_NS, StepOps, run_in_order


def _templates(loop: TrainingLoop) -> list[StepOps]:
    return [ops for template in loop.templates for ops in template.step.gpus if len(ops.program)]


_JOBS = st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 5_000)), min_size=1, max_size=30)


@given(_JOBS, st.integers(0, 9_000))
def test_a_stream_runs_in_order_and_starts_each_as_soon_as_it_can(jobs: list[tuple[int, int]], floor: int) -> None:
    ready, duration = (np.array(column, np.int64) for column in zip(*jobs, strict=True))
    start, end = run_in_order(ready, duration, floor)
    free = floor
    for i in range(len(jobs)):  # the same said one by one
        assert start[i] == max(ready[i], free)
        assert end[i] == start[i] + duration[i]
        free = end[i] + STREAM_GAP_NS


def test_nothing_overlaps_on_a_stream(loop: TrainingLoop) -> None:
    for ops in _templates(loop):
        for stream in Stream:
            rows = ops.rows(stream)
            assert (ops.start_ns[rows][1:] >= ops.end_ns[rows][:-1]).all()
            assert (ops.end_ns[rows] > ops.start_ns[rows]).all()


def test_launches_precede_what_they_launch_and_do_not_overlap(loop: TrainingLoop) -> None:
    for ops in _templates(loop):
        assert (ops.launch_ns < ops.launch_end_ns).all()
        assert (ops.launch_end_ns < ops.start_ns).all()
        assert (ops.launch_ns[1:] >= ops.launch_end_ns[:-1]).all()


def test_a_collective_moves_data_once_the_last_gpu_is_there_and_ends_on_all_at_once(loop: TrainingLoop) -> None:
    for template in loop.templates:
        if template.step.kind is not StepKind.TRAIN:
            continue
        rows = [ops.rows(Stream.COLLECTIVE) for ops in template.step.gpus]
        assert all(len(r) == loop.scenario.allreduce_buckets for r in rows)
        ends = np.array([ops.end_ns[r] for ops, r in zip(template.step.gpus, rows, strict=True)])
        starts = np.array([ops.start_ns[r] for ops, r in zip(template.step.gpus, rows, strict=True)])
        transfer = template.step.gpus[0].transfer_ns[rows[0]]
        assert (ends == ends[0]).all()
        assert (starts.max(axis=0) + transfer == ends[0]).all()


def test_phases_wait_for_each_other(loop: TrainingLoop) -> None:
    for template in loop.templates:
        for ops in template.step.gpus:
            phase, stream = ops.program.phase, ops.program.stream
            for earlier, later in (
                (phase == Phase.INPUT, phase == Phase.FORWARD),
                (phase == Phase.FORWARD, phase == Phase.BACKWARD),
                (phase == Phase.BACKWARD, phase == Phase.APPLY),
                (stream != Stream.D2H, phase == Phase.OUTPUT),
            ):
                if earlier.any() and later.any():
                    assert ops.end_ns[earlier].max() <= ops.start_ns[later].min()
            if len(phase):
                assert ops.end_ns.max() < template.step.body_ns


def test_gpu0s_extra_work_starts_when_the_others_have_sent_theirs(gpu0_loop: TrainingLoop) -> None:
    for template in gpu0_loop.templates:
        if template.step.kind is not StepKind.TRAIN:
            continue
        first, *others = template.step.gpus
        arrived = max(int(ops.end_ns[ops.rows(Stream.P2P)].max()) for ops in others)
        extra = first.start_ns[first.program.phase == Phase.EXTRA]
        assert len(extra) == gpu0_loop.scenario.gpu0_extra_kernels
        assert extra.min() >= arrived
        assert not len(first.rows(Stream.P2P))
