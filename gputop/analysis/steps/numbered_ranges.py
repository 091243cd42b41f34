"""Ranges that number the training loop's iterations: "step 12", "iteration 12", "train_iter_12", "batch 12"; or the
parts of them: "micro_batch 3".

NVTX in Nsight's reports, ``record_function`` in kineto's, annotations in XSpaces. How they are found:

1. Names that end in such a word and a number; those that differ in numbers only are one family.
2. A family on one thread, of ranges that are no calls of functions ("__inference_train_step_21889"), counts where it
   has three ranges or more, none overlaps the next, and the numbers rise, by one or without longer pauses than ranges.
3. Numbers that count up and start over, each time from the same one, make rounds. A round is a step where the name says
   that its ranges are parts of one (micro-batches, accumulation, "step 3 batch 1"), or where the optimizer runs once in
   it.
4. A range is a step where the optimizer runs otherwise. Where no optimizer shows, it is if rounds are as long as only
   epochs are, or if no range launches more than another: nothing runs once in a round. Else nothing shows which.
5. Families within one numbered range of another are its parts, and so are those that start over within the ranges of
   one that does not.
6. Of several on one thread those that do not evaluate come first, then the one in whose ranges the process launches
   most, then the longest: of steps and their parts the steps.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from gputop.analysis.steps.optimizer_calls import MAX_CHARS, updates_ns
from gputop.trace.lookups import Mask, by_line
from gputop.trace.model import I64, Trace
from gputop.trace.threads import MAIN, lines_of

_RANGE = re.compile(r"(?:^|[^a-zA-Z]|[a-z](?=[A-Z])|(?i:train|global))(?i:step|iteration|iter|batch)"
                    r"[\s_:#=.\[(-]{0,4}[0-9]{1,15}(?:/[0-9]{1,15})?[\])]?$")
# A part of a step by its name, with or without the pass after its number.
_SPLIT = re.compile(r"(?i)(?:micro[\s_-]?(?:batch|step)?|(?:gradient|grad)?[\s_-]?accum(?:ulat(?:e|ion))?"
                    r"(?:[\s_-]?(?:step|iter|iteration|batch))?|sub[\s_-]?batch|"
                    r"(?:step|iter|iteration|update)[\s_:#=.\[(-]{0,4}[0-9]{1,15}\W.{0,24}batch)"
                    r"[\s_:#=.\[(-]{0,4}[0-9]{1,15}(?:/[0-9]{1,15})?[\])]?(?:[\s_:,-]{1,3}(?:forward|backward|fwd|bwd))?$")
_WORDS = ("micro", "accum", "batch")  # one of them is in every such name
# Functions of TensorFlow's and JAX's, whose number is a part of their name.
_FUNCTION = re.compile(r"__(?:inference|forward|backward)_|[A-Z]\w*Function\(|\bjit_")
_NEVER_SPLIT = re.compile(r"(?i)layer|block|ProfilerStep")
PARTS = re.compile(r"(?i)micro|sub|layer|block|stage|ProfilerStep")
EVALUATES = re.compile(r"(?i)(?:^|[^a-z])(?:eval|valid|val(?![a-z])|test|predict|infer)")
DIGITS = re.compile(r"[0-9]{1,15}")
_FEWEST, _FEWEST_ROUNDS = 3, 2  # ranges, and whole rounds that another one follows
# A longer round is an epoch, whatever its ranges are called; such a share of rounds, or of ranges, is as the others
# are. gputop's own figures.
_MOST_PARTS, _MOST = 64, 0.9
_ENDS, _ENDS_OF_PARTS = "0123456789])", "0123456789])dD"
_KNOWN = ("numbered ranges",)  # the key of the mask in Trace.name_masks


class RepeatedSteps(Struct, frozen=True):
    """Steps of ranges whose numbers start over: ``rows``, shape (n, 2), are the first and the last range of each whole
    one, and ``parts`` says that these are several. ``end_row`` is the range that ends the last step, if it is none that
    begins another whole one."""

    rows: I64
    parts: bool = False
    end_row: int | None = None


class NumberedRanges(Struct, frozen=True):
    """``rows`` of the host's events are ranges of the family ``name`` ("step N"), on one thread of each process;
    ``evaluations`` those of families that evaluate beside it. ``repeated`` are the steps where numbers start over, of
    one process."""

    name: str
    rows: I64
    evaluates: bool
    evaluations: I64
    repeated: RepeatedSteps | None = None


class _Family(NamedTuple):
    name: str
    rows: I64
    launches: int
    time_ns: int
    repeated: RepeatedSteps | None = None

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
    # Numbers that start over do not say which steps of several processes are one: those of the first are taken.
    repeated = next((family.repeated for family in chosen if family.repeated is not None), None)
    return NumberedRanges(name, np.sort(np.concatenate([family.rows for family in chosen])), chosen[0].evaluates,
                          np.sort(np.concatenate(beside)) if beside else np.empty(0, np.int64), repeated)


def _numbered(trace: Trace) -> Mask:
    """Mask of ``trace.names`` that are of such ranges, as :func:`gputop.trace.lookups.name_mask`."""
    mask = trace.name_masks.get(_KNOWN)
    if mask is None or len(mask) != len(trace.names) + 1:
        mask = np.zeros(len(trace.names) + 1, bool)
        mask[:-1] = [0 < len(name) <= MAX_CHARS and (_names_iteration(name) or names_parts(name))
                     for name in trace.names]
        mask.flags.writeable = False
        trace.name_masks[_KNOWN] = mask
    return mask


def _names_iteration(name: str) -> bool:
    return (name[-1:] in _ENDS and _RANGE.search(name) is not None and PARTS.search(name) is None
            and _FUNCTION.search(name) is None)


def names_parts(name: str) -> bool:
    """Return whether the name of a range, with its number, says that it is a part of a step."""
    if name[-1:] not in _ENDS_OF_PARTS or len(name) > MAX_CHARS:
        return False
    lower = name.lower()
    return (any(word in lower for word in _WORDS) and _SPLIT.search(name) is not None
            and _NEVER_SPLIT.search(name) is None)


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
        if len(ranges) < _FEWEST or (start[1:] < end[:-1]).any():
            continue
        steps, first_name = None, trace.names[host.name[ranges[0]]]
        by_name, rise = names_parts(first_name), _rise(counted)
        if by_name or not rise:
            if not _counts_up(counted):
                continue
            steps = repeated_steps(trace, ranges, counted, rank, by_name=by_name)
            if steps is None and not (rise and _names_iteration(first_name)):
                continue
        by_one = sum(after[-1] - before[-1] == 1 or after[:-1] != before[:-1] or after <= before
                     for before, after in itertools.pairwise(counted))
        pauses_ns, ranges_ns = int((start[1:] - end[:-1]).sum()), int((end - start).sum())
        if 2 * by_one < len(ranges) - 1 and pauses_ns > ranges_ns:
            continue  # every tenth iteration is marked
        launches = int((np.searchsorted(launched, end) - np.searchsorted(launched, start)).sum())
        out.append(_Family(name, ranges, launches, ranges_ns, steps))
    holders = {name: holder for name, holder in families.items() if "epoch" not in name.lower()}
    rising = [family.rows for family in out if family.repeated is None]
    return [family for family in out if not any(
        _within_one(trace, family.rows, np.array(holder)) for name, holder in holders.items() if name != family.name)
        and (family.repeated is None or not any(_mostly_within(trace, family.rows, other) for other in rising))]


def _counts_up(counted: Sequence[tuple[int, ...]]) -> bool:
    """Return whether half of the numbers follow the one before: in rounds of two as many start over."""
    ups = sum(after[-1] - before[-1] == 1 for before, after in itertools.pairwise(counted))
    return 2 * ups >= len(counted) - 1


def _rise(counted: Sequence[tuple[int, ...]]) -> bool:
    return all(before < after for before, after in itertools.pairwise(counted))


def repeated_steps(trace: Trace, ranges: I64, counted: Sequence[tuple[int, ...]], rank: int, *,
                   by_name: bool) -> RepeatedSteps | None:
    """The steps of ranges on one thread of a process whose numbers start over, or which are parts ``by_name`` (3, 4);
    None where nothing shows them."""
    each = RepeatedSteps(np.stack((ranges, ranges), axis=1))
    start = trace.host.start_ns[ranges]
    updated = np.diff(np.searchsorted(updates_ns(trace, rank)[0], start)) > 0
    if float(updated.mean()) >= _MOST:
        return each
    breaks = [i + 1 for i, (before, after) in enumerate(itertools.pairwise(counted))
              if after <= before or (by_name and after[:-1] != before[:-1])]
    if by_name and not breaks:
        breaks = (np.flatnonzero(updated) + 1).tolist()
    elif len({counted[i][-1] for i in breaks}) > 1:
        return None
    if not breaks:
        return None
    starts_whole = counted[0][-1] == counted[breaks[0]][-1]
    first = np.array([0, *breaks] if starts_whole else breaks)
    length = np.diff(first)  # of the last round it is not known whether it is whole
    usual = int(np.median(length)) if len(length) else 0
    whole = len(length) >= _FEWEST_ROUNDS and usual > 1 and float((length == usual).mean()) >= _MOST
    updates = np.diff(np.append(0, np.cumsum(updated))[first])
    if whole and (by_name or float((updates == 1).mean()) >= _MOST):
        last_is_whole = len(ranges) - first[-1] == usual
        rounds = np.stack((first, np.append(first[1:], len(ranges)) - 1), axis=1)[:None if last_is_whole else -1]
        return RepeatedSteps(ranges[rounds], parts=True, end_row=None if last_is_whole else int(ranges[first[-1]]))
    if by_name:
        return None
    launches = np.diff(np.searchsorted(launches_of_rank(trace, rank), start))
    alike = not updated.any() and launches.min() == launches.max() > 0
    return each if alike or max(number[-1] for number in counted) >= _MOST_PARTS else None


def launches_of_rank(trace: Trace, rank: int) -> I64:
    """Times (ns), in order, at which threads of this process launched device events."""
    line, launch_ns = trace.device.launch_line, trace.device.launch_ns
    of_rank = np.array([one.rank == rank for one in trace.lines] + [False], bool)  # the last one answers for no line
    return np.sort(launch_ns[of_rank[line] & (launch_ns >= 0)])


def _within_one(trace: Trace, rows: I64, holders: I64) -> bool:
    """Return whether one of these ranges holds all of ``rows``."""
    begin, end = trace.host.start_ns[rows].min(), trace.host.end_ns[rows].max()
    return bool(((trace.host.start_ns[holders] <= begin) & (trace.host.end_ns[holders] >= end)).any())


def _mostly_within(trace: Trace, rows: I64, holders: I64) -> bool:
    """Return whether most of these ranges lie in one of the ``holders``, which do not overlap."""
    host = trace.host
    holder = np.searchsorted(host.start_ns[holders], host.start_ns[rows], side="right") - 1
    return float(((holder >= 0) & (host.end_ns[holders[holder]] >= host.end_ns[rows])).mean()) >= _MOST
