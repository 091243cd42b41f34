"""The Python stacks of the demo's training job, as they look when they are sampled. Its files do not exist."""

from __future__ import annotations

import numpy as np

from gputop.core.host_stacks import StackFrame, StackSamples, ThreadStacks
from gputop.simulation.loop import SimulatedLoop, StepKind, StepRecord

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
