"""The answers of a Prometheus, and what they say of groups, nodes and GPUs. Pure.

A group is a job, as the labels of the metrics name it; where no label names jobs, it is a node. The GPUs of no job are
a group, too, with an empty name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import ClassVar

from msgspec import Struct, field
from msgspec.structs import replace

from gputop.cluster.available_metrics import AvailableMetrics
from gputop.cluster.model import FleetLimits, Gpu, Group, Node, fields_of
from gputop.cluster.prometheus import Series, figure_of
from gputop.cluster.promql import matchers
from gputop.cluster.queries import LEVELS
from gputop.cluster.series_store import SeriesStore
from gputop.cluster.slurm import SlurmNodes
from gputop.sources.exporters import CLUSTER_LABEL, NODE_LABELS, UUID_LABELS, gpu_of, job_of, node_of

MOST_LOW_GPUS = 12  # that are looked at
_MAX_GPUS = 10**7  # that are counted, whatever a server says
_CLOCK_FIGURES = ("clock_median", "clock_mad", "clocks", "low_clocks")
_PEER = "peer_"
_IDLE = ("idle:1", "idle:0")

Key = tuple[str, str]  # of a group: its label and value; of a node: "" and its name
Selection = tuple[tuple[str, str], ...]  # labels and their values, by which GPUs are asked for


class GroupFigures(Struct, frozen=True):
    """The present figures of a group or of a node. ``values``: by figure and kind of activity; the kind is "" where all
    GPUs have the same."""

    labels: Mapping[str, str]  # by which it is asked for; {} where they are not known
    kind: str  # of its activity; "mixed"
    values: Mapping[tuple[str, str], float]
    levels: Mapping[str, Mapping[int, float]] = {}  # by kind: how many GPUs have which level of activity

    def value(self, figure: str) -> float | None:
        """A figure that has no kinds."""
        return next((value for (name, _), value in self.values.items() if name == figure), None)

    def count(self, figure: str) -> int | None:
        """A number of GPUs, over all kinds. None: there are no GPUs to count; none counted is 0."""
        counts = [value for (name, _), value in self.values.items() if name == figure]
        has_gpus = any(name == "gpus" for name, _ in self.values)
        return bounded(sum(counts)) if counts or has_gpus else None

    @property
    def quiet(self) -> int:
        """Return how many GPUs do nothing of late."""
        return bounded(sum(counts.get(0, 0.0) for counts in self.levels.values()))

    def has_low_gpu(self, below: float) -> bool:
        """Return whether a GPU that works may be ``below`` the median of these, so that it is worth a question."""
        for counts in self.levels.values():
            working = sorted((level, count) for level, count in counts.items() if level > 0)
            half, passed = sum(count for _, count in working) / 2, 0.0
            for level, count in working:
                passed += count
                if passed > half:
                    # A level is a step of activity: the median is at most its upper end, the lowest at least its lower.
                    if level - working[0][0] + 1 > below * LEVELS:
                        return True
                    break
        return False

    def group(self, kind: str) -> Group:
        """Return the group with the mean of its kinds' activity, by their GPUs."""
        kinds = [(value, self.values["gpus", of_kind]) for (name, of_kind), value in self.values.items()
                 if name == "activity" and ("gpus", of_kind) in self.values]
        measured = sum(count for _, count in kinds)
        gpus = sum(value for (name, _), value in self.values.items() if name == "gpus")
        # What is used and free; the driver's own part is no room for a job.
        used, free = self.value("memory_used_bytes"), self.value("memory_free_bytes")
        total = self.value("memory_total_bytes")
        if total is None and used is not None and free is not None:
            total = used + free
        activity = sum(value * count for value, count in kinds) / measured if measured else None
        return Group(gpus=bounded(gpus), activity=activity, kind=kind, tensor_active=self.value("tensor_active"),
                     memory_used_bytes=used, memory_total_bytes=total, power_w=self.value("power_w"))


class Idleness(Struct, frozen=True):
    """GPUs of a group: that did nothing in the idle window, of those that were there all that time for the same job,
    that were there whoever held them, and that do nothing now."""

    idle: int
    watched: int
    seen: int
    quiet: int


class Outliers(Struct, frozen=True):
    middles: Mapping[Key, Mapping[str, float]]  # median, mad, node_median of the groups that were asked for
    low_gpus: tuple[Series, ...]  # whose activity is far below the median of their group, the lowest first
    low_nodes: tuple[Series, ...]
    low_clocks: tuple[Series, ...]  # busy GPUs, the lowest first
    node_clocks: Mapping[tuple[Key, str], float]  # the median of a group's busy GPUs, by model
    idle: Mapping[Key, Mapping[str, float]]  # of the groups that were asked for: did nothing, or did; "seen"
    idle_gpus: tuple[Series, ...]
    target_counts: Mapping[str, float]  # "targets" and "down", and "gpus_before"
    down_targets: tuple[str, ...]  # nodes of some that do not answer
    empty_targets: tuple[str, ...]  # and of some that answer with no activity

    @property
    def asked_gpus(self) -> tuple[Series, ...]:
        return (*self.low_gpus[:MOST_LOW_GPUS], *self.low_clocks)


class GpuDetails(Struct, frozen=True):
    gpus: Mapping[str, Gpu]  # by UUID
    groups: Mapping[str, frozenset[Key]]  # those that a GPU is in
    clocks: Mapping[tuple[Key, str], Mapping[str, float]]  # how those of busy GPUs spread, by group and model
    peers: Mapping[Key, Mapping[str, float]]  # medians of a group


class FleetSeries(Struct, frozen=True, dict=True):
    """Answers of a Prometheus: the newest one to each question, as series, and the past. ``limits``: those by which it
    was asked."""

    metrics: AvailableMetrics
    limits: FleetLimits
    time_s: float  # by Prometheus's clock
    figure_series: Sequence[Series] = ()
    outlier_series: Sequence[Series] = ()
    idle_keys: frozenset[Key] = frozenset()  # the groups that it was asked of whether they are idle
    gpu_series: Sequence[Series] = ()
    node_series: Sequence[Series] = ()
    past: SeriesStore = field(default_factory=SeriesStore)
    names_free_nodes: ClassVar[bool] = False  # also where groups are jobs

    def key(self, labels: Mapping[str, str]) -> Key:
        """The group that a series is of."""
        return job_of(labels) if self.metrics.by_job else ("", node_of(labels))

    @cached_property
    def kind(self) -> str:
        """Return the kind of the activity of all GPUs; "" where they differ."""
        return self.metrics.common_kind()

    @cached_property
    def groups(self) -> dict[Key, GroupFigures]:
        by_group: dict[Key, list[Series]] = {}
        for series in self.figure_series:
            by_group.setdefault(self.key(series.labels), []).append(series)
        return {key: self._figures_of(each) for key, each in by_group.items()}

    @cached_property
    def jobs(self) -> dict[Key, GroupFigures]:
        """The groups that have a name."""
        return {key: figures for key, figures in self.groups.items() if key[1]}

    @cached_property
    def nodes(self) -> dict[str, Node]:
        """Return the nodes by name, where groups are nodes; those whose activity is known."""
        if self.metrics.by_job:
            return {}
        return {name: _node(name, figures) for (_, name), figures in self.jobs.items() if figures.labels}

    @cached_property
    def slurm_nodes(self) -> SlurmNodes:
        """Return these nodes by the names that Slurm may have for them."""
        return SlurmNodes({name: node.labels for name, node in self.nodes.items()}, self.metrics.clusters)

    @cached_property
    def job_nodes(self) -> dict[Key, dict[str, Node]]:
        """The nodes of the jobs whose nodes were asked for, by name."""
        by_node: dict[tuple[Key, str], list[Series]] = {}
        for series in self.node_series:
            if (key := self.key(series.labels))[1] or self.names_free_nodes:
                by_node.setdefault((key, node_of(series.labels)), []).append(series)
        nodes: dict[Key, dict[str, Node]] = {}
        for (key, name), each in sorted(by_node.items(), key=lambda item: item[0]):
            figures = replace(self._figures_of(each), labels=each[-1].labels)
            nodes.setdefault(key, {})[name] = _node(name, figures)
        return nodes

    @cached_property
    def outliers(self) -> Outliers:
        middles: dict[Key, dict[str, float]] = {}
        idle: dict[Key, dict[str, float]] = {}
        for series in self.outlier_series:
            if (figure := figure_of(series)) in ("median", "mad", "node_median"):
                middles.setdefault(self.key(series.labels), {})[figure] = series.value
            elif figure in (*_IDLE, "seen"):  # of each kind
                counts = idle.setdefault(self.key(series.labels), {})
                counts[figure] = counts.get(figure, 0.0) + series.value
        low_clocks = {gpu_id(series.labels): series for series in self._named("low_clock")}
        return Outliers(
            middles=middles, low_gpus=tuple(sorted(self._named("low_gpu"), key=attrgetter("value"))),
            low_nodes=tuple(self._named("low_node")), idle=idle, idle_gpus=tuple(self._named("idle_gpu")),
            low_clocks=tuple(sorted(low_clocks.values(), key=attrgetter("value"))[:MOST_LOW_GPUS]),
            node_clocks={(self.key(series.labels), series.labels.get("model", "")): series.value
                         for series in self._named("node_clock")},
            target_counts={figure: series.value for series in self.outlier_series
                           if (figure := figure_of(series)) in ("targets", "gpus_before", "down")},
            down_targets=self._targets("down_target"), empty_targets=self._targets("empty_target"))

    def idleness(self, key: Key) -> Idleness | None:
        """Return how many GPUs of a group are idle. None: it was not asked, or the group is not there."""
        figures = self.groups.get(key)
        if figures is None or (gpus := figures.count("gpus")) is None:
            return None
        if not figures.quiet:
            return Idleness(0, gpus, gpus, 0)
        counts = self.outliers.idle.get(key, {})
        idle, busy, seen = (bounded(counts.get(figure, 0.0)) for figure in (*_IDLE, "seen"))
        # One that was asked a moment before or after: GPUs that are not there now are nobody's idle ones.
        watched = min(idle + busy, gpus)
        return Idleness(min(idle, figures.quiet), watched, min(seen, gpus), figures.quiet) if (
            key in self.idle_keys) else None

    @cached_property
    def gpus(self) -> GpuDetails:
        gpus: dict[str, Gpu] = {}
        groups: dict[str, set[Key]] = {}
        clocks: dict[tuple[Key, str], dict[str, float]] = {}
        peers: dict[Key, dict[str, float]] = {}
        for series in self.gpu_series:
            figure, key = figure_of(series), self.key(series.labels)
            if figure in _CLOCK_FIGURES:
                clocks.setdefault((key, series.labels.get("model", "")), {})[figure] = series.value
            elif figure.startswith(_PEER):
                peers.setdefault(key, {})[figure.removeprefix(_PEER)] = series.value
            else:
                uuid = gpu_id(series.labels)
                groups.setdefault(uuid, set()).add(key)
                gpu = gpus.get(uuid) or Gpu(node=node_of(series.labels), gpu=gpu_of(series.labels), uuid=uuid)
                if figure == "activity":
                    gpu = replace(gpu, activity=series.value, kind=series.labels.get("kind", self.kind))
                elif figure:
                    gpu = replace(gpu, figures={**gpu.figures, figure: series.value})
                gpus[uuid] = gpu
        return GpuDetails(gpus, {uuid: frozenset(keys) for uuid, keys in groups.items()}, clocks, peers)

    def _figures_of(self, answer: Sequence[Series]) -> GroupFigures:
        labels: Mapping[str, str] = {}
        kinds = set()
        values: dict[tuple[str, str], float] = {}
        levels: dict[str, dict[int, float]] = {}
        for series in answer:
            figure, kind = figure_of(series), series.labels.get("kind", "")
            name, _, level = figure.partition(":")
            if name == "levels":
                values["gpus", kind] = values.get(("gpus", kind), 0.0) + series.value
                levels.setdefault(kind, {})[_level(level)] = series.value
                continue
            values[figure, kind] = series.value
            if figure == "activity":
                labels = series.labels
                kinds.add(kind or self.kind)
        return GroupFigures(labels, kinds.pop() if len(kinds) == 1 else "mixed" if kinds else "", values, levels)

    def _named(self, figure: str) -> list[Series]:
        """The outliers of groups that have a name."""
        return [series for series in self.outlier_series if figure_of(series) == figure and self.key(series.labels)[1]]

    def _targets(self, figure: str) -> tuple[str, ...]:
        targets = (series.labels for series in self.outlier_series if figure_of(series) == figure)
        return tuple(sorted(node_of({name: text for name, text in labels.items()
                                     if self.metrics.clusters or name != CLUSTER_LABEL}) for labels in targets))


def gpu_id(labels: Mapping[str, str]) -> str:
    """A GPU's UUID, a MIG instance's with its number; without one, node and number."""
    uuid = next((labels[label] for label in UUID_LABELS if labels.get(label)), "")
    mig = gpu_of(labels).partition(":")[2]
    return f"{uuid}:{mig}" if uuid and mig else uuid or f"{node_of(labels)}:{gpu_of(labels)}"


def gpu_selection(labels: Mapping[str, str]) -> Selection:
    """Return what selects this GPU; () without a UUID."""
    # The first one may be a copy, to compare exporters by; the last is what the exporter wrote.
    uuids = [(label, labels[label]) for label in UUID_LABELS if labels.get(label)][-1:]
    return () if uuids and ";" in uuids[0][1] else tuple(uuids)


def node_selection(labels: Mapping[str, str]) -> Selection:
    """Return what selects the GPUs of this node; () where no label names it."""
    name = tuple((label, labels[label]) for label in NODE_LABELS if labels.get(label))[:1]
    cluster = ((CLUSTER_LABEL, labels[CLUSTER_LABEL]),) if labels.get(CLUSTER_LABEL) else ()
    return (*name, *cluster) if name else ()


def group_selection(key: Key, labels: Mapping[str, str]) -> Selection:
    """Return what selects the GPUs of this group; () where no label names it."""
    label = key[0] or next((label for label in NODE_LABELS if labels.get(label)), "")
    return ((label, labels.get(label, key[1])),) if label else ()


def conditions(selections: Iterable[Selection]) -> list[str]:
    """Matchers for these, one for each set of labels: those with one label and the same go together."""
    texts: dict[str, set[str]] = {}
    several = []
    for selection in selections:
        if len(selection) == 1:
            texts.setdefault(selection[0][0], set()).add(selection[0][1])
        elif selection:
            several.append(matchers({label: [text] for label, text in selection}))
    return [*(matchers({label: of_label}) for label, of_label in texts.items()), *dict.fromkeys(several)]


def _level(text: str) -> int:
    """A level that a server says."""
    try:
        return max(0, min(LEVELS, int(float(text))))
    except (ValueError, OverflowError):
        return LEVELS


def bounded(count: float) -> int:
    """A number of GPUs that a server says."""
    return int(min(max(count, 0.0), _MAX_GPUS))


def _node(name: str, figures: GroupFigures) -> Node:
    return Node(**fields_of(figures.group(figures.kind)), name=name, labels=figures.labels)
