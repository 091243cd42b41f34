"""Events of the host's threads of a labeled job: Python's calls the way each framework makes them, tf.data without a
buffer or parallel stages."""

from __future__ import annotations

from collections.abc import Iterator

from gputop.simulation.host_events import function_events, map_events, wait_events
from gputop.simulation.timeline import MS, US, HostEvent, JobTimeline
from tests.advice.labeled.jobs import KERAS_STYLES
from tests.advice.labeled.timelines import LabeledStep


def labeled_host_events(t: JobTimeline) -> Iterator[HostEvent]:
    yield from _steps(t)
    yield from _waits(t)
    yield from _pipeline(t)


def _steps(t: JobTimeline) -> Iterator[HostEvent]:
    job = t.job
    executions: list[list[LabeledStep]] = []
    for step in t.steps:
        if step.first:
            executions.append([])
        executions[-1].append(step)
    counted = 1
    for n, steps in enumerate(executions):
        first, last = steps[0], steps[-1]
        counted += first.retraced
        yield from _STYLES[job.style](t, n + 217, first, last, counted)
        if job.noise:
            yield HostEvent("python", "TFE_DeleteTensorHandle", last.back + 3 * US, last.back + 4 * US)


def _traced(t: JobTimeline, step: LabeledStep) -> str:
    if step.retraced:
        return "traced-xla" if t.job.xla else "traced-nonXla"
    return "notTraced-xla" if t.job.xla else "notTraced-nonXla"


def _tracing(step: LabeledStep) -> Iterator[HostEvent]:
    """Python runs the function's body again, and its graph is built and optimized."""
    if step.trace[1] - step.trace[0] > MS // 2:
        begin, end = step.trace
        yield HostEvent("python", "tf.function-graph_building", begin + 50 * US, begin + (end - begin) * 3 // 4)
        each = (end - begin) * 3 // 4 // 40
        for i in range(36):
            begin_ns = begin + 100 * US + i * each
            yield HostEvent("python", "convert_to_tensor", begin_ns, begin_ns + each // 3)


def _call(t: JobTimeline, step: LabeledStep, begin: int, end: int, function: str, name: str,
          counted: int) -> Iterator[HostEvent]:
    """A tf.function from Python: the wrapper, the C call, and the function itself."""
    op = f"__inference_{name}_{21_876 + 13 * counted if step.training else 24_415}"
    yield HostEvent("python", function, begin, end, {"tf_function_call": _traced(t, step), "tracing_count": counted})
    run = (step.trace[1] if step.retraced else begin) + 60 * US
    if run + 30 * US < end:
        yield from function_events(op, step, run, end)
    yield from _tracing(step) if step.retraced else ()


def _keras2(t: JobTimeline, n: int, first: LabeledStep, last: LabeledStep, counted: int) -> Iterator[HostEvent]:
    kind = "train" if t.job.training else "test"
    yield HostEvent("python", kind, first.start, last.back, {"epoch_num": 3, "step_num": n, "batch_size": 256, "_r": 1})
    yield from _call(t, first, first.start + 20 * US, last.back - 15 * US, f"{kind}_function", f"{kind}_function",
                     counted)


def _keras3(t: JobTimeline, n: int, first: LabeledStep, last: LabeledStep, counted: int) -> Iterator[HostEvent]:
    name = "multi_step_on_iterator" if t.job.version >= (2, 18) or t.job.style == "spe" else "one_step_on_iterator"
    yield from _call(t, first, first.start, last.back, name, name, counted)


def _custom(t: JobTimeline, n: int, first: LabeledStep, last: LabeledStep, counted: int) -> Iterator[HostEvent]:
    name = "train_step" if t.job.training else "eval_step"
    yield from _call(t, first, first.ready + 20 * US, last.back, name, name, counted)


def _eager(t: JobTimeline, n: int, first: LabeledStep, last: LabeledStep, counted: int) -> Iterator[HostEvent]:
    """Op by op, each recorded where it is launched; Python's tape shows little."""
    yield HostEvent("python", "convert_to_tensor", first.ready + 20 * US, first.ready + 45 * US)


def _jax_step(t: JobTimeline, n: int, first: LabeledStep, last: LabeledStep, counted: int) -> Iterator[HostEvent]:
    yield HostEvent("python", "train", first.start, last.back, {"step_num": n, "_r": 1})
    yield from _jax_pjit(t, n, first, last, counted)


def _jax_pjit(t: JobTimeline, n: int, first: LabeledStep, last: LabeledStep, counted: int) -> Iterator[HostEvent]:
    begin = first.ready + 10 * US
    end = last.back - 20 * US
    yield HostEvent("python", "PjitFunction(train_step)", begin, end)
    if first.retraced:
        a, b = first.trace
        yield HostEvent("python", "trace_to_jaxpr_dynamic", a + 20 * US, a + (b - a) // 5)
        yield HostEvent("python", "backend_compile", a + (b - a) // 4, b)
    run = max(first.trace[1], begin) + 15 * US
    yield HostEvent("python", "ParseArguments", begin + 2 * US, begin + 8 * US)
    for gpu in range(len(t.compute)):
        yield HostEvent(f"compute{gpu}", "PjRtStreamExecutorLoadedExecutable::ExecuteHelper", run, end - 10 * US)
        yield HostEvent(f"compute{gpu}", "jit_train_step:XLA GPU module", run + 8 * US, end - 14 * US)


_STYLES = {"keras2": _keras2, "keras3": _keras3, "spe": _keras3, "custom": _custom, "eager": _eager,
           "jax_step": _jax_step, "jax_pjit": _jax_pjit}


def _waits(t: JobTimeline) -> Iterator[HostEvent]:
    """The calls for a batch: inside Keras' function on a thread of tf.data, else on Python's own."""
    inside = t.job.style in KERAS_STYLES
    thread = "get_next" if inside else "python"
    for n, step in enumerate(t.steps):
        if not inside:
            yield HostEvent(thread, "EagerExecute", step.request - 12 * US, step.ready + 8 * US,
                            {"eager_op": "IteratorGetNext", "is_func": 0})
            yield HostEvent(thread, "EagerLocalExecute: IteratorGetNext", step.request - 6 * US, step.ready + 5 * US)
        asked, root, buffer = wait_events(t, n, step, thread)
        yield from (asked, root, buffer) if t.job.prefetch else (asked, root)


def _pipeline(t: JobTimeline) -> Iterator[HostEvent]:
    """The threads that make the batches: reading, mapping and batching."""
    job = t.job
    root = "Iterator::Root::Prefetch" if job.prefetch else "Iterator::Root"
    batch = f"{root}::BatchV2"
    thread = "resource" if job.prefetch else "get_next" if job.style in KERAS_STYLES else "python"
    for begin, end in t.batches:
        length = end - begin
        if length < 40 * US:
            continue
        yield HostEvent(thread, batch, begin, end, {"id": 13, "parent_id": 12, "batch_size": 64})
        if job.map_parallel:  # it reads no files
            yield from (event for event in map_events(t, begin, end, thread, batch) if event.thread != "read")
            continue
        each = length // 8
        for i in range(8):
            begin_ns = begin + i * each + US
            yield HostEvent(thread, f"{batch}::Map", begin_ns, begin_ns + int(each * 0.95), {"id": 14, "parent_id": 13})
            yield HostEvent(thread, f"{batch}::Map::TFRecord", begin_ns + US, begin_ns + int(each * 0.07),
                            {"id": 15, "parent_id": 14})
            yield HostEvent(thread, "InstantiatedCapturedFunction::Run", begin_ns + int(each * 0.08),
                            begin_ns + int(each * 0.93), {"id": 900})
