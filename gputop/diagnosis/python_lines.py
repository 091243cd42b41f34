"""The lines of Python that ran in gaps, in words: the same in the report, on the screen and on the page."""

from __future__ import annotations

from collections.abc import Iterator

from gputop.analysis.results import GapLines, HostStacks, StackLine
from gputop.render.step_parts import IDLE_CAUSES
from gputop.text.units import percent, printable, seconds

_MIN_LISTED_SHARE = 0.01  # share of the step: the gaps of one kind are listed
_SHOWN = 5


def per_basis(basis: str) -> str:
    return "of the window" if basis == "window" else f"of each {basis}"


def line_words(line: StackLine, basis: str) -> str:
    """"38 ms of each step: metrics.py:112 confusion_matrix"."""
    text = printable(line.line) + (f", mostly in {printable(line.inner)}" if line.inner else "")
    return f"{seconds(line.s_per_step)} {per_basis(basis)}: {text}"


def gap_words(gaps: GapLines, stacks: HostStacks) -> str:
    """"between two calls of the step, 43.5 ms of each step; stacks were seen in 92 of 102"."""
    seen = "Python was traced in" if stacks.traced else "stacks were seen in"
    return (f"{IDLE_CAUSES.get(gaps.gap, gaps.gap)}, {seconds(gaps.s_per_step)} {per_basis(stacks.basis)}; {seen} "
            f"{gaps.seen:,} of {gaps.gaps:,} such gaps")


def cost_words(stacks: HostStacks, simulated: bool) -> str:
    """Source of the stacks, and the cost of sampling them, in words."""
    if stacks.traced:
        line = ("the line of its call, or otherwise by its first line" if stacks.source == "tracer with lines"
                else "its first line")
        return (f"The lines come from the trace's own Python tracer, which identifies a function by {line}. Such a "
                "tracer slows down code that calls many functions.")
    if simulated:
        return f"SIMULATED stacks, {stacks.rate_hz:.0f} samples per second."
    failed = f"; {percent(stacks.missed)} of the samples failed" if stacks.missed >= 0.01 else ""
    return (f"py-spy sampled the stacks {stacks.rate_hz:.0f} times a second{failed}. The times are accurate to "
            f"{seconds(stacks.error_s)}. Sampling used {stacks.cpus:.2f} CPUs.")


def worth_showing(stacks: HostStacks, period_s: float) -> list[GapLines]:
    """The kinds of gaps that take a part of the step, or of the window."""
    return [gaps for gaps in stacks.gaps if gaps.s_per_step >= _MIN_LISTED_SHARE * period_s]


def lines_of_gaps(gaps: GapLines, stacks: HostStacks) -> Iterator[str]:
    """Yield what ran in the gaps, a line of text for each kind."""
    if not gaps.seen:
        yield ("The tracer recorded no call near these gaps." if stacks.traced else
               "These gaps are so short that no sample fell into them." if not gaps.lines else
               "These gaps are too short for single samples. Over all samples, these lines run after the step:")
    elif not gaps.lines and gaps.gap == "input":
        yield ("The tracer recorded no user Python code on other threads. It does not trace tf.data threads."
               if stacks.traced else "No user Python code ran in this process during these gaps.")
    elif not gaps.lines:
        yield "No line ran for more than 1% of that time."
    for line in gaps.lines[:_SHOWN]:
        yield line_words(line, stacks.basis)
