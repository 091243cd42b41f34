from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gputop.analysis.steps.steps import find_steps
from gputop.core.errors import GputopError, NoDataError
from gputop.diagnosis.diagnose import analyze_trace
from gputop.diagnosis.report import short_report
from gputop.trace import limits
from gputop.trace.model import Kind, LaunchShape, MemoryKind
from gputop.trace.readers.chrome.reader import read_chrome
from gputop.trace.readers.load import load
from gputop.trace.threads import role
from tests.diagnosis.real_traces import needs_data, trace_of
from tests.trace.readers.chrome.kineto_file import event, kineto
from tests.trace.shares import shares

JAX_RUN = Path(__file__).resolve().parents[3] / "data/jax_run"


def read(*documents: Any):
    return read_chrome([(f"t{i}.json", [json.dumps(d).encode()]) for i, d in enumerate(documents)])


def test_what_tensorflow_says_of_its_calls_is_read_from_exports_too():
    host = {"ph": "X", "pid": 701, "tid": 1, "dur": 60.0, "name": "EagerExecute"}
    calls = [{**host, "ts": i * 100.0, "args": {"is_func": "1", "eager_op": "__inference_one_step_on_iterator_42"}}
             for i in range(5)]
    kernel = {"ph": "X", "pid": 1, "tid": 7, "ts": 20.0, "dur": 9.0, "name": "MatMul", "args": {"is_func": "1"}}
    trace = read({"traceEvents": [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}}, kernel, *calls,
        {**host, "ts": 170.0, "dur": 9.0, "name": "train_step", "args": {"tracing_count": "nothing", "id": "77"}}]})
    names = trace.names
    rows, values = trace.host.stats["eager_op"]
    assert rows.tolist() == [0, 1, 3, 4, 5] and {names[i] for i in values} == {"__inference_one_step_on_iterator_42"}
    assert [v.tolist() for v in trace.host.stats["is_func"]] == [[0, 1, 3, 4, 5], [1] * 5]
    assert "tracing_count" not in trace.host.stats and [v.tolist() for v in trace.host.stats["id"]] == [[2], [77]]
    steps = find_steps(trace)
    assert steps is not None and steps.count == 4 and steps.times.anchor.startswith("calls of Keras' step function")


def test_kineto():
    trace = read(kineto(rank=3))
    d, names = trace.device, trace.names
    assert d.kind.tolist() == [Kind.COMPUTE, Kind.H2D, Kind.MEMSET]
    assert d.start_ns.tolist() == [10_000, 20_000, 30_000]
    assert (d.end_ns - d.start_ns).tolist() == [5250, 2000, 2000]
    assert d.launch_ns.tolist() == [2500, 8000, -1]
    assert d.launch_end_ns.tolist() == [6500, 12_000, -1]
    assert d.bytes.tolist() == [-1, 832, 64]
    assert (d.src[1], d.dst[1]) == (MemoryKind.PINNED, MemoryKind.DEVICE)
    gpu = trace.gpus[0]
    assert (gpu.ordinal, gpu.rank, gpu.name, gpu.compute_capability) == (3, 3, "H100", (9, 0))
    assert len(trace.gpus) == 1
    assert [names[i] for i in trace.host.name] == ["ProfilerStep#7", "aten::mm", "cudaLaunchKernel", "cudaMemcpyAsync"]
    assert [v.tolist() for v in trace.host.stats["step_num"]] == [[0], [7]]
    assert trace.lines[trace.host.line[0]].name == "thread 1 (python)"
    assert trace.origin_ns == 1_700_000_000_000_000_000
    assert (trace.hosts, trace.quality) == (["node"], [])


def test_launch_shapes_and_messages():
    document = kineto()
    shape = {"grid": [8, 1, 1], "block": [256, 1, 1], "registers per thread": 40, "shared memory": 64,
             "est. achieved occupancy %": 12}
    document["traceEvents"].append(event(
        "kernel", "ncclDevKernel_AllReduce_Sum_f32", document["traceEvents"][3]["ts"] + 40, 5, pid=0, tid=7, device=0,
        stream=7, correlation=21, dtype="Float", **shape, **{"In msg nelems": 10, "Out msg nelems": 10}))
    trace = read(document)
    assert trace.device.shape.tolist() == [-1, -1, -1, 0] and trace.occupancy_is == "estimated"
    assert trace.launch_shapes == [LaunchShape((8, 1, 1), (256, 1, 1), 40, 64, 0.12)]
    assert trace.device.bytes.tolist() == [-1, 832, 64, 40]


def test_an_occupancy_that_kineto_failed_to_reckon():
    document = kineto()
    for gpu in document["deviceProperties"]:
        gpu["numSms"] = 132
    document["traceEvents"].append(event(
        "kernel", "gemm", document["traceEvents"][3]["ts"] + 40, 5, pid=0, tid=7, device=0, stream=7, correlation=21,
        grid=[264, 1, 1], block=[384, 1, 1], **{"registers per thread": 168, "shared memory": 230_400,
                                                "est. achieved occupancy %": 0}))
    assert [s.occupancy for s in read(document).launch_shapes] == [12 / 64]
    document["deviceProperties"][1]["numSms"] = 78  # GPUs of several kinds
    assert [s.occupancy for s in read(document).launch_shapes] == [None]


@pytest.mark.parametrize(("name", "count", "sms"), [
    ("H100", 132, 132), ("H100", True, None), ("H100", "132", None), ("H100", 1 << 20, None), ("H100", 0, None),
    ("AMD Instinct MI300X", 304, None),  # whose grids may be in threads
])
def test_the_number_of_sms(name, count, sms):
    document = kineto()
    document["deviceProperties"][0] |= {"name": name, "numSms": count}
    assert read(document).gpus[0].sms == sms


def test_what_pytorchs_allocators_hold():
    """profile_memory=True: an instant for each allocation and release."""
    def held(ts: float, allocated: Any, **args: Any) -> dict[str, Any]:
        return {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 100, "tid": 1, "ts": ts,
                "args": {"Total Allocated": allocated, "Bytes": 8, "Device Id": -1, "Device Type": 0, **args}}

    document = kineto()
    start = min(e["ts"] for e in document["traceEvents"] if "ts" in e)
    document["traceEvents"] += [held(start + 5, 4096), held(start + 2, 1024), held(start + 3, "many"), held(start, -1),
                                held(start + 4, 2048, **{"Device Id": 0, "Device Type": 1}),
                                {"ph": "i", "name": "[memory]", "ts": start, "args": 3}]
    held_by = read(document).allocator
    names = read(document).names
    assert [names[i] for i in held_by.allocator] == [
        "rank 0: PyTorch host memory", "rank 0: memory of GPU 0", "rank 0: PyTorch host memory"]
    assert held_by.in_use_bytes.tolist() == [1024, 2048, 4096] and np.diff(held_by.time_ns).tolist() == [2000, 1000]
    assert analyze_trace(read(document)).memory == (), "what an allocator may have is not told"


def test_types_and_sizes_of_the_cpus_ops():
    op = "aten::_nnpack_spatial_convolution"
    events = [event("cpu_op", "aten::mm", 0, 9, **{"Input type": ["double", "double"]}),
              event("cpu_op", "aten::mm", 10, 9, **{"Input type": ["float", "Scalar"]}),
              event("cpu_op", op, 20, 9, **{"Input Dims": [[16, 3, 8, 8], [3]], "Input type": ["float"]}),
              event("cpu_op", op, 30, 9, **{"Input Dims": "none", "Input type": 3})]
    stats = read({"traceEvents": events}).host.stats
    assert stats["float64"][0].tolist() == [0]
    assert [column.tolist() for column in stats["batch"]] == [[2], [16]]


def test_ranks_on_one_clock():
    trace = read(kineto(rank=1, start=1_700_000_000_000_005.0), kineto(rank=0))
    assert [(g.rank, g.ordinal) for g in trace.gpus] == [(0, 0), (1, 1)]
    assert trace.paths == ["t1.json", "t0.json"]
    kernels = trace.device.start_ns[trace.device.kind == Kind.COMPUTE]
    assert kernels.tolist() == [10_000, 15_000]
    assert trace.quality == []


def test_ranks_of_equal_number_are_distinguished_by_order():
    trace = read(kineto(), kineto())
    assert [g.rank for g in trace.gpus] == [0, 1]
    assert len(trace.device) == 6


def test_ranks_on_different_clocks_are_laid_side_by_side_and_said_so():
    trace = read(kineto(rank=0), kineto(rank=1, start=5_000.0))
    assert [q.id for q in trace.quality] == ["no_common_clock"]
    assert trace.origin_ns == 0
    assert trace.device.start_ns.tolist() == [10_000, 20_000, 30_000] * 2


def test_base_time():
    trace = read(kineto(base=1_700_000_000_000_000_000, start=12.5))
    assert trace.origin_ns == 1_700_000_000_000_012_500


def test_tensorboard_and_jax_export():
    meta = [{"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {"name": value}} for name, pid, tid, value in (
        ("process_name", 1, 0, "/device:GPU:0"), ("thread_name", 1, 2, "Stream #13(Kernel,MemcpyD2H)"),
        ("thread_name", 1, 3, "XLA Ops"), ("process_name", 9, 0, "/host:CPU"), ("thread_name", 9, 4, "python"))]
    trace = read({"traceEvents": [
        *meta,
        {"ph": "X", "pid": 1, "tid": 2, "ts": 10.0, "dur": 3.0, "name": "fusion",
         "args": {"correlation_id": "55", "hlo_op": "fusion.1", "hlo_module": "jit_step"}},
        {"ph": "X", "pid": 1, "tid": 2, "ts": 14.0, "dur": 1.0, "name": "MemcpyD2H",
         "args": {"memcpy_details": "kind_src:device kind_dst:pageable size:99 dest:0 async:0",
                  "annotation": "a/Mean:Mean#id=1#"}},
        {"ph": "X", "pid": 1, "tid": 3, "ts": 10.0, "dur": 3.0, "name": "fusion.1"},
        {"ph": "X", "pid": 9, "tid": 4, "ts": 1.0, "dur": 2.0, "name": "cuLaunchKernel",
         "args": {"correlation_id": 55}},
        {"ph": "X", "pid": 9, "tid": 4, "ts": 0.0, "dur": 9.0, "name": "train", "args": {"step_num": "3"}},
        {"ph": "X", "pid": 9, "tid": 4, "ts": 0.0, "dur": 9.0, "name": "ThreadpoolListener::StartRegion"},
        {}]})
    d = trace.device
    assert d.kind.tolist() == [Kind.COMPUTE, Kind.D2H]
    assert d.launch_ns.tolist() == [1000, -1]
    assert d.bytes.tolist() == [-1, 99]
    assert [trace.names[i] for i in d.tf_op] == ["jit_step/fusion.1", "a/Mean:Mean"]
    assert trace.host.stats["step_num"][1].tolist() == [3]
    assert len(trace.host) == 2
    assert trace.lines[d.line[0]].name == "Stream #13(Kernel,MemcpyD2H)"
    assert trace.origin_ns == 0


def test_keras_markers_of_tensorflow_2_2_are_named_by_their_phase() -> None:
    trace = read({"traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 9, "args": {"name": "/host:CPU"}},
        *({"ph": "X", "pid": 9, "tid": 4, "ts": 10.0 * i, "dur": 9.0, "name": "TraceContext",
           "args": {"step_num": str(i), "graph_type": phase}} for i, phase in enumerate(("train", "train", "test")))]})
    assert [trace.names[i] for i in trace.host.name] == ["train", "train", "test"]
    assert "graph_type" not in trace.host.stats and trace.host.stats["step_num"][1].tolist() == [0, 1, 2]


def test_rows_beside_the_streams_are_left_out_and_said_where_they_are_not_known():
    rows = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}}]
    for tid, name in enumerate((
            "Stream #13(Compute)", "TensorFlow Ops", "TensorFlow Name Scope", "Framework Ops", "Steps",
            "Ops of tomorrow")):
        rows += [{"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}},
                 {"ph": "X", "pid": 1, "tid": tid, "ts": 10.0, "dur": 3.0, "name": "7"}]
    trace = read(rows[:-2])
    assert len(trace.device) == 1 and not trace.quality
    assert [trace.names[i] for i in trace.step_events.name] == ["7"]
    assert (trace.step_events.start_ns.tolist(), trace.step_events.end_ns.tolist()) == ([0], [3000])
    trace = read(rows)
    assert len(trace.device) == 1 and [note.id for note in trace.quality] == ["not_streams"]


def test_tensorflow_1_lists_the_streams_as_processes_and_all_of_them_once_more():
    events = []
    for pid, stream in enumerate(("13", "14", "all")):
        events += [{"ph": "M", "name": "process_name", "pid": pid,
                    "args": {"name": f"/device:GPU:0/stream:{stream} Compute"}},
                   {"ph": "X", "pid": pid, "tid": 0, "ts": 10.0, "dur": 3.0, "name": "MatMul"}]
    assert len(read({"traceEvents": events}).device) == 2


def test_events_that_are_listed_twice_count_once():
    document = kineto()
    once = read(kineto())
    document["traceEvents"] += [e for e in document["traceEvents"] if e.get("cat") == "kernel"]
    trace = read(document)
    assert rows_of(trace).tolist() == rows_of(once).tolist()
    assert [note.id for note in trace.quality] == ["duplicate_events"]


def test_jaxs_own_files_tell_the_same_three_times(tmp_path):
    files = ("host.xplane.pb.gz", "host.trace.json.gz", "perfetto_trace.json.gz")
    traces = [load([JAX_RUN / name]) for name in files]
    assert [t.format for t in traces] == ["xspace", "chrome", "chrome"]
    for trace in traces:
        assert sorted(trace.names[i] for i in trace.host.name) == sorted(
            traces[0].names[i] for i in traces[0].host.name)
        assert trace.host.stats["step_num"][1].tolist() == list(range(6))
        # The JSON rounds to nanoseconds what the XSpace has in picoseconds.
        assert trace.host.start_ns[rows_of(trace)] == pytest.approx(traces[0].host.start_ns[rows_of(traces[0])], abs=1)
    run = load([JAX_RUN])
    assert (run.format, run.event_count) == ("xspace", traces[0].event_count)
    for name in files[1:]:
        (tmp_path / name).write_bytes((JAX_RUN / name).read_bytes())
    assert load([tmp_path]).event_count == traces[0].event_count


def rows_of(trace) -> np.ndarray:
    return trace.host.stats["step_num"][0]


def test_a_bare_list_of_events():
    assert len(read(kineto()["traceEvents"]).device) == 3


@pytest.mark.parametrize("damage", [
    {"ts": None}, {"ts": "soon"}, {"dur": -5}, {"ts": float("nan")}, {"ts": 1e300}, {"dur": float("inf")},
])
def test_senseless_times_are_left_out(damage):
    document = kineto()
    document["traceEvents"][8].update(damage)
    assert len(read(document).device) == 2


def test_senseless_values_do_not_crash():
    document = kineto()
    document["traceEvents"][8].update(pid=[1], tid={"a": 1}, name=None)
    document["traceEvents"][8]["args"].update(device="x", correlation=1e99, stream=[7])
    document["traceEvents"][9]["args"].update(bytes=-4, correlation=2**70)
    document["traceEvents"] += [None, 5, "x", [], {"ph": "X"}, {"ph": "M", "name": "thread_name", "args": 3}]
    document["deviceProperties"] = {"a": 1}
    document["distributedInfo"] = [3]
    assert read(document).device.bytes.tolist() == [-1, 64]


def test_of_very_many_threads_those_with_most_events_are_read(monkeypatch):
    """Each costs an analysis a look at all events, and the file a hundred bytes."""
    monkeypatch.setattr(limits, "MAX_CHROME_LINES", 3)
    start = 1_700_000_000_000_000.0
    busy = [event("cpu_op", "aten::mm", start + 10 * n, 5, tid=tid) for tid in (1, 2) for n in range(4)]
    kernels = [event("kernel", "gemm", start + 10 * n, 5, pid=0, tid=7, device=0, stream=7) for n in range(3)]
    others = [event("cpu_op", "aten::add", start + n, 1, tid=100 + n) for n in range(50)]
    trace = read({"traceEvents": [*others, *busy, *kernels]})
    assert len(trace.lines) == 3 and len(trace.host) == 8 and len(trace.device) == 3
    (note,) = [note.message for note in trace.quality if note.id == "left_out"]
    assert "53 threads and streams" in note and "50 events" in note


def test_a_cut_file_keeps_the_events_before_the_damage():
    text = json.dumps(kineto(rank=2))
    cut = text[: text.index('"gpu_memset"')]
    trace = read_chrome([("cut.json", [cut.encode()])])
    assert len(trace.device) == 2
    assert trace.gpus[0].rank == 2
    assert [q.id for q in trace.quality] == ["truncated"]


@pytest.mark.parametrize("content", [b"{", b"[]x", b"{}", b'{"traceEvents": 5}', b"[1, 2", b'{"a": ' * 5000, b"\xff{["])
def test_no_chrome_trace(content):
    with pytest.raises(GputopError):
        read_chrome([("x.json", [content])])


def test_no_events():
    with pytest.raises(NoDataError):
        read({"traceEvents": []})


# The published figures of the real traces: window ms, busy %, compute %, comm %, copies %.
DLRM = {
    "window": (13.0, 18.7, 11.4, 18.9, 16.6, 16.4, 11.4, 11.0),
    "busy": (50.7, 65.7, 37.9, 56.8, 46.4, 44.4, 38.2, 24.2),
    "compute": (7.9, 6.6, 9.4, 6.6, 6.8, 6.4, 9.2, 9.7),
    "comm": (44.6, 60.5, 30.8, 51.8, 39.7, 38.1, 31.2, 15.9),
}


@needs_data
def test_dlrm_on_eight_gpus():
    trace = trace_of("dlrm")
    assert [g.rank for g in trace.gpus] == list(range(8))
    assert trace.quality == []
    for gpu in range(8):
        got = shares(trace, gpu)
        for key, values in DLRM.items():
            assert got[key] == pytest.approx(values[gpu], abs=0.2)
        assert 0.1 <= got["copies"] <= 0.2
        assert got["delay"] == pytest.approx(2.0, abs=0.15)
    # The collectives of all ranks end together: the clock is common.
    d, ends = trace.device, []
    for gpu in range(8):
        ends.append(np.sort(d.end_ns[(d.gpu == gpu) & (d.kind == Kind.COLLECTIVE)]))
    assert np.ptp(np.array(ends), axis=0).max() <= 8_000


@needs_data
@pytest.mark.parametrize(("name", "figures"), [
    ("a100", {"window": 660.6, "busy": 23.8, "compute": 17.5, "comm": 7.1, "exposed": 6.0, "copies": 0.4,
                           "delay": 1.8}),
    ("v100", {"window": 480.0, "busy": 98.4, "compute": 97.5, "comm": 0.0, "exposed": 0.0, "copies": 0.9}),
])
def test_kineto_traces(name, figures):
    trace = trace_of(name)
    got = shares(trace, 0)
    for key, value in figures.items():
        assert got[key] == pytest.approx(value, abs=0.2)
    if name == "v100":
        assert got["delay"] == pytest.approx(76_400, rel=0.005)
    steps = [trace.names[i] for i in trace.host.name if trace.names[i].startswith("ProfilerStep#")]
    assert len(steps) == (3 if name == "a100" else 5)


def test_a_file_cut_off_before_its_gpu_s_events_does_not_pass_for_one_without_a_gpu():
    text = json.dumps(kineto()).encode()
    trace = read_chrome([("t.json", [text[:text.index(b'{"ph": "X", "cat": "kernel"')]])])
    assert len(trace.host) and not len(trace.device) and len(trace.gpus) == 8
    analysis = analyze_trace(trace)
    assert [q.id for q in analysis.trace.quality[:2]] == ["truncated", "no_device_events"]
    assert analysis.breakdown is None and analysis.gpus == () and not analysis.findings
    assert "no_gpu" not in {q.id for q in analysis.trace.quality}


def export(device: str, *events: dict[str, Any]) -> dict[str, Any]:
    """An XSpace as TensorBoard exports it, with a call of the host's."""
    return {"traceEvents": [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"/device:{device}:0"}},
        {"ph": "M", "pid": 701, "name": "process_name", "args": {"name": "/host:CPU"}},
        {"ph": "X", "pid": 701, "tid": 1, "ts": 0.0, "dur": 60_000.0, "name": "train_function"}, *events]}


def test_an_export_that_names_gpus_without_an_event_is_not_one_without_a_gpu():
    assert "no_gpu" not in {q.id for q in analyze_trace(read(export("GPU"))).trace.quality}
    (note,) = read(export("GPU")).quality
    assert note.id == "no_device_events" and "no events of its 1 GPU were recorded" in note.message
    assert "no GPU work was recorded" in short_report(analyze_trace(read(export("GPU"))))


def test_an_export_of_tpus_is_refused_as_their_xspace_is():
    op = {"ph": "X", "pid": 1, "tid": 7, "ts": 20.0, "dur": 9.0, "name": "fusion"}
    with pytest.raises(GputopError, match="is a trace of 1 TPU, which gputop does not read"):
        read(export("TPU", op))
    assert len(read(export("TPU")).host) == 1


def test_where_only_calls_of_cuda_are_recorded_the_rest_of_the_recording_is_unknown():
    document = kineto()
    document["traceEvents"][-1]["dur"] = 3_000_000  # 100 µs of it hold events, as with ProfilerActivity.CUDA alone
    assert read(document).profile_window_ns == (0, 3_000_000_000)
    document["traceEvents"] = [e for e in document["traceEvents"] if e.get("cat") not in ("cpu_op", "user_annotation")]
    assert read(document).profile_window_ns is None


@pytest.mark.parametrize("tid", ["\ud800", "a\udfffb", ["\ud800"]])
def test_a_thread_s_number_may_be_text_that_cannot_be_encoded(tmp_path, tid):
    path = tmp_path / "a.pt.trace.json"
    path.write_text(json.dumps({"traceEvents": [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": tid, "ts": 1, "dur": 5}]}))
    (line,) = load([path]).lines
    assert line.name.startswith("thread ") and line.name.encode()


@pytest.mark.parametrize(("shapes", "values", "table"), [
    ([[256, 16, 64], [256, 16], [], [], []], ["", "", "1000000", "-1", "False"], (1_000_000, 64_000_000, 4096)),
    ([[256, 16, 64], [256, 16]], ["", ""], None),
    ([[256, 16, 64], [256, 16]], ["", "", "-5"], None), ([[256, 16, 64], [256, 16]], ["", "", "many"], None),
    ([[], []], ["", "", "10"], None), ("none", None, None), ([[[2]], [3]], ["", "", "10"], None),
    ([[1 << 50], [3]], ["", "", "10"], None),
])
def test_the_size_of_an_embedding_table(shapes: Any, values: Any, table: tuple[int, int, int] | None) -> None:
    args = {"Input Dims": shapes, "Concrete Inputs": values}
    document = kineto()
    document["traceEvents"].append(
        event("cpu_op", "aten::embedding_dense_backward", 1_700_000_000_000_050.0, 5, **args))
    stats = read(document).host.stats
    read_table = tuple(int(stats[name][1][0]) for name in ("table_rows", "table_elements", "indices") if name in stats)
    assert read_table == (table or ())


def test_functions_of_threads_that_kineto_does_not_number_are_no_main_thread_s():
    document = kineto()
    document["traceEvents"] += [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "thread 0 (python)"}},
        event("python_function", "app/log.py(300): writer", 1_700_000_000_000_000.0, 100, pid=0, tid=0),
        event("cpu_op", "aten::mm", 1_700_000_000_000_000.0, 100, tid=4290336512)]
    document["traceEvents"].append(
        {"ph": "M", "name": "thread_name", "pid": 100, "tid": 4290336512, "args": {"name": "thread 0 (python)"}})
    trace = read(document)
    assert {line.name: role(line.name) for line in trace.lines if line.gpu < 0} == {
        "thread 1 (python)": "main", "other Python threads": "pool", "thread 0 (python)": "main"}


def span(phase: str, name: str, ts: float, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "ts": ts, "pid": 7, "tid": 1, **more}


@pytest.mark.parametrize(("events", "cause"), [
    ([span(phase, "AllReduce", ts, id=0, cat="COLL") for phase, ts in (("b", 0.0), ("e", 9.5))], "NCCL's profiler"),
    ([span(phase, "step 1", ts, id="0x1", cat="request") for phase, ts in (("b", 1.0), ("n", 2.0), ("e", 9.0))],
     r"asynchronous spans \(3 events, such as \"step 1\"\)"),
    ([span("B", "NEGOTIATE_ALLREDUCE", 1.0), span("X", "2", 2.0, dur=0), span("E", "", 3.0)], "a Horovod timeline"),
    ([span("B", "op", 1.0), span("E", "op", 3.0)], r'"B" and "E"'),
], ids=["nccl", "asynchronous", "horovod", "begins and ends"])
def test_a_file_without_a_complete_event_is_refused_by_what_it_has(events, cause):
    with pytest.raises(NoDataError, match=cause) as error:
        read({"traceEvents": events})
    assert "nsys profile" in error.value.fix
    with pytest.raises(NoDataError, match=cause):
        read(events)


def test_a_dump_of_nccl_that_is_no_json_from_the_second_event_on_is_no_damaged_file():
    text = ('[\n{"name": "Group API", "cat": "GROUP_API", "ph": "b", "id": 0, "pid": 7, "tid": 1, "ts": 1.5},\n'
            '{"name": "KernelLaunch", "ph": "b", "id": 0, "ts": 0.0, "args": {"Stream": 0x5020000567d0}},\n{}]')
    with pytest.raises(NoDataError, match="NCCL's profiler plugin"):
        read_chrome([("nccl.json", [text.encode()])])


def test_asynchronous_spans_next_to_complete_events_are_left_out():
    document = kineto()
    usual = len(read(document).host)
    document["traceEvents"] += [span("b", "request", 0.0, id=1), span("e", "request", 9.0, id=1), span(["b"], "x", 0.0)]
    assert len(read(document).host) == usual


def test_ops_that_early_pytorch_timed_on_the_gpu_are_no_kernels_and_no_ops_of_the_host():
    rows = [("CPU functions", 10), ("CUDA functions", 90)]
    trace = read([{"name": "aten::conv2d", "ph": "X", "ts": 1000.0, "dur": dur, "tid": 1, "pid": pid, "args": {}}
                  for pid, dur in rows])
    assert not len(trace.device) and (trace.host.end_ns - trace.host.start_ns).tolist() == [10_000]
    assert [note.id for note in trace.quality] == ["lost_kernels"]


def test_a_tool_that_names_neither_processes_nor_categories():
    """Three events a round, as a tool on CUPTI writes them: what only a GPU does makes a row a stream."""
    names = ("[MEMCPY] HtoD", "void at::native::vectorized_elementwise_kernel<4, Mul>(int, Mul)", "[MEMCPY] DtoH")
    spans = [{"ph": "X", "name": name, "ts": 1000 * i + 100 * k, "dur": 90, "pid": 1, "tid": 7, "args": {}}
             for i in range(3) for k, name in enumerate(names)]
    trace = read_chrome([("a.json", [json.dumps(spans).encode()])])
    assert len(trace.gpus) == 1 and trace.device.kind.tolist() == [Kind.H2D, Kind.COMPUTE, Kind.D2H] * 3
    # A call of the host on the same row, or the row's name, says that it is none.
    called = [*spans, {**spans[0], "name": "cudaLaunchKernel"}]
    named = [*spans, {"ph": "M", "name": "thread_name", "pid": 1, "tid": 7, "args": {"name": "python"}}]
    for events in (called, named):
        assert not read_chrome([("a.json", [json.dumps(events).encode()])]).gpus
