"""The registry: every rule and every limit. What speaks of rules reads it: report, timeline, screens, README, tests.

It imports records only, no rule's code: the first frame pays for a table, not for the rules on traces.
"""

from __future__ import annotations

from collections.abc import Mapping

from gputop.advice.fleet_rules import FLEET_RULES
from gputop.advice.live_rules import LIVE_RULES
from gputop.advice.rule import OWN, Limit, Origin, Rule
from gputop.advice.trace_rules import TRACE_RULES
from gputop.advice.user_registry import user_rules

RULES: tuple[Rule, ...] = (*TRACE_RULES, *LIVE_RULES, *FLEET_RULES)

# Limits of no single rule.
SHARED_LIMITS: tuple[Limit, ...] = (
    Limit("few.steps", 3, "count", f"{OWN}one unusual step in a short capture does not cause high severity"),
    Limit("few.kernels", 200, "count",
          f"{OWN}without steps, a finding has high severity only if the GPUs worked for at least a few milliseconds"),
    Limit("few.hardly_any_kernels", 20, "count",
          "gputop's choice: the forward and backward passes of a single layer launch about as many; with fewer, the "
          "trace shows a script's start or a micro benchmark, and severity is at most low"),
    Limit("few.judged_kernels", 10, "count", f"{OWN}a report with almost no kernels gives no verdict on them"),
    Limit("precision.share", 0.03, "ratio", "XProf: other categories are moderate from 3% of the step"),
    Limit("precision.speedup", 3.0, "ratio",
          "NVIDIA, Mixed-Precision Training guide: up to 3x overall; the hardware's peaks are 8x apart"),
    Limit("precision.tf32_speedup", 1.5, "ratio",
          f"{OWN}TF32 products, which are already partly memory-bound, do not count with the full speedup"),
    Limit("precision.sixteen_bit", 0.03, "ratio", f"{OWN}a few stray 16-bit kernels do not count as mixed precision"),
    Limit("collectives.share", 0.03, "ratio", "XProf: collectives are moderate from 3% of the step (high from 15%)"),
    Limit("causes.rest", 0.4, "ratio", f"{OWN}a consequence is listed under a cause that explains most of it"),
    Limit("causes.late_by_host", 0.5, "ratio",
          f"{OWN}during most of the delay, the late GPU had no launch while the other GPUs had one"),
    Limit("host.steps", 2, "count", "same as input_bound.steps"),
    Limit("window_s", 30.0, "s",
          f"{OWN}the window contains dozens of typical steps (0.1-1 s), and one unusual step does not decide"),
    Limit("coverage", 0.8, "ratio", f"{OWN}a rule evaluates a window only if samples cover most of it"),
    Limit("slice_s", 5.0, "s", f"{OWN}a slice contains several steps, and a rule can require that most slices agree"),
    Limit("min_readings", 5.0, "count", f"{OWN}a mean is based on more than a few samples, even at long intervals"),
    Limit("live_limit.work", 0.8, "ratio", f"{OWN}GPUs with less SM activity do not count as fully busy"),
    Limit("live_limit.tensor", 0.4, "ratio", f"{OWN}matrix kernels of ordinary efficiency reach this value"),
    Limit("live_limit.fell", 0.3, "ratio", f"{OWN}the usual variation between steps does not count"),
    Limit("unexplained.share", 0.1, "ratio", f"{OWN}the sum of many small waits is not shown"),
    Limit("merge.fresh_s", 900.0, "s", f"{OWN}a trace describes the job that is running now, not an earlier job"),
)

LIMITS: Mapping[str, Limit] = {
    limit.id: limit for limit in (*SHARED_LIMITS, *(limit for rule in RULES for limit in rule.limits))}
FINDING_IDS: frozenset[str] = frozenset(id_ for rule in RULES for id_ in rule.ids)
# Findings that explain a figure or name a limit: none of them costs time.
EXPLANATIONS: frozenset[str] = frozenset(id_ for rule in RULES if not rule.costs_time for id_ in rule.ids)

_BY_ID: Mapping[tuple[Origin, str], Rule] = {(rule.origin, id_): rule for rule in RULES for id_ in rule.ids}


def limit(limit_id: str) -> float:
    """The value of a limit; raises KeyError for an id that is not in the tables."""
    return limit_record(limit_id).value


def limit_record(limit_id: str) -> Limit:
    """A limit as it counts: the user's where there is one; raises KeyError for an id that is not in the tables."""
    return user_rules().limits.get(limit_id) or LIMITS[limit_id]


def source(*limit_ids: str) -> str:
    return "; ".join(dict.fromkeys(limit_record(id_).source for id_ in limit_ids))


def rule_of(finding_id: str, origin: Origin) -> Rule | None:
    """The rule that makes findings of this id; None for an id that is no rule's, as of a document of another
    version."""
    return _BY_ID.get((origin, finding_id))
