"""Where on a timeline a finding can be seen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gputop.advice.registry import rule_of
from gputop.core.findings import Culprit, Finding
from gputop.timeline.model import Range

if TYPE_CHECKING:
    from gputop.timeline.reader import Timeline

_MAX_RANGES = 2_000  # ranges of a GPU that are searched
_QUOTED = re.compile(r"[“\"'`]([^”\"'`]{4,80})[”\"'`]|\b([A-Za-z_][\w:/.]*(?:::|_|/)[\w:/.]+)")


def place_of(timeline: Timeline, finding: Finding) -> int | Range | None:
    """Where a finding from a trace can be seen: the index of its costliest idle gap, or a range that stands for it.

    A range is that of a culprit. Where there is neither, one that its text names, else the longest of the kind of work
    it is about. None: no such place.
    """
    for culprit in finding.culprits:
        named = _event_of(timeline, culprit)
        if named is not None:
            return named
    causes = [total for total in timeline.idle_totals if total.finding in finding.ids]
    for i, idle_gap in enumerate(timeline.idle_gaps):
        if any(total.holds(idle_gap) for total in causes) and idle_gap.finding in finding.ids:
            return i
    for ids in ({finding.id}, finding.ids):
        for i, idle_gap in enumerate(timeline.idle_gaps):
            if idle_gap.finding in ids:
                return i
    before = timeline.window_ns[0] - 1
    for match in _QUOTED.finditer(f"{finding.why} {finding.action}"):
        found = timeline.search(match[1] or match[2], 0, before)
        if found is not None:
            return found
    rule = rule_of(finding.id, "trace")
    if rule is None or not rule.events:
        return None
    gpus = [row for row in timeline.rows if row.kind == "gpu" and (not finding.gpus or row.gpu in finding.gpus)]
    longest = [r for row in gpus for r in timeline.ranges(row.key, *timeline.window_ns, _MAX_RANGES)
               if r.kind in rule.events]
    return max(longest, key=_length_ns, default=None)


def _length_ns(found: Range) -> int:
    return found.end_ns - found.start_ns


def place_of_row(timeline: Timeline, table: str, row: Sequence[object]) -> Range | None:
    """Where a row of a capture's tables can be seen: the longest segment of that name on the critical path, else the
    first event that its longest text names, else the path's longest segment of that kind."""
    texts = [cell for cell in row if isinstance(cell, str) and cell]
    path = next((own for own in timeline.rows if own.kind == "path"), None)
    if table == "Path" and texts and path is not None:
        own = [r for r in timeline.ranges(path.key, *timeline.window_ns, _MAX_RANGES) if r.name.startswith(texts[0])]
        named = max((r for r in own if r.name.endswith(texts[-1])), key=_length_ns, default=None)
        beside = named or timeline.search(texts[-1], 0, timeline.window_ns[0] - 1)
        return beside or max(own, key=_length_ns, default=None)
    return timeline.search(max(texts, key=len), 0, timeline.window_ns[0] - 1) if texts else None


def _event_of(timeline: Timeline, culprit: Culprit) -> Range | None:
    if culprit.at_s is None:
        return None
    at_ns = round(culprit.at_s * 1e9)
    return next((r for row in timeline.rows if row.kind == "stream" and row.gpu == culprit.gpu
                 if (r := timeline.at(row.key, at_ns)) is not None and r.start_ns == at_ns), None)
