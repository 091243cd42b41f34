"""A snapshot's document back as values: for the pictures made of it, and for ``gputop replay``.

A file may come from anywhere. Everything but the trace's analysis is checked before anything
is built from it; of the analysis, those parts that views rely on.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from gputop.core.errors import GputopError
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
_PAGE = re.compile(rf'<script type="application/json" id="{DATA_ID}">(.*?)</script>', re.S)
_T = TypeVar("_T")


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
        with path.open("rb") as file:
            return file.read(256).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"<", b"[")
    except OSError:
        return False


def read(path: Path) -> Snapshot:
    """The snapshot in a JSON file, or in a page that ``--format html`` made.

    Raises GputopError for a file that is none, is damaged or of another version.
    """
    fix = "Give what `gputop snapshot --format json` or html has written."
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise GputopError(f"cannot read {path}: {error.strerror or error}", fix) from error
    if len(data) > _MAX_FILE_BYTES:
        raise GputopError(f"{path} is no snapshot: it is larger than {_MAX_FILE_BYTES >> 20} MB", fix)
    text = data.decode("utf-8", "replace")
    page = _PAGE.search(text) if text.lstrip()[:1] == "<" else None
    try:
        document = json.loads(page[1] if page else text, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
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
        return _snapshot(document)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError, AttributeError) as error:
        what = f"{error.args[0]} is missing" if isinstance(error, KeyError) and error.args else str(error)
        raise GputopError(f"{name} is damaged: {what}", "Copy it again, or take a new snapshot.") from error


# -- checked values ------------------------------------------------------------------------------


def _reject_constant(constant: str) -> float:
    raise ValueError(f"{constant} is no number")


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{str(value)[:40]!r} where a number belongs")
    return float(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{str(value)[:40]!r} where a whole number belongs")
    return value


def _time(value: Any) -> float:
    if not 0 <= number(value) <= _LAST_TIME_S:
        raise ValueError(f"{value} is no time")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:40]!r} where a text belongs")
    return value


def _optional(check: Callable[[Any], _T], value: Any) -> _T | None:
    return None if value is None else check(value)


def _list(value: Any, most: int = 100_000) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"{str(value)[:40]!r} where a list belongs")
    return value


def _dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{str(value)[:40]!r} where an object belongs")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{str(value)[:40]!r} where true or false belongs")
    return value


# -- the parts -----------------------------------------------------------------------------------


def _snapshot(doc: dict[str, Any]) -> Snapshot:
    gpus = tuple(_gpu(g) for g in _list(doc["gpus"], _MAX_GPUS))
    sample = NodeSample(
        time_s=_time(doc["time_s"]), gpus=gpus, host=_host(doc["host"]),
        processes=tuple(_process(p, gpus) for p in _list(doc["processes"])), interval_s=number(doc["interval_s"]),
        source=_text(doc["source"]), simulated=_flag(doc["simulated"]),
        own_cpu_ratio=_optional(number, doc["own_cpu_ratio"]))
    abstained = tuple(Abstained(_text(a["id"]), _text(a["missing"])) for a in _list(doc["abstained"]))
    return Snapshot(
        sample=sample, interval_s=number(doc["interval_s"]), version=_text(doc["gputop"]),
        history=_optional(_grid, doc["history"]), spectrogram=_optional(_spectrogram, doc.get("spectrogram")),
        servers=tuple(_server(s) for s in _list(doc["servers"])), capture=_optional(_capture, doc["capture"]),
        remarks=tuple(_text(r) for r in _list((doc["capture"] or {}).get("remarks", []))),
        findings=tuple(_finding(f) for f in _list(doc["findings"])),
        live=Advice(abstained=abstained, limit=_text(doc.get("limit", ""))))


def _reading(raw: Any) -> Reading:
    return Reading(_optional(number, raw["value"]), _text(raw["unit"]), _text(raw["source"] or ""),
                   _optional(_text, raw["reason"]), _flag(raw["coarse"]))


def _readings(raw: Any, known: Mapping[str, Any]) -> dict[str, Reading]:
    """Those of metrics that this version knows; what was not sampled is left out."""
    return {metric: _reading(r) for metric, r in _dict(raw).items() if metric in known}


def _gpu(raw: dict[str, Any]) -> GpuSample:
    info = GpuInfo(
        _whole(raw["index"]), _text(raw["uuid"]), _text(raw["name"]), _text(raw["pci_bus_id"]),
        _optional(_whole, raw["pcie_gen_max"]), _optional(_whole, raw["pcie_width_max"]),
        _optional(_whole, raw["numa_node"]), _optional(_whole, raw["mig"]), _flag(raw["mig_mode"]))
    return GpuSample(
        info, _readings(raw["readings"], GPU_METRICS),
        tuple(GpuProcess(_whole(p["pid"]), _text(p["kind"]), _reading(p["memory_bytes"]), _reading(p["sm_ratio"]),
                         _optional(_whole, p["mig"])) for p in _list(raw["processes"])),
        _optional(_text, raw["processes_reason"]), tuple(_text(r) for r in _list(raw["clock_event_reasons"])),
        _optional(_text, raw["clock_events_reason"]), _text(raw["state"]), _optional(_text, raw["message"]) or "",
        tuple(XidEvent(_time(x["time_s"]), _whole(x["xid"])) for x in _list(raw["xids"])),
        _optional(_text, raw["xids_reason"]))


def _host(raw: dict[str, Any]) -> HostSample:
    return HostSample(_text(raw["hostname"]), _readings(raw["readings"], HOST_METRICS),
                      _optional(_whole, raw["cpu_count"]), tuple(number(c) for c in _list(raw["core_ratios"] or [])),
                      _optional(number, raw["cpu_limit_cores"]), _optional(_cgroup, raw.get("cgroup")),
                      tuple(_top_process(p) for p in _list(raw.get("top_processes", []))),
                      _optional(_text, raw.get("top_reason", "not in this snapshot")))


def _cgroup(raw: dict[str, Any]) -> CgroupSample:
    return CgroupSample(_text(raw["name"]), _readings(raw["readings"], CGROUP_METRICS))


def _top_process(raw: dict[str, Any]) -> HostProcess:
    return HostProcess(_whole(raw["pid"]), _optional(_text, raw["user"]), _optional(_text, raw["command"]),
                       _reading(raw["cpu_cores"]), _reading(raw["rss_bytes"]))


def _process(raw: dict[str, Any], gpus: Sequence[GpuSample]) -> ProcessSample:
    pid = _whole(raw["pid"])
    held = {g.info.index: p for g in gpus for p in g.processes if p.pid == pid}
    return ProcessSample(
        pid, _optional(_text, raw["user"]), _optional(_text, raw["command"]), _reading(raw["cpu_cores"]),
        _reading(raw["rss_bytes"]), _optional(_whole, raw["threads"]), held, _optional(_text, raw["reason"]),
        _optional(_whole, raw["parent_pid"]), _optional(_time, raw["started_s"]), _optional(_whole, raw["local_pid"]),
        _optional(_text, raw["container"]), _optional(_text, raw["cuda_visible_devices"]),
        _reading(raw["io_read_bytes_per_s"]), _reading(raw["io_write_bytes_per_s"]),
        _optional(_whole, raw["container_pid"]), _optional(_text, raw["note"]),
        {_text(k): _text(v) for k, v in _dict(raw["reasons"]).items()},
        cuda_device_order=_optional(_text, raw.get("cuda_device_order")), cgroup=_optional(_cgroup, raw.get("cgroup")))


def _grid(raw: dict[str, Any], tracks: Callable[[Any, int], tuple[Track, ...]] | None = None) -> Grid:
    slices, slice_s, start_s = _whole(raw["slices"]), number(raw["slice_s"]), _time(raw["start_s"])
    if not 0 < slices <= _MAX_SLICES or not 0.1 <= slice_s <= 86_400:
        raise ValueError(f"{slices} slices of {slice_s} s")
    _time(start_s + slices * slice_s)
    return Grid(start_s, slice_s, slices,
                {_text(uuid): (tracks or _lanes)(r, slices) for uuid, r in _dict(raw["gpus"]).items()})


def _lanes(raw: Any, slices: int) -> tuple[Track, ...]:
    return tuple(Track(metric, _slices(lane["mean"], slices, number), _scale(lane))
                 for metric, lane in _dict(raw).items() if metric in LANE_METRICS)


def _spectrogram(raw: dict[str, Any]) -> Grid:
    def track(lane: Any, slices: int) -> tuple[Track, ...]:
        if lane["metric"] not in LANE_METRICS:
            raise ValueError(f"{lane['metric']!r} where a metric belongs")
        return (Track(lane["metric"], _slices(lane["mean"], slices, number), _scale(lane),
                      _slices(lane["levels"], slices, _shares)),)

    return _grid(raw, track)


def _scale(lane: Mapping[str, Any]) -> float | None:
    scale = _optional(number, lane.get("full_scale"))
    return scale if scale is not None and scale > 0 else None


def _shares(raw: Any) -> tuple[float, ...]:
    shares = tuple(number(v) for v in _list(raw))
    if len(shares) != LEVELS or not all(0 <= s <= 1 for s in shares):
        raise ValueError(f"not the shares of {LEVELS} levels")
    return shares


def _slices(raw: Any, slices: int, check: Callable[[Any], _T]) -> tuple[_T | None, ...]:
    if len(_list(raw)) != slices:
        raise ValueError(f"{len(raw)} of {slices} slices")
    return tuple(_optional(check, v) for v in raw)


def _server(raw: dict[str, Any]) -> Server:
    return Server(_text(raw["address"]), _text(raw["description"]), _optional(_whole, raw["pid"]),
                  _optional(_text, raw["problem"]), _flag(raw["asked"]))


def _finding(raw: dict[str, Any]) -> Finding:
    finding = Finding.from_json(raw)
    for text in (finding.id, finding.title, finding.why, finding.action, finding.source, finding.gain.how):
        _text(text)
    if finding.severity not in ("high", "medium", "low") or finding.origin not in ("trace", "live") \
            or finding.gain.per not in ("step", "sample"):
        raise ValueError(f"a finding that is {str(finding.severity)[:20]!r}, of {str(finding.origin)[:20]!r}")
    _optional(_text, finding.snippet)
    _optional(number, finding.gain.step_time)
    for name, value in _dict(finding.evidence).items():
        _text(name), number(value)
    for gpu in finding.gpus:
        _whole(gpu)
    for consequence in raw.get("consequences", ()):
        _finding(consequence)
    return finding


def _capture(raw: dict[str, Any]) -> CaptureRecord:
    analysis = _optional(_dict, raw["analysis"])
    if analysis is not None:
        for finding in _list(analysis["findings"]):
            _finding(finding)
        steps = _dict(analysis.get("steps") or {"median_s": 0})
        for value in (steps["median_s"], *_list(steps.get("durations_s", []), 1_000_000)):
            number(value)
        for value in _dict(analysis.get("breakdown") or {}).values():
            _optional(number, value)
    told = _optional(_dict, raw.get("problem"))
    problem = None if told is None else GputopError(printable(_text(told["message"])), printable(_text(told["fix"])))
    return CaptureRecord(
        _text(raw["address"]), Path(_text(raw["path"])), _time(raw["time_s"]), number(raw["asked_s"]),
        number(raw["took_s"]), tuple(_text(n) for n in _list(raw["notes"])), cast(Any, analysis),
        lines(_text(raw.get("report", ""))), _text(raw.get("limit", "")), problem)
