"""One list out of trace findings and live ones: a cause seen both ways is one entry."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec.structs import replace

from gputop.advice.registry import limit, rule_of
from gputop.core.findings import Finding, ranked


def merge_findings(trace: Iterable[Finding], live: Iterable[Finding], trace_age_s: float = 0.0,
                   allocators_known: bool = False, job_gpus: Collection[int] | None = None) -> tuple[Finding, ...]:
    """Rank both together; a cause seen both ways is one entry.

    A live finding that has the trace's own name is left out; one that follows from what a fresh trace (of at most
    ``merge.fresh_s``) names is folded under that, where it adds its evidence. ``allocators_known``: the trace tells the
    true headroom, so the advice to capture for it is done. ``job_gpus``: the GPUs of the traced job in the numbers of
    the live findings, None where they are not known. A live finding on any other GPU has a cause of its own.
    """
    top = list(ranked(trace))
    trace_ids = {id_ for f in top for id_ in f.ids}
    fresh = trace_age_s <= limit("merge.fresh_s")
    only_live = []
    for finding in live:
        if allocators_known and finding.id == "memory_preallocated":
            continue
        if job_gpus is not None and not set(finding.gpus) <= set(job_gpus):
            only_live.append(finding)
            continue
        rule = rule_of(finding.id, "live")
        # The trace knows more of a cause that both see, so its finding stays.
        if trace_ids & {finding.id, *(rule.same_as if rule is not None else ())}:
            continue
        causes = set(rule.follows_from) if rule is not None and fresh else set()
        index = next((i for i, f in enumerate(top) if f.severity != "low" and f.ids & causes), None)
        if index is None:
            only_live.append(finding)
        else:
            top[index] = replace(top[index], consequences=(*top[index].consequences, finding))
    leading = {f.id for f in only_live if (rule := rule_of(f.id, "live")) is not None and rule.leads}
    return tuple(sorted(ranked([*top, *only_live]), key=lambda finding: finding.id not in leading))
