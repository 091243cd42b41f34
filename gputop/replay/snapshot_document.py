"""The types of the document ``gputop.snapshot/1``: it is written and read by these, so each key is said once.

The fields stand in the order of the document. The form of a value of a sample has fields of the same names
(:func:`form_of`); its ``sample()`` makes the value again, of a document that the codec has checked. What a type cannot
say, that a grid is of some size, is checked there. A field with a default may be missing in an older document.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType, field, structs

from gputop.analysis.results import Analysis
from gputop.core import samples
from gputop.core.codec import convert
from gputop.core.errors import GputopError
from gputop.core.findings import Abstained, Finding
from gputop.core.metrics import ADAPTER_METRICS, CGROUP_METRICS, GPU_METRICS, HOST_METRICS, LANE_METRICS
from gputop.profiler.capture import records
from gputop.telemetry.ring_buffers import LEVELS
from gputop.text.markup import lines
from gputop.text.units import devices, printable

SCHEMA = "gputop.snapshot/1"
_MAX_GPUS, _MAX_SLICES = 1024, 10_000
_LAST_TIME_S = 253_402_300_799.0  # the year 9999; localtime takes no more
_Time = Annotated[float, Meta(ge=0, le=_LAST_TIME_S)]
V = TypeVar("V")
S = TypeVar("S", bound=Struct)


def form_of(kind: type[S], value: object, **other: Any) -> S:
    """The form of ``value``: its fields of the same names, but for those in ``other``."""
    return kind(**{name: _form(other[name] if name in other else getattr(value, name))
                   for name in kind.__struct_fields__})


def _form(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _form(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple([_form(item) for item in value])
    form = _FORMS.get(type(value))
    return value if form is None else form(value)


def _sample_of(kind: type[S], form: Struct, **other: Any) -> S:
    """The reverse: fields that the form does not have keep their defaults."""
    names = [name for name in kind.__struct_fields__ if hasattr(form, name)]
    return kind(**{**{name: _sample(getattr(form, name)) for name in names}, **other})


def _sample(form: Any) -> Any:
    if isinstance(form, tuple):
        return tuple([_sample(item) for item in form])
    forms = (Reading, GpuProcess, HostProcess, Cgroup, PodContainer, Adapter)
    return form.sample() if isinstance(form, forms) else form


@dataclass(frozen=True, slots=True)
class Track:
    """One metric of one GPU over the slices of a :class:`Grid`; None where nothing was measured."""

    metric: str
    mean: tuple[float | None, ...]
    full_scale: float | None = None
    levels: tuple[tuple[float, ...] | None, ...] = ()  # share of each slice's samples at each level


@dataclass(frozen=True, slots=True)
class Grid:
    """Slices of time and, by GPU uuid, what was measured in them."""

    start_s: float
    slice_s: float
    slices: int
    gpus: Mapping[str, tuple[Track, ...]]

    @property
    def end_s(self) -> float:
        return self.start_s + self.slice_s * self.slices


class Reading(Struct):
    value: float | None
    unit: str
    source: str | None
    reason: str | None
    coarse: bool

    @classmethod
    def of(cls, r: samples.Reading) -> Reading:
        finite = r.value is None or math.isfinite(r.value)
        return cls(r.value if finite else None, r.unit, r.source or None,
                   r.reason if finite else f"{r.value} is not a measurement", r.coarse)

    def sample(self) -> samples.Reading:
        return samples.Reading(self.value, self.unit, self.source or "", self.reason, self.coarse)


def _readings(raw: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, samples.Reading]:
    """Those of metrics that this version knows; another version's may have a form of their own."""
    return {metric: convert(r, Reading).sample() for metric, r in raw.items() if metric in known}


class GpuProcess(Struct):
    pid: int
    kind: str
    mig: int | None
    memory_bytes: Reading
    sm_ratio: Reading

    def sample(self) -> samples.GpuProcess:
        return _sample_of(samples.GpuProcess, self)


class Xid(Struct):
    time_s: _Time
    xid: int


class Gpu(Struct):
    index: int
    uuid: str
    name: str
    pci_bus_id: str
    pcie_gen_max: int | None
    pcie_width_max: int | None
    numa_node: int | None
    mig: int | None
    mig_mode: bool
    label: str
    state: str
    message: str | None
    clock_event_reasons: tuple[str, ...]
    clock_events_reason: str | None
    xids: tuple[Xid, ...]
    xids_reason: str | None
    readings: dict[str, Any]
    processes: tuple[GpuProcess, ...]
    processes_reason: str | None

    @classmethod
    def of(cls, g: samples.GpuSample) -> Gpu:
        return form_of(cls, g, **structs.asdict(g.info), label=g.info.label, message=g.message or None,
                       readings={metric: g[metric] for metric in GPU_METRICS})

    def sample(self) -> samples.GpuSample:
        return _sample_of(samples.GpuSample, self, info=_sample_of(samples.GpuInfo, self), message=self.message or "",
                         readings=_readings(self.readings, GPU_METRICS),
                         xids=tuple(samples.XidEvent(x.time_s, x.xid) for x in self.xids))


class Cgroup(Struct):
    name: str
    readings: dict[str, Any]

    def sample(self) -> samples.CgroupSample:
        return samples.CgroupSample(self.name, _readings(self.readings, CGROUP_METRICS))


class PodContainer(Struct):
    pod_uid: str
    container_id: str
    pod: str | None
    namespace: str | None
    container: str | None
    reason: str | None

    def sample(self) -> samples.PodContainer:
        return _sample_of(samples.PodContainer, self)


class HostProcess(Struct):
    pid: int
    user: str | None
    command: str | None
    cpu_cores: Reading
    rss_bytes: Reading

    def sample(self) -> samples.HostProcess:
        return _sample_of(samples.HostProcess, self)


class Adapter(Struct):
    name: str
    state: str
    link_layer: str
    numa_node: int | None
    readings: dict[str, Any]

    def sample(self) -> samples.AdapterSample:
        return _sample_of(samples.AdapterSample, self, readings=_readings(self.readings, ADAPTER_METRICS))


class Host(Struct, kw_only=True):
    hostname: str
    cpu_count: int | None
    cpu_limit_cores: float | None
    core_ratios: tuple[float, ...] | None
    readings: dict[str, Any]
    cgroup: Cgroup | None = None
    top_processes: tuple[HostProcess, ...] = ()
    top_reason: str | None = "not in this snapshot"
    adapters: tuple[Adapter, ...] = ()

    @classmethod
    def of(cls, h: samples.HostSample) -> Host:
        known = all(map(math.isfinite, h.core_ratios))
        return form_of(cls, h, core_ratios=h.core_ratios if h.core_ratios and known else None)

    def sample(self) -> samples.HostSample:
        return _sample_of(samples.HostSample, self, core_ratios=self.core_ratios or (),
                         readings=_readings(self.readings, HOST_METRICS))


class Process(Struct, kw_only=True):
    pid: int
    local_pid: int | None
    container_pid: int | None
    parent_pid: int | None
    user: str | None
    command: str | None
    reason: str | None
    note: str | None
    started_s: _Time | None
    container: str | None
    cuda_visible_devices: str | None
    cuda_device_order: str | None = None
    reasons: dict[str, str]
    cpu_cores: Reading
    rss_bytes: Reading
    threads: int | None
    io_read_bytes_per_s: Reading
    io_write_bytes_per_s: Reading
    gpus: tuple[int, ...]  # their indices; the processes of the GPUs say the rest
    devices: str
    cgroup: Cgroup | None = None
    numa_nodes: tuple[int, ...] = ()
    framework: str = ""
    kubernetes: PodContainer | None = None

    @classmethod
    def of(cls, p: samples.ProcessSample) -> Process:
        return form_of(cls, p, gpus=tuple(sorted(p.gpus)), devices=devices(p))

    def sample(self, gpus: Sequence[samples.GpuSample]) -> samples.ProcessSample:
        return _sample_of(samples.ProcessSample, self, gpus={
            g.info.index: p for g in gpus for p in g.processes if p.pid == self.pid})


_FORMS: dict[type, Callable[[Any], Struct]] = {
    samples.Reading: Reading.of, samples.GpuSample: Gpu.of, samples.HostSample: Host.of,
    samples.ProcessSample: Process.of,
    **{kind: partial(form_of, form) for kind, form in (
        (samples.GpuProcess, GpuProcess), (samples.XidEvent, Xid), (samples.CgroupSample, Cgroup),
        (samples.PodContainer, PodContainer), (samples.HostProcess, HostProcess), (samples.AdapterSample, Adapter))},
}


class Lane(Struct, kw_only=True):
    full_scale: float | None = None
    mean: tuple[float | None, ...]
    min: tuple[float | None, ...] = ()
    max: tuple[float | None, ...] = ()


def _track(metric: str, lane: Lane | LevelLane, slices: int) -> Track:
    if len(lane.mean) != slices:
        raise ValueError(f"{len(lane.mean)} of {slices} slices")
    return Track(metric, lane.mean, lane.full_scale if lane.full_scale and lane.full_scale > 0 else None)


class Slices(Struct):
    start_s: _Time
    slice_s: Annotated[float, Meta(ge=0.1, le=86_400)]
    slices: Annotated[int, Meta(gt=0, le=_MAX_SLICES)]

    def _grid(self, gpus: Mapping[str, tuple[Track, ...]]) -> Grid:
        if self.start_s + self.slices * self.slice_s > _LAST_TIME_S:
            raise ValueError(f"{self.slices} slices of {self.slice_s} s from {self.start_s}")
        return Grid(self.start_s, self.slice_s, self.slices, gpus)


class History(Slices):
    gpus: dict[str, dict[str, Any]]  # by uuid and metric: a Lane; a metric of another version may be something else

    def grid(self) -> Grid:
        return self._grid({uuid: tuple(_track(metric, convert(lane, Lane), self.slices)
                                       for metric, lane in lanes.items() if metric in LANE_METRICS)
                           for uuid, lanes in self.gpus.items()})


class LevelLane(Struct, kw_only=True):
    metric: str
    full_scale: float | None = None
    mean: tuple[float | None, ...]
    levels: tuple[tuple[Annotated[float, Meta(ge=0, le=1)], ...] | None, ...]

    def track(self, slices: int) -> Track:
        track = _track(self.metric, self, slices)
        if self.metric not in LANE_METRICS:
            raise ValueError(f"{self.metric!r} where a metric belongs")
        if len(self.levels) != slices or any(shares is not None and len(shares) != LEVELS for shares in self.levels):
            raise ValueError(f"not the shares of {LEVELS} levels in {slices} slices")
        return replace(track, levels=self.levels)


class Spectrogram(Slices):
    gpus: dict[str, LevelLane]  # by uuid

    def grid(self) -> Grid:
        return self._grid({uuid: (lane.track(self.slices),) for uuid, lane in self.gpus.items()})


class StepPeriod(Struct):
    estimate: bool
    method: str
    period_s: float | None
    confidence: float | None
    reason: str | None
    metric: str | None
    gpus: tuple[str, ...]  # their uuids
    interval_s: float | None
    shortest_s: float | None
    longest_s: float | None
    varying_gpus: int = field(name="lively")


class Server(Struct):
    address: str
    description: str = ""
    pid: int | None = None
    problem: str | None = None
    asked: bool = False


class Problem(Struct):
    message: str
    fix: str


class Capture(Struct, kw_only=True):
    """First the fields of :meth:`CaptureRecord.to_json`, of which those that can be UNSET tell what it cost."""

    address: str
    path: str
    time_s: _Time
    asked_s: float
    took_s: float
    notes: tuple[str, ...]
    chosen_s: float | UnsetType = UNSET
    overview_s: float | UnsetType = UNSET
    why: str | UnsetType = UNSET
    ended: str | UnsetType = UNSET
    unknown: tuple[str, ...] | UnsetType = UNSET
    probe: dict[str, Any] | UnsetType | None = UNSET
    cost: dict[str, Any] | UnsetType = UNSET
    workers: tuple[dict[str, Any], ...] | UnsetType = UNSET
    remarks: tuple[str, ...] = ()
    analysis: Analysis | None
    report: str = ""
    limit: str = ""
    problem: Problem | None = None

    @classmethod
    def of(cls, record: records.CaptureRecord) -> Capture:
        problem = record.problem
        return cls(**record.to_json(), remarks=record.remarks, analysis=record.analysis, report=record.report,
                   limit=record.limit, problem=None if problem is None else Problem(problem.message, problem.fix))

    def record(self) -> records.CaptureRecord:
        problem = None if self.problem is None else GputopError(printable(self.problem.message),
                                                                printable(self.problem.fix))
        return records.CaptureRecord(self.address, Path(self.path), self.time_s, self.asked_s, self.took_s, self.notes,
                                     self.analysis, lines(self.report), self.limit, problem)


class Document(Struct, kw_only=True):
    schema: str = SCHEMA
    gputop: str
    simulated: bool
    time_s: _Time
    interval_s: float
    source: str
    own_cpu_ratio: float | None
    host: Host
    gpus: Annotated[tuple[Gpu, ...], Meta(max_length=_MAX_GPUS)]
    processes: tuple[Process, ...]
    history: History | None
    spectrogram: Spectrogram | None = None
    step_period: StepPeriod | None = field(default=None, name="rhythm")
    servers: tuple[Server, ...]
    capture: Capture | None
    findings: tuple[Finding, ...]
    limit: str = ""
    abstained: tuple[Abstained, ...]

    def sample(self) -> samples.NodeSample:
        gpus = tuple(g.sample() for g in self.gpus)
        return _sample_of(samples.NodeSample, self, gpus=gpus, host=self.host.sample(),
                         processes=tuple(p.sample(gpus) for p in self.processes))
