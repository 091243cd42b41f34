"""The Python functions that the profiler's own tracer wrote into a trace, as the stacks of its threads.

TensorFlow and JAX (python_tracer_level above 0; JAX's default) name a function "$train.py:31 step" by the name of its
file and its first line, one that is not written in Python "$time sleep" (xla/python/profiler/internal/python_hooks.cc).
PyTorch's profiler with ``with_stack=True`` names it "app/train.py(31): step" or "<built-in function sleep>", and from
2.15 on tells the line that called it. Which line of a function ran is known by what that called, else it
is the function's first. Functions that were running when the tracer started have no event.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gputop.analysis.host.python_libraries import is_library_below_path, is_library_file
from gputop.analysis.host.python_stacks import BUILT_IN, NO_SPANS, PythonStacks, StackSpans, line_text
from gputop.analysis.steps.training_loops import training_loops
from gputop.core.host_stacks import NAME_CHARS, StackFrame
from gputop.text.units import printable
from gputop.trace.lookups import host_stat, name_mask
from gputop.trace.model import I64, Trace
from gputop.trace.nesting import nest

# Matched at the beginning of names: "$file.py:7 f", "$module f"; "file.py(7): f", "<built-in method f of ...>".
_PATH = r"(?:[A-Za-z]:)?[^\s:][^:]*"
NAME = rf"\$\S[^:]*:\d{{1,9}} \S|\$\S+ \S+$|{_PATH}\(\d{{1,9}}\): \S|<built-in (?:function|method) "
_XLA = re.compile(r"\$(?P<file>\S[^:]*):(?P<line>\d{1,9}) (?P<function>\S.*)")
_XLA_BUILT_IN = re.compile(r"\$(?P<module>\S+) (?P<function>\S+)$")
_PYTORCH = re.compile(rf"(?P<file>{_PATH})\((?P<line>\d{{1,9}})\): (?P<function>\S.*)")
_BUILT_IN = "<built-in "
_OF_NO_TYPE = re.compile(r" of (?:type|pybind11_builtins\.\S*)$")  # of what binds a function, which says nothing of it
_FUNCTION = re.compile(NAME)
_CALLER = re.compile(r"(?P<file>.+):(?P<line>\d{1,9})$")
_NO_MODULE = ("builtins", "<unknown>")
_MAX_STACKS = 50_000
_MAX_DEPTH = 300  # what is deeper counts as the function around it
_PER_LAUNCH = 0.1  # share of a GPU's launches: a thread with Python and so many is a training loop


class _Calls(NamedTuple):
    """Calls of Python functions, each with its thread and the call that it is in (-1: none)."""

    line: I64
    start: I64
    end: I64
    name: I64
    caller: I64  # the name of "file:line", -1: not known
    parent: I64
    depth: I64


def traced_stacks(trace: Trace) -> list[PythonStacks]:
    """One per training loop; none where the trace holds no Python functions."""
    mask = name_mask(trace, NAME)
    if not mask.any() or not len(trace.host):
        return []
    is_call = mask.take(trace.host.name) & (trace.host.end_ns > trace.host.start_ns)
    is_call[host_stat(trace.host, "annotation")[0]] = False
    rows = np.flatnonzero(is_call)
    if not len(rows):
        return []
    calls = _calls(trace, rows)
    names = _Frames(trace)
    stack = _stacks(calls, names)
    spans = {line: _innermost(calls, stack, np.flatnonzero(calls.line == line))
             for line in np.unique(calls.line).tolist()}
    out = []
    loaders = {loop.line for loop in training_loops(trace) if loop.line >= 0}
    for host in sorted({trace.lines[line].host for line in spans}):
        of_host = [line for line in spans if trace.lines[line].host == host]
        loops = _loops(trace, of_host, loaders, spans)
        others = tuple(spans[line] for line in of_host if line not in loops) if len(loops) == 1 else ()
        out += [PythonStacks(names.frames, names.of_library, names.stacks, spans.get(line, NO_SPANS), others, math.inf,
                             line in loaders) for line in loops]
    return out


def function_text(name: str) -> str | None:
    """A function as lines are shown, "metrics.py:6 confusion_matrix"; None for the name of any other event."""
    return line_text(_frame(name)[0]) if _FUNCTION.match(name) else None


def tells_lines(trace: Trace) -> bool:
    """Return whether the tracer wrote the lines of calls, too."""
    return len(host_stat(trace.host, "called_from")[0]) > 0


def _loops(trace: Trace, lines: Sequence[int], loaders: set[int], spans: dict[int, StackSpans]) -> list[int]:
    """The threads that load batches or launch kernels; where none does, the one with most Python, of those on which
    more than Python ran: what only waits for others is no loop."""
    device = trace.device
    loops = loaders & set(lines)
    for gpu in range(len(trace.gpus)) if not loops else ():
        launches = device.launch_line[(device.gpu == gpu) & (device.launch_line >= 0)]
        count = np.bincount(launches, minlength=len(trace.lines))
        loops |= {line for line in lines if count[line] > _PER_LAUNCH * max(len(launches), 1)}
    other = np.bincount(trace.host.line, ~name_mask(trace, NAME).take(trace.host.name), len(trace.lines))
    longest = max(lines, key=lambda line: (other[line] > 0, int((spans[line].end - spans[line].start).sum()), -line))
    return sorted(loops or {longest})


def _calls(trace: Trace, rows: I64) -> _Calls:
    """Calls among these rows that are not too deep; what reaches beyond the call around it is cut there."""
    host = trace.host
    line, start, end, name = (column[rows].astype(np.int64) for column in (
        host.line, host.start_ns, host.end_ns, host.name))
    parent = nest(line, start, end, name, trace.names).parent
    depth = np.where(parent < 0, 0, -1)
    of_level = np.flatnonzero(parent < 0)
    # Calls by the one they are in: those of one level after the other.
    by_parent = np.argsort(parent, kind="stable")
    sorted_parent = parent[by_parent]
    for level in range(1, _MAX_DEPTH):
        first, last = (np.searchsorted(sorted_parent, of_level, side=side) for side in ("left", "right"))
        count = last - first
        if not count.any():
            break
        of_level = by_parent[np.repeat(first - np.cumsum(count) + count, count) + np.arange(int(count.sum()))]
        of_level.sort()
        depth[of_level] = level
        end[of_level] = np.minimum(end[of_level], end[parent[of_level]])
    caller = np.full(len(host), -1, np.int64)
    rows_known, values = host_stat(host, "called_from")
    caller[rows_known] = values
    kept = (depth >= 0) & (end > start)
    new_index = np.cumsum(kept) - 1
    inside = parent[kept]
    return _Calls(line[kept], start[kept], end[kept], name[kept], caller[rows][kept],
                  np.where(inside >= 0, new_index[inside], -1), depth[kept])


class _Frames:
    def __init__(self, trace: Trace) -> None:
        self._names = trace.names
        self.frames: list[StackFrame] = []
        self.of_library: list[bool | None] = []
        self.stacks: list[tuple[int, ...]] = []
        self._index: dict[StackFrame, int] = {}
        self._of_name: dict[int, tuple[StackFrame, bool | None]] = {}

    def of(self, name: int, caller: int = -1) -> int:
        """The number of the frame of a function that was at its first line, or where ``caller`` says."""
        if name not in self._of_name:
            self._of_name[name] = _frame(self._names[name])
        frame, library = self._of_name[name]
        called = _CALLER.match(self._names[caller]) if caller >= 0 else None
        if called is not None and called["file"] == frame.file and frame.line:
            frame = StackFrame(frame.function, frame.file, int(called["line"]))
        if frame not in self._index:
            self._index[frame] = len(self.frames)
            self.frames.append(frame)
            self.of_library.append(library)
        return self._index[frame]


def _frame(name: str) -> tuple[StackFrame, bool | None]:
    """Frame of a function by its name in a trace, and whether it is of a library."""
    for pattern, is_library in ((_XLA, is_library_file), (_PYTORCH, is_library_below_path)):
        match = pattern.match(name)
        if match is not None:
            function, file = printable(match["function"])[:NAME_CHARS], printable(match["file"])[:NAME_CHARS]
            return StackFrame(function, file, int(match["line"])), is_library(file)
    match = _XLA_BUILT_IN.match(name)
    if match is not None:
        module = "" if match["module"] in _NO_MODULE else match["module"].rpartition(".")[2] + "."
        return StackFrame(printable(module + match["function"])[:NAME_CHARS], BUILT_IN), True
    method = name.removeprefix(_BUILT_IN).partition(" ")[2].removesuffix(">").removesuffix(" object")
    method = _OF_NO_TYPE.sub("", method) or "a function without a name"
    return StackFrame(printable(method)[:NAME_CHARS], BUILT_IN), True


def _stacks(calls: _Calls, names: _Frames) -> I64:
    """Stack of each call while it runs itself, as an index into ``names.stacks``. From a certain number of different
    stacks on what is deeper counts as the function around it."""
    out = np.full(len(calls.start), -1, np.int64)
    above = np.zeros(len(calls.start), np.int64)  # of each call the stack around it, as an index into ``prefixes``
    prefixes: list[tuple[int, ...]] = [()]
    most = int(calls.name.max(initial=0)) + 2
    callers = int(calls.caller.max(initial=-1)) + 2
    by_depth = np.argsort(calls.depth, kind="stable")
    bounds = np.searchsorted(calls.depth[by_depth], np.arange(int(calls.depth.max(initial=-1)) + 2))
    full = False
    for level in range(len(bounds) - 1):
        rows = by_depth[bounds[level]:bounds[level + 1]]
        if level:
            around = calls.parent[rows]
            key = np.unique(above[around] * most + calls.name[around], return_inverse=True)[1]
            _, first, which = np.unique(key * callers + calls.caller[rows] + 1, return_index=True, return_inverse=True)
            base = len(prefixes)
            full = full or base + len(first) > _MAX_STACKS
            if full:
                out[rows] = out[around]
                continue
            prefixes += [(*prefixes[above[a]], names.of(int(calls.name[a]), int(calls.caller[row])))
                         for a, row in zip(around[first].tolist(), rows[first].tolist(), strict=True)]
            above[rows] = base + which
        _, first, which = np.unique(above[rows] * most + calls.name[rows], return_index=True, return_inverse=True)
        base = len(names.stacks)
        if level and base + len(first) > _MAX_STACKS:
            full = True
            out[rows] = out[around]
            continue
        names.stacks += [(*prefixes[above[row]], names.of(int(calls.name[row]))) for row in rows[first].tolist()]
        out[rows] = base + which
    return out


def _innermost(calls: _Calls, stack: I64, rows: I64) -> StackSpans:
    """Spans in which each of one thread's calls was the innermost."""
    start, end, depth = calls.start[rows], calls.end[rows], calls.depth[rows]
    around = calls.parent[rows]
    time = np.concatenate((end, start))
    state = np.concatenate((np.where(around >= 0, stack[around], -1), stack[rows]))
    # At one instant calls end before others begin, the inner ones first, and begin after those around them.
    order = np.lexsort((np.concatenate((-depth, depth + 1)), time))
    time, state = time[order], state[order]
    last = np.append(time[1:] > time[:-1], True)
    time, state = time[last], state[last]
    changed = np.append(True, state[1:] != state[:-1])
    time, state = time[changed], state[changed]
    return StackSpans(time[:-1], time[1:], state[:-1], time[:-1])
