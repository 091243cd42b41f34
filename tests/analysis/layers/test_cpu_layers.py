"""Phases and layers of jobs without a GPU, by the ops that their CPU runs."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gputop.analysis.layers.cpu_layers import cpu_layers
from gputop.analysis.layers.tree import COMPILED, EAGER, EXECUTOR, NO_OP_RUNS, NO_PROGRAM
from gputop.analysis.results import LayerRow, Layers
from gputop.diagnosis.diagnose import analyze
from gputop.diagnosis.report import text_report
from gputop.trace.model import HloOp, Trace
from tests import xspace_messages as messages
from tests.trace.build import Builder

DATA = Path(__file__).resolve().parents[2] / "data"


def paths(table: Layers | None) -> dict[str, LayerRow]:
    assert table is not None and table.gpus == 0
    out, found = {}, []
    for row, parent in zip(table.rows, table.parents, strict=True):
        found.append(row.name if parent is None else f"{found[parent]}|{row.name}")
        out[found[-1]] = row
    return out


def test_ops_side_by_side_share_the_time_and_nested_ones_count_once() -> None:
    b = Builder(gpus=0)
    b.host("net/a/MatMul:MatMul", 0, 100, line="tf_Compute/1").host("net/b/MatMul:MatMul", 50, 100, line="tf_Compute/2")
    b.host("gradient_tape/net/a/While:While", 200, 50, line="tf_Compute/1")
    b.host("gradient_tape/net/a/Mul:Mul", 210, 20, line="tf_Compute/1")
    b.host("IteratorGetNext:IteratorGetNext", 0, 300, line="tf_data_iterator_get_next/7")  # the input pipeline's
    rows = paths(cpu_layers(b.build(), None))
    assert rows["forward|net|a/MatMul"].device_s == pytest.approx(75e-6)
    assert rows["forward|net|b/MatMul"].device_s == pytest.approx(75e-6)
    assert rows["backward"].device_s == pytest.approx(50e-6) and rows["backward"].kernels == 2
    assert rows["backward|net/a|Mul"].device_s == pytest.approx(20e-6)
    assert rows[NO_OP_RUNS].wait_s == pytest.approx(50e-6) and rows[NO_OP_RUNS].reason


def xla(*, program: bool = True) -> Trace:
    """A loop whose body ends on another thread than it began on, and a product beside it."""
    b = Builder(gpus=0)
    one, two = "tf_XLAEigen/1", "tf_XLAEigen/2"
    b.host("while.1", 0, 5, line=one, hlo=0, hlo_module="f", ends_with=1).host("end: while.1", 99, 1, line=two, ended=1)
    b.host("dot.2", 10, 10, line=one, hlo=1, hlo_module="f", ends_with=2).host("end: dot.2", 89, 1, line=two, ended=2)
    b.host("fusion.3", 40, 25, line=one, hlo=2, hlo_module="f", ends_with=3)  # ends with its own event
    trace = b.build()
    if program:
        trace.hlo_ops = [HloOp("jit(f)/while", "", None, None, "while"),
                         HloOp("jit(f)/jvp(Net)/Dense_0/dot_general", "train.py:7", (("fp32", 6e6),), 400, "dot"),
                         HloOp("jit(f)/transpose(jvp(Net))/Dense_0/mul", "train.py:8", (), 40, "fusion")]
    else:
        rows, values = trace.host.stats["hlo"]
        trace.host.stats["hlo"] = rows, values * 0 - 1
    return trace


def test_an_op_of_xla_lasts_until_its_end_is_told_and_a_loop_is_its_body() -> None:
    table = cpu_layers(xla(), None)
    rows = paths(table)
    assert rows["forward"].device_s == pytest.approx((80 - 12.5) * 1e-6) and rows["forward"].flops == 6e6
    assert rows["backward"].device_s == pytest.approx(12.5e-6) and rows["backward"].bytes == 40
    assert table is not None and table.sources is not None
    assert [line.line for line in table.sources] == ["train.py:7", "train.py:8"]
    assert table.total_s == pytest.approx(80e-6)
    unknown = paths(cpu_layers(xla(program=False), None))
    assert unknown[NO_PROGRAM].device_s == pytest.approx(80e-6) and unknown[NO_PROGRAM].reason


def test_what_names_no_layer_has_its_own_row() -> None:
    b = Builder(gpus=0)
    b.host("EagerExecute", 0, 10, eager_op="Conv2D").host("EagerExecute", 20, 10, eager_op="MatMul")
    rows = paths(cpu_layers(b.build(), None))
    assert rows[EAGER].kernels == 2 and rows[f"{EAGER}|Conv2D"].device_s == pytest.approx(10e-6)
    call = "ExecutorState::ProcessAsync::Start"
    b = Builder(gpus=0).host(call, 0, 90, line="tf_Compute/1", name="StatefulPartitionedCall")
    rows = paths(cpu_layers(b.build(), None))
    assert rows[COMPILED].device_s == pytest.approx(90e-6) and "jit_compile" in rows[COMPILED].reason


@pytest.mark.parametrize(("executor", "shown"), [("ExecutorState::Process", True), ("ThunkExecutor::Execute", True),
                                                 ("EagerKernelExecute", False)])
def test_an_executor_without_an_op_is_no_time_in_which_none_runs(executor: str, shown: bool) -> None:
    """A call also lasts while its function waits for a batch; and functions of tf.data have executors, too."""
    b = Builder(gpus=0).host("net/a/MatMul:MatMul", 0, 60, line="tf_Compute/1")
    b.host("net/b/MatMul:MatMul", 140, 60, line="tf_Compute/2").host(executor, 50, 70, line="tf_Compute/1")
    b.host("ExecutorState::Process", 60, 80, line="tf_data_iterator_resource/3")
    rows = paths(cpu_layers(b.build(), None))
    assert (EXECUTOR in rows) == shown and rows[NO_OP_RUNS].wait_s == pytest.approx(20e-6 if shown else 80e-6)
    assert not shown or (rows[EXECUTOR].device_s == pytest.approx(60e-6) and rows[EXECUTOR].reason)


def test_ops_of_pytorch_without_length_do_not_count() -> None:
    """In whole microseconds an allocation begins where the op around it ends."""
    b = Builder(gpus=0)
    for i in range(4):
        b.host("aten::conv2d", 100 * i, 60).host("aten::empty", 100 * i + 60, 0)
    table = cpu_layers(b.build(), None)
    assert {row.name: row.kernels for row in table.rows if row.kernels} == {"forward": 4, "aten::conv2d": 4}


@pytest.mark.parametrize("own_thread", [False, True])
def test_a_backward_pass_on_the_loop_s_own_thread_is_not_all_that_runs_there(own_thread: bool) -> None:
    """On the CPU PyTorch's engine runs the functions on the thread that called backward()."""
    b = Builder(gpus=0)
    engine = "autograd" if own_thread else "python"
    for i in range(4):
        at = 1000 * i
        b.host("aten::randn", at, 100).host("aten::linear", at + 100, 300, sequence=2 * i)
        b.host("autograd::engine::evaluate_function: AddmmBackward0", at + 500, 400, line=engine, sequence=2 * i)
        b.host("aten::mm", at + 510, 300, line=engine)
    rows = paths(cpu_layers(b.build(), None))
    assert rows["forward"].device_s == pytest.approx(1.6e-3) and rows["forward|aten::linear"].kernels == 4
    assert rows["backward"].device_s == pytest.approx(1.2e-3)


def test_a_model_that_runs_in_the_optimizers_call_is_no_part_of_the_update() -> None:
    """As Lightning's, which hands the optimizer a closure."""
    b = Builder(gpus=0)
    for i in range(4):
        at = 1000 * i
        b.host("Optimizer.step#Adam.step", at, 950, annotation=1).host("aten::linear", at + 100, 300, sequence=2 * i)
        b.host("autograd::engine::evaluate_function: AddmmBackward0", at + 500, 100, sequence=2 * i)
        b.host("aten::mm", at + 510, 80).host("aten::add_", at + 700, 200)
    rows = paths(cpu_layers(b.build(), None))
    assert rows["forward|aten::linear"].kernels == rows["optimizer|Adam.step/aten::add_"].kernels == 4
    assert "backward|AddmmBackward0" in rows and "backward|Adam.step" not in rows


def test_ops_with_which_the_loop_makes_its_batch_are_no_forward_pass() -> None:
    b = Builder(gpus=0)
    for i in range(4):
        at = 1000 * i
        b.host("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, 500, annotation=1)
        b.host("nn.Module: Resize_0", at + 50, 350).host("aten::conv2d", at + 100, 300)
        b.host("aten::stack", at + 420, 60).host("aten::linear", at + 600, 300, sequence=i)
    rows = paths(cpu_layers(b.build(), None))
    assert rows["forward"].kernels == rows["input|Resize_0/aten::conv2d"].kernels == 4
    assert rows["input"].device_s == pytest.approx(1.44e-3) and "num_workers=0" in rows["input"].reason


def test_traces_with_a_gpu_or_without_ops_have_no_such_table() -> None:
    assert cpu_layers(Builder().run(0, 0, 10).host("a/x:MatMul", 0, 10, line="tf_Compute/1").build(), None) is None
    assert cpu_layers(Builder(gpus=0).host("some call", 0, 10).build(), None) is None
    assert cpu_layers(Builder(gpus=0).host("a/x:MatMul", 5, 0).build(), None) is None, "of no length"


def counted(data: bytes) -> tuple[dict[str, float], float]:
    """Seconds of each op in a whole file, of those side by side each its part, and their sum: protobuf's own parser,
    and one edge after the other. For executors' ops on threads of TensorFlow's."""
    space = messages.XSpace.FromString(data)
    edges: list[tuple[int, int, tuple[int, int]]] = []
    names = {}
    for plane in space.planes:
        for number, line in enumerate(plane.lines):
            if line.name.startswith("tf_Compute/"):
                for event in line.events:
                    name = plane.event_metadata[event.metadata_id].name
                    if ":" in name.rsplit("/", 1)[-1] and "::" not in name and " " not in name and event.duration_ps:
                        begin = line.timestamp_ns * 1000 + event.offset_ps
                        key = number, len(edges)
                        names[key] = name
                        edges += [(begin, 1, key), (begin + event.duration_ps, 0, key)]
    edges.sort()
    out: dict[str, float] = defaultdict(float)
    running: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for (at, starts, key), (until, *_) in pairwise(edges):
        if starts:
            running[key[0]].append(key)
        else:
            running[key[0]].remove(key)
        threads = [stack[-1] for stack in running.values() if stack]
        for innermost in threads:
            out[names[innermost]] += (until - at) / len(threads) / 1e12
    return dict(out), sum(out.values())


@pytest.mark.parametrize("file", ["keras2_tf215", "keras3_fast", "keras3_slow_input"])
def test_real_keras_jobs_have_their_layers_and_the_step_adds_up(file: str) -> None:
    path = DATA / f"{file}.xplane.pb.gz"
    found = analyze(path)
    table = found.cpu_layers
    rows = paths(table)
    assert found.layers is None and found.limits is None and table is not None and table.basis == "step"
    roots = [row for row in table.rows if row.parent is None]
    assert sum(row.share for row in roots) == pytest.approx(1)
    assert sum(row.device_s + row.wait_s for row in roots) == pytest.approx(table.total_s, rel=1e-6)
    for i, row in enumerate(table.rows):
        below = [r.device_s for r in table.rows if r.parent == i]
        assert not below or sum(below) == pytest.approx(row.device_s)
    assert rows["forward"].device_s < rows["backward"].device_s and rows["optimizer"].device_s > 0
    dense = [row for path, row in rows.items() if path.count("|") == 2 and "dense" in row.name]
    assert len(dense) >= 6, "forward and backward of three layers"
    assert "CPU time" in text_report(found)


@pytest.mark.parametrize("file", ["keras2_tf215", "keras3_fast"])
def test_times_are_those_of_the_events_counted_another_way(file: str) -> None:
    from gputop.trace.readers.load import load

    path = DATA / f"{file}.xplane.pb.gz"
    by_op, whole = counted(gzip.decompress(path.read_bytes()))
    table = cpu_layers(load([str(path)]), None)
    rows = paths(table)
    of_python = rows[EAGER].device_s if EAGER in rows else 0.0  # ops that no executor's thread ran
    roots = [row.device_s for row in rows.values() if row.parent is None and row.name != EXECUTOR]
    assert sum(roots) - of_python == pytest.approx(whole, rel=1e-4)
    of_backward = sum(time for name, time in by_op.items() if "gradient_tape/" in name)
    assert rows["backward"].device_s == pytest.approx(of_backward, rel=1e-4)


_JOB = """
import glob, json, sys
import numpy as np, tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2
L = tf.keras.layers

def trained(out, compiled):
    tf.keras.backend.clear_session()
    model = tf.keras.Sequential([
        L.Input((16, 16, 8)), L.Conv2D(16, 3, padding="same", name="conv_small"),
        L.Conv2D(64, 3, padding="same", name="conv_large"), L.GlobalAveragePooling2D(), L.Dense(32)])
    model.compile("adam", "mse", jit_compile=compiled)
    x, y = np.ones((32 * 6, 16, 16, 8), "f"), np.zeros((32 * 6, 32), "f")
    model.fit(x, y, batch_size=32, verbose=0)
    tf.profiler.experimental.start(out, tf.profiler.experimental.ProfilerOptions(host_tracer_level=2))
    model.fit(x, y, batch_size=32, verbose=0)
    tf.profiler.experimental.stop()
    file, = glob.glob(out + "/plugins/profile/*/*.xplane.pb")
    space = xplane_pb2.XSpace.FromString(open(file, "rb").read())
    count = {}
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                meta = plane.event_metadata[event.metadata_id].name
                if "conv_large" in meta and ":" in meta or meta.startswith("convolution"):
                    count[meta] = count.get(meta, 0) + 1
    return {"file": file, "count": count}

print(json.dumps({mode: trained(sys.argv[1] + "/" + mode, mode == "jit") for mode in ("graph", "jit")}))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model that TensorFlow's executor runs ("graph"), and the same compiled ("jit"): its trace, and how often the
    large convolution's ops ran."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, "-c", _JOB, str(tmp_path_factory.mktemp("trained"))], env=env,
                          capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    documents: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return documents


def products(size: int, in_: int, out: int) -> float:
    """FLOPs of a 3x3 convolution with padding: of a row of places the outer two lack one of three neighbors."""
    return 2.0 * 32 * in_ * out * (3 * size - 2) ** 2


@pytest.mark.tensorflow
def test_a_real_keras_model_compiled_by_xla_has_the_flops_of_its_layers(trained: dict[str, Any]) -> None:
    found = analyze(trained["jit"]["file"])
    rows = {path.replace("_1", ""): row for path, row in paths(found.cpu_layers).items()}
    small, large = products(16, 8, 16), products(16, 16, 64)

    def flops(phase: str, layer: str) -> float:
        own = [row.flops or 0.0 for path, row in rows.items()
               if path.startswith(phase) and path.split("|")[-1].split("/")[0] == layer]
        return max(own, default=0.0)

    assert flops("forward", "conv_small") == pytest.approx(small)
    assert flops("forward", "conv_large") == pytest.approx(large)
    # Of the input no gradient is wanted, of everything else two.
    assert flops("backward", "conv_small") == pytest.approx(small)
    assert flops("backward", "conv_large") == pytest.approx(2 * large)
    assert large == 8 * small


@pytest.mark.tensorflow
def test_a_real_keras_model_run_by_the_executor_has_each_op_once_per_step(trained: dict[str, Any]) -> None:
    document = trained["graph"]
    found = analyze(document["file"])
    rows = paths(found.cpu_layers)
    assert found.steps is not None
    forward = next(row for path, row in rows.items() if path.startswith("forward|") and "conv_large" in row.name)
    backward = next(row for path, row in rows.items() if path.startswith("backward|") and "conv_large" in row.name)
    runs = {name.rsplit("/", 1)[-1].split(":")[0]: number for name, number in document["count"].items()}
    assert set(runs.values()) == {6}, "TensorFlow's own proto: each op ran in each of the six steps"
    of_backward = ["gradient" in name for name in document["count"]]
    assert forward.kernels == pytest.approx(of_backward.count(False), abs=0.01)
    # The products for the input and the filter; the sum for the bias is an op of its own where oneDNN does not fuse it.
    assert backward.kernels == pytest.approx(of_backward.count(True), abs=0.01) and sum(of_backward) in (2, 3)
    assert forward.device_s > 0 and backward.device_s > 0
