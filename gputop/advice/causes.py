"""Causes, not symptoms: of two findings that claim the same seconds the narrower cause stands above.

Rules know along each GPU when what they find costs time. A finding of which another claims most of the seconds is
folded under that one; of which it claims less, it keeps the rest, as its gain where that is a bound. What is replayed
has its gain with the others' beside it anyway.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from gputop.advice.registry import limit
from gputop.analysis.layers.scopes import INPUT
from gputop.analysis.layers.tree import NO_OP_RUNS
from gputop.analysis.results import Analysis, HostWork, Unexplained
from gputop.core.findings import MIN_SHARE, Finding, at_most, ranked, severity_of
from gputop.trace.intervals import EMPTY, Spans, merge, overlap


class Claimed(Struct, frozen=True):
    """The seconds that a finding claims: ``part`` (ratio) of these spans, by GPU; ``others`` are those in which the
    other GPUs wait for these meanwhile."""

    spans: Mapping[int, Spans]
    part: float = 1.0
    others: Mapping[int, Spans] = {}

    def along(self, gpu: int) -> Spans:
        """Spans along this GPU, those of waits meanwhile included."""
        return merge(self.spans.get(gpu, EMPTY), self.others.get(gpu, EMPTY))


# Of two that claim the same seconds the first is the cause: a single kind of call or op, then a way to launch, then a
# part of the step whatever is in it, then steps as a whole.
NARROWEST_FIRST = (
    "anomaly_mode", "serial_gpus", "retracing", "graph_recapture", "allocation_in_steps", "loss_scaling",
    "managed_memory", "copies_pageable", "default_stream", "host_placement", "thread_contention", "gradients_zeroed",
    "ops_without_gradient", "eager_execution", "sync_copies", "accumulation_sync", "allreduce_slow", "allreduce_count",
    "communication_exposed", "gpu0_oversubscribed", "replica_imbalance", "staggered_launch", "optimizer_unfused",
    "small_kernels", "launch_bound", "copies_excessive", "collective_waiting", "shuffle_refill", "input_bound",
    "long_steps", "time_outside_steps", "step_gap_host", "unfinished_step", "batch_size_headroom",
)
# Parts of wholes that have one fix for all of it: they stand under one that claims far more.
_PARTS = (("small_kernels", "launch_bound"), ("optimizer_unfused", "launch_bound"),
          ("optimizer_unfused", "small_kernels"), ("optimizer_unfused", "eager_execution"),
          ("ops_without_gradient", "step_gap_host"), ("eager_execution", "step_gap_host"),
          ("communication_exposed", "long_steps"))
_OF_LAUNCHES = ("launch_bound", "small_kernels")  # with which the fixes of what stands under them are told


def fold_consequences(findings: Iterable[Finding], claimed: Mapping[str, Claimed]) -> tuple[Finding, ...]:
    """Findings with all that follow from each under it, directly or by another, ranked by what is left of each."""
    by_id, parent, rest = {f.id: f for f in findings}, dict[str, str](), limit("causes.rest")
    ordered = [id_ for id_ in NARROWEST_FIRST if id_ in by_id]
    shares = dict[str, dict[str, float]]()
    for i, effect in enumerate(ordered):
        by_cause = shares[effect] = {}
        for cause in ordered[:i]:
            by_cause[cause] = _explained(by_id[effect], by_id[cause], claimed)
            if by_cause[cause] >= 1 - rest:
                parent[effect] = cause
                break
    for part, whole in _PARTS:
        if {part, whole} <= by_id.keys() - parent.keys() and max(
                _covered(claimed[part], claimed[whole]), _beyond(by_id[whole], by_id[part], claimed)) >= rest:
            parent[part] = whole
    for effect, by_cause in shares.items():
        of_others = {cause: share for cause, share in by_cause.items() if share and cause not in parent}
        if effect in parent or not of_others:
            continue
        if sum(of_others.values()) >= 1 - rest:
            parent[effect] = max(of_others, key=of_others.__getitem__)
        elif by_id[effect].gain.by == "bound":
            by_id[effect] = _without(by_id[effect], of_others)
    return ranked(_with_consequences(f, by_id, parent) for f in by_id.values() if f.id not in parent)


def _explained(effect: Finding, cause: Finding, claimed: Mapping[str, Claimed]) -> float:
    """The share of the effect that its cause explains: of its seconds, but for what no seconds show."""
    match cause.id, effect.id:
        case "anomaly_mode", "eager_execution":  # it makes each op slower; by how much shows once it is off
            return 1.0
        case "staggered_launch", "collective_waiting":  # late at a step's begin, and waited for at its end
            return 1.0
        case ("ops_without_gradient", "step_gap_host") | ("communication_exposed", "long_steps"):
            return 0.0  # the function that runs between steps is why its ops run; a late GPU is why only some are long
        case "small_kernels", "launch_bound" if cause.evidence.get("launch_pace_s", 0.0) > limit(
                "small_kernels.pace_s"):  # launches are slow, however long the kernels are
            return 0.0
    covered = _covered(claimed[effect.id], claimed[cause.id])
    if effect.id == "collective_waiting" and cause.gain.by == "replay" and effect.gain.step_time:
        # What its fix saves says how much of the others' wait it is: their own hosts may be as late.
        covered *= min((cause.gain.step_time or 0.0) / effect.gain.step_time, 1.0)
    return covered


def _covered(effect: Claimed, cause: Claimed) -> float:
    """The share of the effect's seconds that its cause claims, too."""
    both = sum(overlap(spans, cause.along(gpu)) for gpu, spans in effect.spans.items())
    return cause.part * both / sum(spans.total for spans in effect.spans.values()) if both else 0.0


def _beyond(whole: Finding, part: Finding, claimed: Mapping[str, Claimed]) -> float:
    """Share of the part's seconds that the whole, of a job without a GPU, claims beyond its spans, as does a function
    by its samples."""
    spans_s = sum(spans.total for spans in claimed[whole.id].spans.values()) / 1e9
    return 0.0 if whole.gpus else (sum(whole.claims.values()) - spans_s) / (sum(part.claims.values()) or math.inf)


def _without(effect: Finding, shares: Mapping[str, float]) -> Finding:
    """The finding with these shares of its seconds, by their cause, taken off its gain."""
    gain = effect.gain
    step_time = gain.step_time or 0.0
    named = [cause for cause, share in shares.items() if share * step_time >= MIN_SHARE]
    if not named:
        return effect
    rest = step_time * (1 - sum(shares[cause] for cause in named))
    gain = replace(gain, step_time=rest, claim="at most",
                   assumption=f"{gain.assumption} The saving of {' and '.join(named)} is subtracted.".lstrip())
    return replace(effect, gain=gain, severity=at_most(severity_of(rest), effect.severity))


def _with_consequences(finding: Finding, by_id: Mapping[str, Finding], parent: Mapping[str, str]) -> Finding:
    consequences = [f for f in by_id.values() if f.id in parent and _root(parent, f.id) == finding.id]
    if not consequences:
        return finding
    fixing = [finding, *(f for f in consequences if finding.id in _OF_LAUNCHES and (
        f.id == "optimizer_unfused" or (f.id == "batch_size_headroom" and "capacity_bytes" in f.evidence)))]
    return replace(finding, consequences=ranked(consequences), action=" ".join(f.action for f in fixing),
                   snippet="\n".join(dict.fromkeys(f.snippet for f in fixing if f.snippet)) or None)


def _root(parent: Mapping[str, str], id_: str) -> str:
    while id_ in parent:
        id_ = parent[id_]
    return id_


# -- time that no finding names, and what ran in it -------------------------------------------------

_WAITS = ("launch", "host", "idle", "collectives")  # parts of the step in which a GPU does no work of the model
_HALF = 0.5  # share of a part: what findings claim less of is named, too
_WORTH_NAMING = 0.1  # share of what is unexplained
_NAMES = 3
_NO_STEPS = "no_steps"
_NUMBER = re.compile(r"\d+(?![A-Za-z\d])|(?<![A-Za-z\d])\d+")  # but that of "h2d" or "conv2d"


def unexplained(a: Analysis, findings: Iterable[Finding], tracing_s: float = 0.0) -> Unexplained | None:
    """The time that none of these findings claims; None where it is little, or where the trace does not tell.

    Each finding claims seconds of the parts of the step that its rule can explain. What is left of the parts in which
    GPUs wait, or without a GPU of the time in which no op runs, is unexplained, whatever else was found;
    ``tracing_s`` of each step, in which functions are traced or compiled, is not.
    """
    account, per, work, silent_s = a.account, "step", list[HostWork](), None
    if account is None or (a.steps is not None and a.steps.start_up):
        return None
    claimed = _claimed(findings)
    if a.cpu_layers is not None:
        idle_s = sum(row.wait_s for row in a.cpu_layers.rows if row.name == NO_OP_RUNS and row.parent is None)
        input_s = account.claimable(("input",)).get("input", 0.0) / account.steps - sum(
            row.device_s for row in a.cpu_layers.rows if row.name == INPUT and row.parent is None)
        parts, of_s = {"host": max(idle_s - max(input_s, 0.0) - tracing_s, 0.0)}, a.cpu_layers.total_s
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
