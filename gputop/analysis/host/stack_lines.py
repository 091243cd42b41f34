"""Which lines of Python ran in the gaps of the steps, by stacks that were sampled while the job was captured.

Samples and trace have the Unix time of one machine. py-spy takes samples at random times, and only where a stack
differs from the one before is its time known. So a change is put at half of the time between two stacks seen, one mean
interval before the sample that saw it at most. A gap counts as seen where a stack changed in it or where it is so long
that a sample fell into it with a probability of 95 %, or where the stack that goes on in it is one of gaps: seen first
in gaps, and hardly outside. Of other short gaps nothing is known: the stack of the step, which was seen before, would
be charged with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np

from gputop.analysis.gpu.breakdown import parts_by_gpu
from gputop.analysis.gpu.device_time import GpuTimeline
from gputop.analysis.host.host_causes import HostCauses
from gputop.analysis.results import FlameNode, GapLines, HostStacks, StackLine
from gputop.analysis.steps.model import Steps
from gputop.analysis.steps.training_loops import training_loops
from gputop.core.host_stacks import StackFrame, StackSamples, ThreadStacks
from gputop.text.units import printable
from gputop.trace.intervals import EMPTY, Spans, coverage, intersect, merge, subtract, union
from gputop.trace.model import I64, Trace

INPUT_GAP = "input"
GAPS = ("gap", INPUT_GAP, "tracing", "eager", "placement", "dispatch")
_NO_GAPS_ON_CPU = ("placement", "dispatch")  # without a GPU these hold the computing
_CERTAIN = 3.0  # mean intervals: of random samples 95 % of such gaps have one
_AROUND = 0.5  # of the stacks first seen outside of gaps: a line in so many is around the steps and tells of no gap
_TRUSTED_S = 2.0  # that a thread other than the main one still has the stack that was seen last: it may have gone
TOP = 8
_MIN_SHARE = 0.01
_FEW_GAPS = 3  # that were seen: of fewer no lines are told, unless there are no others
_OF_GAPS = 2.0
_PASSES_ON = 0.98  # of a line's time is that of the one line that it calls
_FLAME_SHARE, _FLAME_NODES, _FLAME_DEPTH = 0.005, 400, 60
# Where threads of the standard library wait for work.
_WAITING = ("threading.py", "queue.py", "selectors.py", "socket.py", "socketserver.py", "connection.py", "thread.py",
            "popen_fork.py", "subprocess.py")


class StackSpans(NamedTuple):
    """When a thread had which stack (index into those of its process; -1: none), on the trace's clock.

    ``seen`` are the instants at which a sample first saw each of them.
    """

    start: I64
    end: I64
    stack: I64
    seen: I64


def stack_spans(samples: StackSamples, thread: ThreadStacks, origin_ns: int, *, trusted_s: float = math.inf,
                ) -> StackSpans:
    """``trusted_s``: a stack counts no longer than this after it was seen."""
    begin = round(samples.start_s * 1e9) - origin_ns
    seen = begin + np.array(thread.times_us, np.int64) * 1000
    interval = round(1e9 / samples.rate_hz)
    earlier = np.zeros_like(seen)
    earlier[1:] = np.minimum(interval, (seen[1:] - seen[:-1]) // 2)
    start = seen - earlier
    end = np.append(start[1:], begin + round(samples.length_s * 1e9))
    if math.isfinite(trusted_s):
        end = np.minimum(end, seen + round(trusted_s * 1e9))
    return StackSpans(start, np.maximum(end, start), np.array(thread.stacks, np.int64), seen)


def seen_gaps(gaps: Spans, spans: StackSpans, rate_hz: float) -> Spans:
    """The gaps of which the samples of a thread tell."""
    if not len(spans.start):
        return EMPTY
    changes = np.searchsorted(spans.seen, gaps.end, side="right") - np.searchsorted(spans.seen, gaps.start)
    sampled = (gaps.start >= spans.seen[0]) & (gaps.end <= spans.end[-1])
    certain = gaps.end - gaps.start >= _CERTAIN * 1e9 / rate_hz
    known = (changes > 0) | (sampled & certain)
    return Spans(gaps.start[known], gaps.end[known])


class Lines:
    """The lines of one process on a trace's clock: asked for gaps, answers with their lines."""

    def __init__(self, samples: StackSamples, origin_ns: int, outside: Spans, gaps: Spans = EMPTY) -> None:
        """``outside``: time in which the training loop runs the step; ``gaps``: all that will be asked for."""
        self.samples = samples
        self.loop = training_thread(samples)
        self.spans = (stack_spans(samples, self.loop, origin_ns) if self.loop is not None
                      else StackSpans(*(np.empty(0, np.int64) for _ in range(4))))
        self._others = [stack_spans(samples, thread, origin_ns, trusted_s=_TRUSTED_S) for thread in samples.threads
                        if thread is not self.loop]
        self._around = self._lines_around(outside)
        self._of_gaps = self._stacks_of_gaps(gaps, outside)
        self._named: dict[tuple[int, bool], tuple[StackFrame, StackFrame] | None] = {}

    def seen(self, gaps: Spans, kind: str = "gap") -> Spans:
        """Those of which the samples tell; in waits for input the loop stands still and other threads go on."""
        threads = [self.spans, *(self._others if kind == INPUT_GAP else ())]
        return merge(self._going_on(gaps), *(seen_gaps(gaps, spans, self.samples.rate_hz) for spans in threads))

    def _going_on(self, gaps: Spans) -> Spans:
        """Those in the middle of which the training loop has a stack of gaps."""
        middle = gaps.start + (gaps.end - gaps.start) // 2
        at = np.searchsorted(self.spans.start, middle, side="right") - 1
        known = np.zeros(len(middle), bool)
        inside = at >= 0
        inside[inside] = middle[inside] < self.spans.end[at[inside]]
        known[inside] = np.isin(self.spans.stack[at[inside]], self._of_gaps)
        return Spans(gaps.start[known], gaps.end[known])

    def _stacks_of_gaps(self, gaps: Spans, outside: Spans) -> I64:
        """The stacks that were first seen in gaps at least so many times as often as outside of them."""
        seen = self.spans.seen
        counts = [np.bincount(self.spans.stack + 1, coverage(spans, seen, seen + 1), len(self.samples.stacks) + 1)[1:]
                  for spans in (gaps, outside)]  # the first is of no stack
        return np.flatnonzero(counts[0] > _OF_GAPS * counts[1])

    def of(self, gaps: Spans, kind: str = "gap") -> list[tuple[StackFrame, int, StackFrame]]:
        """The lines that ran in these gaps with nanoseconds, most first, and the innermost line of most of each."""
        threads = self._others if kind == INPUT_GAP else [self.spans]
        of_line: dict[StackFrame, list[tuple[int, int]]] = {}
        inner: dict[StackFrame, dict[StackFrame, int]] = {}
        for spans in threads:
            inside = coverage(gaps, spans.start, spans.end)
            for at in np.flatnonzero((inside > 0) & (spans.stack >= 0)).tolist():
                line = self._line(int(spans.stack[at]), kind == INPUT_GAP)
                if line is not None:
                    of_line.setdefault(line[0], []).append((int(spans.start[at]), int(spans.end[at])))
                    leaves = inner.setdefault(line[0], {})
                    leaves[line[1]] = leaves.get(line[1], 0) + int(inside[at])
        out = []
        for frame, own in of_line.items():
            time = intersect(union([a for a, _ in own], [b for _, b in own]), gaps).total
            out.append((frame, time, max(inner[frame], key=lambda leaf: inner[frame][leaf])))
        return sorted(out, key=lambda found: (-found[1], found[0].file, found[0].line))

    def _line(self, stack: int, worker: bool) -> tuple[StackFrame, StackFrame] | None:
        """The line of a stack that says most, and its innermost one; None for a worker that waits for work."""
        key = stack, worker
        if key not in self._named:
            frames = [self.samples.frames[frame] for frame in self.samples.stacks[stack]]
            self._named[key] = _telling(frames, frozenset() if worker else self._around, worker)
        return self._named[key]

    def _lines_around(self, outside: Spans) -> frozenset[StackFrame]:
        """Lines that run while the step does: the call of the training loop and what calls it. Only what was seen there
        counts: between samples a gap's stack seems to go on in a short call."""
        inside = coverage(outside, self.spans.seen, self.spans.seen + 1)
        times: dict[StackFrame, int] = {}
        for stack, time in zip(self.spans.stack.tolist(), inside.tolist(), strict=True):
            if time and stack >= 0:
                for frame in {self.samples.frames[at] for at in self.samples.stacks[stack]}:
                    times[frame] = times.get(frame, 0) + time
        total = int(inside.sum())
        return frozenset(frame for frame, time in times.items() if time > _AROUND * total)

    def flame(self, window: Spans, gaps: Spans, per: float) -> tuple[FlameNode, ...]:
        """The loop's stacks as a tree, seconds by ``per``, the calls of each line that take most first. Lines of
        libraries that do nothing but pass a call on are left out."""
        total, lost = (coverage(own, self.spans.start, self.spans.end) for own in (window, gaps))
        times: dict[tuple[int, ...], list[int]] = {}
        for stack, time, in_gap in zip(self.spans.stack.tolist(), total.tolist(), lost.tolist(), strict=True):
            if stack < 0 or not time:
                continue
            frames = self.samples.stacks[stack][:_FLAME_DEPTH]
            for depth in range(1, len(frames) + 1):
                own = times.setdefault(frames[:depth], [0, 0])
                own[0] += time
                own[1] += in_gap
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
            frame, below = self.samples.frames[path[-1]], calls.get(path, [])
            passes_on = len(below) == 1 and times[below[0]][0] >= _PASSES_ON * times[path][0]
            if not (passes_on and is_library(frame.file)):
                out.append(FlameNode(line_text(frame), frame.file, parent, times[path][0] / per / 1e9,
                                     times[path][1] / per / 1e9))
                parent = len(out) - 1
            waiting += [(called, parent) for called in reversed(below)]
        return tuple(out)


def host_stacks(trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None, causes: HostCauses | None,
                ) -> HostStacks | None:
    """The lines in each kind of gap; None where nobody tried to sample stacks."""
    basis = steps.times.unit if steps is not None else "window"
    if not trace.stacks:
        return HostStacks(basis=basis, reason=trace.no_stacks) if trace.no_stacks else None
    if not trace.origin_ns:
        return HostStacks(basis=basis, reason="the trace does not tell when it was captured")
    window = Spans(*(np.array([edge], np.int64) for edge in trace.window_ns))
    within = steps.spans if steps is not None else window
    by_kind, gpus = gap_spans(trace, gpu_timelines, steps, causes)
    every = merge(EMPTY, *by_kind.values())
    processes = process_lines(trace, within, every)
    per = steps.count if steps is not None else 1
    found = []
    for kind, (gaps, total) in {kind: (gaps, gpus[kind]) for kind, gaps in by_kind.items()}.items():
        if len(gaps.start):
            found.append(_gap_lines(kind, gaps, total / per / 1e9, processes))
    found.sort(key=lambda own: -own.s_per_step)
    first = trace.stacks[0]
    return HostStacks(
        basis=basis, length_s=first.length_s, rate_hz=sum(s.rate_hz for s in trace.stacks) / len(trace.stacks),
        missed=max(s.missed for s in trace.stacks), error_s=max(s.error_s for s in trace.stacks),
        cpus=sum(s.cpu_s / s.length_s for s in trace.stacks), gaps=tuple(found),
        flame=processes[0].flame(within, every, per))


def process_lines(trace: Trace, within: Spans, gaps: Spans) -> list[Lines]:
    """The sampled processes; ``gaps`` are all gaps of the steps, the rest of which the loop is in its step."""
    outside = subtract(within, gaps)
    return [Lines(samples, trace.origin_ns, outside, gaps) for samples in trace.stacks]


def gap_spans(trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None, causes: HostCauses | None,
              ) -> tuple[dict[str, Spans], Mapping[str, float]]:
    """By kind when a GPU has such a gap or, in a trace without, the host; and how long, as the mean of the GPUs."""
    bounds = steps.bounds_ns if steps is not None else (trace.window_ns,)
    parts = parts_by_gpu(trace, gpu_timelines, bounds)
    waits = [own["input"] for own in parts.values()]
    if not trace.gpus:
        within = union([a for a, _ in bounds], [b for _, b in bounds])
        waits = [intersect(loop.waits, within) for loop in training_loops(trace)]
    divided = [own.by_cause for own in causes.divided] if causes is not None else []
    of_kind = {kind: waits if kind == INPUT_GAP else [own[kind] for own in divided] for kind in GAPS
               if trace.gpus or kind not in _NO_GAPS_ON_CPU}
    return ({kind: merge(EMPTY, *own) for kind, own in of_kind.items()},
            {kind: sum(spans.total for spans in own) / max(len(own), 1) for kind, own in of_kind.items()})


def _gap_lines(kind: str, gaps: Spans, s_per_step: float, processes: Sequence[Lines]) -> GapLines:
    """The mean of the processes; ``s_per_step`` is the time of all gaps of this kind."""
    shares: dict[tuple[str, str], tuple[float, str]] = {}
    seen = 0
    for process in processes:
        covered = process.seen(gaps, kind)
        seen = max(seen, len(covered.start))
        for frame, time, leaf in process.of(covered, kind):
            key = line_text(frame), frame.file
            before, inner = shares.get(key, (0.0, "" if leaf == frame else line_text(leaf)))
            shares[key] = before + time / covered.total / len(processes), inner
    first = sorted(shares.items(), key=lambda item: (-item[1][0], item[0]))[:TOP]
    return GapLines(kind, s_per_step, len(gaps.start), seen, () if seen < min(_FEW_GAPS, len(gaps.start)) else tuple(
        StackLine(line, file, share * s_per_step, min(share, 1.0), inner)
        for (line, file), (share, inner) in first if share >= _MIN_SHARE))


def training_thread(samples: StackSamples) -> ThreadStacks | None:
    """The main thread; where that waits for another one all the time, the one whose stacks change most."""
    main = next((thread for thread in samples.threads if thread.main), None)
    if main is not None and not all(stack < 0 or _waits([samples.frames[at] for at in samples.stacks[stack]])
                                    for stack in main.stacks):
        return main
    return max((thread for thread in samples.threads if thread is not main), key=lambda own: len(own.times_us),
               default=main)


def line_text(frame: StackFrame) -> str:
    """"metrics.py:112 confusion_matrix"; of a library with its package: "keras/…/progbar.py:93 update"."""
    path = PurePosixPath(frame.file)
    function, parts, name = _function(frame.function), path.parts, path.name
    if path.name.startswith("__autograph_generated_file"):  # what TensorFlow made of a function of the user's
        name = "autograph"
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            inside = parts[len(parts) - parts[::-1].index(folder):]
            name = "/".join(inside) if len(inside) <= 2 else f"{inside[0]}/…/{inside[-1]}"
    return printable(f"{name}:{frame.line} {function}" if frame.line else f"{name} {function}")


def _function(qualified: str) -> str:
    """The end of a qualified name: "Slow.on_train_batch_end", "load.<lambda>"."""
    parts = [part.removeprefix("tf__") for part in qualified.split(".")
             if part not in ("<locals>", "outer_factory", "inner_factory", "if_body", "else_body", "loop_body")]
    return ".".join(parts[-2:])


def _telling(frames: Sequence[StackFrame], around: frozenset[StackFrame], worker: bool,
             ) -> tuple[StackFrame, StackFrame] | None:
    if not frames:
        return None
    leaf = frames[-1]
    own = [frame for frame in frames if not is_library(frame.file)]
    if worker:
        return (own[-1], leaf) if own and not _waits(frames) else None
    own = [frame for frame in own if frame not in around]
    return own[-1] if own else leaf, leaf


def _waits(frames: Sequence[StackFrame]) -> bool:
    """Whether the thread waits for work in the standard library."""
    leaf = frames[-1].file if frames else ""
    return is_library(leaf) and PurePosixPath(leaf).name in _WAITING


def is_library(file: str) -> bool:
    """Whether it is of Python itself or of an installed package."""
    return (file.startswith("<") or "/site-packages/" in file or "/dist-packages/" in file
            or "/lib/python3" in file or "/lib64/python3" in file)


def lines_of_gaps(processes: Sequence[Lines], gaps: Iterable[tuple[int, int, str]]) -> list[tuple[StackLine, ...]]:
    """For single gaps (start, end, cause) the lines that ran in each; empty where no sample tells of it."""
    out = []
    for start, end, cause in gaps:
        one = Spans(np.array([start], np.int64), np.array([end], np.int64))
        found = _gap_lines(INPUT_GAP if cause == INPUT_GAP else "gap", one, (end - start) / 1e9, processes)
        out.append(found.lines)
    return out
