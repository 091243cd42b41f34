"""The document ``gputop.snapshot/1`` as values: for the pictures made of it, and for ``gputop replay``.

A file may come from anywhere: everything in it is checked before anything is built from it. The types of the
document are here; what a type cannot say (that a number is a time, that a grid is of some size) is a function each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from gputop.analysis.results import Analysis
from gputop.core.codec import convert, parse
from gputop.core.errors import GputopError
from gputop.core.files import open_regular
from gputop.core.findings import Abstained, Advice, Finding
from gputop.core.metrics import CGROUP_METRICS, GPU_METRICS, HOST_METRICS, LANE_METRICS
from gputop.core.samples import (
    CgroupSample,
    GpuInfo,
    GpuProcess,
    GpuSample,
    HostProcess,
    HostSample,
    NodeSample,
    ProcessSample,
    Reading,
    XidEvent,
)
from gputop.profiler.capture.records import CaptureRecord, Server
from gputop.telemetry.ring_buffers import LEVELS
from gputop.text.markup import lines
from gputop.text.units import printable

SCHEMA = "gputop.snapshot/1"
DATA_ID = "gputop-snapshot"  # the element of an HTML page that holds the document
_MAX_FILE_BYTES = 64 << 20
_MAX_GPUS, _MAX_SLICES = 1024, 10_000
_LAST_TIME_S = 253_402_300_799.0  # the year 9999; localtime takes no more
_Time = Annotated[float, Meta(ge=0, le=_LAST_TIME_S)]
_PAGE = re.compile(rf'<script type="application/json" id="{DATA_ID}">(.*?)</script>', re.S)


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


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a document holds. ``spectrogram`` has one track a GPU: its activity, with levels."""

    sample: NodeSample
    interval_s: float
    version: str
    history: Grid | None
    spectrogram: Grid | None
    servers: tuple[Server, ...]
    capture: CaptureRecord | None
    remarks: tuple[str, ...]  # on the capture: how long it took and why, what it cost
    findings: tuple[Finding, ...]
    live: Advice  # what is left of it: abstentions and what bounds the job


def is_snapshot(path: Path) -> bool:
    """Whether a file begins as JSON or a page does, which no recording does; False where it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(256).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"<", b"[")
    except OSError:
        return False


def read(path: Path) -> Snapshot:
    """The snapshot in a JSON file, or in a page that ``--format html`` made.

    Raises GputopError for a file that is none, is damaged or of another version.
    """
    fix = "Give what `gputop snapshot --format json` or html has written."
    try:
        with open_regular(path) as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise GputopError(f"cannot read {path}: {error.strerror or error}", fix) from error
    if len(data) > _MAX_FILE_BYTES:
        raise GputopError(f"{path} is no snapshot: it is larger than {_MAX_FILE_BYTES >> 20} MB", fix)
    text = data.decode("utf-8", "replace")
    page = _PAGE.search(text) if text.lstrip()[:1] == "<" else None
    try:
        document = parse(page[1] if page else text)
    except ValueError as error:
        raise GputopError(f"{path} is no snapshot, or damaged: {error}", fix) from error
    return from_document(document, str(path))


def from_document(document: Any, name: str = "the snapshot") -> Snapshot:
    """What the JSON document says; raises GputopError where it is not one of this version."""
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        kind = f"of {str(schema)[:60]}" if isinstance(schema, str) else "no document of gputop's"
        fix = f"This gputop reads {SCHEMA}; " + (
            "the gputop that wrote it, or a newer one, can open it." if isinstance(schema, str)
            and schema.startswith("gputop.snapshot/") else "gputop snapshot --format json makes one.")
        raise GputopError(f"{name} is {kind}", fix)
    try:
        return convert(document, _Document).snapshot()
    except ValueError as error:
        raise GputopError(f"{name} is damaged: {error}", "Copy it again, or take a new snapshot.") from error


# -- the document --------------------------------------------------------------------------------


class _Reading(Struct):
    value: float | None
    unit: str
    source: str | None
    reason: str | None
    coarse: bool

    def reading(self) -> Reading:
        return Reading(self.value, self.unit, self.source or "", self.reason, self.coarse)


def _readings(raw: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Reading]:
    """Those of metrics that this version knows; another version's may have a form of their own."""
    return {metric: convert(r, _Reading).reading() for metric, r in raw.items() if metric in known}


class _GpuProcess(Struct):
    pid: int
    kind: str
    memory_bytes: _Reading
    sm_ratio: _Reading
    mig: int | None

    def sample(self) -> GpuProcess:
        return GpuProcess(self.pid, self.kind, self.memory_bytes.reading(), self.sm_ratio.reading(), self.mig)


class _Xid(Struct):
    time_s: _Time
    xid: int


class _Gpu(Struct):
    index: int
    uuid: str
    name: str
    pci_bus_id: str
    pcie_gen_max: int | None
    pcie_width_max: int | None
    numa_node: int | None
    mig: int | None
    mig_mode: bool
    readings: dict[str, Any]
    processes: list[_GpuProcess]
    processes_reason: str | None
    clock_event_reasons: tuple[str, ...]
    clock_events_reason: str | None
    state: str
    message: str | None
    xids: list[_Xid]
    xids_reason: str | None

    def sample(self) -> GpuSample:
        info = GpuInfo(self.index, self.uuid, self.name, self.pci_bus_id, self.pcie_gen_max, self.pcie_width_max,
                       self.numa_node, self.mig, self.mig_mode)
        return GpuSample(
            info, _readings(self.readings, GPU_METRICS), tuple(p.sample() for p in self.processes),
            self.processes_reason, self.clock_event_reasons, self.clock_events_reason, self.state, self.message or "",
            tuple(XidEvent(x.time_s, x.xid) for x in self.xids), self.xids_reason)


class _Cgroup(Struct):
    name: str
    readings: dict[str, Any]

    def sample(self) -> CgroupSample:
        return CgroupSample(self.name, _readings(self.readings, CGROUP_METRICS))


class _HostProcess(Struct):
    pid: int
    user: str | None
    command: str | None
    cpu_cores: _Reading
    rss_bytes: _Reading

    def sample(self) -> HostProcess:
        return HostProcess(self.pid, self.user, self.command, self.cpu_cores.reading(), self.rss_bytes.reading())


class _Host(Struct):
    hostname: str
    readings: dict[str, Any]
    cpu_count: int | None
    core_ratios: tuple[float, ...] | None
    cpu_limit_cores: float | None
    cgroup: _Cgroup | None = None
    top_processes: list[_HostProcess] = []
    top_reason: str | None = "not in this snapshot"

    def sample(self) -> HostSample:
        return HostSample(
            self.hostname, _readings(self.readings, HOST_METRICS), self.cpu_count, self.core_ratios or (),
            self.cpu_limit_cores, self.cgroup.sample() if self.cgroup is not None else None,
            tuple(p.sample() for p in self.top_processes), self.top_reason)


class _Process(Struct):
    pid: int
    user: str | None
    command: str | None
    cpu_cores: _Reading
    rss_bytes: _Reading
    threads: int | None
    reason: str | None
    parent_pid: int | None
    started_s: _Time | None
    local_pid: int | None
    container: str | None
    cuda_visible_devices: str | None
    io_read_bytes_per_s: _Reading
    io_write_bytes_per_s: _Reading
    container_pid: int | None
    note: str | None
    reasons: dict[str, str]
    cuda_device_order: str | None = None
    cgroup: _Cgroup | None = None

    def sample(self, gpus: Sequence[GpuSample]) -> ProcessSample:
        return ProcessSample(
            self.pid, self.user, self.command, self.cpu_cores.reading(), self.rss_bytes.reading(), self.threads,
            {g.info.index: p for g in gpus for p in g.processes if p.pid == self.pid}, self.reason, self.parent_pid,
            self.started_s, self.local_pid, self.container, self.cuda_visible_devices,
            self.io_read_bytes_per_s.reading(), self.io_write_bytes_per_s.reading(), self.container_pid, self.note,
            self.reasons, cuda_device_order=self.cuda_device_order,
            cgroup=self.cgroup.sample() if self.cgroup is not None else None)


class _Lane(Struct):
    mean: tuple[float | None, ...]
    full_scale: float | None = None

    def track(self, metric: str, slices: int) -> Track:
        if len(self.mean) != slices:
            raise ValueError(f"{len(self.mean)} of {slices} slices")
        return Track(metric, self.mean, self.full_scale if self.full_scale and self.full_scale > 0 else None)


class _Slices(Struct):
    start_s: _Time
    slice_s: Annotated[float, Meta(ge=0.1, le=86_400)]
    slices: Annotated[int, Meta(gt=0, le=_MAX_SLICES)]

    def grid(self, gpus: Mapping[str, tuple[Track, ...]]) -> Grid:
        if self.start_s + self.slices * self.slice_s > _LAST_TIME_S:
            raise ValueError(f"{self.slices} slices of {self.slice_s} s from {self.start_s}")
        return Grid(self.start_s, self.slice_s, self.slices, gpus)


class _History(_Slices):
    gpus: dict[str, dict[str, Any]]

    def checked(self) -> Grid:
        return self.grid({uuid: tuple(convert(lane, _Lane).track(metric, self.slices)
                                      for metric, lane in lanes.items() if metric in LANE_METRICS)
                          for uuid, lanes in self.gpus.items()})


class _LevelLane(Struct):
    metric: str
    mean: tuple[float | None, ...]
    levels: tuple[tuple[Annotated[float, Meta(ge=0, le=1)], ...] | None, ...]
    full_scale: float | None = None

    def track(self, slices: int) -> Track:
        track = _Lane(self.mean, self.full_scale).track(self.metric, slices)
        if self.metric not in LANE_METRICS:
            raise ValueError(f"{self.metric!r} where a metric belongs")
        if len(self.levels) != slices or any(shares is not None and len(shares) != LEVELS for shares in self.levels):
            raise ValueError(f"not the shares of {LEVELS} levels in {slices} slices")
        return replace(track, levels=self.levels)


class _Spectrogram(_Slices):
    gpus: dict[str, _LevelLane]

    def checked(self) -> Grid:
        return self.grid({uuid: (lane.track(self.slices),) for uuid, lane in self.gpus.items()})


class _Problem(Struct):
    message: str
    fix: str


class _Capture(Struct):
    address: str
    path: str
    time_s: _Time
    asked_s: float
    took_s: float
    notes: tuple[str, ...]
    analysis: Analysis | None
    remarks: tuple[str, ...] = ()
    report: str = ""
    limit: str = ""
    problem: _Problem | None = None

    def record(self) -> CaptureRecord:
        problem = None if self.problem is None else GputopError(printable(self.problem.message),
                                                                printable(self.problem.fix))
        return CaptureRecord(self.address, Path(self.path), self.time_s, self.asked_s, self.took_s, self.notes,
                             self.analysis, lines(self.report), self.limit, problem)


class _Document(Struct):
    gputop: str
    time_s: _Time
    interval_s: float
    source: str
    simulated: bool
    own_cpu_ratio: float | None
    host: _Host
    gpus: Annotated[list[_Gpu], Meta(max_length=_MAX_GPUS)]
    processes: list[_Process]
    history: _History | None
    servers: tuple[Server, ...]
    capture: _Capture | None
    findings: tuple[Finding, ...]
    abstained: tuple[Abstained, ...]
    spectrogram: _Spectrogram | None = None
    limit: str = ""

    def snapshot(self) -> Snapshot:
        gpus = tuple(g.sample() for g in self.gpus)
        sample = NodeSample(
            time_s=self.time_s, gpus=gpus, host=self.host.sample(),
            processes=tuple(p.sample(gpus) for p in self.processes), interval_s=self.interval_s, source=self.source,
            simulated=self.simulated, own_cpu_ratio=self.own_cpu_ratio)
        return Snapshot(
            sample=sample, interval_s=self.interval_s, version=self.gputop,
            history=self.history.checked() if self.history is not None else None,
            spectrogram=self.spectrogram.checked() if self.spectrogram is not None else None, servers=self.servers,
            capture=self.capture.record() if self.capture is not None else None,
            remarks=self.capture.remarks if self.capture is not None else (), findings=self.findings,
            live=Advice(abstained=self.abstained, limit=self.limit))
