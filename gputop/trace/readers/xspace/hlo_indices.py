"""The ops of compiled programs that the events of one XSpace name, as numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gputop.trace import limits
from gputop.trace.builder import TraceBuilder
from gputop.trace.model import I32, I64
from gputop.trace.readers.content import Data
from gputop.trace.readers.xspace.hlo import Program, find_programs
from gputop.trace.readers.xspace.hlo_work import hlo_op
from gputop.trace.readers.xspace.wire import Quota
from gputop.trace.readers.xspace.xplane import XPlane

METADATA_PLANE = "/host:metadata"


class HloIndices:
    """Finds the ops in the programs of a file, and adds each that an event names to the builder's ``hlo_ops``.

    A program is read when an event first names it, and each op is looked for once. One budget bounds the work of all.
    """

    def __init__(self, data: Data, planes: Sequence[XPlane], builder: TraceBuilder) -> None:
        self._data, self._builder = data, builder
        self._steps = Quota(limits.MAX_HLO_FIELDS)
        self._spans = {key: span for plane in planes if plane.name == METADATA_PLANE
                       for key, span in find_programs(data, *plane.span, self._steps).items()}
        self._programs: dict[tuple[str, int], Program] = {}
        self._indices: dict[tuple[int, int, int], int] = {}

    @property
    def has_programs(self) -> bool:
        return bool(self._spans)

    def __call__(self, op: I64, module: I64, program: I64) -> I32:
        """The ops as indices of the builder's ``hlo_ops``; -1: not known. ``op`` and ``module`` are indices of names,
        ``program`` ids."""
        mixed = np.unique(program, return_inverse=True)[1]
        for column in (module, op):  # the product stays small: chunks are, and names are far fewer than 2^31
            mixed = np.unique(mixed * (len(self._builder.names.list) + 1) + column + 1, return_inverse=True)[1]
        _, first, which = np.unique(mixed, return_index=True, return_inverse=True)
        indices = []
        for key in zip(op[first].tolist(), module[first].tolist(), program[first].tolist(), strict=True):
            if key not in self._indices:
                self._indices[key] = self._find(*key)
            indices.append(self._indices[key])
        return np.array(indices, np.int32)[which]

    def _find(self, op: int, module: int, program: int) -> int:
        names = self._builder.names.list
        if op < 0 or module < 0:
            return -1
        named = [key for key in self._spans if key[0] == names[module]]
        # An older XLA writes no program_id: the module's name tells, if only one program has it.
        key = (names[module], program) if program >= 0 else named[0] if len(named) == 1 else None
        span = self._spans.get(key) if key is not None else None
        if key is None or span is None:
            return -1
        if key not in self._programs:
            self._programs[key] = Program(self._data, *span, self._steps)
        hlo = hlo_op(self._programs[key], names[op])
        if hlo is None:
            return -1
        self._builder.hlo_ops.append(hlo)
        return len(self._builder.hlo_ops) - 1
