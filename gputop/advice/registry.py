"""The registry: every rule and every limit. What speaks of rules reads it: report, timeline, screens, README, tests.

It imports records only, no rule's code: the first frame pays for a table, not for the rules on traces.
"""

from __future__ import annotations

from collections.abc import Mapping

from gputop.advice.fleet_rules import FLEET_RULES
from gputop.advice.live_rules import LIVE_RULES
from gputop.advice.rule import Limit, Origin, Rule
from gputop.advice.trace_rules import TRACE_RULES
from gputop.advice.user_registry import user_rules

RULES: tuple[Rule, ...] = (*TRACE_RULES, *LIVE_RULES, *FLEET_RULES)

# Limits of no single rule.
SHARED_LIMITS: tuple[Limit, ...] = (
    Limit("few.steps", 3, "count", "gputop: prevents one unusual step in a short capture from causing high severity"),
    Limit("few.kernels", 200, "count",
          "gputop: without steps, high severity requires at least a few milliseconds of GPU work"),
    Limit("few.hardly_any_kernels", 20, "count",
          "gputop: about as many kernels as the forward and backward passes of a single layer; with fewer, the trace "
          "shows script startup or a microbenchmark, and severity is at most low"),
    Limit("few.judged_kernels", 10, "count", "gputop: does not evaluate kernels if the trace contains almost none"),
    Limit("precision.share", 0.03, "ratio", "XProf: rates most categories as moderate at 3% of the step"),
    Limit("precision.speedup", 3.0, "ratio",
          "NVIDIA, Mixed-Precision Training guide: up to 3x overall, although hardware peak rates differ by 8x"),
    Limit("precision.tf32_speedup", 1.5, "ratio",
          "gputop: TF32 matrix multiplications are already partly memory-bound and do not gain the full speedup"),
    Limit("precision.sixteen_bit", 0.03, "ratio", "gputop: ignores a few stray 16-bit kernels"),
    Limit("collectives.share", 0.03, "ratio", "XProf: rates collectives as moderate at 3% of the step (high at 15%)"),
    Limit("causes.rest", 0.4, "ratio", "gputop: lists a consequence under a cause that explains most of it"),
    Limit("causes.late_by_host", 0.5, "ratio",
          "gputop: blames the host if, for most of the delay, the late GPU was the only one without launched kernels"),
    Limit("host.steps", 2, "count", "same as input_bound.steps"),
    Limit("window_s", 30.0, "s",
          "gputop: covers dozens of typical steps (0.1-1 s each), so one unusual step is not decisive"),
    Limit("coverage", 0.8, "ratio", "gputop: evaluates a window only if samples cover most of it"),
    Limit("slice_s", 5.0, "s", "gputop: spans several steps, so that a rule can require most slices to agree"),
    Limit("min_readings", 5.0, "count", "gputop: averages at least this many samples, even at long sampling intervals"),
    Limit("live_limit.work", 0.8, "ratio", "gputop: does not treat GPUs with less SM activity as fully busy"),
    Limit("live_limit.tensor", 0.4, "ratio", "gputop: matrix kernels of ordinary efficiency reach this value"),
    Limit("live_limit.fell", 0.3, "ratio", "gputop: ignores the usual variation between steps"),
    Limit("unexplained.share", 0.1, "ratio", "gputop: does not report the sum of many small waits"),
    Limit("merge.fresh_s", 900.0, "s", "gputop: ensures that a trace describes the running job, not an earlier one"),
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
