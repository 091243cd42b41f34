"""Ops of programs that events name, as numbers."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

from gputop.trace.builder import TraceBuilder
from gputop.trace.model import I64
from gputop.trace.readers.content import MemoryWatch
from gputop.trace.readers.xspace.hlo import Program
from gputop.trace.readers.xspace.hlo_indices import HloIndices
from gputop.trace.readers.xspace.hlo_work import hlo_op
from gputop.trace.readers.xspace.space import read_space
from gputop.trace.readers.xspace.wire import Quota
from tests.trace.readers.xspace.reference import Builder

PROGRAM = gzip.decompress((Path(__file__).parents[3] / "data" / "training_step.hlo.gz").read_bytes())


def ops() -> list[str]:
    """The first two ops of the program that are known."""
    program = Program(PROGRAM, 0, len(PROGRAM), Quota(1 << 23))
    return [name for name in program.ids if hlo_op(program, name) is not None][:2]


def indices_of(builder: TraceBuilder, *programs: str) -> HloIndices:
    b = Builder()
    metadata = b.plane("/host:metadata")
    for number, name in enumerate(programs, 1):
        entry = metadata.event_metadata[number]
        entry.id, entry.name = number, name
        entry.stats.add(metadata_id=1).bytes_value = PROGRAM
    data = b.bytes()
    return HloIndices(data, read_space("x", data, MemoryWatch(float("inf"))).planes, builder)


def column(*values: int) -> I64:
    return np.array(values, np.int64)


def test_each_op_of_a_program_has_one_index_whatever_names_it_again() -> None:
    builder = TraceBuilder()
    indices, names = indices_of(builder, "step(6)", "step(7)"), builder.names
    one, other, module = names[ops()[0]], names[ops()[1]], names["step"]
    assert indices.has_programs
    first = indices(column(other, one, one, -1, one), column(module, module, module, module, -1), column(6, 6, 7, 6, 6))
    assert sorted(first[:3].tolist()) == [0, 1, 2] and first[3:].tolist() == [-1, -1]
    again = indices(column(one, other), column(module, module), column(6, 6))
    assert again.tolist() == [first[1], first[0]] and len(builder.hlo_ops) == 3


def test_an_event_without_a_programs_id_is_of_the_only_program_of_its_module() -> None:
    builder = TraceBuilder()
    one, step, twice = builder.names[ops()[0]], builder.names["step"], builder.names["twice"]
    indices = indices_of(builder, "step(6)", "twice(1)", "twice(2)")
    assert indices(column(one, one, one), column(step, twice, step), column(-1, -1, 5)).tolist() == [0, -1, -1]


def test_a_file_without_programs_knows_no_op() -> None:
    builder = TraceBuilder()
    indices = indices_of(builder)
    assert not indices.has_programs
    assert indices(column(builder.names["dot.1"]), column(builder.names["step"]), column(6)).tolist() == [-1]
