"""gputop's figures beside xprof's, of the same files, where both answer: `pip install -e '.[xprof]'`.

Where they differ the test says who is right, and why.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import shutil
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gputop.diagnosis.diagnose import analyze
from gputop.trace.model import Kind, Trace
from gputop.trace.readers.load import load
from tests.trace.readers.xspace.reference import Builder
from tests.trace.shares import SHARED

pytestmark = pytest.mark.skipif(importlib.util.find_spec("xprof") is None, reason="xprof is not installed")

DATA = Path(__file__).resolve().parents[1] / "data"
AMD = sorted((SHARED / "xplane_amd").glob("*.pb"))
TENSORFLOW = sorted(DATA.glob("keras*.xplane.pb.gz"))
CAPTURES = [*AMD, *TENSORFLOW]


@pytest.fixture
def ask(tmp_path):
    """xprof's tool of that name on the file, as JSON. It writes beside the file, so on a copy."""
    def answer(path: Path, tool: str) -> Any:
        from xprof.convert import raw_to_tool_data

        copy = tmp_path / "host.xplane.pb"
        if path.suffix == ".gz":
            copy.write_bytes(gzip.decompress(path.read_bytes()))
        else:
            shutil.copyfile(path, copy)
        data, _ = raw_to_tool_data.xspace_to_tool_data([str(copy)], tool, {})
        return json.loads(data)

    return answer


def rows(table: dict[str, Any]) -> list[dict[str, Any]]:
    names = [column["id"] for column in table["cols"]]
    return [dict(zip(names, [cell and cell["v"] for cell in row["c"]], strict=False)) for row in table["rows"]]


@cache
def read(path: Path) -> Trace:
    return load([path])


def totals(
    names: list[str], index: np.ndarray, start_ns: np.ndarray, end_ns: np.ndarray,
) -> dict[str, tuple[int, float]]:
    """Count and microseconds by name."""
    out: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for i, length in zip(index.tolist(), (end_ns - start_ns).tolist(), strict=True):
        name = names[i] if i >= 0 else ""
        out[name][0] += 1
        out[name][1] += length / 1e3
    return {name: (int(count), us) for name, (count, us) in out.items()}


def close(count: int, us: float) -> Any:
    """Durations are cut to nanoseconds, event by event."""
    return pytest.approx(us, rel=1e-5, abs=1e-3 * count + 1e-6)


@pytest.mark.parametrize("path", AMD, ids=lambda p: p.name)
def test_kernels_agree_in_number_and_time(ask, path):
    trace = read(path)
    d = trace.device
    ours = totals(trace.names, d.name, d.start_ns, d.end_ns)
    theirs: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for row in rows(ask(path, "kernel_stats")):
        theirs[row["kernel_name"]][0] += row["occurrences"]
        theirs[row["kernel_name"]][1] += row["total_duration_us"]
    assert theirs
    for name, (count, us) in theirs.items():
        assert ours[name][0] == count
        assert us == close(count, ours[name][1])
    # xprof leaves out what has no kernel details. That is a copy here, and right of it.
    copies = {trace.names[i] for i in d.name[d.kind >= Kind.H2D].tolist()}
    assert ours.keys() - theirs.keys() <= copies


@pytest.mark.parametrize("path", AMD, ids=lambda p: p.name)
def test_memory_agrees(ask, path):
    theirs = {name: profile["profileSummary"] for name, profile in
              ask(path, "memory_profile")["memoryProfilePerAllocator"].items()}
    ours = {use.allocator: use for use in analyze([path]).memory}
    assert theirs and ours.keys() == theirs.keys()
    for name, summary in theirs.items():
        assert ours[name].peak_bytes == int(summary["peakBytesUsageLifetime"])
        assert ours[name].peak_in_window_bytes == int(summary["peakStats"]["heapAllocatedBytes"])
        assert ours[name].capacity_bytes == int(summary["memoryCapacity"])


@pytest.mark.parametrize("path", AMD, ids=lambda p: p.name)
def test_device_op_time_agrees_in_sum(ask, path):
    """By name it cannot: xprof shows the framework's name of an HLO op where the trace holds the program."""
    trace = read(path)
    d = trace.device
    ours = totals(trace.names, d.tf_op, d.start_ns, d.end_ns)
    ours.pop("", None)
    theirs = [r for r in rows(ask(path, "framework_op_stats")[0])
              if r["host_or_device"] == "Device" and r["type"] != "IDLE"]
    assert theirs
    assert sum(r["total_time"] for r in theirs) == pytest.approx(sum(us for _, us in ours.values()), rel=1e-4)


@pytest.mark.parametrize("path", TENSORFLOW, ids=lambda p: p.name)
def test_host_ops_agree_by_name(ask, path):
    """xprof adds up ops of one name and different types, here mse/sub:Sub and mse/sub:SquaredDifference, and shows
    the type of one. gputop keeps them apart; the sums agree."""
    trace = read(path)
    h = trace.host
    ours: dict[str, tuple[int, float]] = {}
    for name, (count, us) in totals(trace.names, h.name, h.start_ns, h.end_ns).items():
        op = name.rpartition(":")[0]
        ours[op] = (ours.get(op, (0, 0.0))[0] + count, ours.get(op, (0, 0.0))[1] + us)
    theirs = [r for r in rows(ask(path, "framework_op_stats")[0])
              if r["type"] not in ("IDLE", "Dataset") and "::" not in r["operation"]]
    assert len(theirs) > 20
    for row in theirs:
        count, us = ours[row["operation"]]
        assert row["occurrences"] == count
        assert row["total_time"] == close(count, us)


def test_only_gputop_finds_the_steps_of_keras_3(ask):
    """Keras 3 marks no step, and xprof knows no other anchor; the job's own log says who is right."""
    path = DATA / "keras3_fast.xplane.pb.gz"
    page = json.dumps(ask(path, "overview_page"))
    assert "No step" in page
    steps = analyze([path]).steps
    logged = json.loads((DATA / "steps.json").read_text())["keras3_fast"]["median_step_s"]
    assert steps is not None and steps.median_s == pytest.approx(logged, rel=0.1)


def test_copies_and_bf16(ask, tmp_path):
    """xprof files copies under computing, as its parser expects MemcpyHToD, and counts no bf16 kernel as 16-bit."""
    b = Builder()
    gpu = b.plane("/device:GPU:0")
    for name, value in (("compute_cap_major", 9), ("compute_cap_minor", 0), ("core_count", 132)):
        b.stat(gpu, gpu.stats.add(), name, value)
    line = b.line("/device:GPU:0", "Stream #1(Kernel,MemcpyH2D)")
    thread = b.line("/host:CPU", "python")
    details = "regs:32 static_shared:0 dynamic_shared:0 grid:64,1,1 block:256,1,1 occ_pct:100"
    for i in range(6):
        at = i * 1_000_000
        b.event("/host:CPU", thread, "train", at, 1_000_000, step_num=i, _r=1)
        for part, (kernel, length, more) in enumerate((
            ("MemcpyH2D", 300_000, {"memcpy_details": "kind_src:pinned kind_dst:device size:4096 dest:0 async:1"}),
            ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", 400_000,
             {"kernel_details": details, "tf_op": ("dense/MatMul:MatMul",)}),
        )):
            b.event("/host:CPU", thread, "cuLaunch", at + 10 + part, 5, correlation_id=2 * i + part + 1, device_id=0)
            b.event("/device:GPU:0", line, kernel, at + 1000 + part * 300_000, length, correlation_id=2 * i + part + 1,
                    **more)
    path = tmp_path / "own.xplane.pb"
    path.write_bytes(b.bytes())
    parts = analyze([path]).breakdown
    assert parts is not None and (parts.h2d, parts.compute) == pytest.approx((300e-6, 400e-6))
    use = analyze([path]).gpus[0]
    assert use.kernel_time_by_type is not None and use.kernel_time_by_type["bf16"] == 1
    page = {k: v for table in ask(path, "overview_page") for k, v in (table.get("p") or {}).items()}
    assert page["device_compute_16bit_percent"] == "0.0%"
    computing = [float(r["deviceComputeTimeMs"]) for r in rows(ask(path, "input_pipeline_analyzer")[1])]
    assert computing and max(computing) == pytest.approx(0.7), "copies and kernels in one"
