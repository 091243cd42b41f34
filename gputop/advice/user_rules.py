"""Rules, limits and budgets of the user's own: taken into the registry, and findings made of the rules.

A rule of one's own says when; what it costs is not known, so its findings estimate no saving.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Literal

from msgspec.structs import replace

from gputop.advice.registry import FINDING_IDS, LIMITS, RULES
from gputop.advice.rule import Limit
from gputop.advice.user_registry import UserRules, use
from gputop.core import metrics
from gputop.core.findings import Finding, Gain
from gputop.rules.names import OF_METRIC, SECONDS, Quantity, Source, Unit
from gputop.rules.read_files import RulePath
from gputop.rules.rule_file import Budget, FileProblem, LimitText, RuleFile, RuleText
from gputop.rules.toml_places import TomlPlace
from gputop.text.units import ranges

Figures = Mapping[str, tuple[float, Quantity]]  # as of gputop.rules.expression.Outcome
_NO_GAIN = "unknown, because this is a custom rule"
_NO_ACTION = "The rule does not name an action."
# What the windows of the live rules are cut into: with other values the rules would not do what they say.
_FIXED = frozenset({"coverage", "slice_s", "min_readings"})
_UNITS: Mapping[str, Unit] = {**OF_METRIC, "s": SECONDS}
_MAX_FACTOR = 10.0  # the least of a limit is a tenth of gputop's, the most ten times; a ratio of at most 1 stays so


def install(files: Iterable[RuleFile], paths: tuple[RulePath, ...] | None = None) -> list[FileProblem]:
    """Make this the user's own, in place of what was; returns all mistakes of the files. The first of two rules with
    one id counts; of limits the last. ``paths``: of the files, for processes that analyze for this one."""
    rules: dict[str, RuleText] = {}
    budgets: dict[str, Budget] = {}
    limits: dict[str, Limit] = {}
    problems: list[FileProblem] = []
    for file in files:
        first = len(problems)
        problems += file.problems
        asked = [(entry.condition.source, entry.asked) for entry in file.rules]
        for source, places in (*asked, *((entry.condition.source, entry.asked) for entry in file.budgets)):
            problems += [FileProblem(file.name, line, text) for id_, line in places.items()
                         if (text := _never_found(id_, source))]
        for rule in file.rules:
            taken = rules[rule.id].origin if rule.id in rules else "gputop's own" if rule.id in FINDING_IDS else None
            if taken is None:
                rules[rule.id] = rule
            else:
                line = TomlPlace(int(rule.origin.rpartition(":")[2]))
                problems.append(FileProblem(file.name, line, f"the id {rule.id} is in use: {taken}"))
        for set_ in file.limits:
            problem = _limit_problem(set_)
            if problem is None:
                before = LIMITS[set_.id]
                limits[set_.id] = replace(before, value=set_.value, source=(
                    f"yours ({set_.origin}): {_figure(set_.value, before)}; the default is "
                    f"{_figure(before.value, before)} ({before.source})"))
            else:
                problems.append(FileProblem(file.name, set_.place, problem))
        budgets |= {budget.id: budget for budget in file.budgets}
        problems[first:] = sorted(problems[first:], key=lambda problem: problem.place)
    use(UserRules(tuple(rules.values()), limits, tuple(budgets.values()), paths))
    return problems


def _never_found(id_: str, source: Source) -> str | None:
    """Reason why a rule on this source cannot ask for a finding; None where it can."""
    rules = [rule for rule in RULES if id_ in rule.ids]
    if any(rule.origin == source for rule in rules):
        return None
    if rules:
        return f"only rules with on = \"{rules[0].origin}\" can have the finding {id_}"

    near = get_close_matches(id_, FINDING_IDS, 1)
    return f"gputop has no rule {id_}" + (f": did you mean {near[0]}?" if near else ": gputop rules list shows all")


def _figure(value: float, limit: Limit) -> str:
    return f"{value:g} {limit.unit}"


def _limit_problem(given: LimitText) -> str | None:
    """Reason why a limit cannot be set so; None where it can."""
    if given.id not in LIMITS:
        near = get_close_matches(given.id, LIMITS, 1)
        return f"there is no limit {given.id}" + (f": did you mean {near[0]}?" if near else ": gputop rules list "
                                                                                    "--limits shows all")
    limit_set = LIMITS[given.id]
    if given.id in _FIXED:
        return f"{given.id} cannot be set, because the windows of all rules depend on it"
    if given.unit not in (Unit(), _UNITS.get(limit_set.unit, Unit())):
        return f"{given.id} is in {limit_set.unit}"
    low, high = limit_set.value / _MAX_FACTOR, limit_set.value * _MAX_FACTOR
    if limit_set.unit == metrics.RATIO and limit_set.value <= 1:
        high = min(high, 1.0)
    if low <= given.value <= high:
        return None
    if limit_set.unit == metrics.RATIO and high <= 1:
        return f"{given.id} is from {100 * low:g}% to {100 * high:g}%"
    return f"{given.id} is from {low:g} to {high:g} {limit_set.unit}"


# -- findings ---------------------------------------------------------------------------------------


def user_finding(rule: RuleText, origin: Literal["live", "trace"], gpus: Sequence[int],
                figures: Sequence[Figures]) -> Finding:
    """The finding of a rule that holds, for these GPUs, with what its condition read for each of them."""
    where = f" on GPU{'s' * (len(gpus) > 1)} {ranges(gpus, ', ')}" if gpus else ""
    why = f"{rule.why} " if rule.why else ""
    held = f", for {rule.hold_s:g} s and longer" if rule.hold_s else ""
    mean = " Values are means of these GPUs." if len(gpus) > 1 else ""
    return Finding(
        id=rule.id, severity=rule.severity, title=rule.title,
        why=f"{why}{rule.condition.text} holds{where}{held}.{mean}",
        evidence=_evidence(figures), action=rule.action or _NO_ACTION, snippet=rule.snippet,
        gain=Gain(None, _NO_GAIN), gpus=tuple(gpus), source=f"yours: {rule.origin}", origin=origin, yours=rule.origin)


def in_words(missing: Iterable[str]) -> str:
    """Words for missing figures (``NAME: WHAT`` each), once for all that miss the same."""
    names: dict[str, list[str]] = {}
    for text in dict.fromkeys(missing):
        name, _, what = text.partition(": ")
        names.setdefault(what or name, []).append(name if what else "")
    return "; ".join(f"{', '.join(figures)}: {what}" if any(figures) else what for what, figures in names.items())


def _evidence(figures: Sequence[Figures]) -> dict[str, float]:
    """The figures by names that end with their unit, means of those that several GPUs have."""
    out: dict[str, float] = {}
    for text, (_, quantity) in (figures[0] if figures else {}).items():
        values = [of_gpu[text][0] for of_gpu in figures if text in of_gpu]
        out[quantity.document_name(text)] = sum(values) / len(values)
    return out
