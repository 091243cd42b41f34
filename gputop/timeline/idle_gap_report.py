"""Idle gaps as text and as rows of the document, for ``gputop analyze --idle-gaps``."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from gputop.advice.trace.facts import TraceFacts
from gputop.core.codec import document_of
from gputop.diagnosis.python_lines import line_words
from gputop.render.finding_text import BY_TRACER
from gputop.text.units import fit, percent, printable, ranges, seconds, wrap
from gputop.timeline.idle_gaps import IdleGaps
from gputop.timeline.model import PER, IdleGap, cause_text
from gputop.trace.quality import is_cut_off

_LAUNCHING_ROLES = ("main", "executor")  # the only ones that matter where GPUs wait for each other
_MAX_WORKS = 4  # of the host, in text
_MAX_LINES = 3  # of Python
_NAME_WIDTH = 60  # columns for the name of a kernel or op: C++ templates have hundreds


def text_of(ranking: IdleGaps, facts: TraceFacts, origin_ns: int, width: int = 80) -> str:
    """A section for the report of the analysis; times count from ``origin_ns``, the trace's first event."""
    idle_gaps = [ranked.idle_gap for ranked in ranking.ranked]
    if is_cut_off(facts.trace):
        return "Idle gaps: not evaluated, because the file is damaged.\n"
    if not idle_gaps:
        reason = "because no GPU in this trace ran anything" if not any(gpu.busy for gpu in facts.analysis.gpus) else (
            "because no GPU is idle within the steps")
        return f"Idle gaps: none, {reason}.\n"
    lines = [f"Idle gaps by cause{PER.get(facts.basis, '')}, mean over the GPUs"]
    for total in ranking.totals:
        lines += wrap(f"{total.text(facts.period_s)}{f' [{total.finding}]' if total.finding else ''}", width,
                      f"{seconds(total.s_per_step):>10}  ", " " * 12)
        for line in total.python[:_MAX_LINES]:
            lines += wrap(line_words(line, facts.basis) + BY_TRACER * line.traced, width, " " * 12, " " * 14)
    lines += ["", "Idle gaps by GPU time lost"]
    for number, idle_gap in enumerate(idle_gaps, 1):
        lines += _lines(number, idle_gap, facts, origin_ns, width)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _lines(number: int, gap: IdleGap, facts: TraceFacts, origin_ns: int, width: int) -> Iterator[str]:
    length = gap.end_ns - gap.start_ns
    step = _step(gap, facts)
    yield from wrap(
        f"{seconds(gap.cost_ns / 1e9)}: {'GPUs' if len(gap.gpus) > 1 else 'GPU'} {ranges(gap.gpus)} for "
        f"{seconds(length / 1e9)} from {(gap.start_ns - origin_ns) / 1e9:.6f} s"
        + ("" if step is None else f" (step {step})") + f": {cause_text(gap.cause, gap.part)}"
        + (f" [{gap.finding}]" if gap.finding else ""), width, f"{number:>3}. ")
    by_thread: dict[str, list[str]] = {}
    works = [work for work in gap.work if gap.part not in ("idle", "collectives") or work.role in _LAUNCHING_ROLES]
    for work in works[:_MAX_WORKS]:
        by_thread.setdefault(work.thread, []).append(f"{_short(work.what)} {percent(work.time_ns / length)}")
    if by_thread:
        done = "; ".join(f"{thread}: {', '.join(ops)}" for thread, ops in by_thread.items())
        yield from wrap(f"host: {done}", width, "     ", "       ")
    if gap.python:
        ran = ", ".join(f"{printable(line.line)} {percent(line.share)}" for line in gap.python[:_MAX_LINES])
        yield from wrap(f"Python{BY_TRACER * gap.python[0].traced}: {ran}", width, "     ", "       ")
    if gap.meanwhile:
        yield from wrap(gap.meanwhile, width, "     ", "       ")
    if gap.ended_by:
        name, launched, thread = gap.ended_by.rpartition(", launched by ")
        yield from wrap(f"ended by {_short(name or thread)}{launched}{thread if name else ''}", width, "     ",
                        "       ")


class IdleGapHost(Struct, frozen=True):
    """Work of a host thread in an idle gap; ``op`` is null if no event was recorded."""

    thread: str
    threads: int
    role: str
    op: str | None
    time_s: float


class IdleGapLine(Struct, frozen=True):
    line: str
    file: str
    inner: str | None
    time_s: float
    traced: bool


class IdleGapRow(Struct, frozen=True):
    """``start_s`` and ``end_s`` count from the start of the window, ``step`` from 0; ``cost_s`` is GPU time."""

    gpus: tuple[int, ...]
    start_s: float
    end_s: float
    cost_s: float
    step: int | None
    part: str
    cause: str
    finding: str | None
    ended_by: str | None
    meanwhile: str | None
    host: tuple[IdleGapHost, ...]
    python: tuple[IdleGapLine, ...]

    @classmethod
    def of(cls, gap: IdleGap, facts: TraceFacts, origin_ns: int) -> IdleGapRow:
        return document_of(
            cls, gap, start_s=(gap.start_ns - origin_ns) / 1e9, end_s=(gap.end_ns - origin_ns) / 1e9,
            cost_s=gap.cost_ns / 1e9, step=_step(gap, facts), ended_by=gap.ended_by or None,
            meanwhile=gap.meanwhile or None,
            host=tuple(document_of(IdleGapHost, work, op=work.op or None, time_s=work.time_ns / 1e9)
                       for work in gap.work),
            python=tuple(document_of(IdleGapLine, line, inner=line.inner or None, time_s=line.s_per_step)
                         for line in gap.python))


def _step(gap: IdleGap, facts: TraceFacts) -> int | None:
    """The step in which the gap begins, counted from 0."""
    if facts.steps is None:
        return None
    bounds = facts.steps.edges_ns
    step = int(np.searchsorted(bounds[:, 0], gap.start_ns, side="right")) - 1
    return step if step >= 0 and gap.start_ns < bounds[step, 1] else None


def _short(name: str) -> str:
    return fit(name, _NAME_WIDTH).rstrip()
