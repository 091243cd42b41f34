"""What the analyses of the GPUs' side of a trace yield: kernels, their sizes, copies, collectives, replicas.

As in :mod:`gputop.analysis.results`: seconds, bytes, ratios 0-1, unknown is None. GPUs are
named by :func:`gputop.analysis.gpu.device_time.gpu_number`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from gputop.trace.model import LaunchShape


def to_json(value: Any) -> Any:
    """Dataclasses and named tuples as objects, mappings with keys of text, sequences as lists."""
    if is_dataclass(value):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, LaunchShape):
        return to_json(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, (tuple, list)) else value


@dataclass(frozen=True, slots=True)
class GpuPart:
    """One GPU's part of a row; ``share`` is of that GPU's own kernel time."""

    count: int
    time_s: float
    share: float


@dataclass(frozen=True, slots=True)
class KernelRow:
    """Kernels with one name, TF op or op type, over all GPUs; the last row of a table sums ``names`` others.

    ``time_s`` sums durations (streams may overlap), ``share`` is of all kernels' time.
    ``types`` are shares of ``time_s`` by number type; ``tensor_core`` is the share of it on
    tensor cores, None where no name tells, ``tensor_core_known`` the share whose name tells.
    ``occupancy`` is the mean weighted by time over the part ``occupancy_known`` of it.
    ``shape`` is the launch shape that took most of the time, ``shapes`` how many there are.
    """

    name: str
    count: int
    time_s: float
    mean_s: float
    median_s: float | None  # by name only
    share: float
    types: Mapping[str, float]
    tensor_core: float | None
    tensor_core_known: float
    occupancy: float | None
    occupancy_known: float
    by_gpu: Mapping[int, GpuPart]
    shape: LaunchShape | None = None  # by name only
    shapes: int = 0
    collective: bool = False  # all of it
    names: int = 1


@dataclass(frozen=True, slots=True)
class Kernels:
    """All kernels of the trace, collectives among them. Each table's rows sum to ``count`` and ``time_s``.

    Kept are the names that take most time over all GPUs and on each of them (up to 64); the rest
    is one row named "". Ops go by their name without ``replica_<n>/``, so that the replicas' are one.
    ``occupancy_is``: "theoretical" (the limit set by registers, shared memory and block size)
    or "estimated" (bounded by the grid's blocks per SM as well), None where the trace has none.
    """

    count: int
    time_s: float
    time_s_by_gpu: Mapping[int, float]
    by_name: tuple[KernelRow, ...]
    by_op: tuple[KernelRow, ...] | None  # None: the trace names no ops
    by_op_type: tuple[KernelRow, ...] | None
    occupancy_is: str | None


@dataclass(frozen=True, slots=True)
class KernelSizes:
    """One GPU's compute kernels by duration: bucket i holds ``bounds_s[i-1] <= duration < bounds_s[i]``.

    The first bucket has no lower bound, the last no upper one. Per step: means over the
    kernels that start within steps; None without steps. ``below_20us`` and ``below_40us``
    are shares of the count: launching a kernel takes TensorFlow 20-40 µs
    (docs/TRACE_NOTES.md, "Definitions of the figures").
    """

    gpu: int
    bounds_s: tuple[float, ...]
    count: tuple[int, ...]
    time_s: tuple[float, ...]
    count_per_step: tuple[float, ...] | None
    time_s_per_step: tuple[float, ...] | None
    below_20us: float | None
    below_40us: float | None


@dataclass(frozen=True, slots=True)
class CopyRow:
    """Copies of one GPU and way. ``bytes_per_s`` is bytes over the summed time of the copies whose size is told,
    so parallel copies do not add up to the link's rate. Per step: those that start within steps."""

    gpu: int
    direction: str  # h2d, d2h, d2d, p2p, other
    source: str  # kind of memory: pageable, pinned, device, managed, array, unknown
    target: str
    count: int
    bytes: int | None
    time_s: float
    bytes_per_s: float | None
    count_per_step: float | None = None
    bytes_per_step: float | None = None
    time_s_per_step: float | None = None


@dataclass(frozen=True, slots=True)
class OpCopies:
    """Copies that belong to one TF op, over all GPUs."""

    op: str
    direction: str
    count: int
    bytes: int | None
    time_s: float


@dataclass(frozen=True, slots=True)
class CopyTable:
    """``by_op`` is the longest ops' and None where no copy names its op; ``other_ops_s`` is the time of the rest."""

    rows: tuple[CopyRow, ...]
    by_op: tuple[OpCopies, ...] | None
    other_ops_s: float


@dataclass(frozen=True, slots=True)
class CollectiveOp:
    """Collectives of one operation. ``bytes`` sums the messages of those that tell; None: none does.

    ``count`` and ``time_s`` are over all GPUs; ``count_per_step`` and ``exposed_s`` (time
    with no compute kernel beside it) are of a GPU. ``transfer_s`` and ``waiting`` as in
    :class:`~gputop.analysis.results.Collectives`, or None with the ``reason``.
    """

    operation: str
    count: int
    count_per_step: float | None
    time_s: float
    bytes: int | None
    exposed_s: Mapping[int, float]
    transfer_s: float | None
    waiting: float | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class ReplicaWork:
    """What one GPU did per step, or in the window. Ratios are to the median of the other GPUs, None where that is 0."""

    gpu: int
    host: str
    rank: int
    compute_s: float  # union of compute kernels
    kernels: float
    copies: float
    copied_bytes: float | None
    compute_ratio: float | None
    kernels_ratio: float | None
    copies_ratio: float | None


@dataclass(frozen=True, slots=True)
class PairOverlap:
    """Two GPUs active at once: ``overlap`` as a share of the shorter one's active time (1: perfectly parallel),
    ``by_chance`` what it would be were they independent (0: strictly one after the other)."""

    gpus: tuple[int, int]
    overlap: float
    by_chance: float


@dataclass(frozen=True, slots=True)
class Concurrency:
    """How many GPUs are active at once, over the steps or, without them, from the first GPU event to the last.

    ``exactly[k]`` is the share of the time in which k GPUs are, ``by_chance[k]`` what it
    would be were they independent. ``serial`` is the share of the time with any active in
    which one is alone. ``pairs`` lists those that overlap least; none beyond 16 GPUs.
    """

    exactly: tuple[float, ...]
    by_chance: tuple[float, ...]
    serial: float | None
    serial_by_chance: float | None
    pairs: tuple[PairOverlap, ...]


@dataclass(frozen=True, slots=True)
class StepSkew:
    """First compute kernel of each step, across GPUs: from the first GPU's start to the last's."""

    steps: int
    median_s: float
    p95_s: float
    behind_median_s: Mapping[int, float]  # of each GPU behind the first one
    last: Mapping[int, int]  # GPU -> steps at which it was last


@dataclass(frozen=True, slots=True)
class LaunchOrder:
    """How the host launches to several GPUs, by the compute kernels whose launch is in the trace.

    ``threads`` counts the launching threads of each GPU; ``shared_launches`` is the share of
    launches by threads that serve several GPUs. Half of those are made in runs of at least
    ``launches_per_turn`` to one GPU before the thread turns to another (1: in turns; most of
    a step: GPU after GPU).
    Per step and GPU: ``delay_median_s`` from the step's first launch to the GPU's own first
    one, ``span_median_s`` from the GPU's first to its last. ``order`` is the most common
    order of first launches, ``order_share`` the share of steps that have it.
    """

    threads: Mapping[int, int]
    shared_launches: float
    launches_per_turn: int | None
    steps: int
    delay_median_s: Mapping[int, float] | None
    span_median_s: Mapping[int, float] | None
    order: tuple[int, ...] | None
    order_share: float | None


@dataclass(frozen=True, slots=True)
class Replicas:
    """The GPUs that compute, against each other. What could not be judged is None and has its reason in ``missing``.

    ``basis``: whether ``work`` is per "step" or in the "window". ``gpu0_ratio`` is GPU 0's ``compute_ratio``.
    """

    basis: str
    work: tuple[ReplicaWork, ...] | None = None
    gpu0_ratio: float | None = None
    compute: Concurrency | None = None  # by compute kernels: a GPU that waits in a collective is not active
    busy: Concurrency | None = None  # by all device events
    first_kernel: StepSkew | None = None
    launches: LaunchOrder | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
