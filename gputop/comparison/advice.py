"""Advice that was followed, and what it saved against what was estimated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from gputop.advice.verdict import ONCE_TEXTS
from gputop.comparison.caveats import batch_factor, other_batch
from gputop.comparison.figures import ComparedRow
from gputop.comparison.sides import Side
from gputop.core.captured_samples import LiveSteps
from gputop.core.findings import ABOUT, Finding, Gain
from gputop.render.step_parts import PART_BY_ID
from gputop.text.units import percent, seconds

Status = Literal["gone", "weaker", "same", "stronger", "new", "not judged"]
Outcome = Literal["as promised", "more than promised", "less than promised", "cannot be told"]
Fulfilled = Literal["kept", "partly kept", "broken", "cannot be told"]

# A finding is weaker or stronger when its severity changed or its gain did by this share of the step. gputop's own.
_GAIN_CHANGE = 0.05
# A gain within this share of the estimated saving fits it: what-ifs on a trace are no more exact. gputop's own.
_SAVING_TOLERANCE = 0.2
# Of what comes regularly B shows that it is gone once it was watched for so many periods; an idle time of the GPUs is
# what the recording shows if they differ by no more than this factor. gputop's own.
_PERIODS, _ALIKE = 1.5, 1.5
_SEVERITIES = ("low", "medium", "high")
_FOLLOWED: frozenset[Status] = frozenset({"gone", "weaker"})
_RECORDING = "recording"
_WHAT = {_RECORDING: "wall time per training step"}  # what a saving is measured by, if not by the step
# Findings whose time lies, or may lie, at an edge of the recording, outside of what wall time per step counts.
_AT_AN_EDGE = frozenset({"unfinished_step", "input_bound"})
_IN_STEPS_TOO = frozenset({"input_bound"})


class FollowedAdvice(Struct, frozen=True):
    """One finding of A or B. Gains are shares of A's mean step (or, ``per`` "sample", of its time per sample). With
    ``per`` "recording" ``promised`` is a share of A's recorded time, all else of its wall time per training step.

    ``promised`` is A's gain as it was shown: when A was captured, where gputop captured it (``when`` "capture"), else
    as A is analyzed now ("now"). ``measured``, between ``low`` and ``high``, is what the job as a whole gained: of all
    the advice followed, where that was more than one, whose savings are together between ``together``'s two figures.
    ``fulfilled`` says what became of it; None where nothing was promised, or the advice was not followed.
    Of what came once in A ``once_s`` are its seconds there and what B has of it: no saving, and gone only if the live
    signal of both shows that it no longer returns.
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
    when: Literal["capture", "now"] | None = None
    together: tuple[float, float] | None = None
    fulfilled: Fulfilled | None = None
    once_s: tuple[float, float] | None = None
    title_b: str | None = None


class _Measured(Struct, frozen=True):
    """Measured change of the time: the rows of the mean step and of the wall time per training step, and B's batch size
    in A's. ``wall_of_recorded`` is how much of A's recording the wall time of its steps is."""

    step: ComparedRow | None
    wall: ComparedRow | None
    batch: float | None
    wall_of_recorded: float | None

    def row(self, gain: Gain) -> ComparedRow | None:
        return self.wall if gain.per == _RECORDING else self.step

    def estimated(self, gain: Gain, of: Gain) -> float | None:
        """Return what ``gain`` promises, as a share of the time that ``of`` is measured by; None where that is not
        known."""
        if gain.step_time is None or _RECORDING not in (gain.per, of.per):
            return gain.step_time
        if gain.per == _RECORDING:
            shares = of.per == _RECORDING and self.wall_of_recorded
            return min(1.0, gain.step_time / shares) if shares else None
        return None if self.steps_of_wall is None else gain.step_time * self.steps_of_wall

    @property
    def steps_of_wall(self) -> float | None:
        """The mean step of A as a share of its wall time per step."""
        if self.step is None or self.wall is None or not self.step.a or not self.wall.a:
            return None
        return min(1.0, self.step.a / self.wall.a)


def followed(a: Side, b: Side, mean_step: ComparedRow | None, wall: ComparedRow | None = None,
             parts: Mapping[str, ComparedRow] | None = None) -> list[FollowedAdvice]:
    """The findings of A and what became of them, then those that only B has; both in their order, gravest first.

    ``mean_step`` is the row of the mean step time, ``wall`` that of the wall time per training step, ``parts`` those
    of the step's parts. What was shown when A was captured, and is not found in it now, is among A's findings all the
    same: somebody may have followed it.
    """
    shown = {f.id: f for f in a.findings_at_capture or ()}
    before, after = {f.id: f for f in a.findings}, {f.id: f for f in b.findings}
    before |= {id_: finding for id_, finding in shown.items() if id_ not in _with_consequences(before.values())}
    before_all, after_all = _with_consequences(before.values()), _with_consequences(after.values())
    out: list[FollowedAdvice] = []
    not_judged = {id_: _not_judged(finding, b) or _hidden(finding, parts or {}) for id_, finding in before.items()}
    longer = mean_step.b_alike / mean_step.a if mean_step and mean_step.a and mean_step.b_alike else 1.0
    statuses = {id_: _status(finding, after_all.get(id_), not_judged[id_] is not None, longer)
                for id_, finding in before.items()}
    gains = {id_: shown.get(id_, finding).gain for id_, finding in before.items()}
    measured = _Measured(mean_step, wall, batch_factor(a, b), _wall_of_recorded(a))
    same_batch = measured.batch is not None and not other_batch(measured.batch)
    # Of the same batch size no advice to change it was followed.
    traced = [id_ for id_, finding in before.items() if finding.origin == "trace"
              and not (same_batch and gains[id_].per == "sample")]
    # What is still there may have been followed, too, where nothing else explains a change.
    tried = ([id_ for id_ in traced if statuses[id_] in _FOLLOWED]
             or [id_ for id_ in traced if statuses[id_] in ("same", "stronger") and gains[id_].step_time is not None])
    for id_, finding in before.items():
        status, left = statuses[id_], after_all.get(id_)
        entry = FollowedAdvice(id_, finding.title, status, finding.severity,
                         None if left is None else left.severity, finding.gpus,
                         title_b=None if left is None else left.title)
        if gains[id_].step_time is not None:
            entry = replace(entry, promised=gains[id_].step_time, per=gains[id_].per,
                            when="capture" if id_ in shown else "now")
        if status == "not judged":
            entry = replace(entry, reason=not_judged[id_])
        elif gains[id_].how in ONCE_TEXTS:
            entry = _once(entry, finding, left, a.live_steps, b.live_steps)
        elif id_ in tried:
            beside = [other for other in tried if gains[id_].per == _RECORDING or gains[other].per != _RECORDING
                      or other in _IN_STEPS_TOO]
            entry = _outcome(entry, gains[id_], measured,
                             [measured.estimated(gains[other], gains[id_]) for other in beside])
        out.append(entry)
    for id_, finding in after.items():
        if id_ not in before_all:
            reason = _not_judged(finding, a)
            out.append(FollowedAdvice(id_, finding.title, "new", None, finding.severity, finding.gpus,
                                reason=None if reason is None else f"not checked in A: {reason}"))
    return out


def _wall_of_recorded(side: Side) -> float | None:
    wall, steps = side.analysis.wall_time if side.analysis is not None else None, side.steps
    if wall is None or steps is None or wall.per_step_s is None or wall.recorded_s <= 0:
        return None
    return min(1.0, wall.per_step_s * (wall.steps or steps.count) / wall.recorded_s)


def _with_consequences(findings: Iterable[Finding]) -> dict[str, Finding]:
    """Return those and what they explain: a cause that comes to stand under another one is not gone."""
    out: dict[str, Finding] = {}
    left = list(findings)
    while left:
        finding = left.pop(0)
        out.setdefault(finding.id, finding)
        left += finding.consequences
    return out


def _not_judged(finding: Finding, side: Side) -> str | None:
    """Return why the rule behind a finding of the other side could not judge this one; None where it did."""
    if finding.origin == "trace":
        if side.analysis is None:
            return "the snapshot has no trace"
        abstained = side.analysis.abstained
    else:
        if side.live is None:
            return "the trace has no live samples"
        abstained = side.live.abstained
    return next((f"the rule needs {a.missing}" for a in abstained if a.id == finding.id), None)


def _hidden(finding: Finding, parts: Mapping[str, ComparedRow]) -> str | None:
    """Return why a cause that B does not name may still be there: what it claims grew, and a part of it certainly."""
    claimed = [parts[part] for part in finding.claims if part in parts]
    grown = [row.id for row in claimed if row.verdict == "worse" and sum(one.change or 0.0 for one in claimed) > 0]
    return f"{PART_BY_ID[grown[0]].name} takes longer in B, and another cause may hide this one" if grown else None


def _status(before: Finding, after: Finding | None, abstained: bool, longer: float) -> Status:
    """``longer``: B's step in A's. A cause changes by what both its share and its time do."""
    if after is None:
        return "not judged" if abstained else "gone"
    ranks = [_SEVERITIES.index(f.severity) for f in (before, after)]
    gains = before.gain.step_time, after.gain.step_time
    alike = before.gain.per == after.gain.per
    change = 0.0
    if gains[0] is not None and gains[1] is not None and alike:
        of_share, of_time = gains[1] - gains[0], gains[1] * longer - gains[0]
        if of_share * of_time <= 0:
            return "same"
        change = min(of_share, of_time, key=abs)
    if ranks[1] < ranks[0] or (ranks[1] == ranks[0] and change <= -_GAIN_CHANGE):
        return "weaker"
    return "stronger" if ranks[1] > ranks[0] or change >= _GAIN_CHANGE else "same"


def _outcome(entry: FollowedAdvice, gain: Gain, measured_by: _Measured, promises: list[float | None]) -> FollowedAdvice:
    """The estimated saving against the change of the time that it is of; ``promises`` are those of all that was
    followed, as shares of it."""
    per, step, batch = gain.per, measured_by.row(gain), measured_by.batch
    what = _WHAT.get(per, "step")
    entry = replace(entry, per=per, outcome="cannot be told",
                    fulfilled=None if gain.step_time is None else "cannot be told")
    if step is None or step.a is None or step.b is None or step.a <= 0:
        return replace(entry, reason=f"the {'step time' if what == 'step' else what} of A or B is unknown")
    divide = 1.0
    if per == "sample" and step.work == 1.0:
        if batch is None:
            return replace(entry, reason="the saving is per sample, and the batch sizes of A and B are unknown")
        divide = batch
    measured = 1 - step.b / step.work / step.a / divide
    bounds = (step.high, step.low) if step.change else (0.0, 0.0)
    low, high = (None if change is None else 1 - (1 + change / step.a) / divide for change in bounds)
    entry = replace(entry, measured=measured, low=low, high=high)
    if gain.step_time is None:
        return replace(entry, reason="no saving was estimated")
    estimated = measured_by.estimated(gain, gain)
    if estimated is None:
        return replace(entry, reason="the share of the recording that its steps take is unknown")
    if per != "sample" and step.work == 1.0 and batch is not None and other_batch(batch):
        sample = 1 - step.b / step.a / batch
        return replace(entry, reason=f"a step of B copies {batch:.3g} times the bytes of A's to the GPUs; if that is "
                                     f"the batch size, the time per sample changed by {-sample:+.0%}")
    least = most = estimated
    several = len(promises) > 1 and entry.status in _FOLLOWED
    if several:  # each alone; together no less than the largest, no more than all
        promised = [one for one in promises if one is not None]
        least, most = max(promised), min(sum(promised), 1.0)
        entry = replace(entry, together=(least, most), reason=f"measured for {len(promises)} fixed causes together")
    if low is None or high is None:
        return replace(entry, reason=step.reason)
    if low <= min(0.0, least) and max(0.0, least) <= high:
        return replace(entry, reason=f"the {'steps vary' if what == 'step' else what + ' varies'} too much")
    tolerance = ABOUT if gain.claim == "about" else _SAVING_TOLERANCE
    fulfilled = _fulfilled(least, low, high, measured, tolerance)
    held = measured_by.steps_of_wall
    if fulfilled != "kept" and gain.per == _RECORDING and (
            entry.id in _AT_AN_EDGE or held is None or estimated > 1 - held + _GAIN_CHANGE):
        return replace(entry, reason="its time lies, at least in part, at an edge of A's recording, where wall time "
                                     "per training step is not counted")
    entry = replace(entry, fulfilled=fulfilled)
    if entry.status not in _FOLLOWED:
        return replace(entry, outcome=None, fulfilled=None if low <= 0.0 else entry.fulfilled, reason=(
            f"the {what} did not become{' significantly' if measured > 0 else ''} shorter: the advice was not "
            "followed, or did not help" if low <= 0.0 else "if this advice was followed; the finding is still there"))
    return entry if several else replace(entry, outcome=_against(estimated, measured, low, high, tolerance))


def _once(entry: FollowedAdvice, before: Finding, after: Finding | None, a: LiveSteps | None, b: LiveSteps | None,
          ) -> FollowedAdvice:
    """Judge what came once in A by what B has of it. B's recording may hold none by chance."""
    once_s = sum(before.claims.values())
    entry = replace(entry, outcome="cannot be told", once_s=(once_s, sum(after.claims.values()) if after else 0.0))
    if a is None or a.idle_period_s is None or not 1 / _ALIKE <= once_s / max(a.idle_s, 1e-9) <= _ALIKE:
        return replace(entry, reason="how often it occurred is unknown; the monitor knows this only if the GPUs were "
                                     "idle several times before the capture")
    every, enough_s = f"it occurred every {seconds(a.idle_period_s)}", _PERIODS * a.idle_period_s
    if b is None or b.seen_s < enough_s:
        return replace(entry, reason=f"{every}, and B was watched for {seconds(b.seen_s if b else 0.0)} before its "
                                     f"capture; capture B again after it has run for {seconds(enough_s)}")
    share, left = once_s / a.idle_period_s, b.idle_s / b.idle_period_s if b.idle_period_s else 0.0
    now = f"{seconds(b.idle_s)} every {seconds(b.idle_period_s)}" if b.idle_period_s else (
        f"not in the {seconds(b.seen_s)} before B's capture")
    return replace(entry, outcome=None, reason=f"{every} before, {percent(share)} of the run, and {now}", fulfilled=(
        "kept" if left <= share * _SAVING_TOLERANCE else "partly kept" if left < share / 2 else "broken"))


def _fulfilled(estimated: float, low: float, high: float, measured: float, tolerance: float) -> Fulfilled:
    """Return whether the measured saving is what was estimated, or more; else whether it is surely above zero."""
    if measured >= estimated or _against(estimated, measured, low, high, tolerance) == "as promised":
        return "kept"
    return "partly kept" if low > 0 else "broken"


def _against(estimated: float, measured: float, low: float, high: float, tolerance: float) -> Outcome:
    if low <= estimated <= high or abs(measured - estimated) <= tolerance * abs(estimated):
        return "as promised"
    return "more than promised" if measured > estimated else "less than promised"
