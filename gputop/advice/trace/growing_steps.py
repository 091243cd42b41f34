"""Steps of which each does more than the one before it, or takes longer."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from gputop.advice.fix_code import code
from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import TraceFacts
from gputop.advice.trace.job import Job
from gputop.advice.trace.other_programs import others_take
from gputop.advice.verdict import Explanation, Verdict, known
from gputop.analysis.steps.long_steps import MIN_STEPS
from gputop.core.findings import Culprit
from gputop.text.units import count, percent, seconds
from gputop.trace.model import F64, I64

# A number that rises by a constant rises with nearly every step, and a line through it explains nearly all of it: of 45
# recordings of jobs that do not grow none had either. Times vary, so they have to rise by more. gputop's own figures.
_RISES, _ON_A_LINE, _TIMES_ON_A_LINE, _IN_ORDER = 0.9, 0.95, 0.8, 0.9
_LONGER, _MIN_TIMES = 1.3, 12
# Steps that are enough where each makes exactly as many calls more, which are this share of them.
_LEAST_STEPS, _LITTLE = 3, 0.02
_SHOWN = 3
_FIX = {
    "pytorch": ("Detach whatever is carried from step to step: a hidden state, a sum of losses, a list of outputs. "
                "Otherwise, its graph keeps all earlier steps, and each backward pass goes through these steps again."),
    "tensorflow": "Create functions, variables, and ops once, before the loop, because anything created in a step "
                  "stays in memory.",
    "": "Look for data that grows: a list that each step iterates over, a history, a cache without a limit.",
}


class StepsGrow(Verdict, frozen=True, kw_only=True):
    steps: int
    first_s: float  # by a line through the steps' times
    last_s: float
    calls: float  # of the host, all names, mean
    more_calls: float  # by which each step has more than the one before; 0: only the times grow


def growing_steps(facts: TraceFacts) -> StepsGrow | None:
    """The steps grow: in each the host makes more calls than in the one before, by a constant number, or each takes
    longer."""
    steps, host = facts.steps, facts.trace.host
    if steps is None or facts.basis == "period" or steps.count < _LEAST_STEPS:
        return None
    edges = steps.edges_ns
    first, last = np.searchsorted(host.start_ns, edges[:, 0]), np.searchsorted(host.start_ns, edges[:, 1])
    length, calls = (edges[:, 1] - edges[:, 0]) / 1e9, (last - first).astype(float)
    slope, begin = np.polyfit(np.arange(steps.count), length, 1)
    growth = StepsGrow(
        gpus=facts.active_numbers, steps=steps.count, first_s=max(float(begin), 0.0),
        last_s=float(begin + slope * (steps.count - 1)), calls=float(calls.mean()), more_calls=0.0)
    # Few numbers are in order by chance, and equally far apart where lengths are sorted; then they rise fast.
    more = np.diff(calls)
    if _rises(calls) and (steps.count >= MIN_STEPS or (not np.ptp(more) and more[0] <= _LITTLE * growth.calls)):
        share, culprits = _of_growing_kinds(facts, first, last)
        # Of these kinds the calls that a step adds are its own, and the others are of steps before.
        share -= float(more.mean()) / growth.calls
        return None if share < limit("long_steps.share") else replace(
            growth, share=share, more_calls=float(more.mean()), culprits=culprits)
    order = np.argsort(np.argsort(length, kind="stable"))
    if (steps.count < _MIN_TIMES or (facts.trace.job_cpus is not None and others_take(facts.trace.job_cpus))
            or growth.last_s < _LONGER * growth.first_s or _explained(length) < _TIMES_ON_A_LINE
            or np.corrcoef(np.arange(steps.count), order)[0, 1] < _IN_ORDER):
        return None
    return replace(growth, share=float(1 - growth.first_s / length.mean()))


def _of_growing_kinds(facts: TraceFacts, first: I64, last: I64) -> tuple[float, tuple[Culprit, ...]]:
    """The share of the steps' calls that are of kinds whose number rises, and those of these kinds that take most time.
    ``first`` and ``last`` are the rows of each step's first call and of the one after its last."""
    host, names, count = facts.trace.host, facts.trace.names, len(first)
    rows = np.concatenate([np.arange(*edges) for edges in zip(first.tolist(), last.tolist(), strict=True)])
    step = np.repeat(np.arange(count), last - first)
    often = np.flatnonzero(np.bincount(host.name[rows]) >= count)  # so that this needs no more room than the calls
    number = np.full(len(names), -1)
    number[often] = np.arange(len(often))
    kept = number[host.name[rows]] >= 0
    calls = np.bincount(number[host.name[rows[kept]]] * count + step[kept], minlength=len(often) * count)
    calls = calls.reshape(-1, count)
    rising = [row for row in np.flatnonzero(calls[:, -1] > calls[:, 0]).tolist() if _rises(calls[row].astype(float))]
    took = np.bincount(host.name[rows], host.end_ns[rows] - host.start_ns[rows]) / count / 1e9
    most = sorted(rising, key=lambda row: (-float(took[often[row]]), names[often[row]]))[:_SHOWN]
    return float(calls[rising].sum()) / len(rows), tuple(
        Culprit(names[often[row]], "host", float(took[often[row]]), facts.basis) for row in most)


def _rises(numbers: F64) -> bool:
    """Return whether they rise by a constant, from one to the next."""
    more = np.diff(numbers)
    return len(more) > 0 and bool((more > 0).mean() >= _RISES) and _explained(numbers) >= _ON_A_LINE


def _explained(numbers: F64) -> float:
    """Share of their variance that a line explains."""
    return float(np.corrcoef(np.arange(len(numbers)), numbers)[0, 1] ** 2) if np.ptp(numbers) else 0.0


def describe_growing_steps(v: StepsGrow, job: Job) -> Explanation:
    action, snippet = _FIX.get(job.framework, _FIX[""]), code("long_steps", f"grows-{job.framework}")
    if v.more_calls:
        title = f"Each step makes {count(v.more_calls)} more calls than the previous one: something keeps growing"
        why = (f"The host makes {count(v.calls)} calls per {job.basis}, and this number grows by {count(v.more_calls)} "
               f"with each of the {v.steps} recorded steps. {percent(v.share)} of the calls repeat those of earlier "
               "steps. The job gets slower and slower, and needs more and more memory.")
        gain = "assumes that each step makes only its own calls, not those of earlier steps"
    else:
        title = f"Each step takes longer than the previous one: from {seconds(v.first_s)} to {seconds(v.last_s)}"
        why = (f"Within {v.steps} steps, the {job.basis} time grows from {seconds(v.first_s)} to {seconds(v.last_s)} "
               "while the number of host calls stays the same, so the data that each call processes grows.")
        action, snippet = _FIX[""], None
        action += " If batches are sorted by length, longer batches come last, and nothing is wrong."
        gain = "assumes that all steps take as long as the first recorded step"
    return Explanation(
        title=title, why=why, evidence=known({
            "calls_per_step": v.calls, "more_calls_per_step": v.more_calls or None, "share_ratio": v.share,
            **({} if v.more_calls else {"first_step_s": v.first_s, "last_step_s": v.last_s})}),
        action=action, snippet=snippet, gain=gain, source=source("long_steps.share"))
