"""The facts that every rule on traces receives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from threading import RLock
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct, field

from gputop.advice.causes import Claimed
from gputop.advice.registry import limit
from gputop.advice.rule import Rule
from gputop.analysis.gpu.breakdown import PartsByGpu
from gputop.analysis.gpu.collective_waits import CollectiveWaits
from gputop.analysis.gpu.device_time import GpuTimeline
from gputop.analysis.host.gaps import longest_on_host
from gputop.analysis.host.host_causes import HostCauses
from gputop.analysis.host.wall_time import Division
from gputop.analysis.layers.pytorch import CallScopes
from gputop.analysis.results import Analysis, GapWork, GpuUse, WallPart
from gputop.analysis.steps.model import Steps
from gputop.analysis.steps.pytorch_ops import workers_started
from gputop.analysis.steps.training_loops import training_loops
from gputop.analysis.what_if.replay import Replay
from gputop.core.findings import Claim, Culprit, Severity
from gputop.text.units import counted
from gputop.trace.intervals import EMPTY, Spans, contains, coverage, intersect, merge, overlap, union
from gputop.trace.kernel_names import op_of_annotation, split_op
from gputop.trace.lookups import host_rows, host_stat, rows_of
from gputop.trace.model import I64, Kind, Trace
from gputop.trace.threads import MAIN, lines_of

# Of what TensorFlow and JAX record on the host; a job may also have none of it.
HOST_EVENTS = "; if the job has any, gputop's captures contain them (host_tracer_level 2)"
TORCH_HOST = ", which torch.profiler records with ProfilerActivity.CPU"  # PyTorch's

OF_ONE_KERNEL = ("small_grids",)  # a grid is a fact of its kernel, however few there are
_MOMENT = 0.1  # share of the recording. gputop's own figure
_CROWDED = 1.2  # times the CPUs: what threads use and wait for beyond that is no short wait of one
NO_GPU = -1  # of spans by GPU: those of a job without one

T = TypeVar("T")
_COMPUTING = RLock()  # of :func:`once_per_trace`


class TraceFacts(Struct, frozen=True):
    """A trace, its analysis, and where the time goes as shares.

    ``shares`` has the parts of a :class:`~gputop.analysis.results.Breakdown` as ratios of the step, or of the device
    window where there are no steps (``basis`` says which). ``period_s`` is the length of one step or of the window.
    Where the trace does not tell, the shares are empty and the length is 0.
    """

    trace: Trace
    analysis: Analysis
    steps: Steps | None
    shares: Mapping[str, float]
    basis: str  # "step", "window", or "period": of a kernel sequence that may be a layer or the step
    period_s: float
    framework: str  # tensorflow, jax, pytorch or unknown
    params: int | None = None
    gpu_timelines: Sequence[GpuTimeline] = ()  # of the GPUs on which anything ran
    waits: CollectiveWaits | None = None  # None: no GPU ran a collective
    replay: Replay | None = None  # None: no GPU ran
    host: HostCauses | None = None  # the host's part of the GPUs' idle time, by cause
    parts: PartsByGpu = field(default_factory=dict)  # when each part of the step holds, of the GPUs that took part
    division: Division | None = None  # of the recorded time; None: the trace has none
    calls: CallScopes | None = None  # modules and calls around PyTorch's launches; None: another framework's
    claimed: dict[str, Claimed] = field(default_factory=dict)  # by finding, once it is made
    # What several rules compute of the trace alone, by function; see :func:`once_per_trace`.
    cache: dict[Any, Any] = field(default_factory=dict)

    @property
    def active(self) -> list[GpuUse]:
        return [gpu for gpu in self.analysis.gpus if gpu.kernels]

    def on_cpus(self, claim: Claim, on_gpus: Claim = "measured") -> Claim:
        """Return the claim of a fix that also frees CPUs, which only a step that runs on them gains by. Where more of
        the job's threads want to run than there are CPUs, it gains more than the time that is removed."""
        if self.active:
            return on_gpus
        cpus = self.trace.job_cpus
        crowded = cpus is not None and (cpus.threads or 0) > cpus.limit and (
            (cpus.used or 0.0) + (cpus.waited or 0.0) > _CROWDED * cpus.limit)
        return "at least" if claim == "about" and crowded else claim

    @property
    def active_numbers(self) -> tuple[int, ...]:
        return tuple(gpu.gpu for gpu in self.active)

    @property
    def hardly_any_kernels(self) -> bool:
        """Return whether the GPUs ran so few kernels, and fewer steps than can stand for a job, that nothing weighs
        much."""
        steps = self.steps.count if self.steps else 0
        return steps < limit("few.steps") and 0 < self._kernels_per_gpu < limit("few.hardly_any_kernels")

    @property
    def hardly_a_kernel(self) -> bool:
        """Return whether there are GPUs that worked, and so few kernels that none is judged but by its own shape."""
        return 0 < sum(gpu.kernels for gpu in self.active) < limit("few.judged_kernels")

    @property
    def _kernels_per_gpu(self) -> float:
        return sum(gpu.kernels for gpu in self.active) / max(len(self.active), 1)

    @property
    def caveat(self) -> str | None:
        """Caveat on a window that is too short to stand for the job, in a sentence; else None."""
        steps, kernels = self.steps.count if self.steps else 0, self._kernels_per_gpu
        few_kernels = kernels < limit("few.kernels")
        if steps >= limit("few.steps") or (not steps and not few_kernels):
            return None
        about = counted(steps, "complete step") if steps else ""
        if self.active and few_kernels:
            about += f"{' and ' if about else ''}{counted(round(kernels), 'kernel')} per GPU"
        only = f"only {about}" if about else "no known step"
        return f"The recording contains {only}; capture a longer trace to be sure."

    def severest(self, rule: Rule, per: str) -> Severity:
        """Return the gravest severity that a finding of the rule, ``per`` step or recording, can have in so short a
        window."""
        steps, wall = self.steps.count if self.steps else 0, self.analysis.wall_time
        short = self.basis != "step" or (per != "recording" and 0 < steps < limit("few.steps"))
        if rule.costs_time and short and wall is not None and (
                0 < self.analyzed_spans.total < _MOMENT * wall.recorded_s * 1e9):
            return "low"  # shares of a layer, or of what follows a start, which runs for a moment of the recording
        if not rule.costs_time or steps >= limit("few.steps"):
            return "high"
        few_kernels = self._kernels_per_gpu < limit("few.kernels") and rule.severity == "by_share_capped"
        if self.hardly_any_kernels:
            return "medium" if rule.id in OF_ONE_KERNEL else "low"
        return "medium" if few_kernels or steps == 1 else "high"

    @property
    def least_capability(self) -> tuple[int, int] | None:
        """The least compute capability of the GPUs; None where it is not known."""
        return min((gpu.compute_capability for gpu in self.trace.gpus if gpu.compute_capability), default=None)

    @property
    def steps_or_window(self) -> int:
        """Number of steps in a sum over all of ``analyzed_spans``; 1 without steps."""
        return self.steps.count if self.steps else 1

    @property
    def processes(self) -> int:
        """Number of the job's processes in a sum over their hosts."""
        return max(len(self.host.divided), 1) if self.host is not None else 1

    @property
    def of_recorded(self) -> float:
        """Share of the recorded time that ``period_s`` is without steps; 1 with steps."""
        wall = self.analysis.wall_time
        return min(self.period_s / wall.recorded_s, 1.0) if self.steps is None and wall and wall.recorded_s else 1.0

    @property
    def replayed_steps(self) -> float:
        """Number of steps of the replay; of very many events it takes a part."""
        replayed = self.replay.spans.total if self.replay is not None else 0
        return self.steps_or_window * (replayed / self.analyzed_spans.total if replayed else 1.0)

    def starts_of_workers(self, waits: Mapping[int, Spans]) -> Sequence[float]:
        """Seconds of each start of PyTorch's workers, if these waits are mostly in such, and none is anew each pass."""
        started, all_waits = workers_started(self.trace)[0], merge(EMPTY, *waits.values())
        most = 2 * overlap(started, all_waits) > all_waits.total and not new_workers(self).total
        return ((started.end - started.start) / 1e9).tolist() if most else ()

    @property
    def analyzed_spans(self) -> Spans:
        """The time that is judged: the steps, or from the first device event to the last, or the window."""
        if self.steps is not None:
            return self.steps.spans
        windows = [timeline.window_ns for timeline in self.gpu_timelines] or [self.trace.window_ns]
        begins, ends = zip(*windows, strict=True)
        return union([min(begins)], [max(ends)])


def once_per_trace(find: Callable[[TraceFacts], T]) -> Callable[[TraceFacts], T]:
    """Compute what several rules ask of a trace once, whoever asks, also at the same time."""
    @wraps(find)
    def ask(facts: TraceFacts) -> T:
        with _COMPUTING:
            if find not in facts.cache:
                facts.cache[find] = find(facts)
        result: T = facts.cache[find]
        return result

    return ask


def severity_by_limits(rule: str, share: float) -> Severity:
    """Severity by the rule's own limits: what it finds may be wanted, or it does not say what a fix saves."""
    return "high" if share >= limit(f"{rule}.high") else "medium" if share >= limit(f"{rule}.medium") else "low"


def parts_of(facts: TraceFacts, idle: Mapping[int, Spans], ids: Collection[str]) -> dict[str, float]:
    """The time (ns) in these idle spans by GPU (index into ``Trace.gpus``) of each of these parts of the step."""
    return {part: float(sum(overlap(facts.parts[gpu][part], spans) for gpu, spans in idle.items()
                            if gpu in facts.parts)) for part in ids}


def kernels_named(facts: TraceFacts, names: Collection[str]) -> I64:
    """Rows of the compute kernels with one of these names."""
    device = facts.trace.device
    wanted = set(names)
    chosen = np.array([name in wanted for name in facts.trace.names] + [False])
    return np.flatnonzero(chosen.take(device.name) & (device.kind == Kind.COMPUTE))


def exposed_ns(facts: TraceFacts, rows: I64) -> I64:
    """The time of these device events within the steps in which their GPU neither computes nor runs a collective."""
    device, out = facts.trace.device, np.zeros(len(rows), np.int64)
    for timeline in facts.gpu_timelines:
        on_gpu = np.flatnonzero(device.gpu[rows] == timeline.gpu)
        start, end = device.start_ns[rows[on_gpu]], device.end_ns[rows[on_gpu]]
        hidden = intersect(merge(timeline.compute, timeline.collectives), facts.analyzed_spans)
        out[on_gpu] = coverage(facts.analyzed_spans, start, end) - coverage(hidden, start, end)
    return out


def on_host(facts: TraceFacts, work: Sequence[GapWork], within: Spans, per: str = "") -> tuple[Culprit, ...]:
    """Work of the host ``within`` some time as culprits, each with the place of its longest event there; of
    "scope/op:Type" without the type. ``per``: what its times are of, if not of a step."""
    begins = longest_on_host(facts.trace, {item.name for item in work}, within)
    return tuple(Culprit(split_op(item.name)[0] if op_of_annotation(item.name) else item.name, "host", item.s_per_step,
                         per or facts.basis, at_s=begins.get(item.name)) for item in work)


def new_workers(facts: TraceFacts) -> Spans:
    """Spans in which PyTorch's DataLoader starts its workers anew; none where it did so once, which may be the
    start."""
    spans = workers_started(facts.trace)[1]
    return spans if len(spans.start) > 1 else EMPTY


def host_rows_in_steps(facts: TraceFacts, pattern: str) -> I64:
    """Host events of such a name that begin within the steps, or the time that is judged without steps."""
    rows = host_rows(facts.trace, pattern)
    return rows[contains(facts.analyzed_spans, facts.trace.host.start_ns[rows])]


def share_of_steps(facts: TraceFacts, spans: Spans) -> float:
    """Share of the steps that these spans of one process take, or of the window without steps."""
    steps = facts.analyzed_spans
    return overlap(spans, steps) / steps.total if steps.total else 0.0


# Measured with PyTorch 2.13 on a CPU: 0.5-0.7 µs for an event with shapes, 0.3-0.4 without; up to half more where the
# records' memory is new.
_WITH_SHAPES, _DOUBT = 1.5, 1.4
_MOST = 0.95  # of a step that other programs interrupt; what is more cannot be told


def recorder_s(facts: TraceFacts, spans: Spans) -> float:
    """Seconds per step and process that PyTorch's profiler takes to record what the main threads begin in these
    spans."""
    host = facts.trace.host
    begun = host.start_ns[lines_of(facts.trace, MAIN).take(host.line)]
    events = int((np.searchsorted(begun, spans.end) - np.searchsorted(begun, spans.start)).sum())
    each_s = limit("launch_bound.recording_s") * (_WITH_SHAPES if len(host_stat(host, "elements")[0]) else 1.0)
    return events * each_s / facts.steps_or_window / facts.processes


def without_recorder(facts: TraceFacts, time_s: float, spans: Spans, held_up: float = 0.0) -> tuple[float, float]:
    """Share of the step that ``time_s`` in these spans is without what the profiler takes to record ops: as that is
    usually, and the least that it can be. ``held_up`` is the part of the step that is no op's and nobody's."""
    ran_s = facts.period_s * (1 - held_up) - recorder_s(facts, facts.analyzed_spans)
    if ran_s <= 0:
        return 0.0, 0.0
    recorded_s = recorder_s(facts, spans)
    usual, least = (min(max(time_s - part * recorded_s, 0.0) / ran_s, _MOST) for part in (1.0, _DOUBT))
    return usual, least


def waits_for_host(facts: TraceFacts, *causes: str) -> Spans:
    """Spans in which any GPU, or in a trace without one the step, waits for its host for one of these causes."""
    return merge(EMPTY, *removed_host_time(facts, *causes).values())


def waits_for_input(facts: TraceFacts) -> Spans:
    """Spans in which any GPU, or in a trace without one the training loop, waits for a batch within the steps."""
    return merge(EMPTY, *input_spans(facts).values())


def input_spans(facts: TraceFacts) -> dict[int, Spans]:
    """The same waits along each GPU; without one along the job."""
    if facts.gpu_timelines:
        return {gpu: parts["input"] for gpu, parts in facts.parts.items()}
    waits = merge(EMPTY, *(loop.waits for loop in training_loops(facts.trace)))
    return {NO_GPU: intersect(waits, facts.analyzed_spans) if facts.steps is not None else waits}


def recorded_spans(facts: TraceFacts, parts: Iterable[WallPart]) -> dict[int, Spans]:
    """Return when these parts of the recording are, along each GPU; without one along the job."""
    wanted = {(part.id, part.kind, part.what) for part in parts}
    spans = merge(EMPTY, *(spans for rank in (facts.division.ranks if facts.division else ())
                           for part, spans in rank.parts if (part.id, part.kind, part.what) in wanted))
    return dict.fromkeys(facts.parts or (NO_GPU,), spans)


def idle_before(facts: TraceFacts, part: str) -> Iterator[tuple[I64, I64]]:
    """Rows of the device events before which the GPU is idle in this part of the steps, and for how long (ns), GPU by
    GPU."""
    for timeline in facts.gpu_timelines:
        waits = facts.parts.get(timeline.gpu, {}).get(part, EMPTY)
        # Each lies in one gap, or before the first event; what comes after the last event is before none.
        which = np.searchsorted(timeline.gaps.end, waits.start, side="right") + (waits.start >= timeline.window_ns[0])
        before = len(timeline.gaps.end) + 1
        chosen = rows_of(which < before)
        time = np.bincount(which[chosen], (waits.end - waits.start)[chosen], before).astype(np.int64)
        idle = np.flatnonzero(time)
        yield np.append(timeline.events.start, timeline.resuming)[idle], time[idle]


def removed_host_time(facts: TraceFacts, *causes: str) -> dict[int, Spans]:
    """Spans by GPU (index into ``Trace.gpus``) in which it waits for its host for one of these causes: what a fix takes
    from the host's threads. Without a GPU those of the job."""
    out = dict[int, Spans]()
    for one in facts.host.divided if facts.host is not None else ():
        gpu = one.timeline.gpu if one.timeline is not None else NO_GPU
        out[gpu] = merge(out.get(gpu, EMPTY), *(one.by_cause[cause] for cause in causes))
    return out


def waits_for_launches(facts: TraceFacts) -> bool:
    """Return whether the GPUs wait for launches, and not with kernels in a deep queue."""
    delays = [gpu.launch_delay_median_s for gpu in facts.active if gpu.launch_delay_median_s is not None]
    return facts.shares.get("launch", 0.0) >= limit("launch_bound.share") and (
        not delays or min(delays) < limit("launch_bound.deep_queue_s"))
