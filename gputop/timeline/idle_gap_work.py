"""What the host's threads did at given places of time, each for itself; all places in few passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from gputop.analysis.host.gaps import charge, step_calls, without_prefix
from gputop.analysis.results import Steps
from gputop.text.units import printable
from gputop.timeline.model import HostWork
from gputop.trace.model import I64, Trace
from gputop.trace.threads import EXECUTOR, INPUT, MAIN, POOL, role

KEPT = 8  # works of a place
_OF_A_THREAD = 3  # at most, so that other threads are seen, too
_LEAST = 0.01  # of the place's length
_AT_ONCE = 1_000_000  # events taken together
# The threads that matter, by why the GPUs stand still (gputop.timeline.model.CAUSES).
_MATTERS = {"input": (INPUT,), "gap": (MAIN,), "tracing": (MAIN,), "eager": (MAIN,)}
_LAUNCHERS = (MAIN, EXECUTOR)
# Where the GPUs wait for what one thread does next, its time without an event tells something.
_ONE_THREAD = ("gap", "tracing", "eager", "dispatch")


class Place(NamedTuple):
    """A stretch of time, why GPUs stand still in it, which (indices into Trace.gpus: their hosts are looked at), and
    the thread that launched what ended it, -1 where that is not known."""

    start_ns: int
    end_ns: int
    cause: str
    gpus: tuple[int, ...]
    launcher: int = -1


def work_at(trace: Trace, steps: Steps | None, places: Sequence[Place]) -> list[tuple[HostWork, ...]]:
    """For each place the host's work, at most :data:`KEPT`: threads that matter for its cause first, then by time.

    Where the host is at fault, the thread that was to launch, or between the steps the training loop's, also shows the
    time in which it has no event.
    """
    out: list[tuple[HostWork, ...]] = [()] * len(places)
    if not len(trace.host) or not places:
        return out
    loops = np.unique(trace.host.line[step_calls(trace, steps)]).tolist() if steps is not None else []
    roles = [role(line.name) for line in trace.lines]
    for chosen, rows, at in _passes(trace, places):
        for number, own in zip(chosen, _works(trace, [places[i] for i in chosen], rows, at), strict=True):
            out[number] = _ranked(trace, places[number], own, loops, roles)
    return out


def _ranked(
    trace: Trace, place: Place, own: Sequence[tuple[int, int, int, int]], loops: Sequence[int], roles: Sequence[str],
) -> tuple[HostWork, ...]:
    hosts = {trace.gpus[gpu].host for gpu in place.gpus}
    works = [(time, line, printable(without_prefix(trace.names[name]))) for line, name, time, _ in own
             if trace.lines[line].host in hosts and time >= _LEAST * (place.end_ns - place.start_ns)]
    if place.launcher >= 0 and (place.cause == "dispatch" or (not loops and roles[place.launcher] == MAIN)):
        loops = [place.launcher]
    for line in loops if place.cause in _ONE_THREAD else ():
        silent = place.end_ns - place.start_ns - sum(outer for on, _, _, outer in own if on == line)
        if silent >= _LEAST * (place.end_ns - place.start_ns) and trace.lines[line].host in hosts:
            works.append((silent, line, ""))
    matter = _MATTERS.get(place.cause, _LAUNCHERS)

    def rank(work: tuple[HostWork, int]) -> tuple[bool, bool, int, str, str]:
        own, line = work
        return (own.role not in matter, matter is _LAUNCHERS and line != place.launcher, -own.time_ns, own.thread,
                own.op)

    kept: list[HostWork] = []
    seen: dict[str, int] = {}
    for own_work, _ in sorted(_by_pool(trace, works, roles), key=rank):
        seen[own_work.thread] = seen.get(own_work.thread, 0) + 1
        if seen[own_work.thread] <= _OF_A_THREAD and len(kept) < KEPT:
            kept.append(own_work)
    return tuple(kept)


def _by_pool(
    trace: Trace, works: Sequence[tuple[int, int, str]], roles: Sequence[str],
) -> list[tuple[HostWork, int]]:
    """The works with their lines; what many threads of a pool do is one, with the mean of their times."""
    out = []
    pools: dict[tuple[str, str, str], list[tuple[int, int]]] = {}
    for time, line, op in works:
        name = trace.lines[line].name
        if roles[line] in (INPUT, POOL):
            pools.setdefault((name.rsplit("/", 1)[0], roles[line], op), []).append((time, line))
        else:
            out.append((HostWork(printable(name), roles[line], op, time), line))
    for (pool, kind, op), own in pools.items():
        line = own[0][1]
        thread = f"{pool} ({len(own)} threads)" if len(own) > 1 else trace.lines[line].name
        mean = sum(time for time, _ in own) // len(own)
        out.append((HostWork(printable(thread), kind, op, mean, len(own)), line))
    return out


def _passes(trace: Trace, places: Sequence[Place]) -> Iterator[tuple[list[int], I64, I64]]:
    """Places (by number) a pass, the host events that lie in them, and by event which of them it is in."""
    host = trace.host
    starts = np.array([place.start_ns for place in places], np.int64)
    first = np.searchsorted(host.start_ns, starts)
    last = np.searchsorted(host.start_ns, [place.end_ns for place in places])
    points = np.unique(starts)
    # Of events that began before a place only those count that are still open at one: few.
    open_ = np.flatnonzero(np.searchsorted(points, host.end_ns) > np.searchsorted(points, host.start_ns, side="right"))
    chosen: list[int] = []
    pieces: list[I64] = []
    for number in range(len(places)):
        before = open_[(host.start_ns[open_] < starts[number]) & (host.end_ns[open_] > starts[number])]
        chosen.append(number)
        pieces.append(np.concatenate((before, np.arange(first[number], last[number]))))
        if sum(map(len, pieces)) >= _AT_ONCE or number == len(places) - 1:
            yield chosen, np.concatenate(pieces), np.repeat(np.arange(len(pieces)), [len(p) for p in pieces])
            chosen, pieces = [], []


def _works(trace: Trace, places: Sequence[Place], rows: I64, at: I64) -> list[list[tuple[int, int, int, int]]]:
    """For each place (line, name, nanoseconds of its own, nanoseconds in which that is the outermost event)."""
    host = trace.host
    start = np.array([place.start_ns for place in places], np.int64)[at]
    end = np.array([place.end_ns for place in places], np.int64)[at]
    inside = np.minimum(host.end_ns[rows], end) - np.maximum(host.start_ns[rows], start)
    rows, at, inside = rows[inside > 0], at[inside > 0], inside[inside > 0]
    group = at * len(trace.lines) + host.line[rows]
    charged = charge(trace, rows, inside, group)
    keys, which = np.unique(group * len(trace.names) + charged.name, return_inverse=True)
    own = np.bincount(which, weights=charged.own_ns, minlength=len(keys)).astype(np.int64)
    outer = np.bincount(which, weights=charged.outer_ns, minlength=len(keys)).astype(np.int64)
    out: list[list[tuple[int, int, int, int]]] = [[] for _ in places]
    for key, time, outermost in zip(keys.tolist(), own.tolist(), outer.tolist(), strict=True):
        rest, name = divmod(key, len(trace.names))
        place, line = divmod(rest, len(trace.lines))
        out[place].append((line, name, time, outermost))
    return out
