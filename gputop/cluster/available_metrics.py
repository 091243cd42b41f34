"""Finds out which metrics of GPUs a Prometheus has, by one list of names and two queries.

1. List the names of all metrics, and take those that an exporter of :mod:`gputop.sources.exporters` writes.
2. Count the series of those that show how much a GPU works, by name and scrape job.
3. Count which of the labels these have: those that name a job, a node, a cluster, a MIG instance, and the mark of
   simulated figures; and find out whether a GPU is scraped twice, and how often targets are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gputop.cluster.prometheus import LARGEST, Client
from gputop.cluster.promql import FIGURE, all_of, any_name, by_figure, either, grouped, has, lacks, matchers, regex
from gputop.core.errors import EXIT_NO_DATA, GputopError
from gputop.sources import exporters
from gputop.text.units import printable

_COUNTED = (*exporters.ACTIVITY, "memory_used_bytes")  # of a GPU without activity, memory says that it is there
_SCRAPES_S = 1200.0  # in which scrapes are counted
_NAMED = 4  # scrape jobs and metrics in a sentence


class AvailableMetrics(Struct, frozen=True):
    """Metrics that a Prometheus has. ``series``: how many by metric name, of those that were counted; ``scrape_jobs``:
    where they come from."""

    series: Mapping[str, int]
    scrape_jobs: tuple[str, ...] = ()
    job_labels: tuple[str, ...] = ()  # those of JOB_LABELS that are there
    hosts: tuple[str, ...] = exporters.HOST_LABELS[:1]  # those of HOST_LABELS that are there
    clusters: frozenset[str] = frozenset()  # by their label; empty where there is only one
    divided: bool = False  # gputop export reports GPUs next to their MIG instances
    simulated: bool = False
    scattered: bool = False  # series of one GPU name its node in different ways, or in none
    nameless: bool = False  # series without a UUID: node and number stand for it
    split: bool = False  # of one GPU some series have a job and others have none
    scrape_s: float = 0.0  # between two samples, at most

    @property
    def by_job(self) -> bool:
        """Return whether groups are jobs, as labels name them; else they are nodes."""
        return bool(self.job_labels)

    @property
    def node_labels(self) -> tuple[str, ...]:
        """The labels that say which node a GPU is on, once :mod:`gputop.cluster.gpu_values` has made them alike."""
        return (*(("instance",) if self.scattered else self.hosts), *(() if self.by_job else self._cluster_label))

    @property
    def uuid_labels(self) -> tuple[str, ...]:
        """The labels that say which GPU a series is of: its UUID, wherever it was scraped."""
        labels = {label for schema in self.schemas() for label in schema.gpu_labels}
        labels_there = tuple(label for label in exporters.UUID_LABELS if label in labels)
        several = len(self.schemas()) > 1 or self.nameless
        return (*(exporters.UUID_LABELS[:1] if several else labels_there), *self.mig_labels, *self._cluster_label)

    @property
    def mig_labels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(label for schema in self.schemas() for label in schema.mig_labels))

    @property
    def labels_of_job(self) -> tuple[str, ...]:
        """The labels that say which job a GPU is held by."""
        pods = [label for label in self.job_labels if label in exporters.POD_LABELS]
        joining = any(label in exporters.JOINING_LABELS for label in self.job_labels)
        namespaces = (name for name, label in zip(exporters.NAMESPACE_LABELS, exporters.POD_LABELS, strict=True)
                      if label in pods or (joining and not pods))
        return (*self.job_labels, *namespaces, *(self._cluster_label if self.by_job else ()))

    @property
    def _cluster_label(self) -> tuple[str, ...]:
        return (exporters.CLUSTER_LABEL,) if self.clusters else ()

    def schemas(self) -> tuple[exporters.Schema, ...]:
        """Return the schemas that are there, the one that knows jobs first: of a GPU with two exporters, the first one
        counts."""
        present = [s for s in exporters.SCHEMAS
                   if any(self.series[n.name] for kind in exporters.ACTIVITY for n in self.spellings(s, kind))]
        return tuple(sorted(present, key=lambda schema: schema.jobs not in self.series))

    def spellings(self, schema: exporters.Schema, figure: str) -> tuple[exporters.MetricName, ...]:
        """The names that a figure has here."""
        return tuple(name for name in schema.figures.get(figure, ()) if name.name in self.series)

    def kinds(self, schema: exporters.Schema) -> tuple[str, ...]:
        """The figures of activity that are needed so that each GPU has one, the best first."""
        # The GPUs of a cluster may spell a figure in two ways.
        counts = {figure: sum(self.series[n.name] for n in self.spellings(schema, figure)) for figure in _COUNTED}
        gpus = max(counts.values())
        needed = []
        for kind in exporters.ACTIVITY:
            if counts.get(kind):
                needed.append(kind)
            if counts.get(kind, 0) >= gpus:
                break
        return tuple(needed)

    def common_kind(self) -> str:
        """The figure of activity of all GPUs; "" where they differ: each series then has it as its label "kind"."""
        kinds = {kind for schema in self.schemas() for kind in self.kinds(schema)}
        return kinds.pop() if len(kinds) == 1 else ""

    def activity_names(self) -> list[str]:
        """The metrics of which each GPU has one."""
        return sorted({name.name for schema in self.schemas() for kind in self.kinds(schema)
                       for name in self.spellings(schema, kind)})


def find_metrics(client: Client) -> AvailableMetrics:
    """Return what this Prometheus has; raises GputopError, also where it has no activity of GPUs."""
    names = client.metric_names()
    figure_of_name = {name.name: figure for schema in exporters.SCHEMAS for figure, spellings in schema.figures.items()
                      for name in spellings}
    counted = sorted(names & {name for name, figure in figure_of_name.items() if figure in _COUNTED})
    counts: dict[str, int] = {}
    scrape_jobs: dict[str, None] = {}
    # Without what DCGM prints in place of a missing value: a GPU with that alone has another figure.
    each = f"count by (__name__, job) ({any_name(counted)} < {LARGEST:g})"
    for series in client.instant(each) if counted else ():
        name = series.labels.get("__name__", "")
        if series.value >= 1:
            counts[name] = counts.get(name, 0) + int(series.value)
            scrape_jobs[series.labels.get("job", "")] = None
    # Also those without a series now: the past may have the names of an exporter that was exchanged.
    listed = names & {*figure_of_name, *(schema.jobs for schema in exporters.SCHEMAS)}
    metrics = AvailableMetrics({**dict.fromkeys(listed, 0), **counts}, tuple(job for job in scrape_jobs if job))
    if not metrics.schemas():
        raise _none_there(client, names)
    answer = client.instant(label_counts(metrics))
    counted_labels = {series.labels.get(FIGURE, ""): series.value for series in answer}
    clusters = {s.labels.get(exporters.CLUSTER_LABEL, "") for s in answer if s.labels.get(FIGURE) == "cluster"}
    if "exported_pod" in counted_labels:
        counted_labels.pop("pod", None)  # then it is the exporter's own
    job_labels = tuple(label for label in exporters.JOB_LABELS if label in counted_labels)
    return replace(
        metrics, job_labels=job_labels, divided="divided" in counted_labels,
        hosts=tuple(label for label in exporters.HOST_LABELS if label in counted_labels) or ("instance",),
        clusters=frozenset(clusters if len(clusters) > 1 else ()), simulated="simulated" in counted_labels,
        scattered="places" in counted_labels or "nameless" in counted_labels or ("hostless" in counted_labels and any(
            label in counted_labels for label in exporters.HOST_LABELS)), nameless="nameless" in counted_labels,
        split=bool(job_labels) and ("split" in counted_labels or len(metrics.schemas()) > 1),
        # Of a Prometheus that is young it is too much, and at most what a newest sample stays for.
        scrape_s=_SCRAPES_S / max(4.0, counted_labels.get("scrapes", _SCRAPES_S)))


def label_counts(metrics: AvailableMetrics) -> str:
    """Say how many series of activity have which of the labels; by cluster, where that is a label."""
    names = metrics.activity_names()
    with_jobs = names + [schema.jobs for schema in metrics.schemas() if schema.jobs in metrics.series]
    of_gpu = (*exporters.UUID_LABELS, *exporters.MIG_LABELS, exporters.CLUSTER_LABEL)
    places = grouped("group", (*of_gpu, *exporters.HOST_LABELS), any_name(names))
    no_job = grouped("group", of_gpu, any_name(names, all_of(*map(lacks, exporters.JOB_LABELS))))
    held = (grouped("group", of_gpu, any_name(names, has(label))) for label in exporters.JOB_LABELS)
    scrapes = (f"max by (job) (count_over_time({name}[{_SCRAPES_S:g}s]))" for name in names)
    return by_figure({
        **{label: f"count({any_name(with_jobs, has(label))})" for label in exporters.JOB_LABELS},
        **{label: f"count({any_name(names, has(label))})" for label in exporters.HOST_LABELS},
        "divided": f"count({any_name(names, has('mig'))})",
        "cluster": grouped("count", (exporters.CLUSTER_LABEL,), any_name(names)),
        "simulated": f"count({any_name(names, matchers({'simulated': ['true']}))})",
        "hostless": f"count({any_name(names, all_of(*map(lacks, exporters.HOST_LABELS)))})",
        "nameless": f"count({any_name(names, all_of(*map(lacks, exporters.UUID_LABELS)))})",
        "places": f"count({grouped('count', of_gpu, places)} > 1)",
        "split": f"count(({' or '.join(held)}) and {no_job})",
        "scrapes": f"min({either(scrapes)})"})


def selector_of_targets(scrape_jobs: Sequence[str]) -> str:
    return f'up{{job=~"{"|".join(map(regex, scrape_jobs))}"}}'


def _none_there(client: Client, names: frozenset[str]) -> GputopError:
    url = client.endpoint.url
    counts: dict[str, dict[str, int]] = {"targets": {}, "down": {}}
    for series in client.instant(by_figure({"targets": "count by (job) (up)", "down": "count by (job) (up == 0)"})):
        of_figure = counts.setdefault(series.labels.get(FIGURE, ""), {})
        of_figure[printable(series.labels.get("job", ""))] = int(series.value)
    dead = [f"{count} of scrape job {job}" for job, count in sorted(counts["down"].items())
            if count == counts["targets"].get(job)]
    if dead:
        return GputopError(f"{url} currently has no GPU metrics, because exporters do not answer (up == 0): all "
                           f"{', '.join(dead[:_NAMED])}",
                           "On a node, check systemctl status nvidia-dcgm-exporter or the pod's log.", EXIT_NO_DATA)
    foreign = sorted(name for name in names if name.startswith(exporters.FOREIGN))[:_NAMED]
    unread = f"; it has {', '.join(foreign)}, which gputop does not read" if foreign else ""
    return GputopError(
        f"{url} has no GPU metrics{unread}",
        "Prometheus must scrape dcgm-exporter, gputop export, nvitop-exporter, nvidia_gpu_exporter or all-smi on the "
        "nodes.", EXIT_NO_DATA)
