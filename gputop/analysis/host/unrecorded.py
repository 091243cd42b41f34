"""Phases of a job that its recording lacks, by Python's samples: before it, and after its profiler has written it."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from gputop.analysis.host.python_stacks import StackSpans, line_text
from gputop.analysis.host.stack_lines import python_of
from gputop.core.findings import TraceNote
from gputop.text.units import percent, seconds
from gputop.trace.intervals import Spans, coverage, intersect, subtract, union
from gputop.trace.model import Trace

COLLECTS_NS = 1_500_000_000  # a job's pause after its recording, in which its profiler writes; measured up to 1.2 s
LEAST_S = 1.5  # of samples outside of the recording
# A function that the recording lacks takes at least this share of the time outside, and hardly any in it. gputop's own
# figures.
_MUCH, _HARDLY = 0.2, 0.01


def in_and_outside(loop: StackSpans, window_ns: tuple[int, int]) -> tuple[Spans, Spans]:
    """The time in which the loop's thread was sampled: in the recording, and outside of it."""
    sampled = union(loop.start[:1], loop.end[-1:])
    recorded, slowed = (union(window_ns[:1], [window_ns[1] + more]) for more in (0, COLLECTS_NS))
    return intersect(recorded, sampled), subtract(sampled, slowed)


def unrecorded_note(trace: Trace) -> list[TraceNote]:
    """A note on the function, or the line, that takes much of the loop's time outside of a recording that shows none of
    it: another phase of the job, as rollouts between updates, or an evaluation."""
    python = python_of(trace) if len(trace.stacks) == 1 else []
    if not python:
        return []
    loop = python[0].loop
    spans = in_and_outside(loop, trace.window_ns)
    if spans[1].total < LEAST_S * 1e9 or not spans[0].total:
        return []
    rows = np.flatnonzero(loop.stack >= 0)
    times = [np.bincount(loop.stack[rows], coverage(each, loop.start[rows], loop.end[rows]), len(python[0].stacks))
             for each in spans]
    shares: dict[tuple[str, str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    frames: dict[tuple[str, str, int], int] = {}
    for stack, *of_stack in zip(python[0].stacks, *times, strict=True):
        of_frames = [(frame, python[0].frames[frame]) for frame in reversed(stack)]  # line 0: the whole function
        calls = {(of.file, of.function, line): frame for frame, of in of_frames for line in (of.line, 0)}
        for function in reversed(calls):
            frames.setdefault(function, calls[function])
            for which, time in enumerate(of_stack):
                shares[function][which] += time / spans[which].total
    unseen = {function: outside for function, (recorded, outside) in shares.items()
              if recorded <= _HARDLY and outside >= _MUCH}
    if not unseen:
        return []
    most = max(unseen, key=lambda function: (not function[2], unseen[function]))
    return [TraceNote("unrecorded", (
        f"Outside of the recording, Python's samples show {line_text(python[0].frames[frames[most]])} for "
        f"{percent(unseen[most])} of {seconds(spans[1].total / 1e9)}. The recording shows none of it, so all figures "
        "are about the rest of the job. Capture again or for longer to see it."))]
