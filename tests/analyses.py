"""Analyses made by hand: what a test does not name is zero, empty or unknown."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import inspect

from gputop.analysis.results import Analysis
from gputop.analysis.steps.membership import WorkOfSteps, work_of_steps
from gputop.analysis.steps.steps import find_steps
from gputop.core.codec import to_document
from gputop.trace.model import Trace

_ZERO: tuple[tuple[type[inspect.Type], Any], ...] = (
    (inspect.NoneType, None), (inspect.BoolType, False), (inspect.IntType, 0), (inspect.FloatType, 0.0),
    (inspect.StrType, ""), (inspect.LiteralType, "low"), (inspect.DictType, {}), (inspect.VarTupleType, ()),
    (inspect.TupleType, (0, 0, 0)),
)
_ANALYSIS = inspect.type_info(Analysis)  # once: it takes longer than all that is made of it


def of_steps(trace: Trace) -> WorkOfSteps | None:
    """What the GPUs did in the steps that are found in a trace."""
    steps = find_steps(trace)
    return None if steps is None else work_of_steps(trace, steps)


def make_analysis(**document: Any) -> Analysis:
    """The analysis whose document has these values, at any depth."""
    filled = _filled(_ANALYSIS, to_document(document))
    return msgspec.convert(filled, Analysis, str_keys=True)


def _filled(kind: inspect.Type, value: Any) -> Any:
    """``value`` with all that its type requires."""
    if isinstance(kind, inspect.UnionType):
        return None if value is None else _filled(next(k for k in kind.types if _fits(k, value)), value)
    if isinstance(kind, (inspect.StructType, inspect.DataclassType)):
        return {f.encode_name: _filled(f.type, value[f.encode_name]) if f.encode_name in value else _zero(f.type)
                for f in kind.fields if f.required or f.encode_name in value}
    if isinstance(kind, inspect.DictType):
        return {key: _filled(kind.value_type, item) for key, item in value.items()}
    return [_filled(kind.item_type, item) for item in value] if isinstance(kind, inspect.VarTupleType) else value


def _fits(kind: inspect.Type, value: Any) -> bool:
    return isinstance(value, dict) == isinstance(kind, (inspect.StructType, inspect.DataclassType, inspect.DictType)) \
        and not isinstance(kind, inspect.NoneType)


def _zero(kind: inspect.Type) -> Any:
    if isinstance(kind, inspect.UnionType):
        return None
    if isinstance(kind, (inspect.StructType, inspect.DataclassType)):
        return _filled(kind, {})
    return next(zero for of, zero in _ZERO if isinstance(kind, of))
