"""Causes, not symptoms: what follows from another finding is folded under it.

The records of the rules say what follows from what (:attr:`gputop.advice.rule.Rule.follows_from`). Two findings are
related only where they claim the same seconds. The consequence keeps what its cause does not explain: if that is most
of it, it stays in the list, with the rest as its gain where that is a bound. What is replayed has its gain with the
cause's beside it anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from msgspec.structs import replace

from gputop.advice.registry import limit
from gputop.advice.rule import Cause
from gputop.advice.trace_rules import TRACE_RULES
from gputop.core.findings import MIN_SHARE, Finding, at_most, ranked, severity_of

_SAME_SECONDS = "same_seconds"

Holds = Callable[[Finding, Finding], bool]
Rest = Callable[[str, str], float | None]


def _launched_fast(cause: Finding, effect: Finding) -> bool:
    """The host launches as fast as it can be done, or its launches are not seen: then it is the kernels."""
    return cause.evidence.get("launch_pace_s", 0.0) <= limit("small_kernels.pace_s")


def _mostly(part: Finding, whole: Finding) -> bool:
    return (part.gain.step_time or 0.0) >= (1 - limit("causes.rest")) * (whole.gain.step_time or 0.0)


# When a cause accounts for its consequence, by the name that the records of rules give the condition.
CONDITIONS: Mapping[str, Holds] = {
    "always": lambda cause, effect: True,
    # As far as both claim the same seconds of the account.
    _SAME_SECONDS: lambda cause, effect: True,
    # The GPU the others wait for is the one with more work.
    "same_gpus": lambda cause, effect: set(effect.gpus) <= set(cause.gpus),
    "fast_launches": _launched_fast,
    "slow_launches": lambda cause, effect: not _launched_fast(effect, cause),
    "copies_with_host": lambda cause, effect: not any(
        name.startswith(("d2d_bytes", "d2d_count")) for name in effect.evidence),
    # The GPU the others wait for is late because it was handed its kernels late.
    "late_by_host": lambda cause, effect: (
        effect.evidence.get("late_by_host_ratio", 0.0) >= limit("causes.late_by_host")),
    # A GPU that its host delays keeps the others waiting.
    "delayed_by_host": lambda cause, effect: "held_up_s" in cause.evidence,
    # What is late all over the step does not follow from one part of it.
    "most_of_it": _mostly,
    "part_of_it": lambda cause, effect: not _mostly(effect, cause),
    # Launches waited for name the cure; another one is worth its place where it is known to fit.
    "room_unknown": lambda cause, effect: "capacity_bytes" not in effect.evidence,
}
# What is left of a staggered launch is what it can claim of others, so it is settled before them.
_SETTLED_FIRST = "staggered_launch"
# Consequence, and what it can follow from, the surest first.
_RELATIONS: tuple[tuple[str, Cause], ...] = tuple(
    (id_, cause) for rule in sorted(TRACE_RULES, key=lambda rule: rule.id != _SETTLED_FIRST)
    for id_ in rule.ids for cause in rule.follows_from)


def fold_consequences(findings: Iterable[Finding], replayed_rest: Rest = lambda effect, cause: None,
                      ) -> tuple[Finding, ...]:
    """Findings with those that follow from another under it, ranked by what is left of each.

    A cause that is itself the consequence of another takes what hangs on it along. ``replayed_rest`` tells what an
    effect saves once its cause is cured (ids), as a share of the step; None where one of them has no replay.
    """
    by_id = {f.id: f for f in findings}
    parent: dict[str, str] = {}
    keeps_cure: set[str] = set()
    for effect_id, relation in _RELATIONS:
        cause, effect = by_id.get(relation.id), by_id.get(effect_id)
        if cause is None or effect is None or effect_id in parent or _root(parent, cause.id) == effect_id:
            continue
        if not CONDITIONS[relation.condition](cause, effect):
            continue
        share, cause_share = effect.gain.step_time or 0.0, cause.gain.step_time or 0.0
        if relation.condition == _SAME_SECONDS:
            both = _both_claim(effect, cause)
            if not both or (share <= 0 and both < 1 - limit("causes.rest")):
                continue
            cause_share = share * both
        replayed = replayed_rest(effect_id, cause.id)
        rest = share - cause_share if replayed is None else replayed
        if relation.wholly or share <= 0 or rest <= max(limit("causes.rest") * share, MIN_SHARE):
            parent[effect.id] = cause.id
            if relation.keeps_cure:
                keeps_cure.add(effect.id)
        elif cause_share > 0 and replayed is None:
            by_id[effect.id] = _without(effect, cause, rest)
    return ranked(_with_consequences(f, by_id, parent, keeps_cure) for f in by_id.values() if f.id not in parent)


def _root(parent: dict[str, str], id_: str) -> str:
    while id_ in parent:
        id_ = parent[id_]
    return id_


def _both_claim(effect: Finding, cause: Finding) -> float:
    """The part of the effect's seconds that its cause claims, too."""
    both_s = sum(min(time_s, cause.claims.get(part, 0.0)) for part, time_s in effect.claims.items())
    return both_s / sum(effect.claims.values()) if both_s else 0.0


def _without(effect: Finding, cause: Finding, rest: float) -> Finding:
    """The finding with the seconds of its cause taken off its gain."""
    gain = replace(effect.gain, step_time=rest, by="bound", claim="at most",
                   assumption=f"{effect.gain.assumption} The saving of {cause.id} is subtracted.".lstrip())
    return replace(effect, gain=gain, severity=at_most(severity_of(rest), effect.severity))


def _with_consequences(
    finding: Finding, by_id: dict[str, Finding], parent: dict[str, str], keeps_cure: set[str],
) -> Finding:
    consequences = [_with_consequences(f, by_id, parent, keeps_cure) for f in by_id.values()
                    if parent.get(f.id) == finding.id]
    if not consequences:
        return finding
    curing = [finding, *(f for f in consequences if f.id in keeps_cure)]
    return replace(finding, consequences=ranked(consequences), action=" ".join(f.action for f in curing),
                   snippet="\n".join(dict.fromkeys(f.snippet for f in curing if f.snippet)) or None)
