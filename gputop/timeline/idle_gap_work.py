"""Work of each of the host's threads in given periods of time; all periods in few passes over the events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import numpy as np
from msgspec import Struct

from gputop.analysis.host.gaps import charge, marks, shown_name, step_calls
from gputop.analysis.steps.model import Steps
from gputop.text.units import printable
from gputop.timeline.model import IdleWork
from gputop.trace.model import I64, Trace
from gputop.trace.threads import EXECUTOR, INPUT, MAIN, POOL, role

MAX_WORKS = 8  # of a period
_MAX_PER_THREAD = 3  # so that other threads are listed, too
_MIN_SHARE = 0.01  # share of the period's length
_EVENTS_PER_PASS = 1_000_000
# The roles of the threads that matter, by the cause of the gap (gputop.timeline.model.CAUSES).
_ROLES_BY_CAUSE = {"input": (INPUT,), "gap": (MAIN,), "tracing": (MAIN,), "eager": (MAIN,)}
_LAUNCHING_ROLES = (MAIN, EXECUTOR)
# Causes for which the GPUs wait for one thread, so that its time without an event is worth listing.
_ONE_THREAD_CAUSES = ("gap", "tracing", "eager", "dispatch")


class IdlePeriod(Struct, frozen=True):
    """A period in which GPUs (indices into Trace.gpus) are idle, its cause, and the thread (a line) that launched what
    ended it, -1 where that is not known. Only work of these GPUs' hosts counts."""

    start_ns: int
    end_ns: int
    cause: str
    gpus: tuple[int, ...]
    launcher: int = -1


def host_work_in(trace: Trace, steps: Steps | None, periods: Sequence[IdlePeriod]) -> list[tuple[IdleWork, ...]]:
    """Work of the host in each period, at most :data:`MAX_WORKS`: threads that matter for its cause first, by time.
    Where the cause is in :data:`_ONE_THREAD_CAUSES`, the thread that was to launch, or between steps the training
    loop's, also has an entry for the time in which it has no event."""
    out: list[tuple[IdleWork, ...]] = [()] * len(periods)
    if not len(trace.host) or not periods:
        return out
    loops = np.unique(trace.host.line[step_calls(trace, steps)]).tolist() if steps is not None else []
    roles = [role(line.name) for line in trace.lines]
    shown = cache(lambda name: printable(shown_name(trace.names[name])))
    for chosen, rows, period_of in _passes(trace, periods):
        for number, works in zip(chosen, _works(trace, [periods[i] for i in chosen], rows, period_of), strict=True):
            out[number] = _ranked(trace, periods[number], works, loops, roles, shown)
    return out


def _ranked(
    trace: Trace, period: IdlePeriod, charges: Sequence[tuple[int, int, int, int]], loops: Sequence[int],
    roles: Sequence[str], shown: Callable[[int], str],
) -> tuple[IdleWork, ...]:
    hosts = {trace.gpus[gpu].host for gpu in period.gpus}
    works = [(time, line, shown(name)) for line, name, time, _ in charges
             if trace.lines[line].host in hosts and time >= _MIN_SHARE * (period.end_ns - period.start_ns)]
    if period.launcher >= 0 and (period.cause == "dispatch" or (not loops and roles[period.launcher] == MAIN)):
        loops = [period.launcher]
    for line in loops if period.cause in _ONE_THREAD_CAUSES else ():
        silent = period.end_ns - period.start_ns - sum(outer for on, _, _, outer in charges if on == line)
        if silent >= _MIN_SHARE * (period.end_ns - period.start_ns) and trace.lines[line].host in hosts:
            works.append((silent, line, ""))
    matter = _ROLES_BY_CAUSE.get(period.cause, _LAUNCHING_ROLES)

    def rank(work: tuple[IdleWork, int]) -> tuple[bool, bool, int, str, str]:
        host_work, line = work
        other_thread = matter is _LAUNCHING_ROLES and line != period.launcher
        return (host_work.role not in matter, other_thread, -host_work.time_ns, host_work.thread, host_work.op)

    kept: list[IdleWork] = []
    seen: dict[str, int] = {}
    for own_work, _ in sorted(_by_pool(trace, works, roles), key=rank):
        seen[own_work.thread] = seen.get(own_work.thread, 0) + 1
        if seen[own_work.thread] <= _MAX_PER_THREAD and len(kept) < MAX_WORKS:
            kept.append(own_work)
    return tuple(kept)


def _by_pool(trace: Trace, works: Sequence[tuple[int, int, str]], roles: Sequence[str]) -> list[tuple[IdleWork, int]]:
    """The works with their lines; the same work of many threads of a pool is one, with the mean of their times."""
    out = []
    pools: dict[tuple[str, str, str], list[tuple[int, int]]] = {}
    for time, line, op in works:
        name = trace.lines[line].name
        if roles[line] in (INPUT, POOL):
            pools.setdefault((name.rsplit("/", 1)[0], roles[line], op), []).append((time, line))
        else:
            out.append((IdleWork(printable(name), roles[line], op, time), line))
    for (pool, kind, op), members in pools.items():
        line = members[0][1]
        thread = f"{pool} ({len(members)} threads)" if len(members) > 1 else trace.lines[line].name
        mean = sum(time for time, _ in members) // len(members)
        out.append((IdleWork(printable(thread), kind, op, mean, len(members)), line))
    return out


def _passes(trace: Trace, periods: Sequence[IdlePeriod]) -> Iterator[tuple[list[int], I64, I64]]:
    """Yield for each pass its periods (by number), the host events in them, and for each event its period."""
    host = trace.host
    starts = np.array([period.start_ns for period in periods], np.int64)
    first = np.searchsorted(host.start_ns, starts)
    last = np.searchsorted(host.start_ns, [period.end_ns for period in periods])
    points = np.unique(starts)
    # Of the events that began before a period only the few that are still open in one are needed.
    open_ = np.flatnonzero(np.searchsorted(points, host.end_ns) > np.searchsorted(points, host.start_ns, side="right"))
    chosen: list[int] = []
    pieces: list[I64] = []
    before, passed, events = open_[:0], 0, 0
    for number in np.argsort(starts, kind="stable").tolist():
        began = int(np.searchsorted(open_, first[number]))
        before = np.concatenate((before, open_[passed:began]))
        before, passed = before[host.end_ns[before] > starts[number]], began
        chosen.append(number)
        pieces.append(np.concatenate((before, np.arange(first[number], last[number]))))
        events += len(pieces[-1])
        if events >= _EVENTS_PER_PASS:
            yield chosen, np.concatenate(pieces), np.repeat(np.arange(len(pieces)), [len(p) for p in pieces])
            chosen, pieces, events = [], [], 0
    if chosen:
        yield chosen, np.concatenate(pieces), np.repeat(np.arange(len(pieces)), [len(p) for p in pieces])


def _works(
    trace: Trace, periods: Sequence[IdlePeriod], rows: I64, period_of: I64,
) -> list[list[tuple[int, int, int, int]]]:
    """Work of each period: (line, name, nanoseconds of its own, nanoseconds in which that is the outermost event)."""
    host = trace.host
    start = np.array([period.start_ns for period in periods], np.int64)[period_of]
    end = np.array([period.end_ns for period in periods], np.int64)[period_of]
    inside = np.minimum(host.end_ns[rows], end) - np.maximum(host.start_ns[rows], start)
    work = (inside > 0) & ~marks(trace)[rows]
    rows, period_of, inside = rows[work], period_of[work], inside[work]
    group = period_of * len(trace.lines) + host.line[rows]
    charged = charge(trace, rows, inside, group)
    keys, which = np.unique(group * len(trace.names) + charged.name, return_inverse=True)
    own_ns = np.bincount(which, weights=charged.own_ns, minlength=len(keys)).astype(np.int64)
    outer = np.bincount(which, weights=charged.outer_ns, minlength=len(keys)).astype(np.int64)
    out: list[list[tuple[int, int, int, int]]] = [[] for _ in periods]
    for key, time, outermost in zip(keys.tolist(), own_ns.tolist(), outer.tolist(), strict=True):
        rest, name = divmod(key, len(trace.names))
        period, line = divmod(rest, len(trace.lines))
        out[period].append((line, name, time, outermost))
    return out
