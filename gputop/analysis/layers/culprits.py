"""The layers and ops behind some device events: a few names in place of ten thousand.

Names become a tree by their scopes, as in the table of layers. It is opened from the root down to where the time parts.
Siblings that differ in a number alone ("block_0", "block_1", …) are taken together where none of them takes much.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from gputop.analysis.gpu.device_time import gpu_number
from gputop.analysis.layers.scopes import scope_of
from gputop.core.findings import Culprit
from gputop.trace.intervals import Spans, coverage
from gputop.trace.lookups import host_rows
from gputop.trace.model import I64, Trace

_OPENED_FROM = 0.9  # of the time: a layer that has less stands as it is
_NAMED_FROM = 0.1  # of the time: where no part of a layer takes more, it is not opened
_NAMED_PART = 0.5  # of the time, below which names say too little
_MAX_DEPTH, _MAX_CULPRITS, _MAX_NAME = 12, 20, 160
_NUMBER = re.compile(r"\d+")
_AUTOGRAD = "autograd::engine::evaluate_function: "
_CALL = rf"aten::|{_AUTOGRAD}|Optimizer\.step#|c10d::|nccl:"


class Events(NamedTuple):
    """Device events (rows). ``time_ns`` of each, where that is not its length in the steps; ``only_on``: the GPUs (the
    job's numbers) of whose events only those count that no other GPU has; ``timed``: whether their times are told."""

    rows: I64
    time_ns: I64 | None = None
    only_on: tuple[int, ...] = ()
    timed: bool = True


@dataclass(slots=True)
class _Node:
    """A scope and all below it."""

    time_ns: float = 0.0
    names: int = 0
    longest: tuple[float, int] = (0.0, -1)  # time and row of an event
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
) -> tuple[Culprit, ...]:
    """The culprits of these events, as far as ``within`` (the steps, ``count`` of them) goes; the mean of ``gpus``.

    Empty where ops are named for less than half of the time.
    """
    device, rows = trace.device, events.rows
    time = coverage(within, device.start_ns[rows], device.end_ns[rows]) if events.time_ns is None else events.time_ns
    number = np.array([gpu_number(trace, g) for g in range(len(trace.gpus))], np.int64)[device.gpu[rows]]
    key = _ops(trace, rows)
    if events.only_on:
        here = np.isin(number, events.only_on)
        elsewhere = {_stem(_name(trace, op)[0]) for op in np.unique(key[~here & (key >= 0)]).tolist()}
        own = [op for op in np.unique(key[here & (key >= 0)]).tolist() if _stem(_name(trace, op)[0]) not in elsewhere]
        keep = here & np.isin(key, own)
        rows, time, number, key, gpus = rows[keep], time[keep], number[keep], key[keep], events.only_on
    known = np.flatnonzero((key >= 0) & (time > 0))
    root, seen = _Node(), set()
    for op, node in _by_op(rows[known], time[known], key[known]):
        path, source = _name(trace, op)
        if not path:
            continue
        node.names = int(path not in seen)  # a replica's is the same op
        seen.add(path)
        if source:
            node.sources[source] = node.time_ns
        at = root
        at.add(node)
        for part in path[:_MAX_DEPTH]:
            at = at.children.setdefault(part, _Node())
            at.add(node)
    if root.time_ns <= 0 or root.time_ns < _NAMED_PART * float(time.sum()):
        return ()
    unit = count * max(len(gpus), 1) * 1e9

    def culprit(name: str, node: _Node) -> Culprit:
        row = node.longest[1]
        while name and len(node.children) == 1:
            (part, child), = node.children.items()
            if child.time_ns < node.time_ns:
                break
            name, node = f"{name}/{part}", child
        return Culprit(
            name[:_MAX_NAME] + ("/*" if node.children else ""), "layer" if node.children else "op",
            node.time_ns / unit if events.timed else None, per, node.names, events.only_on,
            max(node.sources, key=lambda line: node.sources[line], default=""),
            gpu_number(trace, int(device.gpu[row])), float(device.start_ns[row]) / 1e9)

    groups = _opened(root)
    shown = [culprit(name, node) for name, node in groups[:_MAX_CULPRITS]]
    if len(groups) > _MAX_CULPRITS:
        rest = _Node()
        for _, node in groups[_MAX_CULPRITS:]:
            rest.add(node)
        shown.append(culprit("", rest))
    return tuple(shown)


def _ops(trace: Trace, rows: I64) -> I64:
    """For each event the op of its program, or that many plus the index of its op's name, or, where the trace names no
    op at all, of the call that launched it after all names; -1: none."""
    device, many = trace.device, len(trace.hlo_ops)
    if not many and not (device.tf_op >= 0).any():
        return _launching_calls(trace, rows)
    key = device.tf_op[rows].astype(np.int64)
    key[key >= 0] += many
    return np.where(device.hlo[rows] >= 0, device.hlo[rows], key) if many and len(device.hlo) else key


def _launching_calls(trace: Trace, rows: I64) -> I64:
    """By PyTorch's op, autograd function or optimizer that is the outermost around the launch."""
    device, host, out = trace.device, trace.host, np.full(len(rows), -1, np.int64)
    calls = host_rows(trace, _CALL)
    for line in np.unique(host.line[calls]).tolist():
        own = calls[host.line[calls] == line]
        own = own[np.lexsort((-host.end_ns[own], host.start_ns[own]))]
        start, until = host.start_ns[own], np.maximum.accumulate(host.end_ns[own])
        outermost = np.concatenate(([True], start[1:] >= until[:-1]))
        own, start = own[outermost], start[outermost]
        mine = np.flatnonzero((device.launch_line[rows] == line) & (device.launch_ns[rows] >= 0))
        launch = device.launch_ns[rows[mine]]
        at = np.searchsorted(start, launch, side="right") - 1
        inside = (at >= 0) & (launch < host.end_ns[own[np.maximum(at, 0)]])
        out[mine[inside]] = len(trace.names) + host.name[own[at[inside]]]
    return out


def _name(trace: Trace, op: int) -> tuple[tuple[str, ...], str]:
    """Path and line of source of an op; empty where it has none."""
    many = len(trace.hlo_ops)
    if op - many >= len(trace.names):
        return (trace.names[op - many - len(trace.names)].removeprefix(_AUTOGRAD),), ""
    name, source = (trace.hlo_ops[op].op_name, trace.hlo_ops[op].source) if op < many else (trace.names[op - many], "")
    return scope_of(name, False).path or ((name,) if name else ()), source


def _stem(path: Sequence[str]) -> str:
    """The same for names that differ in their numbering alone: TensorFlow numbers the replicas' ops on."""
    return _NUMBER.sub("", "/".join(path)).replace("_", "")


def _by_op(rows: I64, time: I64, key: I64) -> Iterator[tuple[int, _Node]]:
    total, longest = np.bincount(key, time), np.zeros(int(key.max(initial=-1)) + 1, np.int64)
    np.maximum.at(longest, key, time)
    at_longest = np.flatnonzero(time == longest[key])[::-1]
    first = np.zeros(len(longest), np.int64)
    first[key[at_longest]] = at_longest  # of equal ones the first
    for op in np.flatnonzero(total).tolist():
        at = int(first[op])
        yield op, _Node(float(total[op]), 1, (float(time[at]), int(rows[at])))


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
    """What a scope consists of, siblings that differ in a number alone as one where that is needed; None: too many
    small parts."""
    children = dict(node.children)
    inner = sum(child.time_ns for child in children.values())
    for same in (False, True):
        if same:
            children = {}
            for stem, alike in _alike(node.children).items():
                several = children[stem if len(alike) > 1 else alike[0]] = _Node()
                for name in alike:
                    several.merge(node.children[name])
        if max((child.time_ns for child in children.values()), default=0.0) >= _NAMED_FROM * whole_ns:
            own = _Node(node.time_ns - inner, 1, node.longest)  # an op whose name is also a scope of others
            return [*children.items(), *([("", own)] if own.time_ns > 0.5 else [])]
    return None


def _alike(names: Iterable[str]) -> dict[str, list[str]]:
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(_NUMBER.sub("*", name), []).append(name)
    return alike
