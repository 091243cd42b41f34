"""Where on a timeline a finding can be seen."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gputop.core.findings import Finding
from gputop.timeline.model import Range

if TYPE_CHECKING:
    from gputop.timeline.reader import Timeline

# Findings about a kind of work: the longest range of it stands for them.
_KINDS: dict[str, frozenset[str]] = {
    **dict.fromkeys(("communication_exposed", "allreduce_count", "allreduce_slow", "collective_waiting"),
                    frozenset({"collective"})),
    **dict.fromkeys(("copies_excessive", "copies_pageable", "sync_copies"),
                    frozenset({"h2d", "d2h", "d2d", "p2p", "copy"})),
    **dict.fromkeys(("tensor_cores_unused", "fp16_fallback", "dims_unaligned", "replica_imbalance",
                     "gpu0_oversubscribed"), frozenset({"compute"})),
}
_LONGEST = 2_000  # ranges of a GPU that are looked at
_QUOTED = re.compile(r"[“\"'`]([^”\"'`]{4,80})[”\"'`]|\b([A-Za-z_][\w:/.]*(?:::|_|/)[\w:/.]+)")


def place_of(timeline: Timeline, finding: Finding) -> int | Range | None:
    """Where a finding from a trace can be seen: the index of its costliest bubble, or a range that stands for it.

    A range is one that its text names, else the longest of the kind of work it is about. None: no such place.
    """
    for ids in ({finding.id}, finding.ids):
        for i, bubble in enumerate(timeline.bubbles):
            if bubble.finding in ids:
                return i
    before = timeline.window_ns[0] - 1
    for match in _QUOTED.finditer(f"{finding.why} {finding.action}"):
        found = timeline.search(match[1] or match[2], 0, before)
        if found is not None:
            return found
    kinds = _KINDS.get(finding.id)
    if kinds is None:
        return None
    gpus = [row for row in timeline.rows if row.kind == "gpu" and (not finding.gpus or row.gpu in finding.gpus)]
    longest = [r for row in gpus for r in timeline.ranges(row.key, *timeline.window_ns, _LONGEST) if r.kind in kinds]
    return max(longest, key=lambda r: r.end_ns - r.start_ns, default=None)
