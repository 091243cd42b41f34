"""Which advice was followed, and what it brought against what was promised."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from gputop.comparison.job import batch_factor, other_batch
from gputop.comparison.rows import Row
from gputop.comparison.sides import Side, items, mapping, number

Status = Literal["gone", "weaker", "same", "stronger", "new", "not judged"]
Outcome = Literal["as promised", "more than promised", "less than promised", "cannot be told"]

# A finding is weaker or stronger when its severity changed or its gain did by this share of the step. gputop's own.
_GAIN_CHANGE = 0.05
# A gain within this share of the promise is what was promised: what-ifs on a trace are no more exact. gputop's own.
_PROMISE_TOLERANCE = 0.2
_SEVERITIES = ("low", "medium", "high")
_FOLLOWED: frozenset[Status] = frozenset({"gone", "weaker"})


@dataclass(frozen=True, slots=True)
class Followed:
    """One finding of A or B. Gains are shares of A's mean step (or, ``per`` "sample", of its time per sample).

    ``promised`` is A's gain, for a weaker finding less what B still promises; ``measured``, between ``low`` and
    ``high``, is what the job as a whole gained: of all the advice followed, where that was more than one.
    """

    id: str
    title: str
    status: Status
    severity_a: str | None
    severity_b: str | None
    gpus: tuple[int, ...]
    promised: float | None = None
    measured: float | None = None
    low: float | None = None
    high: float | None = None
    outcome: Outcome | None = None
    reason: str | None = None
    per: str = "step"

    def to_json(self) -> dict[str, Any]:
        return {name: list(self.gpus) if name == "gpus" else getattr(self, name) for name in self.__dataclass_fields__}


def followed(a: Side, b: Side, mean_step: Row | None) -> list[Followed]:
    """The findings of A and what became of them, then those that only B has; both in their order, gravest first.

    ``mean_step`` is the row of the mean step time.
    """
    before, after = _findings(a), _findings(b)
    before_all, after_all = _with_consequences(before.values()), _with_consequences(after.values())
    out: list[Followed] = []
    not_judged = {id_: _not_judged(finding, b) for id_, finding in before.items()}
    statuses = {id_: _status(finding, after_all.get(id_), not_judged[id_] is not None)
                for id_, finding in before.items()}
    together = [id_ for id_, status in statuses.items() if status in _FOLLOWED and _from_trace(before[id_])]
    for id_, finding in before.items():
        status, left = statuses[id_], after_all.get(id_)
        entry = Followed(id_, str(finding.get("title", id_)), status, _severity(finding),
                         None if left is None else _severity(left), _gpus(finding))
        if status == "not judged":
            entry = replace(entry, reason=not_judged[id_])
        elif status in _FOLLOWED and _from_trace(finding):
            entry = _outcome(entry, finding, left, mean_step, len(together), batch_factor(a, b))
        out.append(entry)
    for id_, finding in after.items():
        if id_ not in before_all:
            why = _not_judged(finding, a)
            out.append(Followed(id_, str(finding.get("title", id_)), "new", None, _severity(finding), _gpus(finding),
                                reason=None if why is None else f"not judged in A: {why}"))
    return out


def _findings(side: Side) -> dict[str, Mapping[str, Any]]:
    """By id. A snapshot lists those of its capture and the live ones in one."""
    document = side.live if side.live is not None else side.analysis
    return {f["id"]: f for f in items(mapping(document).get("findings")) if isinstance(f.get("id"), str)}


def _with_consequences(findings: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Those and what they explain: a cause that comes to stand under another one is not gone."""
    out: dict[str, Mapping[str, Any]] = {}
    left = list(findings)
    while left:
        finding = left.pop(0)
        out.setdefault(finding["id"], finding)
        left += [f for f in items(finding.get("consequences")) if isinstance(f.get("id"), str)]
    return out


def _not_judged(finding: Mapping[str, Any], side: Side) -> str | None:
    """Why the rule behind a finding of the other side could not judge this one; None where it did."""
    if _from_trace(finding):
        document, nothing = side.analysis, "it holds no trace"
    else:
        document, nothing = side.live, "it holds no live figures"
    if document is None:
        return nothing
    return next((f"it needs {a.get('missing')}" for a in items(document.get("abstained"))
                 if a.get("id") == finding["id"]), None)


def _from_trace(finding: Mapping[str, Any]) -> bool:
    return finding.get("origin", "trace") == "trace"


def _severity(finding: Mapping[str, Any]) -> str:
    return str(finding.get("severity"))


def _gpus(finding: Mapping[str, Any]) -> tuple[int, ...]:
    gpus = finding.get("gpus")
    return tuple(g for g in gpus if isinstance(g, int)) if isinstance(gpus, (list, tuple)) else ()


def _gain(finding: Mapping[str, Any] | None) -> float | None:
    return number(mapping(mapping(finding).get("gain")).get("step_time"))


def _status(before: Mapping[str, Any], after: Mapping[str, Any] | None, abstained: bool) -> Status:
    if after is None:
        return "not judged" if abstained else "gone"
    ranks = [_SEVERITIES.index(s) if (s := _severity(f)) in _SEVERITIES else -1 for f in (before, after)]
    gains = _gain(before), _gain(after)
    change = 0.0 if gains[0] is None or gains[1] is None else gains[1] - gains[0]
    if ranks[1] < ranks[0] or (ranks[1] == ranks[0] and change <= -_GAIN_CHANGE):
        return "weaker"
    return "stronger" if ranks[1] > ranks[0] or change >= _GAIN_CHANGE else "same"


def _outcome(entry: Followed, finding: Mapping[str, Any], left: Mapping[str, Any] | None, step: Row | None,
             together: int, batch: float | None) -> Followed:
    """The promise against the change of the mean step."""
    per = str(mapping(finding.get("gain")).get("per", "step"))
    promised = _gain(finding)
    still = _gain(left)
    if promised is not None and still:
        promised = 1 - (1 - promised) / (1 - still) if still < 1 else None
    entry = replace(entry, promised=promised, per=per, outcome="cannot be told")
    if step is None or step.a is None or step.b is None or step.a <= 0:
        return replace(entry, reason="the step time of both sides is not known")
    divide = 1.0
    if per == "sample":
        if batch is None:
            return replace(entry, reason="the gain is per sample, and nothing tells the batch sizes of A and B")
        divide = batch
    measured = 1 - step.b / step.a / divide
    low, high = (None if change is None else 1 - (1 + change / step.a) / divide for change in (step.high, step.low))
    entry = replace(entry, measured=measured, low=low, high=high)
    if promised is None:
        return replace(entry, reason="no gain was promised")
    if per == "step" and batch is not None and other_batch(batch):
        sample = 1 - step.b / step.a / batch
        return replace(entry, reason=f"a step of B copies {batch:.3g} times the bytes of A's to the GPUs; if that is "
                                     f"the batch size, the time per sample changed by {-sample:+.0%}")
    if together > 1:
        return replace(entry, reason=f"measured is what {together} cured causes brought together")
    if low is None or high is None:
        return replace(entry, reason=step.reason)
    if low <= min(0.0, promised) and max(0.0, promised) <= high:
        return replace(entry, reason="the steps vary too much: the promise and no gain at all both fit")
    return replace(entry, outcome=_against(promised, measured, low, high))


def _against(promised: float, measured: float, low: float, high: float) -> Outcome:
    if low <= promised <= high or abs(measured - promised) <= _PROMISE_TOLERANCE * abs(promised):
        return "as promised"
    return "more than promised" if measured > promised else "less than promised"
