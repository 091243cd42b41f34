"""The layers and ops behind some device events: a few names in place of ten thousand.

Names become a tree by their scopes, as in the table of layers. It is opened from the root down to where the time parts.
Siblings that differ in a number alone ("block_0", "block_1", …) are taken together where none of them takes much.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from msgspec import Struct, field

from gputop.analysis.gpu.device_time import GpuTimeline, gpu_number
from gputop.analysis.layers.pytorch import CallScopes
from gputop.analysis.layers.scopes import scope_of
from gputop.core.findings import Culprit
from gputop.trace.intervals import AT_ONCE, Spans, coverage
from gputop.trace.lookups import Mask, rows_of
from gputop.trace.model import I64, Trace

_OPENED_FROM = 0.9  # share of the time: a layer that has less stands as it is
_NAMED_FROM = 0.1  # share of the time: where no part of a layer takes more, it is not opened
_NAMED_PART = 0.5  # share of the time, below which names say too little
MAX_CULPRITS = 20  # of a finding
_MAX_DEPTH, _MAX_NAME = 12, 160
_NUMBER = re.compile(r"\d+")


class Events(Struct, frozen=True):
    """Device events (rows). ``time_ns`` of each, where that is not its length in the steps; ``found``: very many rows
    and their times, found in parts as they are named; ``only_on``: the GPUs (the job's numbers) of whose events only
    those count that no other GPU has; ``more_on``: those whose events these are, with what they take longer than on the
    others as their times; ``timed``: whether times are told; ``idle``: whether those are of idle time before them, in
    which the host was at something else."""

    rows: I64 = np.empty(0, np.int64)
    time_ns: I64 | None = None
    found: Callable[[], Iterable[tuple[I64, I64]]] | None = None
    only_on: tuple[int, ...] = ()
    more_on: tuple[int, ...] = ()
    timed: bool = True
    idle: bool = False


class _Node(Struct):
    """A scope and all below it."""

    time_ns: float = 0.0
    names: int = 0
    longest: tuple[float, int, int] = (0.0, -1, -1)  # time, start and row of an event
    sources: dict[str, float] = field(default_factory=dict)
    children: dict[str, _Node] = field(default_factory=dict)

    def add(self, other: _Node) -> None:
        self.time_ns += other.time_ns
        self.names += other.names
        self.longest = max(self.longest, other.longest)
        for line, time in other.sources.items():
            self.sources[line] = self.sources.get(line, 0.0) + time

    def merge(self, other: _Node) -> None:
        self.add(other)
        for name, child in other.children.items():
            self.children.setdefault(name, _Node()).merge(child)


def named_events(
    trace: Trace, events: Events, within: Spans, count: int, per: str, gpus: Sequence[int],
    calls: CallScopes | None = None,
) -> tuple[Culprit, ...]:
    """The culprits of these events, as far as ``within`` (the steps, ``count`` of them) goes; the mean of ``gpus``.
    ``calls``: of PyTorch's kernels, which name no op, the modules and calls around their launches. Empty where ops are
    named for less than half of the time."""
    device, rows = trace.device, events.rows
    time = coverage(within, device.start_ns[rows], device.end_ns[rows]) if events.time_ns is None else events.time_ns
    gpus = events.more_on or gpus
    if events.only_on:
        keep = _only_on(trace, rows, op_keys(trace, rows, calls), events.only_on, calls)
        rows, time, gpus = rows[keep], time[keep], events.only_on
    ops, whole_ns = _by_op(trace, events.found() if events.found is not None else [(rows, time)], calls)
    root = _scopes(trace, ops, calls)
    if root.time_ns <= 0 or root.time_ns < _NAMED_PART * whole_ns:
        return ()
    unit = count * max(len(gpus), 1) * 1e9

    def culprit(name: str, node: _Node) -> Culprit:
        row = node.longest[-1]
        while name and len(node.children) == 1:
            (part, child), = node.children.items()
            if child.time_ns < node.time_ns:
                break
            name, node = f"{name}/{part}", child
        return Culprit(
            name[:_MAX_NAME] + ("/*" if node.children else ""), "layer" if node.children else "op",
            node.time_ns / unit if events.timed else None, per, node.names, events.only_on,
            max(node.sources, key=lambda line: node.sources[line], default=""),
            gpu_number(trace, int(device.gpu[row])), float(device.start_ns[row]) / 1e9, more_on=events.more_on)

    groups = _opened(root)
    shown = [culprit(name, node) for name, node in groups[:MAX_CULPRITS]]
    if len(groups) > MAX_CULPRITS:
        rest = _Node()
        for _, node in groups[MAX_CULPRITS:]:
            rest.add(node)
        shown.append(culprit("", rest))
    return tuple(shown)


def _only_on(trace: Trace, rows: I64, key: I64, gpus: Sequence[int], calls: CallScopes | None) -> Mask:
    """Events of ops that run on these GPUs and on no other."""
    number = np.array([gpu_number(trace, g) for g in range(len(trace.gpus))], np.int64)[trace.device.gpu[rows]]
    here = np.isin(number, gpus)
    elsewhere = {_stem(_name(trace, op, calls)[0]) for op in np.unique(key[~here & (key >= 0)]).tolist()}
    only_here = [op for op in np.unique(key[here & (key >= 0)]).tolist()
                 if _stem(_name(trace, op, calls)[0]) not in elsewhere]
    return here & np.isin(key, only_here)


def _scopes(trace: Trace, ops: Iterable[tuple[int, _Node]], calls: CallScopes | None) -> _Node:
    """Root of the scopes of these ops, as far as they have names."""
    root, seen = _Node(), set()
    for op, node in ops:
        path, source = _name(trace, op, calls)
        if not path:
            continue
        node.names = int(path not in seen)  # a replica's is the same op
        seen.add(path)
        if source:
            node.sources[source] = node.time_ns
        scope = root
        scope.add(node)
        for part in path[:_MAX_DEPTH]:
            scope = scope.children.setdefault(part, _Node())
            scope.add(node)
    return root


def op_keys(trace: Trace, rows: I64 | slice, calls: CallScopes | None) -> I64:
    """Key of each event's op: the op of its program, or that many plus the index of its op's name, or, where the trace
    names no op at all, the scope of its launch; -1: none."""
    device, many = trace.device, len(trace.hlo_ops)
    if calls is not None:
        return calls.of_event[rows]
    key = device.tf_op[rows].astype(np.int64)
    if not many:
        return key
    key[key >= 0] += many
    return np.where(device.hlo[rows] >= 0, device.hlo[rows], key)


def _name(trace: Trace, op: int, calls: CallScopes | None) -> tuple[tuple[str, ...], str]:
    """Path and line of source of an op; empty where it has none."""
    many = len(trace.hlo_ops)
    if calls is not None:
        return calls.scopes[op].path, ""
    name, source = (trace.hlo_ops[op].op_name, trace.hlo_ops[op].source) if op < many else (trace.names[op - many], "")
    return scope_of(name, False).path or ((name,) if name else ()), source


def _stem(path: Sequence[str]) -> str:
    """The same for names that differ in their numbering alone: TensorFlow numbers the replicas' ops on."""
    return _NUMBER.sub("", "/".join(path)).replace("_", "")


def _by_op(trace: Trace, parts: Iterable[tuple[I64, I64]], calls: CallScopes | None,
           ) -> tuple[list[tuple[int, _Node]], float]:
    """The ops of these events, given as rows and times in parts, and the time of all, also of those that name none."""
    size = len(trace.hlo_ops) + len(trace.names) if calls is None else len(calls.scopes)
    total, longest, first = np.zeros(size), np.zeros(size, np.int64), np.zeros(size, np.int64)
    start_ns, whole_ns, at_once = trace.device.start_ns, 0.0, max(AT_ONCE, size)
    for row, time in ((rows[i:i + at_once], time_ns[i:i + at_once]) for rows, time_ns in parts
                      for i in range(0, len(rows), at_once)):
        whole_ns += float(time.sum())
        key = op_keys(trace, row, calls)
        with_op = rows_of((key >= 0) & (time > 0))
        row, time, key, before = row[with_op], time[with_op], key[with_op], longest.copy()
        total += np.bincount(key, time, size)
        np.maximum.at(longest, key, time)
        at_longest = np.flatnonzero(time == longest[key])
        begin_ns = start_ns[row[at_longest]]
        sooner = (longest > before)[key[at_longest]] | (begin_ns < start_ns[first[key[at_longest]]])
        at_longest = at_longest[sooner][np.argsort(begin_ns[sooner], kind="stable")][::-1]
        first[key[at_longest]] = row[at_longest]  # of equal ones the first
    return [(op, _Node(float(total[op]), 1, (float(longest[op]), int(start_ns[first[op]]), int(first[op]))))
            for op in np.flatnonzero(total).tolist()], whole_ns


def _opened(root: _Node) -> list[tuple[str, _Node]]:
    """The tree as a few named parts, those of most time first."""
    groups = [("", root)]
    for _ in range(_MAX_DEPTH):
        name, node = groups[0]
        parts = _parts(node, root.time_ns) if node.time_ns >= _OPENED_FROM * root.time_ns else None
        if parts is None:
            break
        opened = [(f"{name}/{part}".strip("/"), child) for part, child in parts]
        groups = sorted([*opened, *groups[1:]], key=lambda group: (-group[1].time_ns, group[0]))
    return groups


def _parts(node: _Node, whole_ns: float) -> list[tuple[str, _Node]] | None:
    """Parts of a scope, siblings that differ in a number alone as one where that is needed; None: too many small
    parts."""
    children = dict(node.children)
    inner = sum(child.time_ns for child in children.values())
    for same in (False, True):
        if same:
            children, by_stem = {}, dict[str, list[str]]()
            for name in node.children:
                by_stem.setdefault(_NUMBER.sub("*", name), []).append(name)
            for stem, alike in by_stem.items():
                several = children[stem if len(alike) > 1 else alike[0]] = _Node()
                for name in alike:
                    several.merge(node.children[name])
        if max((child.time_ns for child in children.values()), default=0.0) >= _NAMED_FROM * whole_ns:
            alone = _Node(node.time_ns - inner, 1, node.longest)  # an op whose name is also a scope of others
            return [*children.items(), *([("", alone)] if alone.time_ns > 0.5 else [])]
    return None


# -- excess -------------------------------------------------------------------------------------------
#
# Ops that make one replica compute longer than the others, or whether it takes longer for everything alike.

_MIN_NET_SHARE = 0.5  # share of what some ops take longer: so much is left when what others take less is subtracted
_MIN_PROPORTION = 0.5  # share of what all together take longer, in proportion
_NAMED = 0.5  # share of the time: with fewer ops named, kernels are compared by their names
_SHAPES_KNOWN = 0.9  # share of the kernels


class Excess(Struct, frozen=True):
    """Excess of one GPU's compute time over the others: ``rows`` are its kernels, ``time_ns`` is how much of each that
    is, by its op; ``total_ns`` all together, ``own_ns`` of it in ops that the others do not run.

    ``alike`` is the share of the others' time in ops that take longer here by half as much as all do together, and
    more: 1 where each takes longer, as on a GPU with lower clocks or with a larger part of each batch. ``blocks`` is
    how many times as many blocks of threads its kernels have, None: not known. ``by_op``: whether ops were compared,
    not kernels.
    """

    rows: I64
    time_ns: I64
    total_ns: int
    own_ns: int
    alike: float
    blocks: float | None
    by_op: bool


def excess_of(
    trace: Trace, heavy: GpuTimeline, others: Sequence[GpuTimeline], within: Spans, calls: CallScopes | None = None,
) -> Excess | None:
    """``within``: the time to compare. None where it does not compute longer, or ops take longer and less by turns."""
    device = trace.device
    all_rows = [timeline.computing for timeline in (heavy, *others)]
    times = [coverage(within, device.start_ns[rows], device.end_ns[rows]) for rows in all_rows]
    keys = [op_keys(trace, rows, calls) for rows in all_rows]
    whole = sum(int(time.sum()) for time in times)
    by_op = sum(int(time[key >= 0].sum()) for time, key in zip(times, keys, strict=True)) >= _NAMED * whole
    if not by_op:
        keys = [device.name[rows].astype(np.int64) for rows in all_rows]
    distinct, which = np.unique(np.concatenate(keys), return_inverse=True)
    stems: dict[str, int] = {}
    number = np.array([stems.setdefault(  # the name that the same op of different replicas has in common
        str(key) if not by_op else _stem(_name(trace, key, calls)[0]) if key >= 0 else "", len(stems))
                       for key in distinct.tolist()], np.int64)[which]
    stem_of_event, *rest = np.split(number, np.cumsum([len(rows) for rows in all_rows])[:-1])
    of_heavy = np.bincount(stem_of_event, times[0], len(stems))
    usual = np.median([np.bincount(stem, time, len(stems)) for stem, time in zip(rest, times[1:], strict=True)], axis=0)
    longer = np.maximum(of_heavy - usual, 0)
    total = float((of_heavy - usual).sum())
    if not usual.sum() or total <= 0 or total < _MIN_NET_SHARE * longer.sum():
        return None
    alike = float(usual[longer >= _MIN_PROPORTION * total / usual.sum() * usual].sum() / usual.sum())
    share = np.divide(longer, of_heavy, out=np.zeros(len(stems)), where=of_heavy > 0)
    return Excess(all_rows[0], np.rint(times[0] * share[stem_of_event]).astype(np.int64), round(total),
                  round(float(of_heavy[usual == 0].sum())), alike, _blocks_ratio(trace, all_rows, times), by_op)


def _blocks_ratio(trace: Trace, all_rows: Sequence[I64], times: Sequence[I64]) -> float | None:
    blocks = np.array([shape.grid[0] * shape.grid[1] * shape.grid[2] for shape in trace.launch_shapes] + [0], float)
    sums = []
    for rows, time in zip(all_rows, times, strict=True):
        shape = trace.device.shape[rows[time > 0]]
        if not len(shape) or np.count_nonzero(shape >= 0) < _SHAPES_KNOWN * len(shape):
            return None
        sums.append(float(blocks[shape].sum()))
    usual = float(np.median(sums[1:]))
    return sums[0] / usual if usual else None
