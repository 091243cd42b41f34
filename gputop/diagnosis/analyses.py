"""The analyses of a trace as a table, and the runner that orders them on several threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from msgspec import Struct

from gputop.analysis.account import account
from gputop.analysis.gpu.allocators import memory
from gputop.analysis.gpu.batch_scaling import batch_scaling
from gputop.analysis.gpu.breakdown import IdleByGpu, parts_by_gpu, typical_step
from gputop.analysis.gpu.collective_waits import collective_waits
from gputop.analysis.gpu.collectives import collectives
from gputop.analysis.gpu.copies import copy_table
from gputop.analysis.gpu.device_time import GpuTimeline, gpu_number, timelines
from gputop.analysis.gpu.kernel_launches import with_ncu
from gputop.analysis.gpu.kernel_table import kernel_sizes, kernels
from gputop.analysis.gpu.rank_times import rank_times
from gputop.analysis.gpu.replicas import replicas
from gputop.analysis.gpu.sm_use import sm_use
from gputop.analysis.host.functions import functions
from gputop.analysis.host.gaps import step_gaps
from gputop.analysis.host.host_causes import host_causes
from gputop.analysis.host.launch_threads import launch_threads
from gputop.analysis.host.stack_lines import host_stacks, python_of
from gputop.analysis.host.tf_data import input_pipeline
from gputop.analysis.host.wall_time import divide, wall_time
from gputop.analysis.layers.cpu_layers import cpu_layers
from gputop.analysis.layers.layers import layer_times
from gputop.analysis.results import Analysis, HostOps
from gputop.analysis.steps.membership import WorkOfSteps
from gputop.analysis.steps.model import Steps
from gputop.analysis.steps.start_up import UPLOAD, StartUpSpan, start_end_ns
from gputop.analysis.what_if.critical_path import critical_path
from gputop.analysis.what_if.replay import replay_window
from gputop.trace.gpu_clocks import clock_notes
from gputop.trace.intervals import union
from gputop.trace.lookups import computes_on_cpu
from gputop.trace.model import Kind, Trace


class Given(Struct, frozen=True):
    """Input of the analyses: the trace, its steps, and what most of them ask of both."""

    trace: Trace
    recording: Trace  # with the job's start, if ``trace`` is what follows it
    started: Sequence[StartUpSpan]
    steps: Steps | None
    gpu_timelines: list[GpuTimeline]
    bounds: Sequence[tuple[int, int]]  # of what is judged
    idle: IdleByGpu
    ops: HostOps | None
    of_steps: WorkOfSteps | None


class AnalysisEntry(Struct, frozen=True):
    """An analysis: ``run`` is given :class:`Given` and the results of those it ``needs``, in that order. ``when`` says
    whether there is something to analyze; its result is None without."""

    name: str  # of the field of Analysis that it is, if it is one
    run: Callable[..., Any]
    needs: tuple[str, ...] = ()
    when: Callable[[Given], bool] = lambda given: True


def _has_gpus(given: Given) -> bool:
    return bool(given.gpu_timelines)


def _copies(given: Given) -> Any:
    rows_by_gpu = {gpu_number(given.trace, timeline.gpu): timeline.rows[timeline.kind > Kind.COLLECTIVE]
                   for timeline in given.gpu_timelines}
    return copy_table(given.trace, rows_by_gpu, given.of_steps)


def _division(given: Given, python: Any) -> Any:
    of_recording = given.gpu_timelines if given.trace is given.recording else timelines(given.recording)
    # Before the model is on the GPU everything is the start, and without steps all that is left out as such.
    begin_ns = given.recording.window_ns[0]
    left_out_ns = start_end_ns(given.recording, given.started) if given.steps is None else None
    start_up = union([*(begin_ns if span.kind == UPLOAD else span.start_ns for span in given.started), begin_ns],
                     [*(span.end_ns for span in given.started), left_out_ns or begin_ns])
    return divide(given.recording, of_recording, given.steps, python, start_up)


# The long ones first. A new analysis is a row here; its result is that field of Analysis (FIELDS).
ANALYSES = (
    # A trace without the work of the job's GPUs tells no parts of the step.
    AnalysisEntry("parts", lambda given: parts_by_gpu(given.trace, given.gpu_timelines, given.bounds, given.idle),
                  when=lambda given: bool(given.gpu_timelines) or computes_on_cpu(given.trace)),
    AnalysisEntry("launch_threads", lambda given: launch_threads(given.trace, given.gpu_timelines)),
    AnalysisEntry("gaps", lambda given: step_gaps(given.trace, given.gpu_timelines, given.steps)),
    AnalysisEntry("causes", lambda given: host_causes(
        given.trace, given.gpu_timelines, given.steps, given.ops, given.idle)),
    AnalysisEntry("waits", lambda given: collective_waits(given.trace, given.gpu_timelines, given.steps, given.idle)),
    AnalysisEntry("layer_times", lambda given: layer_times(given.trace, given.gpu_timelines, given.steps),
                  when=_has_gpus),
    AnalysisEntry("replay", lambda given: replay_window(given.trace, given.gpu_timelines, given.steps), when=_has_gpus),
    AnalysisEntry("replicas", lambda given: replicas(given.trace, given.gpu_timelines, given.steps), when=_has_gpus),
    AnalysisEntry("kernel_table", lambda given: kernels(given.trace, given.gpu_timelines, given.of_steps)),
    AnalysisEntry("kernel_sizes", lambda given: kernel_sizes(given.trace, given.gpu_timelines, given.steps)),
    AnalysisEntry("functions", lambda given: functions(given.trace, given.steps)),
    AnalysisEntry("collectives", lambda given: collectives(given.trace, given.gpu_timelines, given.of_steps)),
    AnalysisEntry("input", lambda given: input_pipeline(given.trace, given.steps)),
    AnalysisEntry("copies", _copies),
    AnalysisEntry("batch_scaling", lambda given: batch_scaling(given.trace, given.gpu_timelines, given.steps)),
    AnalysisEntry("sm_use", lambda given: sm_use(given.trace, given.gpu_timelines, given.steps)),
    AnalysisEntry("memory", lambda given: memory(given.trace)),
    AnalysisEntry("clocks", lambda given: clock_notes(given.trace)),
    AnalysisEntry("python", lambda given: python_of(given.trace)),
    AnalysisEntry("cpu_layers", lambda given: cpu_layers(given.trace, given.steps)),
    AnalysisEntry("typical_step", lambda given, parts: typical_step(
        given.trace, given.gpu_timelines, given.steps, parts), ("parts",)),
    AnalysisEntry("critical_path", lambda given, replay: critical_path(replay, given.steps), ("replay",), _has_gpus),
    AnalysisEntry("kernels", lambda given, table: with_ncu(table, given.trace, given.steps), ("kernel_table",)),
    AnalysisEntry("ranks", lambda given, waits: rank_times(
        given.trace, given.gpu_timelines, given.steps, waits), ("waits",)),
    AnalysisEntry("stacks", lambda given, causes, python: host_stacks(
        given.trace, given.gpu_timelines, given.steps, causes, python), ("causes", "python")),
    AnalysisEntry("division", _division, ("python",)),
    AnalysisEntry("account", lambda given, division, parts: account(
        given.trace, division, given.gpu_timelines, given.steps, given.bounds, parts), ("division", "parts")),
    AnalysisEntry("wall_time", lambda given, *both: wall_time(*both), ("division", "account")),
)
FIELDS = tuple(entry.name for entry in ANALYSES if entry.name in Analysis.__struct_fields__)


def ordered(entries: Sequence[AnalysisEntry]) -> Iterator[AnalysisEntry]:
    """Yield each entry behind all that it needs, else in the table's order. ValueError: a need that nothing meets."""
    left, done = list(entries), set[str]()
    while left:
        ready = [entry for entry in left if done.issuperset(entry.needs)]
        if not ready:
            raise ValueError(f"no analysis provides what {left[0].name} needs: {', '.join(left[0].needs)}")
        yield from ready
        done |= {entry.name for entry in ready}
        left = [entry for entry in left if entry.name not in done]


def start_analyses(
    threads: ThreadPoolExecutor, given: Given, entries: Sequence[AnalysisEntry] = ANALYSES,
) -> Mapping[str, Future[Any]]:
    """Submit the analyses; returns their results to come, by name. A pool begins work in the order of its submission,
    so what a thread waits for has begun: one thread is enough."""
    futures: dict[str, Future[Any]] = {}

    def run(entry: AnalysisEntry, needed: Iterable[Future[Any]]) -> Any:
        return entry.run(given, *(future.result() for future in needed)) if entry.when(given) else None

    for entry in ordered(entries):
        futures[entry.name] = threads.submit(run, entry, [futures[name] for name in entry.needs])
    return futures
