"""What the analyses of the host's side and of memory yield, typed, with their part of ``gputop.analysis/1``.

Times are seconds, sizes bytes, shares ratios 0-1, unknown is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a tf.data pipeline; iterators that an interleave makes one after the other are one stage.

    ``path`` is as traced from the root down, positions stripped. ``self_s`` is time in the stage's calls less that of
    stages inside them on the same thread: for a stage with workers of its own that is mostly waiting for them,
    ``function_s`` is what its function took on any thread (None: not traced). ``cost_s_per_batch`` is the
    stage's own work per batch of the pipeline divided by the workers it runs on, None where no batch left the pipeline.
    """

    path: str
    name: str
    parent: str | None
    calls: int
    self_s: float
    function_s: float | None
    workers: int
    cost_s_per_batch: float | None
    parallelism: int | None = None  # of a parallel stage, the highest in the window
    iterators: int = 1
    buffer_limit: int | None = None  # of Prefetch
    buffer_empty: float | None = None  # share of the calls that found Prefetch's buffer empty


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The iterators of one dataset: stages from the root to the sources. ``dataset`` is the root's name and shapes,
    None for iterators whose root did not run in the window.

    Prefetch and parallel stages cut a pipeline into segments that run at the same time. The segment whose stages
    cost most per batch bounds the pipeline, and in it the stage that costs most is ``bounding``. ``wait_s`` is the
    time of the calls for a batch at the root; 0 as ``batches`` is where it did not run in the window.
    """

    dataset: str | None
    iterators: int
    batches: int
    wait_s: float
    stages: tuple[Stage, ...]
    bounding: str | None  # path of a stage
    bounding_s_per_batch: float | None  # cost of its segment


@dataclass(frozen=True, slots=True)
class GapWork:
    """A name's own time within the steps' gaps."""

    name: str
    s_per_step: float
    count_per_step: float


@dataclass(frozen=True, slots=True)
class StepGaps:
    """``what`` defines the gaps. ``no_event_s_per_step`` is gap time in which the training loop's thread shows no
    event at all: Python, or waiting outside the framework; None where that thread is not known."""

    what: str
    total_s_per_step: float
    count_per_step: float
    no_event_s_per_step: float | None
    main: tuple[GapWork, ...]  # on the training loop's thread
    executor: tuple[GapWork, ...]  # on the threads that run ops, summed


@dataclass(frozen=True, slots=True)
class OpType:
    """TF ops of one type. ``placement`` is "gpu" where a device event carries the op's name or its host event launches
    work, else "host"; None where the trace has GPUs but no such link at all. ``host_s`` is the events' own time
    on threads other than tf.data's: of an op on a GPU, the time of dispatching it. ``example`` is the op of
    this type that takes most time."""

    type: str
    placement: str | None
    count: int
    host_s: float
    device_s: float
    example: str


@dataclass(frozen=True, slots=True)
class EagerOp:
    name: str
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class HostOps:
    """TF ops by placement and time, in the steps or, for want of them, the window (``basis``).

    ``eager_share`` is the time of ops run eagerly from Python over that and the runs of tf.functions,
    without calls for a batch; None where neither is traced. ``eager`` lists those ops by time.
    """

    basis: str
    host_s: float  # time of ops placed on the host
    device_s: float
    types: tuple[OpType, ...]
    eager_share: float | None
    eager_ops_per_step: float | None
    eager: tuple[EagerOp, ...]


@dataclass(frozen=True, slots=True)
class FunctionUse:
    """One tf.function in the window. ``modes`` counts its calls by ``tf_function_call``. ``tracings`` are calls that
    traced it, ``retracings`` those that were not its first; ``tracing_s`` building the graph and
    ``tracing_calls_s`` the whole of those calls. ``xla``: whether XLA compiled it, all or in part, None: not told;
    ``xla_s`` the part of its calls in which the host runs an XLA executable (on a GPU: starts its kernels)."""

    name: str
    calls: int
    seconds: float
    modes: Mapping[str, int]
    tracings: int
    retracings: int
    tracing_s: float
    tracing_calls_s: float
    tracing_count: int | None  # in all since the function was made
    xla: bool | None
    xla_s: float


@dataclass(frozen=True, slots=True)
class Functions:
    """``xla_compile_s`` is the union of XLA's compilations in the window on any thread."""

    functions: tuple[FunctionUse, ...]
    retracings: int
    tracing_s: float
    xla_compilations: int
    xla_compile_s: float
    xla_runs: int
    xla_modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchThread:
    """A host thread that launches work to GPUs. ``other_s`` is the rest of the time in which it shows an event."""

    name: str
    pool: str  # gpu_private, gpu_shared and global are TensorFlow's; python or other
    launches: Mapping[int, int]  # by GPU
    launch_s: float
    other_s: float


@dataclass(frozen=True, slots=True)
class LaunchThreads:
    """Who launches, and who else wants the CPU then.

    ``mode`` is what TF_GPU_THREAD_MODE amounts to: gpu_private, gpu_shared, global or unknown.
    ``input_busy_late`` is the share of the GPUs' idle time with a late launch during which at least one
    tf.data thread ran an op or a function, ``input_busy`` the same share of the rest of the window: where
    tf.data causes late launches, the first is the higher. ``busy_threads_at_launch`` is the mean number of
    pool and launch threads with an event open while a launch call runs, ``input_threads_at_launch`` that of
    tf.data's threads at work among them; None without such threads. ``cpus`` is tf.data's CPU budget: the
    CPUs the process may use, unless the job set it otherwise.
    """

    mode: str
    threads: tuple[LaunchThread, ...]
    threads_per_gpu: Mapping[int, int]
    input_busy_late: float | None
    input_busy: float | None
    late_s: float | None
    busy_threads_at_launch: float | None
    input_threads_at_launch: float | None
    cpus: int | None


@dataclass(frozen=True, slots=True)
class Holder:
    """Memory held at the peak by the allocations of one TF op."""

    op: str
    bytes: int
    allocations: int


@dataclass(frozen=True, slots=True)
class MemoryDetail:
    """One allocator over the window. ``timeline_*`` keep the lowest and the highest of each stretch of records.

    ``headroom_bytes`` is capacity less the window's peak. ``holders`` are what was allocated in the window and still
    held at its peak, by op; ``unattributed_bytes`` the rest of the peak: allocated before the window
    or without an op's name.
    """

    timeline_s: tuple[float, ...] = ()
    timeline_in_use_bytes: tuple[int, ...] = ()
    peak_s: float | None = None
    headroom_bytes: int | None = None
    fragmentation_at_peak: float | None = None
    fragmentation_max: float | None = None
    allocations: int = 0
    frees: int = 0
    holders: tuple[Holder, ...] = ()
    unattributed_bytes: int | None = None
    allocated_before_bytes: int | None = None

