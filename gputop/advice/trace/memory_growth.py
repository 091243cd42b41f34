"""Memory: does each step leave some allocated, as a list of losses with their graphs does?"""

from __future__ import annotations

import re

import numpy as np

from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import TraceFacts
from gputop.advice.trace.job import Job
from gputop.advice.verdict import Explanation, Missing, Verdict
from gputop.analysis.steps.model import Steps
from gputop.text.units import seconds, size
from gputop.trace.lookups import TORCH_HOST_MEMORY, how_to_mark_steps
from gputop.trace.model import I64, AllocatorEvents

_DETACHED = ("losses.append(loss.item())  # a number; the tensor keeps its graph\n"
             "outputs.append(output.detach())  # without detach: all activations behind it, until backward() is called")
_HOUR_S = 3600.0
_ONLY_RANK = re.compile(r"rank \d+: ")


class MemoryGrowth(Verdict, frozen=True, kw_only=True):
    allocator: str
    per_step_bytes: float
    bytes_per_s: float
    steps: int
    on_host: bool


def judge_memory_growth(facts: TraceFacts) -> MemoryGrowth | Missing | None:
    """The least that an allocator holds in a step rises from each step to the next, at about one rate.

    The first step is left out: what is freed in it may have been allocated before the records began.
    """
    events, steps = facts.trace.allocator, facts.steps
    complete = (events.allocator >= 0) & (events.in_use_bytes >= 0)
    if not complete.any():
        return Missing("what PyTorch's allocators hold, which torch.profiler records with profile_memory=True; without "
                       "it `gputop record` sees a job's host memory grow over hours")
    if steps is None or steps.count < limit("memory_growth.steps") or facts.period_s <= 0:
        return Missing(f"{limit('memory_growth.steps'):.0f} whole steps: capture longer")
    if facts.basis == "period":
        return Missing("which of the repeated sequences of ops are steps: layers of one pass keep their activations. "
                       f"Mark steps with {how_to_mark_steps(facts.trace)}")
    growth = {}
    for allocator in np.unique(events.allocator[complete]).tolist():
        rows = np.flatnonzero(complete & (events.allocator == allocator))
        per_step = _growth(_floors(events, rows, steps)[1:])
        if per_step is not None:
            growth[facts.trace.names[allocator]] = per_step
    if not growth:
        return None
    fastest = max(growth, key=lambda name: growth[name])
    per_s = growth[fastest] / facts.period_s
    if per_s * _HOUR_S < limit("memory_growth.bytes_per_hour"):
        return None
    ranks = {_ONLY_RANK.match(name) for name in growth}
    return MemoryGrowth(
        gpus=(), severity="medium", allocator=fastest if len(ranks) > 1 else _ONLY_RANK.sub("", fastest),
        per_step_bytes=growth[fastest], bytes_per_s=per_s, steps=steps.count,
        on_host=fastest.endswith(TORCH_HOST_MEMORY))


def _floors(events: AllocatorEvents, rows: I64, steps: Steps) -> I64:
    """The least that is in use in each step; without an event in a step what was in use before."""
    time, in_use = events.time_ns[rows], events.in_use_bytes[rows]
    first, last = (np.searchsorted(time, edge) for edge in (steps.edges_ns[:, 0], steps.edges_ns[:, 1]))
    before = in_use[np.maximum(first - 1, 0)]
    return np.array([held if a == b else int(in_use[a:b].min())
                     for a, b, held in zip(first.tolist(), last.tolist(), before.tolist(), strict=True)], np.int64)


def _growth(floors: I64) -> float | None:
    """Bytes per step; None where they do not rise in nearly every step, or not at about one rate in both halves."""
    more = np.diff(floors)
    if (more > 0).mean() < limit("memory_growth.rising"):
        return None
    halves = sorted(float(np.mean(half)) for half in np.array_split(more, 2))
    if halves[0] < limit("memory_growth.halves") * halves[1]:
        return None
    return float(np.median(more))


def describe_memory_growth(v: MemoryGrowth, job: Job) -> Explanation:
    hour = v.bytes_per_s * _HOUR_S
    where = "host memory" if v.on_host else "GPU memory"
    return Explanation(
        title=f"Each step leaves {size(v.per_step_bytes)} of {where} allocated: {size(hour)} an hour",
        why=(f"In {v.steps} steps of {seconds(job.period_s)} the {v.allocator} rose from each step to the next, by "
             f"{size(v.per_step_bytes)} in the median. Something keeps tensors of steps that are over."),
        evidence={"grows_bytes_per_step": v.per_step_bytes, "grows_bytes_per_s": v.bytes_per_s},
        action=("Keep numbers of past steps, not tensors with their graphs. Look for lists, dicts and attributes that "
                "grow in the loop: losses, outputs, a sum of losses."),
        snippet=_DETACHED, gain="none: this prevents an out-of-memory error and saves no time",
        source=source("memory_growth.rising", "memory_growth.steps"),
    )
