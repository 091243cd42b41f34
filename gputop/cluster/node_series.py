"""Series of the answers of nodes: what a Prometheus would say of them, so that one builder makes a fleet of both. Pure.

A snapshot is of one second. Activity is therefore the mean of what was seen in the last five minutes, and a GPU is
compared with its peers only once that is enough. Groups are jobs, by what holds their GPUs:

1. A job of Slurm, by the control groups of its processes where these account for all of its GPUs, else by node.
2. Else the control group of the first process that computes there; else what its user runs by one program, which may be
   several jobs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isnan, nan
from statistics import fmean, median

from msgspec import Struct, field
from msgspec.structs import replace

from gputop.cluster.answers import FleetSeries, Key, gpu_id
from gputop.cluster.available_metrics import AvailableMetrics
from gputop.cluster.model import FleetLimits, FleetView
from gputop.cluster.prometheus import Series
from gputop.cluster.promql import FIGURE
from gputop.cluster.queries import COMPARED, LEVELS, OUTLIERS
from gputop.cluster.series_store import SeriesStore
from gputop.cluster.slurm import SlurmJob, SlurmNodes
from gputop.cluster.wanted import ACTIVITY, CLOCK
from gputop.telemetry.agents import FIGURES, NodeAnswer, NodeGpu, NodeProblem
from gputop.text.units import printable

MEAN_S = 300.0
_ENOUGH_SAMPLES = 5  # of a mean that is compared with others
_PROGRAM_CHARS = 60
NODE = "Hostname"
Labels = Mapping[str, str]
_Row = tuple[Labels, float]
_Rows = tuple[str, Iterable[_Row]]  # of a figure


class NodeSeries(FleetSeries, frozen=True, dict=True):
    """Answers of nodes as series. The labels ``by`` and ``job`` name the job of each."""

    names_free_nodes = True

    def key(self, labels: Labels) -> Key:
        return _key(labels)


class GpuPast(Struct):
    first_s: float
    busy_s: float  # when it last did more than nothing; at first: first_s
    seen_s: float
    kind: str = ""
    # Time, activity and clock (NaN: not known) of the samples of late.
    newest: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=256))
    keys: tuple[Key, ...] = ()  # the groups that it is in
    held_s: float = 0.0  # since when


class Watched(Struct):
    """A node: its newest answer, the past of the GPUs in it, and how it was asked last."""

    asked_s: float = -1e9
    problem: NodeProblem | None = None
    running: bool = False  # it is being asked
    answer: NodeAnswer | None = None
    got_s: float = 0.0  # when it was given, by this machine's clock
    gpus: dict[str, GpuPast] = field(default_factory=dict)  # by UUID

    def remember(self, answer: NodeAnswer, now_s: float, idle: float, gap_s: float) -> None:
        """``gap_s``: not seen for longer, what was before says nothing of the time between."""
        self.answer, self.got_s = answer, now_s
        for uuid in self.gpus.keys() - {gpu.uuid for gpu in answer.gpus}:
            del self.gpus[uuid]
        for gpu in answer.gpus:
            past = self.gpus.get(gpu.uuid)
            if past is None or now_s - past.seen_s > gap_s:
                past = self.gpus[gpu.uuid] = GpuPast(now_s, now_s, now_s)
            if gpu.activity is None:
                continue
            if gpu.kind != past.kind:
                past.kind = gpu.kind
                past.newest.clear()
            past.seen_s = now_s
            if gpu.activity > idle:
                past.busy_s = now_s
            past.newest.append((now_s, gpu.activity, gpu.figures.get("sm_clock_hz", nan)))


class _Group(Struct):
    """A job, or what no job holds. ``gpus`` and ``nodes``: as Slurm counts them; 0: those that are seen."""

    labels: dict[str, str]
    gpus: int = 0
    nodes: int = 0
    start_s: float | None = None

    @property
    def mapped(self) -> str:
        return self.labels.get("mapped", "label")


class _Member(Struct, frozen=True):
    """A GPU in a group. ``labels``: those of the group, and of the GPU; ``values``: its figures, the means of late of
    its ``activity`` and ``clock``, and what counts, as far as they are known."""

    group: _Group
    labels: Labels
    past: GpuPast
    values: Mapping[str, float | None]

    @property
    def activity(self) -> float | None:
        return self.values["activity"]


def series_of(nodes: Mapping[str, Watched], jobs: Sequence[SlurmJob], limits: FleetLimits, view: FleetView,
              time_s: float, past: SeriesStore) -> NodeSeries:
    """The series at a time; the newest points of the past go into ``past``. ``jobs``: Slurm's."""
    members = _members(nodes, jobs)
    past.fit(past.grid(view, time_s))
    _keep(members, limits.idle, view.step_s, past)

    alike = _alike(members)

    def series(rows: Iterator[_Rows]) -> list[Series]:
        return [Series({**labels, FIGURE: figure}, [(time_s, value)]) for figure, each in rows for labels, value in each
                if not isnan(value)]

    simulated = any(node.answer.simulated for node in nodes.values() if node.answer is not None)
    whole = frozenset(_key(each.labels) for each in members if each.group.mapped != "shared node")
    return NodeSeries(
        AvailableMetrics({}, job_labels=("job",), simulated=simulated), limits, time_s,
        series(_figures(members, limits.idle)), series(_outliers(members, alike, limits)), whole,
        series(_details(members, alike, limits)), series(_nodes(members)), past)


def _key(labels: Labels) -> Key:
    return labels.get("by", ""), labels.get("job", "")


# -- what holds a GPU -----------------------------------------------------------------------------------

def _members(nodes: Mapping[str, Watched], jobs: Sequence[SlurmJob]) -> list[_Member]:
    """The GPUs in the groups that hold them. Each is of one node: that may have been named twice."""
    gpus: dict[str, tuple[str, NodeGpu]] = {}
    for name, node in nodes.items():
        for gpu in node.answer.gpus if node.answer is not None else ():
            gpus.setdefault(gpu.uuid, (name, gpu))
    groups_of: dict[str, list[_Group]] = {uuid: [] for uuid in gpus}
    for group, uuids in _of_slurm(nodes, gpus, jobs):
        for uuid in uuids:
            groups_of[uuid].append(group)
    others: dict[Key, _Group] = {}
    members = []
    for uuid, (name, gpu) in gpus.items():
        groups, node = groups_of[uuid], nodes[name]
        if not groups:
            labels = _labels_of(gpu)
            group = others.setdefault(_key(labels), _Group(labels))
            starts = [s for s in (group.start_s, *(h.started_s for h in gpu.holders[:1])) if s is not None]
            group.start_s = min(starts, default=None)
            groups.append(group)
        past = node.gpus[uuid]
        if past.keys != (keys := tuple(_key(group.labels) for group in groups)):
            past.keys, past.held_s = keys, node.got_s
        recent = [(activity, clock) for time_s, activity, clock in past.newest if time_s > node.got_s - MEAN_S]
        clocks = [clock for _, clock in recent if clock == clock]
        values = {**gpu.figures, "one": 1.0, "clock": fmean(clocks) if len(clocks) >= _ENOUGH_SAMPLES else None,
                  "activity": fmean(each for each, _ in recent) if recent and gpu.activity is not None else None}
        gpu_labels = {"uuid": uuid, NODE: name, "gpu": gpu.label, "model": gpu.model, "kind": past.kind}
        members += [_Member(group, {**group.labels, **gpu_labels}, past, {
            **values, "first": float(group is groups[0]), "held": group.gpus or None, "nodes": group.nodes or None,
            "start_s": group.start_s}) for group in groups]
    return members


def _of_slurm(nodes: Mapping[str, Watched], gpus: Mapping[str, tuple[str, NodeGpu]], jobs: Sequence[SlurmJob],
              ) -> Iterator[tuple[_Group, list[str]]]:
    """Slurm's jobs, and the GPUs of each by UUID."""
    names = SlurmNodes({name: {NODE: name.rpartition("@")[2], "node": node.answer.hostname if node.answer else ""}
                        for name, node in nodes.items()}, frozenset())
    by_node: dict[str, list[str]] = {}
    for uuid, (name, _) in gpus.items():
        by_node.setdefault(name, []).append(uuid)
    for job in jobs:
        counts = {name: count for name, count in names.gpus_of(job).items() if name in by_node}
        uuids = [uuid for name in counts for uuid in by_node[name]
               if any(holder.container == f"slurm {job.number}" for holder in gpus[uuid][1].holders)]
        mapped = "label"
        if Counter(gpus[uuid][0] for uuid in uuids) != counts:
            mapped = "node" if all(len(by_node[name]) <= count for name, count in counts.items()) else "shared node"
            uuids = [uuid for name in counts for uuid in by_node[name]]
        yield _Group({"by": "slurm_job_id" if mapped == "label" else "", "job": job.number, "mapped": mapped},
                     sum(job.gpus.values()), len(job.gpus)), uuids


def _labels_of(gpu: NodeGpu) -> dict[str, str]:
    """Labels of the job by the first process on a GPU; none without a process."""
    for holder in gpu.holders[:1]:
        runtime, _, number = (holder.container or "").partition(" ")
        user = {"user": printable(holder.user)} if holder.user else {}
        if runtime == "slurm" and number:
            return {"by": "slurm_job_id", "job": printable(number)[:_PROGRAM_CHARS], **user}
        name = printable(holder.program)[:_PROGRAM_CHARS]
        return {"job": f"{user.get('user', '?')}/{name}", "mapped": "process", "name": name, **user}
    return {}


# -- what a Prometheus would answer ---------------------------------------------------------------------

def _by(members: Iterable[_Member], name: str, function: Callable[[list[float]], float], *labels: str,
        missing: float | None = None) -> Iterator[_Row]:
    """A function of a value in each group, and of each of these labels in it; GPUs without the value are left out."""
    values: dict[tuple[str, ...], tuple[_Member, list[float]]] = {}
    for member in members:
        if (value := member.values.get(name, missing)) is not None:
            key = (*_key(member.labels), *(member.labels[label] for label in labels))
            values.setdefault(key, (member, []))[1].append(value)
    for member, each in values.values():
        yield {**member.group.labels, **{label: member.labels[label] for label in labels}}, function(each)


def _spread(values: list[float]) -> float:
    """Median absolute deviation."""
    middle = median(values)
    return median(abs(value - middle) for value in values)


def _sums(members: Sequence[_Member], *labels: str) -> Iterator[_Rows]:
    """The figures of some GPUs together; a sum only where all have a value."""
    yield "activity", _by(members, "activity", fmean, "kind", *labels)
    yield "tensor_active", _by(members, "tensor_active", fmean, *labels)
    for name in ("memory_used_bytes", "memory_total_bytes", "power_w"):
        yield name, _by(members, name, sum, *labels, missing=nan)


def _figures(members: Sequence[_Member], idle: float) -> Iterator[_Rows]:
    yield from _sums(members)
    yield "gpus", _by((each for each in members if each.activity is None), "one", sum, "kind")
    for level, does_nothing in ((0, True), (LEVELS, False)):
        yield f"levels:{level}", _by((each for each in members if each.activity is not None
                                      and (each.activity <= idle) is does_nothing), "one", sum, "kind")
    nodes = Counter(_key(labels) for labels, _ in _by(members, "one", sum, NODE))
    yield "nodes", ((labels, float(nodes[_key(labels)])) for labels, _ in _by(members, "one", sum))
    yield "all_gpus", _by(members, "first", sum)
    for name in ("nodes", "held", "start_s"):  # of Slurm, of a process
        yield name, _by(members, name, min)


def _nodes(members: Sequence[_Member]) -> Iterator[_Rows]:
    yield from _sums(members, NODE)
    yield "gpus", _by(members, "one", sum, "kind", NODE)


def _alike(members: Sequence[_Member]) -> list[_Member]:
    """The GPUs of jobs that are surely one, whose GPUs have one kind of activity and were all seen often enough."""
    out: dict[Key, list[_Member]] = {}
    for each in members:
        if each.labels.get("job") and each.group.mapped in ("label", "node"):
            out.setdefault(_key(each.labels), []).append(each)
    return [each for group in out.values() for each in group if len({one.past.kind for one in group}) == 1
            and all(len(one.past.newest) >= _ENOUGH_SAMPLES for one in group)]


def _busy(alike: Sequence[_Member], limits: FleetLimits) -> list[_Member]:
    return [each for each in alike if each.values["clock"] and each.labels["model"] and (
        each.activity or 0.0) > limits.busy]


def _outliers(members: Sequence[_Member], alike: Sequence[_Member], limits: FleetLimits) -> Iterator[_Rows]:
    """Outliers, and the GPUs that were idle in all of the idle window."""
    watched = [each for each in members if each.past.seen_s - each.past.held_s >= limits.idle_s]
    yield "seen", _by((each for each in members if each.past.seen_s - each.past.first_s >= limits.idle_s), "one", sum)
    for figure, does_nothing in (("idle:1", True), ("idle:0", False)):
        yield figure, _by((each for each in watched if (
            each.past.seen_s - each.past.busy_s >= limits.idle_s) is does_nothing), "one", sum)
    yield "idle_gpu", _lowest((each.labels, each.activity) for each in alike
                              if each.activity is not None and each.activity < limits.idle)
    # Those that do nothing are no peers of those that work.
    working = [each for each in alike if each.activity is not None and each.activity > limits.idle]
    gpus = [(each.labels, each.activity or 0.0) for each in working]
    nodes = list(_by(working, "activity", fmean, NODE))
    middles = list(_by(working, "activity", median))
    node_middles = [({**labels}, median(value for other, value in nodes if _key(other) == _key(labels)))
                    for labels, _ in middles]
    yield "median", middles
    yield "mad", _by(working, "activity", _spread)
    yield "node_median", node_middles
    for figure, rows, middle_rows in (("low_gpu", gpus, middles), ("low_node", nodes, node_middles)):
        middle_of = {_key(labels): value for labels, value in middle_rows}
        yield figure, _lowest(row for row in rows if row[1] < middle_of[_key(row[0])] - limits.below)
    low = _low_clocks(_busy(alike, limits), limits)
    yield "low_clock", _lowest((each.labels, each.values["clock"] or 0.0) for each in low)


def _low_clocks(busy: Sequence[_Member], limits: FleetLimits) -> list[_Member]:
    """Return those whose clock is far below the median of their job's and model's."""
    medians = {(_key(labels), labels["model"]): value for labels, value in _by(busy, "clock", median, "model")}
    return [each for each in busy
            if (each.values["clock"] or 0.0) < limits.clock * medians[_key(each.labels), each.labels["model"]]]


def _lowest(rows: Iterable[_Row]) -> Iterator[_Row]:
    counts: Counter[Key] = Counter()
    for labels, value in sorted(rows, key=lambda row: row[1]):
        counts[_key(labels)] += 1
        if counts[_key(labels)] <= OUTLIERS:
            yield labels, value


def _details(members: Sequence[_Member], alike: Sequence[_Member], limits: FleetLimits) -> Iterator[_Rows]:
    """Everything of each GPU, and of its peers."""
    yield "", ((each.labels, 1.0) for each in members)
    yield "activity", ((each.labels, each.activity) for each in members if each.activity is not None)
    for name in FIGURES:
        yield name, ((each.labels, each.values.get(name, nan) or 0.0) for each in members)
    for name in COMPARED:
        yield f"peer_{name}", _by(members, name, median)
    busy = _busy(alike, limits)
    yield "clock_median", _by(busy, "clock", median, "model")
    yield "clock_mad", _by(busy, "clock", _spread, "model")
    yield "clocks", _by(busy, "one", sum, "model")
    yield "low_clocks", _by(_low_clocks(busy, limits), "one", sum, "model")


def _keep(members: Sequence[_Member], idle: float, step_s: float, past: SeriesStore) -> None:
    """Put the newest points of groups, nodes and GPUs into their past."""
    slots = {each.labels["uuid"]: int(each.past.newest[-1][0] // step_s) for each in members if each.past.newest}
    newest = max(slots.values(), default=0)
    now = []
    for each in members:
        if slots.get(each.labels["uuid"]) == newest:
            samples = [sample for sample in each.past.newest if sample[0] // step_s == newest]
            mean, clock = fmean(activity for _, activity, _ in samples), fmean(clock for *_, clock in samples)
            now.append(replace(each, values={"activity": mean, "idle:1": float(mean < idle), "idle:0": float(
                mean >= idle)}))
            past.put(ACTIVITY, gpu_id(each.labels), newest + 1, mean)
            if not isnan(clock):
                past.put(CLOCK, gpu_id(each.labels), newest + 1, clock)
    for figure, function in (("activity", fmean), ("idle:1", sum), ("idle:0", sum)):
        for labels, value in _by(now, figure, function):
            past.put(figure, _key(labels), newest + 1, value)
    for labels, value in _by(now, "activity", fmean, NODE):
        past.put("node_activity", (_key(labels), labels[NODE]), newest + 1, value)
