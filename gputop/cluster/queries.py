"""The questions to a Prometheus: each some figures by name, and for each figure an expression. Pure.

One query asks for all figures of a question (:func:`gputop.cluster.promql.by_figure`). A group is a job, or a node
where no label names jobs. ``where`` are matchers of the GPUs that are meant, one for each set of labels; the empty text
matches all. tests/cluster/queries shows the expressions as they are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from gputop.cluster.available_metrics import AvailableMetrics, selector_of_targets
from gputop.cluster.gpu_values import GpuValues, ReadingWay
from gputop.cluster.model import FleetLimits
from gputop.cluster.promql import any_name, below_median, counted, deviation, duration, either, grouped, lowest, median
from gputop.sources.exporters import COUNTERS

OUTLIERS = 4  # GPUs and nodes of each group that are asked for by name
_TARGETS = 8  # targets without an answer that are asked for by name
LEVELS = 20  # steps of activity, by which GPUs are counted
SUMMED = ("memory_used_bytes", "memory_free_bytes", "memory_total_bytes", "power_w")
DETAILS = ("tensor_active", *SUMMED, "memory_reserved_bytes", "power_limit_w", "sm_clock_hz", "temperature_c",
           "memory_temperature_c", "pcie_width", "xid", "rows_remap_failed", "ecc_uncorrected", "clock_reasons",
           *COUNTERS)
COMPARED = ("sm_clock_hz", "pcie_width", "temperature_c", "power_limit_w")  # of the peers' too, as their median

Where = Sequence[str]
Figures = dict[str, str]  # by name; "" where no exporter has it


class Queries:
    """Writes the queries for the metrics that are there, and for the ``limits`` by which the rules judge."""

    def __init__(self, metrics: AvailableMetrics, limits: FleetLimits) -> None:
        self._metrics, self._limits = metrics, limits
        self._values = GpuValues(metrics)
        self._group = metrics.labels_of_job if metrics.by_job else metrics.node_labels
        self._kind = () if metrics.common_kind() else ("kind",)

    def figures(self) -> Figures:
        """The present figures of all groups: activity, how many GPUs have which level of it, and what sums up."""
        group, of_kind = self._group, (*self._group, *self._kind)
        now = ReadingWay(placed=not self._metrics.by_job)
        # Level 0: a GPU that does nothing; the others are steps above that.
        level = f"ceil(({self._recent('')} - {self._limits.idle:g}) * {LEVELS})"
        all_gpus = grouped("group", self._metrics.uuid_labels, self._values.activity(replace(now, placed=False)))
        figures = {"activity": grouped("avg", of_kind, self._recent("")), "levels": counted(of_kind, level),
                   "all_gpus": f"count({all_gpus})"}
        if self._metrics.by_job:
            node = dict.fromkeys((*group, *self._metrics.node_labels))
            figures["nodes"] = grouped("count", group, grouped("group", node, self._values.activity(ReadingWay())))
        return {**figures, **self._sums(group, "")}

    def idle(self, where: Where) -> Figures:
        """Count the GPUs of these groups that did nothing in the idle window, and that did, of those that were there
        all that time; and those that were there, whoever held them."""
        group, limits = (*self._group, *self._kind), self._limits
        return _merged({
            "idle": counted(group, f"{self._values.most_since(limits.idle_s, condition)} < bool {limits.idle:g}"),
            "seen": grouped("count", group, self._values.seen_since(limits.idle_s, condition))} for condition in where)

    def nodes(self, where: Where) -> Figures:
        """The present figures of each node, apart for each job."""
        node = tuple(dict.fromkeys((*self._metrics.node_labels, *self._metrics.labels_of_job)))
        by = (*node, *self._kind)
        return _merged({"activity": grouped("avg", by, self._recent(condition, placed=True)),
                        "gpus": grouped("count", by, self._values.activity(ReadingWay(condition))),
                        **self._sums(node, condition)} for condition in where)

    def outliers(self, where: Where, low_nodes: Where = (), *, node_clocks: bool = False) -> Figures:
        """Write the figures of what stands out. Of the groups that match the median, the deviation from it, and the
        GPUs and nodes far below it; of all groups the busy GPUs with a low SM clock, and the slowest ones of
        ``low_nodes``; the targets that do not answer. ``node_clocks``: also the median clock of each group's busy GPUs,
        by model."""
        return {**self._low_clocks(low_nodes, node_clocks=node_clocks), **self._low_activity(where), **self._targets()}

    def gpus(self, where: Where, peers: Where = (), clock_peers: Where = ()) -> Figures:
        """Everything that is known of each GPU; of the groups that match ``peers`` the medians of what may be the
        cause of a slow GPU; and how the clocks of busy GPUs spread in the groups that match ``clock_peers``."""
        return {**_merged(map(self._clock_spread, clock_peers)), **_merged(map(self._peer_medians, peers)),
                **_merged(map(self._details, where))}

    def group_history(self, step_s: float, where: Where) -> Figures:
        """Write the figures of a range query: the activity of the groups that match."""
        return _merged({"activity": grouped("avg", self._group, self._past(step_s, condition))} for condition in where)

    def idle_history(self, step_s: float, where: Where) -> Figures:
        """Write the figures of a range query: how many GPUs of the groups that match were idle, and how many not."""
        return _merged({"idle": counted(self._group, f"{self._past(step_s, condition)} < bool {self._limits.idle:g}")}
                       for condition in where)

    def node_history(self, step_s: float, where: Where) -> Figures:
        """Write the figures of a range query: the activity of each node, apart for each job."""
        node = dict.fromkeys((*self._metrics.node_labels, *self._metrics.labels_of_job))
        return _merged({"node_activity": grouped("avg", node, self._values.over(step_s, condition, placed=True))}
                       for condition in where)

    def gpu_history(self, step_s: float, where: Where, clocks_where: Where) -> Figures:
        """Write the figures of a range query: the activity of each GPU that matches, and the SM clock of those of
        ``clocks_where``."""
        clocks = (ReadingWay(condition, duration(step_s), still=False) for condition in clocks_where)
        return {"gpu_activity": either(self._values.over(step_s, condition, placed=True) for condition in where),
                "gpu_clock": either(self._values.figure("sm_clock_hz", reading) for reading in clocks)}

    # -- parts of the queries -----------------------------------------------------------------------

    def _recent(self, where: str, *, placed: bool = False) -> str:
        """The activity of each GPU of late; with its place where groups are nodes."""
        return self._values.activity(ReadingWay(where, self._values.recent, placed=placed or not self._metrics.by_job))

    def _past(self, step_s: float, where: str) -> str:
        return self._values.over(step_s, where, placed=not self._metrics.by_job)

    def _sums(self, by: Sequence[str], where: str) -> Figures:
        placed = tuple(by) != self._metrics.labels_of_job
        tensor = self._values.figure("tensor_active", ReadingWay(where, placed=placed))
        # Of a GPU that is divided into instances, each reports the power of the whole.
        sums = {figure: self._values.figure(figure, ReadingWay(where, instances=figure != "power_w", placed=placed))
                for figure in SUMMED}
        return {"tensor_active": tensor and grouped("avg", by, tensor),
                **{figure: value and grouped("sum", by, value) for figure, value in sums.items()}}

    def _low_clocks(self, low_nodes: Where, *, node_clocks: bool) -> Figures:
        group, of_model, busy = self._group, (*self._group, "model"), self._limits.busy
        clock = self._values.busy_clock(busy)
        if not clock:
            return {}
        peers = self._values.busy_clock(busy, placed=not self._metrics.by_job)
        candidates = [below_median(of_model, clock, ratio=self._limits.clock, peers=peers),
                      *(self._values.busy_clock(busy, condition) for condition in low_nodes)]
        return {"low_clock": either(lowest(OUTLIERS, group, candidate) for candidate in candidates),
                "node_clock": median(of_model, peers) if node_clocks else ""}

    def _low_activity(self, where: Where) -> Figures:
        by = (*self._group, *self._kind)
        figures = []
        for condition in where:
            # Those that do nothing are no peers of those that work: the median is of these.
            gpu, idle = (f"({self._recent(condition, placed=True)} {than} {self._limits.idle:g})"
                         for than in (">", "<"))
            node = grouped("avg", dict.fromkeys((*self._group, *self._metrics.node_labels, *self._kind)), gpu)
            low_gpu, low_node = (lowest(OUTLIERS, by, below_median(by, value, distance=self._limits.below))
                                 for value in (gpu, node))
            figures.append({"median": median(by, gpu), "mad": deviation(by, gpu), "low_gpu": low_gpu,
                            "idle_gpu": lowest(OUTLIERS, by, idle)}
                           | ({"node_median": median(by, node), "low_node": low_node} if self._metrics.by_job else {}))
        return _merged(figures)

    def _targets(self) -> Figures:
        """The targets of the exporters: how many there are, and which do not answer, or answer with nothing; and how
        many GPUs there were at the begin of the idle window."""
        up = selector_of_targets(self._metrics.scrape_jobs)
        figures = {"down": f"count({up} == 0)", "targets": f"count({up})",
                   "gpus_before": f"count({any_name(self._metrics.activity_names())} "
                                  f"offset {duration(self._limits.idle_s)})",
                   "down_target": f"topk({_TARGETS}, {up} == 0)"}
        first, *others = self._metrics.schemas()
        if not others and first.id != "all-smi":  # whose "instance" may replace Prometheus's
            present = " or ".join(self._metrics.activity_names())
            figures["empty_target"] = f"topk({_TARGETS}, {up} == 1 unless on (job, instance) ({present}))"
        return figures

    def _clock_spread(self, where: str) -> Figures:
        by = (*self._group, "model")
        clock = self._values.busy_clock(self._limits.busy, where)
        low = clock and below_median(by, clock, ratio=self._limits.clock)
        return {"clock_median": median(by, clock), "clocks": grouped("count", by, clock),
                "clock_mad": deviation(by, clock), "low_clocks": grouped("count", by, low)} if clock else {}

    def _peer_medians(self, where: str) -> Figures:
        values = {figure: self._values.figure(figure, ReadingWay(where)) for figure in COMPARED}
        return {f"peer_{figure}": value and median(self._group, value) for figure, value in values.items()}

    def _details(self, where: str) -> Figures:
        return {"activity": self._recent(where, placed=True),
                **{figure: self._values.figure(figure, ReadingWay(where)) for figure in DETAILS}}


def _merged(figures: Iterable[Figures]) -> Figures:
    """The figures of several sets of matchers as one: of each figure the series of all."""
    values: dict[str, list[str]] = {}
    for of_set in figures:
        for figure, value in of_set.items():
            values.setdefault(figure, []).append(value)
    return {figure: either(each) for figure, each in values.items()}
