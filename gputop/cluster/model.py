"""A fleet: the jobs, nodes and GPUs of a cluster with their figures, as rules and views read and ask for them.

What is not known is None, or absent. Ratios are 0-1, everything else is in base units.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from msgspec import Struct, field

from gputop.core.findings import Problem


class History(Struct, frozen=True):
    """Values on a grid of time, oldest first: the mean over the ``step_s`` before ``begin_s + i * step_s``; None:
    nothing was measured."""

    begin_s: float
    step_s: float
    values: tuple[float | None, ...] = ()

    def time_s(self, i: int) -> float:
        return self.begin_s + i * self.step_s


class Gpu(Struct, frozen=True, kw_only=True):
    """One GPU or MIG instance. ``figures`` have the names of :mod:`gputop.sources.exporters`."""

    node: str
    gpu: str  # its number on the node, "0:1" for a MIG instance
    uuid: str
    activity: float | None = None
    kind: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    history: History | None = None

    @property
    def name(self) -> str:
        return f"{self.node}:{self.gpu}"


class LowClock(Struct, frozen=True, kw_only=True):
    """A busy GPU whose mean SM clock of late is far below that of the job's busy GPUs of its model, and these."""

    gpu: Gpu
    clock_hz: float
    median_hz: float
    mad_hz: float  # median absolute deviation
    gpus: int  # of that model, that are busy
    low: int  # of which so many are low
    history: History | None = None  # of the GPU's clock


class Group(Struct, frozen=True, kw_only=True):
    """The figures of some GPUs together: of a job, of a node."""

    gpus: int
    activity: float | None = None
    kind: str = ""  # of the activity: sm_active, gr_active, util; "mixed"
    tensor_active: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    power_w: float | None = None


class Node(Group, frozen=True, kw_only=True):
    """A node, or what a job has of it."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)  # by which it is asked for
    history: History | None = None
    each: tuple[Gpu, ...] = ()  # its GPUs, where they were asked for


class IdleGpus(Struct, frozen=True, kw_only=True):
    """The GPUs of a job that may be idle; None: not known. ``watched`` were there in all of the idle window with this
    job, ``seen`` whoever held them; of the others it is not known whether they did anything. ``quiet`` do nothing now,
    some of which are ``names``. ``busy_history`` are the GPUs that did something: one without samples is not in it."""

    watched: int | None = None
    seen: int | None = None
    quiet: int | None = None
    names: tuple[str, ...] = ()
    busy_history: History | None = None


NO_JOB = "(no job)"  # in place of a job's id, where the GPUs of none are shown and asked for
Mapped = Literal["label", "node", "shared node", "process"]


class Job(Group, frozen=True, kw_only=True):
    """A job, and how it compares with itself.

    ``mapped``: by which its GPUs are known to be its own: a label of the figures; Slurm's nodes, all of whose GPUs it
    holds; nodes of which others hold GPUs too, so that its figures are those of the whole nodes; or, without Slurm,
    user and program of the processes, which may be several jobs.
    """

    id: str
    label: str = ""  # which names it: hpc_job, slurm_job_id, pod; "" where Slurm alone does
    labels: Mapping[str, str] = field(default_factory=dict)
    mapped: Mapped = "label"
    name: str = ""
    user: str | None = None
    start_s: float | None = None
    nodes: int | None = None
    node_names: tuple[str, ...] = ()  # where they are known
    idle_gpus: int | None = None  # that have done nothing over the idle window and were there before it
    idle: IdleGpus = field(default_factory=lambda: IdleGpus())
    median: float | None = None  # of the activity of its GPUs; only asked for where they differ
    mad: float | None = None  # median absolute deviation from it
    low_gpus: tuple[Gpu, ...] = ()  # the GPUs far below the median, the lowest first
    low_clocks: tuple[LowClock, ...] = ()  # the lowest first
    node_median: float | None = None  # of the means of its nodes
    low_nodes: tuple[Node, ...] = ()
    peers: Mapping[str, float] = field(default_factory=dict)  # medians of what may tell why a GPU is slow
    history: History | None = None  # activity
    idle_history: History | None = None  # GPUs that did nothing
    each: tuple[Node, ...] = ()  # its nodes, where they were asked for
    number: str = ""  # of Slurm's two names, "10" and "3_0" or "4+1", that which is not ``id``

    def is_named(self, text: str) -> bool:
        """Return whether a user means this job by ``text``: its own name, or that of the array that it is a task of, or
        of the heterogeneous job that it is a part of."""
        names = (self.id, self.number, self.id.rpartition("/")[2])
        return text in names or any(re.fullmatch(rf"{re.escape(text)}[_+]\d+", name) for name in names)


class Fleet(Struct, frozen=True, kw_only=True):
    """Everything known at ``time_s``."""

    time_s: float
    source: str  # address and exporters
    kinds: tuple[str, ...] = ()  # of activity
    jobs: tuple[Job, ...] = ()
    simulated: bool = False  # some figures are of gputop's simulated node (gputop export --demo)
    gpus: int = 0  # each once, though several jobs may share it
    free: Group | None = None  # the GPUs that belong to no job
    free_nodes: tuple[Node, ...] = ()  # the nodes of these, where GPUs are known by node
    problems: tuple[Problem, ...] = ()
    queries: int = 0
    bytes: int = 0
    seconds: float = 0.0
    has_past: bool = True  # there are samples of the begin of the idle window
    figures_s: float | None = None  # when the figures are from; None: there are none


def brief(location: str) -> str:
    """A place for a cell of a table: its node without the domain, "n07:3" for "n07.cluster.example:3"."""
    node, colon, gpu = location.partition(":")
    return location if re.fullmatch(r"(.*/)?[\d.]+", node) else node.partition(".")[0] + colon + gpu


def fields_of(group: Group) -> dict[str, Any]:
    """Return the fields to make a job or a node of a group's figures."""
    return {name: getattr(group, name) for name in Group.__struct_fields__}


def upper_median(values: Iterable[float | None]) -> float | None:
    """The median of those that are known, of an even number the greater of the two in the middle; None: of none."""
    measured = sorted(value for value in values if value is not None)
    return measured[len(measured) // 2] if measured else None


def together(groups: Iterable[Group]) -> Group:
    """The figures of several groups as one."""
    populated = [group for group in groups if group.gpus]

    def mean(name: str) -> float | None:
        measured = [(getattr(g, name), g.gpus) for g in populated if getattr(g, name) is not None]
        return sum(value * n for value, n in measured) / sum(n for _, n in measured) if measured else None

    def total(name: str) -> float | None:
        measured = [getattr(g, name) for g in populated if getattr(g, name) is not None]
        return sum(measured) if measured and len(measured) == len(populated) else None

    kinds = {group.kind for group in populated}
    return Group(gpus=sum(g.gpus for g in populated), activity=mean("activity"),
                 kind=kinds.pop() if len(kinds) == 1 else "mixed" if kinds else "",
                 tensor_active=mean("tensor_active"), memory_used_bytes=total("memory_used_bytes"),
                 memory_total_bytes=total("memory_total_bytes"), power_w=total("power_w"))


class FleetLimits(Struct, frozen=True):
    """Limits of what is asked for: GPUs that have not passed the activity ``idle`` for ``idle_s``, and GPUs whose
    activity is ``below`` the median by so much; and those more active than ``busy`` whose SM clock is below ``clock``
    of the median. The rules decide."""

    idle: float
    idle_s: float
    below: float
    busy: float
    clock: float


class FleetView(Struct, frozen=True):
    """Part of a fleet that somebody looks at. ``jobs``: those whose history is wanted first; none: all."""

    span_s: float = 3 * 3600.0
    step_s: float = 120.0
    jobs: tuple[str, ...] = ()
    open_jobs: tuple[str, ...] = ()
    open_nodes: tuple[tuple[str, str], ...] = ()  # job, node
