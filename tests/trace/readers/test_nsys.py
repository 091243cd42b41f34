from __future__ import annotations

import random
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest

from gputop.analysis.steps.steps import find_steps
from gputop.core.errors import GputopError, NoDataError
from gputop.trace.model import Kind, LaunchShape, MemoryKind, Trace
from gputop.trace.readers.load import load
from gputop.trace.readers.nsys import read_nsys
from tests.diagnosis.real_traces import needs_data, trace_of
from tests.trace.readers.nsys_report import PROCESS, TABLES, report
from tests.trace.shares import shares

DIAGNOSTICS = "CREATE TABLE DIAGNOSTIC_EVENT (severity INTEGER, text TEXT)"


def changed(folder: Path, *changes: str | tuple[str, Sequence[object]], without: tuple[str, ...] = ()) -> Trace:
    """The trace of a report after these statements of SQL."""
    return read_nsys(report(folder / "r.sqlite", without, *changes))


def test_occupancy_is_reckoned_from_the_launch_shapes(tmp_path):
    columns = ("registersPerThread", "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "staticSharedMemory",
               "dynamicSharedMemory")
    values = (168, 264, 1, 1, 384, 1, 1, 1024, 229_376)
    trace = changed(
        tmp_path, *(f"ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL ADD COLUMN {column} INTEGER" for column in columns),
        (f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET {', '.join(f'{c} = ?' for c in columns)} WHERE start = 1100", values))
    # H100: one block of 12 warps, for its shared memory. The other kernel tells no shape.
    assert trace.device.shape.tolist() == [0, -1, -1, -1, -1]
    assert trace.launch_shapes == [LaunchShape((264, 1, 1), (384, 1, 1), 168, 230_400, 12 / 64)]


@pytest.mark.parametrize(("last_ns", "work", "window"), [
    (1_500, False, (-1000, 7_999_000)), (9_000_000, False, None), (1_500, True, None)])
def test_a_report_without_work_on_a_gpu_is_as_long_as_its_session(
        tmp_path: Path, last_ns: int, work: bool, window: tuple[int, int] | None) -> None:
    gpu = () if work else ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
    trace = changed(
        tmp_path, "CREATE TABLE ANALYSIS_DETAILS (duration INTEGER)", "INSERT INTO ANALYSIS_DETAILS VALUES (8000000)",
        ("UPDATE NVTX_EVENTS SET end = ? WHERE start = 1001", (last_ns,)), without=gpu)
    assert trace.profile_window_ns == window


def test_a_thread_without_a_name_has_that_of_its_program(tmp_path):
    trace = changed(tmp_path, "CREATE TABLE PROCESSES (globalPid INTEGER, pid INTEGER, name TEXT)",
                    ("INSERT INTO PROCESSES VALUES (?, 501, './build/solver')", (PROCESS[1],)))
    assert {line.name for line in trace.lines if line.gpu < 0} == {"python3/500", "solver/501"}


def test_a_report_of_two_processes(tmp_path):
    trace = read_nsys(report(tmp_path / "r?port #1.sqlite"))
    d, names = trace.device, trace.names
    assert [(g.host, g.ordinal, g.rank, g.name, g.compute_capability, g.sms) for g in trace.gpus] == [
        ("node", 2, 0, "H100", (9, 0), 132), ("node", 3, 1, "H100", (9, 0), None)]
    assert d.gpu.tolist() == [0, 0, 0, 0, 1]
    assert d.kind.tolist() == [Kind.COMPUTE, Kind.H2D, Kind.COPY_OTHER, Kind.MEMSET, Kind.COLLECTIVE]
    assert [names[i] for i in d.name] == ["ampere_sgemm_128x64_tn", "MemcpyH2D", "MemcpyOther", "Memset",
                                          "ncclDevKernel_AllReduce_Sum_f32"]
    assert d.start_ns.tolist() == [100, 300, 320, 400, 150]
    assert d.launch_ns.tolist() == [10, -1, -1, -1, 0]
    assert d.launch_end_ns.tolist() == [20, -1, -1, -1, 5]
    assert d.bytes.tolist() == [-1, 4096, 512, 64, -1]
    assert (d.src[1], d.dst[1]) == (MemoryKind.PAGEABLE, MemoryKind.DEVICE)
    assert [names[i] for i in trace.host.name] == ["cudaLaunchKernel", "aten::mm", "forward", "cudaLaunchKernel"]
    assert trace.lines[trace.host.line[1]].name == "python3/500"
    assert trace.origin_ns == 1_700_000_000_000_000_000 + 1000 - 500
    assert (trace.hosts, trace.quality) == (["node"], [])


def test_long_reads_of_a_thread_that_calls_cuda_are_host_events(tmp_path):
    """Not those that wait for threads, are short, are of another thread, or lie outside of its calls."""
    thread, ms = PROCESS[0] + 500, 1_000_000
    rows = [(1100, 1100 + 5 * ms, thread, 30), (1100, 1100 + 5 * ms, thread, 31), (1100, 1900, thread, 30),
            (1100, 1100 + 5 * ms, thread + 7, 30), (500, 500 + 5 * ms, thread, 30), (7 * ms, 99 * ms, thread, 30)]
    trace = changed(tmp_path, "INSERT INTO StringIds VALUES (30, 'getc'), (31, 'pthread_cond_wait')",
                 f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES ({8 * ms}, {9 * ms}, {thread}, 99, 3)",
                 "CREATE TABLE OSRT_API (start INTEGER, end INTEGER, globalTid INTEGER, nameId INTEGER)",
                 *(("INSERT INTO OSRT_API VALUES (?, ?, ?, ?)", row) for row in rows))
    kept = [row for row in range(len(trace.host)) if trace.names[trace.host.name[row]] in ("getc", "pthread_cond_wait")]
    assert [(trace.host.end_ns[row] - trace.host.start_ns[row]) for row in kept] == [5 * ms]


@pytest.mark.parametrize(("first_s", "gpu_work", "told"), [(11, True, True), (2, True, False), (11, False, False)])
def test_a_program_that_calls_cuda_late_is_told(tmp_path, first_s, gpu_work, told):
    """It reads and computes for seconds before, of which only samples tell; the last call ends at 13 s. Without work on
    a GPU all of the recording is evaluated."""
    tables = () if gpu_work else ("KERNEL", "MEMCPY", "MEMSET")
    second, thread = 1_000_000_000, PROCESS[0] + 500
    trace = changed(tmp_path, "DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME",
                    "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES "
                    f"({first_s * second}, {13 * second}, {thread}, 7, 3)",
                    "CREATE TABLE COMPOSITE_EVENTS (id INTEGER, start INTEGER)",
                    f"INSERT INTO COMPOSITE_EVENTS VALUES (1, {second}), (2, {5 * second})",
                    *(f"DELETE FROM CUPTI_ACTIVITY_KIND_{table}" for table in tables))
    notes = [note.message for note in trace.quality if note.id == "late_calls"]
    assert bool(notes) == told and (not told or "10.0 s before its first CUDA call, 83%" in notes[0])


def test_long_calls_of_mpi_are_host_events(tmp_path):
    thread, ms = PROCESS[0] + 500, 1_000_000
    trace = changed(tmp_path, "INSERT INTO StringIds VALUES (30, 'MPI_Waitall')",
                    f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES ({8 * ms}, {9 * ms}, {thread}, 99, 3)",
                    "CREATE TABLE MPI_OTHER_EVENTS (start INTEGER, end INTEGER, globalTid INTEGER, textId INTEGER)",
                    f"INSERT INTO MPI_OTHER_EVENTS VALUES (1100, {5 * ms}, {thread}, 30)",
                    f"INSERT INTO MPI_OTHER_EVENTS VALUES (1100, {5 * ms}, {thread + 7}, 30)")
    assert [trace.names[name] for name in trace.host.name].count("MPI_Waitall") == 1


def test_a_range_that_nobody_closed_says_nothing_of_the_host(tmp_path):
    """Nsight Systems ends it with the recording, long after the program's last event."""
    names = [changed(tmp_path / str(length), "CREATE TABLE ANALYSIS_DETAILS (duration INTEGER)",
                     ("INSERT INTO ANALYSIS_DETAILS VALUES (?)", (length,)))
             for length in (1500, 1501) if (tmp_path / str(length)).mkdir() is None]
    assert [["aten::mm" in {trace.names[name] for name in trace.host.name}] for trace in names] == [[False], [True]]


def test_ranges_named_as_kineto_s_steps_mark_steps(tmp_path):
    steps = find_steps(changed(tmp_path, *(
        ("INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, ?, NULL)",
         (1000 + 150 * step, 1140 + 150 * step, f"ProfilerStep#{step}", PROCESS[0] + 500)) for step in range(4))))
    assert steps is not None and (steps.times.anchor, steps.times.median_s) == ("ProfilerStep# markers", 150e-9)


@pytest.mark.parametrize("missing", sorted(set(TABLES) - {"CUPTI_ACTIVITY_KIND_KERNEL"}))
def test_any_table_may_be_missing(tmp_path, missing):
    trace = read_nsys(report(tmp_path / "r.sqlite", (missing,)))
    assert (trace.device.kind <= Kind.COLLECTIVE).sum() == 2


def test_graphs_that_are_recorded_as_a_whole_are_work_of_the_gpu(tmp_path):
    trace = changed(
        tmp_path, "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, end INTEGER, deviceId INTEGER, "
                  "streamId INTEGER, correlationId INTEGER, globalPid INTEGER, graphId INTEGER)",
        f"INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (1500, 9500, 0, 7, 7, {PROCESS[0]}, 3)")
    graph = [i for i, name in enumerate(trace.device.name) if trace.names[name] == "CUDA graph"]
    assert len(graph) == 1 and trace.device.kind[graph[0]] == Kind.COMPUTE and trace.device.launch_line[graph[0]] >= 0
    assert trace.device.end_ns[graph[0]] - trace.device.start_ns[graph[0]] == 8000
    assert [note.id for note in trace.quality] == ["whole_graphs"]


def test_the_file_is_left_alone(tmp_path):
    path = report(tmp_path / "r.sqlite")
    before = path.read_bytes()
    path.chmod(0o444)
    tmp_path.chmod(0o555)
    try:
        read_nsys(path)
        assert [p.name for p in tmp_path.iterdir()] == ["r.sqlite"]
    finally:
        tmp_path.chmod(0o755)
    assert path.read_bytes() == before


def test_text_where_numbers_belong(tmp_path):
    trace = changed(tmp_path, "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ('x', 'y', 'z', 1, 1, 1, 1, 1)",
                    "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (9, 5, 0, 1, 1, 1, 1, 1)",
                    "INSERT INTO StringIds VALUES ('k', X'ff')", "UPDATE NVTX_EVENTS SET text = X'ff00'")
    assert (trace.device.kind > Kind.COLLECTIVE).sum() == 3


def test_a_damaged_file(tmp_path):
    path = report(tmp_path / "r.sqlite", (), *(
        ("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 7, ?, ?, 1, 1)",
         (2000 + i, 2001 + i, 100 + i, PROCESS[0])) for i in range(5000)))
    whole = path.read_bytes()
    kept = []
    for size in range(4096, len(whole), 8192):
        path.write_bytes(whole[:size])
        try:
            trace = load([path])
        except GputopError as error:
            assert "damaged" in f"{error.message}"
        else:
            assert trace.quality[0].id == "truncated"
            kept.append(len(trace.device))
    assert kept == sorted(kept)
    assert 1000 < kept[-1] < 5005


def test_flipped_bytes_in_a_report_never_crash(tmp_path):
    path = report(tmp_path / "r.sqlite")
    whole = path.read_bytes()
    rng = random.Random(5)
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(40):
            damaged[rng.randrange(100, len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            trace = load([path])
        except GputopError as error:
            assert error.message
        else:
            assert (trace.device.end_ns >= trace.device.start_ns).all()


def test_another_database(tmp_path):
    database = sqlite3.connect(tmp_path / "other.sqlite")
    database.execute("CREATE TABLE people (name TEXT)")
    database.commit()
    database.close()
    with pytest.raises(GputopError, match="not an Nsight Systems export"):
        load([tmp_path / "other.sqlite"])


def test_a_report_without_activity(tmp_path):
    with pytest.raises(NoDataError):
        read_nsys(report(tmp_path / "r.sqlite", tuple(t for t in TABLES if t.startswith(("CUPTI", "NVTX")))))


@needs_data
@pytest.mark.parametrize(("name", "figures"), [
    ("h100", [{"window": 969, "busy": 99.3, "compute": 2.3, "comm": 0, "copies": 97.0}] * 2),
    ("mfu", [
        {"window": 300, "busy": 91.3, "compute": 84.6, "comm": 5.7, "copies": 1.0},
        {"window": 299, "busy": 89.5, "compute": 85.7, "comm": 2.8, "copies": 1.0}]),
])
def test_real_reports(name, figures):
    trace = trace_of(name)
    delays = {"h100": (421_000, 421_000), "mfu": (298, 219)}[name]
    assert trace.quality == []
    for gpu, expected in enumerate(figures):
        got = shares(trace, gpu)
        for key, value in expected.items():
            assert got[key] == pytest.approx(value, abs=0.5 if key == "window" else 0.2)
        assert got["delay"] == pytest.approx(delays[gpu], rel=0.03)
    h2d = trace.device.kind == Kind.H2D
    if name == "h100":
        assert trace.device.bytes[h2d].sum() / 2 == pytest.approx(25.5e9, rel=0.01)
        pinned = h2d & (trace.device.src == MemoryKind.PINNED)
        assert trace.device.bytes[pinned].sum() > 0.999 * trace.device.bytes[h2d].sum()


def test_migrations_of_managed_memory_are_told_from_copies(tmp_path):
    d = changed(tmp_path, "UPDATE CUPTI_ACTIVITY_KIND_MEMCPY SET copyKind = 12, srcKind = NULL, dstKind = NULL "
                          "WHERE copyKind = 1").device
    migrated = int(d.bytes.tolist().index(4096))
    assert d.kind[migrated] == Kind.D2H and d.launch_ns[migrated] == -1
    assert d.src[migrated] == d.dst[migrated] == MemoryKind.MANAGED


def test_calls_are_named_without_the_version_of_their_api(tmp_path):
    trace = changed(tmp_path, "UPDATE StringIds SET value = 'cudaDeviceSynchronize_v3020' WHERE id = 3",
                    "UPDATE StringIds SET value = 'kernel_v10010' WHERE id = 1")
    assert [trace.names[i] for i in trace.host.name].count("cudaDeviceSynchronize") == 2
    assert "kernel_v10010" in trace.names, "a kernel's name is its own"


@pytest.mark.parametrize(("message", "told"), [
    ("No NVTX events collected. Does the process use NVTX?", False),  # of another process: the report has some
    ("No OpenGL events collected. Does the process use OpenGL?", False),
    ("No CUDA events collected. Does the process use CUDA?", False),
    ("CUPTI is not there", True),
])
def test_what_nsight_misses_is_told_where_gputop_misses_it_too(tmp_path, message, told):
    trace = changed(tmp_path, DIAGNOSTICS, ("INSERT INTO DIAGNOSTIC_EVENT VALUES (2, ?)", (message,)))
    messages = [note.message for note in trace.quality]
    assert messages == ([f"The profiler reported: {message}."] if told else [])


def test_events_that_nsight_and_gputop_miss_are_told(tmp_path):
    trace = changed(
        tmp_path, DIAGNOSTICS,
        "INSERT INTO DIAGNOSTIC_EVENT VALUES (2, 'No NVTX events collected. Does the process use NVTX?')",
        "INSERT INTO DIAGNOSTIC_EVENT VALUES (2, 'Not all CUDA events might have been collected.')",
        without=("NVTX_EVENTS",))
    assert [note.message for note in trace.quality] == [
        "The profiler reported: No NVTX events collected. Does the process use NVTX?",
        "The profiler dropped events: Not all CUDA events might have been collected. Counts and sums are too low, "
        "so capture for a shorter time."]
