"""Finds out which metrics of GPUs a Prometheus has, by two queries.

1. Count the series of each metric that an exporter of :mod:`gputop.cluster.schemas` writes, by name and scrape job.
2. Count which of the labels the metrics of activity have: those that name a job, a cluster, a MIG instance, and the
   mark of simulated figures.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from gputop.cluster.prometheus import LARGEST, Client
from gputop.cluster.promql import FIGURE, any_name, by_figure, grouped, has, matchers
from gputop.cluster.schemas import (
    ACTIVITY,
    CLUSTER_LABEL,
    JOB_LABELS,
    NAMESPACE_OF,
    NODE_LABELS,
    PATTERN,
    SCHEMAS,
    Name,
    Schema,
)
from gputop.core.errors import EXIT_NO_DATA, GputopError

# Without what DCGM prints in place of a missing value: a GPU with that alone has another figure.
METRIC_COUNTS = f'count by (__name__, job) ({{__name__=~"{PATTERN}"}} < {LARGEST:g})'
_METRICS = frozenset(
    {name.name for schema in SCHEMAS for names in schema.figures.values() for name in names}
    | {schema.jobs for schema in SCHEMAS if schema.jobs})


class AvailableMetrics(Struct, frozen=True):
    """Metrics that a Prometheus has. ``series``: how many by metric name; ``scrape_jobs``: where they come from."""

    series: Mapping[str, int]
    scrape_jobs: tuple[str, ...] = ()
    job_labels: tuple[str, ...] = ()  # those of JOB_LABELS that are there
    clusters: frozenset[str] = frozenset()  # by their label; empty where there is only one
    divided: bool = False  # gputop export reports GPUs next to their MIG instances
    simulated: bool = False

    @property
    def by_job(self) -> bool:
        """Return whether groups are jobs, as labels name them; else they are nodes."""
        return bool(self.job_labels)

    @property
    def node_labels(self) -> tuple[str, ...]:
        """The labels that say which node a GPU is on."""
        return (*NODE_LABELS, *(() if self.by_job else self._cluster_label))

    @property
    def gpu_labels(self) -> tuple[str, ...]:
        """The labels that say which GPU a series is of, and on which node."""
        of_schemas = (label for schema in self.schemas() for label in (*schema.gpu_labels, *schema.mig_labels))
        return (*dict.fromkeys(of_schemas), *self.node_labels)

    @property
    def group_labels(self) -> tuple[str, ...]:
        """The labels that say which group a GPU is in."""
        return self.labels_of_job if self.by_job else self.node_labels

    @property
    def labels_of_job(self) -> tuple[str, ...]:
        """The labels that say which job a GPU is held by."""
        namespaces = (NAMESPACE_OF[label] for label in self.job_labels if label in NAMESPACE_OF)
        return (*self.job_labels, *namespaces, *(self._cluster_label if self.by_job else ()))

    @property
    def _cluster_label(self) -> tuple[str, ...]:
        return (CLUSTER_LABEL,) if self.clusters else ()

    def schemas(self) -> tuple[Schema, ...]:
        """Return the schemas that are there, the one that knows jobs first: of a GPU with two exporters, the first one
        counts."""
        present = [s for s in SCHEMAS if any(self.spellings(s, kind) for kind in ACTIVITY)]
        return tuple(sorted(present, key=lambda schema: schema.jobs not in self.series))

    def spellings(self, schema: Schema, figure: str) -> tuple[Name, ...]:
        """The names that a figure has here."""
        return tuple(name for name in schema.figures.get(figure, ()) if name.name in self.series)

    def kinds(self, schema: Schema) -> tuple[str, ...]:
        """The figures of activity that are needed so that each GPU has one, the best first."""
        # The GPUs of a cluster may spell a figure in two ways; those that have both limits of power have one only once.
        counts = {figure: sum(self.series[n.name] for n in self.spellings(schema, figure))
                  for figure in schema.figures if figure != "power_limit_w"}
        gpus = max(counts.values())
        needed = []
        for kind in ACTIVITY:
            if counts.get(kind):
                needed.append(kind)
            if counts.get(kind, 0) >= gpus:
                break
        return tuple(needed)

    def common_kind(self) -> str:
        """The figure of activity of all GPUs; "" where they differ: each series then has it as its label "kind"."""
        kinds = {kind for schema in self.schemas() for kind in self.kinds(schema)}
        return kinds.pop() if len(kinds) == 1 else ""


def find_metrics(client: Client) -> AvailableMetrics:
    """Return what this Prometheus has; raises GputopError, also where it has no activity of GPUs."""
    counts: dict[str, int] = {}
    scrape_jobs: dict[str, None] = {}
    for series in client.instant(METRIC_COUNTS):
        name = series.labels.get("__name__", "")
        if name in _METRICS and series.value >= 1:
            counts[name] = counts.get(name, 0) + int(series.value)
            scrape_jobs[series.labels.get("job", "")] = None
    metrics = AvailableMetrics(counts, tuple(job for job in scrape_jobs if job))
    if not metrics.schemas():
        raise GputopError(
            f"{client.endpoint.url} has no metrics of GPUs",
            "It must scrape dcgm-exporter, gputop export, nvitop-exporter or all-smi on the nodes.", EXIT_NO_DATA)
    counted = client.instant(label_counts(metrics))
    labels = {series.labels.get(FIGURE, "") for series in counted}
    clusters = {s.labels.get(CLUSTER_LABEL, "") for s in counted if s.labels.get(FIGURE) == "cluster"}
    if "exported_pod" in labels:
        labels.discard("pod")  # then it is the exporter's own
    return replace(
        metrics, job_labels=tuple(label for label in JOB_LABELS if label in labels), divided="divided" in labels,
        clusters=frozenset(clusters if len(clusters) > 1 else ()), simulated="simulated" in labels)


def label_counts(metrics: AvailableMetrics) -> str:
    """Say how many series of activity have which of the labels; by cluster, where that is a label."""
    names = sorted({name.name for schema in metrics.schemas() for kind in ACTIVITY
                    for name in metrics.spellings(schema, kind)})
    names += [schema.jobs for schema in metrics.schemas() if schema.jobs in metrics.series]
    return by_figure({
        **{label: f"count({any_name(names, has(label))})" for label in JOB_LABELS},
        "divided": f"count({any_name(names, has('mig'))})",
        "cluster": grouped("count", (CLUSTER_LABEL,), any_name(names)),
        "simulated": f"count({any_name(names, matchers({'simulated': ['true']}))})"})
