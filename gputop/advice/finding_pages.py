"""The page of a finding: its prose (``pages/<id>.md``) and what its records say, as Markdown.

``gputop rules explain ID`` prints it, and ``docs/findings`` holds the same text. A page has the sections of
:data:`SECTIONS`, in that order, and then the facts of the rules that make the finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from gputop.advice.fix_code import as_shown, source_of_page
from gputop.advice.registry import FINDING_IDS, LIMITS, RULES
from gputop.advice.rule import Limit, Rule
from gputop.core.framework import LABELS

SECTIONS = ("What it means", "How to confirm it", "Fix", "Example", "When it is wrong", "Read more")
_WHERE = {"trace": "traces", "live": "live samples", "fleet": "cluster metrics"}
_SCALES = {  # the largest first; one that divides the value goes before
    "s": ((3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "bytes": ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1e9, "GB"), (1e6, "MB"), (1, "B")),
    "B/s": ((1e9, "GB/s"), (1e6, "MB/s")),
}
_BY_SHARE = "Severity is high if at least 15% of the step is lost, medium if at least 5% is lost, and low otherwise."
_SEVERITY = {
    "by_share": _BY_SHARE,
    "by_share_capped": f"{_BY_SHARE} If the trace has only a few steps and kernels, severity is at most medium.",
    "own": "This rule sets the severity itself.",
}
_NEEDS = {  # what a page calls the inputs of a rule
    "processes": "the processes on each GPU", "gpu_activity": "GPU activity", "gpu_idle_time": "the GPUs' idle time",
    "busy_gpus": "activity of GPUs that are busy", "batch_waits": "the training loop's waits for batches",
    "launch_calls": "the host calls that launched the kernels", "allocators": "memory use by allocator",
    "step_calls": "the host's calls to the step function", "launch_threads": "the host threads that launch work",
    "eager_ops": "operations that Python starts one by one", "xla_events": "which operations XLA compiled",
}


def prose(finding_id: str) -> str:
    """The prose of a finding, a title first; raises KeyError for an id that has none."""
    if finding_id not in FINDING_IDS:
        raise KeyError(finding_id)
    return as_shown(source_of_page(finding_id))


def title(finding_id: str) -> str:
    """The title of a finding's page: what it means in a few words."""
    return prose(finding_id).partition("\n")[0].removeprefix("# ")


def page(finding_id: str, limit: Callable[[str], Limit] = LIMITS.__getitem__) -> str:
    """The whole page of a finding as Markdown; raises KeyError for an id that no rule has.

    ``limit`` gives the record of a threshold: the one built in, or the user's.
    """
    head, _, body = prose(finding_id).partition("\n")
    facts = "\n".join(line for rule in RULES if finding_id in rule.ids for line in _facts(rule, limit))
    return f"# {finding_id}: {head.removeprefix('# ')}\n\n{body.strip()}\n\n## How gputop decides\n\n{facts}"


def _threshold(row: Limit) -> str:
    """The value, exactly and in people's units: 5%, 1.5×, 50 µs, 256 MiB."""
    value = row.value
    if row.unit == "ratio":
        return f"{100 * value:.3g}%" if value <= 1 else f"{value:g}×"
    if row.unit == "count":
        return f"{value:g}"
    scales = _SCALES.get(row.unit, ())
    factor, unit = next(((factor, unit) for factor, unit in scales if value >= factor and not value % factor),
                        next(((factor, unit) for factor, unit in reversed(scales) if value < 1000 * factor),
                             (1, row.unit)))
    return f"{value / factor:.4g} {unit}"


def _ids(ids: Iterable[str]) -> str:
    return ", ".join(f"`{id_}`" for id_ in ids)


def _facts(rule: Rule, limit: Callable[[str], Limit]) -> Iterator[str]:
    yield f"gputop evaluates this rule on {_WHERE[rule.origin]}. {_SEVERITY[rule.severity]}"
    if not rule.costs_time:
        yield "gputop does not count any time as lost because of this finding."
    yield ""
    if rule.needs:
        yield f"- Required data: {', '.join(_NEEDS[need] for need in rule.needs)}."
    if rule.silent_for:
        yield f"- Not evaluated for {' or '.join(LABELS[name] for name in rule.silent_for)}."
    if rule.follows_from:
        yield f"- If one of these findings is the cause, gputop lists this finding below it: {_ids(rule.follows_from)}."
    if rule.yields_to:
        yield f"- Excludes GPUs that already have one of these findings: {_ids(rule.yields_to)}."
    if rule.needs or rule.silent_for or rule.follows_from or rule.yields_to:
        yield ""
    limits = [limit(id_) for id_ in (*(rule_limit.id for rule_limit in rule.limits), *rule.shared_limits)]
    if limits:
        yield "| threshold | value | source and reason |"
        yield "|---|---|---|"
        yield from (f"| `{row.id}` | {_threshold(row)} | {row.source} |" for row in limits)
        yield ""
