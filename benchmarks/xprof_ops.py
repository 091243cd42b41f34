"""gputop's time, executions, FLOPs and bytes of XLA's ops beside XProf's, of the same traces. Needs xprof.

    python benchmarks/xprof_ops.py TRACE.xplane.pb…

XProf's tool hlo_stats gives rates; its FLOPs and bytes are rate × time / occurrences. Traces without a program of
XLA's are compared by kernel (kernel_stats), those without a GPU by type of op (framework_op_stats). The tables, with
what explains the differences: benchmarks/xprof_ops.md.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gputop.analysis.gpu.device_time import timelines
from gputop.analysis.host.host_ops import host_ops
from gputop.analysis.layers.cpu_layers import cpu_layers
from gputop.analysis.layers.layers import layer_times
from gputop.trace.model import Kind, Trace
from gputop.trace.readers.load import load

_GIB = 1 << 30


class OpFigures(NamedTuple):
    """Of one op in the whole trace; FLOPs and bytes of one execution, None: not known."""

    time_us: float
    executions: float
    flops: float | None
    bytes: float | None


def xprof_table(path: Path, tool: str) -> list[dict[str, Any]]:
    from xprof.convert import raw_to_tool_data

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "host.xplane.pb"  # it writes beside the file
        shutil.copyfile(path, copy)
        found, _ = raw_to_tool_data.xspace_to_tool_data([str(copy)], tool, {})
    table = json.loads(found)
    table = table[0] if isinstance(table, list) else table
    names = [column["id"] for column in table["cols"]]
    return [dict(zip(names, [cell and cell["v"] for cell in row["c"]], strict=False)) for row in table["rows"]]


def xprof_ops(path: Path) -> dict[str, OpFigures]:
    found = {}
    for row in xprof_table(path, "hlo_stats"):
        us, count = row["total_self_time"], row["occurrences"]
        flops, moved = row["model_flop_rate"] * 1e9 * us / 1e6, row["measured_memory_bw"] * _GIB * us / 1e6
        found[row["hlo_op_name"]] = OpFigures(us, count, flops / count or None, moved / count or None)
    return found


def gputop_ops(trace: Trace) -> dict[str, OpFigures]:
    times = layer_times(trace, timelines(trace), None)
    device, found = trace.device, {}
    name = {int(op): trace.names[tf_op].rsplit("/", 1)[-1] for op, tf_op in zip(device.hlo, device.tf_op, strict=True)
            if op >= 0}
    index = {id(op): i for i, op in enumerate(trace.hlo_ops)}
    for use in times.ops if times is not None else ():
        flops = None if use.op.flops is None else sum(number for _, number in use.op.flops)
        found[name[index[id(use.op)]]] = OpFigures(use.device_ns / 1e3, use.executions, flops, use.op.bytes)
    return found


def kernels(path: Path, trace: Trace) -> str:
    """Number and time of kernels, and by how much the time of one name differs at most."""
    ours: dict[str, float] = defaultdict(float)
    device = trace.device
    rows = np.flatnonzero(device.kind <= Kind.COLLECTIVE)
    for name, ns in zip(device.name[rows].tolist(), (device.end_ns - device.start_ns)[rows].tolist(), strict=True):
        ours[trace.names[name]] += ns / 1e3
    theirs: dict[str, float] = defaultdict(float)
    count, named = 0.0, 0
    for row in xprof_table(path, "kernel_stats"):
        theirs[row["kernel_name"]] += row["total_duration_us"]
        count, named = count + row["occurrences"], named + bool(row["op_name"])
    apart = max(abs(ours[name] - theirs[name]) for name in ours.keys() | theirs.keys())
    with_op = int((device.tf_op[rows] >= 0).sum())
    return (f"| {path.name} | {len(rows):,} | {count:,.0f} | {sum(ours.values()) / 1e3:,.3f} | "
            f"{sum(theirs.values()) / 1e3:,.3f} | {apart:.3f} | {with_op:,} | {named:,} |")


def text(figure: float | None) -> str:
    return "—" if figure is None else f"{figure:,.4g}"


def ops(path: Path, trace: Trace) -> Iterator[str]:
    theirs, ours = xprof_ops(path), gputop_ops(trace)
    yield f"\n## {path.name}\n"
    yield ("| op | time, µs: gputop | XProf | executions: gputop | XProf | FLOPs each: gputop | XProf "
           "| bytes each: gputop | XProf |\n|---|---|---|---|---|---|---|---|---|")
    none = OpFigures(0.0, 0.0, None, None)
    for name in sorted(ours.keys() | theirs.keys(), key=lambda name: -max(
            ours.get(name, none).time_us, theirs.get(name, none).time_us)):
        pairs = zip(ours.get(name, none), theirs.get(name, none), strict=True)
        yield f"| {name} | " + " | ".join(f"{text(mine)} | {text(other)}" for mine, other in pairs) + " |"


def cpu(path: Path, trace: Trace) -> str:
    """Number and own time of ops on the CPU, by how much a type of op differs at most, and what the layers have."""
    table = cpu_layers(trace, None)
    found = host_ops(trace, None)
    ours = {op.type: (op.count, op.host_s * 1e6) for op in found.types} if found is not None else {}
    theirs: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for row in xprof_table(path, "framework_op_stats"):
        if row["type"] not in ("IDLE", "Dataset") and row["total_self_time"]:
            count, time = theirs[row["type"]]
            theirs[row["type"]] = count + row["occurrences"], time + row["total_self_time"]
    both = ours.keys() & theirs.keys()
    apart = max((abs(ours[name][1] - theirs[name][1]) for name in both), default=0.0)
    of_both = [sum(figures[name][i] for name in both) for figures in (ours, theirs) for i in (0, 1)]
    roots = [row for row in table.rows if row.parent is None] if table is not None else []
    runs, flops = sum(row.kernels for row in roots), sum(row.flops or 0.0 for row in roots)
    return (f"| {path.name} | {of_both[0]:,} | {of_both[2]:,.0f} | {of_both[1] / 1e3:,.3f} | {of_both[3] / 1e3:,.3f} | "
            f"{apart:.3f} | {runs:,.0f} | {sum(row.device_s for row in roots) * 1e3:,.3f} | {flops / 1e9:,.4g} |")


def main(paths: list[str]) -> None:
    traces = {path: load([path]) for path in map(Path, paths)}
    if any(not trace.gpus for trace in traces.values()):
        print("| without a GPU | ops that both tell: gputop | XProf | their own time, ms: gputop | XProf | largest "
              "difference of a type, µs | ops in gputop's layers | time in which any runs, ms | GFLOP |\n"
              "|---|---|---|---|---|---|---|---|---|")
        print("\n".join(cpu(path, trace) for path, trace in traces.items() if not trace.gpus) + "\n")
        traces = {path: trace for path, trace in traces.items() if trace.gpus}
    if not traces:
        return
    print("| without a program | kernels: gputop | XProf | time, ms: gputop | XProf | largest difference of a name, µs "
          "| kernels with an op: gputop | names with one: XProf |\n|---|---|---|---|---|---|---|---|")
    for path, trace in traces.items():
        if not trace.hlo_ops:
            print(kernels(path, trace))
    for path, trace in traces.items():
        if trace.hlo_ops:
            print("\n".join(ops(path, trace)))


if __name__ == "__main__":
    main(sys.argv[1:])
