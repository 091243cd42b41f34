"""The user's own rules on traces, and budgets: their conditions over an analysis, which may also be a document."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import chain, combinations
from typing import Any

from gputop.advice.trace.inputs import GPU_ALLOCATOR
from gputop.advice.user_registry import user_rules
from gputop.advice.user_rules import Figures, in_words, user_finding
from gputop.analysis.results import Analysis, KernelRow, LayerRow
from gputop.core.findings import Abstained, Advice, Finding, ranked
from gputop.rules.check import Reference
from gputop.rules.expression import Condition, ConditionOutcome, Value
from gputop.rules.rule_file import Budget, RuleText
from gputop.text.units import percent

_MAX_BETWEEN = 3  # names whose figure is only known to be between two: all combinations of the ends are judged


class TraceValues:
    """The values of names in one analysis, with its findings.

    An analysis has rows for the kernels that take most time, and one for the rest. A pattern may also choose kernels of
    the rest: its figure is then between that of its rows and the same with the rest. ``with_rest`` has the names that
    get it, None: such figures are not known. ``between`` has those that were asked for, and what is missing for them.
    """

    def __init__(self, analysis: Analysis, with_rest: Collection[str] | None = ()) -> None:
        self._analysis, self._with_rest = analysis, with_rest
        self.between: dict[str, str] = {}

    @cached_property
    def gpus(self) -> list[int]:
        return [gpu.gpu for gpu in self._analysis.gpus]

    def read(self, reference: Reference, gpu: int | None) -> tuple[Value, str]:
        quantity, steps = reference.quantity, self._analysis.steps
        if steps is not None and steps.start_up and quantity.name.startswith("step."):
            return None, f"steps after startup; the recorded steps include {steps.start_up}"
        if reference.finding:
            return self._finding(reference.finding)
        if reference.table is not None:
            rows = self._rows(reference.table.name, reference.pattern)
            return (None, reference.table.needs) if rows is None else self._sum(rows, reference)
        if quantity.name.startswith("memory."):
            value = self._memory(quantity.path)
        elif gpu is not None:
            value = getattr(next(use for use in self._analysis.gpus if use.gpu == gpu), quantity.path)
        else:
            value = _at(self._analysis, quantity.path)
        return (None, quantity.needs) if value is None else (float(value), "")

    def _finding(self, id_: str) -> tuple[Value, str]:
        if any(id_ in finding.ids for finding in self._analysis.findings):
            return True, ""
        missing = next((abstained.missing for abstained in self._analysis.abstained if abstained.id == id_), None)
        return (False, "") if missing is None else (None, missing)

    def _rows(self, table: str, pattern: str) -> Sequence[LayerRow | KernelRow] | None:
        """The rows that a pattern chooses; None where the trace does not tell."""
        if table == "layer":
            return None if self._analysis.layers is None else self._layers(pattern)
        kernels = self._analysis.kernels
        rows = None if kernels is None else kernels.by_name if table == "kernel" else kernels.by_op
        return None if rows is None else [row for row in rows if not row.name or fnmatchcase(row.name, pattern)]

    def _sum(self, rows: Sequence[LayerRow | KernelRow], reference: Reference) -> tuple[Value, str]:
        """The figure of these rows, the rest of a table among them."""
        rest = rows[-1] if rows and isinstance(rows[-1], KernelRow) and not rows[-1].name else None
        if rest is not None and reference.pattern.strip("*"):
            lacks = f"a row for each kernel: {rest.names:,} kernels ({percent(rest.share)} of the time) share one row"
            self.between[reference.text] = f"{reference.text}: {lacks}"
            if self._with_rest is None:
                return None, lacks
            if reference.text not in self._with_rest:
                rows = rows[:-1]
        return float(sum(getattr(row, reference.quantity.path) for row in rows)), ""

    def _layers(self, pattern: str) -> list[LayerRow]:
        """Rows by path, or by the path without the phase; none below another one, whose figures hold its."""
        layers = self._analysis.layers
        paths: list[str] = []
        taken: list[bool] = []
        chosen = []
        for row, parent in zip(layers.rows, layers.parents, strict=True) if layers is not None else ():
            above = "" if parent is None else paths[parent]
            paths.append(f"{above}/{row.name}" if above else row.name)
            within = parent is not None and taken[parent]
            taken.append(within or any(fnmatchcase(path, pattern) for path in (
                paths[-1], paths[-1].partition("/")[2]) if path))
            if taken[-1] and not within:
                chosen.append(row)
        return chosen

    def _memory(self, figure: str) -> float | None:
        uses = [use for use in self._analysis.memory if GPU_ALLOCATOR.match(use.allocator)]
        if figure == "fragmentation":
            fragmentations = [use.fragmentation_max for use in uses if use.fragmentation_max is not None]
            return max(fragmentations, default=None)
        uses = [use for use in uses if use.capacity_bytes > 0]
        if figure == "headroom":
            return min((use.headroom_bytes for use in uses if use.headroom_bytes is not None), default=None)
        fullest = max(uses, key=lambda use: use.peak_bytes / use.capacity_bytes, default=None)
        if fullest is None:
            return None
        return fullest.peak_bytes / (fullest.capacity_bytes if figure == "peak_ratio" else 1)


def _at(value: Any, path: str) -> Any:
    """A field of a field; None where one of them is None."""
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return value


def judged(condition: Condition, analysis: Analysis) -> tuple[bool | None, dict[int | None, ConditionOutcome]]:
    """Judge a condition: for any GPU where it is per GPU. None: not known."""
    values = TraceValues(analysis)
    outcomes = condition.judge(values)
    names = sorted(values.between)
    if names and condition.is_monotonic and len(names) <= _MAX_BETWEEN:
        for chosen in chain.from_iterable(combinations(names, n + 1) for n in range(len(names))):
            others = condition.judge(TraceValues(analysis, chosen))
            outcomes = {gpu: outcome if outcome.holds is others[gpu].holds else outcome._replace(
                holds=None, missing=outcome.missing or tuple(values.between.values()))
                        for gpu, outcome in outcomes.items()}
    elif names:
        outcomes = condition.judge(TraceValues(analysis, None))
    verdicts = [outcome.holds for outcome in outcomes.values()]
    return (True if any(verdicts) else None if not verdicts or None in verdicts else False), outcomes


def with_user_rules(advice: Advice, analysis: Analysis) -> Advice:
    """The advice with what the user's own rules say of this analysis, which has the findings already."""
    outcomes = [user_outcome(rule, analysis) for rule in user_rules().rules if rule.condition.source == "trace"]
    findings = [outcome for outcome in outcomes if isinstance(outcome, Finding)]
    return Advice(ranked([*advice.findings, *findings]),
                  (*advice.abstained, *(outcome for outcome in outcomes if isinstance(outcome, Abstained))),
                  advice.limit, advice.what_if)


def user_outcome(rule: RuleText, analysis: Analysis) -> Finding | Abstained | None:
    holds, outcomes = judged(rule.condition, analysis)
    if holds:
        shown: dict[int | None, Figures] = {gpu: outcome.figures for gpu, outcome in outcomes.items() if outcome.holds}
        return user_finding(rule, "trace", [gpu for gpu in shown if gpu is not None], list(shown.values()))
    return None if holds is False else Abstained(rule.id, missing(outcomes))


def missing(outcomes: dict[int | None, ConditionOutcome]) -> str:
    return in_words(text for outcome in outcomes.values() for text in outcome.missing) or "GPUs in the trace"


def over_budget(budget: Budget, analysis: Analysis) -> tuple[bool | None, dict[int | None, ConditionOutcome]]:
    """Judge a budget: exceeded by any GPU where it is per GPU. None: not known."""
    _, outcomes = judged(budget.condition, analysis)
    verdicts = [outcome.holds for outcome in outcomes.values()]
    return (True if False in verdicts else None if not verdicts or None in verdicts else False), outcomes
