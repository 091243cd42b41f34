"""The host threads' events of a simulated job, beside launches: Python's calls, the step function, tf.data;
and the Python stacks, as they look when they are sampled. Their files do not exist."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gputop.core.host_stacks import StackFrame, StackSamples, ThreadStacks
from gputop.simulation.loop import SimulatedLoop, StepKind, StepRecord
from gputop.simulation.timeline import MS, US, HostEvent, JobTimeline, Step

Stats = dict[str, int | float | str]


def host_events(t: JobTimeline) -> Iterator[HostEvent]:
    yield from _steps(t)
    if t.job.input.tf_data:
        yield from _waits(t)
        yield from _pipeline(t)


def _steps(t: JobTimeline) -> Iterator[HostEvent]:
    """The main thread's calls of the step function, the way each framework makes them."""
    job = t.job
    executions: list[list[Step]] = []
    for step in t.steps:
        if step.first:
            executions.append([])
        executions[-1].append(step)
    counted = 1
    for n, steps in enumerate(executions):
        first, last = steps[0], steps[-1]
        counted += first.retraced
        yield from _STYLES[job.style](t, n + 217, first, last, counted)
        if job.recorded.noise:
            yield HostEvent("python", "TFE_DeleteTensorHandle", last.back + 3 * US, last.back + 4 * US)


def _traced(t: JobTimeline, step: Step) -> str:
    if step.retraced:
        return "traced-xla" if t.job.work.xla else "traced-nonXla"
    return "notTraced-xla" if t.job.work.xla else "notTraced-nonXla"


def _tracing(step: Step) -> Iterator[HostEvent]:
    """Python runs the function's body again, and its graph is built and optimized."""
    if step.trace[1] - step.trace[0] > MS // 2:
        begin, end = step.trace
        yield HostEvent("python", "tf.function-graph_building", begin + 50 * US, begin + (end - begin) * 3 // 4)
        each = (end - begin) * 3 // 4 // 40
        for i in range(36):
            begin_ns = begin + 100 * US + i * each
            yield HostEvent("python", "convert_to_tensor", begin_ns, begin_ns + each // 3)


def _call(t: JobTimeline, step: Step, begin: int, end: int, function: str, name: str,
          counted: int) -> Iterator[HostEvent]:
    """A tf.function from Python: the wrapper, the C call, and the function itself."""
    op = f"__inference_{name}_{21_876 + 13 * counted if step.training else 24_415}"
    yield HostEvent("python", function, begin, end, {"tf_function_call": _traced(t, step), "tracing_count": counted})
    run = (step.trace[1] if step.retraced else begin) + 60 * US
    if run + 30 * US < end:
        yield HostEvent("python", "TFE_Py_ExecuteCancelable", run, end - 8 * US)
        yield HostEvent("python", "EagerExecute", run + 6 * US, end - 12 * US, {"eager_op": op, "is_func": 1})
        yield HostEvent("python", f"EagerLocalExecute: {op}", run + 10 * US, end - 16 * US)
        yield HostEvent("python", "FunctionRun", run + 18 * US, run + 29 * US, {"id": 77_000 + step.start % 9_999,
                                                                                "_r": 1})
    yield from _tracing(step) if step.retraced else ()


def _keras2(t: JobTimeline, n: int, first: Step, last: Step, counted: int) -> Iterator[HostEvent]:
    kind = "train" if t.job.training else "test"
    yield HostEvent("python", kind, first.start, last.back, {"epoch_num": 3, "step_num": n, "batch_size": 256, "_r": 1})
    yield from _call(t, first, first.start + 20 * US, last.back - 15 * US, f"{kind}_function", f"{kind}_function",
                     counted)


def _keras3(t: JobTimeline, n: int, first: Step, last: Step, counted: int) -> Iterator[HostEvent]:
    name = "multi_step_on_iterator" if t.job.version >= (2, 18) or t.job.style == "spe" else "one_step_on_iterator"
    yield from _call(t, first, first.start, last.back, name, name, counted)


def _custom(t: JobTimeline, n: int, first: Step, last: Step, counted: int) -> Iterator[HostEvent]:
    name = "train_step" if t.job.training else "eval_step"
    yield from _call(t, first, first.ready + 20 * US, last.back, name, name, counted)


def _eager(t: JobTimeline, n: int, first: Step, last: Step, counted: int) -> Iterator[HostEvent]:
    """Op by op, each recorded where it is launched; Python's tape shows little."""
    yield HostEvent("python", "convert_to_tensor", first.ready + 20 * US, first.ready + 45 * US)


def _jax_step(t: JobTimeline, n: int, first: Step, last: Step, counted: int) -> Iterator[HostEvent]:
    yield HostEvent("python", "train", first.start, last.back, {"step_num": n, "_r": 1})
    yield from _jax_pjit(t, n, first, last, counted)


def _jax_pjit(t: JobTimeline, n: int, first: Step, last: Step, counted: int) -> Iterator[HostEvent]:
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
    job = t.job
    inside = job.style in ("keras2", "keras3", "spe")
    thread = "get_next" if inside else "python"
    for n, step in enumerate(t.steps):
        begin, end = step.request, step.ready
        if not inside:
            yield HostEvent(thread, "EagerExecute", begin - 12 * US, end + 8 * US, {"eager_op": "IteratorGetNext",
                                                                                    "is_func": 0})
            yield HostEvent(thread, "EagerLocalExecute: IteratorGetNext", begin - 6 * US, end + 5 * US)
        yield HostEvent(thread, "IteratorGetNextOp::DoCompute", begin, end,
                        {"id": 77_000 + n, "iter_num": 1000 + n, "element_size": int(job.input.batch_mb * 1e6)})
        yield HostEvent(thread, "Iterator::Root", begin + 4 * US, end - 4 * US,
                        {"id": 11, "name": "inject/prefetch", "cpu_budget": job.input.cpu_budget,
                          "algorithm": "DEFAULT"})
        if job.input.prefetch:
            # Batches that are ready when this one is asked for; of an empty buffer tf.data records nothing.
            made = sum(1 for _, done in t.batches[n:n + job.input.prefetch] if done <= begin)
            stats: Stats = {"id": 12, "parent_id": 11, "buffer_limit": job.input.prefetch, "autotune": "true"}
            if made:
                stats["buffered_elements"] = made
            yield HostEvent(thread, "Iterator::Root::Prefetch", begin + 9 * US, end - 8 * US, stats)


def _pipeline(t: JobTimeline) -> Iterator[HostEvent]:
    """The threads that make the batches: reading, mapping and batching."""
    job = t.job
    root = "Iterator::Root::Prefetch" if job.input.prefetch else "Iterator::Root"
    batch = f"{root}::BatchV2"
    thread = "resource" if job.input.prefetch else (
        "get_next" if job.style in ("keras2", "keras3", "spe") else "python")
    for begin, end in t.batches:
        length = end - begin
        if length < 40 * US:
            continue
        yield HostEvent(thread, batch, begin, end, {"id": 13, "parent_id": 12, "batch_size": 64})
        if not job.input.map_parallel:
            each = length // 8
            for i in range(8):
                begin_ns = begin + i * each + US
                yield HostEvent(thread, f"{batch}::Map", begin_ns, begin_ns + int(each * 0.95),
                                {"id": 14, "parent_id": 13})
                yield HostEvent(thread, f"{batch}::Map::TFRecord", begin_ns + US, begin_ns + int(each * 0.07),
                                {"id": 15, "parent_id": 14})
                yield HostEvent(thread, "InstantiatedCapturedFunction::Run", begin_ns + int(each * 0.08),
                                begin_ns + int(each * 0.93), {"id": 900})
            continue
        each = length // 4
        for i in range(4):
            begin_ns = begin + i * each + 2 * US
            yield HostEvent(thread, f"{batch}::ParallelMapV2", begin_ns, begin_ns + int(each * 0.9),
                            {"id": 14, "parent_id": 13, "parallelism": job.input.input_workers})
        if job.input.readers:
            yield HostEvent("read", f"{batch}::ParallelMapV2::ParallelInterleaveV4", begin, begin + length // 16,
                            {"id": 15, "parent_id": 14, "parallelism": job.input.readers})
        # Workers end one after the other: elements differ in size.
        for worker in range(job.input.input_workers):
            begin_ns = begin + (worker * 37 % 11) * length // 300
            stop = end - (worker * 53 % 17) * length // 200
            yield HostEvent(f"map{worker}", "InstantiatedCapturedFunction::Run", begin_ns, stop, {"id": 900 + worker})
            yield HostEvent(f"map{worker}", "DecodeJpeg:DecodeJpeg", begin_ns + length // 50,
                            begin_ns + (stop - begin_ns) * 2 // 3)


RATE_HZ = 100
_ERROR_S = 0.001
_METRICS_SHARE = 0.85  # share of the time between two steps; the rest writes the log
_TENSORFLOW = "/usr/lib/python3/dist-packages/tensorflow/python"

FRAMES = (
    StackFrame("<module>", "/home/demo/train.py", 188),
    StackFrame("fit", "/home/demo/train.py", 131),
    StackFrame("evaluate", "/home/demo/train.py", 150),
    StackFrame("next_batch", "/home/demo/dataset.py", 66),
    StackFrame("__next__", f"{_TENSORFLOW}/data/ops/iterator_ops.py", 826),
    StackFrame("run_step", "/home/demo/train.py", 97),
    StackFrame("quick_execute", f"{_TENSORFLOW}/eager/execute.py", 53),
    StackFrame("on_train_batch_end", "/home/demo/callbacks.py", 38),
    StackFrame("confusion_matrix", "/home/demo/metrics.py", 112),
    StackFrame("on_train_batch_end", "/home/demo/callbacks.py", 44),
    StackFrame("log", "/home/demo/callbacks.py", 71),
    StackFrame("save", "/home/demo/checkpoint.py", 57),
)
_FIT, _EVALUATE = (0, 1), (0, 2)
_WAITS, _CALLS = (3, 4), (5, 6)
_METRICS, _LOG, _SAVE = (*_FIT, 7, 8), (*_FIT, 9, 10), (*_FIT, 11)
STACKS = (_FIT, _EVALUATE, (*_FIT, *_WAITS), (*_EVALUATE, *_WAITS), (*_FIT, *_CALLS), (*_EVALUATE, *_CALLS), _METRICS,
          _LOG, _SAVE)


def python_stacks(loop: SimulatedLoop, start_ns: int, end_ns: int, origin_ns: int) -> StackSamples | None:
    """The main thread in that time of the loop, which began at the Unix time ``origin_ns``; None for no time at all."""
    pieces = [piece for step in loop.steps(start_ns, end_ns) for piece in _pieces(step)]
    times = np.arange(start_ns, end_ns, 10**9 // RATE_HZ)
    if not pieces or len(times) < 2:
        return None
    piece_index = np.searchsorted([begin for begin, _ in pieces], times, side="right") - 1
    seen = np.array([STACKS.index(stack) for _, stack in pieces])[np.maximum(piece_index, 0)]
    first = np.concatenate(([True], seen[1:] != seen[:-1]))
    thread = ThreadStacks("MainThread", True, tuple(((times[first] - times[0]) // 1000).tolist()),
                          tuple(seen[first].tolist()))
    return StackSamples(start_s=(int(times[0]) + origin_ns) / 1e9, length_s=float(times[-1] - times[0]) / 1e9,
                        error_s=_ERROR_S, rate_hz=float(RATE_HZ), missed=0.0, cpu_s=0.0, frames=FRAMES, stacks=STACKS,
                        threads=(thread,))


def _pieces(step: StepRecord) -> list[tuple[int, tuple[int, ...]]]:
    """Begin of each stack of a step."""
    if step.kind is StepKind.CHECKPOINT:
        return [(step.start_ns, _SAVE)]
    training = step.kind is StepKind.TRAIN
    around = _FIT if training else _EVALUATE
    pieces = [(step.start_ns, around), (step.wait_ns, (*around, *_WAITS)), (step.begin_ns, (*around, *_CALLS))]
    if not training:
        return [*pieces, (step.end_ns, around)]
    log_ns = step.end_ns + int(_METRICS_SHARE * (step.next_ns - step.end_ns))
    return [*pieces, (step.end_ns, _METRICS), (log_ns, _LOG)]
