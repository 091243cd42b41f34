"""The idle gaps that cost most GPU time: their cause, what the host did in them, and the finding they belong to.

A GPU is idle where no device event runs within the steps (the parts ``input``, ``launch``, ``host`` and ``idle``
of the breakdown), and where it waits in a collective for the last GPU with nothing else to do
(gputop.analysis.gpu.collective_waits). Idle times of several GPUs at the same time are one idle gap.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from gputop.advice.causes import NARROWEST_FIRST
from gputop.advice.trace.facts import TraceFacts
from gputop.analysis.gpu.breakdown import of_one_process
from gputop.analysis.gpu.device_time import GpuTimeline, event_after, gpu_number, waits_for_another
from gputop.analysis.host.stack_lines import GAPS, Lines, gap_lines, gap_spans, lines_of_gaps, process_lines, python_of
from gputop.text.units import percent, printable
from gputop.timeline.idle_gap_work import IdlePeriod, host_work_in
from gputop.timeline.model import CAUSES, IdleGap, IdleTotal, IdleWork
from gputop.trace.intervals import EMPTY, Spans, coverage, intersect, merge, overlap, subtract
from gputop.trace.model import I64, Kind, Trace

LIMIT = 200  # idle gaps that a timeline has
PER_CAUSE = 10  # and, of each cause that has fewer among them, so many more
_SEEDS_PER_GAP = 20  # idle times from which gaps are formed, for each gap wanted: the longest ones
_MIN_OVERLAP = 0.5  # idle times of two GPUs are one gap where they share this much of the longer one
_IDLE_PARTS = ("input", "launch", "host", "idle")
_LATE_PARTS = ("launch", "host")
_IN_COLLECTIVE, _DISPATCH_AMID_WORK = "collective_wait", "dispatch_host"
_CAUSE_KEYS = (*CAUSES, _DISPATCH_AMID_WORK)  # late launches are told apart by the part of the step they are in


class RankedIdleGap(NamedTuple):
    """An idle gap, and the row of the device event that ended it."""

    idle_gap: IdleGap
    event: int | None


class IdleGaps(Struct, frozen=True):
    """Cost of each cause in all, most first, and the costliest gaps one by one."""

    totals: tuple[IdleTotal, ...]
    ranked: list[RankedIdleGap]


class _IdleSpans(NamedTuple):
    """Spans in which one GPU is idle: in collectives, or outside of them."""

    timeline: GpuTimeline
    in_collective: bool
    spans: Spans


class _Group(NamedTuple):
    """Idle times that are one gap: by index in the list of :class:`_IdleSpans` and in its spans, the longest first."""

    members: list[tuple[int, int]]
    start: int
    end: int
    cost: int


def rank_idle_gaps(facts: TraceFacts, limit: int = LIMIT, per_cause: int = 0) -> IdleGaps:
    """The most costly idle gaps, at most ``limit``, with the events that ended them, and the totals; none where no GPU
    of the trace ran anything. ``per_cause``: further gaps of each cause that has fewer among the costliest."""
    trace, gpu_timelines, waits = facts.trace, facts.gpu_timelines, facts.waits
    parts = facts.parts
    idle_spans = []
    for timeline in gpu_timelines:
        if timeline.gpu in parts:
            idle_spans.append(_IdleSpans(timeline, False, merge(*(parts[timeline.gpu][part] for part in _IDLE_PARTS))))
            if waits is not None:
                idle_spans.append(_IdleSpans(timeline, True, waits.waiting.get(gpu_number(trace, timeline.gpu), EMPTY)))
    if not idle_spans:
        return IdleGaps((), [])
    groups = _groups(idle_spans, limit)
    by_cause = _by_cause(facts, parts)
    keys, shares = _keys(idle_spans, groups, by_cause)
    python = _python(facts)
    totals = _totals(facts, idle_spans, by_cause, python)
    if more := _more_groups(idle_spans, groups, keys, by_cause, totals, per_cause):
        groups = sorted([*groups, *more], key=_cost_order)
        keys, shares = _keys(idle_spans, groups, by_cause)
    events = _ending_events(trace, idle_spans, groups)
    kinds = [_cause_and_part(key, share) for key, share in zip(keys, shares, strict=True)]
    causes = [cause for cause, _ in kinds]
    gpus = [sorted({idle_spans[i].timeline.gpu for i, _ in group.members}) for group in groups]
    work = host_work_in(trace, facts.steps, [
        _period(trace, group, cause, members, event)
        for group, cause, members, event in zip(groups, causes, gpus, events, strict=True)])
    listed = _listed(facts)
    lines = lines_of_gaps(python, [
        (group.start, group.end, cause) for group, cause in zip(groups, causes, strict=True)])
    return IdleGaps(tuple(totals.values()), [
        RankedIdleGap(IdleGap(
            gpus=tuple(sorted(gpu_number(trace, gpu) for gpu in members)), start_ns=group.start, end_ns=group.end,
            cost_ns=group.cost, part=part, cause=cause,
            host=_host_summary(trace, done, group, cause, event),
            ended_by=_ended_by(trace, cause, event), meanwhile=other,
            finding=_finding(share, listed), work=done, python=ran,
        ), event)
        for group, share, (cause, part), members, event, done, other, ran in zip(
            groups, shares, kinds, gpus, events, work,
            _meanwhile(trace, gpu_timelines, groups, causes, events), lines, strict=True)])


def _python(facts: TraceFacts) -> list[Lines]:
    """The Python of the processes, to be asked for gaps; empty where it is not known."""
    python = python_of(facts.trace)
    if not python:
        return []
    of_kind, _ = gap_spans(facts.trace, facts.gpu_timelines, facts.steps, facts.host, len(python))
    every = [merge(EMPTY, *kinds) for kinds in zip(*of_kind.values(), strict=True)]
    return process_lines(python, facts.analyzed_spans, every)


def _totals(
    facts: TraceFacts, idle_spans: Sequence[_IdleSpans], by_cause: Mapping[int, Mapping[str, Spans]],
    python: Sequence[Lines],
) -> dict[str, IdleTotal]:
    """The idle time of all GPUs, by the keys of ``by_cause`` that are causes; most first."""
    unit = 1e9 * len(by_cause) * facts.steps_or_window
    listed = _listed(facts)
    out = {}
    for key in _CAUSE_KEYS:
        time, gaps, parts = 0, 0, dict.fromkeys((*_LATE_PARTS, *facts.claimed), 0.0)
        for idle in idle_spans:
            causes = by_cause[idle.timeline.gpu]
            spans = _of_cause(idle, causes, key)
            time += spans.total
            gaps += int(np.count_nonzero(np.diff(_places_in(idle.spans, spans), prepend=-2)))  # they are in order
            for part in parts if len(spans.start) else ():
                parts[part] += overlap(spans, causes[part])
        if time:
            cause, part = _cause_and_part(key, parts)
            all_gpus = merge(EMPTY, *(_of_cause(idle, by_cause[idle.timeline.gpu], key) for idle in idle_spans))
            lines = gap_lines(cause, [all_gpus], time / unit, python).lines if python and cause in GAPS else ()
            finding = _finding({part: ns / time for part, ns in parts.items()}, listed)
            out[key] = IdleTotal(cause, part, time / unit, gaps, finding, lines)
    return dict(sorted(out.items(), key=lambda item: -item[1].s_per_step))


def _of_cause(idle: _IdleSpans, causes: Mapping[str, Spans], key: str) -> Spans:
    if idle.in_collective:
        return idle.spans if key == _IN_COLLECTIVE else EMPTY
    return causes.get(key, EMPTY)


def _places_in(idle: Spans, spans: Spans) -> I64:
    """Index of the idle time that each of these spans is a part of."""
    return np.searchsorted(idle.start, spans.start, side="right") - 1


def _more_groups(
    idle_spans: Sequence[_IdleSpans], groups: Sequence[_Group], keys: Sequence[str],
    by_cause: Mapping[int, Mapping[str, Spans]], totals: Mapping[str, IdleTotal], per_cause: int,
) -> list[_Group]:
    """Groups around the longest idle times of those causes of which there are fewer; ``keys``: what ``groups`` are."""
    taken = {member for group in groups for member in group.members}
    out: list[_Group] = []
    for key in totals:
        wanted = per_cause - keys.count(key)
        if wanted <= 0:
            continue
        places = []
        for idle in idle_spans:
            spans = _of_cause(idle, by_cause[idle.timeline.gpu], key)
            longest = np.argsort(spans.start - spans.end, kind="stable")[:4 * per_cause]
            places.append(np.unique(_places_in(idle.spans, Spans(spans.start[longest], spans.end[longest]))))
        few = [idle._replace(spans=Spans(idle.spans.start[index], idle.spans.end[index]))
               for idle, index in zip(idle_spans, places, strict=True)]
        candidates = [group._replace(members=[(i, int(places[i][index])) for i, index in group.members])
                      for group in _groups(few, 4 * per_cause)]
        fit = [group for group, of in zip(candidates, _keys(idle_spans, candidates, by_cause)[0], strict=True)
               if of == key and not taken.intersection(group.members)][:wanted]
        out += fit
        taken.update(member for group in fit for member in group.members)
    return out


def _cost_order(group: _Group) -> tuple[int, int, list[tuple[int, int]]]:
    return -group.cost, group.start, group.members


def _groups(idle_spans: Sequence[_IdleSpans], limit: int) -> list[_Group]:
    """The most costly groups of idle times that lie together, formed around the longest ones."""
    of = np.repeat(np.arange(len(idle_spans)), [len(s.spans.start) for s in idle_spans])
    start = np.concatenate([s.spans.start for s in idle_spans])
    end = np.concatenate([s.spans.end for s in idle_spans])
    within = np.concatenate([np.arange(len(s.spans.start)) for s in idle_spans])
    seeds = max(_SEEDS_PER_GAP, 4 * len(idle_spans)) * limit
    if len(start) > seeds:
        chosen = np.argpartition(start - end, seeds)[:seeds]
        of, start, end, within = of[chosen], start[chosen], end[chosen], within[chosen]
    order = np.lexsort((of, start, start - end))
    of, start, end, within = of[order], start[order], end[order], within[order]
    gpus = len({idle.timeline.gpu for idle in idle_spans})
    partner = np.stack([_partners(idle, i, idle_spans, of, start, end) for i, idle in enumerate(idle_spans)], axis=1)
    taken: set[tuple[int, int]] = set()
    groups: list[_Group] = []
    most: list[int] = []  # the largest costs, the least of them first
    for gpu, first, length, partners in zip(of.tolist(), within.tolist(), (end - start).tolist(), partner, strict=True):
        if len(most) == limit and gpus * length <= most[0]:
            break  # only shorter ones are left, so no further group can cost more
        if (gpu, first) in taken:
            continue
        members = [(gpu, first)]
        members += [(i, j) for i, j in enumerate(partners.tolist()) if j >= 0 and (i, j) not in taken]
        taken.update(members)
        times = [(int(idle_spans[i].spans.start[j]), int(idle_spans[i].spans.end[j])) for i, j in members]
        groups.append(_Group(members, min(a for a, _ in times), max(b for _, b in times), sum(b - a for a, b in times)))
        heapq.heappush(most, groups[-1].cost)
        if len(most) > limit:
            heapq.heappop(most)
    groups.sort(key=_cost_order)
    return groups[:limit]


def _partners(idle: _IdleSpans, number: int, idle_spans: Sequence[_IdleSpans], of: I64, start: I64, end: I64) -> I64:
    """Idle time of this GPU that lies together with each idle time, -1 where there is none."""
    if not len(idle.spans.start):
        return np.full(len(of), -1, np.int64)
    middle = start + (end - start) // 2
    index = np.searchsorted(idle.spans.start, middle, side="right") - 1
    a, b = idle.spans.start[np.maximum(index, 0)], idle.spans.end[np.maximum(index, 0)]
    shared = np.minimum(b, end) - np.maximum(a, start)
    alike = np.array([other.in_collective == idle.in_collective for other in idle_spans], bool)[of]
    together = (index >= 0) & alike & (of != number) & (shared >= _MIN_OVERLAP * np.maximum(b - a, end - start))
    return np.where(together, index, -1)


def _by_cause(facts: TraceFacts, parts: Mapping[int, Mapping[str, Spans]]) -> dict[int, dict[str, Spans]]:
    """Spans of each GPU's idle time by cause (``_CAUSE_KEYS``), those in the parts ``launch`` and ``host``, and those
    that each finding claims."""
    gpu_timelines = facts.gpu_timelines
    of_host = {one.timeline.gpu: one.by_cause for one in (facts.host.divided if facts.host is not None else ())
               if one.timeline is not None}
    out = {}
    for timeline in gpu_timelines:
        if timeline.gpu not in parts:
            continue
        part = parts[timeline.gpu]
        spans = dict(of_host.get(timeline.gpu, {"dispatch": merge(part["launch"], part["host"])}))
        spans["input"] = part["input"]
        spans["other_gpu"] = intersect(part["idle"], waits_for_another(
            timeline, of_one_process(facts.trace, gpu_timelines, timeline.gpu)))
        spans["idle"] = subtract(part["idle"], spans["other_gpu"])
        spans["launch"], spans["host"] = part["launch"], part["host"]
        spans[_DISPATCH_AMID_WORK] = intersect(spans["dispatch"], part["host"])
        spans["dispatch"] = subtract(spans["dispatch"], part["host"])
        out[timeline.gpu] = spans | {id_: claimed.along(timeline.gpu) for id_, claimed in facts.claimed.items()}
    return out


def _keys(
    idle_spans: Sequence[_IdleSpans], groups: Sequence[_Group], by_cause: Mapping[int, Mapping[str, Spans]],
) -> tuple[list[str], list[dict[str, float]]]:
    """Cause that most of each group's cost is of (of ``_CAUSE_KEYS``), and its shares by the keys of ``by_cause``."""
    sums: list[dict[str, float]] = [{} for _ in groups]
    members: dict[int, list[tuple[int, int]]] = {}
    for number, group in enumerate(groups):
        for i, index in group.members:
            members.setdefault(i, []).append((number, index))
    for i, of_gpu in members.items():
        spans = idle_spans[i].spans
        places = np.array([index for _, index in of_gpu])
        for cause, instants in by_cause[idle_spans[i].timeline.gpu].items():
            inside = coverage(instants, spans.start[places], spans.end[places]).tolist()
            for (number, _), time in zip(of_gpu, inside, strict=True):
                sums[number][cause] = sums[number].get(cause, 0.0) + time / groups[number].cost
    keys = [_IN_COLLECTIVE if idle_spans[group.members[0][0]].in_collective else
            max((key for key in _CAUSE_KEYS if key in share), key=lambda key: share[key])
            for group, share in zip(groups, sums, strict=True)]
    return keys, sums


def _cause_and_part(key: str, share: Mapping[str, float]) -> tuple[str, str]:
    """The cause, and the part of the step's breakdown that its time is in."""
    if key in ("dispatch", _DISPATCH_AMID_WORK):
        return "dispatch", "launch" if key == "dispatch" else "host"
    if key in ("input", "idle"):
        return key, key
    if key in ("other_gpu", _IN_COLLECTIVE):
        return key, "idle" if key == "other_gpu" else "collectives"
    return key, "launch" if share.get("launch", 0.0) > share.get("host", 0.0) else "host"


def _listed(facts: TraceFacts) -> dict[str, str]:
    """Id under which a finding stands in the list, by each id that it answers to."""
    return {id_: finding.id for finding in reversed(facts.analysis.findings) for id_ in finding.ids}


def _finding(share: Mapping[str, float], listed: Mapping[str, str]) -> str | None:
    """The finding that claims most of the time, the narrowest of several, or the one that it is listed under."""
    return next((listed[id_] for id_ in NARROWEST_FIRST if id_ in listed and share.get(id_, 0.0) >= _MIN_OVERLAP), None)


def _ending_events(trace: Trace, idle_spans: Sequence[_IdleSpans], groups: Sequence[_Group]) -> list[int | None]:
    """Device event that ended the longest idle time of each group: on that GPU, or for a wait in a collective on the
    last GPU. None where nothing begins at that moment."""
    device = trace.device
    out: list[int | None] = [None] * len(groups)
    collectives = np.flatnonzero(device.kind == Kind.COLLECTIVE)
    collectives = collectives[np.argsort(device.start_ns[collectives], kind="stable")]
    for i, idle in enumerate(idle_spans):
        of_gpu = [number for number, group in enumerate(groups) if group.members[0][0] == i]
        if not of_gpu:
            continue
        first_members = np.array([groups[number].members[0][1] for number in of_gpu])
        ends = idle.spans.end[first_members]
        others = collectives[device.gpu[collectives] != idle.timeline.gpu]
        events = event_after(trace, others if idle.in_collective else idle.timeline.rows,
                             Spans(idle.spans.start[first_members], ends))
        for number, event, end in zip(of_gpu, events.tolist(), ends.tolist(), strict=True):
            if event >= 0 and device.start_ns[event] == end:
                out[number] = event
    return out


def _meanwhile(
    trace: Trace, gpu_timelines: Sequence[GpuTimeline], groups: Sequence[_Group], causes: Sequence[str],
    events: Sequence[int | None],
) -> list[str]:
    """Words for what another GPU does for which GPUs wait: the last in the collective, or the busiest."""
    start = np.array([group.start for group in groups], np.int64)
    end = np.array([group.end for group in groups], np.int64)
    length = np.maximum(end - start, 1)
    busy = np.stack([coverage(timeline.busy, start, end) for timeline in gpu_timelines], axis=1) / length[:, None]
    compute = np.stack([coverage(timeline.compute, start, end) for timeline in gpu_timelines], axis=1) / length[:, None]
    index_of = {timeline.gpu: i for i, timeline in enumerate(gpu_timelines)}
    out = []
    for number, (cause, event) in enumerate(zip(causes, events, strict=True)):
        other = int(busy[number].argmax())
        if cause == "collective_wait" and event is not None:
            other = index_of.get(int(trace.device.gpu[event]), other)
        elif cause != "other_gpu":
            out.append("")
            continue
        name = f"GPU {gpu_number(trace, gpu_timelines[other].gpu)}"
        computes, works = float(compute[number, other]), float(busy[number, other])
        out.append(f"{name} computes for {percent(computes)} of the gap" if computes >= 0.5 * works and computes > 0.01
                   else f"{name} is idle for {percent(1 - works)} of the gap" if works < 0.5
                   else f"{name} copies or waits for {percent(works)} of the gap")
    return out


def _period(trace: Trace, group: _Group, cause: str, gpus: Sequence[int], event: int | None) -> IdlePeriod:
    if event is None:
        return IdlePeriod(group.start, group.end, cause, tuple(gpus))
    device = trace.device
    return IdlePeriod(group.start, group.end, cause, (*gpus, int(device.gpu[event])), int(device.launch_line[event]))


def _ended_by(trace: Trace, cause: str, event: int | None) -> str:
    if event is None:
        return ""
    device = trace.device
    name = printable(trace.names[device.name[event]]) if device.name[event] >= 0 else "an unnamed event"
    line = int(device.launch_line[event])
    launched = f", launched by {printable(trace.lines[line].name)}" if line >= 0 else ""
    if cause == "collective_wait":
        return f"GPU {gpu_number(trace, int(device.gpu[event]))}, the last to reach {name}{launched}"
    return f"{name}{launched}"


def _host_summary(trace: Trace, work: Sequence[IdleWork], group: _Group, cause: str, event: int | None) -> str:
    """The first work; where the host is not the known cause, only work of the thread that launched next."""
    line = int(trace.device.launch_line[event]) if event is not None else -1
    of_launcher = [w for w in work if line >= 0 and w.thread == printable(trace.lines[line].name)]
    work = of_launcher if cause in ("other_gpu", "collective_wait", "idle") else work
    if not work:
        return ""
    return f"{work[0].thread}: {work[0].what} {percent(work[0].time_ns / (group.end - group.start))}"
