"""The Python stacks of a job's threads, sampled while the job was captured."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

MAX_THREADS, MAX_FRAMES, MAX_STACKS, MAX_CHANGES, MAX_DEPTH = 256, 20_000, 20_000, 200_000, 300
NAME_CHARS = 300
_LAST_TIME_S, _LONGEST_US = 4e9, 10 ** 11  # the year 2096; a day


class StackFrame(Struct, frozen=True):
    """A line of a Python file; 0: not known."""

    function: Annotated[str, Meta(max_length=NAME_CHARS)]
    file: Annotated[str, Meta(max_length=NAME_CHARS)]
    line: int = 0


class ThreadStacks(Struct, frozen=True):
    """One thread: when a sample first saw each of its stacks, in microseconds since the first one, rising.

    ``stacks`` are indices into those of the process; -1: the thread was not there.
    """

    name: Annotated[str, Meta(max_length=NAME_CHARS)]
    main: bool
    times_us: Annotated[tuple[int, ...], Meta(max_length=MAX_CHANGES)]
    stacks: Annotated[tuple[int, ...], Meta(max_length=MAX_CHANGES)]


class StackSamples(Struct, frozen=True):
    """The samples of one process.

    ``start_s`` is the Unix time that the times of the threads count from, known to ``error_s``; ``length_s`` the time
    until the last sample. ``rate_hz`` is how often each thread was sampled, ``missed`` the share of the samples in
    which the process changed while it was read. ``cpu_s`` is what the sampling took of the node's CPUs. A stack is a
    tuple of indices into ``frames``, the outermost first.
    """

    start_s: float
    length_s: float
    error_s: float
    rate_hz: float
    missed: float
    cpu_s: float
    frames: Annotated[tuple[StackFrame, ...], Meta(max_length=MAX_FRAMES)] = ()
    stacks: Annotated[tuple[tuple[int, ...], ...], Meta(max_length=MAX_STACKS)] = ()
    threads: Annotated[tuple[ThreadStacks, ...], Meta(max_length=MAX_THREADS)] = ()

    def __post_init__(self) -> None:
        if not (0 <= self.start_s < _LAST_TIME_S and 0 < self.length_s < _LONGEST_US / 1e6
                and 0 <= self.error_s <= self.length_s + 1 and 0 < self.rate_hz <= 10_000 and 0 <= self.missed <= 1
                and 0 <= self.cpu_s < _LAST_TIME_S):
            raise ValueError("an impossible time or rate")
        frames, stacks = len(self.frames), len(self.stacks)
        if any(len(stack) > MAX_DEPTH or any(not 0 <= frame < frames for frame in stack) for stack in self.stacks):
            raise ValueError("a stack of missing frames")
        if any(frame.line < 0 for frame in self.frames):
            raise ValueError("a negative line number")
        if sum(len(thread.times_us) for thread in self.threads) > MAX_CHANGES:
            raise ValueError("too many changes of stacks")
        for thread in self.threads:
            if len(thread.times_us) != len(thread.stacks) or any(not -1 <= stack < stacks for stack in thread.stacks):
                raise ValueError("a thread with missing stacks")
            if any(a >= b for a, b in zip((-1, *thread.times_us), (*thread.times_us, _LONGEST_US), strict=True)):
                raise ValueError("stack times that do not increase")
