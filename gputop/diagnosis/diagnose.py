"""Diagnosis of trace files, which yields an :class:`~gputop.analysis.results.Analysis`: load, analyze, advise."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from gputop.advice.causes import unexplained
from gputop.advice.trace.advise import trace_advice
from gputop.advice.trace.facts import TraceFacts
from gputop.advice.trace_rules import TRACE_RULES
from gputop.analysis.gpu.breakdown import PartsByGpu, bounds_judged, idle_by_gpu, unseen_before_first_event
from gputop.analysis.gpu.collectives import no_collectives
from gputop.analysis.gpu.device_time import GpuTimeline, gpu_number, gpu_use, timelines, unused_gpu
from gputop.analysis.gpu.packed_series import ComparedTrace
from gputop.analysis.gpu.step_series import step_series
from gputop.analysis.host.host_ops import host_ops, without_idle_gpus
from gputop.analysis.host.unrecorded import unrecorded_note
from gputop.analysis.layers.step_limits import limits
from gputop.analysis.results import MORE_RUNS, SESSION_RUN, Analysis, TraceSummary
from gputop.analysis.steps import start_up
from gputop.analysis.steps.membership import work_of_steps
from gputop.analysis.steps.model import Steps
from gputop.analysis.steps.optimizer_calls import accumulation_note
from gputop.analysis.steps.phases import evaluation_note
from gputop.analysis.steps.steps import detect_steps
from gputop.core.findings import Abstained, TraceNote
from gputop.diagnosis.analyses import FIELDS, Given, start_analyses
from gputop.render.step_parts import PART_IDS
from gputop.text.units import counted, seconds
from gputop.trace.complete_part import part_of
from gputop.trace.graph_captures import in_captures
from gputop.trace.lookups import LAUNCH_CALLS, computes_on_cpu, detect_framework, host_rows, how_to_mark_steps
from gputop.trace.model import Trace
from gputop.trace.parallel import pool
from gputop.trace.quality import is_cut_off
from gputop.trace.readers.capture_file import capture_of
from gputop.trace.readers.load import load
from gputop.trace.threads import GRAPH_EXECUTOR

# How a profiler that recorded the host alone records its GPU, by format.
_PERMISSION = "`gputop doctor` checks the permission to profile."
_RECORD_GPU = {
    "chrome": f"Record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]. {_PERMISSION}",
    "nsys": "Record with `nsys profile --trace=cuda,nvtx`."}
_WHOLE_FILE = "an undamaged file, because events after the damage are missing"
_MUCH_UNSEEN = 0.1  # share of the steps. gputop's own figure
_FEW_STEPS = 5  # below, a mean is a mean of accidents (TraceML asks for 20 to be sure)


def analyze(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], params: int | None = None,
    flops_per_step: float | None = None,
) -> Analysis:
    """Read a trace and say what is wrong with the job in it.

    ``paths``: an ``.xplane.pb``, a run folder or TensorBoard logdir, Chrome/kineto JSON files (several are the ranks of
    one job), or an Nsight Systems ``.sqlite``. ``params``: number of the model's trainable parameters, for rules on
    AllReduce. ``flops_per_step``: FLOPs of one step on all GPUs of the trace together, for the limits. Raises
    :class:`gputop.core.errors.GputopError`; NoDataError where the trace holds no event.
    """
    several = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    return analyze_trace(load([os.fspath(p) for p in several]), params, flops_per_step)


def analyze_trace(trace: Trace, params: int | None = None, flops_per_step: float | None = None) -> Analysis:
    """The same of a trace in memory; a pure function of it."""
    return analyze_to_facts(trace, params, flops_per_step).analysis


def analyze_to_facts(trace: Trace, params: int | None = None, flops_per_step: float | None = None) -> TraceFacts:
    """The analysis of a trace in memory, with what it rests on."""
    return analyze_with_steps(*detect_steps(without_idle_gpus(trace)), params, flops_per_step)


def analyze_with_steps(
    trace: Trace, steps: Steps | None, params: int | None = None, flops_per_step: float | None = None,
) -> TraceFacts:
    """The same of what :func:`~gputop.analysis.steps.steps.detect_steps` has found."""
    if is_cut_off(trace):
        return _unjudged(trace, steps)
    recording, started = trace, start_up.start_up_spans(trace)
    trace, start_note = _without_start_and_end(trace, steps, started)
    with pool(trace.event_count) as threads:
        do = threads.submit
        of_host = do(host_ops, trace, steps)
        in_steps = do(work_of_steps, trace, steps) if steps is not None and steps.count else None
        gpu_timelines = timelines(trace)
        bounds = bounds_judged(trace, gpu_timelines, steps)
        idle = idle_by_gpu(trace, gpu_timelines, bounds)
        ops = of_host.result()
        used = [do(gpu_use, trace, timeline, steps) for timeline in gpu_timelines]
        futures = start_analyses(threads, Given(trace, recording, started, steps, gpu_timelines, bounds, idle, ops,
                                                in_steps.result() if in_steps else None))
    results = {name: future.result() for name, future in futures.items()}
    by_gpu = {timeline.gpu: use.result() for timeline, use in zip(gpu_timelines, used, strict=True)}
    gpus = [by_gpu.get(g) or unused_gpu(trace, g) for g in range(len(trace.gpus))] if gpu_timelines else []
    layers, parts, account = results["layer_times"], results["parts"], results["account"]
    judged = account.breakdown if account is not None else None
    step_parts = judged if steps is not None else None
    analysis = Analysis(
        simulated=trace.simulated, trace=_summary(trace, (
            *start_note, *_notes(trace, steps, bool(gpu_timelines), results["clocks"], no_collectives(recording)),
            *_unseen_note(trace, gpu_timelines, steps, parts))),
        steps=steps.times if steps is not None else None, breakdown=step_parts,
        gpus=tuple(sorted(gpus, key=lambda use: use.gpu)), ops=ops, layers=layers.table if layers else None,
        limits=limits(step_parts, layers, [trace.gpus[timeline.gpu] for timeline in gpu_timelines], steps,
                      list(by_gpu.values()), flops_per_step) if steps else None,
        **{name: results[name] for name in FIELDS})
    total_s = judged.total if judged is not None else 0.0
    shares = {name: judged.known.get(name, 0.0) / total_s for name in PART_IDS} if judged and total_s else {}
    basis = account.basis if account is not None and (steps or judged) else "step"
    facts = TraceFacts(
        trace, analysis, steps, shares, basis, total_s, detect_framework(trace), params=params,
        gpu_timelines=tuple(gpu_timelines), waits=results["waits"], replay=results["replay"], host=results["causes"],
        parts=parts or {}, division=results["division"], calls=layers.calls if layers else None)
    advice = trace_advice(facts)
    wall = analysis.wall_time
    return replace(facts, analysis=msgspec.structs.replace(
        analysis, findings=advice.findings, abstained=advice.abstained, what_if=advice.what_if,
        wall_time=wall and msgspec.structs.replace(wall, unexplained=unexplained(
            analysis, advice.findings, facts.host.tracing_s if facts.host is not None else 0.0))))


def _without_start_and_end(trace: Trace, steps: Steps | None, started: Sequence[start_up.StartUpSpan],
                           ) -> tuple[Trace, tuple[TraceNote, ...]]:
    """Part of a trace that is judged by itself, with notes on what is left out; all of it where there are steps."""
    over_ns = start_up.start_end_ns(trace, started)
    notes: tuple[TraceNote, ...] = ()
    if over_ns is not None and (steps is None or not (steps.times.start_up or steps.bounds_ns[0][0] < over_ns)):
        notes = (TraceNote("start", (
            f"The first {seconds((over_ns - trace.window_ns[0]) / 1e9)} of the recording are job startup, with "
            f"{start_up.what_started(started, over_ns)}. gputop leaves the startup out and evaluates only the rest.")),)
    if steps is not None:
        return trace, notes
    if over_ns is not None:
        trace = start_up.after_start(trace, over_ns)
    trace = start_up.up_to_profilers_stop(trace)
    if (end_ns := start_up.end_start_ns(trace)) is not None:
        notes = (*notes, TraceNote("end", (
            f"In the last {seconds((trace.window_ns[1] - end_ns) / 1e9)} of the recording, the program mostly unloads "
            "modules and frees memory before it exits. gputop leaves that time out.")))
        trace = part_of(trace, 0, end_ns)
    return trace, notes


def _unjudged(trace: Trace, steps: Steps | None) -> TraceFacts:
    """Facts of a file that is cut off, without figures: missing events change all of them, the steps' length as well,
    where the host runs ahead of the GPU."""
    note = TraceNote("incomplete", (
        "gputop does not evaluate damaged files, because missing events look like idle time. Copy or capture again."))
    analysis = Analysis(simulated=trace.simulated, trace=_summary(trace, (*trace.quality, note)),
                        abstained=tuple(Abstained(rule.id, _WHOLE_FILE) for rule in TRACE_RULES))
    basis = steps.times.unit if steps is not None else "window"
    return TraceFacts(trace, analysis, steps, {}, basis, 0.0, detect_framework(trace))


def _summary(trace: Trace, quality: Sequence[TraceNote]) -> TraceSummary:
    begin, end = trace.window_ns
    return TraceSummary(
        paths=tuple(trace.paths), format=trace.format, hosts=tuple(trace.hosts), window_s=(end - begin) / 1e9,
        start_s=trace.origin_ns / 1e9 if trace.origin_ns else None,
        unrecorded_s=sum(end - begin for begin, end in trace.unrecorded_ns) / 1e9, events=trace.event_count,
        job_cpus=trace.job_cpus, live_steps=trace.live_steps, quality=tuple(quality))


def compared_trace(facts: TraceFacts) -> ComparedTrace:
    """Figures that a comparison needs of the trace of these facts."""
    series = None
    if facts.steps is not None:
        series = step_series(facts.trace, facts.steps, facts.gpu_timelines, facts.parts).packed()
    return ComparedTrace(series, tuple(gpu.name for gpu in facts.trace.gpus if gpu.name),
                         capture_of(facts.trace.paths).findings)


def _unseen_note(trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None,
                 parts: PartsByGpu | None) -> tuple[TraceNote, ...]:
    """Note that a large part of the steps lies before a GPU's first event and nothing shows whether the GPU worked."""
    if steps is None or parts is None:
        return ()
    unseen_ns = unseen_before_first_event(gpu_timelines, steps, parts)
    gpu = max(unseen_ns, key=lambda number: unseen_ns[number], default=-1)
    if gpu < 0 or unseen_ns[gpu] < _MUCH_UNSEEN * steps.spans.total:
        return ()
    return (TraceNote("unseen_head", (
        f"GPU {gpu_number(trace, gpu)} has no event in the first {seconds(unseen_ns[gpu] / 1e9)} of the steps. The GPU "
        "may have run work launched before the recording, so gputop names no cause for that time.")),)


def _steps_that_are_none(trace: Trace, steps: Steps) -> list[TraceNote]:
    """Notes for steps that are not those of a job that trains steadily."""
    notes = []
    if steps.times.unit == "period":
        notes.append(TraceNote("no_steps", (
            f"No event marks steps, but there is {steps.times.anchor} ({steps.count} times). The trace does not show "
            "whether this sequence is a layer of the model or a step, so values are per period. To find steps, mark "
            f"them with {how_to_mark_steps(trace)}.")))
    if steps.times.start_up:
        which = "The only step" if steps.count == 1 else f"All {steps.count} steps"
        notes.append(TraceNote("start_up", (
            f"{which} in this recording {'is' if steps.count == 1 else 'are'} part of job startup: "
            f"{steps.times.start_up}. Later steps are shorter and not shown here, so capture again when the job runs "
            "steadily.")))
    return notes


def _no_gpu(trace: Trace) -> TraceNote:
    """Note why a trace shows no GPU, as far as its host shows that: a job that uses a GPU launches kernels."""
    how = _RECORD_GPU.get(trace.format, _PERMISSION)
    called = bool(len(host_rows(trace, r"(?:cu|cuda)[A-Z]")))  # so the profiler was to record a GPU
    if computes_on_cpu(trace):
        how = f"{how} " if trace.format == "nsys" and not called else ""
        return TraceNote("no_gpu", f"The trace has no GPU. {how}All time except input wait counts as host time.")
    if len(launches := host_rows(trace, LAUNCH_CALLS)):
        how, launched = _PERMISSION if called else how, counted(len(launches), "kernel launch", "es")
        if in_captures(trace, launches).all():
            return TraceNote("no_gpu", f"The trace has no GPU but {launched}, which only "
                                       "graphs record: they run nothing.")
        return TraceNote("lost_kernels", f"The trace has no GPU but {launched}, so the profiler did not record the "
                                         f"kernels. {how}")
    if any(line.name.startswith(GRAPH_EXECUTOR) for line in trace.lines):
        how = "Run the session with trace_level=FULL_TRACE, and with CUPTI's folder in LD_LIBRARY_PATH."
    elif len(host_rows(trace, r"aten::(?:linear_backward|_?mps_)")):
        how = "Use torch.mps.profiler or Xcode's Instruments to record Apple GPUs."
    return TraceNote("lost_kernels", f"The trace shows no GPU, but the job used one. {how}")


def _notes(trace: Trace, steps: Steps | None, device_events: bool, clocks: Sequence[TraceNote],
           without: str | None) -> list[TraceNote]:
    """The reader's notes, and what the analyses themselves have to add to them."""
    notes = [*trace.quality, *clocks]
    note_ids = {note.id for note in notes}
    if steps is None:
        notes.append(TraceNote("no_steps", (
            "No steps found: the trace has no step markers, no calls to a step function, and no repeated kernel "
            "sequence that is surely a step. Shares refer to the time that is evaluated. Capture more than two steps, "
            f"or mark the steps with {how_to_mark_steps(trace)}.")))
    elif steps.count < _FEW_STEPS:
        more = MORE_RUNS if steps.times.anchor == SESSION_RUN else "capture a longer trace"
        notes.append(TraceNote("few_steps", f"The recording contains only {counted(steps.count, 'complete step')}, so "
                                            f"the numbers are rough; {more}."))
    if steps is not None:
        notes += evaluation_note(steps.times) + accumulation_note(trace, steps)
        notes += _steps_that_are_none(trace, steps) + unrecorded_note(trace)
    if without is not None:
        notes.append(TraceNote("no_collectives", without))
    if not device_events and trace.gpus and not note_ids & {"empty_device_plane", "no_device_events", "lost_kernels"}:
        notes.append(TraceNote("empty_device_plane", (
            "The trace lists GPUs but no GPU events, because the profiler had no permission for CUPTI or nothing ran. "
            "`gputop doctor` shows how to grant the permission.")))
    if not trace.gpus and "no_gpu" not in note_ids:
        notes.append(_no_gpu(trace))
    return notes
