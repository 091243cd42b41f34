"""Ranges that number the training loop's iterations: "step 12", "iteration 12", "train_iter_12", "batch 12".

NVTX in Nsight's reports, ``record_function`` in kineto's. How they are found:

1. Names that end in such a word and a number; those that differ in numbers only are one family.
2. A family on one thread counts where it has three ranges or more, none overlaps the next, and the numbers rise, by one
   or without longer pauses than ranges. Numbers that start over count the parts of a step (micro-batches).
3. Families within one numbered range of another are its parts.
4. Of several on one thread those that do not evaluate come first, then the one in whose ranges the process launches
   most, then the longest: of steps and their parts the steps.
"""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

import numpy as np

from gputop.trace.lookups import Mask, by_line
from gputop.trace.model import I64, Trace
from gputop.trace.threads import MAIN, lines_of

_RANGE = re.compile(r"(?:^|[^a-zA-Z]|[a-z](?=[A-Z])|(?i:train|global))(?i:step|iteration|iter|batch)"
                    r"[\s_:#=.\[(-]{0,4}[0-9]{1,15}(?:/[0-9]{1,15})?[\])]?$")
PARTS = re.compile(r"(?i)micro|sub|layer|block|stage|ProfilerStep")
EVALUATES = re.compile(r"(?i)(?:^|[^a-z])(?:eval|valid|val(?![a-z])|test|predict|infer)")
DIGITS = re.compile(r"[0-9]{1,15}")
MAX_CHARS = 120  # of such a name
_FEWEST = 3  # ranges
_KNOWN = "numbered ranges"  # the key of the mask in Trace.name_masks


class NumberedRanges(NamedTuple):
    """``rows`` of the host's events are ranges of the family ``name`` ("step N"), on one thread of each process;
    ``evaluations`` those of families that evaluate beside it."""

    name: str
    rows: I64
    evaluates: bool
    evaluations: I64


class _Family(NamedTuple):
    name: str
    rows: I64
    launches: int
    time_ns: int

    @property
    def evaluates(self) -> bool:
        return EVALUATES.search(self.name) is not None

    @property
    def order(self) -> tuple[bool, int, int, str]:
        return self.evaluates, -self.launches, -self.time_ns, self.name


def numbered_ranges(trace: Trace) -> NumberedRanges | None:
    """Numbered ranges of the training loop; None where no ranges count its iterations."""
    host, mask = trace.host, _numbered(trace)
    rows = np.flatnonzero(mask[host.name]) if mask.any() else np.empty(0, np.int64)
    rows = rows[lines_of(trace, MAIN)[host.line[rows]]] if len(rows) else rows
    if len(rows) < _FEWEST:
        return None
    of_rank: dict[int, list[_Family]] = {}
    for line, indices in by_line(host.line[rows]).items():
        of_rank.setdefault(trace.lines[line].rank, []).extend(_families(trace, rows[indices], trace.lines[line].rank))
    every = [family for of_one in of_rank.values() for family in of_one]
    if not every:
        return None
    # The same family in all processes: the first of that which has most launches and time in all of them.
    sums: dict[str, _Family] = {}
    for family in every:
        before = sums.get(family.name, _Family(family.name, family.rows, 0, 0))
        sums[family.name] = before._replace(launches=before.launches + family.launches,
                                            time_ns=before.time_ns + family.time_ns)
    name = min(sums.values(), key=lambda family: family.order).name
    chosen = [min(named, key=lambda family: family.order) for families in of_rank.values()
              if (named := [family for family in families if family.name == name])]
    beside = [family.rows for family in every if family.evaluates and family.name != name]
    return NumberedRanges(name, np.sort(np.concatenate([family.rows for family in chosen])), chosen[0].evaluates,
                          np.sort(np.concatenate(beside)) if beside else np.empty(0, np.int64))


def _numbered(trace: Trace) -> Mask:
    """Mask of ``trace.names`` that are of such ranges, as :func:`gputop.trace.lookups.name_mask`."""
    mask = trace.name_masks.get(_KNOWN)
    if mask is None or len(mask) != len(trace.names) + 1:
        mask = np.zeros(len(trace.names) + 1, bool)
        mask[:-1] = [0 < len(name) <= MAX_CHARS and name[-1] in "0123456789])" and _RANGE.search(name) is not None
                      and PARTS.search(name) is None for name in trace.names]
        mask.flags.writeable = False
        trace.name_masks[_KNOWN] = mask
    return mask


def _families(trace: Trace, rows: I64, rank: int) -> list[_Family]:
    """Families of ranges on one thread that count iterations."""
    host, families = trace.host, dict[str, list[int]]()
    numbers: dict[int, tuple[int, ...]] = {}
    for row in rows.tolist():
        text = trace.names[host.name[row]]
        numbers[row] = tuple(map(int, DIGITS.findall(text)))
        families.setdefault(DIGITS.sub("N", text), []).append(row)
    launched = launches_of_rank(trace, rank)
    out = []
    for name, listed in families.items():
        ranges = np.array(listed)
        start, end = host.start_ns[ranges], host.end_ns[ranges]
        counted = [numbers[row] for row in listed]
        rises = all(before < after for before, after in itertools.pairwise(counted))
        if len(ranges) < _FEWEST or (start[1:] < end[:-1]).any() or not rises:
            continue
        by_one = sum(after[-1] - before[-1] == 1 or after[:-1] != before[:-1]
                     for before, after in itertools.pairwise(counted))
        pauses_ns, ranges_ns = int((start[1:] - end[:-1]).sum()), int((end - start).sum())
        if 2 * by_one < len(ranges) - 1 and pauses_ns > ranges_ns:
            continue  # every tenth iteration is marked
        launches = int((np.searchsorted(launched, end) - np.searchsorted(launched, start)).sum())
        out.append(_Family(name, ranges, launches, ranges_ns))
    holders = {name: holder for name, holder in families.items() if "epoch" not in name.lower()}
    return [family for family in out if not any(
        _within_one(trace, family.rows, np.array(holder)) for name, holder in holders.items() if name != family.name)]


def launches_of_rank(trace: Trace, rank: int) -> I64:
    """Times (ns), in order, at which threads of this process launched device events."""
    line, launch_ns = trace.device.launch_line, trace.device.launch_ns
    of_rank = np.array([one.rank == rank for one in trace.lines] + [False], bool)  # the last one answers for no line
    return np.sort(launch_ns[of_rank[line] & (launch_ns >= 0)])


def _within_one(trace: Trace, rows: I64, holders: I64) -> bool:
    """Return whether one of these ranges holds all of ``rows``."""
    begin, end = trace.host.start_ns[rows].min(), trace.host.end_ns[rows].max()
    return bool(((trace.host.start_ns[holders] <= begin) & (trace.host.end_ns[holders] >= end)).any())
