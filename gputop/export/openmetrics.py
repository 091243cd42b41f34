"""The newest figures of a session as metrics for Prometheus, in OpenMetrics or in Prometheus's older text format.

Names follow https://prometheus.io/docs/practices/naming: base units at the end of the name, ``_total`` for what is
counted, ``_info`` for what is told by labels alone. The names of GPU and host metrics are made from
:mod:`gputop.core.metrics`; :func:`families` is the table of all. What is not known has no sample.

prometheus_client is imported with the first rendering only.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from gputop.core import metrics
from gputop.core.samples import OK, PORT_ACTIVE, GpuInfo, GpuSample, NodeSample, ProcessSample
from gputop.core.version import __version__
from gputop.session.event_log import SLOWDOWN_REASONS
from gputop.text.units import printable

if TYPE_CHECKING:
    from gputop.session.session import Session

STALE_S = 30.0  # a figure this old, and older than five intervals, is not known any more
_LABEL_CHARS = 256  # a pod's name has up to 253
# What stands for a unit at the end of a metric's id, and in Prometheus's name.
_UNITS = {metrics.RATIO: ("_ratio", "ratio"), metrics.BYTES: ("_bytes", "bytes"),
          metrics.BYTES_PER_S: ("_bytes_per_s", "bytes_per_second"), metrics.WATTS: ("_w", "watts"),
          metrics.CELSIUS: ("_c", "celsius"), metrics.HERTZ: ("_hz", "hertz")}


class Family(Struct, frozen=True):
    """Samples of one name. ``name`` has its unit and the ending that its type asks for."""

    name: str
    type: Literal["gauge", "counter", "info"]
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""


Labels = Mapping[str, str]
Figure = tuple[Family, Labels, float]

_DEVICE = ("gpu", "uuid", "mig")


def _of_metric(subject: str, metric: metrics.Metric, labels: tuple[str, ...] = ()) -> Family:
    in_id, unit = _UNITS.get(metric.unit, ("", ""))
    stem = f"gputop_{subject}_{metric.id.removesuffix(in_id).removeprefix(subject + '_')}"
    help_text = f"{metric.label}: {metric.help}"
    if metric.fault is not None and not metric.fault.state:
        return Family(f"{stem}_total", "counter", help_text, labels)
    return Family(f"{stem}_{unit}" if unit else stem, "gauge", help_text, labels, unit)


_GPU = {m.id: _of_metric("gpu", m, _DEVICE) for m in metrics.GPU_METRICS.values()}
_HOST = {m.id: _of_metric("host", m) for m in metrics.HOST_METRICS.values()}
_ADAPTER = {m.id: _of_metric("rdma", m, ("adapter",)) for m in metrics.ADAPTER_METRICS.values()}

_ADAPTER_UP = Family("gputop_rdma_up", "gauge", "1: the link of the RDMA adapter's port is up (state ACTIVE)",
                     ("adapter",))
_BUILD = Family("gputop_build_info", "info", "Version of gputop and source of the values", ("version", "source"))
_SAMPLE_TIME = Family("gputop_sample_timestamp_seconds", "gauge", "Unix time of the node's latest sample",
                      unit="seconds")
_INTERVAL = Family("gputop_sample_interval_seconds", "gauge", "Time between two samples", unit="seconds")
_GPU_INFO = Family("gputop_gpu_info", "info", "Name and PCI address of the GPU or MIG instance",
                   (*_DEVICE, "name", "pci_bus_id"))
_GPU_UP = Family("gputop_gpu_up", "gauge", "1: the driver answers for this GPU; 0: lost, not responding or failed",
                 _DEVICE)
_PROCESSES = Family("gputop_gpu_processes", "gauge", "Processes that hold the GPU", _DEVICE)
_JOB = Family("gputop_gpu_job_info", "info",
              "A Slurm job or Kubernetes container with a process on the GPU, identified by its control group",
              (*_DEVICE, "slurm_job_id", "namespace", "pod", "container", "pod_uid"))
_SLOWDOWN = Family("gputop_gpu_slowdown_active", "gauge", "1: the driver reduces the clocks for this reason",
                   (*_DEVICE, "reason"))
_CLOCK_EVENTS = Family("gputop_gpu_clock_event_reasons", "gauge",
                       "Reasons for the current clocks as NVML bits, as in DCGM_FI_DEV_CLOCKS_EVENT_REASONS", _DEVICE)
_XID = Family("gputop_gpu_xid_last_timestamp_seconds", "gauge",
              "Unix time of the latest Xid event with this number since gputop started", (*_DEVICE, "xid"), "seconds")
_PERIOD = Family("gputop_step_period_seconds", "gauge",
                 "Period of the training step, estimated from the load of the GPUs; it may cover several steps",
                 unit="seconds")
_CONFIDENCE = Family("gputop_step_period_confidence_ratio", "gauge",
                     "Confidence of the estimated step period, from 0 (noise) to 1",
                     unit="ratio")
_FINDING = Family("gputop_finding_active", "gauge", "1: this finding is active now or, for findings from traces, in "
                                                    "the last capture",
                  ("finding", "severity", "origin"))
_SAVING = Family("gputop_finding_saving_ratio", "gauge",
                 "Estimated saving from a finding's fix, as a share of the time per step or per training sample",
                 ("finding", "per"), "ratio")
_CAPTURES = Family("gputop_captures_total", "counter",
                   "Captures finished since gputop started; failed means without a trace or without an analysis",
                   ("result",))
_CAPTURE_TIME = Family("gputop_last_capture_timestamp_seconds", "gauge", "Unix time at which the last capture ended",
                       unit="seconds")
_CAPTURE_STEP = Family("gputop_last_capture_step_seconds", "gauge",
                       "Median step time in the trace of the last capture", unit="seconds")
_CPU = Family("gputop_process_cpu_seconds_total", "counter",
              "CPU time of gputop and of its finished worker processes", unit="seconds")
_MEMORY = Family("gputop_process_resident_memory_bytes", "gauge", "Resident memory of gputop", unit="bytes")
_REQUESTS = Family("gputop_http_requests_total", "counter", "Requests answered before this one, by HTTP status",
                   ("code",))


def families() -> tuple[Family, ...]:
    """All that can be exported, in its order."""
    return (_BUILD, _SAMPLE_TIME, _INTERVAL, _GPU_INFO, _GPU_UP, *_GPU.values(), _PROCESSES, _JOB, _SLOWDOWN,
            _CLOCK_EVENTS, _XID, *_HOST.values(), _ADAPTER_UP, *_ADAPTER.values(), _PERIOD, _CONFIDENCE, _FINDING,
            _SAVING, _CAPTURES, _CAPTURE_TIME, _CAPTURE_STEP, _CPU, _MEMORY, _REQUESTS)


class Exporter:
    """Renders what a session knows now; from any thread, one at a time.

    ``requests`` counts HTTP answers by status, for whoever serves them.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._captures = Counter(done=0, failed=0)
        self.requests: Counter[int] = Counter()
        session.listen(self._count)

    @property
    def sample(self) -> NodeSample | None:
        return self._session.feed.sample

    @property
    def has_rates(self) -> bool:
        """Return whether there are two samples, between which rates can be told."""
        return self._session.feed.sample is not None and self._session.feed.sample.interval_s is not None

    def _count(self, change: str) -> None:
        status = self._session.control.status
        if change == "capture" and status is not None and not status.running:
            self._captures[status.phase] += 1

    def figures(self) -> Iterator[Figure]:
        """Every sample that is known: its family, its labels and its value in the family's unit."""
        session = self._session
        sample = session.feed.sample
        yield _BUILD, {"version": __version__, "source": sample.source if sample else ""}, 1
        yield _INTERVAL, {}, session.feed.interval_s
        if sample is not None:
            yield _SAMPLE_TIME, {}, sample.time_s
            if session.feed.clock() - sample.time_s <= max(STALE_S, 5 * session.feed.interval_s):
                yield from _of_node(sample)
                yield from self._of_job()
        for result, count in self._captures.items():
            yield _CAPTURES, {"result": result}, count
        record = session.results.last_capture
        if record is not None:
            yield _CAPTURE_TIME, {}, record.time_s
            if record.median_step_s is not None:
                yield _CAPTURE_STEP, {}, record.median_step_s
        yield from _of_itself()
        for code, count in sorted(self.requests.items()):
            yield _REQUESTS, {"code": str(code)}, count

    def _of_job(self) -> Iterator[Figure]:
        period = self._session.feed.step_period
        if period is not None and period.period_s is not None:
            yield _PERIOD, {}, period.period_s
            yield _CONFIDENCE, {}, period.confidence
        for finding in self._session.results.findings:
            yield _FINDING, {"finding": finding.id, "severity": finding.severity, "origin": finding.origin}, 1
            if finding.gain.step_time is not None:
                yield _SAVING, {"finding": finding.id, "per": finding.gain.per}, finding.gain.step_time

    def render(self, *, openmetrics: bool) -> bytes:
        """The document: OpenMetrics 1.0, or else Prometheus's text format 0.0.4, which node_exporter reads, too."""
        from prometheus_client import generate_latest
        from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

        return (generate_openmetrics if openmetrics else generate_latest)(self)  # type: ignore[arg-type]

    def collect(self) -> Iterator[object]:
        """Yield the metrics, for which prometheus_client asks its registry."""
        from prometheus_client.core import Metric as PrometheusMetric

        sample = self.sample
        common = {"simulated": "true"} if sample is not None and sample.simulated else {}
        by_family: dict[Family, dict[tuple[tuple[str, str], ...], float]] = {f: {} for f in families()}
        for family, labels, value in self.figures():
            if math.isfinite(value):
                cleaned = {name: printable(text)[:_LABEL_CHARS] for name, text in {**labels, **common}.items()}
                by_family[family][tuple(cleaned.items())] = value  # the same labels twice: a damaged answer; the last
        for family, samples in by_family.items():
            if not samples:
                continue
            ending = {"counter": "_total", "info": "_info", "gauge": ""}[family.type]
            metric = PrometheusMetric(family.name.removesuffix(ending), family.help, family.type, family.unit)
            for labels_and_texts, value in samples.items():
                metric.add_sample(family.name, dict(labels_and_texts), value)
            yield metric


def _of_node(sample: NodeSample) -> Iterator[Figure]:
    for gpu in sample.gpus:
        yield from _of_gpu(gpu)
    labels_of = {(gpu.info.index, gpu.info.mig): _device(gpu.info) for gpu in sample.gpus}
    for process in sample.processes:
        job = _job(process)
        for held in process.gpus.items() if job else ():
            labels = labels_of.get((held[0], held[1].mig))
            if labels is not None:
                yield _JOB, {**labels, **job}, 1
    for metric, family in _HOST.items():
        value = sample.host[metric].value
        if value is not None:
            yield family, {}, value
    for adapter in sample.host.adapters:
        yield _ADAPTER_UP, {"adapter": adapter.name}, adapter.state == PORT_ACTIVE
        for metric, family in _ADAPTER.items():
            if (value := adapter[metric].value) is not None:
                yield family, {"adapter": adapter.name}, value


def _job(process: ProcessSample) -> dict[str, str]:
    """The labels of its job: as dcgm-exporter names them, those of a pod; empty where it is in none that is known."""
    runtime, _, number = (process.container or "").partition(" ")
    labels = {"slurm_job_id": number} if runtime == "slurm" else {}
    pod = process.kubernetes
    if pod is not None:
        labels["pod_uid"] = pod.pod_uid
        names = {"namespace": pod.namespace, "pod": pod.pod, "container": pod.container}
        labels |= {name: text for name, text in names.items() if text is not None}
    return labels


def _of_gpu(gpu: GpuSample) -> Iterator[Figure]:
    labels = _device(gpu.info)
    yield _GPU_INFO, {**labels, "name": gpu.info.name, "pci_bus_id": gpu.info.pci_bus_id}, 1
    yield _GPU_UP, labels, gpu.state == OK
    for metric, family in _GPU.items():
        value = gpu[metric].value
        if value is not None:
            yield family, labels, value
    if gpu.processes_reason is None:
        yield _PROCESSES, labels, len({process.pid for process in gpu.processes})
    if gpu.clock_events_reason is None:
        for reason in SLOWDOWN_REASONS:
            yield _SLOWDOWN, {**labels, "reason": reason}, reason in gpu.clock_event_reasons
    if (bits := gpu.clock_event_bits) is not None:
        yield _CLOCK_EVENTS, labels, bits
    newest: dict[int, float] = {}
    for event in gpu.xids:
        newest[event.xid] = max(event.time_s, newest.get(event.xid, event.time_s))
    for xid, time_s in newest.items():
        yield _XID, {**labels, "xid": str(xid)}, time_s


def _of_itself() -> Iterator[Figure]:
    import psutil

    times = os.times()
    yield _CPU, {}, times.user + times.system + times.children_user + times.children_system
    yield _MEMORY, {}, psutil.Process().memory_info().rss


def _device(info: GpuInfo) -> dict[str, str]:
    labels = {"gpu": str(info.index), "uuid": info.uuid}
    return labels if info.mig is None else {**labels, "mig": str(info.mig)}
