"""The PromQL for one value of each GPU, whatever exporters there are. Pure.

A GPU is its UUID, with its MIG instance and its cluster: scraped twice, or by two releases of an exporter, it is one.
Of one figure of one exporter:

1. Read the metric: its newest value, or what it was over a window.
2. Bring it to the base unit, and leave out what the figure cannot be.
3. Where series of one GPU name its node in different ways, make one label of these.
4. Join what another metric of the exporter says of the GPU: its model, its job.
5. Of a GPU that has several series take the largest value, once in each group.

The spellings of a figure are joined by ``or``, and then the exporters: of a GPU that two report, the first counts. If
one of them knows its job and another does not, the job is that of the GPU.
"""

from __future__ import annotations

import re

from msgspec import Struct
from msgspec.structs import replace

from gputop.cluster import promql
from gputop.cluster.available_metrics import AvailableMetrics
from gputop.cluster.prometheus import LARGEST
from gputop.sources import exporters

_RECENT_S = 300.0  # the window of a group's present figures
_SCRAPES = 2.5  # between which a GPU that misses one is still there
_GAP_S = 120.0  # a GPU may be away for as long, as when a scrape fails
_SINCE_PARTS = 3  # of the time for which a GPU must have been there: none longer than the 5 min that a sample stays
_FIRST_MATCHER = re.compile(r'(?P<matcher>(?P<label>\w+)=~?"(?:[^"\\]|\\.)*")(?:, )?')
_OF_JOBS = ("slurm_job_id", "exported_namespace", "exported_pod", "namespace", "pod")  # of gputop_gpu_job_info


class ReadingWay(Struct, frozen=True):
    """Way to read a figure of each GPU. ``where``: matchers of its series."""

    where: str = ""
    window: str = ""  # "": the newest value
    over: str = "avg_over_time"  # the function of the window
    still: bool = True  # of a window: only series that are there now
    ago_s: float = 0.0  # as it was so long ago
    instances: bool = True  # each MIG instance; False: the whole GPU, once
    placed: bool = True  # with the labels of its number and its node
    model: bool = False  # with the label "model"; GPUs whose model is not known are left out


class GpuValues:
    """Writes the expressions for the metrics that are there; "" where nobody exports the figure."""

    def __init__(self, metrics: AvailableMetrics) -> None:
        self._metrics = metrics
        self._schemas = metrics.schemas()
        self._several_kinds = not metrics.common_kind()
        self._or = f"or on ({', '.join(metrics.uuid_labels)})"
        self.recent = promql.duration(max(_RECENT_S, _SCRAPES * metrics.scrape_s))

    def figure(self, figure: str, reading: ReadingWay) -> str:
        """A figure of each GPU in its base unit; of a counter its increase of late."""
        if figure in exporters.COUNTERS:
            reading = replace(reading, window=self.recent, over="increase")
        return self._with_holder(self._of_first_exporter([self._of_exporter(schema, figure, reading)
                                                          for schema in self._schemas]), reading)

    def activity(self, reading: ReadingWay) -> str:
        """Return how much each GPU works, 0-1: the best figure that it has, named by the label "kind" if they
        differ."""
        by_exporter = []
        for schema in self._schemas:
            by_kind = {kind: self._of_exporter(schema, kind, reading) for kind in self._metrics.kinds(schema)}
            by_exporter.append(promql.either((promql.with_label(value, "kind", kind) if self._several_kinds else value
                                              for kind, value in by_kind.items()), self._or))
        return self._with_holder(self._of_first_exporter(by_exporter), reading)

    def over(self, step_s: float, where: str = "", *, placed: bool = False) -> str:
        """Return the mean activity over a step of the history, also of GPUs that are gone since."""
        window_s = max(step_s, _SCRAPES * self._metrics.scrape_s / 2)
        return self.activity(ReadingWay(where, promql.duration(window_s), still=False, placed=placed))

    def most_since(self, since_s: float, where: str) -> str:
        """The most that each GPU did since then; only of GPUs that were there all that time, for the same job."""
        placed = not self._metrics.by_job
        most, now = (self.activity(replace(reading, where=where, placed=placed)) for reading in (
            ReadingWay(window=promql.duration(since_s), over="max_over_time", still=False), ReadingWay()))
        on = ", ".join(dict.fromkeys((*self._metrics.uuid_labels, *self._metrics.labels_of_job)))
        return f"({f' and on ({on}) '.join([most, now, *self._then(since_s, where)])})"

    def seen_since(self, since_s: float, where: str) -> str:
        """The GPUs that were there all the time since then, whoever held them."""
        now = self.activity(ReadingWay(where, placed=not self._metrics.by_job))
        on = ", ".join(self._metrics.uuid_labels)
        return f"({f' and on ({on}) '.join([now, *self._then(since_s, '')])})"

    def _then(self, since_s: float, where: str) -> list[str]:
        """The GPUs that were there at some times since then: at none of them was one away for longer than a gap."""
        gap = promql.duration(max(_GAP_S, _SCRAPES * self._metrics.scrape_s))
        return [self.activity(ReadingWay(where, gap, "last_over_time", still=False, placed=False,
                                         ago_s=since_s * part / _SINCE_PARTS)) for part in range(1, _SINCE_PARTS + 1)]

    def busy_clock(self, busy: float, where: str = "", *, placed: bool = True) -> str:
        """The mean SM clock of late of each GPU that is more active than ``busy``, with its model."""
        clock = self.figure("sm_clock_hz", ReadingWay(where, self.recent, model=True, placed=placed))
        active = f"{self.activity(ReadingWay(where, self.recent, placed=False))} > {busy:g}"
        on = ", ".join(dict.fromkeys((*self._metrics.uuid_labels, *self._metrics.labels_of_job)))
        return clock and f"({clock} and on ({on}) ({active}))"

    def _of_first_exporter(self, by_exporter: list[str]) -> str:
        present = [value for value in by_exporter if value]
        return promql.either(present, f"or on ({exporters.UUID_LABELS[0]})")

    def _with_holder(self, value: str, reading: ReadingWay) -> str:
        """Return the values, those without a job with the job that other series of the GPU have."""
        metrics = self._metrics
        if not (value and metrics.split):
            return value
        names = sorted({name.name for schema in self._schemas for figures in schema.figures.values() for name in figures
                        if metrics.series.get(name.name)})
        jobs = [label for label in metrics.labels_of_job if label not in metrics.uuid_labels]
        held = promql.either(self._identified(promql.any_name(names, promql.all_of(reading.where, promql.has(label))))
                             for label in metrics.job_labels)
        on = ", ".join(metrics.uuid_labels)
        more = [*(["kind"] if self._several_kinds else []), *(["model"] if reading.model else []),
                *([*exporters.GPU_LABELS, *metrics.node_labels] if reading.placed else [])]
        kept_labels = [label for label in dict.fromkeys(more) if label not in (*metrics.uuid_labels, *jobs)]
        holders = promql.grouped("group", (*metrics.uuid_labels, *jobs), held)
        return (f"({holders} * on ({on}) group_left ({', '.join(kept_labels)}) topk by ({on}) (1, {value}) "
                f"or on ({on}) {value})")

    def _of_exporter(self, schema: exporters.Schema, figure: str, reading: ReadingWay) -> str:
        if not (self._metrics.divided and schema.jobs and reading.instances):
            return self._of_spellings(schema, figure, reading)
        # A GPU next to its MIG instances would be counted once more.
        whole, parts = (
            self._of_spellings(schema, figure, replace(reading, where=promql.all_of(reading.where, condition)))
            for condition in (promql.lacks("mig"), promql.has("mig")))
        names = [name.name for name in self._metrics.spellings(schema, figure)]
        return parts and f"({whole} unless on (uuid) {promql.any_name(names, promql.has('mig'))} or {parts})"

    def _of_spellings(self, schema: exporters.Schema, figure: str, reading: ReadingWay) -> str:
        metrics = self._metrics
        if reading.model and not schema.info:
            reading = replace(reading, where=promql.all_of(reading.where, promql.has(schema.model)))
        labels = dict.fromkeys([
            *(exporters.UUID_LABELS[:1] if exporters.UUID_LABELS[0] in metrics.uuid_labels else ()),
            *(label for label in schema.gpu_labels if label in exporters.UUID_LABELS or reading.placed),
            *(schema.mig_labels if reading.instances else ()), *metrics.labels_of_job,
            *(metrics.node_labels if reading.placed else ()), *(["model"] if reading.model else [])])
        one_of = metrics.scattered and reading.placed
        if one_of:  # its series may differ in more: take one of them, with its labels
            kept = (*metrics.uuid_labels, *exporters.UUID_LABELS, *metrics.labels_of_job, "model")
            labels = dict.fromkeys(label for label in labels if label in kept)
        of_job = ""
        if schema.jobs in metrics.series and (match := _FIRST_MATCHER.match(reading.where)) and (
                match["label"] in metrics.labels_of_job):
            # The metric does not have the label by which its job is asked for.
            of_job, reading = match["matcher"], replace(reading, where=reading.where[match.end():])
        values = []
        for name in metrics.spellings(schema, figure):
            value = f"{_measured(name, reading)} {_plausible(figure)}"
            if reading.model:
                value = promql.with_copied_label(_with_label_of(schema, value, schema.model, schema.info) if schema.info
                                                 else value, "model", schema.model)
            value = self._identified(self._with_job(schema, value, reading, of_job), schema)
            values.append(f"topk by ({', '.join(labels)}) (1, {value})" if one_of else
                          promql.grouped("max", labels, value))
        return promql.either(values, self._or)

    def _identified(self, value: str, *schemas: exporters.Schema) -> str:
        """Return the series with one label of their UUID, and of their node, where exporters differ; and without that
        of their pod where another joins the pods of a job."""
        metrics = self._metrics
        for joining in (label for label in metrics.job_labels if label in exporters.JOINING_LABELS):
            for pod in (label for label in metrics.job_labels if label in exporters.POD_LABELS):
                value = promql.without_label(value, pod, joining)
        if metrics.scattered:
            value = promql.with_first_label(value, "instance", (*metrics.hosts, "instance"))
        if exporters.UUID_LABELS[0] not in metrics.uuid_labels:
            return value
        for label in exporters.UUID_LABELS[1:]:
            if any(label in schema.gpu_labels for schema in schemas or self._schemas):
                value = promql.with_copied_uuid(value, exporters.UUID_LABELS[0], label)
        if not metrics.nameless:
            return value
        return promql.with_uuid(value, exporters.UUID_LABELS[0], ("instance", *exporters.GPU_LABELS))

    def _with_job(self, schema: exporters.Schema, value: str, reading: ReadingWay, of_job: str) -> str:
        """Return the value with the job's label, of exporters that name jobs in a metric of its own; GPUs of no job
        stay, unless those ``of_job`` are asked for."""
        if schema.jobs not in self._metrics.series:
            return value
        labels = [label for label in self._metrics.labels_of_job if label in _OF_JOBS] or ["slurm_job_id"]
        jobs = promql.selector(schema.jobs, of_job)
        if reading.ago_s:
            jobs = f"{reading.over}({jobs}[{reading.window}] offset {promql.duration(reading.ago_s)})"
        joined = _with_label_of(schema, value, ", ".join(labels), jobs)
        return joined if of_job else f"{joined} or on ({', '.join(schema.join)}) ({value})"


def _measured(name: exporters.MetricName, reading: ReadingWay) -> str:
    now = promql.selector(name.name, reading.where)
    offset = f" offset {promql.duration(reading.ago_s)}" if reading.ago_s else ""
    value = f"{reading.over}({now}[{reading.window}]{offset})" if reading.window else now + offset
    if reading.window and reading.still:
        value = f"({value} and {now})"
    return value if name.factor == 1.0 else f"{value} * {name.factor:.17g}"


def _plausible(figure: str) -> str:
    """The comparisons that leave out what the figure cannot be."""
    if figure not in exporters.LIMITS:
        return f"< {LARGEST:g}"
    least, most = exporters.LIMITS[figure]
    return f"<= {most:.17g}" if least is None else f">= {least:.17g} <= {most:.17g}"


def _with_label_of(schema: exporters.Schema, value: str, label: str, info: str) -> str:
    """Return the value with a label of another metric of the same GPU."""
    on = ", ".join(schema.join)
    return f"({value}) * on ({on}) group_left ({label}) topk by ({on}) (1, {info})"
