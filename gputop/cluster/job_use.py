"""Use that a job made of its GPUs, from its first sample to its last, for the end of its log. Pure, but for
:func:`of_prometheus`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from msgspec import Struct, field
from msgspec.structs import replace

from gputop.cluster.answers import gpu_id
from gputop.cluster.available_metrics import find_metrics
from gputop.cluster.gpu_values import GpuValues, ReadingWay
from gputop.cluster.model import History
from gputop.cluster.prometheus import Client, FigureClient, Series, figure_of
from gputop.cluster.promql import duration, either, matchers
from gputop.core.errors import NoDataError
from gputop.core.samples import NodeSample
from gputop.sources.exporters import ACTIVITY_TITLES, gpu_of, node_of
from gputop.text.units import clock_time, counted, first_few, percent, portion, printable, seconds

HOUR_S = 3600.0
RECORDED_STEP_S = 60.0
FIGURES = ("activity", "tensor_active", "memory_used_bytes", "power_w")
_SPAN_POINTS, _POINTS, _LEAST_STEP_S = 700, 120, 30.0
_NAMED = 6
_LABELS = ("hpc_job", "slurm_job_id", "exported_pod", "pod")  # of a job that has ended no series may be left


class JobGpu(Struct):
    """A GPU of the job. ``values``: by figure and slot; slot i ends ``i * step_s`` after the job's origin."""

    node: str
    gpu: str
    kind: str = ""
    values: dict[str, dict[int, float]] = field(default_factory=lambda: {figure: {} for figure in FIGURES})

    @property
    def name(self) -> str:
        return f"{self.node}:{self.gpu}"

    def mean(self, figure: str = "activity") -> float | None:
        return fmean(self.values[figure].values()) if self.values[figure] else None


class JobUse(Struct, frozen=True):
    """The GPUs of a job, of which at least one has a value of activity."""

    job: str
    source: str
    step_s: float
    gpus: Sequence[JobGpu]
    origin_s: float = 0.0  # of the slots, Unix time

    def end_s(self, slot: int) -> float:
        return self.origin_s + slot * self.step_s

    @property
    def slots(self) -> range:
        measured = [slot for gpu in self.gpus for slot in gpu.values["activity"]]
        return range(min(measured), max(measured) + 1)


def of_prometheus(client: Client, job: str, hours: float, now_s: float) -> JobUse:
    """Return what the job did in these hours. Raises GputopError, of which NoDataError where there is no such job."""
    available = find_metrics(client)
    metrics = replace(available, job_labels=tuple(dict.fromkeys((*available.job_labels, *_LABELS[:2]))))
    values, asked = GpuValues(metrics), FigureClient(client)
    name = job.rpartition("/")[2]
    where = [matchers({label: [name]}) for label in metrics.job_labels]
    coarse_s = max(_LEAST_STEP_S, math.ceil(hours * HOUR_S / _SPAN_POINTS))

    def of_job(figure: str, step_s: float) -> str:
        return either(values.over(step_s, each, placed=True) if figure == "activity" else
                      values.figure(figure, ReadingWay(each, duration(step_s), still=False)) for each in where)

    began_s = now_s - math.floor(hours * HOUR_S / coarse_s) * coarse_s  # the last point is now: a job of seconds counts
    seen = asked.range({"gpus": f"count({of_job('activity', coarse_s)})"}, began_s, now_s, coarse_s)
    times = [time_s for series in seen for time_s, _ in series.points]
    if not times:
        raise NoDataError(f"no GPU had metrics with job label {printable(job)} in the last {hours:g} h",
                          "To see how jobs are named, run gputop cluster. To look back further, use --hours.")
    span_s = max(times) - min(times) + coarse_s
    steps = math.ceil(max(span_s / _POINTS, metrics.scrape_s) / _LEAST_STEP_S)
    step_s = _LEAST_STEP_S * max(1, steps)
    end_s = max(times)
    begin_s = end_s - math.ceil((span_s - step_s) / step_s) * step_s
    answer = asked.range({figure: of_job(figure, step_s) for figure in FIGURES}, begin_s, end_s, step_s)
    return _of_series(answer, JobUse(job, client.endpoint.url, step_s, (), end_s), metrics.common_kind())


def _of_series(answer: Sequence[Series], use: JobUse, kind: str) -> JobUse:
    gpus: dict[str, JobGpu] = {}
    for series in answer:
        labels = series.labels
        gpu = gpus.setdefault(gpu_id(labels), JobGpu(node_of(labels), gpu_of(labels), labels.get("kind", kind)))
        values = gpu.values.get(figure_of(series), {})
        values.update((round((time_s - use.origin_s) / use.step_s), value) for time_s, value in series.points)
    measured = [gpu for gpu in gpus.values() if gpu.values["activity"]]
    if not measured:
        raise NoDataError(f"there is no GPU activity for job {printable(use.job)}", "The exporters may have been down.")
    return replace(use, gpus=measured)


class RecordedUse:
    """Takes the samples of recordings, and keeps those of the GPUs that processes of the job held."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._gpus: dict[tuple[str, str], JobGpu] = {}
        self._counts: dict[tuple[str, str, str, int], int] = {}

    def add(self, sample: NodeSample) -> None:
        held = {index for process in sample.processes if process.container == f"slurm {self._job}"
                for index, use in process.gpus.items() if "C" in use.kind}
        slot = int(sample.time_s // RECORDED_STEP_S) + 1
        for gpu in sample.gpus:
            if gpu.info.index not in held or gpu.info.mig_mode:
                continue
            metric, activity = gpu.activity()
            key = sample.host.hostname, gpu.info.label
            use = self._gpus.setdefault(key, JobGpu(*key, "sm_active" if metric == "sm_active" else "util"))
            for figure in FIGURES:
                value = activity.value if figure == "activity" else gpu[figure].value
                if value is not None:
                    slot_key = (*key, figure, slot)
                    count = self._counts[slot_key] = self._counts.get(slot_key, 0) + 1
                    old = use.values[figure].get(slot, 0.0)
                    use.values[figure][slot] = old + (float(value) - old) / count

    def use(self, source: str) -> JobUse:
        """Raises NoDataError where no process of the job was recorded."""
        gpus = [gpu for _, gpu in sorted(self._gpus.items()) if gpu.values["activity"]]
        if not gpus:
            raise NoDataError(f"no process of job {printable(self._job)} held a GPU in these recordings",
                              "gputop identifies a Slurm job by the control groups of its processes.")
        return JobUse(self._job, source, RECORDED_STEP_S, gpus)


def lines(use: JobUse, idle: float, bars: str) -> list[str]:
    """The job in twenty lines at most. ``idle``: the activity below which a GPU does nothing; ``bars``: its history,
    drawn."""
    slots, hours = use.slots, use.step_s / HOUR_S
    held = len(use.gpus) * len(slots) * hours
    values = [value for gpu in use.gpus for value in gpu.values["activity"].values()]
    measured, worked = len(values) * hours, sum(values) * hours
    quiet = sum(value < idle for value in values) * hours
    nodes = sorted({gpu.node for gpu in use.gpus})
    begin_s, end_s = use.end_s(slots[0] - 1), use.end_s(slots[-1])
    kinds = {gpu.kind for gpu in use.gpus}
    kind = ACTIVITY_TITLES.get(next(iter(kinds)), "active") if len(kinds) == 1 else "active, in several metrics"
    by_gpu = sorted((gpu.mean() or 0.0, gpu.name) for gpu in use.gpus)
    still = [gpu.name for gpu in use.gpus if all(value < idle for value in gpu.values["activity"].values())]
    rows = [
        ("", f"Job {printable(use.job)}: {counted(len(nodes), 'node')}, {counted(len(use.gpus), 'GPU')}, "
             f"{seconds(end_s - begin_s)} ({clock_time(begin_s)} to {clock_time(end_s)})"),
        ("GPU hours", f"{held:.1f} held, {worked:.1f} at full activity ({percent(worked / measured)}), {quiet:.1f} "
                      f"idle ({percent(quiet / measured)})"),
        ("activity", f"{percent(worked / measured)} on average ({kind}); per GPU {_span(by_gpu[0], by_gpu[-1])}")]
    if tensor := [value for gpu in use.gpus for value in gpu.values["tensor_active"].values()]:
        rows.append(("tensor cores", f"{percent(fmean(tensor))} on average{_part(tensor, values)}"))
    memory = [(value, gpu.name) for gpu in use.gpus for value in gpu.values["memory_used_bytes"].values()]
    if memory:
        most, where = max(memory)
        rows.append(("memory", f"at most {most / 2**30:.1f} GiB on a GPU ({where}){_part(memory, values)}"))
    if power := [value for gpu in use.gpus for value in gpu.values["power_w"].values()]:
        rows.append(("power", f"{fmean(power):.0f} W per GPU on average, {sum(power) * hours / 1e3:.1f} kWh"
                              f"{_part(power, values)}"))
    rows.append(("history", bars))
    if still:
        rows.append(("idle", f"{len(still)} of {counted(len(use.gpus), 'GPU')} were idle the whole time: "
                             f"{first_few(still, _NAMED)}"))
    if len(nodes) > 1:
        means = sorted((fmean(gpu.mean() or 0.0 for gpu in use.gpus if gpu.node == node), node) for node in nodes)
        rows.append(("nodes", _span(means[0], means[-1])))
    if measured < 0.99 * held:
        rows.append(("not measured", f"{percent(1 - measured / held)} of the GPU hours, so their use is unknown"))
    rows.append(("source", use.source))
    return [f"{name:<13}{text}".rstrip() if name else text for name, text in rows]


def history_of(use: JobUse) -> History:
    def mean(slot: int) -> float | None:
        values = [gpu.values["activity"][slot] for gpu in use.gpus if slot in gpu.values["activity"]]
        return fmean(values) if values else None

    return History(use.end_s(use.slots[0]), use.step_s, tuple(map(mean, use.slots)))


def _span(low: tuple[float, str], high: tuple[float, str]) -> str:
    """"from 55% (n004:3) to 90% (n002:3)"."""
    least, most = percent(low[0]), percent(high[0])
    return least if least == most else f"from {least} ({low[1]}) to {most} ({high[1]})"


def _part(measured: Sequence[object], of: Sequence[object]) -> str:
    return "" if len(measured) >= 0.99 * len(of) else f"; measured in {portion(len(measured) / len(of))} of the time"
