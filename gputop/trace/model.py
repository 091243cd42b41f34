"""A trace as columns: what every reader produces and every analysis reads.

One row per event, struct of arrays. Names are dictionary-coded (an index into ``Trace.names``), so each distinct name
is classified once. Times are int64 nanoseconds since ``Trace.origin_ns`` (Unix time of the first event, or 0 where the
format has no wall clock). Absent integers are -1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from gputop.core.captured_samples import GpuCounters, JobCpus, LiveSteps
from gputop.core.findings import TraceNote
from gputop.core.host_stacks import StackSamples
from gputop.trace.occupancy import LaunchShape

if TYPE_CHECKING:
    from typing_extensions import Self

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I16 = npt.NDArray[np.int16]
U8 = npt.NDArray[np.uint8]
T = TypeVar("T")


# Stats of TensorFlow's host events whose value is a name (:class:`HostEvents`).
TEXT_STATS = ("eager_op", "tf_function_call", "function_name", "name", "shapes", "graph_type")


class Kind(IntEnum):
    """Kind of a device event. COMPUTE is every kernel that is not a collective."""

    COMPUTE = 0
    COLLECTIVE = 1
    H2D = 2
    D2H = 3
    D2D = 4
    P2P = 5
    COPY_OTHER = 6
    MEMSET = 7


class MemoryKind(IntEnum):
    """Memory in which the host (or device) end of a copy lies, as CUPTI reports it."""

    UNKNOWN = 0
    PAGEABLE = 1
    PINNED = 2
    DEVICE = 3
    MANAGED = 4
    ARRAY = 5


class Line(Struct, frozen=True):
    """A stream of a GPU, or a host thread."""

    host: str
    gpu: int  # index into Trace.gpus, -1 for a host thread
    name: str  # "Stream #13(Kernel)" or the thread's name
    rank: int = 0  # of the process, as in TraceGpu


class TraceGpu(Struct, frozen=True):
    """A GPU of the trace. ``ordinal`` is the process's own number (CUDA_VISIBLE_DEVICES renumbers)."""

    host: str
    ordinal: int
    rank: int = 0  # of the process, where several files form one job
    name: str = ""
    compute_capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    sms: int | None = None  # streaming multiprocessors; None: not told, or not NVIDIA's
    clock_hz: float | None = None  # the highest of the SMs


class HloOp(Struct, frozen=True):
    """An op of a program that XLA compiled. ``flops`` are those of one execution, by the type of the operands;
    element-wise arithmetic is not counted. ``bytes`` is what it must read and write at least. None: not known."""

    op_name: str  # with its scopes: "jit(step)/jvp(Model)/Dense_0/dot_general"; empty: not told
    source: str  # "train.py:31"; empty: not told
    flops: tuple[tuple[str, float], ...] | None
    bytes: int | None
    opcode: str = ""  # "fusion", "dot", "while"; empty: not told
    after_gradient: bool = True  # False: no part of an update, in a program of JAX's that computes gradients


class Columns(Struct):
    """Events as columns of one length, a field each; one that is called stats is none."""

    def __len__(self) -> int:
        return len(getattr(self, self.__struct_fields__[0]))

    @classmethod
    def empty(cls, n: int = 0) -> Self:
        """Return so many events of which nothing is known: -1 in each column of integers with a sign, else 0."""
        return cls(**{name: np.full(n, -int(dtype.kind == "i"), dtype) for name, dtype in column_types(cls).items()})


@cache
def column_types(kind: type[Columns]) -> dict[str, np.dtype]:
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name != "stats"}
    return {name: np.dtype(*get_args(get_args(hint)[1])) for name, hint in hints.items()}


class DeviceEvents(Columns):
    """Everything that ran on the GPUs, GPU by GPU, each sorted by ``start_ns``.

    ``launch_ns`` is the start of the host call with the same correlation id (-1: not in the
    trace), ``launch_end_ns`` its end, ``launch_line`` the index of its thread in ``Trace.lines``.
    """

    gpu: I16
    line: I32
    name: I32
    kind: U8
    start_ns: I64
    end_ns: I64
    correlation: I64
    launch_ns: I64
    launch_line: I32
    tf_op: I32  # index into Trace.names, -1: none
    bytes: I64  # of copies and memsets, and of collectives' messages where known
    src: U8  # MemoryKind
    dst: U8
    launch_end_ns: I64
    shape: I32  # index into Trace.launch_shapes, -1: none
    hlo: I32  # index into Trace.hlo_ops, -1: none


class HostEvents(Columns):
    """Everything recorded on host threads, sorted by ``start_ns``.

    ``stats`` holds the few stats analyses need, sparse: name → (rows, values), rows sorted. String values are indices
    into ``Trace.names``; integers are themselves. Kept: step_num, group_id, _r, is_func, eager_op (string),
    tf_function_call (string), tracing_count, iter_num, buffered_elements, function_name (string), and of tf.data's
    iterators id and parent_id (uint64 as int64 bits), parallelism, buffer_limit, cpu_budget, name and shapes (strings).
    Of PyTorch's ranges that the user named: annotation (1); of its ops: sequence (the number of the autograd function);
    of gradients and of messages that reduce some: elements (how many); of gradients of embedding tables that are as
    large as the table: table_rows, table_elements and indices (looked up, with repetitions); of its functions of
    Python: called_from (string, "train.py:31"). Of XLA's ops on a CPU: hlo (index into Trace.hlo_ops, -1: not known),
    hlo_module (string) and ends_with, the same number as that of the event that ends the op on whatever thread (ended).
    """

    line: I32
    name: I32
    start_ns: I64
    end_ns: I64
    stats: dict[str, tuple[I64, I64]] = field(default_factory=dict)

    def stats_of(self, keep: npt.NDArray[np.bool_]) -> dict[str, tuple[I64, I64]]:
        """The stats of the events in ``keep`` (one for each event), with rows that count those events."""
        row_after = np.cumsum(keep) - 1
        return {name: (row_after[rows[keep[rows]]], values[keep[rows]]) for name, (rows, values) in self.stats.items()}


class AllocatorEvents(Columns):
    """MemoryAllocation/MemoryDeallocation records, sorted by ``time_ns``.

    ``allocator`` and ``tf_op`` are indices into ``Trace.names`` (-1: none); byte columns as in
    traces of TF's BFC allocator: in use, still available, and highest ever in use, each after the
    event. The columns from ``is_free`` on describe the single allocation.
    """

    time_ns: I64
    allocator: I32
    in_use_bytes: I64
    available_bytes: I64
    peak_bytes: I64
    tf_op: I32
    is_free: npt.NDArray[np.bool_]
    allocation_bytes: I64  # what it took, rounding included
    address: I64
    fragmentation: F64  # 0-1, NaN: unknown


class StepEvents(Columns):
    """Steps as a viewer has marked them on a GPU (XProf's derived line "Steps"), one row per GPU and step.

    ``name`` is an index into ``Trace.names``: the step's number.
    """

    name: I32
    start_ns: I64
    end_ns: I64


def once(find: Callable[[Trace], T]) -> Callable[[Trace], T]:
    """Find what depends on the events of a trace alone once, whoever asks; two that ask at once may both find it."""
    @wraps(find)
    def ask(trace: Trace) -> T:
        # A part of a trace has other columns, and the same ``found``.
        device, host, names, result = trace.found.get(find, (None, None, 0, None))
        if device is not trace.device or host is not trace.host or names != len(trace.names):
            result = find(trace)
            trace.found[find] = trace.device, trace.host, len(trace.names), result
        answer: T = result
        return answer

    return ask


class Trace(Struct):
    """One capture of one job: all its hosts, GPUs and threads on one clock."""

    paths: list[str]
    hosts: list[str]
    names: list[str]
    lines: list[Line]
    gpus: list[TraceGpu]
    device: DeviceEvents
    host: HostEvents
    allocator: AllocatorEvents
    format: str = ""  # id of the row in gputop.trace.readers.formats, which sets it
    origin_ns: int = 0
    # By rank when the profiler itself began and ended, where the trace holds that; and of all ranks together.
    rank_windows_ns: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    profile_window_ns: tuple[int, int] | None = None
    simulated: bool = False
    quality: list[TraceNote] = field(default_factory=list)
    launch_shapes: list[LaunchShape] = field(default_factory=list)
    hlo_ops: list[HloOp] = field(default_factory=list)
    cuda_graphs: bool = False  # whether kernels that name no op ran in CUDA graphs, where the trace tells (XSpace)
    step_events: StepEvents = field(default_factory=StepEvents.empty)
    unrecorded_ns: tuple[tuple[int, int], ...] = ()  # between recordings that were joined into one file
    job_cpus: JobCpus | None = None  # while it was captured, where gputop captured it
    counters: GpuCounters | None = None  # and what it sampled of the GPUs meanwhile
    job: str = ""  # its command line, secrets hidden, where gputop captured it
    live_steps: LiveSteps | None = None  # before it was captured, where gputop's monitor captured it
    stacks: tuple[StackSamples, ...] = ()  # of its processes' Python while it was captured, where gputop captured it
    no_stacks: str = ""  # why there are none; "": nobody tried
    # What was found in it once: by its function (:func:`once`), by pattern or key.
    found: dict[object, Any] = field(default_factory=dict)
    occupancy_is: str = "theoretical"  # or "estimated": bounded by the grid's blocks per SM too (kineto)
    # By rank what gputop recorded after it at little cost, for what is seldom: events of the rank's host alone, its
    # steps among them where the framework marks them there; on the origin of this trace.
    overviews: Mapping[int, Trace] = field(default_factory=dict)
    # Of functions by name the phase (gputop.analysis.steps.phases), as another trace of the job shows it.
    function_phases: Mapping[str, str] = field(default_factory=dict)

    @property
    @once
    def window_ns(self) -> tuple[int, int]:
        """First to last event of GPUs and host, relative to the origin; (0, 0) if there is none."""
        starts = [int(e.start_ns.min()) for e in (self.device, self.host) if len(e)]
        ends = [int(e.end_ns.max()) for e in (self.device, self.host) if len(e)]
        return (min(starts), max(ends)) if starts else (0, 0)

    @property
    def event_count(self) -> int:
        return len(self.device) + len(self.host) + len(self.allocator)
