"""Timelines of traces for tests, and the plain truth about a row to hold against them."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import BinaryIO

from gputop.advice.trace.facts import TraceFacts
from gputop.diagnosis.diagnose import analyze_to_facts
from gputop.timeline.build import RowsWritten
from gputop.timeline.file_layout import Extent
from gputop.timeline.idle_gaps import LIMIT, rank_idle_gaps
from gputop.timeline.model import KINDS, IdleGap, Range
from gputop.timeline.read_timeline import Timeline
from gputop.trace.model import Trace

FIRST = ("compute", "d2d", "memset", "copy", "collective", "p2p", "h2d", "d2h", "input", "host")


def find_idle_gaps(facts: TraceFacts, limit: int = LIMIT) -> tuple[IdleGap, ...]:
    """The most costly idle gaps alone."""
    return tuple(found.idle_gap for found in rank_idle_gaps(facts, limit).ranked)


def build(facts: TraceFacts, file: BinaryIO) -> Extent:
    """Write the whole timeline to an empty file."""
    return RowsWritten(facts.trace, facts.steps, file).finish(facts)


def timeline_of(trace: Trace | TraceFacts) -> Timeline:
    with tempfile.TemporaryFile() as file:
        return Timeline.open(file, build(analyze_to_facts(trace) if isinstance(trace, Trace) else trace, file))


@dataclass(frozen=True)
class Plain:
    """All ranges of a timeline as lists; times are few enough to go through instant by instant."""

    rows: dict[int, list[Range]]

    @classmethod
    def of(cls, timeline: Timeline) -> Plain:
        own = {row.key: [timeline.range(row.key, i) for i in range(timeline.count(row.key, -10**18, 10**18))]
               for row in timeline.rows if row.kind != "gpu"}
        for row in timeline.rows:
            if row.kind == "gpu":
                own[row.key] = [r for other in timeline.rows if other.kind == "stream" and other.gpu == row.gpu
                                for r in own[other.key]]
        return cls(own)

    def kind_at(self, row: int, time_ns: int) -> str:
        kinds = {r.kind for r in self.rows[row] if r.start_ns <= time_ns < r.end_ns}
        return next((kind for kind in FIRST if kind in kinds), "")

    def column(self, row: int, low: int, high: int) -> tuple[float, int]:
        """Share covered, and the index of the kind that covers most; of equal ones the first of FIRST."""
        seen = [self.kind_at(row, time) for time in range(low, high)]
        covered = [kind for kind in seen if kind]
        if not covered:
            return 0.0, 0
        return len(covered) / len(seen), KINDS.index(max(FIRST, key=covered.count))

    def gaps(self, row: int) -> list[tuple[int, int]]:
        ranges = sorted((r.start_ns, r.end_ns) for r in self.rows[row] if r.end_ns > r.start_ns)
        out, reach = [], ranges[0][1] if ranges else 0
        for start, end in ranges:
            if start > reach:
                out.append((reach, start))
            reach = max(reach, end)
        return out
