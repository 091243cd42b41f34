"""Synthetic traces for tests: a few lines say what ran when; times are microseconds."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from gputop.trace.model import AllocatorEvents, DeviceEvents, HostEvents, Kind, LaunchShape, Line, Trace, TraceGpu

STRINGS = ("eager_op", "tf_function_call", "function_name", "name", "shapes", "hlo_module")


@dataclass
class Builder:
    """Collects events in any order; ``build`` sorts them as a reader does."""

    gpus: int = 1
    hosts: tuple[str, ...] = ("node",)
    format: str = "xspace"
    _device: list[dict[str, Any]] = field(default_factory=list)
    _host: list[tuple[str, str, float, float, dict[str, Any]]] = field(default_factory=list)
    _memory: list[dict[str, Any]] = field(default_factory=list)

    def run(self, gpu: int, start: float, length: float, name: str = "volta_sgemm_128x64_nn", *,
            kind: Kind = Kind.COMPUTE, launch: float | None = None, launch_length: float = 5.0, size: int = -1,
            src: int = 0, dst: int = 0, stream: int = 1, op: str | None = None, shape: LaunchShape | None = None,
            thread: str | None = None) -> Builder:
        """A device event, and where ``launch`` is given the host call that launched it.

        That call is on the GPU's own thread, or on ``thread``.
        No time may be negative: a trace begins at its first event, and -1 is "not known".
        """
        assert start >= 0 and (launch is None or launch >= 0)
        self._device.append({
            "gpu": gpu, "start": start, "length": length, "name": name, "kind": kind, "launch": launch,
            "launch_length": launch_length, "size": size, "src": src, "dst": dst, "stream": stream, "op": op,
            "shape": shape, "thread": thread or f"launch {gpu}"})
        return self

    def host(self, name: str, start: float, length: float, /, line: str = "python", **stats: Any) -> Builder:
        self._host.append((name, line, start, length, stats))
        return self

    def memory(self, time: float, allocator: str, in_use: int, available: int, peak: int, *, op: str | None = None,
               size: int = -1, address: int = -1, free: bool = False, fragmentation: float = math.nan) -> Builder:
        """An allocation or a release, with the allocator's state after it."""
        self._memory.append({"time": time, "allocator": allocator, "in_use": in_use, "available": available,
                             "peak": peak, "op": op, "size": size, "address": address, "free": free,
                             "fragmentation": fragmentation})
        return self

    def build(self, shuffle: int | None = None) -> Trace:
        """The trace; ``shuffle`` seeds another order of input events, lines and names."""
        rng = random.Random(shuffle)
        device, host, memory = list(self._device), list(self._host), list(self._memory)
        launches = [("cuLaunchKernel", e["thread"], e["launch"], e["launch_length"], {})
                    for e in device if e["launch"] is not None]
        host += launches
        lines: dict[tuple[int, str], int] = {}
        names: dict[str, int] = {}
        wanted_lines = [(e["gpu"], f"Stream #{e['stream']}") for e in device] + [(-1, h[1]) for h in host]
        wanted_names = ([e["name"] for e in device] + [h[0] for h in host] + [m["allocator"] for m in memory]
                        + [m["op"] for m in memory if m["op"] is not None]
                        + [e["op"] for e in device if e["op"] is not None]
                        + [v for h in host for k, v in h[4].items() if k in STRINGS])
        if shuffle is not None:
            for items in (device, host, memory, wanted_lines, wanted_names):
                rng.shuffle(items)
        for line in wanted_lines:
            lines.setdefault(line, len(lines))
        for name in wanted_names:
            names.setdefault(name, len(names))

        device.sort(key=lambda e: (e["gpu"], e["start"]))
        shapes: dict[LaunchShape, int] = {}
        d = DeviceEvents.empty(len(device))
        for i, e in enumerate(device):
            d.gpu[i], d.line[i], d.name[i] = e["gpu"], lines[e["gpu"], f"Stream #{e['stream']}"], names[e["name"]]
            d.kind[i], d.start_ns[i], d.end_ns[i] = e["kind"], ns(e["start"]), ns(e["start"]) + ns(e["length"])
            d.bytes[i], d.src[i], d.dst[i] = e["size"], e["src"], e["dst"]
            if e["launch"] is not None:
                d.launch_ns[i], d.launch_end_ns[i] = ns(e["launch"]), ns(e["launch"] + e["launch_length"])
                d.launch_line[i] = lines[-1, e["thread"]]
            d.tf_op[i] = -1 if e["op"] is None else names[e["op"]]
            d.shape[i] = -1 if e["shape"] is None else shapes.setdefault(e["shape"], len(shapes))
        host.sort(key=lambda h: h[2])
        stats: dict[str, tuple[list[int], list[int]]] = {}
        for row, (_, _, _, _, own) in enumerate(host):
            for key, value in own.items():
                rows, values = stats.setdefault(key, ([], []))
                rows.append(row)
                values.append(names[value] if key in STRINGS else int(value))
        h = HostEvents(
            np.array([lines[-1, e[1]] for e in host], np.int32), np.array([names[e[0]] for e in host], np.int32),
            np.array([ns(e[2]) for e in host], np.int64), np.array([ns(e[2]) + ns(e[3]) for e in host], np.int64),
            {k: (np.array(r, np.int64), np.array(v, np.int64)) for k, (r, v) in stats.items()})
        memory.sort(key=lambda m: m["time"])

        def column(key: str, dtype: type = np.int64) -> npt.NDArray:
            return np.array([m[key] for m in memory], dtype)

        a = AllocatorEvents(
            np.array([ns(m["time"]) for m in memory], np.int64),
            np.array([names[m["allocator"]] for m in memory], np.int32),
            column("in_use"), column("available"), column("peak"),
            np.array([-1 if m["op"] is None else names[m["op"]] for m in memory], np.int32),
            is_free=column("free", bool), allocation_bytes=column("size"),
            address=column("address"), fragmentation=column("fragmentation", float))
        return Trace(
            format=self.format, paths=["synthetic"], hosts=list(self.hosts), names=list(names),
            lines=[Line(self.hosts[0], gpu, name) for gpu, name in lines],
            gpus=[TraceGpu(self.hosts[0], g) for g in range(self.gpus)], device=d, host=h, allocator=a,
            launch_shapes=list(shapes))


def ns(us: float) -> int:
    return round(us * 1000)


def keras_steps(b: Builder, count: int, length: float, call: float, first: float = 0.0) -> Builder:
    """Keras 3's step function, called every ``length`` for ``call``, as TF 2.21 records it."""
    for i in range(count):
        b.host("EagerExecute", first + i * length, call, is_func=1, eager_op="__inference_multi_step_on_iterator_42")
    return b


def one_process_each(trace: Trace) -> Trace:
    """The same with a process for each GPU, as with one file a rank."""
    return replace(
        trace, gpus=[replace(gpu, rank=i) for i, gpu in enumerate(trace.gpus)],
        lines=[replace(line, rank=line.gpu if line.gpu >= 0 else int(line.name[-1]) if line.name[-1].isdigit() else 0)
               for line in trace.lines])
