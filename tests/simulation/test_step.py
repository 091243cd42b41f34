from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gputop.simulation.figures import StepOps
from gputop.simulation.loop import SimulatedLoop, StepKind
from gputop.simulation.program import Phase
from gputop.simulation.timeline import run_in_order

GAP_NS = 900


def _steps(loop: SimulatedLoop) -> list[StepOps]:
    return [ops for template in loop.templates for ops in template.gpus if len(ops.compute.row) or ops.copies]


def _streams(ops: StepOps) -> Iterator[np.ndarray]:
    """Start, end, launch and the end of its call of the operations of each stream, a row each."""
    for stream in (ops.compute, ops.collectives):
        yield np.array(stream[1:]).T.reshape(-1, 4)
    for way in ("H2D", "D2H", "P2P"):
        yield np.array([c[2:] for c in ops.copies if c.copy.way == way], np.int64).reshape(-1, 4)


_JOBS = st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 5_000)), min_size=1, max_size=30)


@given(_JOBS, st.integers(0, 9_000))
def test_a_stream_runs_in_order_and_starts_each_as_soon_as_it_can(jobs: list[tuple[int, int]], floor: int) -> None:
    ready, duration = (np.array(column, np.int64) for column in zip(*jobs, strict=True))
    start, end = run_in_order(ready, duration, floor, GAP_NS)
    free = floor
    for i in range(len(jobs)):  # the same, one by one
        assert start[i] == max(ready[i], free)
        assert end[i] == start[i] + duration[i]
        free = end[i] + GAP_NS


def test_nothing_overlaps_on_a_stream(loop: SimulatedLoop) -> None:
    for ops in _steps(loop):
        for stream in _streams(ops):
            assert (stream[1:, 0] >= stream[:-1, 1]).all()
            assert (stream[:, 1] > stream[:, 0]).all()


def test_launches_precede_what_they_launch_and_do_not_overlap(loop: SimulatedLoop) -> None:
    for ops in _steps(loop):
        launched = np.concatenate(list(_streams(ops)))
        start, _, launch, call_end = launched[np.argsort(launched[:, 2])].T
        # The call of a copy to pageable memory lasts as long as the copy.
        waits = np.isin(launch, [c.launch for c in ops.copies if c.copy.dst == "pageable"])
        assert (launch < call_end).all()
        assert (np.where(waits, launch, call_end) < start).all()
        assert (launch[1:] >= call_end[:-1]).all()


def test_a_collective_moves_data_once_the_last_gpu_is_there_and_ends_on_all_at_once(loop: SimulatedLoop) -> None:
    for template in loop.templates:
        if template.kind is not StepKind.TRAIN:
            continue
        assert all(len(ops.collectives.row) == loop.scenario.job.comm_count for ops in template.gpus)
        ends = np.array([ops.collectives.end for ops in template.gpus])
        starts = np.array([ops.collectives.start for ops in template.gpus])
        assert (ends == ends[0]).all()
        assert (starts.max(axis=0) + template.gpus[0].transfer_ns == ends[0]).all()


def test_phases_wait_for_each_other(loop: SimulatedLoop) -> None:
    for template in loop.templates:
        for ops in template.gpus:
            start, end, phase = ops.compute.start, ops.compute.end, ops.program.phase[ops.compute.row]
            copies = {way: np.array([c[2:4] for c in ops.copies if c.copy.way == way]).reshape(-1, 2)
                      for way in ("H2D", "D2H", "P2P")}
            forward, backward, apply = (phase == p for p in (Phase.FORWARD, Phase.BACKWARD, Phase.APPLY))
            done = np.concatenate((end, ops.collectives.end, copies["H2D"][:, 1], copies["P2P"][:, 1]))
            for earlier, later in (
                (copies["H2D"][:, 1], start[forward]), (end[forward], start[backward]),
                (np.concatenate((end[backward], ops.collectives.end)), start[apply]), (done, copies["D2H"][:, 0])):
                if len(earlier) and len(later):
                    assert earlier.max() <= later.min()
            if len(done):
                assert max(done.max(), copies["D2H"].max(initial=0)) < template.body_ns


def test_gpu0s_extra_work_starts_when_the_others_have_sent_theirs(gpu0_loop: SimulatedLoop) -> None:
    for template in gpu0_loop.templates:
        if template.kind is not StepKind.TRAIN:
            continue
        first, *others = template.gpus
        sent = [[c.end for c in ops.copies if c.copy.way == "P2P"] for ops in (first, *others)]
        extra = first.compute.start[first.program.phase[first.compute.row] == Phase.EXTRA]
        assert len(extra) == gpu0_loop.scenario.job.gpu0_extra_kernels
        assert sent[0] == [] and all(len(own) == 1 for own in sent[1:])
        assert extra.min() >= max(max(own) for own in sent[1:])
