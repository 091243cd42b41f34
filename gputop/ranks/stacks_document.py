"""The document ``gputop.stacks/1``: which rank did not come, by NCCL, by the flight recorder and by stacks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from gputop.core.codec import document_of
from gputop.ranks.desync import StacksProcessGroup, compare, not_compared
from gputop.ranks.flight_recorder import Dumps
from gputop.ranks.model import StacksAbsence
from gputop.ranks.stack_groups import StackGroup, group, odd_ones, sentence
from gputop.ranks.stacks import ProcessStacks, ThreadStack


class StacksNccl(Struct, frozen=True, kw_only=True):
    """``unchanged``: whether no rank launched anything between two answers; null if NCCL's format does not say."""

    version: str | None = None
    apart_s: float | None = None
    unchanged: bool | None = None
    absence: StacksAbsence | None = None
    problem: str | None = None


class StacksDumps(Struct, frozen=True):
    """Verdicts of the flight recorder's dumps of a job; the group that explains a hang comes first."""

    ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    problems: tuple[str, ...]
    groups_not_compared: tuple[str, ...]
    groups: tuple[StacksProcessGroup, ...]

    @classmethod
    def of(cls, job: Dumps) -> StacksDumps:
        ranks = tuple(dump.rank for dump in job.dumps)
        named = frozenset[int]().union(*(dump.job_ranks for dump in job.dumps))
        return cls(ranks, tuple(sorted(named.difference(ranks))), job.problems, not_compared(job.dumps),
                   compare(job.dumps))


class StacksGroup(Struct, frozen=True):
    """Processes whose main threads stand alike; ``file`` and ``line`` are the innermost ones of the program's own."""

    place: str
    file: str | None
    line: int | None
    pids: tuple[int, ...]

    @classmethod
    def of(cls, alike: StackGroup) -> StacksGroup:
        file, line = (None, None) if alike.line is None else (alike.line.file, alike.line.line)
        return cls(alike.place, file, line, tuple(p.pid for p in alike.processes))


class StacksJob(Struct, frozen=True):
    """A job, and where its processes stand; ``odd_pids`` stand elsewhere than most."""

    command: str
    summary: str
    odd_pids: tuple[int, ...]
    groups: tuple[StacksGroup, ...]

    @classmethod
    def of(cls, processes: Sequence[ProcessStacks]) -> StacksJob:
        groups = group(processes)
        return cls(processes[0].command, sentence(groups), tuple(p.pid for p in odd_ones(groups)),
                   tuple(map(StacksGroup.of, groups)))


class StacksProcess(Struct, frozen=True):
    """The threads of a process, or the ``problem`` of reading them. ``state``: "stopped", "frozen", "waiting" (in the
    kernel) or "ended"; null: it runs."""

    pid: int
    rank: str | None
    state: str | None
    problem: str | None
    threads: tuple[ThreadStack, ...]

    @classmethod
    def of(cls, process: ProcessStacks) -> StacksProcess:
        return document_of(cls, process, rank=process.rank or None,
                           state=process.halt and process.halt.state,
                           problem=process.problem and process.problem.message)


class StacksDocument(Struct, frozen=True, tag_field="schema", tag="gputop.stacks/1"):
    nccl: StacksNccl
    flight_recorder: tuple[StacksDumps, ...]
    jobs: tuple[StacksJob, ...]
    processes: tuple[StacksProcess, ...]

    @classmethod
    def of(cls, nccl: StacksNccl, dumps: Iterable[Dumps], by_job: Sequence[Sequence[ProcessStacks]]) -> StacksDocument:
        return cls(nccl, tuple(map(StacksDumps.of, dumps)), tuple(StacksJob.of(job) for job in by_job if job),
                   tuple(StacksProcess.of(process) for job in by_job for process in job))
