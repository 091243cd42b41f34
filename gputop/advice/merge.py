"""One list out of trace findings and live ones: a cause seen both ways is one entry."""

from __future__ import annotations

from collections.abc import Iterable

from gputop.advice.finding import Finding, ranked

# A cause can have one id live and another from a trace; the trace knows more, so it stays.
_SAME_CAUSE = {"gpu0_oversubscribed": {"gpu0_oversubscribed", "replica_imbalance"}}


def merge_findings(trace: Iterable[Finding], live: Iterable[Finding]) -> tuple[Finding, ...]:
    """Rank both together, leaving out live findings whose cause the trace already names."""
    from_trace = tuple(trace)
    known = {f.id for f in from_trace}
    only_live = [f for f in live if not known & _SAME_CAUSE.get(f.id, {f.id})]
    return ranked([*from_trace, *only_live])
