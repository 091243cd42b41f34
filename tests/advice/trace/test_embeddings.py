"""Embedding tables whose gradients, updates or reads are as large as the table."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gputop.diagnosis.diagnose import analyze
from gputop.trace.model import HloOp
from tests.advice.trace.traces import STEP, STEPS, abstained, findings, verdict
from tests.trace.build import Builder

ID = "embedding_dense"
ROWS, WIDTH, LOOKED_UP, REST = 1_000_000, 64, 4_096, 16_000_000
TABLE = ROWS * WIDTH
ENGINE = "autograd::engine::evaluate_function: "
GEMM = "ampere_bf16_s16816gemm_bf16_64x64_sliced1x2_ldg8_f2f_stages_64x6_tn"
ADAM = "void at::native::multi_tensor_apply_kernel<Metadata<4>, FusedAdamMathFunctor<float>>(int)"
FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)"


def training(gpu: bool = True, tied: bool = False, indices: int = LOOKED_UP, shapes: bool = True,
             optimizer: float = 6_000.0, fill: float = 2_000.0) -> Builder:
    """Steps of 20 ms: 8 of a model, 2 of the table's gradient, and the optimizer: four fifths of it the table's."""
    b = Builder(gpus=int(gpu))
    for i in range(STEPS):
        t = i * STEP
        model, table, of_optimizer = (t + 20, 8_000.0), (t + 9_000, fill), (t + 12_000, optimizer)
        sizes: dict[str, Any] = {"table_rows": ROWS, "table_elements": TABLE, "indices": indices} if shapes else {}
        b.host(f"ProfilerStep#{i}", t, STEP - 1)
        b.host("aten::linear", t + 10, 8_500)
        b.host(f"{ENGINE}EmbeddingBackward0", t + 8_900, 2_700, line="backward")
        b.host("aten::embedding_dense_backward", t + 8_950, 2_100, line="backward", **sizes)
        if tied:
            b.host("aten::add", t + 11_200, 100, line="backward")
        for at, elements in ((t + 8_800, REST), (t + 11_650, TABLE)):
            b.host("torch::autograd::AccumulateGrad", at, 20, line="backward",
                   **({"elements": elements} if shapes else {}))
        b.host("Optimizer.step#Adam.step", t + 11_800, 200 + optimizer)
        for (start, length), name, thread in ((model, GEMM, "python"), (table, FILL, "backward"),
                                              (of_optimizer, ADAM, "python")):
            if gpu:
                b.run(0, start, length, name, launch=start - 5, launch_length=4, thread=thread)
                b.host("cudaStreamSynchronize", start, length + 5, line=thread)
    return b


@pytest.mark.parametrize("gpu", [True, False])
def test_a_table_that_is_updated_as_a_whole(gpu: bool) -> None:
    v = verdict(training(gpu), ID)
    assert (v.rows, v.width) == (ROWS, WIDTH)
    assert v.used == pytest.approx(LOOKED_UP / ROWS) and v.tables_part == pytest.approx(0.8)
    expected = (2.0e-3, 4.8e-3) if gpu else (2.1e-3, 0.8 * 6.2e-3)
    assert (v.backward_s, v.optimizer_s) == pytest.approx(expected, rel=1e-3)
    assert v.share == pytest.approx(sum(expected) * (1 - v.used) / 20e-3, rel=0.01)
    f = findings(training(gpu))[ID]
    assert f.gain.step_time == pytest.approx(v.share, abs=0.02)
    assert "SparseAdam" in (f.snippet or "") and "0%" not in f.title


@pytest.mark.parametrize("job", [
    training(tied=True),  # the output layer's gradient is dense
    training(indices=ROWS // 2), training(optimizer=400.0, fill=500.0)])
def test_a_table_that_needs_its_gradient_or_that_costs_little(job: Builder) -> None:
    assert verdict(job, ID) is None


def test_without_shapes_or_the_scatters_zeros_nothing_is_said() -> None:
    assert "record_shapes=True" in abstained(training(shapes=False))[ID]
    assert ID not in findings(training(shapes=False))
    job = of_jax("zeros", gpu=True, scatter=HloOp(f"{BACK}/scatter-add", "train.py:9", (), BYTES + 135_168, "fusion"),
                 gather=HloOp("jit(step)/jvp()/gather", "train.py:9", (), 270_336, "fusion"))
    v = verdict(job, ID).tables
    assert v.table_bytes == BYTES and v.used == pytest.approx(1024 / 1e6, rel=0.06)


@pytest.mark.parametrize("kernel", [
    "triton_poi_fused_embedding_dense_backward_15", "triton_poi_fused_embedding_dense_backward_nll_loss_forward_22",
    "void at::native::(anonymous namespace)::compute_grad_weight<float, long>(long const*, float const*, long)",
    "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float, float, long>(long const*)"])
def test_kernels_of_a_tables_gradient_without_its_op_tell_no_sizes(kernel: str) -> None:
    def job(optimizer: float) -> Builder:
        b = Builder(format="chrome")
        for i in range(STEPS):
            t = i * STEP
            b.host(f"ProfilerStep#{i}", t, STEP - 1).host("aten::linear", t + 10, 100)
            b.run(0, t + 20, 12_000, GEMM, launch=t + 15, thread="python")
            b.run(0, t + 12_100, 200, kernel, launch=t + 40, thread="python")
            b.run(0, t + 12_400, optimizer, ADAM, launch=t + 60, thread="python")
        return b

    assert "sizes of embedding tables" in abstained(job(6_000.0))[ID] and ID not in findings(job(6_000.0))
    assert ID not in abstained(job(100.0))


# TensorFlow: the ops of a table and their times (ms), as captures of Keras 3 jobs with a million rows of 64 have them.
LOOKUP, READ = "functional_1/items_1/GatherV2", "functional_1/items_1/GatherV2/ReadVariableOp"
GATHER = {f"{LOOKUP}:GatherV2": 0.5, f"{READ}:ReadVariableOp": 0.01}
SUMS = {"adam/UnsortedSegmentSum:UnsortedSegmentSum": 10.0, "adam/UnsortedSegmentSum_1:UnsortedSegmentSum": 10.0}
OF_ADAM = {"adam/Sub_2:Sub": 9.0, "adam/Sqrt_1:Sqrt": 12.0, "adam/Mul_3:Mul": 11.0, "adam/truediv_1:RealDiv": 6.0,
           "adam/AssignAddVariableOp:AssignAddVariableOp": 11.0,
           "adam/AssignAddVariableOp_1:AssignAddVariableOp": 11.0, "adam/AssignSubVariableOp:AssignSubVariableOp": 8.0}
OF_A_LAYER = {"adam/AssignAddVariableOp_2:AssignAddVariableOp": 0.2, "adam/Mul_7:Mul": 0.1,
              "adam/AssignSubVariableOp_1:AssignSubVariableOp": 0.1}
SCATTER = {"sgd_1/ResourceScatterSub:ResourceScatterSub": 0.3, "sgd_1/AssignSubVariableOp:AssignSubVariableOp": 0.1}
MODEL = {"functional_1/tower_1/MatMul:MatMul": 9.0}


def of_tensorflow(*parts: dict[str, float], gpu: bool = False) -> Builder:
    """Steps of 100 ms with these ops (ms) one after the other, on the CPU or as kernels of a GPU."""
    b, step = Builder(gpus=int(gpu)), 100_000.0
    for i in range(12):
        begin = i * step
        b.host("EagerExecute", begin, step - 100, is_func=1, eager_op="__inference_multi_step_on_iterator_42")
        b.host("FunctionRun", begin, step - 100)
        start = begin + 1_000
        for op, length_ms in (pair for part in parts for pair in part.items()):
            length = 1e3 * length_ms
            if gpu:
                b.run(0, start, length, "EigenMetaKernel", launch=start - 10, op=op)
            else:
                b.host(f"StatefulPartitionedCall/{op}", start, length, line="tf_executor")
            start += length + 20
    return b


@pytest.mark.parametrize("gpu", [True, False])
def test_an_optimizer_of_tensorflow_that_goes_over_whole_tables(gpu: bool) -> None:
    job = of_tensorflow(GATHER, MODEL, SUMS, OF_ADAM, OF_A_LAYER, gpu=gpu)
    found = verdict(job, ID)
    v = found.tables
    assert v.lookups == ("functional_1/items_1",) and v.optimizers == ("adam",)
    assert v.gradients_s == pytest.approx(20e-3, rel=0.01)
    assert v.optimizer_s == pytest.approx(1e-3 * sum(OF_ADAM.values()), rel=0.01)
    assert v.used == pytest.approx(0.05, rel=0.01) and v.copies_s == 0
    assert found.share == pytest.approx((20 + sum(OF_ADAM.values())) * 0.95 / 100, rel=0.02)
    f = findings(job)[ID]
    assert "LazyAdam" in (f.snippet or "") and "functional_1/items_1" in f.why and "updated" in f.title
    assert f.gain.estimate != gpu  # without a GPU the fix frees CPUs and memory for the rest of the step


def test_a_lookup_that_copies_the_table_and_large_variables_that_are_no_tables() -> None:
    job = of_tensorflow({**GATHER, f"{READ}:ReadVariableOp": 28.0}, MODEL, SCATTER)
    v = verdict(job, ID).tables
    assert v.copies_s == pytest.approx(28e-3, rel=0.01) and v.gradients_s == v.optimizer_s == 0
    f = findings(job)[ID]
    assert "copied" in f.title and "embedding_lookup" in (f.snippet or "") and "LazyAdam" not in (f.snippet or "")
    # Keras' Adagrad updates rows, and computes their steps from the whole table.
    passes = {"sgd_1/IsNan:IsNan": 30.0, "sgd_1/Sqrt:Sqrt": 20.0}
    v = verdict(of_tensorflow({**GATHER, f"{READ}:ReadVariableOp": 28.0}, MODEL, SCATTER, passes), ID).tables
    assert v.optimizer_s == pytest.approx(50e-3, rel=0.01)
    dense = {name.replace(":", "_9:"): length for name, length in OF_ADAM.items()}
    v = verdict(of_tensorflow(GATHER, SUMS, OF_ADAM, dense), ID).tables
    assert v.mixed and v.optimizer_s == 0 and v.gradients_s == pytest.approx(20e-3, rel=0.01)
    assert "Other variables" in findings(of_tensorflow(GATHER, SUMS, OF_ADAM, dense))[ID].why
    # Rows are read with a copy, and a dense layer is as large as the table.
    copied = {**GATHER, f"{READ}:ReadVariableOp": 12.0}
    updated = {**SCATTER, "sgd_1/AssignSubVariableOp_1:AssignSubVariableOp": 12.0, "sgd_1/Mul:Mul": 12.0}
    assert verdict(of_tensorflow(copied, updated), ID).tables.optimizer_s == 0


@pytest.mark.parametrize("parts", [
    (GATHER, MODEL, OF_ADAM),  # dense layers alone
    (MODEL, SUMS, OF_ADAM),  # sums without a lookup: nothing names a table
    ({**GATHER, f"{LOOKUP}:GatherV2": 4.0}, SUMS, OF_ADAM),  # a small table, most of whose rows are in use
    (GATHER, dict.fromkeys(SUMS, 0.05), OF_ADAM),  # a table far smaller than the dense layers
    (GATHER, MODEL, SCATTER),  # rows are read and updated
    (GATHER, SUMS, OF_ADAM, {"adam/Unique:Unique": 0.1}),  # sums of rows that were looked up twice, not of a table
    (GATHER, {name.replace("adam", "gradient_tape/loss"): length for name, length in SUMS.items()}, OF_ADAM),
])
def test_other_work_of_tensorflow_is_no_table(parts: tuple[dict[str, float], ...]) -> None:
    assert verdict(of_tensorflow(*parts), ID) is None


# JAX: ops of a program, the bytes that they must move and their times (ms), as captures of a job with a table of a
# million rows of 32 floats, 1,024 of which are looked up, have them.
BYTES = 128_000_000
BACK = "jit(step)/transpose(jvp())"
PROGRAM = {
    "gather": (HloOp("jit(step)/jvp()/gather", "train.py:9", (), 266_240, "fusion"), 0.2),
    "zeros": (HloOp(f"{BACK}/broadcast_in_dim", "train.py:9", (), BYTES + 4, "fusion"), 10.0),
    "scatter": (HloOp(f"{BACK}/scatter-add", "train.py:9", (), 2 * BYTES + 135_168, "fusion"), 1.0),
    "moment": (HloOp("jit(step)/add", "train.py:15", (), 3 * BYTES, "fusion"), 20.0),
    "update": (HloOp("jit(step)/add", "train.py:16", (), 4 * BYTES + 8, "fusion"), 25.0),
    "layer": (HloOp("jit(step)/add", "train.py:16", (), 12_582_912, "fusion"), 3.0),
    "dot": (HloOp(f"{BACK}/dot_general", "train.py:8", (("fp32", 2e9),), 12_582_912, "dot"), 30.0)}


def of_jax(*without: str, gpu: bool, **changed: HloOp) -> Builder:
    """Steps of 100 ms with these ops one after the other, on the CPU or as kernels of a GPU."""

    class Compiled(Builder):
        def build(self, shuffle: int | None = None) -> Any:
            trace = Builder.build(self, shuffle)
            trace.hlo_ops = [changed.get(name, op) for name, (op, _) in PROGRAM.items()]
            if gpu:
                numbers = {name: number for number, name in enumerate(PROGRAM)}
                trace.device.hlo = np.array([numbers.get(trace.names[i], -1) for i in trace.device.name], np.int32)
            return trace

    b = Compiled(gpus=int(gpu))
    for i in range(12):
        begin = i * 100_000.0
        b.host("PjitFunction(step)", begin, 99_000)
        start = begin + 100
        for number, (name, (_, length_ms)) in enumerate(PROGRAM.items()):
            if name in without:
                continue
            length = 1e3 * length_ms
            if gpu:
                b.run(0, start, length, name, launch=start - 20)
            else:
                b.host(name, start, length, "tf_XLAEigen/1", hlo=number, hlo_module="jit_step")
            start += length + 20
    return b


@pytest.mark.parametrize("gpu", [True, False])
def test_a_program_of_xlas_that_updates_a_table_as_a_whole(gpu: bool) -> None:
    found = verdict(of_jax(gpu=gpu), ID)
    v = found.tables
    assert v.table_bytes == pytest.approx(BYTES, rel=1e-6) and v.used == pytest.approx(1024 / 1e6, rel=0.05)
    assert v.gradients_s == pytest.approx(11e-3, rel=0.01) and v.optimizer_s == pytest.approx(45e-3, rel=0.01)
    assert found.share == pytest.approx(0.56, rel=0.01)
    f = findings(of_jax(gpu=gpu))[ID]
    assert "jax.grad" in (f.snippet or "") and "less than 1%" in f.title
    assert "train.py:9" in {text for culprit in f.culprits for text in (culprit.name, culprit.source)}


@pytest.mark.parametrize("job", [
    of_jax("zeros", "scatter", "moment", "update", gpu=True),  # only rows are updated
    of_jax(gpu=True, scatter=HloOp("jit(step)/scatter-add", "train.py:9", (), 2 * BYTES + 135_168, "fusion")),
    of_jax(gpu=True, dot=HloOp("jit(step)/dot_general", "train.py:8", (("fp32", 2e9),), BYTES + 10_000, "dot")),  # tied
    of_jax(gpu=True, scatter=HloOp(f"{BACK}/scatter-add", "", (), 3 * BYTES, "fusion")),  # most rows are in use
    of_jax("moment", "update", "zeros", "gather", gpu=True),  # nothing shows how large the table is
])
def test_other_programs_of_xlas_update_no_table_as_a_whole(job: Builder) -> None:
    assert verdict(job, ID) is None


def test_a_real_job_of_jax_with_a_table() -> None:
    """The ops over the table by the file's own names and bytes, counted by hand: 32 floats of 200,000 rows."""
    path = Path(__file__).parents[2] / "data" / "jax_embedding.xplane.pb.gz"
    assert gzip.decompress(path.read_bytes())
    result = analyze([str(path)])
    f = next(f for f in result.findings if f.id == ID)
    assert f.evidence["table_bytes"] == pytest.approx(200_000 * 32 * 4, rel=1e-3)
    assert f.evidence["used_rows_ratio"] == pytest.approx(1024 / 200_000, rel=0.06)
