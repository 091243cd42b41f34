"""Where the step goes by layer: sums are the step's parts, whatever runs side by side; and the limit ladder."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest

from gputop.analysis.gpu.device_time import timelines
from gputop.analysis.layers.layers import layer_times
from gputop.analysis.layers.step_limits import limits, peak_of
from gputop.analysis.layers.tree import AFTER, EAGER, ITSELF, LOCAL_COPIES, NO_OP, NO_PROGRAM, NO_SCOPE
from gputop.analysis.results import Breakdown, GpuUse, LayerRow, Peak, RooflinePoint, StepTimes
from gputop.analysis.steps.model import Steps
from gputop.diagnosis.diagnose import analyze
from gputop.diagnosis.report_figures import mfu_text
from gputop.diagnosis.roofline import picture, svg
from gputop.trace.model import HloOp, Kind, Trace, TraceGpu
from tests.diagnosis.real_traces import files_of, needs_data, trace_of
from tests.records import replace
from tests.trace.build import Builder
from tests.trace.shares import SHARED

H100 = TraceGpu("node", 0, compute_capability=(9, 0), memory_bytes=85_000_000_000, sms=132, clock_hz=1.98e9)
PARTS = Breakdown(input=0.0, h2d=0.0, compute=92e-6, collectives=0.0, d2h=0.0, launch=8e-6, host=0.0, idle=0.0)
STEPS = Steps(tuple((i * 100_000, (i + 1) * 100_000) for i in range(4)), StepTimes("", "high", 4, 1e-4, 1e-4, 1e-4))


def rows_of(trace: Trace) -> dict[str, LayerRow]:
    found = layer_times(trace, timelines(trace), None)
    assert found is not None
    out: dict[str, LayerRow] = {}
    paths: list[str] = []
    for row in found.table.rows:
        paths.append(row.name if row.parent is None else f"{paths[row.parent]}|{row.name}")
        out[paths[-1]] = row
    return out


def test_work_and_waits_go_to_phases_and_layers() -> None:
    b = Builder()
    b.run(0, 0, 10, op="model/dense/MatMul:MatMul").run(0, 20, 10, op="model/conv/Conv2D:Conv2D")
    b.run(0, 30, 40, op="gradient_tape/model/dense/MatMul/MatMul:MatMul")
    b.run(0, 75, 5, op="adam/ResourceApplyAdam:ResourceApplyAdam").run(0, 80, 20, "other_kernel")
    rows = rows_of(b.build())
    assert rows["forward|model"].device_s == pytest.approx(20e-6)
    assert rows["forward|model|conv/Conv2D"].wait_s == pytest.approx(10e-6)
    assert rows["backward"].share == pytest.approx(0.4) and rows["optimizer"].wait_s == pytest.approx(5e-6)
    assert rows[NO_OP].reason and rows[NO_OP].kernels == 1


def test_copies_on_the_gpu_without_an_op_are_no_kernels_without_one() -> None:
    b = Builder().run(0, 0, 10, op="model/dense/MatMul:MatMul").run(0, 10, 10, "other_kernel")
    b.run(0, 20, 10, "CopyDeviceToDevice", kind=Kind.D2D).run(0, 30, 10, "Memset", kind=Kind.MEMSET)
    b.run(0, 40, 10, "copy", kind=Kind.D2D, op="model/dense/Identity:Identity")
    rows = rows_of(b.build())
    assert rows[LOCAL_COPIES].device_s == pytest.approx(20e-6) and rows[LOCAL_COPIES].kernels == 0
    assert rows[NO_OP].device_s == pytest.approx(10e-6) and rows["forward"].device_s == pytest.approx(20e-6)


@pytest.mark.parametrize(("program", "graphs", "said", "switch"), [
    (True, True, "XLA runs these kernels in CUDA graphs", True), (True, False, "If XLA runs them in", True),
    (False, False, "the trace does not show", False), (False, True, "XLA runs these kernels", True)])
def test_why_kernels_name_no_op(program: bool, graphs: bool, said: str, switch: bool) -> None:
    op = "jit_step/dot" if program else "m/d/MatMul:MatMul"
    trace = Builder().run(0, 0, 10, "gemm").run(0, 10, 10, op=op).build()
    if program:
        trace.hlo_ops = [HloOp("jit(step)/jvp(Net)/dot_general", "", (), 10)]
        trace.device.hlo = np.array([-1, 0], np.int32)
    trace.cuda_graphs = graphs
    reason = rows_of(trace)[NO_OP].reason
    assert said in reason and ("XLA_FLAGS=--xla_gpu_enable_command_buffer=" in reason) == switch


def test_a_program_all_in_cuda_graphs_has_a_table_that_says_so() -> None:
    trace = Builder().run(0, 0, 10, "gemm").build()
    assert layer_times(trace, timelines(trace), None) is None
    trace.cuda_graphs = True
    assert [*rows_of(trace)] == [NO_OP]


@pytest.mark.parametrize(("op_name", "hint"), [
    ("jit(step)/jvp()/dot_general", True), ("jit(step)/jvp(Net)/Dense_0/dot_general", False)])
def test_a_program_without_layers_says_how_to_name_them(op_name: str, hint: bool) -> None:
    trace = Builder().run(0, 0, 10, op="jit_step/dot").build()
    trace.hlo_ops, trace.device.hlo = [HloOp(op_name, "", (), 10)], np.zeros(1, np.int32)
    assert ("jax.named_scope" in rows_of(trace)["forward"].reason) == hint


def test_each_instant_counts_once() -> None:
    b = Builder()
    b.run(0, 0, 100, op="a/x:X").run(0, 50, 100, op="b/y:Y", stream=2).run(0, 60, 10, op="c/z:Z", stream=3)
    b.run(0, 100, 100, "ncclDevKernel_AllReduce", kind=Kind.COLLECTIVE, stream=4, op="c/all:CollectiveReduceV2")
    b.run(0, 190, 20, "MemcpyH2D", kind=Kind.H2D, stream=5)
    rows = rows_of(b.build())
    assert [rows[name].device_s * 1e6 for name in ("forward|a/x", "forward|b/y", "forward|c/z", "collectives", "copies")
            if name in rows] == pytest.approx([100, 50, 50, 10])
    assert sum(row.share for row in rows.values() if row.parent is None) == pytest.approx(1)


def compiled(*, executions: int = 4, program: bool = True) -> Trace:
    """A GPU that runs a product of two kernels and an update, ``executions`` times."""
    b = Builder()
    for i in range(executions):
        at = 100.0 * i
        b.run(0, at, 40, "gemm_bf16", op="jit_step/dot").run(0, at + 40, 20, "splitKreduce", op="jit_step/dot")
        b.run(0, at + 60, 1, "memset", op="jit_step/dot").run(0, at + 61, 1, "memset", op="jit_step/dot")
        b.run(0, at + 70, 10, "fusion", op="jit_step/fusion").run(0, at + 80, 20, "copy", op="jit_step/copy.1")
    trace = b.build()
    if program:
        trace.hlo_ops = [HloOp("jit(step)/jvp(Net)/Dense_0/dot_general", "train.py:7", (("bf16", 1e9),), 1000),
                         HloOp("jit(step)/transpose(jvp(Net))/mul", "train.py:9", (), 3_350_000),
                         HloOp("w", "", (), 10)]
        ops = ["jit_step/dot", "jit_step/fusion", "jit_step/copy.1"]
        trace.device.hlo = np.array([ops.index(trace.names[i]) for i in trace.device.tf_op.tolist()], np.int32)
    trace.gpus = [replace(H100)]
    return trace


def test_flops_count_executions_and_not_kernels() -> None:
    rows = rows_of(compiled())
    assert rows["forward"].flops == pytest.approx(4e9) and rows["forward"].flops_known == 1
    assert rows["backward"].bytes == pytest.approx(4 * 3_350_000)
    assert rows[NO_SCOPE].kernels == 4
    table = layer_times(compiled(), timelines(compiled()), None)
    assert table is not None and table.table.sources is not None
    assert [line.line for line in table.table.sources] == ["train.py:7", "train.py:9"]
    assert NO_PROGRAM in rows_of(compiled(program=False))


def test_the_ladder_sums_to_the_step_and_ends_at_the_roofline() -> None:
    trace = compiled()
    times = layer_times(trace, timelines(trace), STEPS)
    assert times is not None
    step = 100e-6
    found = limits(PARTS, times, trace.gpus, STEPS, [])
    at = {part.id: part.time_s for part in found.steps}
    assert sum(at.values()) == pytest.approx(step)
    of_dot, of_fusion = 1e9 / 989.4e12, 3_350_000 / 3.35e12
    assert at["limit"] == pytest.approx(of_dot + of_fusion, rel=0.01)
    assert found.mfu == pytest.approx(of_dot / step) and found.coverage == pytest.approx(1, abs=0.01)
    assert found.peaks[0].dtype == "bf16" and "H100 SXM" in found.peaks[0].source


def test_below_70_percent_coverage_there_is_no_single_figure() -> None:
    trace = compiled()
    trace.hlo_ops[0] = replace(trace.hlo_ops[0], flops=None)  # as of a custom call: 62 of 92 µs
    times = layer_times(trace, timelines(trace), STEPS)
    found = limits(PARTS, times, trace.gpus, STEPS, [])
    assert found is not None and found.coverage == pytest.approx(30 / 92, abs=0.01)
    assert found.mfu is None and found.hfu is None and "no single value" in found.reason
    at = {part.id: part.time_s for part in found.steps}
    assert at["unknown"] == pytest.approx(62e-6) and sum(at.values()) == pytest.approx(100e-6)
    assert "unknown. FLOPs and bytes are known for only 33%" in mfu_text(found)


def test_given_flops_take_the_place_of_what_is_not_known() -> None:
    trace, parts, steps = compiled(program=False), PARTS, STEPS
    use = GpuUse(gpu=0, window_s=1, busy=1, compute=1, collectives=0, collectives_exposed=0, copies=0,
                 idle_host_fault=None, launch_delay_median_s=None, kernels=1, kernels_per_s=1, kernel_median_s=None,
                 compute_s_per_step=None, kernel_time_by_type={"tf32": 0.6, "unknown": 0.4})
    nothing = limits(parts, None, trace.gpus, steps, [use])
    assert nothing is not None and nothing.mfu is None and "--flops-per-step" in nothing.reason
    found = limits(parts, None, trace.gpus, steps, [use], 1e10)
    assert found is not None and found.mfu == pytest.approx(1e10 / 494.7e12 / 100e-6)
    assert {part.id: part.time_s for part in found.steps}["limit"] == pytest.approx(1e10 / 989.4e12)
    too_many = limits(parts, None, trace.gpus, steps, [use], 1e12)
    assert too_many is not None and too_many.mfu is None and "too large" in too_many.reason


@pytest.mark.parametrize(("gpu", "name"), [
    ({}, "H100 SXM"), ({"memory_bytes": 150_000_000_000}, "H200"), ({"sms": 114}, "H100 PCIe"), ({"sms": 100}, None),
    ({"memory_bytes": 150_000_000_000, "clock_hz": 1.785e9}, "H200 NVL"),
    ({"memory_bytes": 97_871 << 20, "clock_hz": 1.98e9}, "GH200 96GB"),
    ({"memory_bytes": 95_830 << 20, "clock_hz": 1.785e9}, "H100 NVL"),
    ({"sms": 78, "memory_bytes": 97_871 << 20}, "H20"), ({"sms": 78, "memory_bytes": 143_771 << 20}, "H20 141GB"),
    ({"compute_capability": (8, 6), "sms": 72, "memory_bytes": 22_731 << 20}, "A10"),
    ({"compute_capability": (8, 6), "sms": 80, "memory_bytes": 22_731 << 20}, None),
    ({"compute_capability": (10, 0), "sms": 148, "memory_bytes": 183_359 << 20}, "B200"),
    ({"compute_capability": (10, 0), "sms": 148, "memory_bytes": 189_471 << 20}, None),
    *(({"name": gpu}, name) for gpu, name in (
        ("NVIDIA H100 PCIe", "H100 PCIe"), ("NVIDIA H100 80GB HBM3", "H100 SXM"), ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"), ("NVIDIA H200 NVL", "H200 NVL"), ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA H800", "H800"), ("NVIDIA H800 PCIe", "H800 PCIe"), ("NVIDIA H20", "H20"),
        ("NVIDIA H20-3e", "H20 141GB"), ("NVIDIA GH200 480GB", "GH200 96GB"),
        ("NVIDIA GH200 144G HBM3e", "GH200 144GB"), ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2"), ("NVIDIA A10", "A10"), ("NVIDIA A10G", None), ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", None))),
])
def test_which_gpu_has_which_peak(gpu: dict[str, object], name: str | None) -> None:
    found = peak_of(replace(H100, **gpu))
    assert (found and found.name) == name


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real traces are not here")
@pytest.mark.parametrize("file", ["xplane_amd/te_fused_attn_934987a2fc2f.xplane.pb",
                                  "xplane_nvidia/keras_laptop_cc61.xplane.pb",
                                  "xplane_nvidia/autoencoder_fit.xplane.pb"])
def test_rows_of_real_traces_sum_to_the_step(file: str) -> None:
    found = analyze([str(SHARED / file)])
    assert found.layers is not None and found.breakdown is not None
    parts = found.breakdown
    roots = [row for row in found.layers.rows if row.parent is None]
    busy = sum(getattr(parts, part) or 0.0 for part in ("compute", "collectives", "h2d", "d2h"))
    assert sum(row.device_s for row in roots) == pytest.approx(busy)
    assert sum(row.device_s + row.wait_s for row in roots) == pytest.approx(parts.total)
    assert {"forward", "backward"} <= {row.name for row in roots}
    assert AFTER not in {row.name for row in roots if row.share > 0.1}
    for i, row in enumerate(found.layers.rows):
        below = [r for r in found.layers.rows if r.parent == i]
        assert sum(r.device_s for r in below) <= row.device_s + 1e-12


def busy_ms(paths: Sequence[Path]) -> float:
    """When a GPU of the files ran anything, straight from its events; the sum of the GPUs."""
    of_gpu: dict[object, list[tuple[int, int]]] = {}  # nanoseconds
    for path in paths:
        if path.suffix == ".sqlite":
            with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as file:
                for kind in ("KERNEL", "MEMCPY", "MEMSET"):
                    for gpu, start, end in file.execute(f"SELECT deviceId, start, end FROM CUPTI_ACTIVITY_KIND_{kind}"):
                        of_gpu.setdefault(gpu, []).append((start, end))
            continue
        document = json.loads(gzip.decompress(path.read_bytes()), parse_float=str)  # floats are too coarse
        for event in document["traceEvents"] if isinstance(document, dict) else document:
            if event.get("cat", "").lower() in ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"):
                begin, length = Decimal(event["ts"]) * 1000, Decimal(event["dur"]) * 1000
                of_gpu.setdefault((path, event["pid"]), []).append((round(begin), round(begin + length)))
    total = 0
    for times in of_gpu.values():
        reach = 0
        for start, end in sorted(times):
            total += max(end - max(start, reach), 0)
            reach = max(reach, end)
    return total / 1e6


@needs_data
@pytest.mark.parametrize("name", ["dlrm", "a100", "v100", "resnet50", "h100", "mfu"])
def test_device_times_of_the_layers_are_the_busy_time_of_the_raw_events(name: str) -> None:
    trace = trace_of(name)
    found = layer_times(trace, timelines(trace), None)
    rows = found.table.rows
    device_s = sum(row.device_s for row in rows if row.parent is None)
    assert device_s * found.table.gpus * 1e3 == pytest.approx(busy_ms(files_of(name)), rel=2e-5)
    for i, row in enumerate(rows):
        inside = [own.device_s for own in rows if own.parent == i]
        assert not inside or sum(inside) == pytest.approx(row.device_s, rel=1e-6, abs=1e-9)


def test_the_roofline_has_each_op_with_its_rate_below_its_roof() -> None:
    trace = compiled()
    found = limits(PARTS, layer_times(trace, timelines(trace), STEPS), trace.gpus, STEPS, [])
    point, = found.points  # the update has no FLOPs, the copy names nothing
    assert (point.name, point.dtype) == ("Net/Dense_0/dot_general", "bf16")
    assert point.flops_per_byte == pytest.approx(1e6)
    assert point.flops_per_s * point.time_s == pytest.approx(1e9) and point.time_s == pytest.approx(62e-6, rel=0.05)
    lines = picture(found, 60, 10)
    assert all(line.isascii() and len(line) <= 60 for line in lines[:10])
    rows = {mark: [i for i, line in enumerate(lines[:10]) if mark in line] for mark in "-/1"}
    assert len(rows["-"]) == 1 and rows["1"][0] > rows["-"][0] and min(rows["/"]) >= rows["-"][0]
    assert any("989.4 TFLOP/s in bf16" in line for line in lines)
    assert any(line.startswith("1 Net/Dense_0") for line in lines)
    drawn = ElementTree.fromstring(svg(found))
    circle, = drawn.iter("{http://www.w3.org/2000/svg}circle")
    roof, = drawn.iter("{http://www.w3.org/2000/svg}polyline")
    heights = [float(pair.split(",")[1]) for pair in roof.attrib["points"].split()]
    assert heights[1] == heights[2] < heights[0] and float(circle.attrib["cy"]) > heights[1]


def test_without_points_the_roofline_says_why() -> None:
    nothing = limits(PARTS, None, compiled().gpus, STEPS, [])
    assert nothing is not None and "--flops-per-step" in picture(nothing)[0] and svg(nothing) == ""
    hostile = msgspec.structs.replace(nothing, bytes_per_s=1e12, peaks=(Peak("bf16", 1e15, ""),), points=(
        RooflinePoint("a\x1b[31m<b>", "bf16", 0.0, 1e30, 1e-30), RooflinePoint("b", "x", 1.0, 0.0, 0.0)))
    assert all(line.isprintable() for line in picture(hostile)) and "<b>" not in svg(hostile)


def test_ops_that_python_runs_one_by_one_have_their_own_row() -> None:
    b = Builder().run(0, 0, 10, op="Conv2D:Conv2D").run(0, 10, 10, op="Cast:Cast").run(0, 20, 10, op="a/Conv2D:Conv2D")
    b.host("EagerExecute", 0, 5, eager_op="Conv2D")
    rows = rows_of(b.build())
    assert rows[EAGER].device_s == pytest.approx(10e-6) and "run_eagerly" in rows[EAGER].reason
    assert rows["other ops"].device_s == pytest.approx(10e-6) and rows["other ops"].reason


def test_an_op_whose_name_is_a_scope_of_others_has_a_row_for_itself() -> None:
    b = Builder().run(0, 0, 30, op="net/MatMul:MatMul").run(0, 30, 10, op="net/MatMul/MatMul_1:MatMul")
    rows = rows_of(b.build())
    of_it = {path.rsplit("|", 1)[-1]: row.device_s for path, row in rows.items()}
    assert of_it[ITSELF] == pytest.approx(30e-6) and of_it["MatMul_1"] == pytest.approx(10e-6)
