"""The PromQL for one value of each GPU, whatever exporters there are. Pure.

Of one figure of one exporter:

1. Read the metric: its newest value, or what it was over a window; only of series that are still there, and have been
   for as long as the reading asks.
2. Bring it to the base unit, and leave out what the figure cannot be.
3. Join what another metric of the exporter says of the GPU: its model, its job.
4. Take a GPU that MIG or time-slicing lists several times once in each group: the largest value of its UUID.

The spellings of a figure are joined by ``or``, and then the exporters: of a GPU that two report, the first counts.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from gputop.cluster.discovery import AvailableMetrics
from gputop.cluster.prometheus import LARGEST
from gputop.cluster.promql import all_of, any_name, either, grouped, has, lacks, selector, with_copied_label, with_label
from gputop.cluster.schemas import COUNTERS, LIMITS, UUID_LABELS, Name, Schema

RECENT = "5m"  # the window of a group's present figures
_SINCE_PARTS = 3  # of the time for which a GPU must have been there: none longer than the 5 min that a sample stays
_OF_JOBS = ("slurm_job_id", "exported_namespace", "exported_pod", "namespace", "pod")  # of gputop_gpu_job_info
_SINCE_GAP = "2m"  # a GPU may be away for as long, as when a scrape fails


class Reading(Struct, frozen=True):
    """Way to read a figure of each GPU. ``where``: matchers of its series."""

    where: str = ""
    window: str = ""  # "": the newest value
    over: str = "avg_over_time"  # the function of the window
    still: bool = True  # of a window: only GPUs that are there now, …
    since_s: float = 0.0  # … and have been for so long, with the same job
    instances: bool = True  # each MIG instance; False: the whole GPU, once
    model: bool = False  # with the label "model"; GPUs whose model is not known are left out


class GpuValues:
    """Writes the expressions for the metrics that are there; "" where nobody exports the figure."""

    def __init__(self, metrics: AvailableMetrics) -> None:
        self._metrics = metrics
        self._schemas = metrics.schemas()
        self._several_kinds = not metrics.common_kind()

    def figure(self, figure: str, reading: Reading) -> str:
        """A figure of each GPU in its base unit; of a counter its increase of late."""
        if figure in COUNTERS:
            reading = replace(reading, window=RECENT, over="increase")
        return self._of_first_exporter([self._of_exporter(schema, figure, reading) for schema in self._schemas])

    def activity(self, reading: Reading) -> str:
        """Return how much each GPU works, 0-1: the best figure that it has, named by the label "kind" if they
        differ."""
        by_exporter = []
        for schema in self._schemas:
            by_kind = {kind: self._of_exporter(schema, kind, reading) for kind in self._metrics.kinds(schema)}
            by_exporter.append(either((with_label(value, "kind", kind) if self._several_kinds else value
                                       for kind, value in by_kind.items()), "or ignoring (kind)"))
        return self._of_first_exporter(by_exporter)

    def busy_clock(self, busy: float, where: str = "") -> str:
        """The mean SM clock of late of each GPU that is more active than ``busy``, with its model."""
        clock = self.figure("sm_clock_hz", Reading(where, RECENT, model=True))
        active = f"{self.activity(Reading(where, RECENT))} > {busy:g}"
        return clock and f"({clock} and ignoring (model, kind) ({active}))"

    def _of_first_exporter(self, by_exporter: list[str]) -> str:
        present = [value for value in by_exporter if value]
        if len(present) > 1:
            for label in UUID_LABELS[1:]:
                present = [with_copied_label(value, UUID_LABELS[0], label) for value in present]
        return either(present, f"or on ({UUID_LABELS[0]})")

    def _of_exporter(self, schema: Schema, figure: str, reading: Reading) -> str:
        if not (self._metrics.divided and schema.jobs and reading.instances):
            return self._of_spellings(schema, figure, reading)
        # A GPU next to its MIG instances would be counted once more.
        whole, parts = (self._of_spellings(schema, figure, replace(reading, where=all_of(reading.where, condition)))
                        for condition in (lacks("mig"), has("mig")))
        names = [name.name for name in self._metrics.spellings(schema, figure)]
        return parts and f"({whole} unless on (instance, uuid) {any_name(names, has('mig'))} or {parts})"

    def _of_spellings(self, schema: Schema, figure: str, reading: Reading) -> str:
        if reading.model and not schema.info:
            reading = replace(reading, where=all_of(reading.where, has(schema.model)))
        labels = [*schema.gpu_labels, *(schema.mig_labels if reading.instances else ()), *self._metrics.node_labels,
                  *self._metrics.labels_of_job, *(["model"] if reading.model else [])]
        values = []
        for name in self._metrics.spellings(schema, figure):
            value = f"{_measured(name, reading)} {_plausible(figure)}"
            if reading.model:
                value = with_copied_label(_with_label_of(schema, value, schema.model, schema.info) if schema.info
                                          else value, "model", schema.model)
            values.append(grouped("max", labels, self._with_job(schema, value, reading.since_s)))
        return either(values)

    def _with_job(self, schema: Schema, value: str, since_s: float) -> str:
        """Return the value with the job's label, of exporters that name jobs in a metric of its own; GPUs of no job
        stay."""
        if schema.jobs not in self._metrics.series:
            return value
        jobs = f"({schema.jobs} and {schema.jobs} offset {since_s:g}s)" if since_s else schema.jobs
        labels = [label for label in self._metrics.labels_of_job if label in _OF_JOBS] or ["slurm_job_id"]
        joined = _with_label_of(schema, value, ", ".join(labels), jobs)
        return f"{joined} or on ({', '.join(schema.join)}) ({value})"


def _measured(name: Name, reading: Reading) -> str:
    """A metric in its base unit."""
    now = selector(name.name, reading.where)
    conditions = [f"{reading.over}({now}[{reading.window}])" if reading.window else now]
    if reading.window and reading.still:
        conditions.append(now)
    for part in range(1, _SINCE_PARTS + 1) if reading.since_s else ():
        # A scrape that failed ends a series: one that was there shortly before each of these times was there between,
        # but for a scrape or two.
        then_s = reading.since_s * part / _SINCE_PARTS
        conditions.append(f"present_over_time({now}[{_SINCE_GAP}] offset {then_s:g}s)")
    value = f"({' and '.join(conditions)})" if len(conditions) > 1 else conditions[0]
    return value if name.factor == 1.0 else f"{value} * {name.factor:.17g}"


def _plausible(figure: str) -> str:
    """The comparisons that leave out what the figure cannot be."""
    if figure not in LIMITS:
        return f"< {LARGEST:g}"
    least, most = LIMITS[figure]
    return f"<= {most:.17g}" if least is None else f">= {least:.17g} <= {most:.17g}"


def _with_label_of(schema: Schema, value: str, label: str, info: str) -> str:
    """Return the value with a label of another metric of the same GPU."""
    on = ", ".join(schema.join)
    return f"({value}) * on ({on}) group_left ({label}) topk by ({on}) (1, {info})"
