"""Bubbles as text and as JSON, for ``gputop analyze --bubbles``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gputop.analysis.results import Analysis
from gputop.text.units import fit, percent, ranges, seconds
from gputop.text.wrapping import wrap
from gputop.timeline.model import CAUSES, Bubble

_LAUNCHERS = ("main", "executor")  # where GPUs wait for each other, nobody else matters
_WORKS = 4  # of the host, in text
_NAME = 60  # columns for a kernel's or op's name: C++ templates have hundreds


def text_of(bubbles: Sequence[Bubble], analysis: Analysis, origin_ns: int, width: int = 80) -> str:
    """A section for the report of the analysis; times count from ``origin_ns``, the trace's first event."""
    if not bubbles:
        why = "no GPU of this trace ran anything" if not any(gpu.busy for gpu in analysis.gpus) else (
            "no GPU ever stands still within the steps")
        return f"Coldest places: none, {why}.\n"
    lines = ["Coldest places, by GPU-time lost"]
    for number, bubble in enumerate(bubbles, 1):
        lines += _lines(number, bubble, analysis, origin_ns, width)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _lines(number: int, bubble: Bubble, analysis: Analysis, origin_ns: int, width: int) -> Iterator[str]:
    length = bubble.end_ns - bubble.start_ns
    several = "GPUs" if len(bubble.gpus) > 1 else "GPU"
    step = _step(bubble, analysis)
    yield from wrap(
        f"{seconds(bubble.cost_ns / 1e9)}: {several} {ranges(bubble.gpus)} for {seconds(length / 1e9)} from "
        f"{(bubble.start_ns - origin_ns) / 1e9:.6f} s" + ("" if step is None else f" (step {step})")
        + f": {CAUSES[bubble.cause]}" + (f" [{bubble.finding}]" if bubble.finding else ""), width, f"{number:>3}. ")
    by_thread: dict[str, list[str]] = {}
    works = [work for work in bubble.work if bubble.part not in ("idle", "collectives") or work.role in _LAUNCHERS]
    for work in works[:_WORKS]:
        told = f"{_short(work.what)} {percent(work.time_ns / length)}"
        by_thread.setdefault(work.thread, []).append(told)
    if by_thread:
        done = "; ".join(f"{thread}: {', '.join(told)}" for thread, told in by_thread.items())
        yield from wrap(f"host: {done}", width, "     ", "       ")
    if bubble.meanwhile:
        yield from wrap(bubble.meanwhile, width, "     ", "       ")
    if bubble.ended_by:
        name, launched, thread = bubble.ended_by.rpartition(", launched by ")
        yield from wrap(f"ended by {_short(name or thread)}{launched}{thread if name else ''}", width, "     ",
                        "       ")


def to_json(bubbles: Sequence[Bubble], analysis: Analysis, origin_ns: int) -> list[dict[str, Any]]:
    """``start_s`` and ``end_s`` count from ``origin_ns``, steps from 0 as in ``durations_s``; null: not known."""
    return [{
        "gpus": list(bubble.gpus), "start_s": (bubble.start_ns - origin_ns) / 1e9,
        "end_s": (bubble.end_ns - origin_ns) / 1e9, "cost_s": bubble.cost_ns / 1e9, "step": _step(bubble, analysis),
        "part": bubble.part, "cause": bubble.cause, "finding": bubble.finding, "ended_by": bubble.ended_by or None,
        "meanwhile": bubble.meanwhile or None,
        "host": [{"thread": work.thread, "threads": work.threads, "role": work.role, "op": work.op or None,
                  "time_s": work.time_ns / 1e9} for work in bubble.work],
    } for bubble in bubbles]


def _step(bubble: Bubble, analysis: Analysis) -> int | None:
    """The step it begins in, counted from 0."""
    if analysis.steps is None:
        return None
    bounds = np.array(analysis.steps.bounds_ns)
    at = int(np.searchsorted(bounds[:, 0], bubble.start_ns, side="right")) - 1
    return at if at >= 0 and bubble.start_ns < bounds[at, 1] else None


def _short(name: str) -> str:
    return fit(name, _NAME).rstrip()
