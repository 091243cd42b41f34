"""The part of a recording's time that no finding names, and what ran in it.

Each finding claims seconds of the parts of the step that its rule can explain. What is left of the parts in which GPUs
wait, or without a GPU of the time in which no op runs, is unexplained, whatever else was found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from gputop.advice.registry import limit
from gputop.analysis.layers.tree import NO_OP_RUNS
from gputop.analysis.results import Analysis, HostWork, Unexplained
from gputop.core.findings import Finding

_WAITS = ("launch", "host", "idle", "collectives")  # parts of the step in which a GPU does no work of the model
_HALF = 0.5  # share of a part: what findings claim less of is named, too
_WORTH_NAMING = 0.1  # share of what is unexplained
_NAMES = 3
_NO_STEPS = "no_steps"
_NUMBER = re.compile(r"\d+")


def unexplained(a: Analysis, findings: Iterable[Finding]) -> Unexplained | None:
    """The time that none of these findings claims; None where it is little, or where the trace does not tell."""
    account, per, work, silent_s = a.account, "step", list[HostWork](), None
    if account is None or (a.steps is not None and a.steps.start_up):
        return None
    claimed = _claimed(findings)
    if a.cpu_layers is not None:
        idle_s = sum(row.wait_s for row in a.cpu_layers.rows if row.name == NO_OP_RUNS and row.parent is None)
        input_s = (a.breakdown.input or 0.0) if a.breakdown is not None else 0.0
        parts, of_s = {"host": max(idle_s - input_s, 0.0)}, a.cpu_layers.total_s
        per = a.cpu_layers.basis
        left = _left(parts, claimed, account.steps)
    elif a.breakdown is not None and a.gpus:
        parts, of_s = {part: a.breakdown.known.get(part, 0.0) for part in _WAITS}, a.breakdown.total
        left = _left(parts, claimed, account.steps)
    elif a.steps is None and a.wall_time is not None:
        without = [part for part in a.wall_time.parts if part.id == _NO_STEPS]
        parts, of_s = {_NO_STEPS: sum(part.time_s for part in without)}, a.wall_time.recorded_s
        per, work = "recording", [one for part in without for one in part.work]
        silent_s = sum(part.silent_s or 0.0 for part in without)
        left = {_NO_STEPS: sum(_left(account.claimable(parts), claimed, 1).values())}
    else:
        return None
    left = {part: time_s for part, time_s in left.items() if time_s >= _HALF * parts[part] > 0}
    time_s = sum(left.values())
    if time_s < limit("unexplained.share") * of_s:
        return None
    if a.gaps is not None and time_s >= _HALF * a.gaps.total_s_per_step:  # else most of it has a cause
        work = [HostWork(one.name, one.s_per_step, round(one.count_per_step)) for one in a.gaps.main]
        silent_s = a.gaps.no_event_s_per_step
    return Unexplained(per, time_s, of_s, left, _named(work, time_s), silent_s)


def _left(parts: Mapping[str, float], claimed: Mapping[str, float], steps: int) -> dict[str, float]:
    """The seconds of each part that no finding claims; ``claimed`` is of so many steps."""
    return {part: max(time_s - claimed.get(part, 0.0) / steps, 0.0) for part, time_s in parts.items()}


def _claimed(findings: Iterable[Finding]) -> dict[str, float]:
    """The seconds of each part that findings claim; one and what it explains claim the same."""
    out: dict[str, float] = {}
    for finding in findings:
        below = _claimed(finding.consequences)
        for part in finding.claims.keys() | below.keys():
            out[part] = out.get(part, 0.0) + max(finding.claims.get(part, 0.0), below.get(part, 0.0))
    return out


def _named(work: Iterable[HostWork], time_s: float) -> tuple[HostWork, ...]:
    """The names that take most of it; of several that differ in numbers alone one, as "ensure_layer_#_weights"."""
    alike: dict[str, list[HostWork]] = {}
    for one in work:
        alike.setdefault(_NUMBER.sub("#", one.name), []).append(one)
    folded = [same[0] if len(same) == 1 else HostWork(
        name, sum(one.time_s for one in same), sum(one.count for one in same)) for name, same in alike.items()]
    folded.sort(key=lambda one: -one.time_s)
    return tuple(one for one in folded[:_NAMES] if one.time_s >= _WORTH_NAMING * time_s)
