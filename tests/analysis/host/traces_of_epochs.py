"""Synthetic Keras jobs with epochs, evaluations and what lies between; times are microseconds."""

from __future__ import annotations

import numpy as np

from gputop.core.host_stacks import StackFrame, StackSamples, ThreadStacks
from gputop.trace.model import Trace
from tests.records import replace
from tests.trace.build import Builder, keras_steps

MS = 1000.0
TRAIN, TEST = "__inference_multi_step_on_iterator_42", "__inference_multi_step_on_iterator_77"


def train(b: Builder, first: float, count: int, length: float = 10 * MS) -> float:
    """Keras' training steps from ``first`` on, with an op of the backward pass; returns when the last call ends."""
    keras_steps(b, count, length, length - 100, first)
    for i in range(count):
        b.host("gradient_tape/model/MatMul:MatMul", first + i * length + 20, length / 2, line="tf_Compute/1")
    return first + count * length - 100


def evaluate(b: Builder, first: float, count: int, length: float = 5 * MS) -> float:
    for i in range(count):
        b.host("EagerExecute", first + i * length, length - 100, is_func=1, eager_op=TEST)
        b.host("model/dense/MatMul:MatMul", first + i * length + 20, length / 2, line="tf_Compute/1")
    return first + count * length - 100


def epochs(count: int = 4, pause: float = 300 * MS, events: tuple[str, ...] = ()) -> Builder:
    """Epochs of 8 steps of 10 ms, an evaluation of 20 ms, and a pause."""
    b, at = Builder(gpus=0), 0.0
    for _ in range(count):
        end = train(b, at, 8)
        end = evaluate(b, end + 100, 4)
        for i, name in enumerate(events):
            b.host(name, end + i * pause / len(events), pause / len(events))
        at = end + pause
    train(b, at, 2)
    return b


def with_stacks(trace: Trace, line: int, file: str = "/home/u/train.py", *, function: str = "Save.on_epoch_end",
                library: str = "") -> Trace:
    """Samples every 5 ms: in pauses ``line`` of a callback, which calls a ``library``'s file, in steps that of the call
    of fit."""
    calls = np.sort(np.concatenate([trace.host.start_ns, trace.host.end_ns]))
    times, stacks = [], []
    for at in range(0, trace.window_ns[1], 5_000_000):
        near = np.searchsorted(calls, at)
        idle = 0 < near < len(calls) and calls[near] - calls[near - 1] > 100e6
        times.append(at // 1000)
        stacks.append(1 if idle else 0)
    frames = (StackFrame("main", "/home/u/train.py", 3), StackFrame(function, file, line),
              StackFrame("quick_execute", "/usr/lib/python3/site-packages/tensorflow/python/eager/execute.py", 53),
              StackFrame("write", library, 480))
    samples = StackSamples(
        1_800_000_000.0, trace.window_ns[1] / 1e9, 0.001, 200.0, 0.0, 0.01, frames=frames,
        stacks=((0, 2), (0, 1, 3) if library else (0, 1)),
        threads=(ThreadStacks("MainThread", True, tuple(times), tuple(stacks)),))
    return replace(trace, origin_ns=1_800_000_000 * 10**9, stacks=(samples,))
