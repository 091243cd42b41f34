"""Causes, not symptoms: what follows from another finding is folded under it.

Two findings are related only where they claim the same seconds. The consequence keeps what its cause
does not explain: if that is most of it, it stays in the list with the rest as its gain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from gputop.advice.thresholds import limit
from gputop.core.findings import Finding, Gain, at_most, ranked, severity_of

_UNEVEN = ("gpu0_oversubscribed", "replica_imbalance")
Holds = Callable[[Finding, Finding], bool]


def _always(cause: Finding, effect: Finding) -> bool:
    return True


def _waits_for_it(cause: Finding, effect: Finding) -> bool:
    """The GPU the others wait for is the one with more work."""
    return set(effect.gpus) <= set(cause.gpus)


def _launched_fast(cause: Finding, effect: Finding) -> bool:
    """The host launches as fast as it can be done, or its launches are not seen: then it is the kernels."""
    return cause.evidence.get("launch_pace_s", 0.0) <= limit("small_kernels.pace_s")


def _launched_slowly(cause: Finding, effect: Finding) -> bool:
    return not _launched_fast(effect, cause)


def _of_host_copies(cause: Finding, effect: Finding) -> bool:
    return not any(name.startswith(("d2d_bytes", "d2d_count")) for name in effect.evidence)


def _late_by_host(cause: Finding, effect: Finding) -> bool:
    """The GPU the others wait for is late because it was handed its kernels late."""
    return effect.evidence.get("late_by_host_ratio", 0.0) >= limit("causes.late_by_host")


@dataclass(frozen=True, slots=True)
class _Relation:
    """``wholly``: what the effect says is known to be the cause's doing, whatever the figures: no rest is kept."""

    cause: str
    effect: str
    holds: Holds = _always
    wholly: bool = False


_RELATIONS: tuple[_Relation, ...] = (
    # A late GPU is late because it has more to do; a staggered or serial job is late by design.
    *(_Relation(cause, "collective_waiting", _waits_for_it, wholly=True) for cause in _UNEVEN),
    *(_Relation(cause, "staggered_launch", _waits_for_it) for cause in _UNEVEN),
    _Relation("serial_gpus", "staggered_launch", wholly=True),
    _Relation("serial_gpus", "collective_waiting", wholly=True),
    *(_Relation("serial_gpus", cause) for cause in _UNEVEN),
    _Relation("serial_gpus", "launch_bound"),
    _Relation("staggered_launch", "collective_waiting"),
    _Relation("staggered_launch", "launch_bound"),
    _Relation("thread_contention", "collective_waiting", _late_by_host, wholly=True),
    # The transfer that nothing hides has a reason of its own.
    _Relation("allreduce_slow", "communication_exposed"),
    _Relation("allreduce_count", "communication_exposed"),
    # Short kernels and waiting for launches are one thing: the host's side of it, or the kernels'.
    _Relation("launch_bound", "small_kernels", _launched_slowly, wholly=True),
    _Relation("small_kernels", "launch_bound", _launched_fast),
    # Why launches come late.
    *(_Relation(cause, effect) for cause in ("thread_contention", "eager_execution", "retracing", "host_placement",
                                             "sync_copies", "loss_scaling")
      for effect in ("launch_bound", "small_kernels")),
    _Relation("retracing", "step_gap_host"),
    _Relation("eager_execution", "step_gap_host"),
    # Copies: how they are done, and what asks for them.
    _Relation("copies_pageable", "copies_excessive", _of_host_copies),
    _Relation("copies_pageable", "sync_copies"),
    _Relation("host_placement", "sync_copies"),
    _Relation("host_placement", "copies_excessive", _of_host_copies),
    _Relation("loss_scaling", "sync_copies"),
)


def fold_consequences(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings with those that follow from another under it, ranked by what is left of each.

    A cause that is itself the consequence of another takes what hangs on it along.
    """
    by_id = {f.id: f for f in findings}
    parent: dict[str, str] = {}
    for relation in _RELATIONS:
        cause, effect = by_id.get(relation.cause), by_id.get(relation.effect)
        if cause is None or effect is None or relation.effect in parent or _root(parent, cause.id) == effect.id:
            continue
        if not relation.holds(cause, effect):
            continue
        share, own = effect.gain.step_time or 0.0, cause.gain.step_time or 0.0
        rest = share - own
        if relation.wholly or share <= 0 or rest <= limit("causes.rest") * share:
            parent[effect.id] = cause.id
        elif own > 0:
            by_id[effect.id] = _without(effect, cause, rest)
    return ranked(_with_consequences(f, by_id, parent) for f in by_id.values() if f.id not in parent)


def _root(parent: dict[str, str], id_: str) -> str:
    while id_ in parent:
        id_ = parent[id_]
    return id_


def _without(effect: Finding, cause: Finding, rest: float) -> Finding:
    """The finding with the seconds of its cause taken off its gain."""
    gain = Gain(rest, f"{effect.gain.how}; less what {cause.id} claims", effect.gain.per)
    return replace(effect, gain=gain, severity=at_most(severity_of(rest), effect.severity))


def _with_consequences(finding: Finding, by_id: dict[str, Finding], parent: dict[str, str]) -> Finding:
    own = [_with_consequences(f, by_id, parent) for f in by_id.values() if parent.get(f.id) == finding.id]
    return replace(finding, consequences=ranked(own)) if own else finding
