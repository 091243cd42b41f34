"""Chrome trace JSON into a Trace: PyTorch's kineto, and what TensorBoard and JAX export.

The format gives times in microseconds, as floats. Several files are the ranks of one job.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gputop.errors import GputopError
from gputop.trace import kernels
from gputop.trace.columns import MAX_GPUS, Launches, Parts
from gputop.trace.model import DeviceEvents, HostEvents, Kind, Line, MemoryKind, Trace, TraceGpu

_DEVICE_CATEGORIES = {"kernel": Kind.COMPUTE, "gpu_memcpy": Kind.COPY_OTHER, "memcpy": Kind.COPY_OTHER,
                      "gpu_memset": Kind.MEMSET, "memset": Kind.MEMSET}
_SKIPPED_CATEGORIES = frozenset(("gpu_user_annotation", "trace", "overhead", "ac2g", "fwdbwd", "async_cpu_to_gpu"))
_ARGS = frozenset(("device", "stream", "correlation", "correlation_id", "bytes", "memcpy_details", "tf_op", "hlo_op",
                   "hlo_module", "step_num", "name", "labels", "device_id", "Kernel", "rank"))
_GPU_PROCESS = re.compile(r"/device:GPU:(\d{1,3})(?!\d)")
_DERIVED_ROWS = frozenset(("Steps", "XLA Modules", "XLA Ops", "Async XLA Ops", "XLA TraceMe", "Framework Ops",
                           "Framework Name Scope", "Source code", "Launch Stats", "TensorFlow Ops",
                           "TensorFlow Name Scope", "Host Offload Ops"))
_STEP = re.compile(r"ProfilerStep#(\d{1,15})$")
_COPY_ENDS = re.compile(r"\((\w+) -> (\w+)\)")
_RANK_IN_NAME = re.compile(r"(?:rank|worker|node)[_-]?(\d{1,6})", re.IGNORECASE)
_NS_PER_US = 1000


@dataclass(slots=True)
class _File:
    """The complete events of one file, reduced while parsing: (category, name, pid, tid, ts, dur, args)."""

    path: str
    rank: int
    host: str
    base_ns: int  # Unix time of ts 0, or 0
    devices: dict[int, dict[str, Any]]
    events: list[tuple[Any, ...]]
    processes: dict[Any, str] = field(default_factory=dict)
    threads: dict[tuple[Any, Any], str] = field(default_factory=dict)
    damaged: bool = False


def read_chrome(files: Sequence[tuple[str, bytes]], *, damaged: Sequence[str] = ()) -> Trace:
    """One Trace from the JSON of one or several ranks.

    Raises GputopError where a file is no Chrome trace, NothingToSee where none has a complete event.
    """
    loaded = [_load(path, data, order) for order, (path, data) in enumerate(files)]
    if len({f.rank for f in loaded}) < len(loaded):  # the files do not tell, so their order does
        for order, file in enumerate(loaded):
            file.rank = order
    loaded.sort(key=lambda f: f.rank)
    parts = Parts()
    cut = sorted({f.path for f in loaded if f.damaged} | set(damaged))
    if cut:
        parts.note("truncated", f"{', '.join(cut)}: cut off or damaged; what follows the damage is missing. "
                                f"{sum(len(f.events) for f in loaded)} events could be read.")
    starts = [min((e[4] for e in f.events), default=0.0) for f in loaded]
    clock_ns = _common_clock(loaded, starts, parts)
    for file, start, at_ns in zip(loaded, starts, clock_ns, strict=True):
        _Rank(file, start, at_ns, parts).read()
    is_unix = all(t > 10**18 for t in clock_ns)  # after 2001, so not since the machine started
    return parts.finish("chrome", [f.path for f in loaded], to_unix_ns=0 if is_unix else None,
                        empty_fix="Export the trace again from a run that was profiled while it trained.")


def _load(path: str, data: bytes, order: int) -> _File:
    text = data.decode("utf-8", "replace")
    damaged = False
    try:
        document = json.loads(text, object_hook=_slim)
    except (ValueError, RecursionError):
        document, damaged = _salvage(text, path), True
    if isinstance(document, list):
        document = {"traceEvents": document}
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list):
        raise GputopError(f"{path} is JSON, but no Chrome trace: it has no list \"traceEvents\".",
                          "Give the trace that the PyTorch profiler, TensorBoard or JAX exported.")
    info, base = document.get("distributedInfo"), document.get("baseTimeNanoseconds")
    rank = info.get("rank") if isinstance(info, dict) else None
    if not isinstance(rank, int):
        told = _RANK_IN_NAME.search(path.rsplit("/", 1)[-1])
        rank = int(told[1]) if told else order
    file = _File(path, rank, str(document.get("host_name") or ""), base if isinstance(base, int) else 0,
                 {d["id"]: d for d in document.get("deviceProperties") or () if isinstance(d, dict)
                  and isinstance(d.get("id"), int)}, [e for e in events if isinstance(e, tuple)], damaged=damaged)
    for event in events:
        if isinstance(event, dict) and event.get("ph") == "M" and isinstance(event.get("args"), dict):
            pid, tid = _hashable(event.get("pid")), _hashable(event.get("tid"))
            if event.get("name") == "process_name":
                file.processes[pid] = str(event["args"].get("name", ""))
            elif event.get("name") == "thread_name":
                file.threads[pid, tid] = str(event["args"].get("name", "")).strip()
    return file


def _hashable(value: Any) -> Any:
    return value if isinstance(value, (int, str)) else str(value)


def _slim(found: dict[str, Any]) -> Any:
    """Reduce an object as soon as it is parsed: complete events to a tuple, their arguments to
    those we read, flow and counter events to nothing. Keeps a trace's parse several times smaller."""
    phase = found.get("ph")
    if phase is None:
        if "correlation" in found or "External id" in found or "Ev Idx" in found or "correlation_id" in found:
            return {k: v for k, v in found.items() if k in _ARGS}
        return found
    if phase == "X":
        ts, dur = found.get("ts"), found.get("dur", 0)
        if not _finite(ts) or not _finite(dur) or dur < 0:
            return None
        return (str(found.get("cat", "")).lower(), str(found.get("name", "")), _hashable(found.get("pid")),
                _hashable(found.get("tid")), ts, dur, found.get("args"))
    return found if phase == "M" else None


def _finite(value: Any) -> bool:
    """A time in µs that is a number and, with any offset, fits an int64 of nanoseconds."""
    return isinstance(value, (int, float)) and math.isfinite(value) and abs(value) < 2e15


def _salvage(text: str, path: str) -> dict[str, Any]:
    """The events before the damage. Raises GputopError where there is nothing of a Chrome trace."""
    at = text.find('"traceEvents"')
    start = text.find("[", max(at, 0))
    events: list[Any] = []
    if start >= 0 and (at >= 0 or text.lstrip().startswith("[")):
        decoder, blank = json.JSONDecoder(object_hook=_slim), re.compile(r"[\s,]*")
        pos = start + 1
        try:
            while True:
                pos = blank.match(text, pos).end()  # type: ignore[union-attr]
                event, pos = decoder.raw_decode(text, pos)
                events.append(event)
        except (ValueError, RecursionError):
            pass  # the damage, or the end of the list
    if not events:
        raise GputopError(f"{path} is not a Chrome trace, or is cut off before its first event.",
                          "Give the trace that the PyTorch profiler, TensorBoard or JAX exported; copy it again.")
    rank = re.search(r'"rank"\s*:\s*(\d{1,6})', text[:start])
    base = re.search(r'"baseTimeNanoseconds"\s*:\s*(\d{1,19})', text[:start])
    return {"traceEvents": events, "distributedInfo": {"rank": int(rank[1])} if rank else None,
            "baseTimeNanoseconds": int(base[1]) if base else None}


def _common_clock(files: Sequence[_File], starts: Sequence[float], parts: Parts) -> list[int]:
    """Where each file's first event lies on the job's clock, in nanoseconds."""
    # Whole microseconds apart from the rest: their product would exceed a float's precision.
    at = [file.base_ns + int(start) * _NS_PER_US + round((start - int(start)) * _NS_PER_US)
          for file, start in zip(files, starts, strict=True)]
    filled = [i for i, file in enumerate(files) if file.events]
    ends = [at[i] + round((max(e[4] + e[5] for e in files[i].events) - starts[i]) * _NS_PER_US) for i in filled]
    if filled and max(at[i] for i in filled) >= min(ends):
        parts.note("no_common_clock", "The files do not overlap in time: they are not on one clock, or not of one "
                                      "capture. They are laid side by side from their first events; do not compare "
                                      "times between ranks.")
        return [0] * len(files)
    return at


class _Rank:
    """One file on its way into ``parts``."""

    def __init__(self, file: _File, start_us: float, at_ns: int, parts: Parts) -> None:
        self._file, self._start_us, self._at_ns, self._parts = file, start_us, at_ns, parts
        self._gpus: dict[int, int] = {}
        self._lines: dict[tuple[int, Any, Any], int] = {}
        if file.host and file.host not in parts.hosts:
            parts.hosts.append(file.host)

    def read(self) -> None:
        parts, names = self._parts, self._parts.names
        device: list[tuple[int, ...]] = []
        host: list[tuple[int, ...]] = []
        times: tuple[list[float], list[float]] = ([], [])
        host_times: tuple[list[float], list[float]] = ([], [])
        steps: list[tuple[int, int]] = []
        for category, name, pid, tid, ts, dur, args in self._file.events:
            args = args if isinstance(args, dict) else {}
            if category in _SKIPPED_CATEGORIES or (category == "" and pid == "Spans"):
                continue
            ordinal = self._ordinal(category, pid, tid, args)
            correlation = _integer(args.get("correlation", args.get("correlation_id")))
            if ordinal is None:
                step = _STEP.match(name)
                number = int(step[1]) if step else _integer(args.get("step_num"))
                if number >= 0:
                    steps.append((len(host), number))
                host.append((self._line(-1, pid, tid), names[name], correlation))
                host_times[0].append(ts)
                host_times[1].append(dur)
            elif ordinal >= 0:
                gpu = self._gpu(ordinal)
                kind, size, src, dst = _describe(category, name, args)
                device.append((gpu, self._line(gpu, pid, args.get("stream", tid)), names[name], kind, correlation,
                               _op(args, names), size, src, dst))
                times[0].append(ts)
                times[1].append(dur)
        if host:
            rows = np.array(host, np.int64)
            start, end = self._ns(*host_times)
            events = HostEvents(rows[:, 0].astype(np.int32), rows[:, 1].astype(np.int32), start, end)
            if steps:
                numbered = np.array(steps, np.int64)
                events.stats["step_num"] = (numbered[:, 0], numbered[:, 1])
            parts.host.append(events)
        if device:
            rows = np.array(device, np.int64)
            out = DeviceEvents.empty(len(rows))
            for column, values in zip(("gpu", "line", "name", "kind", "correlation", "tf_op", "bytes", "src", "dst"),
                                      rows.T, strict=True):
                getattr(out, column)[:] = values
            out.start_ns, out.end_ns = self._ns(*times)
            parts.device.append(out)
            if host:
                self._join(out, parts.host[-1], np.array(host, np.int64)[:, 2])

    def _join(self, device: DeviceEvents, host: HostEvents, correlation: np.ndarray) -> None:
        calls = np.flatnonzero(correlation > 0)
        calls = calls[np.argsort(host.start_ns[calls], kind="stable")]
        none = np.full(len(calls), -1, np.int64)
        found = Launches(correlation[calls], none, ()).find(device.correlation, device.correlation)
        rows = np.flatnonzero(found >= 0)
        call = calls[found[rows]]
        device.launch_ns[rows], device.launch_end_ns[rows] = host.start_ns[call], host.end_ns[call]
        device.launch_line[rows] = host.line[call]

    def _ns(self, ts: list[float], dur: list[float]) -> tuple[np.ndarray, np.ndarray]:
        """Starts and ends. Relative to the first event before the step to nanoseconds, since a
        float of microseconds since 1970 is only good to a quarter of one."""
        start_us = np.array(ts, np.float64) - self._start_us
        start = np.rint(start_us * _NS_PER_US).astype(np.int64) + self._at_ns
        return start, start + np.rint(np.array(dur, np.float64) * _NS_PER_US).astype(np.int64)

    def _ordinal(self, category: str, pid: Any, tid: Any, args: dict[str, Any]) -> int | None:
        """The GPU an event ran on; None: a host event; -1: neither."""
        if category in _DEVICE_CATEGORIES:
            device = _integer(args.get("device"))
            device = device if device >= 0 else _integer(pid)
            return device if device < MAX_GPUS else -1
        gpu = _GPU_PROCESS.search(self._file.processes.get(pid, ""))
        if gpu is None:
            return None
        return -1 if self._file.threads.get((pid, tid), "") in _DERIVED_ROWS else int(gpu[1])

    def _gpu(self, ordinal: int) -> int:
        if ordinal not in self._gpus:
            self._gpus[ordinal] = len(self._parts.gpus)
            about = self._file.devices.get(ordinal, {})
            major, minor, memory = (about.get(k) for k in ("computeMajor", "computeMinor", "totalGlobalMem"))
            self._parts.gpus.append(TraceGpu(
                self._file.host, ordinal, self._file.rank, str(about.get("name", "")),
                (major, minor) if isinstance(major, int) and isinstance(minor, int) else None,
                memory if isinstance(memory, int) else None))
        return self._gpus[ordinal]

    def _line(self, gpu: int, pid: Any, tid: Any) -> int:
        tid = _hashable(tid)
        key = (gpu, pid, tid)
        if key not in self._lines:
            name = self._file.threads.get((pid, tid)) or (f"stream {tid}" if gpu >= 0 else f"thread {tid}")
            self._lines[key] = self._parts.add_line(Line(self._file.host, gpu, name))
        return self._lines[key]


def _describe(category: str, name: str, args: dict[str, Any]) -> tuple[int, int, int, int]:
    """Kind, bytes, and the memory at both ends."""
    kind = kernels.classify(name).kind
    expected = _DEVICE_CATEGORIES.get(category)
    if expected is not None and expected is not Kind.COMPUTE and kind in (Kind.COMPUTE, Kind.COLLECTIVE):
        kind = expected
    if kind in (Kind.COMPUTE, Kind.COLLECTIVE):
        return kind, -1, 0, 0
    details = kernels.copy_details(str(args.get("memcpy_details", "")))
    size = _integer(args.get("bytes"))
    ends = _COPY_ENDS.search(name)
    src, dst = (kernels.memory_kind(e) for e in ends.groups()) if ends else (details.src, details.dst)
    if kind is Kind.MEMSET:
        src = MemoryKind.UNKNOWN
    return kind, size if size >= 0 else details.bytes, src, dst


def _op(args: dict[str, Any], names: Any) -> int:
    op, hlo, module = (str(args.get(k) or "") for k in ("tf_op", "hlo_op", "hlo_module"))
    if op and op != "XlaModule:":
        return names[op]
    return names[f"{module}/{hlo}" if module else hlo] if hlo else -1


def _integer(value: Any) -> int:
    """A non-negative integer that fits, also from text; -1 for everything else."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,18}", value):
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else -1
