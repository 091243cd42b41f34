"""What limits a trace is said: each kind of note, from what the profilers themselves leave in the file."""

from __future__ import annotations

import sqlite3

import numpy as np
import pytest

from gputop.core.findings import TraceNote
from gputop.diagnosis.diagnose import analyze_trace
from gputop.diagnosis.report import limit_of
from gputop.trace import quality
from gputop.trace.model import Kind
from gputop.trace.readers.load import load
from gputop.trace.readers.xspace.reader import read_xspaces
from tests.trace import build
from tests.trace.readers.nsys_report import report
from tests.trace.readers.xspace.reference import Builder
from tests.trace.readers.xspace.sample_space import sample


def ids(trace) -> list[str]:
    return [note.id for note in trace.quality]


def test_a_sound_trace_has_no_note():
    assert ids(sample().read()) == []


@pytest.mark.parametrize(("kind", "text", "expected"), [
    ("warnings", "Detected GPU events dropped on node7: Profiler has collected 2097152 driver events and 2097152 "
                 "device events.", "dropped_events"),
    ("errors", "CUPTI_ERROR_NOT_INITIALIZED", "capture_error"),
    ("errors", "cuptiActivityEnable: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES", "capture_error"),
    ("warnings", "No device trace was collected.", "capture_warning"),
])
def test_what_the_profiler_said(kind, text, expected):
    b = sample()
    getattr(b.space, kind).append(text)
    (note,) = b.read().quality
    assert note.id == expected
    assert text.rstrip(".") in note.message
    assert ("NVreg_RestrictProfilingToAdminUsers=0" in note.message) == ("PRIVILEGES" in text)


def two_streams(apart_ns: int, kernels: int = 60, gpus: int = 1) -> Builder:
    b = Builder()
    for gpu in range(gpus):
        for stream in (0, 1):
            line = b.line(f"/device:GPU:{gpu}", f"Stream #{stream}(Kernel)")
            for i in range(kernels):
                b.event(f"/device:GPU:{gpu}", line, f"kernel {stream}", i * 1000 + stream * apart_ns, 500)
    return b


def test_serialized_kernels():
    assert ids(two_streams(500).read()) == ["serialised_kernels"]
    assert ids(two_streams(499).read()) == []
    assert ids(two_streams(500, kernels=40).read()) == [], "too few to tell"
    one = two_streams(500)
    for line in one.plane("/device:GPU:0").lines:
        line.name = "Stream #1(Kernel)"
    assert len(one.read().device) == 120
    assert "TF_GPU_CUPTI_FORCE_CONCURRENT_KERNEL=1" in two_streams(500).read().quality[0].message


def test_one_gpu_whose_kernels_overlap_shows_that_they_can():
    b = two_streams(500, gpus=2)
    b.event("/device:GPU:1", b.line("/device:GPU:1", "Stream #7(Kernel)"), "k", 0, 200)
    assert ids(b.read()) == []


def test_each_host_is_clipped_by_its_own_records(monkeypatch):
    monkeypatch.setattr(quality, "_CUPTI_RECORDS", 5)
    files = []
    for host in ("full", "half"):
        b = Builder(host)
        line = b.line("/device:GPU:0", "Stream #1(Kernel)")
        for i in range(5 if host == "full" else 3):
            b.event("/device:GPU:0", line, "k", i * 100, 50)
        thread = b.line("/host:CPU", "python")
        for i in range(20):
            b.event("/host:CPU", thread, "step", i * 100, 50, step_num=i)
        files.append((f"{host}.xplane.pb", "", b.bytes()))
    trace = read_xspaces(files)
    assert ids(trace) == ["clipped"] and "full: GPU events stop" in trace.quality[0].message
    numbered = list(zip(trace.host.line.tolist(), trace.host.stats["step_num"][1].tolist(), strict=True))
    per_host = {host: [n for ln, n in numbered if trace.lines[ln].host == host] for host in ("full", "half")}
    assert per_host == {"full": [0, 1, 2, 3, 4], "half": list(range(20))}
    assert (np.diff(trace.host.stats["step_num"][0]) > 0).all()
    assert read_xspaces(files[:1]).profile_window_ns == (0, 450)


def test_nsight_systems_own_messages(tmp_path):
    database = sqlite3.connect(report(tmp_path / "r.sqlite"))
    database.execute("CREATE TABLE DIAGNOSTIC_EVENT (timestamp INTEGER, severity INTEGER, text TEXT)")
    database.executemany("INSERT INTO DIAGNOSTIC_EVENT VALUES (1, ?, ?)", [
        (1, "Profiling has started."), (3, "CUDA injection failed"),
        (2, "Not all CUDA events might have been collected."),
        *((2, f"warning {i} {'x' * 999}") for i in range(50)), (None, None), ("x", b"\xff")])
    database.commit()
    database.close()
    trace = load([tmp_path / "r.sqlite"])
    assert ids(trace) == ["capture_error", "dropped_events"] + ["capture_warning"] * 4
    assert max(len(note.message) for note in trace.quality) < 400


def test_no_steps_and_no_gpu_are_said_once():
    b = Builder()
    b.event("/host:CPU", b.line("/host:CPU", "t"), "python code", 1, 1)
    assert [q.id for q in analyze_trace(b.read()).trace.quality] == ["no_steps", "no_gpu"]
    b.plane("/device:GPU:0")
    assert [q.id for q in analyze_trace(b.read()).trace.quality] == ["no_device_events", "no_steps"]
    b.space.errors.append("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")
    assert ids(b.read()) == ["empty_device_plane", "capture_error"]
    b.space.errors[0] = "node: Failed to load libcupti (is it installed and accessible?)"
    assert "LD_LIBRARY_PATH" in next(q.message for q in b.read().quality if q.id == "empty_device_plane")
    del b.space.errors[:]
    b.event("/host:CPU", b.line("/host:CPU", "t2"), "cuLaunchKernel", 1, 1, correlation_id=1)
    notes = analyze_trace(b.read()).trace.quality
    assert [note.id for note in notes] == ["empty_device_plane", "no_steps"]
    assert "NVreg_RestrictProfilingToAdminUsers=0" in notes[0].message


@pytest.mark.parametrize(("op", "others", "on_cpu"), [
    ("dense/MatMul:MatMul", "", True), ("net/conv/Relu:_FusedConv2D", "", True),
    ("gradient_tape/x:Sum", "", False), ("MatMul:MatMul", "edge_1_x:_Send", False),
    ("MatMul:MatMul", "cuLaunchKernel", False), ("MatMul:MatMul", "GPU_0_bfc", False)])
def test_a_gpu_that_did_nothing_is_not_one_whose_work_was_lost(op: str, others: str, on_cpu: bool) -> None:
    b = build.keras_steps(build.Builder(), 30, 1000, 900)
    for i in range(30):
        b.host("ExecutorState::Process", 1000 * i, 890, line="tf_Compute/1")
        b.host(op, 1000 * i, 800, line="tf_Compute/1")
    if others == "GPU_0_bfc":
        b.memory(5, others, 1, 1, 1)
    elif others:
        b.host(others, 850, 1, line="tf_Compute/1")
    trace = b.build()
    trace.quality.append(TraceNote("empty_device_plane", "no events were recorded"))
    analysis = analyze_trace(trace)
    notes = [note.id for note in analysis.trace.quality if note.id != "evaluation"]
    assert notes == ["no_gpu" if on_cpu else "empty_device_plane"]
    assert limit_of(analysis).startswith("NO VERDICT: the GPU work was not recorded") != on_cpu
    assert ("on the CPU, although" in analysis.trace.quality[0].message) == (analysis.cpu_layers is not None) == on_cpu
    assert len(trace.gpus) == 1, "the trace itself stays as it is"


def launching(lost_s: float = 0.0, capture: bool = False, not_run: int = 0) -> build.Builder:
    """Two threads launch 100 kernels each; the share ``lost_s`` of the second one's has no kernel."""
    b = build.Builder()
    for i in range(100):
        for thread, offset in (("python", 0), ("backward", 50)):
            launch = 100 * i + offset
            b.host("cudaLaunchKernel", launch, 5, line=thread)
            if thread == "python" or i >= lost_s * 100:
                b.run(0, launch + 10, 30, launch=launch, thread=thread)
    for i in range(not_run):
        b.host("cudaLaunchKernel", 10_000 + 10 * i, 5, line="backward")
    if capture:
        b.host("cudaStreamBeginCapture", 1, 1, line="backward").host("cudaStreamEndCapture", 9_999, 1, line="backward")
    return b


@pytest.mark.parametrize(("copies", "kernels", "told"), [(1, 0, True), (0, 0, False), (1, 1, False)])
def test_launches_that_run_nothing_before_a_later_copy_are_told(copies: int, kernels: int, told: bool) -> None:
    b = build.Builder(format="nsys").host("cudaLaunchKernel", 0, 5).host("cudaLaunchKernel", 10, 5)
    for i in range(kernels):
        b.run(0, 20 + i, 1, launch=10)
    for _ in range(copies):
        b.run(0, 50, 5, kind=Kind.D2H, launch=40)
    trace = b.build()
    quality.note_launches_without_kernels(trace)
    assert ids(trace) == ["lost_kernels"] * told
    assert not told or limit_of(analyze_trace(trace)).startswith("NO VERDICT: the GPU work was not recorded")


@pytest.mark.parametrize(("job", "lost"), [
    (launching(), False), (launching(1.0), True), (launching(0.5), False),  # half a thread's: what else that may be
    (launching(1.0, capture=True), False),  # a CUDA graph is recorded: those launches run nothing
    (launching(not_run=500), False),  # the recording ends before the GPU has run them
])
def test_kernels_of_a_whole_thread_are_lost(job: build.Builder, lost: bool) -> None:
    trace = job.build()
    quality.leave_out_lost_kernels(trace)
    assert ids(trace) == (["lost_kernels"] if lost else []) and (len(trace.device) == 0) == lost
    if lost:
        assert "of 99 of 299 launches, namely all launches of one thread" in trace.quality[0].message
        assert "empty_device_plane" not in [note.id for note in analyze_trace(trace).trace.quality]
