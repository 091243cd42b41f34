"""What the dumps of PyTorch's flight recorder say of a hang, as lines and for JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gputop.ranks.desync import WORLD, GroupState, RankState, compare, not_compared
from gputop.ranks.flight_recorder import Collective, Dumps
from gputop.text.units import counted, ranges, seconds

HEAD = "PyTorch's flight recorder: "
_INDENT = "       "
_MAX_LINES = 16
_NO_DUMP = "PyTorch writes one when a collective times out."


def lines(jobs: Sequence[Dumps], now_s: float) -> Iterator[str]:
    """Job by job: what the dumps say, which were read, and what could not be asked."""
    for job in jobs:
        yield from _job(job, now_s)


def _job(job: Dumps, now_s: float) -> Iterator[str]:
    if not job.dumps:
        problems = ". ".join(problem[:1].upper() + problem[1:] for problem in job.problems[:_MAX_LINES])
        yield f"{HEAD}no rank can be compared. {problems or 'No dump was found'}. {_NO_DUMP}"
        return
    states = compare(job.dumps)
    if states:
        yield f"{HEAD}{sentence(states[0])}"
        yield from (f"{_INDENT}{text}" for text in _of_ranks(states[0]))
        if others := sum(state.verdict in ("absent", "mismatch") for state in states[1:]):
            yield f"{_INDENT}Ranks also differ in {counted(others, 'other group')}."
    elif len(job.dumps) == 1:
        yield f"{HEAD}a single dump does not show which rank is missing."
    else:
        yield f"{HEAD}the dumps hold no collective that can be compared."
    read = ranges((dump.rank for dump in job.dumps), ", ")
    newest_s, oldest_s = (max(0.0, now_s - pick(dump.written_s for dump in job.dumps)) for pick in (max, min))
    age = seconds(newest_s) if oldest_s - newest_s < 1 else f"{seconds(newest_s)} to {seconds(oldest_s)}"
    yield f"{_INDENT}Dumps read: rank{'s' * (len(job.dumps) > 1)} {read}, written {age} ago."
    yield from (f"{_INDENT}{text}" for text in _not_asked(job))


def sentence(state: GroupState) -> str:
    """ "Rank 1 did not launch all_reduce 4 of default_pg. Rank 0 waits in it at train.py:10." """
    what = f"{state.operation or 'collective'} {state.seq} of {_group(state)}"
    apart = _names(state.apart)
    if state.verdict == "absent":
        many = len(state.others) > 1
        return (f"{apart.capitalize()} did not launch {what}. {_names(state.others).capitalize()} "
                f"wait{'' if many else 's'} in it{_lines_at(state.others)}.")
    if state.verdict == "mismatch":
        if state.others:
            return (f"the ranks launched different collectives as number {state.seq} of {_group(state)}. "
                    f"{_names(state.others).capitalize()} launched {_launched(state.others[0].at)}.")
        return f"the ranks launched different collectives as number {state.seq} of {_group(state)}."
    if state.verdict == "inside":
        return (f"no rank is missing among these dumps. All launched {what}{_lines_at(state.others)}, and not all "
                "have ended it.")
    if state.verdict == "idle":
        return f"no rank is missing among these dumps. All have ended {what}, the newest."
    return "the dumps are of different times, or the newest collectives failed. They do not show which rank is missing."


def _of_ranks(state: GroupState) -> Iterator[str]:
    for own in state.apart[:_MAX_LINES]:
        if state.verdict == "mismatch":
            yield f"Rank {own.rank} launched {_launched(own.at)}."
        elif own.last is None:
            yield f"Rank {own.rank} launched nothing in this group."
        else:
            yield f"Rank {own.rank} last launched {own.last.operation} {own.last.seq}{_at(own.last.line)}."
    if len(state.apart) > _MAX_LINES:
        yield f"{len(state.apart) - _MAX_LINES} more ranks are like these."


def _not_asked(job: Dumps) -> Iterator[str]:
    named = frozenset[int]().union(*(dump.job_ranks for dump in job.dumps))
    if missing := named - {dump.rank for dump in job.dumps}:
        many = len(missing) > 1
        yield (f"Not asked: rank{'s' * many} {ranges(missing, ', ')}, because gputop read no dump of "
               f"{'them' if many else 'it'}. The others may wait for {'them' if many else 'it'}.")
    for problem in job.problems[:_MAX_LINES]:
        yield f"Not read: {problem}."
    if groups := not_compared(job.dumps):
        yield f"Not compared: {counted(len(groups), 'group')} whose members the dumps do not name."
    if messages := sum(dump.messages for dump in job.dumps):
        yield f"Not compared: sends and receives, {messages:,} in these dumps."


def _group(state: GroupState) -> str:
    if state.description == WORLD:
        return "the group of all ranks"
    return f"group {state.name}" + (f" ({state.description})" if state.description not in ("", "undefined") else "")


def _names(states: Sequence[RankState]) -> str:
    return f"rank{'s' * (len(states) > 1)} {ranges((own.rank for own in states), ', ')}"


def _lines_at(states: Sequence[RankState]) -> str:
    """The line at which they launched it, where they agree on one."""
    found = {own.at.line for own in states if own.at is not None and own.at.line}
    return _at(found.pop()) if len(found) == 1 else ""


def _at(line: str) -> str:
    return f" at {line}" if line else ""


def _launched(own: Collective | None) -> str:
    if own is None:
        return "nothing that its dump still holds"
    size = f" of {own.elements:,} elements" if own.elements is not None else ""
    return f"{own.operation}{size}{_at(own.line)}"


def documents(jobs: Sequence[Dumps]) -> list[dict[str, Any]]:
    """The same, for JSON."""
    return [{"ranks": [dump.rank for dump in job.dumps],
             "missing_ranks": sorted(frozenset[int]().union(*(dump.job_ranks for dump in job.dumps))
                                     - {dump.rank for dump in job.dumps}),
             "problems": list(job.problems),
             "groups_not_compared": list(not_compared(job.dumps)),
             "groups": [_document(state) for state in compare(job.dumps)]} for job in jobs]


def _document(state: GroupState) -> dict[str, Any]:
    def ranks(own: Sequence[RankState]) -> list[dict[str, Any]]:
        return [{"rank": r.rank, "scheduled": r.scheduled, "started": r.started, "completed": r.completed,
                 "last": _collective(r.last), "launched": _collective(r.at)} for r in own]

    return {"name": state.name, "description": state.description, "verdict": state.verdict, "number": state.seq,
            "operation": state.operation or None, "apart": ranks(state.apart), "others": ranks(state.others),
            "without_dump": list(state.without_dump) if state.without_dump is not None else None}


def _collective(own: Collective | None) -> dict[str, Any] | None:
    if own is None:
        return None
    return {"number": own.seq, "operation": own.operation, "elements": own.elements, "line": own.line or None}
