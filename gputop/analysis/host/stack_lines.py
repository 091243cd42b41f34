"""Lines of Python that ran in the gaps of the steps, by stacks that were sampled while the job was captured, or by the
functions that the profiler's own tracer recorded.

Samples and trace have the Unix time of one machine. A gap counts as seen where a sampled stack changed in it or where
it is so long that a sample fell into it with a probability of 95%, or where the stack that goes on in it is one of
gaps: seen first in gaps, and hardly outside. Of other short gaps nothing is known: the stack of the step, which was
seen before, would be charged with them. Neither is anything known of gaps within twice the error of the samples' time,
and a line that was seen first outside of gaps as often as in them is none of theirs. A tracer tells of every gap
between its first call and its last.

Where most gaps between steps are so short, the loop itself tells what fills them, whatever the samples' clock: what a
function calls below the line from which it calls PyTorch's optimizer, or what Keras's callbacks do after each batch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise, takewhile

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gputop.analysis.gpu.breakdown import parts_by_gpu
from gputop.analysis.gpu.device_time import GpuTimeline
from gputop.analysis.host.host_causes import HostCauses
from gputop.analysis.host.python_stacks import PythonStacks, StackSpans, line_text, sampled_stacks
from gputop.analysis.host.python_tracer import tells_lines, traced_stacks
from gputop.analysis.host.work_kinds import SAVES_CHECKPOINT
from gputop.analysis.results import FlameNode, GapLines, HostStacks, StackLine
from gputop.analysis.steps.compilations import PJIT
from gputop.analysis.steps.model import Steps
from gputop.analysis.steps.training_loops import GRAIN, loads_itself, training_loops
from gputop.core.host_stacks import StackFrame
from gputop.trace.intervals import EMPTY, Spans, contains, coverage, intersect, joined, merge, overlap, subtract, union
from gputop.trace.lookups import name_mask
from gputop.trace.model import I64, Trace

INPUT_GAP, EAGER_GAP, PLACEMENT_GAP = "input", "eager", "placement"
GAPS = ("gap", INPUT_GAP, "tracing", EAGER_GAP, PLACEMENT_GAP, "dispatch")
_BELOW = "below"  # all that the loop calls below its step
CALLS_GAP = "calls"  # in which the line counts from which the loop calls, not the one that runs
_NO_GAPS_ON_CPU = ("dispatch",)  # without a GPU it holds the computing
# Where TensorFlow and JAX call the user's Python in the midst of a compiled function, on any thread.
_CALLS_BACK = re.compile(r"(?:^|/)(?:script_ops|_src/callback|_src/debugging)\.py$|^(?:callback|debugging)\.py$")
_SAMPLED_INTERVALS = 3.0  # mean intervals: of random samples 95% of such gaps have one
# Share of the stacks first seen outside of gaps: a line in so many is around the steps and tells of no gap.
_ENCLOSING_SHARE = 0.5
TOP = 8
_MOST_LINES = 4 * TOP
_SCATTERED = 0.2  # share of the gaps' time: no line takes so much of it
_MIN_SHARE = 0.01
_FEW_GAPS, _MOST = 3, 0.5  # that were seen: of fewer no lines are told, unless these are all, or most of the time
_GAP_RATIO = 2.0
_PASSES_ON = 0.98  # share of a line's time in the one line that it calls
_FLAME_SHARE, _FLAME_NODES, _FLAME_DEPTH = 0.005, 400, 60
# A call that steps hardly make takes less than this share of them. So many samples of it in a row come by chance
# once in a million steps. gputop's own figures.
_SELDOM, _CHANCE, _FEW_SAMPLES = 0.05, 1e-6, 20
_SHORTEST_PAUSE_NS = 250_000_000


def seen_gaps(gaps: Spans, spans: StackSpans, rate_hz: float) -> Spans:
    """The gaps of which the samples of a thread tell."""
    if not len(spans.start):
        return EMPTY
    changes = np.searchsorted(spans.seen, gaps.end, side="right") - np.searchsorted(spans.seen, gaps.start)
    sampled = (gaps.start >= spans.seen[0]) & (gaps.end <= spans.end[-1])
    certain = gaps.end - gaps.start >= _SAMPLED_INTERVALS * 1e9 / rate_hz
    is_seen = (changes > 0) | (sampled & certain)
    return Spans(gaps.start[is_seen], gaps.end[is_seen])


# Files of what makes batches, by name.
_LOADERS = {name: re.compile(rf"(?:^|/){path}/") for name, path in (
    ("grain", "grain"), ("keras", "keras/src/trainers/data_adapters"), ("torch", "torch/utils/data"),
    ("datasets", "datasets"))}


# What a step of PyTorch's runs, by file and function.
_STEP = re.compile(r"(?:^|/)torch/(?:nn/modules/\S+ (?:\S+\.)?(?:\w*call_impl|forward)$|nn/functional|"
                   r"autograd/(?:graph|__init__)\.|optim/\S+ \S*(?:step|_use_grad|zero_grad)|utils/data/)")
_OPTIMIZER = re.compile(r"(?:^|/)torch/optim/\S+ \S*(?:step|_use_grad)")
_FRAMEWORK = re.compile(r"(?:^|/)(?:torch|tensorflow|keras|jax)/")  # whose own calls tell less than what runs in them
_AFTER_BATCH = re.compile(r"(?:^|/)callbacks(?:/callback_list)?\.py \S*on_train_batch_")  # of Keras's fit()
_TORN = 0.02  # share of the samples whose stack may be of two moments, as the job is not stopped for them
# Names of functions of the user's that make a batch, and of those in whose calls nothing does.
_MAKES_BATCH = re.compile(r"\w*(?:batch|augment|collate|transform|pre_?process|tokeni[sz]|__getitem__|decode|read_|"
                          r"load_(?:image|data|file|sample))")
_OTHER_WORK = re.compile(r"on_|eval|valid|test_|predict|train_|log|metric|loss|update|save|plot|show")


def loader_of_frames(python: PythonStacks) -> list[str]:
    """The library that makes batches of which each frame is, by name; "": none."""
    return [next((name for name, path in _LOADERS.items() if library and path.search(frame.file)), "")
            for frame, library in zip(python.frames, python.of_library, strict=True)]


class _Telling(Struct, frozen=True):
    """Indices by stack of the frame that says most, of the outermost one that could, and of the innermost one of all;
    -1: the stack says nothing. ``elsewhere``: by frame, whether the loop was seen to begin it outside of gaps as often
    as in them, and to run it there as long."""

    line: I64
    outer: I64
    leaf: I64
    elsewhere: npt.NDArray[np.bool_]

    def by_line(self, of_stack: I64) -> I64:
        """Figures of the stacks, added up by frame."""
        tells = self.line >= 0
        return np.bincount(self.line[tells], of_stack[tells], len(self.elsewhere)).astype(np.int64)


class Lines:
    """The lines of one process on a trace's clock: asked for gaps, answers with their lines."""

    def __init__(self, python: PythonStacks, outside: Spans, gaps: Spans = EMPTY, *, queues: bool = False) -> None:
        """``outside``: time in which the training loop runs the step; ``gaps``: all that will be asked for;
        ``queues``: the step's calls return before its work is done."""
        self.python, self.within, loop = python, merge(outside, gaps), python.loop
        self._loader_of = loader_of_frames(python)
        self._loads = np.array([any(self._loader_of[frame] for frame in stack) for stack in python.stacks], bool)
        saves = [library is not False and SAVES_CHECKPOINT.match(f"{frame.file} {frame.function}") is not None
                 for frame, library in zip(python.frames, python.of_library, strict=True)]
        # The outermost function of a library that saves a checkpoint in each stack; -1: none.
        self._saves = np.array([next((frame for frame in stack if saves[frame]), -1) for stack in python.stacks],
                               np.int64)
        self._in_steps = self._by_stack(coverage(outside, loop.start, loop.end))
        self._around = self._frames_around(outside) - (self._beside(outside) if queues else frozenset())
        within = (gaps, outside)
        begun = [self._by_stack(coverage(spans, loop.seen, loop.seen + 1)) for spans in within]
        # Those first seen in gaps at least so many times as often as outside of them.
        self._of_gaps = np.flatnonzero((begun[0] > _GAP_RATIO * begun[1]) & (not python.exact))
        self._telling = {worker: self._frames_that_tell(worker, self._around) for worker in (False, True)}
        if len(gaps.start) and not python.exact:
            ran = [self._by_stack(coverage(spans, loop.start, loop.end)) for spans in within]
            for telling in self._telling.values():
                telling.elsewhere[:] = np.all([telling.by_line(in_steps) >= np.maximum(telling.by_line(in_gaps), 1)
                                               for in_gaps, in_steps in (begun, ran)], axis=0)
        self._telling_of_callbacks = self._frames_called_back()
        # A line that starts small ops one by one runs in the ops, too, and in the pauses of a thread without a CPU.
        training, below, holds = self._around_the_update()
        self._telling_of_ops, self._telling_below = (self._frames_that_tell(False, around) for around in (
            frozenset[int](), holds))
        self._telling_of_ops.line[below] = -1
        self._telling_below.line[~below] = -1
        self._telling[False].line[training] = -1  # a thread without a CPU pauses there, too

    def _threads(self, kind: str) -> list[tuple[StackSpans, bool]]:
        """Threads whose Python shows such gaps, and whether only the user's own code in it does: in waits for input the
        loop stands still and other threads go on."""
        if kind == PLACEMENT_GAP:
            return [(self.python.loop, False), *((spans, True) for spans in self.python.others)]
        if kind != INPUT_GAP:
            return [(self.python.loop, False)]
        loop = [(self.python.loop, True)] if self.python.loop_loads else []
        # A thread that stands where it stood at first has made none of the batches.
        return [*loop, *((spans, True) for spans in self.python.others if len(spans.seen) > 1 or self.python.exact)]

    def seen(self, gaps: Spans, kind: str = "gap") -> Spans:
        """Gaps that the stacks cover."""
        python = self.python
        if kind != EAGER_GAP:
            long = gaps.end - gaps.start >= 2 * python.error_ns
            gaps = Spans(gaps.start[long], gaps.end[long])
        if python.exact or kind == EAGER_GAP:
            begin, end = python.loop.start[:1].min(initial=0), python.loop.end[-1:].max(initial=0)
            is_seen = ((gaps.end > begin) & (gaps.start < end) if python.exact else
                       (gaps.start >= begin) & (gaps.end <= end))
            return Spans(gaps.start[is_seen], gaps.end[is_seen])
        sampled = [python.loop, *(python.others if kind == INPUT_GAP else ())]
        return merge(self._going_on(gaps), *(seen_gaps(gaps, spans, python.rate_hz) for spans in sampled))

    def _going_on(self, gaps: Spans) -> Spans:
        """Gaps in the middle of which the training loop has a stack of gaps."""
        spans = self.python.loop
        of_gaps = np.flatnonzero(np.isin(spans.stack, self._of_gaps))
        middle = gaps.start + (gaps.end - gaps.start) // 2
        goes_on = contains(Spans(spans.start[of_gaps], spans.end[of_gaps]), middle)
        return Spans(gaps.start[goes_on], gaps.end[goes_on])

    def _around_the_update(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_], frozenset[int]]:
        """Masks of the stacks that run the step in a function that calls the optimizer, up to the line from which it
        does so, and of those without the step below that line, or in a callback after a batch; and the lines around
        such callbacks."""
        python, calls = self.python, dict[tuple[str, str], dict[int, int]]()
        times = self._by_stack(coverage(self.within, python.loop.start, python.loop.end))
        of_step, of_optimizer, of_callbacks = ([pattern.search(f"{frame.file} {frame.function}") is not None
                                                for frame in python.frames]
                                               for pattern in (_STEP, _OPTIMIZER, _AFTER_BATCH))
        runs = np.array([any(of_step[frame] for frame in stack) for stack in python.stacks], bool)
        after_batch = np.array([any(of_callbacks[frame] for frame in stack) for stack in python.stacks], bool)
        users = [[python.frames[frame] for frame in python.own(stack)] for stack in range(len(python.stacks))]
        for stack, frames in enumerate(users):
            if frames and any(of_optimizer[frame] for frame in python.stacks[stack]):
                lines = calls.setdefault((frames[-1].file, frames[-1].function), {})
                lines[frames[-1].line] = lines.get(frames[-1].line, 0) + int(times[stack])
        last = {function: max(line for line, time in lines.items() if time >= _TORN * sum(lines.values()))
                for function, lines in calls.items()}
        below = [next((frame.line > last[frame.file, frame.function] for frame in reversed(frames)
                       if (frame.file, frame.function) in last), False) for frames in users]
        above = [bool(frames) and frames[-1].line <= last.get((frames[-1].file, frames[-1].function), -1)
                 for frames in users]
        holds = frozenset(frame for stack in np.flatnonzero(after_batch).tolist()
                          for frame in takewhile(lambda frame: not of_callbacks[frame], python.stacks[stack]))
        return runs & np.array(above, bool), after_batch | (~runs & np.array(below, bool)), holds

    def pauses(self, within: Spans, least_ns: float) -> tuple[Spans, Spans]:
        """Pauses of the training loop, each one call of ``least_ns`` or more, by its stacks alone, and the rest of this
        time; none of either where samples show too little of the steps, or a tracer recorded every call."""
        loop, total, interval = self.python.loop, float(self._in_steps.sum()), 1e9 / self.python.rate_hz
        if self.python.exact or total < _FEW_SAMPLES * interval:
            return EMPTY, EMPTY
        calls: dict[tuple[int, ...], int] = {}  # what the loop calls, whatever that calls in turn
        call = np.array([calls.setdefault((*takewhile(self._around.__contains__, stack), next(
            (frame for frame in stack if frame not in self._around), -1)), len(calls)) for stack in self.python.stacks],
            np.int64)
        in_steps, times = (np.bincount(call, column, len(calls)) for column in (
            self._in_steps, self._by_stack(coverage(within, loop.start, loop.end))))
        pauses = [EMPTY]
        for seldom in np.flatnonzero((in_steps < _SELDOM * total) & (times >= _SHORTEST_PAUSE_NS)).tolist():
            rows = np.flatnonzero((loop.stack >= 0) & (call[loop.stack] == seldom))
            runs = joined(union(loop.start[rows], loop.end[rows]), round(2 * interval))  # a torn stack ends none
            by_chance = math.log(_CHANCE) / math.log((in_steps[seldom] + interval) / (total + interval)) * interval
            long = runs.end - runs.start >= max(least_ns, _SHORTEST_PAUSE_NS, by_chance)
            pauses.append(Spans(runs.start[long], runs.end[long]))
        long_ones = intersect(within, merge(*pauses))
        return long_ones, subtract(intersect(within, union(loop.start[:1], loop.end[-1:])), long_ones)

    def runs(self, function: re.Pattern[str], within: Spans) -> bool:
        """Return whether a function of such a name runs in most of this time on the training loop's thread."""
        python, times = self.python, self._by_stack(coverage(within, self.python.loop.start, self.python.loop.end))
        calls = [any(function.fullmatch(python.frames[frame].function.rpartition(".")[2]) for frame in stack)
                 for stack in python.stacks]
        return bool(times[np.array(calls, bool)].sum() > _MOST * times.sum())

    def alone(self, called: re.Pattern[str], within: Spans) -> str:
        """The line that runs for most of this time and calls nothing, where at other times it calls a function of such
        a file and name; "" without one."""
        frames, stacks, loop = self.python.frames, self.python.stacks, self.python.loop
        callers = {caller for stack in stacks for caller, callee in pairwise(stack)
                   if called.search(f"{frames[callee].file} {frames[callee].function}")}
        times = self._by_stack(coverage(within, loop.start, loop.end))
        alone = [(int(time), stack[-1]) for time, stack in zip(times, stacks, strict=True) if {*stack[-1:]} & callers]
        most, line = max(alone, default=(0, -1))
        return line_text(frames[line]) if most > _MOST * within.total else ""

    def _by_stack(self, times: I64) -> I64:
        """Times of the loop's stacks, added up."""
        count = len(self.python.stacks)
        return np.bincount(self.python.loop.stack + 1, times, count + 1)[1:].astype(np.int64)  # the first is of none

    def of(self, gaps: Spans, kind: str = "gap") -> list[tuple[StackFrame, int, StackFrame, str, bool]]:
        """The lines that ran most in these gaps with nanoseconds, most first, the innermost line of most of each, what
        makes batches in most of it, and whether a library saves a checkpoint in most of it. Where none takes a good
        part of them, those that called so many others."""
        frames = self.python.frames
        parts = []
        for whole, worker in self._threads(kind):
            spans = whole.around(gaps)
            telling = {EAGER_GAP: self._telling_of_ops, _BELOW: self._telling_below}.get(kind, self._telling[worker])
            if kind == PLACEMENT_GAP and (worker or self._telling_of_callbacks.line.max(initial=-1) >= 0):
                telling = self._telling_of_callbacks
            inside = coverage(gaps, spans.start, spans.end)
            with_stack = np.flatnonzero((inside > 0) & (spans.stack >= 0))
            line = telling.line[spans.stack[with_stack]]
            of_steps = whole is self.python.loop and kind != CALLS_GAP
            with_stack = with_stack[(line >= 0) & ~(telling.elsewhere[line] & of_steps)]
            stack = spans.stack[with_stack]
            if kind == INPUT_GAP and whole is self.python.loop:  # the step's own stacks fell into the wait by chance
                with_stack, stack = with_stack[self._loads[stack]], stack[self._loads[stack]]
            parts.append((telling.line[stack], telling.outer[stack], telling.leaf[stack], inside[with_stack],
                          spans.start[with_stack], spans.end[with_stack], stack))
            if kind == INPUT_GAP and whole is self.python.loop and parts[-1][3].sum() > _MOST * gaps.total:
                break  # it makes its batches itself, whatever other threads do meanwhile
        if not parts:
            return []
        line, outer, leaf, inside, start, end, stack = (np.concatenate(column) for column in zip(*parts, strict=True))
        if kind == CALLS_GAP or np.bincount(line, inside).max(initial=0) < _SCATTERED * inside.sum():
            line = outer
        of_line = np.bincount(line, inside)  # of several threads at once more than the time in which any runs it
        out = []
        for frame in np.argsort(-of_line, kind="stable")[:_MOST_LINES].tolist():
            of_frame = np.flatnonzero(line == frame)
            time = overlap(union(start[of_frame], end[of_frame]), gaps)
            if time:
                out.append((frames[frame], time, frames[_most(leaf[of_frame], inside[of_frame])],
                            self._loader(_most(stack[of_frame], inside[of_frame])),
                            bool(_most(self._saves[stack[of_frame]] >= 0, inside[of_frame]))))
        return sorted(out, key=lambda row: (-row[1], row[0].file, row[0].line))

    def _loader(self, stack: int) -> str:
        """The maker of a batch in this stack: a library, by its name, or "user"; "" where none is made."""
        frames = self.python.stacks[stack]
        names = [self.python.frames[frame].function.rpartition(".")[2] for frame in self.python.own(stack)]
        by_user = any(map(_MAKES_BATCH.match, names)) and not any(map(_OTHER_WORK.match, names))
        return next(filter(None, (self._loader_of[frame] for frame in reversed(frames))), "user" if by_user else "")

    def _frames_that_tell(self, worker: bool, around: frozenset[int]) -> _Telling:
        """Innermost frame of each stack that is of the user's own code that is not ``around`` the steps, else the
        outermost one that saves a checkpoint, else the library's that such code calls, else the innermost one.
        ``worker``: a thread that tells of the user's own code alone, and nothing while it waits for work."""
        python = self.python
        line, outer, leaf = (np.full(len(python.stacks), -1, np.int64) for _ in range(3))
        for number, stack in enumerate(python.stacks):
            of_user = python.own(number)
            users = [frame for frame in of_user if frame not in around]
            if stack and (users or not worker) and not (worker and python.waits(number)):
                library = int(self._saves[number]) if self._saves[number] >= 0 else next((
                    called for caller, called in pairwise(stack) if caller in of_user[-1:] and called not in around
                    and not _FRAMEWORK.search(python.frames[called].file)), stack[-1])
                line[number], outer[number] = (users[-1], users[0]) if users else (library, library)
                leaf[number] = stack[-1]
        return _Telling(line, outer, leaf, np.zeros(len(python.frames), bool))

    def _frames_called_back(self) -> _Telling:
        """The user's function that a compiled function calls, in each stack with such a call."""
        python = self.python
        line, leaf = (np.full(len(python.stacks), -1, np.int64) for _ in range(2))
        for number, stack in enumerate(python.stacks):
            calls = [depth for depth, frame in enumerate(stack) if _CALLS_BACK.search(python.frames[frame].file)]
            users = [frame for frame in python.own(number) if calls and frame in stack[calls[-1] + 1:]]
            if users:
                line[number], leaf[number] = users[0], stack[-1]
        return _Telling(line, line, leaf, np.zeros(len(python.frames), bool))

    def _frames_around(self, outside: Spans) -> frozenset[int]:
        """Lines that run while the step does: the call of the training loop and what calls it. Of samples only what was
        first seen there counts, if anything was: between samples a gap's stack seems to go on in a short call."""
        loop = self.python.loop
        seen = coverage(outside, loop.seen, loop.seen + 1)
        inside = coverage(outside, loop.start, loop.end) if self.python.exact or not seen.any() else seen
        by_stack = self._by_stack(inside)
        times: dict[int, int] = {}
        for stack in np.flatnonzero(by_stack).tolist():
            for frame in set(self.python.stacks[stack]):
                times[frame] = times.get(frame, 0) + int(by_stack[stack])
        total = outside.total if self.python.exact else int(inside.sum())
        return frozenset(frame for frame, time in times.items() if time > _ENCLOSING_SHARE * total)

    def _beside(self, calls: Spans) -> frozenset[int]:
        """The lines that run for far longer than these calls, and not all the time: none of them makes the calls, of
        which the shortest lie within the error of the samples' clock."""
        python, times = self.python, self._by_stack(self.python.loop.end - self.python.loop.start)
        begins = np.array([stack[0] if stack else -1 for stack in python.stacks], np.int64)
        whole = begins == _most(begins, times)  # a torn stack may lack those around
        of_frame: dict[int, int] = {}
        for stack in np.flatnonzero(whole & (times > 0)).tolist():
            for frame in set(python.stacks[stack]):
                of_frame[frame] = of_frame.get(frame, 0) + int(times[stack])
        others = int(times[whole].sum()) - calls.total // 2
        return frozenset(frame for frame, time in of_frame.items() if _GAP_RATIO * calls.total < time <= others)

    def flame(self, window: Spans, gaps: Spans, per: float) -> tuple[FlameNode, ...]:
        """The loop's stacks as a tree, seconds by ``per``, the calls of each line that take most first. Lines of
        libraries that do nothing but pass a call on are left out."""
        python = self.python
        total, lost = (self._by_stack(coverage(spans, python.loop.start, python.loop.end)) for spans in (window, gaps))
        times: dict[tuple[int, ...], list[int]] = {}
        for stack in np.flatnonzero(total).tolist():
            frames = python.stacks[stack][:_FLAME_DEPTH]
            for depth in range(1, len(frames) + 1):
                sums = times.setdefault(frames[:depth], [0, 0])
                sums[0] += int(total[stack])
                sums[1] += int(lost[stack])
        least = _FLAME_SHARE * int(total.sum())
        kept = {path for path, _ in sorted(times.items(), key=lambda item: (-item[1][0], len(item[0])))[:_FLAME_NODES]
                if times[path][0] >= least}
        calls: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for path in sorted(kept, key=lambda path: (-times[path][0], path)):
            calls.setdefault(path[:-1], []).append(path)
        out: list[FlameNode] = []
        waiting: list[tuple[tuple[int, ...], int | None]] = [(path, None) for path in reversed(calls.get((), []))]
        while waiting:  # depth first: below a line stands what it calls
            path, parent = waiting.pop()
            frame, below = python.frames[path[-1]], calls.get(path, [])
            passes_on = len(below) == 1 and times[below[0]][0] >= _PASSES_ON * times[path][0]
            if not (passes_on and python.of_library[path[-1]] is not False):
                out.append(FlameNode(line_text(frame), frame.file, parent, times[path][0] / per / 1e9,
                                     times[path][1] / per / 1e9))
                parent = len(out) - 1
            waiting += [(called, parent) for called in reversed(below)]
        return tuple(out)


def _most(values: npt.NDArray[np.generic], times: I64) -> int:
    """The value of most of the time."""
    several, which = np.unique(values, return_inverse=True)
    return int(several[np.argmax(np.bincount(which, times))])


def host_stacks(trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None, causes: HostCauses | None,
                python: Sequence[PythonStacks]) -> HostStacks | None:
    """The lines in each kind of gap; None where nobody tried to sample stacks, and no tracer ran. ``python``: as
    :func:`python_of` gives it."""
    basis = steps.times.unit if steps is not None else "window"
    if not python:
        reason = "the trace does not show when it was captured" if trace.stacks else trace.no_stacks
        return HostStacks(basis=basis, reason=reason) if reason else None
    window = Spans(*(np.array([edge], np.int64) for edge in trace.window_ns))
    within = window if steps is None else steps.call_spans if steps.inside else steps.spans
    # JAX's calls return before its programs have run: what Python does meanwhile is no part of them.
    queues = steps is not None and bool(name_mask(trace, PJIT)[trace.host.name].any()) and steps.call_spans.total > 0
    by_kind, length_s = gap_spans(trace, gpu_timelines, steps, causes, len(python))
    every = [merge(EMPTY, *kinds) for kinds in zip(*by_kind.values(), strict=True)]
    processes = process_lines(python, steps.call_spans if queues and steps else within, every, queues=queues)
    per = steps.count if steps is not None else 1
    gap_kinds = sorted((gap_lines(kind, gaps, length_s[kind] / per, processes) for kind, gaps in by_kind.items()
                        if any(len(spans.start) for spans in gaps)), key=lambda kind_of_gap: -kind_of_gap.s_per_step)
    flame = processes[0].flame(within, every[0], per)
    if python[0].exact:
        return HostStacks(basis=basis, length_s=window.total / 1e9, gaps=tuple(gap_kinds), flame=flame,
                          source="tracer with lines" if tells_lines(trace) else "tracer")
    samples = trace.stacks
    return HostStacks(
        basis=basis, length_s=samples[0].length_s, rate_hz=sum(s.rate_hz for s in samples) / len(samples),
        missed=max(s.missed for s in samples), error_s=max(s.error_s for s in samples),
        cpus=sum(s.cpu_s / s.length_s for s in samples), gaps=tuple(gap_kinds), flame=flame)


def python_of(trace: Trace) -> list[PythonStacks]:
    """The Python of the trace's processes: as it was sampled, or else as the profiler's own tracer recorded it."""
    if trace.stacks:
        loads = bool(name_mask(trace, GRAIN).any()) or loads_itself(trace, union(*([edge] for edge in trace.window_ns)))
        return [sampled_stacks(samples, trace.origin_ns, loads) for samples in trace.stacks] if trace.origin_ns else []
    return traced_stacks(trace)


def process_lines(python: Sequence[PythonStacks], within: Spans, gaps: Sequence[Spans], *, queues: bool = False,
                  ) -> list[Lines]:
    """``gaps`` are all gaps of the steps, in the rest of which the loop is in its step; of each process, or one of
    all."""
    each = zip(python, _of_each(gaps, python), strict=True)
    return [Lines(process, subtract(within, spans), spans, queues=queues) for process, spans in each]


def _of_each(gaps: Sequence[Spans], processes: Sequence[object]) -> Sequence[Spans]:
    return gaps if len(gaps) == len(processes) else [gaps[0]] * len(processes)


def gap_spans(trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None, causes: HostCauses | None,
              processes: int) -> tuple[dict[str, list[Spans]], dict[str, float]]:
    """Spans by kind in which a GPU, or in a trace without one the host, has such a gap; and their length (s), the mean
    of the GPUs, or that of the one rank whose gaps they are. The spans are of each rank where there are so many
    ``processes``, else of all."""
    bounds = steps.bounds_ns if steps is not None else (trace.window_ns,)
    waits: list[tuple[int | None, Spans]] = [
        (trace.gpus[gpu].rank, parts["input"]) for gpu, parts in parts_by_gpu(trace, gpu_timelines, bounds).items()]
    if not trace.gpus:
        within = union([a for a, _ in bounds], [b for _, b in bounds])
        waits = [(trace.lines[loop.line].rank if loop.line >= 0 else None, intersect(loop.waits, within))
                 for loop in training_loops(trace)]
    divided = [(one.process[1] if one.timeline is None else trace.gpus[one.timeline.gpu].rank, one.by_cause)
               for one in (causes.divided if causes is not None else ())]
    of_kind = {kind: waits if kind == INPUT_GAP else [(rank, by_cause[kind]) for rank, by_cause in divided]
               for kind in GAPS if trace.gpus or kind not in _NO_GAPS_ON_CPU}
    ranks: list[int | None] = [*sorted({line.rank for line in trace.lines})]
    if len(ranks) != processes:
        ranks = [None]
    length_s = {kind: sum(spans.total for _, spans in gaps) / max(len(gaps), 1) / 1e9 for kind, gaps in of_kind.items()}
    if causes is not None and causes.gap_host is not None and causes.gap_s is not None:
        length_s["gap"] = causes.gap_s * len(bounds)
    return {kind: [merge(EMPTY, *(spans for of, spans in gaps if rank is None or of is None or of == rank))
                   for rank in ranks] for kind, gaps in of_kind.items()}, length_s


def gap_lines(kind: str, gaps: Sequence[Spans], s_per_step: float, processes: Sequence[Lines]) -> GapLines:
    """The mean of the processes, each by the time of its gaps; ``gaps`` are of each, or one of all, and ``s_per_step``
    is the time of all gaps of this kind."""
    shares: dict[tuple[str, str], tuple[float, str, str, bool]] = {}
    traced = bool(processes) and processes[0].python.exact
    count, each = sum(len(spans.start) for spans in gaps), _of_each(gaps, processes)
    total = sum(spans.total for spans in each)
    seen, seen_ns = 0, 0
    for process, asked in zip(processes, each, strict=True):
        covered = process.seen(asked, kind)
        seen, seen_ns = seen + len(covered.start), seen_ns + covered.total
        lines = process.of(covered, kind)
        if kind == "gap" and covered.total < _MOST * asked.total:
            below = process.of(process.within, _BELOW)
            if sum(time for _, time, *_ in below) >= _MOST * asked.total:
                lines, covered, seen_ns = below, asked, total
        for frame, time, leaf, loader, saves in lines:
            key = line_text(frame), frame.file
            before, inner, by, saved = shares.get(key, (0.0, "" if leaf == frame else line_text(leaf), loader, saves))
            shares[key] = before + time / covered.total * asked.total / total, inner, by, saved
    first = sorted(shares.items(), key=lambda item: (-item[1][0], item[0]))[:TOP]
    seen = -(-seen * len(gaps) // max(len(processes), 1))
    few = seen < min(_FEW_GAPS, count) and seen_ns < _MOST * total
    return GapLines(kind, s_per_step, count, seen, () if few else tuple(
        StackLine(line, file, share * s_per_step, min(share, 1.0), inner, traced, loader, saves)
        for (line, file), (share, inner, loader, saves) in first if share >= _MIN_SHARE))


def lines_of_gaps(processes: Sequence[Lines], gaps: Iterable[tuple[int, int, str]]) -> list[tuple[StackLine, ...]]:
    """Lines that ran in each of these gaps (start, end, cause); empty where no sample fell into it."""
    if not processes:
        return [() for _ in gaps]
    return [gap_lines(INPUT_GAP if cause == INPUT_GAP else "gap", [union([start], [end])], (end - start) / 1e9,
                      processes).lines for start, end, cause in gaps]
