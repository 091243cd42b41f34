"""Phases and modules of PyTorch's kernels, by the calls around their launches."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from gputop.analysis.gpu.device_time import timelines
from gputop.analysis.layers.cpu_layers import cpu_layers
from gputop.analysis.layers.culprits import Events, named_events
from gputop.analysis.layers.layers import layer_times
from gputop.analysis.layers.pytorch import call_scopes
from gputop.analysis.layers.scopes import Scope
from gputop.analysis.layers.tree import NO_CALL, NO_OP_RUNS
from gputop.timeline.rows import layer_spans
from gputop.trace.intervals import coverage, union
from gputop.trace.model import Kind, Trace
from gputop.trace.readers.load import load
from tests.diagnosis.real_traces import facts_of, files_of, needs_data, trace_of

DATA = Path(__file__).resolve().parents[2] / "data"
AUTOGRAD = "autograd::engine::evaluate_function: "


class Kineto:
    """A file of PyTorch's profiler: calls on the main thread (1) and on autograd's (2), a kernel for each launch."""

    def __init__(self) -> None:
        self.events: list[dict] = []

    def call(self, name: str, begin: float, end: float, tid: int = 1, cat: str = "cpu_op", **args: object) -> Kineto:
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": tid, "ts": begin, "dur": end - begin,
                            "args": args})
        return self

    def launch(self, at: float, tid: int = 1, name: str = "gemm", duration: int = 5) -> Kineto:
        number = len(self.events)
        self.events += [
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": tid, "ts": at, "dur": 1,
             "args": {"correlation": number}},
            {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": at + 2, "dur": duration,
             "args": {"correlation": number, "device": 0, "stream": 7}}]
        return self

    def load(self, folder: Path) -> Trace:
        path = folder / "rank0.pt.trace.json"
        path.write_text(json.dumps({"traceEvents": self.events}))
        return load([path])


def step(kineto: Kineto) -> Kineto:
    """A module in a module, a loss, its backward pass with a block that is computed again, and the update."""
    kineto.call("ProfilerStep#3", 0, 1000, cat="user_annotation")
    kineto.call("## forward ##", 0, 300, cat="user_annotation")
    kineto.call("my block", 5, 200, cat="user_annotation")
    kineto.call("nn.Module: Net_0", 10, 200, cat="python_function")
    kineto.call("torch/nn/modules/linear.py(125): forward", 15, 100, cat="python_function")
    kineto.call("nn.Module: Linear_0", 20, 100, cat="python_function")
    kineto.call("aten::linear", 30, 90)
    kineto.call("aten::addmm", 40, 80).launch(50)
    kineto.call("aten::relu", 110, 130).launch(120)
    kineto.call("aten::cross_entropy_loss", 210, 240).launch(220)
    kineto.call(AUTOGRAD + "AddmmBackward0", 300, 350, tid=2)
    kineto.call("AddmmBackward0", 302, 340, tid=2)
    kineto.call("aten::mm", 305, 330, tid=2).launch(310, tid=2)
    kineto.call(AUTOGRAD + "CheckpointFunctionBackward", 400, 600, tid=2)
    kineto.call("nn.Module: Linear_0", 410, 450, tid=2, cat="python_function")
    kineto.call("aten::linear", 415, 445, tid=2).launch(420, tid=2)
    kineto.call(AUTOGRAD + "MulBackward0", 500, 550, tid=2).launch(510, tid=2)
    kineto.call("Optimizer.step#Adam.step", 700, 800, cat="user_annotation")
    kineto.call("aten::_foreach_add_", 710, 730).launch(715).launch(900)
    return kineto


EXPECTED = [
    Scope("forward", ("my block", "Net_0", "Linear_0", "aten::linear")),
    Scope("forward", ("my block", "Net_0", "aten::relu")),
    Scope("loss", ("aten::cross_entropy_loss",)), Scope("backward", ("AddmmBackward0",)),
    Scope("recomputation", ("my block", "Net_0", "Linear_0", "aten::linear")), Scope("backward", ("MulBackward0",)),
    Scope("optimizer", ("Adam.step", "aten::_foreach_add_")), None]


@pytest.mark.parametrize(("marked", "phase"), [(True, "other ops"), (False, "forward")])
def test_what_is_outside_of_a_marked_forward_pass_is_none_of_it(tmp_path: Path, marked: bool, phase: str) -> None:
    kineto = Kineto()
    if marked:
        kineto.call("## forward ##", 0, 100, cat="user_annotation")
    kineto.call("aten::mm", 10, 90).launch(50)
    kineto.call("next batch", 200, 300, cat="user_annotation")
    kineto.call("aten::to", 210, 290).launch(250)
    kineto.call("nn.Module: Net_0", 400, 500, cat="python_function")
    kineto.call("aten::mm", 410, 490).launch(450)
    found = call_scopes(kineto.load(tmp_path))
    assert [found.scopes[i] for i in found.of_event.tolist()] == [
        Scope("forward", ("aten::mm",)), Scope(phase, ("next batch", "aten::to")),
        Scope("forward", ("Net_0", "aten::mm"))]


def test_a_trace_without_modules_says_how_to_record_them(tmp_path: Path) -> None:
    def reason(kineto: Kineto) -> str:
        trace = kineto.load(tmp_path)
        times = layer_times(trace, timelines(trace), None)
        return next(row.reason for row in times.table.rows if row.name == "forward")

    without = Kineto().call("aten::mm", 0, 50).launch(10)
    assert "with_modules=True" in reason(without) and not reason(step(Kineto()))


def test_each_launch_has_its_phase_and_place(tmp_path: Path) -> None:
    found = call_scopes(step(Kineto()).load(tmp_path))
    assert [found.scopes[i] if i >= 0 else None for i in found.of_event.tolist()] == EXPECTED


@pytest.mark.parametrize(("modules", "path"), [(("A_0",), ("A_0", "MmBackward0")), (("A_0", "B_0"), ("MmBackward0",))])
def test_a_number_of_several_threads_links_nothing(tmp_path: Path, modules: tuple[str, ...], path: tuple) -> None:
    kineto, number = Kineto(), {"Sequence number": 5}
    for tid, module in zip((1, 3), modules, strict=False):
        kineto.call(f"nn.Module: {module}", 0, 50, tid=tid, cat="python_function")
        kineto.call("aten::mm", 10, 40, tid=tid, **number)
    kineto.call(AUTOGRAD + "MmBackward0", 100, 150, tid=2, **number).launch(110, tid=2)
    assert call_scopes(kineto.load(tmp_path)).scopes == [Scope("backward", path)]


def test_a_function_of_the_users_own_is_the_op_of_its_gradient(tmp_path: Path) -> None:
    """As torch.compile's CompiledFunction; ops before it that need no gradient have its sequence number, too."""
    kineto, number = Kineto(), {"Sequence number": 5}
    kineto.call("Optimizer.zero_grad#SGD.zero_grad", 0, 20, cat="user_annotation")
    kineto.call("aten::zero_", 5, 15, **number)
    kineto.call("nn.Module: Net_0", 30, 90, cat="python_function")
    kineto.call("CompiledFunction", 40, 80, **number)
    kineto.call(AUTOGRAD + "CompiledFunctionBackward", 100, 150, tid=2, **number)
    kineto.call("CompiledFunctionBackward", 105, 145, tid=2, **number).launch(110, tid=2)
    assert call_scopes(kineto.load(tmp_path)).scopes == [Scope("backward", ("Net_0", "CompiledFunctionBackward"))]


def test_the_table_and_the_rows_of_the_timeline_have_them(tmp_path: Path) -> None:
    trace = step(Kineto()).load(tmp_path)
    times = layer_times(trace, timelines(trace), None)
    roots = {row.name: row for row in times.table.rows if row.parent is None}
    assert list(roots) == ["forward", "loss", "backward", "recomputation", "optimizer", NO_CALL]
    assert roots["forward"].device_s == pytest.approx(10e-6) and roots[NO_CALL].reason
    assert sum(row.device_s + row.wait_s for row in roots.values()) == pytest.approx(times.table.total_s)
    spans = layer_spans(trace, None)
    assert [spans.names[i] for i, deep in zip(spans.name, spans.depth, strict=True) if not deep] == [
        "forward", "loss", "backward", "recomputation", "backward", "optimizer"]


def test_a_loop_without_gradients_has_no_loss_and_other_traces_no_calls(tmp_path: Path) -> None:
    without = Kineto().call("aten::mse_loss", 0, 50).launch(10)
    assert call_scopes(without.load(tmp_path)).scopes == [Scope("forward", ("aten::mse_loss",))]
    assert call_scopes(Kineto().launch(10).load(tmp_path)) is None


def recorded_modules(*, kernels: bool) -> Kineto:
    kineto = Kineto()
    recorded = json.loads(gzip.decompress((DATA / "pytorch_modules.pt.trace.json.gz").read_bytes()))["traceEvents"]
    for event in recorded:
        kineto.call(event["name"], event["ts"], event["ts"] + event["dur"], event["tid"], event["cat"],
                    **event.get("args", {}))
    for event in sorted(recorded, key=lambda event: event["ts"]) if kernels else ():
        if event["name"] in ("aten::addmm", "aten::mm"):
            kineto.launch(event["ts"] + event["dur"] / 2, event["tid"], duration=1)
    return kineto


def test_culprits_are_modules_forward_and_backward_together(tmp_path: Path) -> None:
    trace = recorded_modules(kernels=True).load(tmp_path)
    rows = np.arange(len(trace.device))
    everything = union([0], [trace.window_ns[1] + 1])
    found = named_events(trace, Events(rows), everything, 1, "step", [0], call_scopes(trace))
    names = [culprit.name for culprit in found]
    assert set(names) == {"Net_0/Block_0/*", "Net_0/Block_1/*", "Net_0/head of the model/Linear_4/*"}
    assert sum(culprit.time_s or 0.0 for culprit in found) == pytest.approx(len(rows) * 1e-6)
    assert all(culprit.at_s is not None for culprit in found)


def test_a_cpu_s_ops_have_their_modules(tmp_path: Path) -> None:
    trace = recorded_modules(kernels=False).load(tmp_path)
    table = cpu_layers(trace, None)
    assert table is not None and table.gpus == 0
    roots = {row.name: row for row in table.rows if row.parent is None}
    assert list(roots) == ["forward", "loss", "backward", "recomputation", "optimizer", NO_OP_RUNS]
    assert sum(row.device_s + row.wait_s for row in roots.values()) == pytest.approx(table.total_s)
    names = trace.names
    forward = [row for row in range(len(trace.host)) if names[trace.host.name[row]] == "aten::linear"]
    assert roots["forward"].kernels + roots["recomputation"].kernels >= len(forward)
    assert any(row.name.startswith("Block_0") for row in table.rows)


def test_collectives_of_the_cpu_beside_which_no_op_runs_are_a_row(tmp_path: Path) -> None:
    kineto = Kineto().call("aten::linear", 0, 100).call("aten::mm", 300, 400)
    kineto.call("gloo:all_reduce", 50, 290, tid=7, cat="user_annotation")
    table = cpu_layers(kineto.load(tmp_path), None)
    assert table is not None
    waits = {row.name: row.wait_s for row in table.rows if row.parent is None and row.wait_s}
    assert waits == {"collectives": pytest.approx(190e-6), NO_OP_RUNS: pytest.approx(10e-6)}


def test_before_1_9_autograd_s_functions_have_bare_names(tmp_path: Path) -> None:
    kineto = Kineto().call("aten::conv2d", 0, 50).launch(10)
    kineto.call("CudnnConvolutionBackward", 100, 150, tid=2)
    kineto.call("aten::cudnn_convolution_backward", 105, 145, tid=2).launch(110, tid=2)
    found = call_scopes(kineto.load(tmp_path))
    assert found is not None and [found.scopes[i] for i in found.of_event.tolist()] == [
        Scope("forward", ("aten::conv2d",)), Scope("backward", ("CudnnConvolutionBackward",))]


def test_the_modules_of_a_model_that_pytorch_profiled(tmp_path: Path) -> None:
    """Recorded by PyTorch 2.15 on a CPU (``with_stack``, ``with_modules``): two blocks of two linear layers, the second
    one checkpointed, a head in a ``record_function``. Each product is given a kernel, as a GPU would have."""
    found = call_scopes(recorded_modules(kernels=True).load(tmp_path))
    scopes = [found.scopes[i] for i in found.of_event.tolist()]
    linear = "aten::linear"
    assert scopes[:5] == [Scope("forward", ("Net_0", *path, linear)) for path in (
        ("Block_0", "Linear_0"), ("Block_0", "Linear_1"), ("Block_1", "Linear_2"), ("Block_1", "Linear_3"),
        ("head of the model", "Linear_4"))]
    again = [Scope("recomputation", ("Net_0", "Block_1", name, linear)) for name in ("Linear_2", "Linear_3")]
    back = [Scope("backward", (*path, "AddmmBackward0")) for path in (
        ("Net_0", "head of the model", "Linear_4"), ("Net_0", "Block_1", "Linear_3"), ("Net_0", "Block_1", "Linear_2"),
        ("Net_0", "Block_0", "Linear_1"), ("Net_0", "Block_0", "Linear_0"))]
    of_input_and_weight = [scope for scope in back for _ in range(2)]
    assert scopes[5:] == [*of_input_and_weight[:2], *again, *of_input_and_weight[2:]]


@needs_data
def test_a_real_job_spends_its_time_where_its_own_marks_say() -> None:
    """By another way: what autograd's thread launched is backward; the job itself marks its update."""
    (path,) = files_of("v100")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    launches = {e["args"]["correlation"]: e for e in events
                if e.get("cat") == "cuda_runtime" and "correlation" in e.get("args", {})}
    updates = [e for e in events if e.get("cat") == "user_annotation" and e["name"] == "## optimizer ##"]
    facts = facts_of("v100")
    device, table, steps = facts.trace.device, facts.analysis.layers, facts.steps
    assert table is not None and steps is not None
    marked = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)
    times = coverage(steps.spans, device.start_ns, device.end_ns) / steps.count / 1e9
    for number, kind, time_s in zip(device.correlation.tolist(), device.kind.tolist(), times.tolist(), strict=True):
        if kind in (Kind.COMPUTE, Kind.D2D, Kind.MEMSET):
            launch = launches[number]
            update = any(u["ts"] <= launch["ts"] < u["ts"] + u["dur"] for u in updates)
            phase = "backward" if launch["tid"] != updates[0]["tid"] else "optimizer" if update else "forward"
            marked[phase] += time_s
    roots = {row.name: row for row in table.rows if row.parent is None}
    assert sum(row.device_s + row.wait_s for row in roots.values()) == pytest.approx(table.total_s, rel=1e-9)
    told = {phase: roots[phase].device_s for phase in marked}
    told["forward"] += roots["loss"].device_s
    assert told == pytest.approx(marked, rel=0.003)


def ddp(kineto: Kineto, linears: list[tuple[str, list[int], int | None]], at: int = 0, sequence: int = 9,
        message: str = "nccl:all_reduce") -> Kineto:
    """The backward pass of these layers, each a name, its weight's shape, and how many elements a bucket that its
    gradient fills has (None: it fills none)."""
    for i, (module, shape, bucket) in enumerate(linears):
        begin, number = at + 1000 * i, sequence - i
        if module:
            kineto.call("nn.Module: Net_0", at - 900 + 10 * i, at - 892 + 10 * i, cat="python_function")
            kineto.call(f"nn.Module: {module}", at - 899 + 10 * i, at - 893 + 10 * i, cat="python_function")
        kineto.call("aten::addmm", at - 898 + 10 * i, at - 895 + 10 * i, **{"Sequence number": number})
        kineto.call(AUTOGRAD + "AddmmBackward0", begin, begin + 200, tid=2, **{"Sequence number": number})
        kineto.call(AUTOGRAD + "TBackward0", begin + 200, begin + 250, tid=2)
        kineto.call(AUTOGRAD + "torch::autograd::AccumulateGrad", begin + 300, begin + 600, tid=2)
        kineto.call("torch::autograd::AccumulateGrad", begin + 310, begin + 350, tid=2,
                    **({"Input Dims": [shape]} if shape else {}))
        if bucket is not None:
            kineto.call(message, begin + 400, begin + 500, tid=2, cat="user_annotation",
                        **({"Input Dims": [[bucket]]} if bucket else {}))
            kineto.launch(begin + 410, tid=2, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL")
    return kineto


def reduced(trace: Trace) -> list[tuple[str, ...]]:
    calls = call_scopes(trace)
    assert calls is not None
    return [calls.scopes[i].path for i in calls.of_event[trace.device.kind == Kind.COLLECTIVE].tolist()]


@pytest.mark.parametrize(("layers", "names"), [
    ([("Linear_2", [4, 3], None), ("Linear_1", [2], 14), ("Linear_0", [5], 5)],
     [("bucket 1: gradients in Linear_1, Linear_2",), ("bucket 2: gradients in Net_0/Linear_0",)]),
    ([("", [], None), ("", [], 0), ("", [], 0)],
     [("bucket 1: gradients of 2 AddmmBackward0",), ("bucket 2: gradients of 1 AddmmBackward0",)]),
    # Two models side by side: the second one's bucket is full first.
    ([("", [4, 3], None), ("", [7], 7), ("", [5], 17)],
     [("bucket 1: gradients of 1 AddmmBackward0",), ("bucket 2: gradients of 2 AddmmBackward0",)]),
    # What does not add up is not told.
    ([("", [4, 3], None), ("", [2], 99)], [("torch::autograd::AccumulateGrad",)]),
])
def test_a_collective_of_ddp_is_named_by_the_gradients_it_reduces(
    tmp_path: Path, layers: list, names: list[tuple[str, ...]],
) -> None:
    assert reduced(ddp(Kineto(), layers, at=1000).load(tmp_path)) == names


def test_each_backward_pass_counts_its_buckets_and_keeps_its_gradients(tmp_path: Path) -> None:
    passed = ddp(Kineto(), [("", [], None)], at=1000)  # accumulated without a reduction
    ddp(passed, [("", [], 0), ("", [], 0)], at=5000, sequence=20)
    ddp(passed, [("", [], 0)], at=9000, sequence=30)
    one = "gradients of 1 AddmmBackward0"
    assert reduced(passed.load(tmp_path)) == [(f"bucket {n}: {one}",) for n in (1, 2, 1)]


@pytest.mark.parametrize(("shapes", "path"), [(True, "gradients of 1 AddmmBackward0"),
                                              (False, "torch::autograd::AccumulateGrad")])
def test_of_a_pass_that_had_begun_before_the_trace_only_sizes_tell(tmp_path: Path, shapes: bool, path: str) -> None:
    begun = ddp(Kineto(), [("", [5], 5 if shapes else 0)], at=1000)
    begun.events = [event for event in begun.events if event["tid"] != 1 or event["ts"] > 1000]  # without its forward
    assert reduced(begun.load(tmp_path)) == [(path,)]


@needs_data
def test_buckets_of_a_real_job_have_the_sizes_of_their_gradients() -> None:
    """ResNet-50: the first bucket is the classifier's weight and bias, the second that of layer4's last five
    convolutions and their norms, by the shapes of the model."""
    trace = trace_of("a100")
    first, second = 2048 * 1000 + 1000, 3 * 2048 * 512 + 2 * 512 * 512 * 9 + 2 * (2 * 2048 + 3 * 512)
    names = dict(zip(reduced(trace), (trace.device.bytes[trace.device.kind == Kind.COLLECTIVE] / 4).tolist(),
                     strict=True))
    assert names[("bucket 1: gradients of 2 AddmmBackward0",)] == first
    assert names[("bucket 2: gradients of 10 CudnnBatchNormBackward0, 5 ConvolutionBackward0",)] == second
    assert sum(size for (name, *_), size in ((path or ("",), size) for path, size in names.items())
               if name.startswith("bucket")) == 25_557_032
