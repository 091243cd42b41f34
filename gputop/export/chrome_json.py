"""A trace in the Chrome format, for ui.perfetto.dev and other viewers. Categories and arguments are kineto's, which the
readers of PyTorch's traces know, gputop's own among them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gputop.core.version import __version__
from gputop.trace.model import I64, TEXT_STATS, Kind, Trace

_CATEGORIES = {Kind.COMPUTE: "kernel", Kind.COLLECTIVE: "kernel", Kind.MEMSET: "gpu_memset"}
_HOSTS_FROM = 1000  # process numbers of hosts; those of GPUs are below
_BATCH = 1 << 13  # events for which a piece of text is made at once


def pieces(trace: Trace) -> Iterator[bytes]:
    """The JSON document, a piece at a time. Times are µs since the trace's origin."""
    head = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": trace.origin_ns,
            "otherData": {"made by": f"gputop {__version__}", "simulated": trace.simulated},
            "deviceProperties": [{"id": i, "name": gpu.name, "numSms": gpu.sms, "totalGlobalMem": gpu.memory_bytes,
                                  **dict(zip(("computeMajor", "computeMinor"), gpu.compute_capability or (),
                                             strict=False))} for i, gpu in enumerate(trace.gpus)]}
    yield json.dumps(head)[:-1].encode() + b', "traceEvents": [\n'
    batch: list[str] = []
    comma = ""
    for event in _events(trace):
        batch.append(json.dumps(event, separators=(",", ":")))
        if len(batch) == _BATCH:
            yield (comma + ",\n".join(batch)).encode()
            batch.clear()
            comma = ",\n"
    yield (comma + ",\n".join(batch) if batch else "").encode() + b"\n]}\n"


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    hosts = {host: _HOSTS_FROM + i for i, host in enumerate(dict.fromkeys(line.host for line in trace.lines))}
    yield from _names(trace, hosts)
    launch = _launch_of(trace)
    yield from _device(trace, launch)
    yield from _host(trace, launch, hosts)


def _names(trace: Trace, hosts: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    for i, gpu in enumerate(trace.gpus):
        yield _meta("process_name", i, 0, f"GPU {gpu.ordinal} {gpu.name} {gpu.host}".strip())
    for host, pid in hosts.items():
        yield _meta("process_name", pid, 0, f"Host {host}".strip())
    for i, line in enumerate(trace.lines):
        yield _meta("thread_name", line.gpu if line.gpu >= 0 else hosts[line.host], i, line.name)


def _meta(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _launch_of(trace: Trace) -> I64:
    """A number for each launch call, which the device events that it started share; -1 where it is not known."""
    device = trace.device
    out = np.full(len(device), -1, np.int64)
    launched = np.flatnonzero(device.launch_ns >= 0)
    calls = np.stack((device.launch_line[launched].astype(np.int64), device.launch_ns[launched]), axis=1)
    if len(launched):
        out[launched] = np.unique(calls, axis=0, return_inverse=True)[1].reshape(-1) + 1
    return out


def _device(trace: Trace, launch: I64) -> Iterator[dict[str, Any]]:
    d, names = trace.device, trace.names
    for i in range(len(d)):
        kind, gpu, line = Kind(int(d.kind[i])), int(d.gpu[i]), int(d.line[i])
        args: dict[str, Any] = {"device": gpu, "stream": line}
        if launch[i] >= 0:
            args["correlation"] = int(launch[i])
        if d.tf_op[i] >= 0:
            args["tf_op"] = names[d.tf_op[i]]
        if d.bytes[i] >= 0:
            args["bytes"] = int(d.bytes[i])
        yield {"ph": "X", "cat": _CATEGORIES.get(kind, "gpu_memcpy"), "name": names[d.name[i]], "pid": gpu, "tid": line,
               "ts": int(d.start_ns[i]) / 1e3, "dur": int(d.end_ns[i] - d.start_ns[i]) / 1e3, "args": args}
        if launch[i] >= 0:
            yield {"ph": "f", "bp": "e", "cat": "ac2g", "name": "ac2g", "id": int(launch[i]), "pid": gpu, "tid": line,
                   "ts": int(d.start_ns[i]) / 1e3}


def _host(trace: Trace, launch: I64, hosts: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    h, names = trace.host, trace.names
    stats: dict[int, dict[str, Any]] = {}
    for stat, (rows, values) in h.stats.items():
        for row, value in zip(rows.tolist(), values.tolist(), strict=True):
            stats.setdefault(row, {})[stat] = names[value] if stat in TEXT_STATS else value
    calls = dict(zip(zip(trace.device.launch_line.tolist(), trace.device.launch_ns.tolist(), strict=True),
                     launch.tolist(), strict=True))
    for i in range(len(h)):
        line, start = int(h.line[i]), int(h.start_ns[i])
        pid, ts = hosts[trace.lines[line].host], start / 1e3
        event: dict[str, Any] = {"ph": "X", "name": names[h.name[i]], "pid": pid, "tid": line, "ts": ts,
                                 "dur": (int(h.end_ns[i]) - start) / 1e3}
        call = calls.pop((line, start), None)
        if call is not None and call >= 0:
            stats.setdefault(i, {})["correlation"] = call
        if i in stats:
            event["args"] = stats.pop(i)
        yield event
        if call is not None and call >= 0:
            yield {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": call, "pid": pid, "tid": line, "ts": ts}
