"""Results of the analyses of a trace: the document ``gputop.analysis/1``, typed.

Times are seconds, sizes bytes, shares ratios 0-1, unknown is None. GPUs go by the numbers the job gives them
(:func:`gputop.analysis.gpu.device_time.gpu_number`). The fields, their names and their order are the document's:
:meth:`Analysis.to_json` writes them as they stand here. :meth:`Analysis.from_json` reads them, those of another
version too: a key that is unknown here is ignored, one that is missing has its default.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from msgspec import Struct, field

from gputop.core.captured_samples import JobCpus, LiveSteps
from gputop.core.codec import from_document, to_document
from gputop.core.findings import Abstained, CombinedGain, Finding, TraceNote
from gputop.trace.occupancy import LaunchShape

SCHEMA = "gputop.analysis/1"
MAX_SEGMENTS = 2000  # of a critical path
SESSION_RUN = "session.run of TensorFlow 1"  # an anchor of steps
MORE_RUNS = "trace more runs"  # what to do about few of these


class TraceSummary(Struct, frozen=True):
    """Summary of the trace that was analyzed.

    ``start_s`` is the Unix time of its first event, None where the format has no wall clock; ``unrecorded_s`` of
    ``window_s`` are missing, between recordings that were joined. ``job_cpus`` is None for captures of other tools,
    ``live_steps`` for those that gputop's monitor did not make, or in whose minutes before no step period stood out.
    """

    paths: tuple[str, ...] = ()
    format: str = ""  # xspace, chrome or nsys
    hosts: tuple[str, ...] = ()
    window_s: float = 0.0
    events: int = 0
    quality: tuple[TraceNote, ...] = ()
    start_s: float | None = None
    unrecorded_s: float = 0.0
    job_cpus: JobCpus | None = None
    live_steps: LiveSteps | None = None

    @property
    def is_damaged(self) -> bool:
        """Return whether the file was cut off or damaged, so that it is not judged."""
        return any(note.id == "incomplete" for note in self.quality)


class StepTimes(Struct, frozen=True):
    """The training steps found, and how long each took.

    ``anchor`` says what marked them, ``confidence`` how sure that is ("high", "medium", "low"); ``iterations_per_step``
    is above 1 where one anchor packs several optimizer steps. ``dropped`` counts incomplete and warm-up steps left out.
    ``phase`` is "training", "evaluation" or "prediction" where the trace shows it, else "unknown"; ``left_out_s`` the
    seconds in the window spent in other step functions, by their phase. ``unit`` is "step", or "period" where all that
    is known is a sequence of kernels that a GPU repeats: a layer of the model or its step. ``start_up`` says what of a
    job's start (autotuning, compilation) ran in all of them; empty: nothing was seen.
    """

    anchor: str
    confidence: str
    count: int
    median_s: float
    mean_s: float
    p95_s: float
    durations_s: tuple[float, ...] = ()
    dropped: int = 0
    iterations_per_step: float = 1.0
    phase: str = "unknown"
    left_out_s: Mapping[str, float] = field(default_factory=dict)
    unit: str = "step"
    start_up: str = ""


class HostWork(Struct, frozen=True):
    """A name's own time on the host, in all."""

    name: str
    time_s: float
    count: int


class WallPart(Struct, frozen=True):
    """A part of a recording (ids: ``WALL_PARTS`` of :mod:`gputop.render.step_parts`). Times are the mean of the ranks.

    ``kind`` says what the host did in it (``HOST_KINDS`` there; "" where the id says it all), ``what`` names it: a line
    of Python, an op, a function. ``count`` is how many stretches of time it sums (without steps: how many of its gaps
    are at least half as long as the longest), ``longest_s`` the longest and ``at_s`` when that begins, since the
    trace's origin. ``every_steps``: so many training steps lie between one and the next, None where that differs or is
    not known. ``work`` are the names that take most of it, ``silent_s`` is the time
    in which the training loop's thread shows no event; None where that thread is not known.
    """

    id: str
    time_s: float
    count: int = 0
    kind: str = ""
    what: str = ""
    longest_s: float = 0.0
    at_s: float | None = None
    every_steps: int | None = None
    work: tuple[HostWork, ...] = ()
    silent_s: float | None = None

    @property
    def named_s(self) -> float:
        """Time of what names it: of an op its own time, as others may run in the rest."""
        own_s = next((work.time_s for work in self.work if work.name == self.what), self.time_s)
        return min(own_s, self.time_s) if self.kind == "op" else self.time_s


class StepSeries(Struct, frozen=True):
    """Training steps of one recording, and what lies between each of them and the next one, without what was not
    recorded."""

    durations_s: tuple[float, ...]
    pauses_s: tuple[float, ...]


class Unexplained(Struct, frozen=True):
    """Time that no finding names, in a "step" or in the "recording" of ``of_s``: seconds by part, and what the host
    runs meanwhile, most time first. ``silent_s``: its loop shows no event then; None: not known."""

    per: str
    time_s: float
    of_s: float
    parts: Mapping[str, float]
    work: tuple[HostWork, ...] = ()
    silent_s: float | None = None


class RankWallTime(Struct, frozen=True):
    """The recording of one rank; its parts sum to ``total_s``, ``recorded_s`` is that without what was not recorded."""

    rank: int
    host: str
    total_s: float
    recorded_s: float
    parts: tuple[WallPart, ...]


class AccountPart(Struct, frozen=True):
    """Seconds of one line of the :class:`Account`.

    ``id`` is a part of the step (:class:`Breakdown`) in the time that is evaluated, else that of the recording
    (:class:`WallPart`) which ``of``, ``kind`` and ``what`` name: a pause within a step's bounds has the ``id`` "host"
    and is ``of`` "between". ``known_by`` says what the name rests on: it is "recorded", "sampled" (a line of Python by
    samples of stacks, off by up to ``error_s``) or "inferred", as what no event shows.
    """

    id: str
    time_s: float
    of: str
    kind: str = ""
    what: str = ""
    known_by: str = "recorded"
    error_s: float = 0.0


class AccountLine(Struct, frozen=True):
    """The recording along one GPU, or along the loop of a rank without one (``gpu`` None)."""

    rank: int
    host: str
    gpu: int | None
    parts: tuple[AccountPart, ...]


class Account(Struct, frozen=True):
    """The one account of a recording (:mod:`gputop.analysis.account`): along each of the ``lines`` each nanosecond is
    in one part, and they sum to its window.

    What is evaluated are the ``steps``, ``mean_s`` each; with ``basis`` "window" it is the time from the first device
    event to the last, as one. ``left_out`` are the seconds that nothing evaluates, by reason, mean of the lines.
    """

    lines: tuple[AccountLine, ...]
    basis: str
    steps: int
    mean_s: float
    median_s: float
    left_out: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each part, mean of the lines."""
        return self.claimable({part.id for line in self.lines for part in line.parts})

    @property
    def breakdown(self) -> Breakdown | None:
        """The mean step, or the window; None where the trace does not tell its parts."""
        per = {id_: time_s / self.steps for id_, time_s in self.seconds.items() if id_ in Breakdown.__struct_fields__}
        if not per:
            return None
        none = ("input", "host") if self.lines[0].gpu is None else Breakdown.__struct_fields__
        return Breakdown(**dict.fromkeys(none, 0.0) | per)

    def claimable(self, ids: Collection[str]) -> dict[str, float]:
        """The seconds of the parts that have one of these ids or are of one, mean of the lines."""
        out: dict[str, float] = {}
        for line in self.lines:
            for part in line.parts:
                if part.id in ids or part.of in ids:
                    out[part.id] = out.get(part.id, 0.0) + part.time_s / len(self.lines)
        return out


_OVERVIEW_STEPS, _SHORTER = 5, 0.9  # gputop's own figures


class WallTime(Struct, frozen=True):
    """Division of the recorded time (:mod:`gputop.analysis.host.wall_time`): ``parts`` sum to ``total_s``, from its
    begin to its end, the mean of the ``ranks``, which are listed where there are several. ``recorded_s`` is that
    without what was not recorded: shares are of it.

    ``known_by`` says what begin and end rest on: the "profiler" wrote them, or they are the first and last of the
    "events". ``per_step_s`` is the time from one training step to the next with all that lies between them
    (evaluations, ends of epochs), None without two steps in a row. ``pauses_s`` is what lies between each training step
    and the next one, without what was not recorded, empty where no two are in a row; ``overview`` has the steps and
    pauses of the capture's overview, of several ranks those of the one with most steps. ``unexplained``: the time that
    no finding names; None where it is little.
    """

    total_s: float
    recorded_s: float
    parts: tuple[WallPart, ...]
    known_by: str = "events"
    per_step_s: float | None = None
    pauses_s: tuple[float, ...] = ()
    ranks: tuple[RankWallTime, ...] = ()
    overview: StepSeries | None = None
    unexplained: Unexplained | None = None
    account: Account | None = None

    @property
    def steps(self) -> int:
        """The whole steps in detail and overview together, of the rank with most of them."""
        return sum(part.count for part in self.parts if part.id in ("steps", "periods"))

    def recording_s(self, median_step_s: float) -> float:
        """Time by which recording in detail makes a step longer than an overview does; 0 where that is little, or the
        overview shows too few steps."""
        rare_s = sorted(self.overview.durations_s if self.overview is not None else ())
        usual_s = rare_s[len(rare_s) // 2] if len(rare_s) >= _OVERVIEW_STEPS else median_step_s
        return median_step_s - usual_s if usual_s < _SHORTER * median_step_s else 0.0

    def pauses_show(self, mean_step_s: float) -> bool:
        """Return whether ``per_step_s`` is longer than the steps alone by 2% and more: of a recording in which no
        pause lies between two steps it is not."""
        return self.per_step_s is not None and self.per_step_s > 1.02 * mean_step_s


class Breakdown(Struct, frozen=True):
    """Mean step, exclusive: the eight parts sum to the mean step time. Seconds.

    ``input`` is waiting for the input pipeline with no GPU busy, ``launch`` GPU idle while
    the host issues work too slowly, ``host`` GPU idle while the host does something else,
    ``idle`` the rest. Device parts are averaged over the GPUs that took part. Without a GPU
    in the trace all that is not ``input`` is ``host``, the CPU's computing too, and the other parts are None.
    """

    input: float | None = None
    h2d: float | None = None
    compute: float | None = None
    collectives: float | None = None
    d2h: float | None = None
    launch: float | None = None
    host: float | None = None
    idle: float | None = None

    @property
    def known(self) -> dict[str, float]:
        parts = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: seconds for name, seconds in parts.items() if seconds is not None}

    @property
    def total(self) -> float:
        return sum(self.known.values())


class Stage(Struct, frozen=True):
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
    empty_s: float | None = None  # of Prefetch: its calls that found the buffer empty, in the window
    refill_s: float | None = None  # of Shuffle: its calls far longer than usual, which fill its buffer, in the window


class Pipeline(Struct, frozen=True):
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


class InputPipeline(Struct, frozen=True):
    """Waiting for input. ``wait_s_per_step`` is the mean time a step sat in IteratorGetNext."""

    wait_s_per_step: float
    wait_ratio: float  # of the step
    stages: Mapping[str, float]  # tf.data stage -> self time, seconds in the window
    how: str  # which events it rests on
    pipelines: tuple[Pipeline, ...] = ()  # tf.data's, longest waited for first


class GapWork(Struct, frozen=True):
    """A name's own time within the steps' gaps."""

    name: str
    s_per_step: float
    count_per_step: float


class StepGaps(Struct, frozen=True):
    """``what`` defines the gaps. ``no_event_s_per_step`` is gap time in which the training loop's thread shows no
    event at all: Python, or waiting outside the framework; None where that thread is not known."""

    what: str
    total_s_per_step: float
    count_per_step: float
    no_event_s_per_step: float | None
    main: tuple[GapWork, ...]  # on the training loop's thread
    executor: tuple[GapWork, ...]  # on the threads that run ops, summed


class OpType(Struct, frozen=True):
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


class EagerOp(Struct, frozen=True):
    name: str
    count: int
    seconds: float


class HostOps(Struct, frozen=True):
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


class FunctionUse(Struct, frozen=True):
    """One tf.function in the window. ``modes`` counts its calls by ``tf_function_call``. ``tracings`` are calls that
    traced it, ``retracings`` those that were not its first (of several that are the first of a new function by this
    name all but one); ``tracing_s`` building the graph and
    ``tracing_calls_s`` the whole of those calls. ``xla``: whether XLA compiled it, all or in part, None: not told;
    ``xla_s`` the part of its calls in which the host runs an XLA executable (on a GPU: starts its kernels).
    Per step: of the calls that begin within the whole steps; None without steps."""

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
    calls_per_step: float | None = None
    s_per_step: float | None = None


class Functions(Struct, frozen=True):
    """``xla_compile_s`` is the union of XLA's compilations in the window on any thread."""

    functions: tuple[FunctionUse, ...]
    retracings: int
    tracing_s: float
    xla_compilations: int
    xla_compile_s: float
    xla_runs: int
    xla_modules: tuple[str, ...] = ()


class LaunchThread(Struct, frozen=True):
    """A host thread that launches work to GPUs. ``other_s`` is the rest of the time in which it shows an event."""

    name: str
    pool: str  # gpu_private, gpu_shared and global are TensorFlow's; python or other
    launches: Mapping[int, int]  # by GPU
    launch_s: float
    other_s: float


class LaunchThreads(Struct, frozen=True):
    """Threads that launch, and others that want the CPU at the same time.

    ``mode`` is what TF_GPU_THREAD_MODE amounts to: gpu_private, gpu_shared, global or unknown. ``input_busy_late`` is
    the share of the GPUs' idle time with a late launch during which at least one tf.data thread ran an op or a
    function, ``input_busy`` the same share of the rest of the window: where tf.data causes late launches, the first is
    the higher. ``busy_threads_at_launch`` is the mean number of pool and launch threads with an event open while a
    launch call runs, ``input_threads_at_launch`` that of tf.data's threads at work among them; None without such
    threads. ``cpus`` is tf.data's CPU budget: the CPUs the process may use, unless the job set it otherwise.
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


class GpuUse(Struct, frozen=True):
    """One GPU from its first to its last device event; shares are of that ``window_s``.

    The step's :class:`Breakdown` and ``compute_s_per_step`` go by steps instead. A GPU on
    which nothing ran has shares of 0 over the window of the others.
    """

    gpu: int
    window_s: float
    busy: float
    compute: float
    collectives: float
    collectives_exposed: float
    copies: float
    idle_host_fault: float | None  # share of the idle time whose next launch began after the idle did
    launch_delay_median_s: float | None
    kernels: int
    kernels_per_s: float
    kernel_median_s: float | None
    compute_s_per_step: float | None  # union of compute kernels
    copies_s: Mapping[str, float] = field(default_factory=dict)  # summed by h2d, d2h, d2d, p2p
    copies_bytes: Mapping[str, int | None] = field(default_factory=dict)
    copies_count: Mapping[str, int] = field(default_factory=dict)
    copies_pageable_s: float | None = None  # part of h2d+d2h with a pageable host end; None: kind unknown
    tensor_core_time: float | None = None
    kernel_time_by_type: Mapping[str, float] | None = None
    copies_exposed: float | None = None  # copies of any direction with neither compute nor collectives beside them


class CollectiveOp(Struct, frozen=True):
    """Collectives of one operation. ``bytes`` sums the messages of those that tell; None: none does.

    ``count`` and ``time_s`` are over all GPUs; ``count_per_step`` and ``exposed_s`` (time with no compute kernel beside
    it) are of a GPU. ``transfer_s`` and ``waiting`` as in :class:`Collectives`, or None with the ``reason``.
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


class Collectives(Struct, frozen=True):
    """Collectives matched across GPUs by order. ``waiting`` = 1 - transfer / their summed time, over those
    that all GPUs have in the window."""

    count_per_step: float | None
    summed_s: float
    transfer_s: float | None
    waiting: float | None
    last_to_arrive: Mapping[int, int] | None  # GPU -> how many collectives it was last at
    reason: str | None = None  # why they could not be matched
    operations: tuple[CollectiveOp, ...] = ()


class Holder(Struct, frozen=True):
    """Memory held at the peak by the allocations of one TF op."""

    op: str
    bytes: int
    allocations: int


class AllocatorUse(Struct, frozen=True):
    """One allocator over the window. ``timeline_*`` keep the lowest and the highest of each stretch of records.

    ``headroom_bytes`` is capacity less the window's peak. ``holders`` are what was allocated in the window and still
    held at its peak, by op; ``unattributed_bytes`` the rest of the peak: allocated before the window
    or without an op's name.
    """

    allocator: str
    peak_bytes: int  # highest ever in use since the allocator was made
    capacity_bytes: int
    peak_in_window_bytes: int | None = None  # highest in use while the trace ran
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


class GpuPart(Struct, frozen=True):
    """One GPU's part of a row; ``share`` is of that GPU's own kernel time."""

    count: int
    time_s: float
    share: float


class KernelRow(Struct, frozen=True):
    """Kernels with one name, TF op or op type, over all GPUs; the last row of a table sums ``names`` others.

    ``time_s`` sums durations (streams may overlap), ``share`` is of all kernels' time. Per step: over all GPUs, of
    those that start within the whole steps; None without steps. ``types`` are shares of ``time_s`` by number type;
    ``tensor_core`` is the share of it on tensor cores, None where no name tells, ``tensor_core_known`` the share whose
    name tells. ``occupancy`` is the mean weighted by time over the part ``occupancy_known`` of it. ``shape`` is the
    launch shape that took most of the time, ``shapes`` how many there are. ``ncu`` is a command that runs the job anew
    and has Nsight Compute profile the longest launch of a step after the warm-up; empty for kernels of little time, for
    collectives, and where the GPUs are not NVIDIA's.
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
    ncu: str = ""
    count_per_step: float | None = None
    time_s_per_step: float | None = None


class Kernels(Struct, frozen=True):
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


class KernelSizes(Struct, frozen=True):
    """One GPU's compute kernels by duration: bucket i holds ``bounds_s[i-1] <= duration < bounds_s[i]``.

    The first bucket has no lower bound, the last no upper one. Per step: means over the
    kernels that start within steps; None without steps. ``below_20us`` and ``below_40us``
    are shares of the count: launching a kernel takes TensorFlow 20-40 µs
    (docs/contributing/trace-notes.md, "Definitions of the figures").
    """

    gpu: int
    bounds_s: tuple[float, ...]
    count: tuple[int, ...]
    time_s: tuple[float, ...]
    count_per_step: tuple[float, ...] | None
    time_s_per_step: tuple[float, ...] | None
    below_20us: float | None
    below_40us: float | None


class FewBlocks(Struct, frozen=True):
    """Kernels of one name with fewer blocks than the GPU has SMs. ``blocks``: with which it took most time. Time and
    count are per step, or in the window without steps, unlike those of :class:`KernelSizes`; documents call them
    ``time_s`` and ``count``."""

    name: str
    blocks: int
    time_s_per_step: float = field(name="time_s")
    count_per_step: float = field(name="count")


class BatchScaling(Struct, frozen=True):
    """Time of one GPU's compute kernels that does not grow with the batch, and that a larger batch fills. Per step, or
    in the window without steps. None: launch shapes, the number of SMs or what an SM holds, or the optimizer's kernels
    are not known.

    ``few_blocks_s`` is the time of kernels with fewer blocks than SMs, the longest in ``few_blocks``; ``filled_s`` what
    of it the short ones would save per sample, by the factor of the batch. ``last_wave_s`` is the part of the kernels'
    last waves that no block fills, if all blocks of a kernel take equally long, ``under_one_wave_s`` the time of
    kernels whose grids have a block for each SM and less than the SMs can hold. The optimizer's are in none of these.
    """

    gpu: int
    optimizer_s: float | None
    sms: int | None = None
    few_blocks_s: float | None = None
    filled_s: Mapping[int, float] = field(default_factory=dict)
    last_wave_s: float | None = None
    under_one_wave_s: float | None = None
    few_blocks: tuple[FewBlocks, ...] = ()


class NarrowKernel(Struct, frozen=True):
    """Kernels of one name that use half of the GPU or less. ``blocks`` and their ``threads``: of the launch shape
    that leaves most of it empty, and ``width`` the share of the GPU that it uses. Time and count are per step, or in
    the window without steps."""

    name: str
    blocks: int
    threads: int
    width: float
    time_s_per_step: float
    count_per_step: float


class SmUse(Struct, frozen=True):
    """Part of one GPU that its compute kernels use while they run (:mod:`gputop.analysis.gpu.sm_use`). Seconds per
    step, or in the window without steps.

    ``compute_s`` is the time in which any runs, ``used_s`` the same weighted by the share of the GPU that has a warp;
    ``tail_s`` is the part of that in which last waves leave the GPU empty, if all blocks of a kernel take equally long.
    ``known`` is the share of the kernels' time whose grids the trace has; the others count as full. None: the number of
    SMs, or all grids, are not known.
    """

    gpu: int
    compute_s: float
    sms: int | None = None
    used_s: float | None = None
    tail_s: float | None = None
    known: float = 0.0
    narrow: tuple[NarrowKernel, ...] = ()


class CopyRow(Struct, frozen=True):
    """Copies of one GPU and way. ``bytes_per_s`` is bytes over the summed time of the copies whose size is known,
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


class OpCopies(Struct, frozen=True):
    """Copies that belong to one TF op, over all GPUs."""

    op: str
    direction: str
    count: int
    bytes: int | None
    time_s: float


class CopyTable(Struct, frozen=True):
    """``by_op`` is the longest ops' and None where no copy names its op; ``other_ops_s`` is the time of the rest."""

    rows: tuple[CopyRow, ...]
    by_op: tuple[OpCopies, ...] | None
    other_ops_s: float


class ReplicaWork(Struct, frozen=True):
    """Work of one GPU per step, or in the window. Ratios are to the median of the other GPUs, None where that is 0."""

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


class PairOverlap(Struct, frozen=True):
    """Two GPUs active at once: ``overlap`` as a share of the shorter one's active time (1: perfectly parallel),
    ``by_chance`` what it would be were they independent (0: strictly one after the other)."""

    gpus: tuple[int, int]
    overlap: float
    by_chance: float


class Concurrency(Struct, frozen=True):
    """Number of GPUs that are active at once, over the steps or, without them, from the first GPU event to the last.

    ``exactly[k]`` is the share of the time in which k GPUs are, ``by_chance[k]`` what it
    would be were they independent. ``serial`` is the share of the time with any active in
    which one is alone. ``pairs`` lists those that overlap least; none beyond 16 GPUs.
    """

    exactly: tuple[float, ...]
    by_chance: tuple[float, ...]
    serial: float | None
    serial_by_chance: float | None
    pairs: tuple[PairOverlap, ...]


class StepSkew(Struct, frozen=True):
    """First compute kernel of each step, across GPUs: from the first GPU's start to the last's."""

    steps: int
    median_s: float
    p95_s: float
    behind_median_s: Mapping[int, float]  # of each GPU behind the first one
    last: Mapping[int, int]  # GPU -> steps at which it was last


class LaunchOrder(Struct, frozen=True):
    """Order in which the host launches to several GPUs, by the compute kernels whose launch is in the trace.

    ``threads`` counts the launching threads of each GPU; ``shared_launches`` is the share of launches by threads that
    serve several GPUs. Half of those are made in runs of at least ``launches_per_turn`` to one GPU before the thread
    turns to another (1: in turns; most of a step: GPU after GPU). Per step and GPU: ``delay_median_s`` from the step's
    first launch to the GPU's own first one, ``span_median_s`` from the GPU's first to its last. ``order`` is the most
    common order of first launches, ``order_share`` the share of steps that have it.
    """

    threads: Mapping[int, int]
    shared_launches: float
    launches_per_turn: int | None
    steps: int
    delay_median_s: Mapping[int, float] | None
    span_median_s: Mapping[int, float] | None
    order: tuple[int, ...] | None
    order_share: float | None


class Replicas(Struct, frozen=True):
    """The GPUs that compute, against each other. What could not be compared is None and has its reason in ``missing``.

    ``basis``: whether ``work`` is per "step" (or "period") or in the "window". ``gpu0_ratio`` is GPU 0's
    ``compute_ratio``.
    """

    basis: str
    work: tuple[ReplicaWork, ...] | None = None
    gpu0_ratio: float | None = None
    compute: Concurrency | None = None  # by compute kernels: a GPU that waits in a collective is not active
    busy: Concurrency | None = None  # by all device events
    first_kernel: StepSkew | None = None
    launches: LaunchOrder | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


class RankTimes(Struct, frozen=True):
    """Times of one rank in the mean step (:mod:`gputop.analysis.gpu.rank_times`). ``waiting_s`` is None where its
    collectives could not be matched with those of the others: ``communication_s`` includes it then. ``most_steps``
    counts the steps in which its load was the largest."""

    gpu: int
    host: str
    rank: int
    load_s: float
    communication_s: float
    waiting_s: float | None
    other_s: float
    most_steps: int


class LayerRow(Struct, frozen=True):
    """A phase, a layer in it, or an op: all below it included. Figures are per step (or of the window) and GPU.

    ``parent`` is the place of the row above it, None for a phase. ``device_s`` is the time in which it alone, or it
    before others, keeps the GPU busy, ``wait_s`` the GPU's idle time that ends with its kernels; both of all rows
    without a parent are the step. ``flops`` are those of the ops that tell, which take ``flops_known`` of its device
    time, ``bytes`` what they must move at least. ``source`` is its most expensive line, ``reason`` why what is here
    belongs to no layer.
    """

    name: str
    parent: int | None
    device_s: float
    wait_s: float
    share: float
    kernels: float
    flops: float | None = None
    flops_known: float = 0.0
    bytes: float | None = None
    source: str = ""
    reason: str = ""


class SourceLine(Struct, frozen=True):
    """``line`` is file:line, ``share`` of all device time."""

    line: str
    device_s: float
    share: float


class Layers(Struct, frozen=True):
    """Time of the step by phase and layer, mean of the ``gpus`` that worked: ``basis`` says whether it is the "step",
    the "period" or the "window", ``total_s`` its length. ``sources``: by line of source, None where no program names
    one.

    With ``gpus`` 0 it is the CPU of a job without GPUs (:mod:`gputop.analysis.layers.cpu_layers`): ``device_s`` is the
    time of ops and executors on the CPU, ``kernels`` counts ops, and ``wait_s`` is that of the rows for other time."""

    basis: str
    total_s: float
    gpus: int
    rows: tuple[LayerRow, ...]
    sources: tuple[SourceLine, ...] | None = None

    @property
    def parents(self) -> tuple[int | None, ...]:
        """The place of the row above each; what is no row before it, as a damaged document may have it, is none."""
        return tuple(row.parent if row.parent is not None and 0 <= row.parent < i else None
                     for i, row in enumerate(self.rows))


class LimitStep(Struct, frozen=True):
    """A step of the :class:`Limits`. ``id`` is a part of the :class:`Breakdown`, or of compute: "unknown" (work not
    known), "kernels" (above their roofline), "types" (number types wider than 16 bit), "limit" (what is left)."""

    id: str
    time_s: float


class Peak(Struct, frozen=True):
    dtype: str
    flops_per_s: float
    source: str


class RooflinePoint(Struct, frozen=True):
    """An op, all executions of a step together. ``flops_per_byte``: by the bytes that it must move at least."""

    name: str
    dtype: str
    time_s: float  # per step
    flops_per_s: float
    flops_per_byte: float


class Limits(Struct, frozen=True):
    """Ladder from the mean step down to what its work takes at the GPU's limit; ``steps`` sum to ``step_s``.

    ``flops`` are the model's per step and GPU, without what is computed again; ``flops_source`` is "programs" (XLA's,
    in the trace) or "given" (--flops-per-step). ``coverage`` is the share of the compute time whose work is known;
    ``mfu`` and ``hfu`` are None below 0.7 of it. ``reason`` says why something is missing.
    """

    step_s: float
    steps: tuple[LimitStep, ...]
    gpu: str = ""
    peaks: tuple[Peak, ...] = ()
    bytes_per_s: float | None = None
    flops: float | None = None
    flops_source: str = ""
    coverage: float = 0.0
    mfu: float | None = None
    hfu: float | None = None
    reason: str = ""
    points: tuple[RooflinePoint, ...] = ()  # ops with FLOPs, those of most time first; where programs tell


class StepRuns(Struct, frozen=True):
    """One GPU's step as runs of slots (part of the breakdown, first slot, end), end exclusive."""

    gpu: int
    runs: tuple[tuple[str, int, int], ...]


class TypicalStep(Struct, frozen=True):
    """The step whose length is nearest to the median.

    It is cut into ``slots`` of equal length. A slot shows the part of the breakdown that took most of it.
    """

    step: int  # counted from 0 in the trace
    duration_s: float
    slots: int
    gpus: tuple[StepRuns, ...]


class PathKind(Struct, frozen=True):
    """``id`` is one of ``PATH_KINDS`` of :mod:`gputop.render.step_parts`. ``time_s`` is on the path, ``other_s`` the
    time of events and threads in the same step that are not, several at once summed; ``slack_s`` the least of these."""

    id: str
    time_s: float
    other_s: float = 0.0
    slack_s: float | None = None


class PathSegment(Struct, frozen=True):
    """A stretch of the path. ``start_ns`` and ``end_ns`` are on the trace's own clock. ``place`` is a GPU's stream or a
    host thread. Where short stretches are told as one, ``stretches`` is their number, and the others are those of what
    took most of it. ``name`` is "" where the trace has none: Python, a pause, or making a batch."""

    kind: str
    name: str
    place: str
    start_ns: int
    end_ns: int
    stretches: int = 1


class Slack(Struct, frozen=True):
    """Work beside the critical path of the step, under one name at one place. ``slack_s``: each of it could take that
    much longer, once, and the GPUs would not end the next step later; None: any time."""

    kind: str
    name: str
    place: str
    count: int
    time_s: float
    slack_s: float | None


class CriticalPath(Struct, frozen=True):
    """Critical path of a typical step: each of ``segments`` was waited for by the one after it.

    ``step`` counts from 0 in the trace; it lasts from ``start_ns`` to ``end_ns`` of the trace's own clock, as the
    segments and the times of ``kinds`` do together. ``slack`` lists what is not on the path, longest first.
    ``reason`` says why there is no path, or what about it is not sure.
    """

    step: int
    start_ns: int
    end_ns: int
    kinds: tuple[PathKind, ...] = ()
    segments: tuple[PathSegment, ...] = ()
    slack: tuple[Slack, ...] = ()
    reason: str = ""

    @property
    def step_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class StackLine(Struct, frozen=True):
    """A line of Python in gaps of one kind: "metrics.py:112 confusion_matrix". ``share`` is of those gaps' time.

    It is the innermost line of the user's own code, without those that every step runs in, or else of a library.
    ``inner`` is the library's line that it most waits for, "" where it runs itself. ``traced``: the profiler's own
    tracer recorded it (:class:`HostStacks`). ``loader``: what makes batches and calls it: grain, keras, torch, datasets
    (of Hugging Face), or a function of the user's own ("user") by its name; "": none of these. ``saves``: a library
    saves a checkpoint in most of it.
    """

    line: str
    file: str
    s_per_step: float
    share: float
    inner: str = ""
    traced: bool = False
    loader: str = ""
    saves: bool = False


class GapLines(Struct, frozen=True):
    """The Python that ran in gaps of one kind: the causes of idle gaps (gputop.timeline.model.CAUSES).

    ``seen`` of the ``gaps`` had a sample in them, and the lines are of those, scaled to all: ``s_per_step`` is the time
    of all gaps, mean of the GPUs. In waits for input the lines are of other threads than the training loop's.
    """

    gap: str
    s_per_step: float
    gaps: int
    seen: int
    lines: tuple[StackLine, ...] = ()


class FlameNode(Struct, frozen=True):
    """A line of the training loop's stacks with all that it calls, seconds per step; ``gap_s`` of it in gaps.
    ``parent`` is the place of the line that called it, None for the outermost."""

    line: str
    file: str
    parent: int | None
    time_s: float
    gap_s: float


class HostStacks(Struct, frozen=True):
    """The job's Python stacks during the capture. ``basis``: whether figures are per "step", "period" or "window".

    ``cpus`` is what the sampling took of the node's CPUs, ``error_s`` how far the samples may be off the trace's
    clock, ``missed`` the share of samples that failed. Without stacks ``reason`` says why. ``source`` says who recorded
    them: "py-spy", or the profiler's own "tracer" into the trace, which names a function by its first line, a "tracer
    with lines" by the line that called another one; these have no rate.
    """

    basis: str = "step"
    length_s: float = 0.0
    rate_hz: float = 0.0
    missed: float = 0.0
    error_s: float = 0.0
    cpus: float = 0.0
    gaps: tuple[GapLines, ...] = ()
    flame: tuple[FlameNode, ...] = ()
    reason: str = ""
    source: str = "py-spy"

    @property
    def traced(self) -> bool:
        """Return whether every call was recorded, not samples of them."""
        return self.source.startswith("tracer")


class Analysis(Struct, frozen=True, kw_only=True):
    schema: str = SCHEMA
    simulated: bool = False
    trace: TraceSummary
    steps: StepTimes | None = None
    wall_time: WallTime | None = None
    breakdown: Breakdown | None = None
    input: InputPipeline | None = None
    gaps: StepGaps | None = None
    ops: HostOps | None = None
    functions: Functions | None = None
    launch_threads: LaunchThreads | None = None
    gpus: tuple[GpuUse, ...] = ()
    collectives: Collectives | None = None
    memory: tuple[AllocatorUse, ...] = ()
    kernels: Kernels | None = None
    kernel_sizes: tuple[KernelSizes, ...] = ()
    copies: CopyTable | None = None
    replicas: Replicas | None = None
    typical_step: TypicalStep | None = None
    batch_scaling: tuple[BatchScaling, ...] = ()
    sm_use: tuple[SmUse, ...] = ()
    layers: Layers | None = None
    cpu_layers: Layers | None = None  # of a job without GPUs, in place of ``layers``
    limits: Limits | None = None
    critical_path: CriticalPath | None = None
    ranks: tuple[RankTimes, ...] = ()  # those that compute, where there are several, and steps
    stacks: HostStacks | None = None  # None: nobody tried to sample them
    findings: tuple[Finding, ...] = ()
    abstained: tuple[Abstained, ...] = ()
    what_if: tuple[CombinedGain, ...] = ()

    @property
    def account(self) -> Account | None:
        return self.wall_time.account if self.wall_time is not None else None

    def to_json(self) -> dict[str, Any]:
        """The document ``gputop.analysis/1``: what ``json.dump`` writes."""
        document: dict[str, Any] = to_document(self)
        return document

    @classmethod
    def from_json(cls, document: object, name: str = "the analysis") -> Analysis:
        """The analysis in a document; raises GputopError that calls it ``name`` where it is damaged."""
        return from_document(document, cls, name)
