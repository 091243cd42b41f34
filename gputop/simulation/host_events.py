"""The host threads' events of a simulated job, beside launches: Python's calls, the step function, tf.data;
and the Python stacks, as they look when they are sampled. Their files do not exist."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gputop.core.host_stacks import StackFrame, StackSamples, ThreadStacks
from gputop.simulation.loop import SimulatedLoop, StepKind, StepRecord
from gputop.simulation.timeline import US, HostEvent, JobTimeline, Step

Stats = dict[str, int | float | str]


def host_events(t: JobTimeline) -> Iterator[HostEvent]:
    for step in t.steps:
        yield from _call(t, step)
    for n, step in enumerate(t.steps):
        yield from wait_events(t, n, step, "get_next")
    for begin, end in t.batches:
        if end - begin >= 40 * US:
            batch = "Iterator::Root::Prefetch::BatchV2"
            yield HostEvent("resource", batch, begin, end, {"id": 13, "parent_id": 12, "batch_size": 64})
            yield from map_events(t, begin, end, "resource", batch)


def _call(t: JobTimeline, step: Step) -> Iterator[HostEvent]:
    """Keras calls its tf.function from Python."""
    name = "multi_step_on_iterator"
    op = f"__inference_{name}_{21_889 if step.training else 24_415}"
    called = "notTraced-xla" if t.job.xla else "notTraced-nonXla"
    yield HostEvent("python", name, step.start, step.back, {"tf_function_call": called, "tracing_count": 1})
    yield from function_events(op, step, step.start + 60 * US, step.back)


def function_events(op: str, step: Step, run: int, end: int) -> Iterator[HostEvent]:
    """The C call of a tf.function, and the function itself."""
    yield HostEvent("python", "TFE_Py_ExecuteCancelable", run, end - 8 * US)
    yield HostEvent("python", "EagerExecute", run + 6 * US, end - 12 * US, {"eager_op": op, "is_func": 1})
    yield HostEvent("python", f"EagerLocalExecute: {op}", run + 10 * US, end - 16 * US)
    yield HostEvent("python", "FunctionRun", run + 18 * US, run + 29 * US, {"id": 77_000 + step.start % 9_999, "_r": 1})


def wait_events(t: JobTimeline, n: int, step: Step, thread: str) -> Iterator[HostEvent]:
    """The call for the batch of the ``n``-th step, which Keras' function makes on a thread of tf.data."""
    job, begin, end = t.job, step.request, step.ready
    yield HostEvent(thread, "IteratorGetNextOp::DoCompute", begin, end,
                    {"id": 77_000 + n, "iter_num": 1000 + n, "element_size": int(job.batch_mb * 1e6)})
    yield HostEvent(thread, "Iterator::Root", begin + 4 * US, end - 4 * US,
                    {"id": 11, "name": "inject/prefetch", "cpu_budget": job.cpu_budget, "algorithm": "DEFAULT"})
    # Batches that are ready when this one is asked for; of an empty buffer tf.data records nothing.
    made = sum(1 for _, done in t.batches[n:n + job.prefetch] if done <= begin)
    stats: Stats = {"id": 12, "parent_id": 11, "buffer_limit": job.prefetch, "autotune": "true"}
    if made:
        stats["buffered_elements"] = made
    yield HostEvent(thread, "Iterator::Root::Prefetch", begin + 9 * US, end - 8 * US, stats)


def map_events(t: JobTimeline, begin: int, end: int, thread: str, batch: str) -> Iterator[HostEvent]:
    """The threads that make a batch: reading and mapping."""
    job, length = t.job, end - begin
    each = length // 4
    for i in range(4):
        begin_ns = begin + i * each + 2 * US
        yield HostEvent(thread, f"{batch}::ParallelMapV2", begin_ns, begin_ns + int(each * 0.9),
                        {"id": 14, "parent_id": 13, "parallelism": job.input_workers})
    yield HostEvent("read", f"{batch}::ParallelMapV2::ParallelInterleaveV4", begin, begin + length // 16,
                    {"id": 15, "parent_id": 14, "parallelism": job.readers})
    # Workers end one after the other: elements differ in size.
    for worker in range(job.input_workers):
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
