"""Work of an op of a program: FLOPs of its matrix products and convolutions, and bytes it must move.

A multiplication and an addition are 2 FLOPs. Element-wise arithmetic is not counted: it is bound by the bytes. What an
unknown custom call does is not known. A convolution is counted as ``xla::HloCostAnalysis`` does (openxla/xla,
``xla/service/hlo_cost_analysis.cc``): products with padding, and with the holes that dilation leaves, are none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from gputop.core.codec import parse
from gputop.trace.model import HloOp
from gputop.trace.readers.xspace.hlo import Instruction, Program, Shape, SpatialWindow
from gputop.trace.readers.xspace.hlo_updates import after_gradient

# Ops that are no kernel of their own: what they call is.
_CONTAINERS = frozenset({"while", "conditional", "async-start", "async-done", "async-update"})
_SLICES = frozenset({"slice", "dynamic-slice", "gather"})
_WITHOUT_PRODUCTS = ("__cub$",)  # sorts
_MAX_DEPTH = 8  # of calls in calls
_MAX_PAIRS = 1 << 22  # of positions along one dimension of a convolution
_MAX_BYTES = 1 << 50

Flops = Mapping[str, float] | None  # by the type of the operands; None: not known


def hlo_op(program: Program, name: str) -> HloOp | None:
    """Scope, source line and work of the instruction with this name; None where the program lacks it."""
    op = program.named(name)
    if op is None:
        return None
    flops = _flops(program, op, 0)
    name, source = program.metadata(op)
    if "/" not in name and (other := program.made_for(op)) is not None:  # none, or an argument's
        name, near = program.metadata(other)
        source = source or near
    return HloOp(name, source, None if flops is None else tuple(sorted(flops.items())), _bytes(program, op), op.opcode,
                 after_gradient(program, op))


# -- FLOPs -------------------------------------------------------------------------------------------------------------


def _flops(program: Program, op: Instruction, depth: int) -> Flops:
    if op.opcode in ("fusion", "call"):
        return _flops_of_body(program, op.called[0] if op.called else -1, depth)
    if op.opcode in _CONTAINERS:
        return None
    shapes = [program.shape(i) for i in op.operands]
    flops: float | None
    if op.opcode == "dot":
        flops = _dot(program.shape(op.id), shapes, program.contracted(op))
    elif op.opcode == "convolution":
        flops = _convolution(program, op, shapes, "")
    elif op.opcode == "custom-call":
        target = program.target(op)
        if target.startswith(_WITHOUT_PRODUCTS):
            return {}
        flops = _custom_call(program, op, shapes, target)
    else:
        return {}
    return {shapes[0].dtype: float(flops)} if flops is not None and shapes else None


def _flops_of_body(program: Program, body: int, depth: int) -> Flops:
    if body not in program.bodies or depth > _MAX_DEPTH:
        return None
    if body not in program.flops:
        program.flops[body] = None
        total: dict[str, float] = {}
        for op in program.bodies[body][1]:
            flops = _flops(program, op, depth + 1)
            if flops is None:
                return None
            for dtype, number in flops.items():
                total[dtype] = total.get(dtype, 0.0) + number
        program.flops[body] = total
    return program.flops[body]


def _dot(result: Shape, shapes: Sequence[Shape], contracted: Sequence[int] | None) -> float | None:
    if contracted is None or len(shapes) < 2:
        return None
    left = shapes[0].dimensions
    if not all(0 <= i < len(left) for i in contracted):
        return None
    return 2.0 * result.array.elements * math.prod(left[i] for i in contracted)


def _custom_call(program: Program, op: Instruction, shapes: Sequence[Shape], target: str) -> float | None:
    if target.startswith("__cudnn$conv"):
        return _convolution(program, op, shapes, target)
    config = _json(program.config(op))
    if target.startswith("__cublas$"):
        numbers = _at(config, "gemm_backend_config", "dot_dimension_numbers")
        contracted = _integers(_at(numbers, "lhs_contracting_dimensions")) if isinstance(numbers, dict) else None
        return _dot(program.shape(op.id), shapes, contracted)
    if target.startswith("__cudnn$fmha"):
        return _attention(shapes, _at(config, "cudnn_fmha_backend_config"), backward="Backward" in target)
    return None


def _attention(shapes: Sequence[Shape], config: object, *, backward: bool) -> float | None:
    """cuDNN's fused attention: two products forward, five backward (the scores are computed again), by the shape of
    the scores (batch, heads, queries, keys) and the size of a head. A causal mask leaves half of them."""
    scores = _integers(_at(config, "intermediate_tensor_shape", "dimensions"))
    if scores is None or len(scores) != 4 or not shapes or not all(scores):
        return None
    head = shapes[0].elements / math.prod(scores[:3])
    part = 0.5 if "CAUSAL" in str(_at(config, "mask_type")) else 1.0
    return (5 if backward else 2) * 2.0 * math.prod(scores) * head * part


def _convolution(program: Program, op: Instruction, shapes: Sequence[Shape], target: str) -> float | None:
    convolution = program.convolution(op)
    if convolution is None or len(shapes) < 2:
        return None
    dims, windows = convolution
    result = program.shape(op.id).array
    # cuDNN's backward calls have the dimensions of the forward convolution.
    input_, kernel, output = ((result, shapes[1], shapes[0]) if "BackwardInput" in target else
                              (shapes[0], result, shapes[1]) if "BackwardFilter" in target else
                              (shapes[0], shapes[1], result))
    input_axes = (*dims.input_spatial, dims.input_batch, dims.input_feature)
    if not (_within(input_axes, input_) and _within((*dims.output_spatial, dims.output_feature), output)
            and _within(dims.kernel_spatial, kernel)
            and len(windows) == len(dims.input_spatial) == len(dims.output_spatial) == len(dims.kernel_spatial)):
        return None
    groups, batch_groups = program.groups(op)
    products = (input_.dimensions[dims.input_feature] / groups * output.dimensions[dims.output_feature]
                * input_.dimensions[dims.input_batch] / batch_groups)
    for window, i, o in zip(windows, dims.input_spatial, dims.output_spatial, strict=True):
        pairs = _pairs(window, input_.dimensions[i], output.dimensions[o])
        if pairs is None:
            return None
        products *= pairs
    return 2.0 * products


def _within(axes: Sequence[int], shape: Shape) -> bool:
    return all(0 <= i < len(shape.dimensions) for i in axes)


def _pairs(window: SpatialWindow, inputs: int, outputs: int) -> int | None:
    """Number of times, along one dimension, that a position of the window meets an element of the input."""
    if not 0 < window.size * outputs <= _MAX_PAIRS:
        return None
    element = (np.arange(outputs)[:, None] * window.stride + np.arange(window.size) * window.dilation
               - window.padding_low)
    meets = (element >= 0) & (element % window.base_dilation == 0) & (element // window.base_dilation < inputs)
    return int(meets.sum())


def _json(text: bytes) -> object:
    try:
        return parse(text) if text.startswith(b"{") else None
    except ValueError:
        return None


def _at(document: object, *keys: str) -> object:
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def _integers(values: object) -> list[int] | None:
    """Integers that protobuf's JSON writes as text."""
    if not isinstance(values, list) or not all(isinstance(v, str) and v.isdecimal() and len(v) < 13 for v in values):
        return None
    return [int(v) for v in values]


# -- bytes -------------------------------------------------------------------------------------------------------------


def _bytes(program: Program, op: Instruction) -> int | None:
    """Bytes that the op must read and write at least, each once: of what is sliced or updated in place only that
    part."""
    if op.opcode in _CONTAINERS:
        return None
    result = program.shape(op.id)
    if op.opcode in ("fusion", "call") and op.called and op.called[0] in program.bodies:
        return _bytes_of_body(program, op, result)
    if op.opcode in _SLICES:
        return min(2 * result.bytes, _MAX_BYTES)
    if op.opcode == "dynamic-update-slice":
        return min(2 * _written(program, op.id), _MAX_BYTES)
    written = result.array if op.opcode == "custom-call" else result
    return min(written.bytes + sum(program.shape(i).bytes for i in set(op.operands)), _MAX_BYTES)


def _bytes_of_body(program: Program, op: Instruction, result: Shape) -> int | None:
    root, body = program.bodies[op.called[0]]
    program.steps.left -= len(body)
    if program.steps.left < 0:
        return None
    parameters = {inside.id: inside.parameter for inside in body if inside.opcode == "parameter"}
    read: dict[int, list[int | None]] = {}  # of each operand what every use of it reads; None: all of it
    for inside in body:
        for operand, id_ in enumerate(inside.operands):
            if id_ in parameters:
                part = None
                if operand == 0 and inside.opcode in _SLICES:
                    part = program.shape(inside.id).bytes
                elif operand == 0 and inside.opcode == "dynamic-update-slice":
                    part = 0
                read.setdefault(parameters[id_], []).append(part)
    total = _written(program, root) if program.instruction(root) is not None else result.bytes
    for number, id_ in enumerate(op.operands):
        parts = read.get(number, [None])
        whole = program.shape(id_).bytes
        total += whole if None in parts else min(sum(part or 0 for part in parts), whole)
    return min(total, _MAX_BYTES)


def _written(program: Program, id_: int, depth: int = 0) -> int:
    """Bytes that the root of a fusion writes."""
    op, whole = program.instruction(id_), program.shape(id_).bytes
    if op is None or depth > _MAX_DEPTH:
        return whole
    if op.opcode == "tuple" and depth == 0:
        return sum(_written(program, i, 1) for i in op.operands)
    if op.opcode == "bitcast" and op.operands:
        return min(_written(program, op.operands[0], depth + 1), whole)
    if op.opcode == "dynamic-update-slice" and len(op.operands) > 1:
        return program.shape(op.operands[1]).bytes
    return whole
