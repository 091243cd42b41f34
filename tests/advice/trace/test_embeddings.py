"""Embedding tables of PyTorch whose gradients and updates are as large as the table."""

from __future__ import annotations

from typing import Any

import pytest

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


def test_without_shapes_nothing_is_said() -> None:
    assert "record_shapes=True" in abstained(training(shapes=False))[ID]
    assert ID not in findings(training(shapes=False))
