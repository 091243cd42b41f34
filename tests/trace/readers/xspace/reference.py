"""An XSpace builder, and the obvious decoding by protobuf's own parser that the reader must equal."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from gputop.core.errors import NoDataError
from gputop.trace import kernel_names
from gputop.trace.model import Kind, Trace
from gputop.trace.readers.xspace.reader import read_xspaces
from tests import xspace_messages as messages

START = 1_700_000_000_000_000_000
INTEGERS = ("step_num", "group_id", "_r", "is_func", "tracing_count", "iter_num", "buffered_elements", "id",
            "parent_id", "parallelism", "buffer_limit", "cpu_budget")
STRINGS = ("eager_op", "tf_function_call", "function_name", "name", "shapes")
ALLOCATOR = ("bytes_allocated", "bytes_available", "peak_bytes_in_use", "allocation_bytes", "addr")
OTHER = ("correlation_id", "device_id", "memcpy_details", "kernel_details", "tf_op", "annotation", "hlo_op",
         "hlo_module")


class Builder:
    """An XSpace under construction: ``line`` adds a line, ``event`` an event with stats by name."""

    def __init__(self, host: str = "node", start: int | None = START) -> None:
        self.space = messages.XSpace(hostnames=[host] if host else [])
        self._planes: dict[str, Any] = {}
        if start is not None:
            self.stat(self.plane("Task Environment"), self.plane("Task Environment").stats.add(),
                      "profile_start_time", start)
            self.stat(self.plane("Task Environment"), self.plane("Task Environment").stats.add(),
                      "profile_stop_time", start + 10**9)

    def plane(self, name: str) -> Any:
        if name not in self._planes:
            self._planes[name] = self.space.planes.add(name=name)
        return self._planes[name]

    def line(self, plane: str, name: str, timestamp_ns: int = 0) -> Any:
        return self.plane(plane).lines.add(name=name, timestamp_ns=timestamp_ns)

    def event(self, plane: str, line: Any, name: str, start_ns: int, duration_ns: int, **stats: Any) -> Any:
        this = self.plane(plane)
        event = line.events.add(metadata_id=_id_of(this.event_metadata, name), offset_ps=start_ns * 1000,
                                duration_ps=duration_ns * 1000)
        for stat, value in stats.items():
            self.stat(this, event.stats.add(), stat, value)
        return event

    @staticmethod
    def stat(plane: Any, stat: Any, name: str, value: Any) -> None:
        """int → int64; (text,) → by reference; text → inline; float → double."""
        stat.metadata_id = _id_of(plane.stat_metadata, name)
        if isinstance(value, tuple):
            stat.ref_value = _id_of(plane.stat_metadata, value[0])
        else:
            setattr(stat, {int: "int64_value", str: "str_value", float: "double_value"}[type(value)], value)

    def bytes(self) -> bytes:
        return self.space.SerializeToString()

    def read(self) -> Trace:
        return read_xspaces([("x.xplane.pb", "fallback", self.bytes())])


def _id_of(table: Any, name: str) -> int:
    for i, entry in table.items():
        if entry.name == name:
            return i
    i = len(table) + 1
    table[i].id, table[i].name = i, name
    return i


# What protobuf's own parser says, event by event.

def expected(data: bytes) -> tuple[Counter, Counter, Counter]:
    """Device rows, host rows and allocator rows, times in absolute nanoseconds."""
    space = messages.XSpace.FromString(data)
    start = 0
    for plane in space.planes:
        if plane.name == "Task Environment":
            names = {i: m.name for i, m in plane.stat_metadata.items()}
            start = {names.get(s.metadata_id): s.uint64_value or s.int64_value for s in plane.stats}.get(
                "profile_start_time", 0)
    latest = max((ln.timestamp_ns for p in space.planes for ln in p.lines if len(ln.events)), default=0)
    base = 0 if latest > 10**18 else start
    rows: tuple[Counter, Counter, Counter] = Counter(), Counter(), Counter()
    device: list[tuple[int, tuple[Any, ...], Any]] = []
    calls: list[tuple[int, int, int, int, str, str]] = []
    listed: set[tuple[Any, ...]] = set()
    host_lines: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for plane in space.planes:
        on_device = plane.name.startswith("/device:GPU:")
        if not on_device and (not plane.name.startswith("/host:") or plane.name == "/host:metadata"):
            continue
        stat_names = {i: m.name for i, m in plane.stat_metadata.items()}
        lines = [ln for ln in plane.lines if not 0 <= ln.id % 2**32 - 0xDEADBEEF < 32]
        if on_device and any((ln.display_name or ln.name).startswith("Stream #") and len(ln.events) for ln in lines):
            lines = [ln for ln in lines if (ln.display_name or ln.name).startswith("Stream #")]
        for line in lines:
            events = tuple(event.SerializeToString() for event in line.events)
            about = ({i: m.name or m.display_name for i, m in plane.event_metadata.items()}, stat_names, events)
            key = (plane.name, line.id, line.display_name or line.name, line.timestamp_ns, len(events))
            if not on_device and events and key in host_lines and host_lines[key] == about:
                continue
            if events:
                host_lines.setdefault(key, about)
            for event in line.events:
                metadata = plane.event_metadata.get(event.metadata_id)
                if metadata is None or event.WhichOneof("data") == "num_occurrences":
                    continue
                name = metadata.name or metadata.display_name
                if name.startswith("ThreadpoolListener") and not on_device:
                    continue
                begin = base + line.timestamp_ns + event.offset_ps // 1000
                end = base + line.timestamp_ns + (event.offset_ps + event.duration_ps) // 1000
                ints: dict[str, int] = {}
                texts: dict[str, str] = {}
                doubles: dict[str, float] = {}
                for stat in event.stats:
                    key, which = stat_names.get(stat.metadata_id, ""), stat.WhichOneof("value")
                    if which in ("int64_value", "uint64_value"):
                        value = getattr(stat, which)
                        ints[key] = value - 2**64 if value >= 2**63 else value
                    elif which == "double_value":
                        doubles[key] = stat.double_value
                    elif which == "str_value" or (which == "ref_value" and stat.ref_value in stat_names):
                        texts[key] = stat.str_value or stat_names.get(stat.ref_value, "")
                line_name = line.display_name or line.name
                if on_device:
                    key = (plane.name, line_name, name, begin, end, ints.get("correlation_id", -1))
                    if key in listed:
                        continue
                    listed.add(key)
                    device.append((int(plane.name.rpartition(":")[2]), (
                        plane.name, line_name, name, begin, end, ints.get("correlation_id", -1), _op(texts),
                        _shape(texts)), kernel_names.copy_details(texts.get("memcpy_details", ""))))
                    continue
                if ints.get("correlation_id", -1) > 0:
                    calls.append((begin, end, ints["correlation_id"], ints.get("device_id", -1), line_name,
                                  texts.get("memcpy_details", "")))
                if name in ("MemoryAllocation", "MemoryDeallocation"):
                    op = None if texts.get("tf_op") in ("", "(null)") else texts.get("tf_op")
                    rows[2][(begin, texts.get("allocator_name"), op,
                             name == "MemoryDeallocation", *(ints.get(k, -1) for k in ALLOCATOR),
                             repr(doubles.get("fragmentation", float("nan"))))] += 1
                else:
                    kept = {k: ints.get(k, texts.get(k)) for k in INTEGERS if k in ints}
                    kept.update({k: texts[k] for k in STRINGS if k in texts})
                    if not any(p.name.startswith("/device:GPU:") for p in space.planes):
                        kept.update(_cpu_op(name, ints, texts))
                    rows[1][line_name, name, begin, end, tuple(sorted(kept.items()))] += 1
    calls.sort(key=lambda call: call[0])
    gpus = {int(p.name.rpartition(":")[2]) for p in space.planes if p.name.startswith("/device:GPU:")}
    by_device = {call[3] for call in calls if call[3] >= 0} <= gpus
    for gpu, row, details in device:
        call = _launch(calls, row[5], gpu, by_device)
        if call and Kind.H2D <= kernel_names.classify(row[2]).kind <= Kind.COPY_OTHER and details.bytes < 0:
            details = kernel_names.copy_details(call[5])  # only the host's side tells, as ROCm's does
        rows[0][(*row, *details, call and call[0], call and call[1], call and call[4])] += 1
    return rows


def _cpu_op(name: str, ints: dict[str, int], texts: dict[str, str]) -> dict[str, Any]:
    """What links an op of XLA's on a CPU with its program and with the event that ends it."""
    out: dict[str, Any] = {}
    if "hlo_op" in texts:
        out.update(hlo=True, hlo_module=texts.get("hlo_module"))
        if ints.get("_p", -1) >= 0:
            out["ends_with"] = ints["_p"]
    if name.startswith("end: ") and ints.get("_c", -1) >= 0:
        out["ended"] = ints["_c"]
    return out


def _launch(calls: list[Any], correlation: int, gpu: int, by_device: bool) -> Any:
    """The first call with the id: of those of that GPU where calls say whose they are, else of the others."""
    if not 0 < correlation < 1 << 40:
        return None
    own = [call for call in calls if call[2] == correlation and (not by_device or call[3] == gpu)]
    others = [call for call in calls if call[2] == correlation and (not by_device or call[3] < 0)]
    return next(iter(own or others), None)


def _shape(texts: dict[str, str]) -> tuple[Any, ...] | None:
    return _told(kernel_names.launch_shape(texts.get("kernel_details", "")))


def _told(shape: kernel_names.LaunchShape | None) -> tuple[Any, ...] | None:
    """The shape without its occupancy, which may be the reader's."""
    return shape and (shape.grid, shape.block, shape.registers, shape.shared_bytes)


def _op(texts: dict[str, str]) -> str | None:
    op = texts.get("tf_op")
    if op and op != "XlaModule:":
        return op
    hlo, module = texts.get("hlo_op"), texts.get("hlo_module")
    if hlo is None:
        return kernel_names.op_of_annotation(texts.get("annotation", "")) or None
    return hlo if module is None else f"{module}/{hlo}"


def actual(trace: Trace, first: int) -> tuple[Counter, Counter, Counter]:
    """The same rows from the columns; ``first`` is the absolute time of the first event."""
    names, d, h, a = trace.names, trace.device, trace.host, trace.allocator

    def text(index: int) -> str | None:
        return names[index] if index >= 0 else None

    device = Counter(
        (f"/device:GPU:{trace.gpus[g].ordinal}", trace.lines[ln].name, names[n], s + first, e + first, c, text(op),
         _told(trace.launch_shapes[i]) if i >= 0 else None, b, src, dst,
         *((begun + first, done + first, trace.lines[thread].name) if thread >= 0 else (None, None, None)))
        for g, ln, n, s, e, c, op, i, b, src, dst, begun, done, thread in zip(*(x.tolist() for x in (
            d.gpu, d.line, d.name, d.start_ns, d.end_ns, d.correlation, d.tf_op, d.shape, d.bytes, d.src, d.dst,
            d.launch_ns, d.launch_end_ns, d.launch_line)), strict=True))
    stats: list[dict[str, Any]] = [{} for _ in range(len(h))]
    for stat, (rows, values) in h.stats.items():
        assert (np.diff(rows) > 0).all()
        for row, value in zip(rows.tolist(), values.tolist(), strict=True):
            stats[row][stat] = True if stat == "hlo" else text(value) if stat in (*STRINGS, "hlo_module") else value
    host = Counter((trace.lines[ln].name, names[n], s + first, e + first, tuple(sorted(kept.items())))
                   for ln, n, s, e, kept in zip(*(x.tolist() for x in (h.line, h.name, h.start_ns, h.end_ns)), stats,
                                                strict=True))
    allocator = Counter(
        (t + first, text(n), text(op), free, *numbers, repr(part))
        for t, n, op, free, part, *numbers in zip(*(x.tolist() for x in (
            a.time_ns, a.allocator, a.tf_op, a.is_free, a.fragmentation, a.in_use_bytes,
            a.available_bytes, a.peak_bytes, a.allocation_bytes, a.address)), strict=True))
    return device, host, allocator


def check_equal(data: bytes) -> Trace | None:
    want = expected(data)
    try:
        trace = read_xspaces([("x", "fallback", data)])
    except NoDataError:
        assert not any(want)
        return None
    first = min([row[3] for row in want[0]] + [row[2] for row in want[1]] + [row[0] for row in want[2]])
    assert actual(trace, first) == want
    assert (np.diff(np.lexsort((trace.device.start_ns, trace.device.gpu))) == 1).all()
    assert (np.diff(trace.host.start_ns) >= 0).all()
    return trace
