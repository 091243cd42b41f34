"""Gates: what makes ``analyze`` and ``compare`` end with a status that stops a pipeline.

A gate fails only where it is sure: a regression where the comparison is certain, a budget where its figures are
known. What cannot be judged is said, and has a status of its own: a gate that was not judged did not pass.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from gputop.advice.registry import RULES
from gputop.advice.trace.user_rules import missing, over_budget
from gputop.advice.trace_rules import TRACE_RULES
from gputop.advice.user_registry import user_rules
from gputop.analysis.results import Analysis
from gputop.comparison.compare import Comparison, GateResult, signed
from gputop.comparison.figures import percent_change
from gputop.core.errors import EXIT_GATE, EXIT_NO_DATA, EXIT_OK, EXIT_USAGE, GputopError
from gputop.text.units import counted, figure, printable, ranges

_SEVERITIES = ("low", "medium", "high")
_REGRESSION = re.compile(r"regression(?::(\d{1,3}(?:\.\d+)?) ?%)?")
_BUDGET = "budget"


def parse_gates(texts: Iterable[str], *, of_comparison: bool) -> tuple[str, ...]:
    """The gates that ``--fail-on`` names, several with commas; raises GputopError (wrong usage)."""
    gates = tuple(word.strip() for text in texts for word in text.split(",") if word.strip())
    valid = {_BUDGET, *(() if of_comparison else (*_SEVERITIES, *_ids_on_traces()))}
    for gate in gates:
        if gate not in valid and not (of_comparison and _REGRESSION.fullmatch(gate)):
            raise GputopError(f"there is no gate {printable(gate)}", (
                "regression, regression:5%, or budget" if of_comparison else
                "high, medium or low (a finding of this severity or higher), the id of a rule on traces (gputop rules "
                "list), or budget"), EXIT_USAGE)
    if _BUDGET in gates and not user_rules().budgets:
        raise GputopError("there is no budget", "Write [budget] in gputop.toml here, or name its file with --rules: "
                          "docs/tasks/custom-rules.md.", EXIT_USAGE)
    return gates


def _ids_on_traces() -> Iterator[str]:
    """Yield the ids of all rules that judge traces: the others find nothing there."""
    for rule in RULES:
        yield from rule.ids if rule.origin == "trace" else ()
    yield from (rule.id for rule in user_rules().rules if rule.condition.source == "trace")


def gates_of_analysis(gates: Sequence[str], analysis: Analysis) -> list[GateResult]:
    """Return what became of these gates, and of all budgets where one of them is "budget"."""
    out = []
    for gate in gates:
        if gate == _BUDGET:
            out += budgets(analysis)
        elif gate in _SEVERITIES:
            out.append(_severity(gate, analysis))
        else:
            out.append(_finding(gate, analysis))
    return out


def _severity(gate: str, analysis: Analysis) -> GateResult:
    grave = [f for f in analysis.findings if _SEVERITIES.index(f.severity) >= _SEVERITIES.index(gate)]
    if grave:
        return GateResult(gate, "failed", "; ".join(f"{f.title} [{f.id}, {f.severity}]" for f in grave))
    abstained = {rule.id for rule in analysis.abstained}
    # Explanations find no time, and rules that are silent for a framework may not have been asked.
    if all(rule.id in abstained for rule in TRACE_RULES if rule.costs_time and not rule.silent_for):
        lacks = Counter(rule.missing for rule in analysis.abstained).most_common(1)[0][0]
        return GateResult(gate, "cannot be told", f"no rule could evaluate this trace: most need {lacks}")
    unjudged = f"; {counted(len(abstained), 'cause')} could not be checked" if abstained else ""
    return GateResult(gate, "passed", f"no finding is {gate} or higher{unjudged}")


def _finding(id_: str, analysis: Analysis) -> GateResult:
    finding = next((f for f in analysis.findings if id_ in f.ids), None)
    if finding is not None:
        return GateResult(id_, "failed", finding.title)
    lacks = next((rule.missing for rule in analysis.abstained if rule.id == id_), None)
    return GateResult(id_, "passed", "not found") if lacks is None else GateResult(
        id_, "cannot be told", f"it needs {lacks}")


def budgets(analysis: Analysis | None) -> list[GateResult]:
    """Return what became of each budget; ``analysis`` is None where there is no trace."""
    out = []
    for budget in user_rules().budgets:
        name, text = f"{_BUDGET} {budget.id}", budget.condition.text
        if analysis is None:
            out.append(GateResult(name, "cannot be told", "there is no trace"))
            continue
        over, outcomes = over_budget(budget, analysis)
        if over is None:
            out.append(GateResult(name, "cannot be told", f"{text} needs {missing(outcomes)}"))
            continue
        broken = {gpu: outcome for gpu, outcome in outcomes.items() if outcome.holds is False}
        read = next(iter((broken or outcomes).values())).figures
        figures = ", ".join(f"{of} is {figure(quantity.document_name(of), value)}"
                            for of, (value, quantity) in read.items())
        gpus = [gpu for gpu in broken if gpu is not None]
        where = f" on GPU {ranges(gpus, ', ')}" if gpus else ""
        text += where + (f": {figures}" if figures else "")
        out.append(GateResult(name, "failed" if over else "passed", text))
    return out


def broken_budgets(analysis: Analysis) -> tuple[str, ...]:
    """Sentences on the budgets that a trace exceeds."""
    return tuple(f"{result.gate} is exceeded: {result.why}" for result in budgets(analysis)
                 if result.outcome == "failed")


def gates_of_comparison(gates: Sequence[str], comparison: Comparison) -> list[GateResult]:
    """Return what became of these gates; budgets are those of B."""
    out = []
    for gate in gates:
        match = _REGRESSION.fullmatch(gate)
        out += budgets(comparison.b.analysis) if match is None else [_regression(gate, match[1], comparison)]
    return out


def _regression(gate: str, at_least: str | None, comparison: Comparison) -> GateResult:
    if comparison.verdict in ("cannot be told", "changed"):
        return GateResult(gate, "cannot be told", comparison.headline)
    if comparison.verdict != "worse":
        return GateResult(gate, "passed", comparison.headline)
    row = comparison.decisive
    change = percent_change(row) if row is not None else None
    if at_least is not None and change is not None and change < float(at_least) / 100:
        return GateResult(gate, "passed", f"{comparison.headline} {signed(change)} is less than {at_least}%.")
    return GateResult(gate, "failed", comparison.headline)


def exit_status(results: Iterable[GateResult]) -> int:
    """4 where one failed, 3 where one could not be judged, else 0."""
    outcomes = {result.outcome for result in results}
    return EXIT_GATE if "failed" in outcomes else EXIT_NO_DATA if "cannot be told" in outcomes else EXIT_OK


def gate_lines(results: Iterable[GateResult]) -> Iterator[str]:
    for result in results:
        yield f"{result.outcome.upper()}: {result.gate}: {result.why}"
