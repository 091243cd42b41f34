"""Savings of a job on CPUs as it is while nothing records it.

A profiler makes one part of a step longer than another: ops that it records, and memory that its records keep the
allocator from using again. Python's samples go on around the recording, and show what the training loop runs then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import sqrt

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from gputop.advice.trace.facts import TraceFacts
from gputop.advice.trace.known_work import UserFunction, function_of, main_function
from gputop.advice.trace.other_programs import others_take
from gputop.analysis.host.python_stacks import PythonStacks, StackSpans, line_text
from gputop.analysis.host.stack_lines import loader_of_frames, python_of
from gputop.analysis.host.unrecorded import LEAST_S, in_and_outside
from gputop.core.findings import Finding, severity_of
from gputop.text.units import percent, seconds
from gputop.trace.intervals import merge, overlap, union

_ALIKE = 0.2  # what the samples in the recording show of the step differs from what is recorded by no more than this
_WORTH_SAYING = 0.02  # of a step; and no less than the standard deviation of the samples
_EVALUATES = re.compile(r"(?:run_|do_)?(?:eval|evaluate|validate|validation|test)(?:_\w+)?")
_ANY_THREAD = "host_placement"  # whose Python a compiled function calls on any thread
_HOST_WORK = ("step_gap_host", "long_steps", "time_outside_steps", _ANY_THREAD)


def as_unrecorded(made: Finding, facts: TraceFacts) -> Finding:
    """The finding with the share that what it names takes outside of the recording, where samples show another one."""
    gain = made.gain
    if facts.active or gain.step_time is None or gain.claim is None or len(facts.trace.stacks) != 1:
        return made
    python = python_of(facts.trace)
    if not python or others_take(facts.trace.job_cpus):  # as they come and go, so do shares of the step
        return made
    runs = _stacks_of(made, main_function(made.culprits, 0.0, facts.analysis.stacks), python[0])
    if runs is None or not runs.any():  # code within the loop has no name that tells: it was not seen, not absent
        return made
    threads = [python[0].loop, *(python[0].others if made.id == _ANY_THREAD else ())]
    recorded, outside, outside_s = _shares(threads, facts.trace.window_ns, runs)
    samples = outside_s * python[0].rate_hz
    share = made.evidence.get("share_ratio") or gain.step_time or 1.0
    if outside_s < LEAST_S or abs(recorded - share) > _ALIKE:
        return made
    error = sqrt(outside * (1 - outside) / samples)
    if abs(outside - share) < max(error, _WORTH_SAYING):
        return made
    saved = outside * gain.step_time / share
    title = made.title.replace(percent(share), percent(outside), 1)  # a heading has one share: that of the job
    why = (f"Outside of the recording, Python's samples show this for {percent(outside)} of {seconds(outside_s)}. What "
           f"follows is of the recorded steps, which the profiler slows down unevenly. {made.why}")
    claim = "about" if gain.claim == "measured" else gain.claim
    by_share = made.severity == severity_of(gain.step_time)
    return replace(made, title=title, severity=severity_of(saved) if by_share else made.severity, why=why,
                   evidence={**made.evidence, "unrecorded_ratio": outside},
                   gain=replace(gain, step_time=saved, claim=claim, before_s=None))


def _stacks_of(made: Finding, function: UserFunction | None, python: PythonStacks) -> npt.NDArray[np.bool_] | None:
    """A mask of the stacks that run what the finding names; None where none can be told."""
    if made.id == "input_bound":
        loaders = loader_of_frames(python)
        return _with_frame(python, lambda frame: bool(loaders[frame]))
    if made.id == "optimizer_unfused":
        return _with_frame(python, lambda frame: "/torch/optim/" in python.frames[frame].file)
    if made.id == "evaluation_share":
        return _with_frame(python, lambda frame: _EVALUATES.fullmatch(
            python.frames[frame].function.rpartition(".")[2]) is not None)
    lines = {one.name for one in made.culprits if one.kind == "line"}
    if made.id not in _HOST_WORK or not lines:
        return None
    # The loop's function runs the steps, too, so only its lines count; of others, all that they run.
    functions = {function_of(line) for line in lines} - {None}
    if function is not None and function.holds_loop:
        functions -= {function_of(line) for line in lines if line.startswith(f"{function.location} ")}
    texts = [line_text(frame) for frame in python.frames]
    return _with_frame(python, lambda frame: texts[frame] in lines or function_of(texts[frame]) in functions)


def _with_frame(python: PythonStacks, fits: Callable[[int], bool]) -> npt.NDArray[np.bool_]:
    chosen = {frame for frame in range(len(python.frames)) if fits(frame)}
    return np.array([not chosen.isdisjoint(stack) for stack in python.stacks], bool)


def _shares(threads: Sequence[StackSpans], window_ns: tuple[int, int], runs: npt.NDArray[np.bool_],
            ) -> tuple[float, float, float]:
    """Shares of the time in which the threads are in these stacks: in the recording, and outside of it; and the seconds
    of the latter. The first thread is the loop's, which was sampled all the time."""
    running = merge(*(union(thread.start[rows], thread.end[rows]) for thread in threads
                      for rows in [np.flatnonzero((thread.stack >= 0) & runs[thread.stack])]))
    recorded, outside = in_and_outside(threads[0], window_ns)
    shares = [overlap(running, spans) / spans.total if spans.total else 0.0 for spans in (recorded, outside)]
    return shares[0], shares[1], outside.total / 1e9
