"""Launches: does the GPU wait for the host to hand it kernels, are these too small to keep it busy, or is a CUDA graph
recorded again and again, in place of once?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from statistics import median

import numpy as np

from gputop.advice import savings
from gputop.advice.fix_code import code
from gputop.advice.registry import limit, source
from gputop.advice.trace.facts import TraceFacts, idle_before, once_per_trace, parts_of, waits_for_launches
from gputop.advice.trace.job import Job
from gputop.advice.verdict import Explanation, Missing, Verdict, known
from gputop.analysis.gpu.device_time import launching_to
from gputop.analysis.layers.culprits import Events
from gputop.analysis.steps.membership import step_of
from gputop.analysis.what_if.cure import Cure
from gputop.analysis.what_if.host_waits import host_waits
from gputop.core.findings import Culprit
from gputop.text.units import count, percent, seconds
from gputop.trace.graph_captures import recordings
from gputop.trace.intervals import EMPTY, Spans, coverage, in_order, intersect, overlap, subtract
from gputop.trace.lookups import distinct, host_rows, launching_lines, line_by_line, rows_of, spans_of
from gputop.trace.model import I64, Kind

_SHORTEST_S = 1e-7  # no kernel starts so soon after its launch
_COMPILED_RUNS = r"Torch-Compiled Region|## Call CompiledFxGraph|CompiledFunction(?:Backward)?$"
_ONE_BY_ONE = 0.5  # share of the kernels that have a launch of their own
_QUICK = 0.05  # quantile of the times between launches
_GRAPHS_OF_SERVER = ("Let {0} record CUDA graphs, which launch all kernels of a step in one call. During this "
                     "recording, {0} launched each kernel separately.")


class LaunchBound(Verdict, frozen=True, kw_only=True):
    kernel_median_s: float
    kernels_per_s: float
    launch_delay_s: float | None  # from a launch to its kernel's start, median
    idle_host_fault: float | None  # share of the idle time in which the next kernel was not launched yet
    pace_s: float | None  # from one launch to the next
    waits: bool = False  # whether the host waits for the GPU more than once per step
    recorded: float | None = None  # events that PyTorch's profiler recorded per step in the launching threads' waits
    recording_s: float | None = None  # what that took of them, estimated
    in_compiled: bool = False  # whether torch.compile's code runs in most of the wait


def judge_launch_bound(facts: TraceFacts) -> LaunchBound | None:
    """The GPU runs out of work while the host is busy launching more.

    Idle time that another cause explains (input wait, waiting for another GPU, copies, host work between launches) is
    not in the share ``launch``, so this fires for launches alone.
    """
    if not waits_for_launches(facts):
        return None
    gpus, share = facts.active, facts.shares["launch"]
    delays = [gpu.launch_delay_median_s for gpu in gpus if gpu.launch_delay_median_s is not None]
    faults = [gpu.idle_host_fault for gpu in gpus if gpu.idle_host_fault is not None]
    waits = {gpu: parts["launch"] for gpu, parts in facts.parts.items()}
    recorded, recording_s, (pace_s, quick_s) = None, None, launch_pace_s(facts)
    if facts.framework == "pytorch":
        host = facts.trace.host  # of which the threads that launch count
        recorded = _in_waits(facts, host.start_ns[np.isin(host.line, launching_lines(facts.trace))], waits)
        # Launches and copies, which the profiler records where the driver runs them.
        launches = _in_waits(facts, distinct(facts.trace.device.launch_ns), waits)
        recording_s = min(share * facts.period_s, (  # no more than the wait that it is in
            # Recording a launch takes no longer than the quickest ones are apart.
            recorded * limit("launch_bound.recording_s") + launches * min(
                limit("launch_bound.recorded_launch_s"), quick_s or math.inf)))
    # The host waits for the GPU within the steps: once at the end of each is the fetched loss.
    synced = host_waits(facts.trace, limit("copies_pageable.bytes"))
    threads = max(len(np.unique(synced.line)), 1)
    marked = facts.steps is not None and bool(facts.steps.call_ends_ns)
    return LaunchBound(
        gpus=facts.active_numbers, share=share,
        kernel_median_s=median(gpu.kernel_median_s for gpu in gpus if gpu.kernel_median_s is not None),
        kernels_per_s=sum(gpu.kernels_per_s for gpu in gpus) / len(gpus),
        launch_delay_s=median(delays) if delays else None,
        idle_host_fault=sum(faults) / len(faults) if faults else None, pace_s=pace_s,
        waits=len(synced.line) > (1.5 if marked else 0.5) * facts.steps_or_window * threads,
        recorded=recorded, recording_s=recording_s, in_compiled=_in_compiled(facts, waits),
        events=Events(found=partial(idle_before, facts, "launch"), idle=True),
        cure=Cure(host=waits, assumes=(
            "Assumes that each kernel is launched before its GPU waits for it, as with one call for many kernels, and "
            "that kernels take as long as they do now.")))


def _in_waits(facts: TraceFacts, begin_ns: I64, waits: dict[int, Spans]) -> float:
    """Number of these instants, in order of time, per step, or in the window, that lie in a wait; mean of the GPUs."""
    number = sum(int((np.searchsorted(begin_ns, spans.end) - np.searchsorted(begin_ns, spans.start)).sum())
                 for spans in waits.values())
    return number / max(len(waits), 1) / facts.steps_or_window


def _in_compiled(facts: TraceFacts, waits: dict[int, Spans]) -> bool:
    """Return whether code that torch.compile made runs on the GPU's own threads for most of these waits."""
    rows, trace, over = host_rows(facts.trace, _COMPILED_RUNS), facts.trace, 0
    for timeline in facts.gpu_timelines if len(rows) else ():
        spans = waits.get(timeline.gpu, EMPTY)
        compiled = spans_of(trace, rows[launching_to(trace, timeline)[trace.host.line[rows]]])
        over += 2 * overlap(spans, compiled) - spans.total
    return over > 0


def describe_launch_bound(v: LaunchBound, job: Job) -> Explanation:
    clocks_differ = v.launch_delay_s is not None and v.launch_delay_s < _SHORTEST_S
    evidence = known({
        "launch_wait_s": v.share * job.period_s, "share_ratio": v.share, "kernel_median_s": v.kernel_median_s,
        "kernels_per_s": v.kernels_per_s, "launch_delay_median_s": None if clocks_differ else v.launch_delay_s,
        "idle_host_fault_ratio": v.idle_host_fault, "launch_pace_s": v.pace_s})
    why = f"For {percent(v.share)} of the {job.basis}, a GPU is idle because its next kernel has not been launched yet."
    if v.kernel_median_s < limit("launch_bound.short_kernel_s"):
        why += f" Half of the kernels run for less than {seconds(v.kernel_median_s)}, while "
        why += (f"the host launches only one kernel every {seconds(v.pace_s)}."
                if v.pace_s is not None and v.pace_s > v.kernel_median_s else "launching a kernel takes 20-40 µs."
                if not job.graphs else "CUDA graphs launch many kernels in one call.")
    least_s = limit("launch_bound.recording_share") * evidence["launch_wait_s"]
    if v.recorded and v.recording_s and v.recording_s >= least_s:
        evidence["recording_s"] = v.recording_s
        why += (f" About {seconds(v.recording_s)} of this wait is profiler overhead for recording each launch and "
                f"{v.recorded:,.0f} ops and Python functions, so the wait is shorter without the profiler.")
    kind = f"{'-compiled' if job.compiled else ''}{'-waits' if v.waits else ''}"
    server = code("launch_bound", job.server)
    if server is not None and not job.graphs:
        action = _GRAPHS_OF_SERVER.format(job.server)
    elif job.graphs:
        action = ("CUDA graphs are already in use: prepare and launch the next graph while the GPU works, and record "
                  "what still runs between two graphs.")
    elif job.compiled and job.framework == "jax":
        kind = "-compiled"
        action = ("The step is already compiled: run several steps in one call, and put separate calls into one "
                  "function.")
    elif job.framework == "pytorch" and v.in_compiled:
        kind = "-compiled-graphs"
        action = ("Let torch.compile replay CUDA graphs: most of this wait is in code that is compiled already but "
                  "launches its kernels one by one.")
    elif job.compiled:
        graphs = "" if v.waits else "let it replay CUDA graphs, "
        action = (f"Part of the model is already compiled: {graphs}find out what breaks the graph and what is "
                  "recompiled, and compile the rest.")
    elif job.framework == "unknown" or not job.compiles:
        start = "Let the host wait for the GPU only when it uses a result. Then launch" if v.waits else "Launch"
        action = f"{start} fewer, larger kernels: fuse them, or record them once as a CUDA graph and launch the graph."
    else:
        action = "Launch fewer, larger kernels: compile the step so that kernels are fused."
    return Explanation(
        title=f"GPU waits for launches for {percent(v.share)} of the {job.basis}", why=why, evidence=evidence,
        action=action + (job.then_larger if job.framework != "unknown" and (server is None or job.graphs) else ""),
        snippet=None if job.graphs or not job.compiles else server if server is not None else (
            job.xla if job.framework == "tensorflow" else code("launch_bound", job.framework + kind, job.framework)),
        source=source("launch_bound.share", "launch_bound.short_kernel_s") + "; HTA: idle time caused by the host")


@once_per_trace
def launch_pace_s(facts: TraceFacts) -> tuple[float, float] | tuple[None, None]:
    """Time from one launch to the next on a thread, median and of the quickest; None where launches are not known, or
    most kernels are not launched one by one."""
    device = facts.trace.device
    kernels, of_threads = 0, list[I64]()
    for line, rows in line_by_line(device.launch_line):
        launch_ns = device.launch_ns[rows[rows_of(device.kind[rows] <= Kind.COLLECTIVE)]]
        if line >= 0 and len(launch_ns):
            kernels += len(launch_ns)
            apart = np.diff(in_order(launch_ns))
            of_threads.append(apart[rows_of(apart > 0)])  # of a CUDA graph calls are counted, not kernels
    threads, apart = len(of_threads), np.concatenate(of_threads or [np.empty(0, np.int64)])
    del of_threads
    if not len(apart) or len(apart) + threads < _ONE_BY_ONE * kernels:
        return None, None
    median, quick = np.quantile(apart, (0.5, _QUICK), overwrite_input=True).tolist()
    return median / 1e9, quick / 1e9


# A pause between two queued kernels, or one launch; longer ones have other causes.
_PAUSE_NS = 40_000
_WAITS = ("launch", "host", "idle")  # parts of the step that pauses are in
_COMPILER = {"tensorflow": " with XLA", "jax": " with XLA", "pytorch": " with torch.compile"}


class SmallKernels(Verdict, frozen=True, kw_only=True):
    short_ratio: float  # share of the kernels that run for less than 20 µs
    kernel_median_s: float
    pauses_s: float  # between kernels, per step and GPU
    kernels_per_s: float
    pace_s: float | None  # from one launch to the next; None: not known
    kernels_per_step: float | None


def judge_small_kernels(facts: TraceFacts) -> SmallKernels | None:
    """Most kernels are shorter than launching one takes, and the pauses between them add up."""
    gpus = facts.active
    sizes = [size for size in facts.analysis.kernel_sizes if size.below_20us is not None]
    if not sizes:
        return None
    short = sum(sum(size.count) * (size.below_20us or 0.0) for size in sizes) / sum(sum(size.count) for size in sizes)
    if short < limit("small_kernels.count"):
        return None
    pauses = {}
    for timeline in facts.gpu_timelines:
        brief = rows_of(timeline.gaps.end - timeline.gaps.start <= _PAUSE_NS)
        waits = facts.parts.get(timeline.gpu, {}).get("input", EMPTY)  # in which kernels make a batch
        pauses[timeline.gpu] = subtract(intersect(Spans(timeline.gaps.start[brief], timeline.gaps.end[brief]),
                                                  facts.analyzed_spans), waits)
    pauses_s = sum(spans.total for spans in pauses.values()) / len(pauses) / facts.steps_or_window / 1e9
    share = savings.removed(pauses_s, facts.period_s)
    if share < limit("small_kernels.share"):
        return None
    per_step = [sum(size.count_per_step) for size in sizes if size.count_per_step is not None]
    return SmallKernels(
        gpus=facts.active_numbers, share=share, spans=pauses, of_parts=parts_of(facts, pauses, _WAITS),
        short_ratio=short, pauses_s=pauses_s,
        kernel_median_s=median(gpu.kernel_median_s for gpu in gpus if gpu.kernel_median_s is not None),
        kernels_per_s=sum(gpu.kernels_per_s for gpu in gpus) / len(gpus), pace_s=launch_pace_s(facts)[0],
        kernels_per_step=sum(per_step) / len(per_step) if per_step else None,
        events=Events(found=partial(_short, facts)), cure=Cure(launching=True, pauses=True, assumes=(
            "Assumes that a few large kernels do the same work in the same time, without gaps between kernels and "
            "without launch time.")))


def _short(facts: TraceFacts) -> Iterator[tuple[I64, I64]]:
    """The short kernels, and the time of each with the pause before it, GPU by GPU."""
    for timeline in facts.gpu_timelines:
        time = coverage(facts.analyzed_spans, timeline.start_ns, timeline.end_ns)
        after, pause = timeline.resuming - timeline.events.start, timeline.gaps.end - timeline.gaps.start
        time[after] += np.where((pause <= _PAUSE_NS) & (time[after] > 0), pause, 0)
        short = np.flatnonzero((timeline.kind == Kind.COMPUTE) & (
            timeline.end_ns - timeline.start_ns < limit("small_kernels.kernel_s") * 1e9))
        yield timeline.events.start + short, time[short]


def describe_small_kernels(v: SmallKernels, job: Job) -> Explanation:
    median = f"{seconds(v.kernel_median_s)}"
    launch = "" if job.graphs else ", about the time that one launch takes"
    why = (f"{percent(v.short_ratio)} of the kernels run for less than 20 µs (median {median}){launch}. The gaps "
           f"between kernels take {percent(v.share)} of the {job.basis}.")
    if v.pace_s is not None:
        why += f" The host launches one kernel every {seconds(v.pace_s)}."
    kind, more = ("-compiled", "more of ") if job.compiled else ("", "")
    server = code("launch_bound", job.server) if not job.graphs else None
    layers = "use fused layers" if job.trains is False else "use fused layers and optimizers"
    start = "Do the same work in fewer, larger kernels"
    if job.graphs:
        start, kind = "A CUDA graph already launches the kernels, so only fewer, larger kernels help", f"{kind}-graphs"
    return Explanation(
        title=f"Gaps between short kernels (median {median}) take {percent(v.share)} of the {job.basis}", why=why,
        evidence=known({
            "below_20us_ratio": v.short_ratio, "kernel_median_s": v.kernel_median_s, "pauses_s": v.pauses_s,
            "share_ratio": v.share, "kernels_per_s": v.kernels_per_s, "launch_pace_s": v.pace_s,
            "kernels_per_step": v.kernels_per_step}),
        action=_GRAPHS_OF_SERVER.format(job.server) if server is not None else (
            f"{start}: fuse them, or record them once as a CUDA graph.") if job.framework == "unknown" and (
            not job.graphs) else f"{start}: fuse {more}them{_COMPILER.get(job.framework, '') * job.compiles}, batch "
                                 f"small ops together, and {layers}.{job.then_larger}",
        snippet=server or (job.xla if job.framework == "tensorflow" and not job.graphs else code(
            "small_kernels", job.framework + kind)),
        source=source("small_kernels.kernel_s", "small_kernels.share") + "; nsys-ai: kinds of kernels under 10 µs")


_RECORD_ONCE = ("Record the graph once, before the loop, and only launch it in the loop. Keep shapes and input "
                "addresses the same: copy new inputs into the memory on which the graph was recorded.")
_BY_XLA = ("XLA records these graphs itself: call the function with the same shapes each time, and compare with a run "
           "without graphs.")
_WHAT_CHANGES = {"pytorch": " With torch.compile, TORCH_LOGS=recompiles,cudagraphs logs why a graph is recorded."}


class GraphRecapture(Verdict, frozen=True, kw_only=True):
    recorded: float  # graphs per step
    recording_s: float  # on the host, per step
    idle_s: float  # of the GPUs meanwhile, per step and GPU


def judge_graph_recapture(facts: TraceFacts) -> GraphRecapture | Missing | None:
    """A CUDA graph is recorded or instantiated in most steps, while the GPU is idle: it should be once."""
    steps = facts.steps
    if steps is None or steps.count < limit("graph_recapture.steps"):
        return None
    if steps.times.unit != "step":  # each layer may have a graph of its own
        return Missing("marked steps to see whether the same graph is recorded again")
    recorded, made_ns = recordings(facts.trace)
    in_step = step_of(made_ns, steps)
    in_step = in_step[in_step >= 0]
    if len(np.unique(in_step)) <= limit("graph_recapture.recurring") * steps.count:
        return None
    idle = {timeline.gpu: intersect(intersect(timeline.gaps, recorded), facts.analyzed_spans)
            for timeline in facts.gpu_timelines}
    idle_s = sum(spans.total for spans in idle.values()) / max(len(idle), 1) / steps.count / 1e9
    share = savings.removed(idle_s, facts.period_s)
    if share < limit("graph_recapture.share"):
        return None
    recording_s = overlap(recorded, facts.analyzed_spans) / steps.count / 1e9
    return GraphRecapture(
        gpus=facts.active_numbers, share=share, recorded=len(in_step) / steps.count,
        recording_s=recording_s, idle_s=idle_s,
        culprits=(Culprit("recording of CUDA graphs", "host", recording_s, facts.basis),),
        cure=Cure(host=idle, assumes="Assumes that each graph is recorded once, before these steps."))


def describe_graph_recapture(v: GraphRecapture, job: Job) -> Explanation:
    return Explanation(
        title=f"Recording CUDA graphs repeatedly costs {percent(v.share)} of the {job.basis}",
        why=f"{count(v.recorded)} CUDA graphs per {job.basis} are recorded and instantiated, which takes "
            f"{seconds(v.recording_s)} on the host and leaves the GPU idle for {percent(v.share)} of the {job.basis}. "
            "A graph saves time only if it is launched many times.",
        evidence={"graphs_per_step": v.recorded, "graph_recording_s": v.recording_s, "idle_while_recording_s": v.idle_s,
                  "share_ratio": v.share},
        action=_BY_XLA if job.framework in ("tensorflow", "jax") else _RECORD_ONCE + _WHAT_CHANGES.get(
            job.framework, ""),
        snippet=code("graph_recapture", job.framework),
        source=source("graph_recapture.share", "graph_recapture.recurring"))
