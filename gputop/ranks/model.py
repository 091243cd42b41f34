"""Records of what NCCL's RAS reports of a job: its communicators, and how many collectives each rank has launched; and
the search in them for the rank that did not come. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field
from msgspec.structs import replace


class Rank(Struct, frozen=True):
    """A rank of a communicator. ``host`` is an IP address, ``gpu`` NVML's index there; None: NCCL does not know.

    ``trouble`` says what NCCL holds against it, "" where nothing.
    """

    number: int = field(name="rank")
    host: str = ""
    pid: int | None = None
    gpu: int | None = None
    trouble: str = ""

    @property
    def place(self) -> tuple[str, int | None, int | None]:
        """Identity in all communicators: ranks are numbered anew in each."""
        return self.host, self.pid, self.gpu


class Level(Struct, frozen=True):
    """Ranks that have launched ``count`` collectives of one kind. ``ranks`` are those that are named: the text format
    names a few outliers only."""

    count: int
    size: int
    ranks: tuple[Rank, ...] = ()


class Communicator(Struct, frozen=True):
    """``levels`` by the collective's name, fewest first; "" is all collectives together (NCCL before 2.26). The text
    format has them only where ranks differ. ``silent`` ranks did not answer."""

    key: str
    size: int | None
    levels: Mapping[str, tuple[Level, ...]] = field(default_factory=dict)
    silent: tuple[Rank, ...] = ()


class RasAnswer(Struct, frozen=True):
    """One status of RAS. ``time_s`` is Unix time. ``counts_all``: ranks that agree are counted, too (JSON)."""

    time_s: float
    nccl: str
    communicators: tuple[Communicator, ...]
    counts_all: bool


class RasReport(Struct, frozen=True):
    """Report of RAS over time. ``first`` is the oldest answer since which no rank has launched anything, ``last`` the
    newest; both None: there is none, for the reason ``problem``. ``hosts`` are this node's own addresses."""

    first: RasAnswer | None = None
    last: RasAnswer | None = None
    problem: str = ""
    hosts: frozenset[str] = frozenset()


# -- the rank that did not come: two answers against each other -------------------------------------

class StacksAbsence(Struct, frozen=True):
    """A collective that some ranks have launched and others have not (gputop.ranks.model)."""

    operation: str | None
    absent_at: int
    waiting_at: int
    absent: tuple[Rank, ...]
    absent_count: int
    waiting: tuple[Rank, ...]
    waiting_count: int
    silent: bool
    crossed: bool
    circle: bool


class Absence(StacksAbsence, frozen=True):
    """An absence, with what the document ``gputop.stacks/1`` does not tell of it.

    ``operation`` is its name, None where NCCL does not say which; ``absent_at`` is how many the absent ranks have
    launched, ``waiting_at`` how many those that are furthest have. ``absent`` and ``waiting`` are those of them that
    are named, each with its count of all. ``silent``: the absent ones did not even answer; then there are no counts.
    ``also`` is in how many other communicators ranks wait. ``crossed``: the absent ranks have launched another
    collective instead, which the others have not: the ranks run different code. ``circle``: they wait for each other.
    """

    also: int = 0


def unchanged(before: RasAnswer, after: RasAnswer) -> bool:
    """Return whether no rank has launched anything from one answer to the other."""
    return (before.counts_all == after.counts_all
            and {c.key: _counts(c) for c in before.communicators} == {c.key: _counts(c) for c in after.communicators})


def _counts(communicator: Communicator) -> object:
    return ({name: [(level.count, level.size) for level in levels] for name, levels in communicator.levels.items()},
            sorted(rank.number for rank in communicator.silent))


def find_absence(first: RasAnswer, last: RasAnswer) -> Absence | None:
    """Find what the ranks wait for; None where something moves, or where all have come as far as each other.

    A rank that has launched fewer collectives than the others of its communicator is late, which is ordinary, or it
    never comes. Only where no count at all has moved from one answer to the other do the others wait for it. One rank
    can hold up several communicators, and those who wait in one are late in the next: the rank to look at waits in
    none.
    """
    if not unchanged(first, last):
        return None
    absences = [absence for c in last.communicators if (absence := _absence(c)) is not None]
    if not absences:
        return None
    waits = {rank.place for absence in absences for rank in absence.waiting if rank.pid is not None}
    free = [absence for absence in absences if not waits & {rank.place for rank in absence.absent}]
    # A process that is gone comes before one that is late; then the collective with most ranks in it.
    chosen = max(free or absences, key=lambda a: (a.silent, a.waiting_count, -a.absent_count))
    return replace(chosen, also=len(absences) - 1, circle=not free)


def _absence(c: Communicator) -> Absence | None:
    if c.silent:
        size = c.size or sum(level.size for level in next(iter(c.levels.values()), ()))
        return Absence(None, 0, 0, c.silent, len(c.silent), (), max(0, size - len(c.silent)), silent=True,
                       crossed=False, circle=False)
    uneven = {name: levels for name, levels in c.levels.items() if len(levels) > 1}
    if not uneven:
        return None
    name, levels = max(uneven.items(), key=lambda item: (item[1][-1].size, item[0]))
    least, furthest = levels[0], levels[-1]
    ahead = levels[1:]
    crossed = any(_same(least, other[-1]) and _same(furthest, other[0])
                  for operation, other in uneven.items() if operation != name)
    return Absence(name or None, least.count, furthest.count, least.ranks, least.size,
                   tuple(rank for level in ahead for rank in level.ranks), sum(level.size for level in ahead),
                   silent=False, crossed=crossed, circle=False)


def _same(a: Level, b: Level) -> bool:
    return a.size == b.size and {rank.number for rank in a.ranks} == {rank.number for rank in b.ranks}
