"""Stacks of made-up jobs: what ran when, seen at given times as py-spy would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gputop.core.host_stacks import StackFrame, StackSamples, ThreadStacks
from gputop.trace.model import Trace
from tests.trace.build import Builder

USER, LIBRARY = "/home/u/{}", "/env/lib/python3.11/site-packages/{}"


def frame(text: str) -> StackFrame:
    """"train.py:7 fit", or of a library "keras/src/trainer.py:9 fit"."""
    file, _, rest = text.partition(":")
    line, _, function = rest.partition(" ")
    return StackFrame(function, (LIBRARY if "/" in file else USER).format(file), int(line))


def sampled(threads: Mapping[str, Sequence[tuple[float, str]]], length_s: float, *, start_s: float = 1000.0,
            rate_hz: float = 100.0) -> StackSamples:
    """By thread the seconds at which each stack ("a.py:1 f > b.py:2 g", "": none) was first seen."""
    frames: dict[StackFrame, int] = {}
    stacks: dict[tuple[int, ...], int] = {}
    out = []
    for name, changes in threads.items():
        numbers = []
        for _, text in changes:
            own = tuple(frames.setdefault(f, len(frames)) for f in map(frame, text.split(" > ") if text else ()))
            numbers.append(stacks.setdefault(own, len(stacks)) if own else -1)
        out.append(ThreadStacks(name, name == "MainThread", tuple(round(t * 1e6) for t, _ in changes), tuple(numbers)))
    return StackSamples(start_s, length_s, 0.004, rate_hz, 0.0, 0.1, tuple(frames), tuple(stacks), tuple(out))


def with_samples(b: Builder, threads: Mapping[str, Sequence[tuple[float, str]]], length_s: float, *,
                 rate_hz: float = 100.0) -> Trace:
    """The trace with these stacks; it begins at the Unix time 1000 s."""
    trace = b.build()
    trace.origin_ns, trace.stacks = 1000 * 10**9, (sampled(threads, length_s, rate_hz=rate_hz),)
    return trace
