"""Ranges of the user's that mark the iterations of a loop: NVTX in Nsight's reports, ``record_function`` in kineto's,
annotations in XSpaces.

Numbered ranges number the training loop's iterations: "step 12", "iteration 12", "train_iter_12", "batch 12"; or the
parts of them: "micro_batch 3".

How they are found:

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

Named ranges name the step or its parts by other words: "token 7 processing", "request 17", "train_step", or forward,
backward and optimizer in turn.

How they are found:

1. Families on one thread of the loop: ranges that number an iteration, by their text without numbers; ranges of an
   inference engine's steps (vLLM, SGLang, TensorRT-LLM), whose numbers are sizes: one is enough, and those that prefill
   are told from those that decode; ranges that a word calls the whole step, the model's inference or its forward pass.
   Names of layers, blocks, stages and other parts are none.
2. Parts in turn: a step ends with a range of the optimizer and begins with the first range that follows the one before
   and names a part of the step (data, gradients to zero, forward, loss, backward). Between two optimizers lies a
   forward or a backward pass, else these are none. Where one step calls several optimizers (a GAN's), their names and
   the launches before each come again after that many. The first is left out if its begin was not recorded.
3. Both count where there are three or more, none overlaps the next, numbers rise, and most of them launch about as
   much as their median.
4. They hold nearly all that their process launches from the first of them to the last, and half of what it launches in
   the recording. In a trace without a GPU they take half of that time.
5. Of several the one with most launches counts, then the one that takes longest: of steps and their parts the steps.

A layer repeats within one forward pass as steps do within a loop. So what no word calls a step is none, however regular
it is.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gputop.analysis.steps.optimizer_calls import (
    MAX_CHARS,
    OPTIMIZER_RANGE,
    period_of_calls,
    updates_ns,
    users_ranges,
)
from gputop.analysis.steps.phases import SERVES
from gputop.trace.intervals import Spans
from gputop.trace.lookups import by_line, host_rows, name_mask, outermost_rows, spans_of
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
_PARTS = re.compile(r"(?i)micro|sub|layer|block|stage|ProfilerStep")
_EVALUATES = re.compile(r"(?i)(?:^|[^a-z])(?:eval|valid|val(?![a-z])|test|predict|infer)")
_DIGITS = re.compile(r"[0-9]{1,15}")
_FEWEST, _FEWEST_ROUNDS = 3, 2  # ranges, and whole rounds that another one follows
# A longer round is an epoch, whatever its ranges are called; such a share of rounds, or of ranges, is as the others
# are. gputop's own figures.
_MOST_PARTS, _MOST = 64, 0.9
_ENDS, _ENDS_OF_PARTS = "0123456789])", "0123456789])dD"

# of named ranges
_BEFORE = r"(?:^|[^a-zA-Z]|[a-z](?=[A-Z]))"
_NUMBERED = re.compile(rf"{_BEFORE}(?i:step|iteration|iter|batch|token|request|prompt|query|inference|frame)"
                       r"[\s_:#=.\[(-]{0,4}[0-9]{1,15}(?![0-9])")
_ENGINE = re.compile(r"execute_(?:\w{1,24}_)?(?:context|new)_\d|step\[[A-Z_]{1,24} bs=\d|"
                     r"_forward_step \d+: \d+ ctx req")
_DECODES = re.compile(r"execute_(?:\w{1,24}_)?(?:context|new)_0(?!\d)|step\[(?:DECODE|TARGET_VERIFY|DRAFT)|"
                      r"_forward_step \d+: 0 ctx req")
_WHOLE = re.compile(
    rf"{_BEFORE}(?i:(?:train(?:ing)?|eval(?:uation)?|valid(?:ation)?|test|inference|predict(?:ion)?|decod(?:e|ing)|"
    r"generation|one|run|process)[ _.:-]?(?:step|iteration|iter|batch)|step|iteration|"
    r"(?:model[ _.:-]?)?inference|model[ _.:-]?forward(?:[ _.:-]?pass)?)\W{0,8}$")
_PART = re.compile(rf"{_BEFORE}(?i:data|load(?:er|ing)?|batch|h2d|zero[ _]?grad|forward|fwd|loss|criterion|backward|"
                   r"bwd|optim(?:izer)?)(?![a-z])")
_PASS = re.compile(rf"{_BEFORE}(?i:forward|fwd|backward|bwd)(?![a-z])")
# Ranges of PyTorch's own, and calls of CUDA's and HIP's runtime and driver.
_NOT_USERS = re.compile(r"Optimizer\.(?:step|zero_grad)#|ProfilerStep#|DistributedDataParallel\.|enumerate\(|\{|\w+::|"
                        r"\w*Backward\d|(?:cuda|cu|hip)[A-Z]")
_QUICK = re.compile(r"(?i)step|iter|batch|token|request|prompt|query|infer|frame|execute_|data|load|h2d|zero|forward|"
                    r"fwd|loss|criterion|backward|bwd|opt")  # a part of every such name
# All of these are gputop's own figures.
_HELD, _OF_ALL, _OF_TIME = 0.9, 0.5, 0.5  # shares of the launches meanwhile, of all launches, and of the time
_ALIKE, _FACTOR = 0.6, 2.0  # share of the ranges that launch as many as the median, within this factor
OF_ENGINE = "of an inference engine's steps"  # of one kind: that prefill, or that decode


# -- numbered ranges ---------------------------------------------------------------------------------


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
        return _EVALUATES.search(self.name) is not None

    @property
    def order(self) -> tuple[bool, int, int, str]:
        return self.evaluates, -self.launches, -self.time_ns, self.name


def numbered_ranges(trace: Trace) -> NumberedRanges | None:
    """Numbered ranges of the training loop; None where no ranges count its iterations."""
    host, rows = trace.host, host_rows(trace, _may_count_iterations, lines_of(trace, MAIN))
    if len(rows) < _FEWEST:
        return None
    of_rank: dict[tuple[str, int], _Family] = {}  # of several threads of a process the one with most launches and time
    for line, indices in by_line(host.line[rows]).items():
        for family in _families(trace, rows[indices], trace.lines[line].rank):
            key = family.name, trace.lines[line].rank
            of_rank[key] = min(of_rank.get(key, family), family, key=lambda one: one.order)
    if not of_rank:
        return None
    # The same family in all processes: the first of that which has most launches and time in all of them.
    sums: dict[str, _Family] = {}
    for family in of_rank.values():
        before = sums.get(family.name, _Family(family.name, family.rows, 0, 0))
        sums[family.name] = before._replace(launches=before.launches + family.launches,
                                            time_ns=before.time_ns + family.time_ns)
    name = min(sums.values(), key=lambda family: family.order).name
    chosen = [family for family in of_rank.values() if family.name == name]
    beside = [family.rows for family in of_rank.values() if family.evaluates and family.name != name]
    # Numbers that start over do not say which steps of several processes are one: those of the first are taken.
    repeated = next((family.repeated for family in chosen if family.repeated is not None), None)
    return NumberedRanges(name, np.sort(np.concatenate([family.rows for family in chosen])), chosen[0].evaluates,
                          np.sort(np.concatenate(beside)) if beside else np.empty(0, np.int64), repeated)


def _may_count_iterations(name: str) -> bool:
    return _names_iteration(name) or names_parts(name)


def _names_iteration(name: str) -> bool:
    return (name[-1:] in _ENDS and len(name) <= MAX_CHARS and _RANGE.search(name) is not None
            and _PARTS.search(name) is None and _FUNCTION.search(name) is None)


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
        numbers[row] = tuple(map(int, _DIGITS.findall(text)))
        families.setdefault(_DIGITS.sub("N", text), []).append(row)
    launched = _launches_of_rank(trace, rank)
    out = []
    for name, listed in families.items():
        ranges = np.array(listed)
        start, end = host.start_ns[ranges], host.end_ns[ranges]
        counted = [numbers[row] for row in listed]
        if len(ranges) < _FEWEST or (start[1:] < end[:-1]).any():
            continue
        steps, first_name = None, trace.names[host.name[ranges[0]]]
        by_name, rise = names_parts(first_name), all(a < b for a, b in itertools.pairwise(counted))
        if by_name or not rise:
            ups = sum(after[-1] - before[-1] == 1 for before, after in itertools.pairwise(counted))
            if 2 * ups < len(counted) - 1:  # in rounds of two as many start over
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
    launches = np.diff(np.searchsorted(_launches_of_rank(trace, rank), start))
    alike = not updated.any() and launches.min() == launches.max() > 0
    return each if alike or max(number[-1] for number in counted) >= _MOST_PARTS else None


def _launches_of_rank(trace: Trace, rank: int) -> I64:
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


# -- named ranges ------------------------------------------------------------------------------------


class NamedRanges(Struct, frozen=True):
    """Iterations of a loop by the user's ranges: ``name`` for people, and the begin and end of each (ns), in order.
    ``rows`` of the host's events are the ranges that hold an iteration; none where they are parts of it."""

    name: str
    start_ns: I64
    end_ns: I64
    rows: I64
    launches: int
    others: Mapping[str, Spans] = {}  # of an inference engine: the steps of the other kind

    @property
    def evaluates(self) -> bool:
        return _EVALUATES.search(self.name) is not None and "infer" not in self.name.lower()


def named_ranges(trace: Trace) -> NamedRanges | None:
    """The iterations of the loop; None where no ranges surely are such."""
    rows = users_ranges(trace)
    if len(rows):  # the names of these may be of a step or a part of one
        rows = rows[name_mask(trace, _may_name_a_step, on_host=True)[trace.host.name[rows]]]
    rows = rows[lines_of(trace, MAIN)[trace.host.line[rows]]]
    loops = [loop for line, indices in by_line(trace.host.line[rows]).items()
             for loop in _loops(trace, rows[indices], trace.lines[line].rank)] if len(rows) else []
    return min(loops, key=lambda loop: (-loop.launches, -int((loop.end_ns - loop.start_ns).sum()), loop.name),
               default=None)


def _may_name_a_step(name: str) -> bool:
    return (len(name) <= MAX_CHARS and _QUICK.search(name) is not None and _NOT_USERS.match(name) is None
            and any(pattern.search(name) for pattern in (_PART, _NUMBERED, _ENGINE, _WHOLE, OPTIMIZER_RANGE)))


def _loops(trace: Trace, rows: I64, rank: int) -> list[NamedRanges]:
    launched_ns = _launches_of_rank(trace, rank)
    loops = [*_families_of_words(trace, rows, launched_ns), *_parts_in_turn(trace, rows, launched_ns)]
    return [loop for loop in loops if _are_iterations(trace, loop, launched_ns)]


def _families_of_words(trace: Trace, rows: I64, launched_ns: I64) -> list[NamedRanges]:
    """Families of ranges that hold an iteration each (1)."""
    host = trace.host
    families = dict[str, list[int]]()
    engine = list[int]()
    counted = dict[str, list[tuple[int, ...]]]()
    for row in rows.tolist():
        text = trace.names[host.name[row]]
        if _PARTS.search(text):
            continue
        if _ENGINE.search(text):
            engine.append(row)
        elif _NUMBERED.search(text):
            name = f'"{_DIGITS.sub("N", text)}"'
            families.setdefault(name, []).append(row)
            counted.setdefault(name, []).append(tuple(map(int, _DIGITS.findall(text))))
        elif _WHOLE.search(text):
            families.setdefault(f'"{text}"', []).append(row)
    # "step 3 forward" and "step 3 backward" are parts, each.
    heads = [_NUMBERED.search(name.replace("N", "0")) for name in counted]
    shared = {name for name, head in zip(counted, heads, strict=True) if head is not None and sum(
        other is not None and other[0] == head[0] for other in heads) > 1}
    loops = [NamedRanges(name, host.start_ns[listed], host.end_ns[listed], np.array(listed),
                         _launches(launched_ns, host.start_ns[listed], host.end_ns[listed]))
             for name, listed in families.items() if name not in shared and all(
                 before < after for before, after in itertools.pairwise(counted.get(name, ())))]
    return [*loops, _of_engine(trace, np.array(engine), launched_ns)] if engine else loops


def _of_engine(trace: Trace, rows: I64, launched_ns: I64) -> NamedRanges:
    """The steps of an inference engine that prefill, or those that decode, whichever take more time."""
    host = trace.host
    rows = outermost_rows(trace, rows)
    decodes = np.array([_DECODES.search(trace.names[name]) is not None for name in host.name[rows].tolist()])
    kinds = {phase: rows[decodes == (phase == "decode")] for phase in SERVES}
    steps = max(kinds, key=lambda phase: int((host.end_ns[kinds[phase]] - host.start_ns[kinds[phase]]).sum()))
    others = {phase: spans_of(trace, of_phase) for phase, of_phase in kinds.items() if phase != steps and len(of_phase)}
    chosen, name = kinds[steps], f"{OF_ENGINE} that {steps}"
    return NamedRanges(name, host.start_ns[chosen], host.end_ns[chosen], chosen,
                       _launches(launched_ns, host.start_ns[rows], host.end_ns[rows]), others)


def _parts_in_turn(trace: Trace, rows: I64, launched_ns: I64) -> list[NamedRanges]:
    """The loop whose steps end with the optimizer's range (2), if there is one."""
    host = trace.host
    is_optimizer, is_pass, is_part = (np.array([pattern.search(trace.names[name]) is not None for name in host.name[
        rows].tolist()]) for pattern in (OPTIMIZER_RANGE, _PASS, _PART))
    calls = outermost_rows(trace, rows[is_optimizer])
    parts = rows[(is_part & ~is_optimizer) | is_pass]
    passes = rows[is_pass & ~is_optimizer]
    if len(calls) < _FEWEST:
        return []
    begins, ends = host.start_ns[calls], host.end_ns[calls]
    after = np.append(np.iinfo(np.int64).min, ends[:-1])
    held = np.searchsorted(host.start_ns[passes], begins) - np.searchsorted(host.start_ns[passes], after)
    first = np.searchsorted(host.start_ns[parts], after)
    if not held.all():
        return []
    sequences = [host.name[parts[low:high]].tobytes() for low, high in zip(
        first.tolist(), np.searchsorted(host.start_ns[parts], begins).tolist(), strict=True)]
    if sequences[0] not in sequences[1:]:  # its begin is not in the recording
        calls, begins, ends, first = calls[1:], begins[1:], ends[1:], first[1:]
    start = host.start_ns[parts[first]]
    launches = np.searchsorted(launched_ns, ends) - np.searchsorted(launched_ns, start)
    period = period_of_calls(host.name[calls], launches[1:])
    whole = len(calls) // period * period
    start, end = start[:whole:period], ends[period - 1:whole:period]
    name = f'"{trace.names[host.name[calls[0]]]}" after the passes'
    return [NamedRanges(name, start, end, calls[:0], _launches(launched_ns, start, end))]


def _are_iterations(trace: Trace, loop: NamedRanges, launched_ns: I64) -> bool:
    """Return whether the ranges are regular and hold the process' work (3, 4)."""
    start, end, surely = loop.start_ns, loop.end_ns, loop.name.startswith(OF_ENGINE)
    if len(start) < (1 if surely else _FEWEST) or (start[1:] < end[:-1]).any():
        return False
    if not len(launched_ns):
        return not len(trace.device) and int((end - start).sum()) >= _OF_TIME * int(end[-1] - start[0])
    each = np.searchsorted(launched_ns, end) - np.searchsorted(launched_ns, start)
    usual = float(np.median(each))
    alike = (each * _FACTOR >= usual) & (each <= usual * _FACTOR)
    meanwhile = int(np.searchsorted(launched_ns, end[-1]) - np.searchsorted(launched_ns, start[0]))
    return bool(usual > 0 and (surely or alike.mean() >= _ALIKE) and loop.launches >= _HELD * meanwhile
                and loop.launches >= _OF_ALL * len(launched_ns))


def _launches(launched_ns: I64, start_ns: npt.NDArray, end_ns: npt.NDArray) -> int:
    """Number of launches within these ranges, which do not overlap."""
    return int((np.searchsorted(launched_ns, end_ns) - np.searchsorted(launched_ns, start_ns)).sum())
