"""Ranges of the user's that name the step or its parts, by other words than
:mod:`gputop.analysis.steps.numbered_ranges` knows: "token 7 processing", "request 17", "train_step", or forward,
backward and optimizer in turn.

NVTX in Nsight's reports, ``record_function`` in kineto's. How they are found:

1. Families on one thread of the loop: ranges that number an iteration, by their text without numbers; ranges of an
   inference engine's steps (vLLM's, SGLang's), whose numbers are sizes; ranges that a word calls the whole step, the
   model's inference or its forward pass. Names of layers, blocks, stages and other parts are none.
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

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gputop.analysis.steps.numbered_ranges import DIGITS, EVALUATES, PARTS, launches_of_rank
from gputop.analysis.steps.optimizer_calls import MAX_CHARS, OPTIMIZER_RANGE, period_of_calls, users_ranges
from gputop.trace.lookups import Mask, by_line
from gputop.trace.model import I64, Trace
from gputop.trace.threads import MAIN, lines_of

_BEFORE = r"(?:^|[^a-zA-Z]|[a-z](?=[A-Z]))"
_NUMBERED = re.compile(rf"{_BEFORE}(?i:step|iteration|iter|batch|token|request|prompt|query|inference|frame)"
                       r"[\s_:#=.\[(-]{0,4}[0-9]{1,15}(?![0-9])")
_ENGINE = re.compile(r"execute_(?:\w{1,24}_)?context_\d|step\[[A-Z]{1,24} bs=\d")
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
_KNOWN = ("named ranges",)  # the key of the mask in Trace.name_masks
# All of these are gputop's own figures.
_FEWEST = 3  # ranges
_HELD, _OF_ALL, _OF_TIME = 0.9, 0.5, 0.5  # shares of the launches meanwhile, of all launches, and of the time
_ALIKE, _FACTOR = 0.6, 2.0  # share of the ranges that launch as many as the median, within this factor
_OF_ENGINE = "of an inference engine's steps"


class NamedRanges(Struct, frozen=True):
    """Iterations of a loop by the user's ranges: ``name`` for people, and the begin and end of each (ns), in order.
    ``rows`` of the host's events are the ranges that hold an iteration; none where they are parts of it."""

    name: str
    start_ns: I64
    end_ns: I64
    rows: I64
    launches: int

    @property
    def evaluates(self) -> bool:
        return EVALUATES.search(self.name) is not None and "infer" not in self.name.lower()


def named_ranges(trace: Trace) -> NamedRanges | None:
    """The iterations of the loop; None where no ranges surely are such."""
    rows = _users_ranges(trace)
    loops = [loop for line, indices in by_line(trace.host.line[rows]).items()
             for loop in _loops(trace, rows[indices], trace.lines[line].rank)] if len(rows) else []
    return min(loops, key=lambda loop: (-loop.launches, -int((loop.end_ns - loop.start_ns).sum()), loop.name),
               default=None)


def _users_ranges(trace: Trace) -> I64:
    """Rows of the ranges on the loops' threads whose names may be of a step or a part of one."""
    host = trace.host
    rows = users_ranges(trace)
    if not len(rows):
        return rows
    rows = rows[_known_names(trace)[host.name[rows]]]
    return rows[lines_of(trace, MAIN)[host.line[rows]]]


def _known_names(trace: Trace) -> Mask:
    """Mask of ``trace.names`` that may be of such ranges, as :func:`gputop.trace.lookups.name_mask`."""
    mask = trace.name_masks.get(_KNOWN)
    if mask is None or len(mask) != len(trace.names) + 1:
        mask = np.zeros(len(trace.names) + 1, bool)
        mask[:-1] = [0 < len(name) <= MAX_CHARS and _QUICK.search(name) is not None and _NOT_USERS.match(name) is None
                     and any(pattern.search(name) for pattern in (_PART, _NUMBERED, _ENGINE, _WHOLE, OPTIMIZER_RANGE))
                     for name in trace.names]
        mask.flags.writeable = False
        trace.name_masks[_KNOWN] = mask
    return mask


def _loops(trace: Trace, rows: I64, rank: int) -> list[NamedRanges]:
    """The loops that ranges on one thread show."""
    launched_ns = launches_of_rank(trace, rank)
    loops = [*_families(trace, rows, launched_ns), *_parts_in_turn(trace, rows, launched_ns)]
    return [loop for loop in loops if _are_iterations(trace, loop, launched_ns)]


def _families(trace: Trace, rows: I64, launched_ns: I64) -> list[NamedRanges]:
    """Families of ranges that hold an iteration each (1)."""
    host = trace.host
    families = dict[str, list[int]]()
    counted = dict[str, list[tuple[int, ...]]]()
    for row in rows.tolist():
        text = trace.names[host.name[row]]
        if PARTS.search(text):
            continue
        if _ENGINE.search(text):
            families.setdefault(_OF_ENGINE, []).append(row)
        elif _NUMBERED.search(text):
            name = f'"{DIGITS.sub("N", text)}"'
            families.setdefault(name, []).append(row)
            counted.setdefault(name, []).append(tuple(map(int, DIGITS.findall(text))))
        elif _WHOLE.search(text):
            families.setdefault(f'"{text}"', []).append(row)
    # "step 3 forward" and "step 3 backward" are parts, each.
    heads = [_NUMBERED.search(name.replace("N", "0")) for name in counted]
    shared = {name for name, head in zip(counted, heads, strict=True) if head is not None and sum(
        other is not None and other[0] == head[0] for other in heads) > 1}
    return [NamedRanges(name, host.start_ns[listed], host.end_ns[listed], np.array(listed),
                        _launches(launched_ns, host.start_ns[listed], host.end_ns[listed]))
            for name, listed in families.items() if name not in shared and all(
                before < after for before, after in itertools.pairwise(counted.get(name, ())))]


def _parts_in_turn(trace: Trace, rows: I64, launched_ns: I64) -> list[NamedRanges]:
    """The loop whose steps end with the optimizer's range (2), if there is one."""
    host = trace.host
    is_optimizer, is_pass, is_part = (np.array([pattern.search(trace.names[name]) is not None for name in host.name[
        rows].tolist()]) for pattern in (OPTIMIZER_RANGE, _PASS, _PART))
    calls = _outermost(host.start_ns, host.end_ns, rows[is_optimizer])
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


def _outermost(start_ns: I64, end_ns: I64, rows: I64) -> I64:
    """Ranges in order of their begins, without those that begin within an earlier one."""
    reach = np.maximum.accumulate(end_ns[rows]) if len(rows) else rows
    return rows[np.append(True, start_ns[rows][1:] >= reach[:-1])] if len(rows) else rows


def _are_iterations(trace: Trace, loop: NamedRanges, launched_ns: I64) -> bool:
    """Return whether the ranges are regular and hold the process' work (3, 4)."""
    start, end = loop.start_ns, loop.end_ns
    if len(start) < _FEWEST or (start[1:] < end[:-1]).any():
        return False
    if not len(launched_ns):
        return not len(trace.device) and int((end - start).sum()) >= _OF_TIME * int(end[-1] - start[0])
    each = np.searchsorted(launched_ns, end) - np.searchsorted(launched_ns, start)
    usual = float(np.median(each))
    alike = (each * _FACTOR >= usual) & (each <= usual * _FACTOR)
    meanwhile = int(np.searchsorted(launched_ns, end[-1]) - np.searchsorted(launched_ns, start[0]))
    return bool(usual > 0 and alike.mean() >= _ALIKE and loop.launches >= _HELD * meanwhile
                and loop.launches >= _OF_ALL * len(launched_ns))


def _launches(launched_ns: I64, start_ns: npt.NDArray, end_ns: npt.NDArray) -> int:
    """Number of launches within these ranges, which do not overlap."""
    return int((np.searchsorted(launched_ns, end_ns) - np.searchsorted(launched_ns, start_ns)).sum())
