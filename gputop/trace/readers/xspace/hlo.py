"""The programs that XLA compiled, as the plane ``/host:metadata`` holds them.

The message is ``xla.HloProto`` (openxla/xla, ``xla/service/hlo.proto`` and ``xla/xla_data.proto``), the optimized
module: its instructions are what kernels name as ``hlo_op``. It is read like any part of a trace: nothing in it is
trusted, and what is malformed, or beyond the fields that are read, is not known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping

from msgspec import Struct

from gputop.trace.limits import cut_text
from gputop.trace.readers.content import Data
from gputop.trace.readers.xspace.wire import LENGTH, VARINT, Fields, Quota, read_fields, read_varint, signed, tag

_MODULE, _COMPUTATION, _STACK_FRAMES = tag(1, LENGTH), tag(3, LENGTH), tag(17, LENGTH)
_INSTRUCTION, _COMPUTATION_ID, _ROOT_ID = tag(2, LENGTH), tag(5, VARINT), tag(6, VARINT)
_NAME, _OPCODE, _SHAPE, _METADATA = (tag(n, LENGTH) for n in (1, 2, 3, 7))
_PARAMETER, _GROUPS, _BATCH_GROUPS, _ID = (tag(n, VARINT) for n in (9, 50, 58, 35))
_WINDOW, _CONVOLUTION, _TARGET, _DOT, _OPERANDS, _CALLED, _CONFIG = (
    tag(n, LENGTH) for n in (15, 16, 28, 30, 36, 38, 43))
_INSTRUCTION_FIELDS = (_NAME, _OPCODE, _PARAMETER, _ID, _OPERANDS, _CALLED)
_PLANE_EVENT_METADATA, _MAP_VALUE, _EVENT_NAME, _EVENT_STAT, _STAT_BYTES = (tag(n, LENGTH) for n in (4, 2, 2, 5, 6))
_ELEMENT_TYPE, _DIMENSIONS, _TUPLE_SHAPES = tag(2, VARINT), tag(3, LENGTH), tag(4, LENGTH)
_OP_NAME, _SOURCE_FILE, _SOURCE_LINE, _FRAME = tag(2, LENGTH), tag(3, LENGTH), tag(4, VARINT), tag(15, VARINT)
_FIRST, _SECOND, _THIRD = (tag(n, VARINT) for n in (1, 2, 3))

# xla.PrimitiveType: bits of an element, and the name of those that matrix units multiply.
_BITS = {1: 8, 2: 8, 3: 16, 4: 32, 5: 64, 6: 8, 7: 16, 8: 32, 9: 64, 10: 16, 11: 32, 12: 64, 15: 64, 16: 16, 18: 128,
         19: 8, 20: 8, 21: 4, 22: 4, 23: 8, 24: 8, 25: 8, 28: 8, 29: 8, 33: 8}
_TYPES = {2: "int8", 6: "int8", 10: "fp16", 11: "fp32", 12: "fp64", 16: "bf16",
          **dict.fromkeys((19, 20, 23, 24, 25, 28, 29), "fp8")}
_PROGRAM = re.compile(r"(.{1,2000})\((\d{1,19})\)", re.DOTALL)
_BUILDS_GRAPHS = "/tensorflow/python/"  # TensorFlow tells where it makes an op, not who asked for it
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python")
_MAX_FRAMES, _MAX_DEPTH = 64, 8  # of a stack, of tuples in tuples
_MAX_NEAR = 6  # steps from op to op, and ops looked at in each
_MAX_ELEMENTS = 1 << 50
_MAX_CONFIG_BYTES = 1 << 16


class Shape(Struct, frozen=True):
    """An array's element type (``xla.PrimitiveType``) and dimensions, or the ``parts`` of a tuple."""

    type: int = 0
    dimensions: tuple[int, ...] = ()
    parts: tuple[Shape, ...] = ()

    @property
    def dtype(self) -> str:
        """bf16, fp16, fp32, fp64, fp8, int8; empty for what no matrix unit multiplies."""
        return _TYPES.get(self.type, "")

    @property
    def elements(self) -> int:
        return min(math.prod(self.dimensions), _MAX_ELEMENTS)

    @property
    def bytes(self) -> int:
        array_bytes = -(-self.elements * _BITS.get(self.type, 0) // 8)
        return sum(part.bytes for part in self.parts) if self.parts else array_bytes

    @property
    def array(self) -> Shape:
        """The array itself, or the first of a tuple: custom calls return their result and a work space."""
        return self.parts[0].array if self.parts else self


class Instruction(Struct, frozen=True):
    """An op of a program: ``operands`` are ids of instructions, ``called`` those of computations."""

    id: int
    opcode: str
    operands: tuple[int, ...]
    called: tuple[int, ...]
    parameter: int
    span: tuple[int, int]  # in the data


class SpatialWindow(Struct, frozen=True):
    """One spatial dimension of a convolution (``xla.WindowDimension``)."""

    size: int
    stride: int
    padding_low: int
    dilation: int
    base_dilation: int


class ConvolutionDimensions(Struct, frozen=True):
    """Dimensions of input, kernel and output by their meaning (``xla.ConvolutionDimensionNumbers``)."""

    input_batch: int
    input_feature: int
    output_feature: int
    input_spatial: tuple[int, ...]
    kernel_spatial: tuple[int, ...]
    output_spatial: tuple[int, ...]


def find_programs(data: Data, begin: int, end: int, steps: Quota) -> dict[tuple[str, int], tuple[int, int]]:
    """The programs in a plane ``/host:metadata``, by name and id: where each HloProto lies. Their events are called
    ``name(id)`` and have one stat of bytes."""
    out = {}
    for entry in _spans(read_fields(data, begin, end, (_PLANE_EVENT_METADATA,), steps=steps), _PLANE_EVENT_METADATA):
        value = read_fields(data, *entry, (_MAP_VALUE,), steps=steps).last(_MAP_VALUE)
        if value is None:
            continue
        metadata_fields = read_fields(data, *value, (_EVENT_NAME, _EVENT_STAT), steps=steps)
        name = metadata_fields.last(_EVENT_NAME)
        match = _PROGRAM.fullmatch(data[slice(*name)].decode("utf-8", "replace")) if name else None
        stats = [read_fields(data, *span, (_STAT_BYTES,), steps=steps).last(_STAT_BYTES)
                 for span in _spans(metadata_fields, _EVENT_STAT)]
        proto = next((span for span in stats if span), None)
        if match and proto:
            out[match[1], int(match[2])] = proto
    return out


class Program:
    """A HloProto at ``begin`` … ``end`` of ``data``. ``steps`` bounds the work, of several programs if shared."""

    def __init__(self, data: Data, begin: int, end: int, steps: Quota) -> None:
        self._data, self.steps = data, steps
        self._instructions: dict[int, Instruction] = {}
        self.ids: dict[str, int] = {}  # of instructions, by what kernels call them
        self._shapes: dict[int, Shape] = {}
        self.bodies: dict[int, tuple[int, tuple[Instruction, ...]]] = {}  # computations: id of the root, instructions
        self.flops: dict[int, Mapping[str, float] | None] = {}  # of computations, as far as counted
        self.updating: set[int] | None = None  # ids of what comes after the gradient, once they are known
        module = self._fields(begin, end, (_MODULE,)).last(_MODULE)
        module_fields = self._fields(*module, (_COMPUTATION, _STACK_FRAMES)) if module is not None else None
        for span in _spans(module_fields, _COMPUTATION) if module_fields is not None else ():
            self._read_computation(*span)
        self._users: dict[int, list[Instruction]] | None = None
        self._stack = module_fields.last(_STACK_FRAMES) if module_fields is not None else None
        self._tables: tuple[list[tuple[int, int]], ...] | None = None

    def _fields(self, begin: int, end: int, wanted: Collection[int]) -> Fields:
        return read_fields(self._data, begin, end, wanted, steps=self.steps)

    def _read_computation(self, begin: int, end: int) -> None:
        computation = self._fields(begin, end, (_INSTRUCTION, _COMPUTATION_ID, _ROOT_ID))
        body = []
        for span in _spans(computation, _INSTRUCTION):
            fields = self._fields(*span, _INSTRUCTION_FIELDS)
            instruction = Instruction(
                fields.values.get(_ID, -1), self.text(fields, _OPCODE), self.numbers(fields, _OPERANDS),
                self.numbers(fields, _CALLED), signed(fields.values.get(_PARAMETER, 0)), span)
            self._instructions[instruction.id] = instruction
            self.ids[self.text(fields, _NAME)] = instruction.id
            body.append(instruction)
        self.bodies[computation.values.get(_COMPUTATION_ID, -1)] = computation.values.get(_ROOT_ID, -1), tuple(body)

    def named(self, name: str) -> Instruction | None:
        """The instruction that kernels call ``name``."""
        return self.instruction(self.ids.get(name, -1))

    def instruction(self, id_: int) -> Instruction | None:
        return self._instructions.get(id_)

    def text(self, fields: Fields, field: int) -> str:
        span = fields.last(field)
        return self._data[span[0]:span[1]].decode("utf-8", "replace") if span else ""

    def numbers(self, fields: Fields, field: int) -> tuple[int, ...]:
        """The integers of a packed field."""
        span = fields.last(field)
        return tuple(_varints(self._data, *span)) if span else ()

    def shape(self, id_: int) -> Shape:
        """Shape that the instruction with this id yields."""
        if id_ not in self._shapes:
            instruction = self._instructions.get(id_)
            span = self._part(instruction, _SHAPE) if instruction is not None else None
            self._shapes[id_] = self._read_shape(*span, 0) if span else Shape()
        return self._shapes[id_]

    def _part(self, instruction: Instruction, field: int) -> tuple[int, int] | None:
        return self._fields(*instruction.span, (field,)).last(field)

    def _read_shape(self, begin: int, end: int, depth: int) -> Shape:
        shape = self._fields(begin, end, (_ELEMENT_TYPE, _DIMENSIONS, _TUPLE_SHAPES))
        parts = [self._read_shape(*span, depth + 1) for span in _spans(shape, _TUPLE_SHAPES) if depth < _MAX_DEPTH]
        sizes = tuple(max(signed(n), 0) for n in self.numbers(shape, _DIMENSIONS))
        return Shape(shape.values.get(_ELEMENT_TYPE, 0), sizes, tuple(parts))

    def has(self, instruction: Instruction, word: bytes) -> bool:
        """Return whether the instruction, its name or anything else of it, has this word."""
        return self._data.find(word, *instruction.span) >= 0

    def target(self, instruction: Instruction) -> str:
        return self.text(self._fields(*instruction.span, (_TARGET,)), _TARGET)

    def config(self, instruction: Instruction) -> bytes:
        """The backend's configuration of a custom call: JSON, or whatever the backend wrote."""
        span = self._part(instruction, _CONFIG)
        return bytes(self._data[span[0]:min(span[1], span[0] + _MAX_CONFIG_BYTES)]) if span else b""

    def contracted(self, instruction: Instruction) -> tuple[int, ...] | None:
        """The dimensions of a dot's left operand that it sums over; None where not told."""
        span = self._part(instruction, _DOT)
        return self.numbers(self._fields(*span, (tag(1, LENGTH),)), tag(1, LENGTH)) if span else None

    def groups(self, instruction: Instruction) -> tuple[int, int]:
        """Groups of features and of the batch of a convolution."""
        values = self._fields(*instruction.span, (_GROUPS, _BATCH_GROUPS)).values
        return max(signed(values.get(_GROUPS, 1)), 1), max(signed(values.get(_BATCH_GROUPS, 1)), 1)

    def convolution(self, instruction: Instruction) -> tuple[ConvolutionDimensions, tuple[SpatialWindow, ...]] | None:
        """The dimensions of a convolution and its windows; None where not told."""
        window, dimensions = self._part(instruction, _WINDOW), self._part(instruction, _CONVOLUTION)
        if dimensions is None:
            return None
        one, many = (7, 8, 10), (6, 11, 12)
        dimension_fields = self._fields(*dimensions, (*(tag(n, VARINT) for n in one), *(tag(n, LENGTH) for n in many)))
        number = {n: signed(dimension_fields.values.get(tag(n, VARINT), 0)) for n in one}
        spatial = {n: self.numbers(dimension_fields, tag(n, LENGTH)) for n in many}
        windows = []
        for span in _spans(self._fields(*window, (tag(1, LENGTH),)), tag(1, LENGTH)) if window else ():
            values = self._fields(*span, tuple(tag(n, VARINT) for n in (1, 2, 3, 5, 6))).values
            size, stride, low, dilation, base = (signed(values.get(tag(n, VARINT), d))
                                                 for n, d in ((1, 0), (2, 1), (3, 0), (5, 1), (6, 1)))
            windows.append(SpatialWindow(size, max(stride, 1), low, max(dilation, 1), max(base, 1)))
        return (ConvolutionDimensions(number[7], number[8], number[10], spatial[11], spatial[6], spatial[12]),
                tuple(windows))

    def metadata(self, instruction: Instruction) -> tuple[str, str]:
        """The op's name with its scopes, and ``file:line`` of the source that made it; each empty where not told."""
        span = self._part(instruction, _METADATA)
        if span is None:
            return "", ""
        op_metadata = self._fields(*span, (_OP_NAME, _SOURCE_FILE, _SOURCE_LINE, _FRAME))
        file, line = self.text(op_metadata, _SOURCE_FILE), op_metadata.values.get(_SOURCE_LINE, 0)
        if not file and _FRAME in op_metadata.values:
            file, line = self._source(op_metadata.values[_FRAME])
        file = "" if _BUILDS_GRAPHS in file else file
        return cut_text(self.text(op_metadata, _OP_NAME)), cut_text(f"{file}:{line}") if file else ""

    def made_for(self, instruction: Instruction) -> Instruction | None:
        """The op with scopes in its name for which XLA made one without: the first that uses its result, else that
        whose result it takes. Layouts, copies and convolutions in another form have lost theirs."""
        if self._users is None:
            self._users = {}
            for _, body in self.bodies.values():
                for inside in body:
                    for operand in inside.operands:
                        self._users.setdefault(operand, []).append(inside)
        for ways in (self._used_by, self._made_of):
            near, seen = [instruction], {instruction.id}
            for _ in range(_MAX_NEAR):
                near = [op for op_near in near for op in ways(op_near) if op.id not in seen][:_MAX_NEAR]
                self.steps.left -= len(near) + 1
                if self.steps.left < 0:
                    return None
                seen.update(op.id for op in near)
                for op in near:
                    if "/" in self.metadata(op)[0]:
                        return op
        return None

    def _used_by(self, instruction: Instruction) -> list[Instruction]:
        """Instructions that take the result; of a fusion the ops in it that do, then itself."""
        out = []
        for user in (self._users or {}).get(instruction.id, ())[:_MAX_NEAR]:
            if user.opcode == "fusion" and user.called and user.called[0] in self.bodies:
                operand = user.operands.index(instruction.id)
                taken = [op.id for op in self.bodies[user.called[0]][1]
                         if op.opcode == "parameter" and op.parameter == operand]
                out += [op for id_ in taken for op in (self._users or {}).get(id_, ())[:_MAX_NEAR]]
            out.append(user)
        return out

    def _made_of(self, instruction: Instruction) -> list[Instruction]:
        return [op for id_ in instruction.operands[:_MAX_NEAR] if (op := self.instruction(id_)) is not None]

    def _source(self, frame: int) -> tuple[str, int]:
        """File and line of a stack: its innermost frame that is not a library's, else the innermost."""
        if self._tables is None:
            wanted = tuple(tag(n, LENGTH) for n in (1, 3, 4))
            stack_tables = self._fields(*self._stack, wanted) if self._stack is not None else None
            self._tables = tuple(_spans(stack_tables, t) if stack_tables is not None else [] for t in wanted)
        innermost = "", 0
        files, locations, frames = self._tables
        for _ in range(_MAX_FRAMES):
            values = self._row(frames, frame)
            location = self._row(locations, values.get(_FIRST, 0))
            file = location.get(_FIRST, 0)
            if not 0 < file <= len(files):
                break
            here = self._data[slice(*files[file - 1])].decode("utf-8", "replace"), location.get(_THIRD, 0)
            if not any(library in here[0] for library in _LIBRARIES):
                return here
            innermost = innermost if innermost[0] else here
            frame = values.get(_SECOND, 0)
        return innermost

    def _row(self, table: list[tuple[int, int]], number: int) -> dict[int, int]:
        """The numbers in a row of a table, counted from 1."""
        return self._fields(*table[number - 1], (_FIRST, _SECOND, _THIRD)).values if 0 < number <= len(table) else {}


def _spans(fields: Fields, wanted: int) -> list[tuple[int, int]]:
    begin, end = fields.pairs(wanted, whole=True)
    return list(zip(begin.tolist(), end.tolist(), strict=True))


def _varints(data: Data, begin: int, end: int) -> Iterator[int]:
    while begin < end:
        value, begin = read_varint(data, begin, end)
        if value >= 0:
            yield value
