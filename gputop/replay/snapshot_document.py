"""The types of the document ``gputop.snapshot/1``: it is written and read by these, so each key is said once.

The fields stand in the order of the document. What differs from the values of a sample has a form of its own, with
fields of the same names: ``of()`` makes it, and its ``sample()`` the value again, of a document that the codec has
checked. What a type cannot say, that a grid is of some size, is checked there. A field with a default may be missing in
an older document.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct, field, structs
from msgspec.structs import replace

from gputop.analysis.results import Analysis
from gputop.core import samples
from gputop.core.codec import convert, document_of, parse
from gputop.core.errors import GputopError, os_errors_as
from gputop.core.files import open_regular
from gputop.core.findings import Abstained, Advice, Finding, Problem
from gputop.core.metrics import ADAPTER_METRICS, CGROUP_METRICS, GPU_METRICS, HOST_METRICS, LANE_METRICS, LEVELS
from gputop.core.samples import LAST_TIME_S, MAX_GPUS, NodeSample, UnixTime
from gputop.profiler.capture import records
from gputop.profiler.capture.facts import CaptureFacts, facts_of
from gputop.text.markup import lines
from gputop.text.units import devices, printable

SCHEMA = "gputop.snapshot/1"
_MAX_SLICES = 10_000
_METRICS = GPU_METRICS.keys() | HOST_METRICS.keys() | CGROUP_METRICS.keys() | ADAPTER_METRICS.keys()
S = TypeVar("S", bound=Struct)


def _sample_of(kind: type[S], form: Struct, **other: Any) -> S:
    """A value of ``kind``: the fields of ``form`` of the same names, but for ``other``; the rest has its defaults."""
    names = [name for name in kind.__struct_fields__ if hasattr(form, name)]
    return kind(**{**{name: getattr(form, name) for name in names}, **other})


class Track(Struct, frozen=True):
    """One metric of one GPU over the slices of a :class:`Grid`; None where nothing was measured."""

    metric: str
    mean: tuple[float | None, ...]
    full_scale: float | None = None
    levels: tuple[tuple[float, ...] | None, ...] = ()  # share of each slice's samples at each level


class Grid(Struct, frozen=True):
    """Slices of time and, by GPU uuid, what was measured in them."""

    start_s: float
    slice_s: float
    slices: int
    gpus: Mapping[str, tuple[Track, ...]]

    @property
    def end_s(self) -> float:
        return self.start_s + self.slice_s * self.slices


class Gpu(Struct, frozen=True):
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
    xids: tuple[samples.XidEvent, ...]
    xids_reason: str | None
    readings: dict[str, samples.Reading]
    processes: tuple[samples.GpuProcess, ...]
    processes_reason: str | None

    @classmethod
    def of(cls, g: samples.GpuSample) -> Gpu:
        return document_of(cls, g, **structs.asdict(g.info), label=g.info.label, message=g.message or None,
                           readings={metric: g[metric] for metric in GPU_METRICS})

    def sample(self) -> samples.GpuSample:
        return _sample_of(samples.GpuSample, self, info=_sample_of(samples.GpuInfo, self), message=self.message or "")


class Host(Struct, frozen=True, kw_only=True):
    hostname: str
    cpu_count: int | None
    cpu_limit_cores: float | None
    core_ratios: tuple[float, ...] | None
    readings: dict[str, samples.Reading]
    cgroup: samples.CgroupSample | None = None
    top_processes: tuple[samples.HostProcess, ...] = ()
    top_reason: str | None = "not in this snapshot"
    adapters: tuple[samples.AdapterSample, ...] = ()

    @classmethod
    def of(cls, h: samples.HostSample) -> Host:
        measured = all(map(math.isfinite, h.core_ratios))
        return document_of(cls, h, core_ratios=h.core_ratios if h.core_ratios and measured else None)

    def sample(self) -> samples.HostSample:
        return _sample_of(samples.HostSample, self, core_ratios=self.core_ratios or ())


class Process(Struct, frozen=True, kw_only=True):
    pid: int
    local_pid: int | None
    container_pid: int | None
    parent_pid: int | None
    user: str | None
    command: str | None
    reason: str | None
    note: str | None
    started_s: UnixTime | None
    container: str | None
    cuda_visible_devices: str | None
    cuda_device_order: str | None = None
    reasons: dict[str, str]
    cpu_cores: samples.Reading
    rss_bytes: samples.Reading
    threads: int | None
    io_read_bytes_per_s: samples.Reading
    io_write_bytes_per_s: samples.Reading
    gpus: tuple[int, ...]  # their indices; the processes of the GPUs say the rest
    devices: str
    cgroup: samples.CgroupSample | None = None
    numa_nodes: tuple[int, ...] = ()
    framework: str = ""
    kubernetes: samples.PodContainer | None = None

    @classmethod
    def of(cls, p: samples.ProcessSample) -> Process:
        return document_of(cls, p, gpus=tuple(sorted(p.gpus)), devices=devices(p))

    def sample(self, gpus: Sequence[samples.GpuSample]) -> samples.ProcessSample:
        return _sample_of(samples.ProcessSample, self, gpus={
            g.info.index: p for g in gpus for p in g.processes if p.pid == self.pid})


class Lane(Struct, frozen=True, kw_only=True):
    full_scale: float | None = None
    mean: tuple[float | None, ...]
    min: tuple[float | None, ...] = ()
    max: tuple[float | None, ...] = ()


def _track(metric: str, lane: Lane | LevelLane, slices: int) -> Track:
    if len(lane.mean) != slices:
        raise ValueError(f"{len(lane.mean)} of {slices} slices")
    return Track(metric, lane.mean, lane.full_scale if lane.full_scale and lane.full_scale > 0 else None)


class Slices(Struct, frozen=True):
    start_s: UnixTime
    slice_s: Annotated[float, Meta(ge=0.1, le=86_400)]
    slices: Annotated[int, Meta(gt=0, le=_MAX_SLICES)]

    def _grid(self, gpus: Mapping[str, tuple[Track, ...]]) -> Grid:
        if self.start_s + self.slices * self.slice_s > LAST_TIME_S:
            raise ValueError(f"{self.slices} slices of {self.slice_s} s from {self.start_s}")
        return Grid(self.start_s, self.slice_s, self.slices, gpus)


class History(Slices, frozen=True):
    gpus: dict[str, dict[str, Any]]  # by uuid and metric: a Lane; a metric of another version may be something else

    def grid(self) -> Grid:
        return self._grid({uuid: tuple(_track(metric, convert(lane, Lane), self.slices)
                                       for metric, lane in lanes.items() if metric in LANE_METRICS)
                           for uuid, lanes in self.gpus.items()})


class LevelLane(Struct, frozen=True, kw_only=True):
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


class Spectrogram(Slices, frozen=True):
    gpus: dict[str, LevelLane]  # by uuid

    def grid(self) -> Grid:
        return self._grid({uuid: (lane.track(self.slices),) for uuid, lane in self.gpus.items()})


class StepPeriod(Struct, frozen=True):
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


class Server(Struct, frozen=True):
    address: str
    description: str = ""
    pid: int | None = None
    problem: str | None = None
    asked: bool = False


class Capture(CaptureFacts, frozen=True, kw_only=True):
    remarks: tuple[str, ...] = ()
    analysis: Analysis | None
    report: str = ""
    limit: str = ""
    problem: Problem | None = None

    @classmethod
    def of(cls, record: records.CaptureRecord) -> Capture:
        problem = record.problem
        return document_of(cls, record, **structs.asdict(facts_of(record)),
                           problem=problem and Problem(problem.message, problem.fix))

    def record(self) -> records.CaptureRecord:
        problem = None if self.problem is None else GputopError(printable(self.problem.message),
                                                                printable(self.problem.fix))
        return records.CaptureRecord(self.address, Path(self.path), self.time_s, self.asked_s, self.took_s, self.notes,
                                     self.analysis, lines(self.report), self.limit, problem)


class Document(Struct, frozen=True, kw_only=True, tag_field="schema", tag=SCHEMA):
    gputop: str
    simulated: bool
    time_s: UnixTime
    interval_s: float
    source: str
    own_cpu_ratio: float | None
    host: Host
    gpus: Annotated[tuple[Gpu, ...], Meta(max_length=MAX_GPUS)]
    processes: tuple[Process, ...]
    history: History | None
    spectrogram: Spectrogram | None = None
    step_period: StepPeriod | None = field(default=None, name="rhythm")
    servers: tuple[Server, ...]
    capture: Capture | None
    findings: tuple[Finding, ...]
    limit: str = ""
    abstained: tuple[Abstained, ...]

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Document:
        """The document in parsed JSON; raises ValueError. Readings of metrics that only another version knows may have
        a form of their own: they are passed over."""
        return convert({key: _known_metrics(value) if key in ("gpus", "host", "processes") else value
                        for key, value in document.items()}, cls)

    def sample(self) -> samples.NodeSample:
        gpus = tuple(g.sample() for g in self.gpus)
        return _sample_of(samples.NodeSample, self, gpus=gpus, host=self.host.sample(),
                         processes=tuple(p.sample(gpus) for p in self.processes))


def _known_metrics(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_known_metrics, value))
    if not isinstance(value, dict):
        return value
    return {key: {metric: reading for metric, reading in inner.items() if metric in _METRICS}
            if key == "readings" and isinstance(inner, dict) else _known_metrics(inner) for key, inner in value.items()}


DATA_ID = "gputop-snapshot"  # the element of an HTML page that holds the document
_MAX_FILE_BYTES = 64 << 20
_MAX_NODE_VALUES = 500_000  # of one that a node answers with: of 16 GPUs it has 67,000
_PAGE_BEGIN, _PAGE_END = f'<script type="application/json" id="{DATA_ID}">', "</script>"


class Snapshot(Struct, frozen=True):
    """All that a document holds. ``spectrogram`` has one track a GPU: its activity, with levels."""

    sample: NodeSample
    interval_s: float
    version: str
    history: Grid | None
    spectrogram: Grid | None
    servers: tuple[records.Server, ...]
    capture: records.CaptureRecord | None
    remarks: tuple[str, ...]  # on the capture: how long it took and why, what it cost
    findings: tuple[Finding, ...]
    live: Advice  # what is left of it: abstentions and what bounds the job


def is_snapshot(path: Path) -> bool:
    """Return whether a file begins as JSON or a page does, which no recording does; False where it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(256).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"<", b"[")
    except OSError:
        return False


def read(path: Path) -> Snapshot:
    """The snapshot in a JSON file, or in a page that ``--format html`` made.

    Raises GputopError for a file that is none, is damaged or of another version.
    """
    fix = "Give a file from `gputop snapshot --format json` or html."
    with os_errors_as(f"cannot read {path}", fix), open_regular(path) as file:
        data = file.read(_MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
        raise GputopError(f"{path} is not a snapshot: it is larger than {_MAX_FILE_BYTES >> 20} MB", fix)
    text = data.decode("utf-8", "replace")
    if text.lstrip()[:1] == "<":
        page, closed, _ = text.partition(_PAGE_BEGIN)[2].partition(_PAGE_END)
        text = page if closed else text
    try:
        document = parse(text)
    except ValueError as error:
        raise GputopError(f"{path} is not a snapshot, or is damaged: {error}", fix) from error
    return from_document(document, str(path))


def from_json(data: bytes) -> Snapshot:
    """Return what the JSON of a snapshot says that a node answered with; raises GputopError where it is none."""
    try:
        return from_document(parse(data, _MAX_NODE_VALUES))
    except ValueError as error:
        raise GputopError(f"it is not JSON: {error}") from None


def from_document(document: Any, name: str = "the snapshot") -> Snapshot:
    """Return what the JSON document says; raises GputopError where it is not one of this version."""
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        kind = f"a document of type {str(schema)[:60]}" if isinstance(schema, str) else "not a gputop document"
        fix = f"This gputop reads {SCHEMA}; " + (
            "the gputop that wrote the file, or a newer one, can open it." if isinstance(schema, str)
            and schema.startswith("gputop.snapshot/") else "to create a snapshot: gputop snapshot --format json")
        raise GputopError(f"{name} is {kind}", fix)
    try:
        return _snapshot(Document.read(document))
    except ValueError as error:
        raise GputopError(f"{name} is damaged: {error}", "Copy it again, or take a new snapshot.") from error


def _snapshot(document: Document) -> Snapshot:
    d, capture = document, document.capture
    return Snapshot(
        sample=d.sample(), interval_s=d.interval_s, version=d.gputop,
        history=d.history.grid() if d.history is not None else None,
        spectrogram=d.spectrogram.grid() if d.spectrogram is not None else None,
        servers=tuple(records.Server(s.address, s.description, s.pid, s.problem, s.asked) for s in d.servers),
        capture=capture.record() if capture is not None else None,
        remarks=capture.remarks if capture is not None else (), findings=d.findings,
        live=Advice(abstained=d.abstained, limit=d.limit))
