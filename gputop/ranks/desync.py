"""Search for the rank that did not come to a collective: the dumps of PyTorch's flight recorder against each other; and
the report on it, as lines. Pure.

The members of a process group number its collectives alike, as each launches them. The first number at which two of
them launched different ones is where their programs parted; from there on numbers cannot be compared. Otherwise a rank
that has launched fewer than another is what that one waits for, provided the other's collective has not ended: a
collective that did end was reached by all, and the dump that lacks it is the older one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from gputop.ranks.flight_recorder import Collective, Dump, Dumps, ProcessGroup
from gputop.text.units import counted, ranges, seconds

# All ranks pass as many elements to these (torch/distributed/distributed_c10d.py); others may differ, as all_to_all.
_EQUAL_SIZES = frozenset({"all_reduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base"})
_ONE_RUN_S = 3600.0  # PyTorch gives up waiting after 10 minutes (NCCL) or 30 (gloo), unless told otherwise
WORLD = "default_pg"  # what PyTorch calls the group of all ranks

# "absent": ``apart`` did not launch the collective in question, and ``others`` wait in it; "mismatch": ``apart``
# launched another one than ``others``; "inactive": ``others`` wait in it and ``apart`` are inside none, of whose ended
# ones nothing is known; "inside": all have launched it and not all ended it; "idle": all ended it; "unclear": the dumps
# contradict each other, as those of different times do.
Verdict = Literal["absent", "mismatch", "inactive", "inside", "idle", "unclear"]


class StacksCollective(Struct, frozen=True):
    """``elements`` of its input tensors. ``line``, as "train.py:112"; null: the dump has no frames."""

    number: int
    operation: str
    elements: int | None
    line: str | None

    @classmethod
    def of(cls, collective: Collective | None) -> StacksCollective | None:
        return None if collective is None else cls(collective.seq, collective.operation, collective.elements,
                                                   collective.line or None)


class StacksRankState(Struct, frozen=True):
    """Numbers of the newest collective that a rank launched (0: none), that started and that completed; null: the dump
    shows none. ``launched``: as the number in question; null: the dump does not hold it."""

    rank: int
    scheduled: int
    started: int | None
    completed: int | None
    last: StacksCollective | None
    launched: StacksCollective | None


class StacksProcessGroup(Struct, frozen=True):
    """A process group of PyTorch (gputop.ranks.desync). ``without_dump``: members; null: they are not known."""

    name: str
    description: str
    verdict: Verdict
    number: int  # the first that some did not launch, or that differs
    operation: str | None
    apart: tuple[StacksRankState, ...]
    others: tuple[StacksRankState, ...]
    without_dump: tuple[int, ...] | None  # of which no dump was read


def compare(dumps: Sequence[Dump]) -> tuple[StacksProcessGroup, ...]:
    """The groups with collectives that dumps of at least two ranks tell of; what explains the hang comes first.

    A rank that is absent from one group because it waits in another explains nothing: that other group comes first.
    Groups whose members are not known are left out, but for the one of all ranks.
    """
    by_group: dict[tuple[str, tuple[int, ...] | None], list[tuple[Dump, ProcessGroup]]] = defaultdict(list)
    for dump in dumps:
        for group in dump.groups:
            if group.ranks is not None or group.description == WORLD:
                by_group[group.name, group.ranks].append((dump, group))
    _add_inactive(by_group, dumps)
    states = [_state(members) for members in by_group.values()
              if len(members) > 1 and any(group.collectives for _, group in members)]
    waits = {rank.rank for state in states if state.verdict == "absent" for rank in state.others}
    order = {"mismatch": 0, "absent": 1, "inactive": 3, "unclear": 4, "inside": 5, "idle": 6}
    return tuple(sorted(states, key=lambda state: (
        2 if state.verdict == "absent" and waits & {rank.rank for rank in state.apart} else order[state.verdict],
        -len(state.others), state.name)))


def _add_inactive(by_group: dict[tuple[str, tuple[int, ...] | None], list[tuple[Dump, ProcessGroup]]],
                  dumps: Sequence[Dump]) -> None:
    """Add the ranks that hold nothing of the group of all ranks, to which they belong, as what ended was left out."""
    of_all = [key for key, of_group in by_group.items() if any(group.description == WORLD for _, group in of_group)]
    if len(of_all) == 1:
        ((name, ranks),) = of_all
        dumped = {dump.rank for dump, _ in by_group[name, ranks]}
        by_group[name, ranks] += [(dump, ProcessGroup(name, WORLD, ranks, ())) for dump in dumps
                                  if dump.only_active and dump.rank not in dumped]


def not_compared(dumps: Sequence[Dump]) -> tuple[str, ...]:
    """The names of the groups whose members no dump names."""
    return tuple(sorted({group.name for dump in dumps for group in dump.groups
                         if group.ranks is None and group.description != WORLD}))


def _state(dumps: Sequence[tuple[Dump, ProcessGroup]]) -> StacksProcessGroup:
    # Collectives that are launched as one share their number: the last one counts.
    launched = {dump.rank: {collective.seq: collective for collective in group.collectives} for dump, group in dumps}
    verdict, seq, operation, apart = _verdict(dumps, launched)
    ranks = [_rank(rank, by_seq, seq) for rank, by_seq in sorted(launched.items())]
    members = dumps[0][1].ranks
    description = next((group.description for _, group in dumps if group.description), "")
    operation = operation or next((by_seq[seq].operation for by_seq in launched.values() if seq in by_seq), "")
    return StacksProcessGroup(
        dumps[0][1].name, description, verdict, seq, operation or None,
        tuple(r for r in ranks if r.rank in apart), tuple(r for r in ranks if r.rank not in apart),
        tuple(sorted(set(members) - set(launched))) if members is not None else None)


def _verdict(dumps: Sequence[tuple[Dump, ProcessGroup]],
             launched: Mapping[int, Mapping[int, Collective]]) -> tuple[Verdict, int, str, frozenset[int]]:
    """The verdict, the number in question, its operation ("": the one of that number), and the ranks apart."""
    latest = {rank: max(by_seq, default=0) for rank, by_seq in launched.items()}
    least, furthest = min(latest.values()), max(latest.values())
    inactive = frozenset(dump.rank for dump, _ in dumps if dump.only_active and not launched[dump.rank])
    if inactive:
        inside = [by_seq[max(by_seq)] for by_seq in launched.values() if by_seq]
        waits = len({collective.seq for collective in inside}) == 1 and not any(one.ended for one in inside)
        return ("inactive", inside[0].seq, "", inactive) if waits else ("unclear", furthest, "", frozenset())
    # A rank with no collective of the group has launched none, unless its recorder overwrote them.
    overwritten = any(not launched[dump.rank] and not dump.whole for dump, _ in dumps)
    if overwritten or _of_different_runs(launched):
        return "unclear", furthest, "", frozenset()
    if (different := _mismatch(dumps, launched)) is not None:
        return "mismatch", *different
    if least == furthest:
        ended = all(by_seq[furthest].ended for by_seq in launched.values())
        return "idle" if ended else "inside", furthest, "", frozenset()
    seq = least + 1
    entered = [launched[rank].get(seq) for rank in launched if latest[rank] > least]
    waits = all(entry is not None and not entry.ended for entry in entered)
    entered_s = max((entry.created_s for entry in entered if entry is not None), default=0.0)
    late = any(dump.written_s < entered_s for dump, _ in dumps if latest[dump.rank] == least)
    return ("absent" if waits and not late else "unclear", seq, "",
            frozenset(rank for rank, last in latest.items() if last == least))


def _of_different_runs(launched: Mapping[int, Mapping[int, Collective]]) -> bool:
    """Return whether ranks launched a collective hours apart, for which none of them waits."""
    for seq in set.intersection(*(set(by_seq) for by_seq in launched.values())):
        times_s = [by_seq[seq].created_s for by_seq in launched.values()]
        if max(times_s) - min(times_s) > _ONE_RUN_S:
            return True
    return False


def _rank(rank: int, by_seq: Mapping[int, Collective], seq: int) -> StacksRankState:
    scheduled = max(by_seq, default=0)
    return StacksRankState(
        rank, scheduled, max((c.seq for c in by_seq.values() if c.started), default=None),
        max((c.seq for c in by_seq.values() if c.completed), default=None),
        StacksCollective.of(by_seq.get(scheduled)), StacksCollective.of(by_seq.get(seq)))


def _mismatch(dumps: Sequence[tuple[Dump, ProcessGroup]],
              launched: Mapping[int, Mapping[int, Collective]]) -> tuple[int, str, frozenset[int]] | None:
    """The first number at which ranks launched different collectives, what most launched there, and who did not.

    Of two ranks, or of as many on each side, nobody is the odd one: all are returned. Numbers that several collectives
    of a rank share, launched as one, are not compared: the recorder may hold a part of them.
    """
    several = {seq for _, group in dumps
               for seq, times in Counter(c.seq for c in group.collectives).items() if times > 1}
    for seq in sorted(set.intersection(*(set(by_seq) for by_seq in launched.values())) - several):
        collectives = {rank: by_seq[seq] for rank, by_seq in launched.items()}
        kinds = {rank: (collective.operation, collective.elements if collective.operation in _EQUAL_SIZES else None)
                 for rank, collective in collectives.items()}
        counts = Counter(kinds.values()).most_common()
        if len(counts) < 2:
            continue
        usual, many = counts[0]
        if many * 2 <= len(kinds):
            return seq, usual[0], frozenset(kinds)
        return seq, usual[0], frozenset(rank for rank, kind in kinds.items() if kind != usual)
    return None


# -- the report -------------------------------------------------------------------------------------

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
        problems = "; ".join(job.problems[:_MAX_LINES]) or "no dump was found"
        yield f"{HEAD}there are no ranks to compare: {problems}. {_WITHOUT}"
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
    ages = " to ".join(dict.fromkeys(map(seconds, (newest_s, oldest_s) if oldest_s - newest_s >= 1 else (newest_s,))))
    yield f"{_INDENT}Dumps read: {read}, written {ages} ago."
    yield from (f"{_INDENT}{text}" for text in _not_asked(job))


def sentence(state: StacksProcessGroup) -> str:
    """ "Rank 1 did not launch all_reduce 4 of default_pg. Rank 0 is waiting in this collective at train.py:10." """
    what = f"{state.operation or 'collective'} {state.number} of {_group(state)}"
    apart = _names(state.apart)
    if state.verdict == "absent":
        many = len(state.others) > 1
        return (f"{apart.capitalize()} did not launch {what}. {_names(state.others).capitalize()} "
                f"{'are' if many else 'is'} waiting in this collective{_lines_at(state.others)}.")
    if state.verdict == "mismatch":
        if state.others:
            return (f"the ranks launched different collectives at position {state.number} of {_group(state)}. "
                    f"{_names(state.others).capitalize()} launched {_launched(state.others[0].launched)}.")
        return f"the ranks launched different collectives at position {state.number} of {_group(state)}."
    if state.verdict == "inactive":
        many, more = len(state.apart) > 1, len(state.others) > 1
        return (f"{_names(state.others).capitalize()} {'are' if more else 'is'} waiting in "
                f"{what}{_lines_at(state.others)}. {apart.capitalize()} {'are' if many else 'is'} not in a collective "
                "of this group.")
    if state.verdict in ("inside", "idle"):
        who = "All ranks" if state.without_dump == () else _names(state.others).capitalize()
        return (f"{who} launched {what}{_lines_at(state.others)}, but not all have finished it"
                if state.verdict == "inside" else f"{who} have finished their latest collective, {what}") + (
            "." if state.without_dump is not None else
            "; a rank without a dump may be missing, because the dumps do not list the ranks.")
    return ("the dumps do not show which rank is missing: they are from different times, or the latest collectives "
            "failed.")


def _of_ranks(state: StacksProcessGroup) -> Iterator[str]:
    for rank in state.apart[:_MAX_LINES]:
        if state.verdict == "mismatch":
            yield f"Rank {rank.rank} launched {_launched(rank.launched)}."
        elif state.verdict == "inactive":
            continue
        elif rank.last is None:
            yield f"Rank {rank.rank} launched nothing in this group."
        else:
            yield f"Rank {rank.rank} last launched {rank.last.operation} {rank.last.number}{_at(rank.last.line)}."
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


def _group(state: StacksProcessGroup) -> str:
    if state.description == WORLD:
        return "the group of all ranks"
    return f"group {state.name}" + (f" ({state.description})" if state.description not in ("", "undefined") else "")


def _names(states: Sequence[StacksRankState]) -> str:
    return f"rank{'s' * (len(states) > 1)} {ranges((state.rank for state in states), ', ')}"


def _lines_at(states: Sequence[StacksRankState]) -> str:
    """The line at which they launched it, where they agree on one."""
    lines = {state.launched.line for state in states if state.launched is not None and state.launched.line}
    return _at(lines.pop()) if len(lines) == 1 else ""


def _at(line: str | None) -> str:
    return f" at {line}" if line else ""


def _launched(collective: StacksCollective | None) -> str:
    if collective is None:
        return "nothing that is still in its dump"
    size = f" of {collective.elements:,} elements" if collective.elements is not None else ""
    return f"{collective.operation}{size}{_at(collective.line)}"
