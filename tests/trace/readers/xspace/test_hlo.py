"""Programs in a trace: what XLA wrote of them is read, their work counted, and anything else is not known."""

from __future__ import annotations

import base64
import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest

from gputop.analysis.layers.scopes import scope_of, trainings
from gputop.diagnosis.diagnose import analyze
from gputop.trace.readers.xspace.hlo import ConvolutionDimensions, Instruction, Program, Shape, SpatialWindow
from gputop.trace.readers.xspace.hlo_work import _attention, _convolution, _flops, _integers, _json, hlo_op
from gputop.trace.readers.xspace.reader import read_xspaces
from gputop.trace.readers.xspace.wire import Quota
from tests.trace.readers.xspace.reference import Builder

DATA = Path(__file__).parents[3] / "data"
# The training step of a transformer block whose forward pass is computed again (benchmarks/hlo_flops.py --write).
PROGRAM = gzip.decompress((DATA / "training_step.hlo.gz").read_bytes())
# By name: FLOPs and the program (benchmarks/hlo_flops.py --products).
PRODUCTS = json.loads(gzip.decompress((DATA / "products.hlo.json.gz").read_bytes()))
# Of JAX before and after XLA's optimization for the CPU (benchmarks/hlo_flops.py --blocks).
BLOCKS = json.loads(gzip.decompress((DATA / "blocks.hlo.json.gz").read_bytes()))
TOKENS, MODEL, BATCH = 32, 64, 2
PRODUCT = 2 * BATCH * TOKENS * MODEL * MODEL


def program(data: bytes = PROGRAM, steps: int = 1 << 23) -> Program:
    return Program(data, 0, len(data), Quota(steps))


def test_flops_scopes_and_lines_of_a_real_program() -> None:
    found = {name: op for name in program().ids if (op := hlo_op(program(), name)) is not None}
    dots = {name: op for name, op in found.items() if op.flops}
    scores = 2 * BATCH * TOKENS * TOKENS * MODEL
    assert {sum(n for _, n in op.flops or ()) for op in dots.values()} == {PRODUCT, 4 * PRODUCT, scores}
    assert {dtype for op in dots.values() for dtype, _ in op.flops or ()} == {"fp32"}
    assert any("transpose(jvp(block))" in op.op_name and op.op_name.endswith("mlp/dot_general") for op in dots.values())
    assert any("rematted_computation" in op.op_name for op in dots.values())
    assert all("benchmarks/hlo_flops.py:" in op.source for op in dots.values())
    up = next(op for op in dots.values() if dict(op.flops or ()).get("fp32") == 4 * PRODUCT
              and "transpose" not in op.op_name)
    assert up.bytes in {4 * (BATCH * TOKENS * MODEL + 4 * MODEL * MODEL + BATCH * TOKENS * 4 * MODEL)}


def test_what_predicts_or_shuffles_beside_an_update_is_no_part_of_it() -> None:
    read = program(gzip.decompress((DATA / "rollout.hlo.gz").read_bytes()))
    ops = [op for name in read.ids if (op := hlo_op(read, name)) and op.opcode in (
        "dot", "fusion", "sort", "sign", "cosine")]
    phases: dict[str, set[str]] = {}
    for op, training in zip(ops, trainings(ops, ["rollout"] * len(ops)), strict=True):
        phases.setdefault(scope_of(op.op_name, training).phase, set()).add(op.op_name.partition("closed_call/")[2])
        if "_shuffle" in op.op_name or "_gumbel" in op.op_name:
            assert training is None, op
    assert {"Policy/dot_general", "Policy/tanh", "jvp(Policy)/dot_general"} <= phases["forward"]
    assert "sign" in phases["optimizer"] and not any("Policy" in name for name in phases["optimizer"])
    assert "cos" in phases["other ops"] and "transpose(jvp(Policy))/dot_general" in phases["backward"]
    read = program()
    one_update = [op for name in read.ids if (op := hlo_op(read, name)) is not None]
    assert all(op.after_gradient for op in one_update if op.op_name.endswith("/sub") and "jvp" not in op.op_name)


def test_a_damaged_program_raises_nothing_and_takes_bounded_work() -> None:
    rng = random.Random(1)
    for _ in range(60):
        raw = bytearray(PROGRAM[:rng.randrange(len(PROGRAM))] if rng.random() < 0.3 else PROGRAM)
        for _ in range(rng.randrange(8)):
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        read = program(bytes(raw), 20_000)
        for name in [*read.ids][:50]:
            hlo_op(read, name)
    assert len(program(steps=100).ids) < 20


def dims(shape: Shape, kernel: Shape) -> ConvolutionDimensions:
    return ConvolutionDimensions(0, 3, 3, (1, 2), (0, 1), (1, 2))


class Convolution:
    """Stands for a program with one convolution."""

    def __init__(self, result: Shape, windows: tuple[SpatialWindow, ...], groups: int = 1) -> None:
        self._result, self._windows, self._groups = result, windows, groups

    def shape(self, _: int) -> Shape:
        return self._result

    def convolution(self, _: object) -> object:
        return dims(self._result, self._result), self._windows

    def groups(self, _: object) -> tuple[int, int]:
        return self._groups, 1


class Calls:
    """A program of custom calls."""

    def __init__(self, ops: dict[int, Instruction], target: str) -> None:
        self.ops, self._target = ops, target

    def shape(self, _: int) -> Shape:
        return Shape(11, (4, 4))

    def target(self, _: object) -> str:
        return self._target

    def config(self, _: object) -> bytes:
        return b""


@pytest.mark.parametrize("target", ["", "__cudnn$convForward", "__cudnn$convBackwardInput",
                                    "__cudnn$convBackwardFilter"])
def test_the_three_convolutions_of_a_layer_take_the_same_flops(target: str) -> None:
    image, kernel, out = Shape(16, (4, 9, 9, 6)), Shape(16, (3, 3, 6, 10)), Shape(16, (4, 5, 5, 10))
    window = SpatialWindow(3, 2, 1, 1, 1)
    result = {"__cudnn$convBackwardInput": image, "__cudnn$convBackwardFilter": kernel}.get(target, out)
    operands = {"__cudnn$convBackwardInput": [out, kernel],
                "__cudnn$convBackwardFilter": [image, out]}.get(target, [image, kernel])
    inside = sum(0 <= 2 * o + k - 1 < 9 for o in range(5) for k in range(3))
    op = type("Op", (), {"id": 1})
    fake = Convolution(result, (window, window))
    assert _convolution(fake, op, operands, target) == 2 * 4 * 6 * 10 * inside**2  # type: ignore[arg-type]
    grouped = Convolution(result, (window, window), groups=2)
    assert _convolution(grouped, op, operands, target) == 4 * 6 * 10 * inside**2  # type: ignore[arg-type]


def test_attention_by_the_shape_of_its_scores() -> None:
    query = [Shape(16, (2, 8, 128, 64))]
    config = {"intermediate_tensor_shape": {"dimensions": ["2", "8", "128", "256"]}, "mask_type": "NO_MASK"}
    scores = 2 * 8 * 128 * 256
    assert _attention(query, config, backward=False) == 4 * scores * 64
    assert _attention(query, config, backward=True) == 10 * scores * 64
    assert _attention(query, {**config, "mask_type": "CAUSAL"}, backward=False) == 2 * scores * 64
    assert _attention(query, {}, backward=False) is None
    assert _integers(["1", 2]) is None and _json(b"{" * 100_000) is None and _json(b"\x00") is None


def test_kernels_get_the_op_of_their_own_program() -> None:
    name = next(n for n in program().ids if (op := hlo_op(program(), n)) is not None and op.flops)
    b = Builder()
    meta = b.plane("/host:metadata")
    for id_ in (5, 6):
        entry = meta.event_metadata[id_]
        entry.id, entry.name = id_, f"jit_training_step({id_})"
        if id_ == 6:
            entry.stats.add(metadata_id=1).bytes_value = PROGRAM
    line = b.line("/device:GPU:0", "Stream #1(Kernel)")
    for i, program_id in enumerate((6, 5, 6)):
        b.event("/device:GPU:0", line, "gemm", 100 * i, 50, hlo_op=(name,), hlo_module=("jit_training_step",),
                program_id=program_id)
    trace = read_xspaces([("x", "node", b.bytes())])
    assert trace.device.hlo.tolist() == [0, -1, 0] and len(trace.hlo_ops) == 1
    assert trace.hlo_ops[0].flops and trace.names[trace.device.tf_op[0]] == f"jit_training_step/{name}"
    assert np.all(trace.device.end_ns > trace.device.start_ns)


@pytest.mark.parametrize("name", [*PRODUCTS])
def test_products_of_every_kind_are_as_many_as_their_result_tells(name: str) -> None:
    """Of ones, the sum of the outputs is the number of products; convolutions with both gradients."""
    flops, module = PRODUCTS[name]
    found = program(base64.b64decode(module))
    ops = [hlo_op(found, op) for op in found.ids]
    assert sum(n for op in ops if op is not None for _, n in op.flops or ()) == flops > 0


def taps(size: int, kernel: int, stride: int) -> int:
    """Along one dimension the pairs of an output and a place under the kernel that lies in the image, one by one, with
    XLA's padding to the same size (half of it before, the odd one after)."""
    outputs = (size + stride - 1) // stride
    before = max(0, (outputs - 1) * stride + kernel - size) // 2
    count = 0
    for output in range(outputs):
        for place in range(kernel):
            if 0 <= output * stride - before + place < size:
                count += 1
    return count


def convolution_flops(size: int, kernel: int, stride: int, in_: int, out: int) -> int:
    return 2 * BATCH * taps(size, kernel, stride) ** 2 * in_ * out


CONVOLUTION = convolution_flops(16, 3, 1, 8, 12)
# 3x3 with a stride of two, 3x3, and the shortcut of 1x1 with that stride.
RESNET = convolution_flops(16, 3, 2, 8, 12) + convolution_flops(8, 3, 1, 12, 12) + convolution_flops(16, 1, 2, 8, 12)
# q, k, v and o, the two of four times the width, scores and their product with the values.
TRANSFORMER = 4 * PRODUCT + 2 * 4 * PRODUCT + 2 * 2 * BATCH * TOKENS * TOKENS * MODEL


@pytest.mark.parametrize("optimized", [False, True], ids=["as written", "optimized"])
@pytest.mark.parametrize(("name", "flops"), [
    ("matmul 64 x 128 x 32", 2 * 64 * 128 * 32), ("matmul, gradients of both", 3 * 2 * 64 * 128 * 32),
    ("batched matmul", 4 * 2 * 16 * 8 * 24), ("convolution 3x3", CONVOLUTION),
    ("convolution, all gradients", 3 * CONVOLUTION), ("ResNet block, forward", RESNET),
    # Of each convolution forward, the gradient of its input and that of its kernel take as many.
    ("ResNet block, training", 3 * RESNET), ("transformer block, forward", TRANSFORMER),
    # Forward again but for its last product; no gradient of the block's input through q, k and v.
    ("transformer block, training, recomputed", 4 * TRANSFORMER - 4 * PRODUCT - 3 * PRODUCT),
])
def test_products_of_real_programs_are_those_of_the_mathematics(name: str, flops: int, optimized: bool) -> None:
    found = program(base64.b64decode(BLOCKS[name][optimized]))
    ops = [(found.instruction(id_), hlo_op(found, op)) for op, id_ in found.ids.items()]
    counted = sum(n for instruction, op in ops if op is not None and instruction is not None
                  and instruction.opcode in ("dot", "convolution") for _, n in op.flops or ())
    if name.endswith("recomputed") and optimized:  # XLA for the CPU computes equal products once
        assert 3 * TRANSFORMER - 3 * PRODUCT <= counted < flops
    else:
        assert counted == flops


def test_a_loop_counts_as_often_as_its_body_ran() -> None:
    """Two recorded steps of three blocks in a scan, on a CPU: forward by hand, backward twice as much."""
    found = analyze(DATA / "jax_scan.xplane.pb.gz")
    assert found.cpu_layers is not None and found.cpu_layers.total_s > 0
    roots = {row.name: row for row in found.cpu_layers.rows if row.parent is None}
    block = 6 * PRODUCT * 2 + 4 * BATCH * TOKENS * TOKENS * MODEL  # q, k, v, o and the two of four times the width
    assert roots["forward"].flops == pytest.approx(3 * block) and roots["backward"].flops == pytest.approx(6 * block)
    assert {"forward", "backward", "optimizer"} <= roots.keys()
    assert sum(row.device_s + row.wait_s for row in roots.values()) == pytest.approx(found.cpu_layers.total_s)


def test_what_a_custom_call_does_is_not_known() -> None:
    assert hlo_op(Program(b"", 0, 0, Quota(8)), "x") is None
    calls = Calls({1: Instruction(1, "custom-call", (), (), 0, (0, 0))}, "my_kernel")
    assert _flops(calls, calls.ops[1], 0) is None  # type: ignore[arg-type]
    assert _flops(Calls(calls.ops, "__cub$DeviceRadixSort"), calls.ops[1], 0) == {}  # type: ignore[arg-type]
