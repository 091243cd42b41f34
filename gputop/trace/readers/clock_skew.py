"""The offsets between the clocks of a job's hosts, from the collectives that they ran together.

A collective in which every rank takes part ends on all of them within microseconds, and on none before the last rank
has begun it. Where the hosts' windows begin at different times some collectives are missing at the edges, so the shift
between the two sequences has to be found as well (docs/contributing/trace-notes.md, "Clocks").
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from gputop.text.units import seconds
from gputop.trace.builder import TraceBuilder
from gputop.trace.model import I64, Kind
from gputop.trace.readers.clock_file import HostClock

# Largest offset where the capture measured none: NTP keeps clocks within milliseconds, a node without it drifts by
# about a second.
_UNMEASURED_OFFSET_NS = 1_000_000_000
_MIN_COLLECTIVES = 5
_MAX_COLLECTIVES = 20_000  # the first of them; more do not improve the result
_MAX_SHIFT = 200
_TRACER_JITTER_NS = 50_000  # by which a recorded end may precede another rank's start
_RUNNER_UP_FACTOR = 3.0  # how much worse the second best shift must fit
# TensorFlow's collective ops on the host, "scope/CollectiveReduceV2:CollectiveReduceV2": all wait for all.
_HOST_COLLECTIVE = re.compile(r"Collective(Reduce|Gather|ReduceScatter|AllToAll)\w*$")


class Skew(Struct, frozen=True):
    """``offset_ns`` is the second clock less the first; with it nine of ten ends agree within ``error_ns``."""

    offset_ns: int
    error_ns: int
    matched: int


def skew(a_start: I64, a_end: I64, b_start: I64, b_end: I64, within_ns: int) -> Skew | str:
    """The skew from the same collectives on two hosts, each sorted by start; a text says why there is none.

    ``within_ns``: the largest possible difference of the clocks.
    """
    a_start, a_end, b_start, b_end = (times[:_MAX_COLLECTIVES] for times in (a_start, a_end, b_start, b_end))
    fewest = min(len(a_end), len(b_end))
    if fewest < _MIN_COLLECTIVES:
        return f"they have only {fewest} collectives in common"
    candidates: list[tuple[float, Skew]] = []
    reach = min(_MAX_SHIFT, fewest // 2)
    for shift in range(-reach, reach + 1):  # b's i-th is a's (i + shift)-th
        i, j = max(0, shift), max(0, -shift)
        n = min(len(a_end) - i, len(b_end) - j)
        apart = b_end[j:j + n] - a_end[i:i + n]
        offset = float(np.median(apart))
        if n < max(_MIN_COLLECTIVES, fewest // 2) or abs(offset) > within_ns:
            continue
        lowest = int((b_start[j:j + n] - a_end[i:i + n]).max())
        highest = int((b_end[j:j + n] - a_start[i:i + n]).min())
        if lowest - _TRACER_JITTER_NS > offset or offset > highest + _TRACER_JITTER_NS:
            continue
        off = np.abs(apart - offset)
        candidates.append((float(off.mean()), Skew(round(offset), int(np.percentile(off, 90)), n)))
    if not candidates:
        return f"no way to match them fits clocks that differ by up to {seconds(within_ns / 1e9)}"
    candidates.sort(key=lambda one: one[0])
    if len(candidates) > 1 and candidates[1][0] < _RUNNER_UP_FACTOR * candidates[0][0] + 1000:
        return f"{len(candidates)} ways to match them fit equally well"
    return candidates[0][1]


class HostSlices(Struct):
    """Slices of the builder's columns that came from one file, and what is known of its clock."""

    name: str
    machine: str
    device: slice
    host: slice
    allocator: slice
    clock: HostClock | None


def align(builder: TraceBuilder, hosts: Sequence[HostSlices]) -> list[int]:
    """Move the events of each host to the first one's clock, as collectives show it; returns by how much (ns).

    Processes of one machine share its clock and are moved together; the first of them whose collectives match gives
    the offset. A quality note says what was done and how exact it is.
    """
    moved = [0] * len(hosts)
    machines: dict[str, list[HostSlices]] = {}
    for host in hosts:
        machines.setdefault(host.machine, []).append(host)
    first = hosts[0]
    of_first = _collectives(builder, first) if len(machines) > 1 else None
    offsets = {first.machine: (first, 0)}
    for machine, processes in machines.items():
        if of_first is not None and machine != first.machine:
            offsets[machine] = _offset(builder, first, of_first, processes)
    for i, host in enumerate(hosts):
        reference, offset_ns = offsets[host.machine]
        # The reader has subtracted from each file's times the offset that the capture measured for its process.
        moved[i] = _ahead_ns(host) - _ahead_ns(reference) - offset_ns
        if moved[i]:
            _move(builder, host, moved[i])
    return moved


def align_starts(builder: TraceBuilder, hosts: Sequence[HostSlices]) -> list[int]:
    """Move the events of each host so that all begin together, where their clocks have nothing in common; returns by
    how much (ns)."""
    moved = []
    for host in hosts:
        times = [device.start_ns for device in builder.device[host.device]]
        times += [events.start_ns for events in builder.host[host.host]]
        times += [allocator.time_ns for allocator in builder.allocator[host.allocator]]
        moved.append(-min((int(time.min()) for time in times if len(time)), default=0))
        _move(builder, host, moved[-1])
    return moved


def _ahead_ns(host: HostSlices) -> int:
    return host.clock.offset_ns if host.clock is not None else 0


def _offset(builder: TraceBuilder, first: HostSlices, of_first: tuple[I64, I64],
            processes: Sequence[HostSlices]) -> tuple[HostSlices, int]:
    """The first of a machine's processes whose collectives match the first host's, and by how much its clock is
    ahead of that (ns); the first of all and 0 where none match. ``of_first`` are the first host's collectives."""
    notes = []
    for other in processes:
        errors = [h.clock.error_ns for h in (first, other) if h.clock is not None]
        within_ns = max(sum(errors), 1_000_000) if len(errors) == 2 else _UNMEASURED_OFFSET_NS
        others = _collectives(builder, other)
        result = skew(*of_first, *others, within_ns)
        both = f"The clocks of {first.name} and {other.name}"
        if isinstance(result, str):
            by_capture = (f"measured to within {seconds(sum(errors) / 1e9)}") if len(errors) == 2 else (
                "gputop uses them as they are")
            if len(errors) == 2 or (len(of_first[0]) and len(others[0])):
                notes.append(f"{both} cannot be compared by collectives ({result}); {by_capture}.")
        elif abs(result.offset_ns) <= result.error_ns:
            builder.note("clocks", f"{both} agree to within {seconds(result.error_ns / 1e9)}, based on "
                                   f"{result.matched} collectives.")
            return other, 0
        else:
            builder.note("clocks", f"The clock of {other.name} was {seconds(abs(result.offset_ns) / 1e9)} "
                         f"{'ahead of' if result.offset_ns > 0 else 'behind'} that of {first.name}, measured with "
                         f"{result.matched} collectives to {seconds(result.error_ns / 1e9)}. gputop corrected it.")
            return other, result.offset_ns
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
        device.start_ns += by_ns
        device.end_ns += by_ns
        launched = device.launch_line >= 0
        device.launch_ns[launched] += by_ns
        device.launch_end_ns[launched] += by_ns
    for events in builder.host[host.host]:
        events.start_ns += by_ns
        events.end_ns += by_ns
    for allocator in builder.allocator[host.allocator]:
        allocator.time_ns += by_ns
