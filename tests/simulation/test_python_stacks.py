"""The stacks of the demo's job against its steps, which know what Python does at each time."""

from __future__ import annotations

from bisect import bisect_right

from gputop.simulation.host_events import RATE_HZ, python_stacks
from gputop.simulation.loop import SimulatedLoop, StepKind
from gputop.simulation.scenarios import SCENARIOS

ORIGIN_NS, LENGTH_NS = 1_700_000_000 * 10**9, 90 * 10**9  # an epoch, its evaluation and its checkpoint


def test_each_sample_is_what_the_job_is_at() -> None:
    loop = SimulatedLoop(SCENARIOS["slow-callback"])
    start = loop.epoch_start(10**9)
    samples = python_stacks(loop, start, start + LENGTH_NS, ORIGIN_NS)
    assert samples is not None and samples.rate_hz == RATE_HZ
    assert abs(samples.start_s - (ORIGIN_NS + start) / 1e9) < 1e-6 and 0 <= LENGTH_NS / 1e9 - samples.length_s < 0.02
    (thread,) = samples.threads

    def innermost(time_ns: int) -> str:
        stack = thread.stacks[bisect_right(thread.times_us, (time_ns - start) // 1000) - 1]
        return samples.frames[samples.stacks[stack][-1]].function

    seen = set()
    for step in loop.steps(start, start + LENGTH_NS - 10**9):
        seen.add(step.kind)
        usual = {StepKind.TRAIN: "quick_execute", StepKind.EVAL: "quick_execute", StepKind.CHECKPOINT: "save"}
        assert innermost((step.begin_ns + step.end_ns) // 2) == usual[step.kind]
        if step.kind is StepKind.TRAIN and step.next_ns - step.end_ns > 40_000_000:
            assert innermost((step.end_ns + step.next_ns) // 2) == "confusion_matrix"
    assert seen == set(StepKind)


def test_no_time_has_no_stacks() -> None:
    assert python_stacks(SimulatedLoop(SCENARIOS["healthy"]), 10**9, 10**9, ORIGIN_NS) is None
