"""How well findings agree with the labels. Pure: it takes cases and findings, and knows no rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.advice.labeled.case import HIGH, LOW, MEDIUM, Case

_ORDER = {None: -1, LOW: 0, MEDIUM: 1, HIGH: 2}


@dataclass
class Verdict:
    """One case: the wanted findings that were found, missed or rated otherwise, and the false ones."""

    name: str
    kind: str
    found: dict[str, str]  # every finding: id → severity, in order
    wanted: tuple[str, ...]
    hit: tuple[str, ...]
    missed: tuple[str, ...]
    severity_off: dict[str, str]
    false: tuple[str, ...]  # high or medium and not in the label, or not to be said at all
    contradicted: tuple[str, ...]  # findings of any severity that the label excludes, or whose inputs are missing
    first: str | None
    first_right: bool | None  # None: the label asks for nothing first
    shares: dict[str, float] = field(default_factory=dict)


def judge(case: Case, findings: Iterable[tuple[str, str]], rules: frozenset[str] | None = None) -> Verdict:
    """``findings`` are (id, severity) as they are sorted; ``rules`` the ids that have a rule (None: all)."""
    found = dict(findings)
    wanted = tuple(
        id_ for id_, (least, _) in case.must.items() if least is not None and (rules is None or id_ in rules))
    hit = tuple(id_ for id_ in wanted if id_ in found and _ORDER[found[id_]] >= _ORDER[LOW])
    severity_off = {id_: found[id_] for id_, (least, most) in case.must.items()
                    if id_ in found and not _ORDER[least] <= _ORDER[found[id_]] <= _ORDER[most]}
    serious = [id_ for id_, severity in found.items() if severity in (HIGH, MEDIUM)]
    # An optional finding counts as false above its greatest severity.
    false = tuple(id_ for id_ in serious if (id_ not in case.must and not case.allows(id_)) or id_ in case.abstain or (
        id_ in case.must and case.must[id_][0] is None and id_ in severity_off and not case.allows(id_)))
    contradicted = tuple(id_ for id_ in found if id_ in case.must_not or id_ in case.abstain)
    first = next(iter(serious), None)
    main = tuple(id_ for id_ in case.main if rules is None or id_ in rules)
    right = None if not main or not case.main or (rules is not None and case.main[0] not in rules) else first in main
    return Verdict(
        case.name, case.kind, found, wanted, hit, tuple(i for i in wanted if i not in hit), severity_off, false,
        contradicted, first, right, dict(case.shares))


def summary(verdicts: Iterable[Verdict]) -> dict[str, Any]:
    """Recall, precision and the rest as one document; None where there was nothing to judge."""
    verdicts = list(verdicts)
    wanted = sum(len(v.wanted) for v in verdicts)
    hit = sum(len(v.hit) for v in verdicts)
    serious = sum(1 for v in verdicts for s in v.found.values() if s in (HIGH, MEDIUM))
    false = sum(len(v.false) for v in verdicts)
    first = [v.first_right for v in verdicts if v.first_right is not None]
    healthy = [v for v in verdicts if v.kind == "healthy"]
    rated = sum(1 for v in verdicts for id_ in v.hit)
    off = sum(1 for v in verdicts for id_ in v.hit if id_ in v.severity_off)
    return {
        "cases": len(verdicts), "recall": _ratio(hit, wanted), "precision": _ratio(serious - false, serious),
        "main_cause_first": _ratio(sum(first), len(first)), "severity_agreement": _ratio(rated - off, rated),
        "false_alarms_on_healthy": sum(len(v.false) for v in healthy), "healthy": len(healthy),
        "contradictions": sum(len(v.contradicted) for v in verdicts), "ids": _by_id(verdicts)}


def _by_id(verdicts: list[Verdict]) -> Mapping[str, Mapping[str, int]]:
    out: dict[str, dict[str, int]] = {}

    def count(id_: str, what: str) -> None:
        out.setdefault(id_, {"wanted": 0, "hit": 0, "false": 0, "severity_off": 0, "first_wanted": 0,
                             "first": 0})[what] += 1

    for v in verdicts:
        for what, ids in (("wanted", v.wanted), ("hit", v.hit), ("false", v.false), ("severity_off", v.severity_off)):
            for id_ in ids:
                count(id_, what)
        if v.first_right is not None:
            id_ = max(v.wanted, key=lambda i: v.shares.get(i, 0.0)) if v.wanted else "-"
            count(id_, "first_wanted")
            if v.first_right:
                count(id_, "first")
    return dict(sorted(out.items()))


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
