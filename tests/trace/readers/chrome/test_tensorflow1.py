"""Timelines of TensorFlow 1 (``tf.RunMetadata``): one file is one ``session.run``, a tid is a row of the drawing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gputop.diagnosis.diagnose import analyze_trace
from gputop.diagnosis.report import short_report
from gputop.trace.lookups import detect_framework
from gputop.trace.model import Kind, Trace
from gputop.trace.readers.chrome.reader import read_chrome
from gputop.trace.threads import EXECUTOR, role

T0 = 1_500_000_000_000_000
ALL, STREAM, COPIES, CPU, GPU = range(1, 6)
PROCESSES = {ALL: "/device:GPU:0/stream:all Compute", STREAM: "/device:GPU:0/stream:13 Compute",
             COPIES: "/device:GPU:0/memcpy Compute", CPU: "/job:localhost/replica:0/task:0/device:CPU:0 Compute",
             GPU: "/job:localhost/replica:0/task:0/device:GPU:0 Compute"}


class Timeline:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in PROCESSES.items()]

    def op(self, pid: int, node: str, op: str, at: float, length: float, row: int = 0) -> Timeline:
        self.events.append({"ph": "X", "cat": "Op", "name": op, "pid": pid, "tid": row, "ts": T0 + at, "dur": length,
                            "args": {"name": node, "op": op, "input0": "before"}})
        return self

    def kernel(self, node: str, op: str, at: float, length: float) -> Timeline:
        self.op(GPU, node, op, at - 30, 25, row=int(at) % 3)
        return self.op(STREAM, node, op, at, length).op(ALL, node, op, at, length)

    def model(self, at: float, layers: int = 40) -> Timeline:
        for i in range(layers):
            self.kernel(f"layer_{i}/Conv2D", "Conv2D", at + 300 * i, 290)
        return self

    def trace(self) -> Trace:
        trace = read_chrome([("timeline.json", [json.dumps({"traceEvents": self.events}).encode()])])
        trace.format = "chrome"
        return trace


@pytest.mark.parametrize(("device", "says"), [
    (GPU, "the GPU work was not recorded"), (CPU, "runs on a GPU, and trace")])
def test_ops_on_a_gpu_without_its_kernels_are_no_work_of_the_cpu(device: int, says: str) -> None:
    timeline = Timeline().op(CPU, "_SOURCE", "NoOp", 0, 1)
    for i in range(40):
        timeline.op(device, f"layer_{i}/MatMul", "MatMul", 100 + 300 * i, 200)
    analysis = analyze_trace(timeline.trace())
    assert says in " ".join(short_report(analysis, 1000).split())
    assert analysis.ops is not None
    assert {op.placement for op in analysis.ops.types} == ({None} if device == GPU else {"host"})


def test_rows_are_of_the_executor_of_a_device_and_kernels_are_counted_once():
    trace = Timeline().op(CPU, "_SOURCE", "NoOp", 0, 1).model(100).op(STREAM, "edge_1", "MEMCPYHtoD", 50, 20).op(
        COPIES, "edge_1", "MEMCPYHtoD", 50, 20).trace()
    assert trace.quality == [] and len(trace.device) == 41 and len(trace.gpus) == 1
    assert trace.device.kind.tolist().count(Kind.H2D) == 1
    threads = [line.name for line in trace.lines if line.gpu < 0]
    assert {name.partition("/")[0] for name in threads} == {"executor of CPU:0", "executor of GPU:0"}
    assert all(role(name) == EXECUTOR for name in threads)
    assert trace.names[trace.device.tf_op[1]] == "layer_0/Conv2D:Conv2D"
    convolutions = trace.device.kind == Kind.COMPUTE  # each is launched by its node
    assert (trace.device.launch_line[convolutions] >= 0).all()


def test_without_streams_what_the_gpus_executor_does_is_no_kernel():
    timeline = Timeline()
    for i in range(20):
        timeline.op(GPU, f"layer_{i}/MatMul", "MatMul", 100 * i, 50)
    assert len(timeline.trace().device) == 0


@pytest.mark.parametrize("op", ["IteratorGetNext", "QueueDequeueManyV2"])
def test_the_file_is_one_step_and_its_wait_for_a_batch_is_named(op):
    trace = Timeline().op(CPU, f"v0/{op}", op, 0, 20_000).model(20_100).trace()
    analysis = analyze_trace(trace)
    assert analysis.steps is not None and analysis.steps.count == 1 and "session.run" in analysis.steps.anchor
    first = analysis.findings[0]
    assert first.id == "input_bound" and first.culprits[0].name == f"{op}Op::DoCompute"
    assert abs(first.evidence["share_ratio"] - 20 / 32) < 0.02 and analysis.launch_threads is None


def test_a_batch_that_is_there_is_no_wait():
    analysis = analyze_trace(Timeline().op(CPU, "IteratorGetNext", "IteratorGetNext", 0, 90).model(150).trace())
    assert not {f.id for f in analysis.findings} & {"input_bound", "time_outside_steps"}
    report = short_report(analysis)
    assert "trace more runs" in report and "gputop capture" not in report


@pytest.mark.parametrize("node", ["hash_table_Lookup", "other_node"])
def test_an_op_on_the_host_holds_up_the_gpu_that_waits_for_the_copy_of_its_result(node: str):
    timeline = Timeline().kernel("embed", "GatherV2", 100, 290)
    timeline.op(CPU, "hash_table_Lookup", "LookupTableFindV2", 400, 9_000)
    for pid in (STREAM, COPIES):
        timeline.op(pid, f"edge_10_{node}", "MEMCPYHtoD", 9_450, 20)
    analysis = analyze_trace(timeline.model(9_500).trace())
    placements = [f for f in analysis.findings if f.id == "host_placement"]
    assert bool(placements) == (node == "hash_table_Lookup")
    for finding in placements:
        assert abs(finding.evidence["host_ops_s"] - 9e-3) < 1e-4 and "LookupTableFindV2 prepares data" in finding.action


@pytest.mark.parametrize(("tries", "what"), [
    (True, "cuDNN autotuning (440 ms)"), (False, "loading of libraries and modules (440 ms)")])
def test_the_first_run_in_which_cudnn_is_loaded_or_chooses_is_a_start(tries: bool, what: str):
    timeline = Timeline().model(460_000).op(GPU, "conv-5/Conv2D", "Conv2D", 0, 440_000)
    for i in range(60 if tries else 1):
        timeline.op(STREAM, "conv-5/Conv2D", "Conv2D", 430_000 - 7_000 * i, 5_000)
    analysis = analyze_trace(timeline.trace())
    assert analysis.steps is not None and analysis.steps.start_up == what
    assert "are only job startup" in short_report(analysis)


@pytest.mark.parametrize(("op", "busy", "loads"), [
    ("MatMul", False, True), ("RandomUniform", False, True), ("_Recv", False, False), ("Unique", True, False)])
def test_the_first_use_of_a_library_by_an_op_is_a_start(op: str, busy: bool, loads: bool):
    """Unless the op receives, or waits for a GPU that works meanwhile."""
    timeline = Timeline().model(460_000).op(GPU, f"dense/{op}", op, 0, 440_000)
    if busy:
        timeline.op(STREAM, "before", "Softmax", 5, 430_000)
    analysis = analyze_trace(timeline.trace())
    assert ("loading of libraries and modules (440 ms)" in analysis.steps.start_up) == loads


def test_runs_that_were_joined_into_one_file_are_steps():
    timeline = Timeline()
    for run in range(6):
        timeline.op(CPU, "_SOURCE", "NoOp", run * 20_000, 1).op(GPU, "_SOURCE", "NoOp", run * 20_000 + 5, 1)
        timeline.model(run * 20_000 + 200)
    analysis = analyze_trace(timeline.trace())
    assert analysis.steps is not None and analysis.steps.count == 5 and abs(analysis.steps.median_s - 0.02) < 1e-3


def test_a_run_over_several_tasks_is_one_step():
    """Each task's part of the graph has a source."""
    timeline = Timeline()
    for task, name in enumerate(("ps/replica:0/task:0", "worker/replica:0/task:0", "worker/replica:0/task:1")):
        pid = len(PROCESSES) + 1 + task
        timeline.events.append({"ph": "M", "name": "process_name", "pid": pid,
                                "args": {"name": f"/job:{name}/device:CPU:0 Compute"}})
        timeline.op(pid, "_SOURCE", "NoOp", 130 * task, 3).op(pid, "MatMul", "MatMul", 5_000 + 130 * task, 700)
    steps = analyze_trace(timeline.trace()).steps
    assert steps is not None and steps.count == 1 and abs(steps.median_s - 5.96e-3) < 1e-5


def test_a_run_that_was_drawn_several_times_is_one_step():
    """As by ``generate_chrome_trace_format`` of several timelines of the same ``step_stats``."""
    timeline = Timeline()
    for _ in range(3):
        timeline.op(CPU, "_SOURCE", "NoOp", 0, 1).op(CPU, "random", "RandomStandardNormal", 10, 700)
    trace = timeline.trace()
    assert detect_framework(trace) == "tensorflow"
    steps = analyze_trace(trace).steps
    assert steps is not None and steps.count == 1


def test_code_of_tensorflow_2_is_called_so():
    timeline = Timeline().op(CPU, "v0/IteratorGetNext", "IteratorGetNext", 0, 20_000).model(20_100)
    snippets = [f.snippet for f in analyze_trace(timeline.trace()).findings if f.snippet]
    assert snippets and all(snippet.startswith("# in TensorFlow 2:\n") for snippet in snippets)


@pytest.mark.parametrize("sparse", [True, False])
def test_an_op_of_the_optimizer_beside_one_that_prepares_data_has_a_fix_of_its_own(sparse: bool):
    timeline = Timeline().kernel("embed", "GatherV2", 100, 290)
    timeline.op(CPU, "hash_table_Lookup", "LookupTableFindV2", 400, 9_000)
    for pid in (STREAM, COPIES):
        timeline.op(pid, "edge_10_hash_table_Lookup", "MEMCPYHtoD", 9_450, 20)
    if sparse:
        timeline.op(GPU, "Adam/update_embed/Unique", "Unique", 9_500, 4_000)
    finding = next(f for f in analyze_trace(timeline.model(13_600).trace()).findings if f.id == "host_placement")
    assert "LookupTableFindV2 prepares data" in finding.action and ("For Unique, " in finding.action) == sparse
