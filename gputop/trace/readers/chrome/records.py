"""Events of a Chrome trace as records: decoded as such where the text fits their types, as nearly all does, and made of
parsed JSON, whatever it holds, where it does not.
"""

from __future__ import annotations

import math
import re
from typing import Any, TypeGuard

import numpy as np
from msgspec import UNSET, DecodeError, Raw, Struct, UnsetType, field
from msgspec.structs import fields

from gputop.trace import kernel_names
from gputop.trace.model import I64
from gputop.trace.readers.chrome.json_stream import decoder

_Size3 = tuple[int, int, int]


class _Work(Struct, gc=False):
    """Arguments of work on a device, as kineto writes them."""

    device: Any = -1
    stream: Any = UNSET
    correlation: Any = -1
    bytes: Any = -1
    registers: int = field(default=-1, name="registers per thread")
    shared: int = field(default=-1, name="shared memory")
    grid: _Size3 | None = None
    block: _Size3 | None = None
    occupancy: float | None = field(default=None, name="est. achieved occupancy %")
    dtype: Any = ""
    in_elements: Any = field(default=-1, name="In msg nelems")
    out_elements: Any = field(default=-1, name="Out msg nelems")


class _Call(_Work, gc=False):
    """Arguments of calls on the host. Those that are long and seldom needed stay text, for :func:`plain`."""

    sequence: Any = field(default=-1, name="Sequence number")
    concrete_inputs: Raw | UnsetType = field(default=UNSET, name="Concrete Inputs")
    input_type: Any = field(default=None, name="Input type")
    input_dims: Raw | UnsetType = field(default=UNSET, name="Input Dims")
    old_input_dims: Raw | UnsetType = field(default=UNSET, name="Input dims")
    call_from: Any = field(default=None, name="CallFrom")
    name: Any = UNSET
    allocated: Any = field(default=-1, name="Total Allocated")
    device_type: Any = field(default=-1, name="Device Type")
    device_id: Any = field(default=-1, name="Device Id")


class _OfTensorFlow(_Call, gc=False):
    """Arguments of work on a device in TensorFlow, XLA and TensorBoard."""

    correlation_id: Any = -1
    kernel_details: Any = ""
    memcpy_details: Any = ""
    annotation: Any = ""
    tf_op: Any = ""
    hlo_op: Any = ""
    hlo_module: Any = ""
    step_num: Any = -1
    op: Any = UNSET  # with ``name``: a node of TensorFlow 1's graph


class Args(_OfTensorFlow, gc=False):
    """Arguments of an event, as far as they are read: -1, None, "" or UNSET where absent. Here those of TensorFlow's
    host events."""

    is_func: Any = UNSET
    tracing_count: Any = UNSET
    iter_num: Any = UNSET
    buffered_elements: Any = UNSET
    id: Any = UNSET
    parent_id: Any = UNSET
    parallelism: Any = UNSET
    buffer_limit: Any = UNSET
    cpu_budget: Any = UNSET
    eager_op: Any = UNSET
    tf_function_call: Any = UNSET
    function_name: Any = UNSET
    shapes: Any = UNSET
    graph_type: Any = UNSET


class Event(Struct, gc=False):
    """An event of any phase. A time that is no number, or larger than any, is NaN."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = "None"
    tid: int | str = "None"
    ts: float = math.nan
    dur: float = 0.0
    args: Args | None = None


NO_ARGS = Args()
_DECIMAL = re.compile(r"\s{0,8}-?[0-9]{1,24}(?:\.[0-9]{0,24})?(?:[eE][-+]?[0-9]{1,3})?\s{0,8}")
MOST_US = 2e15  # with any offset it fits an int64 of nanoseconds
_FIELDS = tuple((about.encode_name, about.name) for about in fields(Args))
decode_events = decoder(list[Event])
_decode = decoder(Any)


def event_of(value: Any) -> Event:
    """Make an event of any JSON value, as far as it is one."""
    if not isinstance(value, dict):
        return Event()
    phase, ts, dur = value.get("ph"), _number(value.get("ts")), _number(value.get("dur", 0))
    return Event(phase if isinstance(phase, str) else "", str(value.get("cat", "")), str(value.get("name", "")),
                 hashable(value.get("pid")), hashable(value.get("tid")), float(ts) if finite(ts) else math.nan,
                 float(dur) if finite(dur) else math.nan, _args_of(value.get("args")))


def _args_of(value: Any) -> Args | None:
    if not isinstance(value, dict):
        return None
    args = Args(**{name: value[key] for key, name in _FIELDS if key in value})
    args.grid, args.block = kernel_names.dimensions(args.grid), kernel_names.dimensions(args.block)
    args.registers, args.shared = integer(args.registers), integer(args.shared)
    args.occupancy = float(args.occupancy) if finite(args.occupancy) else None
    return args


def plain(value: Any) -> Any:
    """JSON value of a field that has been left as text; None where it cannot be decoded."""
    try:
        return _decode(value) if type(value) is Raw else value
    except (DecodeError, RecursionError):
        return None


def hashable(value: Any) -> Any:
    return value if isinstance(value, (int, str)) else str(value)


def _number(value: Any) -> Any:
    """The number that a text spells, as some programs write all; what is none as it is."""
    return float(value) if isinstance(value, str) and _DECIMAL.fullmatch(value) else value


def finite(value: Any) -> TypeGuard[float]:
    """Return whether a value is a time in µs that is read."""
    return isinstance(value, (int, float)) and -MOST_US < value < MOST_US


def integer(value: Any) -> int:
    """A non-negative integer that fits, also from text; -1 for everything else."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value):
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else -1


def integers(values: list[Any]) -> I64:
    """Integers of all values, each as :func:`integer`."""
    if set(map(type, values)) <= {int}:
        try:
            numbers = np.array(values, np.int64)
        except OverflowError:
            pass
        else:
            return np.where((numbers >= 0) & (numbers < 1 << 62), numbers, -1)
    return np.fromiter(map(integer, values), np.int64, len(values))
