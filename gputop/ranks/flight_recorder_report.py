"""Report of PyTorch's flight recorder on a hang, by its dumps, as lines. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gputop.ranks.desync import WORLD, GroupState, RankState, compare, not_compared
from gputop.ranks.flight_recorder import Collective, Dumps
from gputop.text.units import counted, ranges, seconds

_INDENT = "       "
_MAX_LINES = 16


HEAD = "PyTorch's flight recorder: "
_WITHOUT = "PyTorch writes a dump when a collective times out."


def lines(jobs: Sequence[Dumps], now_s: float) -> Iterator[str]:
    """Job by job: what the dumps say, which were read, and what could not be asked."""
    for job in jobs:
        yield from _job(job, now_s)


def _job(job: Dumps, now_s: float) -> Iterator[str]:
    if not job.dumps:
        problems = ". ".join(problem[:1].upper() + problem[1:] for problem in job.problems[:_MAX_LINES])
        yield f"{HEAD}there are no ranks to compare. {problems or 'No dump was found'}. {_WITHOUT}"
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
        yield f"{HEAD}the dumps contain no collectives that can be compared."
    read = f"rank{'s' * (len(job.dumps) > 1)} {ranges((dump.rank for dump in job.dumps), ', ')}"
    newest_s, oldest_s = (max(0.0, now_s - pick(dump.written_s for dump in job.dumps)) for pick in (max, min))
    age = seconds(newest_s) if oldest_s - newest_s < 1 else f"{seconds(newest_s)} to {seconds(oldest_s)}"
    yield f"{_INDENT}Dumps read: {read}, written {age} ago."
    yield from (f"{_INDENT}{text}" for text in _not_asked(job))


def sentence(state: GroupState) -> str:
    """ "Rank 1 did not launch all_reduce 4 of default_pg. Rank 0 is waiting in this collective at train.py:10." """
    what = f"{state.operation or 'collective'} {state.seq} of {_group(state)}"
    apart = _names(state.apart)
    if state.verdict == "absent":
        many = len(state.others) > 1
        return (f"{apart.capitalize()} did not launch {what}. {_names(state.others).capitalize()} "
                f"{'are' if many else 'is'} waiting in this collective{_lines_at(state.others)}.")
    if state.verdict == "mismatch":
        if state.others:
            return (f"the ranks launched different collectives at position {state.seq} of {_group(state)}. "
                    f"{_names(state.others).capitalize()} launched {_launched(state.others[0].at)}.")
        return f"the ranks launched different collectives at position {state.seq} of {_group(state)}."
    if state.verdict == "inactive":
        many, more = len(state.apart) > 1, len(state.others) > 1
        return (f"{_names(state.others).capitalize()} {'are' if more else 'is'} waiting in "
                f"{what}{_lines_at(state.others)}. {apart.capitalize()} {'are' if many else 'is'} not in a collective "
                "of this group.")
    if state.verdict == "inside":
        return (f"no rank is missing in these dumps. All ranks launched {what}{_lines_at(state.others)}, but not all "
                "have finished it.")
    if state.verdict == "idle":
        return f"no rank is missing in these dumps. All ranks have finished the latest collective, {what}."
    return ("the dumps do not show which rank is missing: they are from different times, or the latest collectives "
            "failed.")


def _of_ranks(state: GroupState) -> Iterator[str]:
    for rank in state.apart[:_MAX_LINES]:
        if state.verdict == "mismatch":
            yield f"Rank {rank.rank} launched {_launched(rank.at)}."
        elif state.verdict == "inactive":
            continue
        elif rank.last is None:
            yield f"Rank {rank.rank} launched nothing in this group."
        else:
            yield f"Rank {rank.rank} last launched {rank.last.operation} {rank.last.seq}{_at(rank.last.line)}."
    if len(state.apart) > _MAX_LINES:
        yield f"{len(state.apart) - _MAX_LINES} more ranks behave like these."


def _not_asked(job: Dumps) -> Iterator[str]:
    named = frozenset[int]().union(*(dump.job_ranks for dump in job.dumps))
    if missing := named - {dump.rank for dump in job.dumps}:
        many = len(missing) > 1
        yield (f"Not asked: rank{'s' * many} {ranges(missing, ', ')}, because gputop read no dump for "
               f"{'them' if many else 'it'}. The other ranks may be waiting for {'them' if many else 'it'}.")
    for problem in job.problems[:_MAX_LINES]:
        yield f"Not read: {problem}."
    if groups := not_compared(job.dumps):
        yield f"Not compared: {counted(len(groups), 'group')} whose members are not in the dumps."
    if messages := sum(dump.messages for dump in job.dumps):
        yield f"Not compared: sends and receives, {messages:,} in these dumps."


def _group(state: GroupState) -> str:
    if state.description == WORLD:
        return "the group of all ranks"
    return f"group {state.name}" + (f" ({state.description})" if state.description not in ("", "undefined") else "")


def _names(states: Sequence[RankState]) -> str:
    return f"rank{'s' * (len(states) > 1)} {ranges((state.rank for state in states), ', ')}"


def _lines_at(states: Sequence[RankState]) -> str:
    """The line at which they launched it, where they agree on one."""
    lines = {state.at.line for state in states if state.at is not None and state.at.line}
    return _at(lines.pop()) if len(lines) == 1 else ""


def _at(line: str) -> str:
    return f" at {line}" if line else ""


def _launched(collective: Collective | None) -> str:
    if collective is None:
        return "nothing that is still in its dump"
    size = f" of {collective.elements:,} elements" if collective.elements is not None else ""
    return f"{collective.operation}{size}{_at(collective.line)}"
