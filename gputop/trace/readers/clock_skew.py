"""The clocks of a job's hosts, from the collectives that they ran together.

A collective that every rank takes part in ends on all of them within microseconds, and on none before
the last has begun it. The i-th of one host is the i-th of another, but where the hosts' windows begin
a little apart some are missing at the edges, and which is the first common one is to be found.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gputop.text.units import seconds
from gputop.trace.builder import TraceBuilder
from gputop.trace.model import I64, DeviceEvents, HostEvents, Kind
from gputop.trace.readers.clock_file import HostClock

# Clocks that nobody said anything about: NTP keeps them within milliseconds, a node without it within a second or so.
_UNKNOWN_NS = 1_000_000_000
_FEWEST = 5
_MOST = 20_000  # of the first collectives; more do not make it better
_MOST_SHIFTS = 200
_BEFORE_START_NS = 50_000  # by which a recorded end may lie before another rank's beginning: the tracer's own jitter
_CLEAR = 3.0  # how much worse the second best must fit
# TensorFlow's collective ops on the host, "scope/CollectiveReduceV2:CollectiveReduceV2": all wait for all.
_HOST_COLLECTIVE = re.compile(r"Collective(Reduce|Gather|ReduceScatter|AllToAll)\w*$")


class Skew(NamedTuple):
    """``offset_ns`` is the second clock less the first; nine of ten ends agree within ``error_ns`` after it."""

    offset_ns: int
    error_ns: int
    matched: int


def skew(a_start: I64, a_end: I64, b_start: I64, b_end: I64, within_ns: int) -> Skew | str:
    """From the same collectives on two hosts, each sorted by start; or why they do not tell.

    ``within_ns``: by how much the clocks can differ at most.
    """
    a_start, a_end, b_start, b_end = (times[:_MOST] for times in (a_start, a_end, b_start, b_end))
    fewest = min(len(a_end), len(b_end))
    if fewest < _FEWEST:
        return f"only {fewest} collectives are in both"
    found: list[tuple[float, Skew]] = []
    reach = min(_MOST_SHIFTS, fewest // 2)
    for shift in range(-reach, reach + 1):  # b's i-th is a's (i + shift)-th
        i, j = max(0, shift), max(0, -shift)
        n = min(len(a_end) - i, len(b_end) - j)
        apart = b_end[j:j + n] - a_end[i:i + n]
        offset = float(np.median(apart))
        if n < max(_FEWEST, fewest // 2) or abs(offset) > within_ns:
            continue
        lowest = int((b_start[j:j + n] - a_end[i:i + n]).max())
        highest = int((b_end[j:j + n] - a_start[i:i + n]).min())
        if lowest - _BEFORE_START_NS > offset or offset > highest + _BEFORE_START_NS:
            continue
        off = np.abs(apart - offset)
        found.append((float(off.mean()), Skew(round(offset), int(np.percentile(off, 90)), n)))
    if not found:
        return f"no match of them fits clocks that differ by up to {seconds(within_ns / 1e9)}"
    found.sort(key=lambda one: one[0])
    if len(found) > 1 and found[1][0] < _CLEAR * found[0][0] + 1000:
        return f"{len(found)} ways to match them fit as well"
    return found[0][1]


@dataclass(slots=True)
class HostSlices:
    """What one file gave: where its pieces lie in the builder, and what is known of its clock."""

    name: str
    machine: str
    device: slice
    host: slice
    allocator: slice
    clock: HostClock | None


def align(builder: TraceBuilder, hosts: Sequence[HostSlices]) -> list[int]:
    """Move the events of each host to the first one's clock where collectives tell it; returns by how much (ns).

    Processes of one machine share its clock, so they are moved together, whichever of them tells it. What was done,
    and how sure it is, goes into the notes.
    """
    moved = [0] * len(hosts)
    machines: dict[str, list[HostSlices]] = {}
    for host in hosts:
        machines.setdefault(host.machine, []).append(host)
    first = hosts[0]
    own = _collectives(builder, first) if len(machines) > 1 else None
    offsets = {first.machine: (first, 0)}
    for machine, processes in machines.items():
        if own is not None and machine != first.machine:
            offsets[machine] = _offset(builder, first, own, processes)
    for i, host in enumerate(hosts):
        told, offset_ns = offsets[host.machine]
        # Each file's times are less what the capture took its clock to be ahead, measured anew for every process.
        moved[i] = _ahead_ns(host) - _ahead_ns(told) - offset_ns
        if moved[i]:
            _move(builder, host, moved[i])
    return moved


def _ahead_ns(host: HostSlices) -> int:
    return host.clock.offset_ns if host.clock is not None else 0


def _offset(
    builder: TraceBuilder, first: HostSlices, own: tuple[I64, I64], processes: Sequence[HostSlices],
) -> tuple[HostSlices, int]:
    """The first of a machine's processes whose collectives tell its clock, and by how much that is ahead of the
    first host's (ns); the first of all and 0 where none does. ``own`` are the first host's collectives."""
    notes = []
    for other in processes:
        known = [h.clock.error_ns for h in (first, other) if h.clock is not None]
        within_ns = max(sum(known), 1_000_000) if len(known) == 2 else _UNKNOWN_NS
        others = _collectives(builder, other)
        found = skew(*own, *others, within_ns)
        both = f"The clocks of {first.name} and {other.name}"
        if isinstance(found, str):
            by_capture = f"by the capture they are known to {seconds(sum(known) / 1e9)}" if len(known) == 2 else (
                "they are taken as they are")
            if len(known) == 2 or (len(own[0]) and len(others[0])):
                notes.append(f"{both} cannot be compared by collectives ({found}): {by_capture}.")
        elif abs(found.offset_ns) <= found.error_ns:
            builder.note("clocks", f"{both} agree to {seconds(found.error_ns / 1e9)} by {found.matched} collectives.")
            return other, 0
        else:
            builder.note("clocks", f"The clock of {other.name} was {seconds(abs(found.offset_ns) / 1e9)} "
                         f"{'ahead of' if found.offset_ns > 0 else 'behind'} that of {first.name} by "
                         f"{found.matched} collectives, known to {seconds(found.error_ns / 1e9)}: taken into "
                         "account.")
            return other, found.offset_ns
    if notes:
        builder.note("clocks", notes[0])
    return processes[0], 0


def _collectives(builder: TraceBuilder, host: HostSlices) -> tuple[I64, I64]:
    """Starts and ends of the collectives of one GPU of a host, or of its host ops where no GPU ran any; by start."""
    device = [(events.gpu, events.start_ns, events.end_ns, events.kind) for events in builder.device[host.device]]
    if device:
        gpu, start, end, kind = (np.concatenate(columns) for columns in zip(*device, strict=True))
        rows = np.flatnonzero(kind == Kind.COLLECTIVE)
        rows = rows[gpu[rows] == gpu[rows[0]]] if len(rows) else rows
        if len(rows):
            return _by_start(start[rows], end[rows])
    names = builder.names.list
    starts, ends = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for events in builder.host[host.host]:
        used = np.unique(events.name)
        wanted = used[[bool(_HOST_COLLECTIVE.search(names[i])) for i in used.tolist()]] if len(used) else used
        rows = np.flatnonzero(np.isin(events.name, wanted))
        starts.append(events.start_ns[rows])
        ends.append(events.end_ns[rows])
    return _by_start(np.concatenate(starts), np.concatenate(ends))


def _by_start(start: I64, end: I64) -> tuple[I64, I64]:
    order = np.argsort(start, kind="stable")
    return start[order], end[order]


def _move(builder: TraceBuilder, host: HostSlices, by_ns: int) -> None:
    for device in builder.device[host.device]:
        _move_device(device, by_ns)
    for events in builder.host[host.host]:
        _move_host(events, by_ns)
    for allocator in builder.allocator[host.allocator]:
        allocator.time_ns += by_ns


def _move_device(events: DeviceEvents, by_ns: int) -> None:
    events.start_ns += by_ns
    events.end_ns += by_ns
    launched = events.launch_line >= 0
    events.launch_ns[launched] += by_ns
    events.launch_end_ns[launched] += by_ns


def _move_host(events: HostEvents, by_ns: int) -> None:
    events.start_ns += by_ns
    events.end_ns += by_ns
