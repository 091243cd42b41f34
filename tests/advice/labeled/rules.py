"""Which finding ids have a rule today, as the registry tells."""

from __future__ import annotations

from gputop.advice.trace_rules import TRACE_RULES


def ids_with_rules() -> frozenset[str]:
    return frozenset(id_ for rule in TRACE_RULES for id_ in rule.ids)
