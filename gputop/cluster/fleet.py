"""Makes the fleet of what a Prometheus has said and of Slurm's jobs. Pure.

1. Where labels name jobs, each job is a group of the answer; Slurm adds user, name and age. The group without a name is
   what no job holds.
2. Else the groups are nodes. A job of Slurm has the figures of its nodes, as far as the job is alone on them; the nodes
   of no job are free.
3. To both come what stands out, the nodes and GPUs that are on the screen, and the past.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gputop.cluster.answers import FleetSeries, Idleness, Key, Selection, bounded, gpu_id, gpu_selection, node_selection
from gputop.cluster.model import (
    NO_JOB,
    Fleet,
    FleetView,
    Gpu,
    Group,
    History,
    IdleGpus,
    Job,
    LowClock,
    Mapped,
    Node,
    Problem,
    fields_of,
    together,
    upper_median,
)
from gputop.cluster.prometheus import Series
from gputop.cluster.queries import COMPARED
from gputop.cluster.series_store import SlotGrid
from gputop.cluster.slurm import SlurmJob
from gputop.cluster.wanted import ACTIVITY as GPU_ACTIVITY
from gputop.cluster.wanted import CLOCK, GPUS, GROUPS, IDLE
from gputop.sources.exporters import ACTIVITY, CLUSTER_LABEL, gpu_of, node_of
from gputop.text.units import first_few

NO_GROUP: Key = ("", "")  # of the GPUs that no job holds
_MAX_ON_NODE = 1000  # GPUs that are counted one by one, whatever a server says


def fleet_of(series: FleetSeries, slurm_jobs: Sequence[SlurmJob], view: FleetView) -> Fleet:
    """The fleet at the time of the series, without the problems and the costs of asking."""
    parts = _Parts(series, slurm_jobs, view)
    groups, metrics = series.groups, series.metrics
    free_nodes: tuple[Node, ...] = ()
    if metrics.by_job:
        jobs = tuple(parts.labeled_job(key) for key in series.jobs)
        unheld = groups[NO_GROUP].group("") if NO_GROUP in groups else Group(gpus=0)
        free = unheld if unheld.gpus else None
        free_nodes = tuple(parts.node_of_job(node, NO_GROUP) for node in series.job_nodes.get(NO_GROUP, {}).values())
    else:
        held = {node for job in slurm_jobs for node in series.slurm_nodes.gpus_of(job)}
        jobs = tuple(job for slurm_job in slurm_jobs if (job := parts.job_of_nodes(slurm_job)) is not None)
        free_nodes = tuple(parts.free_node(node) for name, node in sorted(series.nodes.items()) if name not in held)
        free = together(free_nodes) if free_nodes else None
    kinds = {figures.kind for figures in groups.values()}
    count = "all_gpus" if metrics.by_job else "gpus"
    return Fleet(
        time_s=series.time_s, source=", ".join(schema.title for schema in metrics.schemas()), jobs=jobs, free=free,
        free_nodes=free_nodes, gpus=sum(group.count(count) or 0 for group in groups.values()),
        has_past=bool(series.outliers.target_counts.get("gpus_before", not series.outlier_series)),
        simulated=metrics.simulated, kinds=tuple(kind for kind in ACTIVITY if kind in kinds),
        problems=tuple(target_problems(series)))


class _Parts(Struct, frozen=True):
    """Makes the jobs, nodes and GPUs of a fleet."""

    series: FleetSeries
    slurm_jobs: Sequence[SlurmJob]
    view: FleetView

    # -- jobs ---------------------------------------------------------------------------------------

    def labeled_job(self, key: Key) -> Job:
        """A job that a label of the metrics names."""
        figures, outliers = self.series.groups[key], self.series.outliers
        group, middles = figures.group(figures.kind), outliers.middles.get(key, {})
        slurm_job, number = self._slurm_job(key, figures.labels)
        mapped: Any = figures.labels.get("mapped", "label")
        held, is_whole = figures.value("held"), mapped != "shared node"
        nodes = tuple(self.node_of_job(node, key) for node in self.series.job_nodes.get(key, {}).values())
        return Job(
            **(fields_of(group) | ({} if held is None else {"gpus": bounded(held)})), id=key[1], label=key[0],
            labels=figures.labels, mapped=mapped,
            name=figures.labels.get("name", "") if slurm_job is None else slurm_job.name,
            user=figures.labels.get("user") if slurm_job is None else slurm_job.user,
            start_s=figures.value("start_s") if slurm_job is None else slurm_job.start_s,
            number="" if slurm_job is None else slurm_job.id if slurm_job.id != number else slurm_job.number,
            nodes=None if (count := figures.value("nodes")) is None else bounded(count),
            node_names=tuple(node.name for node in nodes),
            **(self._idle([key]) if is_whole else {}),
            median=middles.get("median") if group.kind != "mixed" else None, mad=middles.get("mad"),
            low_gpus=self._low_gpus({key}), low_clocks=self._low_clocks({key}),
            node_median=middles.get("node_median"),
            low_nodes=tuple(Node(gpus=0, activity=node.value, name=node_of(node.labels), labels=node.labels)
                            for node in outliers.low_nodes if self.series.key(node.labels) == key),
            peers=self.series.gpus.peers.get(key, {}), history=self._history([key]), each=nodes)

    def job_of_nodes(self, job: SlurmJob) -> Job | None:
        """A job of Slurm on nodes that have figures; it holds what is on its node where nobody else does. None: no
        node of it has figures."""
        held = self.series.slurm_nodes.gpus_of(job)
        if not held:
            return None
        # What is on a node that others hold GPUs of, too, is nobody's in particular.
        alone = all(self.series.nodes[node].gpus <= gpus for node, gpus in held.items())
        mapped: Mapped = "node" if alone else "shared node"
        keys = [("", node) for node in sorted(held)]
        nodes = [replace(self.series.nodes[key[1]], history=_since(self._history([key]), job.start_s)) for key in keys]
        each = tuple(self._with_gpus(node, job.id, None) for node in nodes) if job.id in self.view.open_jobs else ()
        of_nodes = Job(
            **{**fields_of(together(nodes)), "gpus": sum(job.gpus.values())}, id=job.id, number=job.number,
            mapped=mapped, name=job.name, user=job.user, start_s=job.start_s, nodes=len(job.gpus),
            node_names=tuple(job.gpus), history=_since(self._history(keys), job.start_s), each=each)
        return self._compared(of_nodes, nodes, keys) if alone else of_nodes

    def _compared(self, job: Job, nodes: Sequence[Node], keys: Sequence[Key]) -> Job:
        """A job that is alone on its nodes, which are the groups ``keys``; with what is idle or stands out."""
        series, one_kind = self.series, together(nodes).kind != "mixed"
        node_median = upper_median(node.activity for node in nodes) if one_kind else None
        # Of a node whose GPUs are alike the mean is the median, too.
        middles = [series.outliers.middles.get(key, {}).get("median", series.nodes[key[1]].activity) for key in keys
                   for _ in range(min(series.nodes[key[1]].gpus, _MAX_ON_NODE))] if one_kind else []
        peers = {figure: upper_median(series.gpus.peers.get(key, {}).get(figure) for key in keys)
                 for figure in COMPARED}
        return replace(
            job, **self._idle(keys, job.start_s), median=upper_median(middles), node_median=node_median,
            low_gpus=self._low_gpus(set(keys)), low_clocks=self._low_clocks(set(keys)),
            low_nodes=tuple(node for node in nodes if node.activity is not None and node_median is not None
                            and node.activity < node_median - series.limits.below),
            peers={figure: value for figure, value in peers.items() if value is not None})

    def _idle(self, keys: Sequence[Key], start_s: float | None = None) -> dict[str, Any]:
        """Return what is known of the idle GPUs of these groups, as the fields of a job that began at ``start_s``; the
        counts are unknown unless they are of all groups."""
        counts = [idleness for key in keys if (idleness := self.series.idleness(key)) is not None]
        idle, watched, seen, quiet = (
            sum(getattr(each, name) for each in counts) if len(counts) == len(keys) else None
            for name in Idleness.__struct_fields__)
        names = tuple(f"{node_of(gpu.labels)}:{gpu_of(gpu.labels)}" for gpu in self.series.outliers.idle_gpus
                      if self.series.key(gpu.labels) in keys)
        idle_history, busy_history = (_since(history, start_s) for history in self._idle_history(keys))
        return {"idle_gpus": idle, "idle_history": idle_history, "idle": IdleGpus(
            watched=watched, seen=seen, quiet=quiet, names=names, busy_history=busy_history)}

    def _slurm_job(self, key: Key, labels: Mapping[str, str]) -> tuple[SlurmJob | None, str]:
        """Slurm's job of this label, and the number that the label names it by."""
        clusters = self.series.metrics.clusters
        cluster = labels.get(CLUSTER_LABEL, "")
        number = key[1].removeprefix(f"{cluster}/") if clusters else key[1]
        return next((job for job in self.slurm_jobs if number in (job.number, job.id)
                     and (not clusters or job.cluster == cluster)), None), number

    # -- nodes and GPUs -----------------------------------------------------------------------------

    def free_node(self, node: Node) -> Node:
        return self._with_gpus(replace(node, history=self._history([("", node.name)])), NO_JOB, None)

    def node_of_job(self, node: Node, key: Key) -> Node:
        points = self.series.past.points("node_activity", (key, node.name))
        return self._with_gpus(replace(node, history=self._of_points(points)) if points else node,
                               key[1] or NO_JOB, key)

    def _with_gpus(self, node: Node, job: str, group: Key | None) -> Node:
        """Return the node with its GPUs, if they are wanted; of a ``group`` only those that are in it."""
        if (job, node.name) not in self.view.open_nodes:
            return node
        selection = node_selection(node.labels)
        gpus = [replace(gpu, history=self._gpu_history(gpu, selection)) for gpu in self.series.gpus.gpus.values()
                if gpu.node == node.name and (group is None or group in self.series.gpus.groups.get(gpu.uuid, ()))]
        return replace(node, each=tuple(sorted(gpus, key=lambda gpu: (len(gpu.gpu), gpu.gpu))))

    def _low_gpus(self, keys: set[Key]) -> tuple[Gpu, ...]:
        return tuple(self._low_gpu(gpu) for gpu in self.series.outliers.low_gpus if self.series.key(gpu.labels) in keys)

    def _low_gpu(self, series: Series) -> Gpu:
        uuid = gpu_id(series.labels)
        details = self.series.gpus.gpus.get(uuid)
        gpu = Gpu(node=node_of(series.labels), gpu=gpu_of(series.labels), uuid=uuid, activity=series.value,
                  kind=series.labels.get("kind", self.series.kind), figures=details.figures if details else {})
        return replace(gpu, history=self._gpu_history(gpu, gpu_selection(series.labels)))

    def _low_clocks(self, keys: set[Key]) -> tuple[LowClock, ...]:
        """The GPUs of these groups with low clocks, as far as is known how the clocks of all spread."""
        clocks = [(gpu, [spread for (key, model), spread in self.series.gpus.clocks.items()
                         if key in keys and model == gpu.labels.get("model", "")])
                  for gpu in self.series.outliers.low_clocks if self.series.key(gpu.labels) in keys]
        low = (self._low_clock(gpu, spreads) for gpu, spreads in clocks)
        return tuple(clock for clock in low if clock is not None)

    def _low_clock(self, series: Series, spreads: Sequence[Mapping[str, float]]) -> LowClock | None:
        details = self.series.gpus.gpus.get(gpu_id(series.labels))
        median, mad = (upper_median(spread.get(figure) for spread in spreads)
                       for figure in ("clock_median", "clock_mad"))
        if details is None or median is None or mad is None:
            return None
        limit_hz = self.series.limits.clock * median
        points = self.series.past.points(CLOCK, details.uuid)
        return LowClock(
            gpu=replace(details, history=self._gpu_history(details, gpu_selection(series.labels))),
            clock_hz=series.value, median_hz=median,
            # Where groups are nodes, these may differ more than the GPUs of each.
            mad_hz=max(mad, upper_median(abs(spread["clock_median"] - median) for spread in spreads
                                         if "clock_median" in spread) or 0.0),
            gpus=int(sum(spread.get("clocks", 0.0) for spread in spreads)),
            low=int(sum(spread.get("clocks" if spread.get("clock_median", median) < limit_hz else "low_clocks", 0.0)
                        for spread in spreads)),
            history=self._of_points(points) if points else None)

    # -- the past -----------------------------------------------------------------------------------

    def _gpu_history(self, gpu: Gpu, asked: Selection) -> History | None:
        """None where it was not asked for."""
        points = self.series.past.points(GPU_ACTIVITY, gpu.uuid)
        is_known = self.series.past.is_known(GPUS, [(GPU_ACTIVITY, asked)])
        return self._of_points(points) if points or is_known else None

    def _history(self, keys: Sequence[Key]) -> History | None:
        """Return the activity, of several groups the mean by their GPUs; None where it was not asked for."""
        past = self.series.past
        if not past.is_known(GROUPS, keys):
            return None
        activity = [past.points("activity", key) for key in keys]
        weights = [self.series.groups[key].count("gpus") or 1 if key in self.series.groups else 1 for key in keys]
        return self._grid().history(lambda slot: _mean(activity, weights, slot))

    def _idle_history(self, keys: Sequence[Key]) -> tuple[History | None, History | None]:
        """Return how many GPUs did nothing, and how many did something; None where it was not asked for."""
        past = self.series.past
        asked = [key for key in keys if past.is_known(IDLE, [key])]
        if not asked:
            return None, None
        idle, busy = ([past.points(figure, key) for key in asked] for figure in ("idle:1", "idle:0"))

        def count(of: Sequence[Mapping[int, float]]) -> History:
            # A count of nothing is no sample at all: it is 0 where there was anything to count.
            return self._grid().history(lambda slot: _sum(
                each.get(slot, 0.0) for each, *both in zip(of, idle, busy, strict=True)
                if any(slot in points for points in both)))

        return count(idle), count(busy)

    def _of_points(self, points: Mapping[int, float]) -> History:
        return self._grid().history(points.get)

    def _grid(self) -> SlotGrid:
        return self.series.past.grid(self.view, self.series.time_s)


def target_problems(series: FleetSeries) -> list[Problem]:
    outliers = series.outliers
    problems: list[Problem] = []
    if down := int(outliers.target_counts.get("down", 0)):
        problems.append(Problem(
            f"{down} of {outliers.target_counts.get('targets', 0):.0f} exporters {'does' if down == 1 else 'do'} not "
            f"answer: {first_few(outliers.down_targets, 4, down)}; their GPUs are missing here",
            "On the node, check systemctl status nvidia-dcgm-exporter or the pod's log."))
    if empty := outliers.empty_targets:
        problems.append(Problem(
            f"exporters answer without GPU metrics: {first_few(empty, 4)}",
            "This happens while dcgm-exporter starts and when the host engine has lost the GPU. Check its log."))
    return problems


def _mean(points: Sequence[Mapping[int, float]], weights: Sequence[int], slot: int) -> float | None:
    values = [(of_group[slot], weight) for of_group, weight in zip(points, weights, strict=True) if slot in of_group]
    return sum(value * weight for value, weight in values) / sum(weight for _, weight in values) if values else None


def _sum(values: Iterable[float]) -> float | None:
    present = list(values)
    return sum(present) if present else None


def _since(history: History | None, start_s: float | None) -> History | None:
    """Return the history without what was before the job: then its nodes were others'."""
    if history is None or start_s is None:
        return history
    return replace(history, values=tuple(None if history.time_s(i) - history.step_s < start_s else value
                                         for i, value in enumerate(history.values)))
