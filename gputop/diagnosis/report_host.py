"""The host's side of the text report: input by stage, gaps, ops, functions, launch threads, holders of memory."""

from __future__ import annotations

from collections.abc import Iterator

from gputop.analysis.results import Analysis, LaunchThreads, Pipeline, Stage
from gputop.diagnosis.per_step import PerStep, per_step
from gputop.diagnosis.python_lines import cost_words, gap_words, worth_showing
from gputop.diagnosis.python_lines import lines_of_gaps as python_lines
from gputop.text.units import counted, percent, printable, seconds, size
from gputop.text.wrapping import wrap

_NAMES = 5  # shown in a list
_STAGES = 14
_NAME_WIDTH = 44
_WORTH_A_TREE = 0.02  # share of the step: below, a pipeline gets one line
_WORTH_GAPS = 0.01  # share of the step
_WORTH_EAGER = 0.01


def pipelines(a: Analysis, width: int) -> Iterator[str]:
    """tf.data's pipelines, and the stages of those that the step waits for."""
    if a.input is None:
        return
    for pipeline in a.input.pipelines[:_NAMES]:
        text = pipeline.dataset or "tf.data"
        if pipeline.batches:
            text += (f", {counted(pipeline.batches, 'batch', 'es')}, {seconds(pipeline.wait_s / pipeline.batches)} per "
                     "call for a batch")
        if pipeline.bounding is not None and pipeline.bounding_s_per_batch is not None:
            text += (f"; bound by {pipeline.bounding.rpartition('::')[2]}, whose segment takes "
                     f"{seconds(pipeline.bounding_s_per_batch)} per batch")
        yield from _labeled("Input", text, width)
        if a.input.wait_ratio >= _WORTH_A_TREE and pipeline.batches:
            yield from _tree(pipeline, width, per_step(a))


def _tree(pipeline: Pipeline, width: int, by: PerStep) -> Iterator[str]:
    name_width = min(_NAME_WIDTH, width - 34)
    heading = "own" if by.unit == "window" else f"own/{by.unit}"
    yield f"  {'stage, root first':<{name_width}} {heading:>8} per batch"
    for stage in pipeline.stages[:_STAGES]:
        name = "  " * stage.path.count("::") + printable(stage.name)
        cost = "?" if stage.cost_s_per_batch is None else seconds(stage.cost_s_per_batch)
        mark = " ◀" if stage.path == pipeline.bounding else ""
        yield (f"  {_short(name, name_width):<{name_width}} {seconds(stage.self_s / by.steps):>8} {cost:>9}"
               f"{mark}{_facts(stage)}")
    if len(pipeline.stages) > _STAGES:
        yield f"  and {len(pipeline.stages) - _STAGES} stages below"


def _facts(stage: Stage) -> str:
    facts = []
    if stage.parallelism is not None:
        facts.append(f"×{stage.parallelism}")
    if stage.buffer_empty is not None:
        facts.append(f"empty {percent(stage.buffer_empty)}")
    return "  " + ", ".join(facts) if facts else ""


def gaps(a: Analysis, width: int) -> Iterator[str]:
    """Yield the work of the host in the steps' gaps."""
    g = a.gaps
    if g is None or a.steps is None or g.total_s_per_step < _WORTH_GAPS * a.steps.mean_s:
        return
    yield from _labeled("Gaps", f"{seconds(g.total_s_per_step)} per {a.steps.unit}, {g.what}", width)
    parts = [(work.name, work.s_per_step) for work in g.main]
    if g.no_event_s_per_step is not None:
        parts.append(("(no event: Python)", g.no_event_s_per_step))
    parts.sort(key=lambda part: -part[1])
    for label, times in (("training loop", parts), ("executors", [(w.name, w.s_per_step) for w in g.executor])):
        shown = [f"{_short(name, _NAME_WIDTH)} {seconds(time)}" for name, time in times[:_NAMES] if time > 0]
        if shown:
            yield from _labeled("", f"{label}: {', '.join(shown)}", width)


def stacks(a: Analysis, width: int) -> Iterator[str]:
    """The lines of Python that ran in the gaps."""
    if a.stacks is None:
        return
    period_s = a.steps.mean_s if a.steps is not None else a.trace.window_s
    if a.stacks.reason:
        if a.gaps is not None and a.gaps.total_s_per_step >= _WORTH_GAPS * period_s:
            text = f"The lines of code that ran in the gaps are unknown: {a.stacks.reason}"
            yield from _labeled("Python", text, width)
        return
    shown = worth_showing(a.stacks, period_s)
    for number, gaps in enumerate(shown):
        yield from _labeled("" if number else "Python", gap_words(gaps, a.stacks), width)
        for text in python_lines(gaps, a.stacks):
            yield from wrap(text, width, " " * 11, " " * 13)
    if shown:
        yield from _labeled("", cost_words(a.stacks, a.simulated), width)


def ops(a: Analysis, width: int) -> Iterator[str]:
    """TF ops that run on the host, and those run eagerly."""
    if a.ops is None:
        return
    on_host = [op for op in a.ops.types if op.placement == "host" and op.host_s > 0]
    count, per = (a.steps.count, "step") if a.ops.basis == "steps" and a.steps else (1, "window")
    if on_host:
        names = ", ".join(f"{op.type} {seconds(op.host_s / count)}" for op in on_host[:_NAMES])
        yield from _labeled("Host ops", f"{seconds(a.ops.host_s / count)} per {per}: {names}", width)
    if a.ops.eager_share is not None and a.ops.eager_share >= _WORTH_EAGER:
        names = ", ".join(f"{op.name} {seconds(op.seconds / count)}" for op in a.ops.eager[:_NAMES])
        rate = "" if a.ops.eager_ops_per_step is None else f", {a.ops.eager_ops_per_step:.3g} ops per step"
        yield from _labeled("Eager", f"{percent(a.ops.eager_share)} of the time in ops and functions{rate}: {names}",
                             width)


def functions(a: Analysis, width: int) -> Iterator[str]:
    """Retracing, XLA's compilations, and which functions XLA runs."""
    f = a.functions
    if f is None:
        return
    for use in f.functions[:_NAMES]:
        if use.tracings:
            yield from _labeled("Tracing", f"{use.name} was traced {use.tracings}× in {counted(use.calls, 'call')}: "
                                           f"{seconds(use.tracing_s)} for building graphs, "
                                           f"{seconds(use.tracing_calls_s)} for these calls in total", width)
    parts = [f"{counted(f.xla_compilations, 'compilation')}, {seconds(f.xla_compile_s)}"] if f.xla_compilations else []
    for xla, what in ((True, "used for"), (False, "not used for")):
        names = [use.name for use in f.functions[:_NAMES] if use.xla is xla]
        parts += [f"{what} {', '.join(names)}"] if names else []
    if parts:
        yield from _labeled("XLA", "; ".join(parts), width)


def launch_threads(a: Analysis, width: int) -> Iterator[str]:
    """Yield the threads that launch, and whether tf.data was at work while launches were late."""
    t = a.launch_threads
    if t is None:
        return
    text = f"by one thread, {t.threads[0].name}"
    if len(t.threads) > 1:
        fewest, most = min(t.threads_per_gpu.values()), max(t.threads_per_gpu.values())
        text = (f"by {len(t.threads)} host threads, {fewest if fewest == most else f'{fewest} to {most}'} per GPU")
    if t.mode != "unknown":
        text += f"; TF_GPU_THREAD_MODE {t.mode}"
    yield from _labeled("Launches", text + _contention(t), width)


def _contention(t: LaunchThreads) -> str:
    text = ""
    if t.busy_threads_at_launch is not None and (t.cpus is not None or len(t.threads) > 1):
        cpus = "" if t.cpus is None else f" on {t.cpus} CPUs"
        text += f"; {t.busy_threads_at_launch:.1f} threads busy during launches{cpus}"
    if t.input_busy_late is not None:
        text += f"; tf.data at work in {percent(t.input_busy_late)} of the time that GPUs waited for launches"
        if t.input_busy is not None:
            text += f", in {percent(t.input_busy)} of the rest"
    return text


def holders(a: Analysis, width: int) -> Iterator[str]:
    """Head-room, fragmentation and the largest holders of the fullest allocator."""
    sized = [use for use in a.memory if use.capacity_bytes > 0]
    if not sized:
        return
    use = max(sized, key=lambda use: (use.peak_in_window_bytes or 0) / use.capacity_bytes)
    if use.headroom_bytes is None:
        return
    text = f"{use.allocator}: {size(use.headroom_bytes)} free at the peak of this window"
    if use.fragmentation_at_peak is not None:
        text += f", fragmentation {percent(use.fragmentation_at_peak)}"
    if use.holders:
        names = (f"{_short(h.op, _NAME_WIDTH)} {size(h.bytes)}" for h in use.holders[:_NAMES])
        text += f"; held by {', '.join(names)}"
        if use.unattributed_bytes:
            text += f"; {size(use.unattributed_bytes)} was allocated before the capture or by no named op"
    yield from _labeled("", text, width)


def _short(name: str, width: int) -> str:
    """A long name's end where it begins with scopes, else its beginning."""
    name = printable(name)
    if len(name) <= width:
        return name
    return "…" + name[1 - width:] if "/" in name else name[:width - 1] + "…"


def _labeled(label: str, text: str, width: int) -> list[str]:
    return wrap(text, width, f"{label:<9}")
