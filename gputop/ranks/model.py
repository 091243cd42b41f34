"""Records of what NCCL's RAS reports of a job: its communicators, and how many collectives each rank has launched."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field


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
    timeouts: int = 0  # of ranks that were asked


class RasReport(Struct, frozen=True):
    """Report of RAS over time. ``first`` is the oldest answer since which no rank has launched anything, ``last`` the
    newest; both None: there is none, for the reason ``problem``. ``hosts`` are this node's own addresses."""

    first: RasAnswer | None = None
    last: RasAnswer | None = None
    problem: str = ""
    hosts: frozenset[str] = frozenset()
