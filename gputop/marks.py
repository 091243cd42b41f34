"""Marks of steps and epochs, for jobs that want them exact: a Keras callback, and helpers for loops of one's own.

Imported into the job. It needs the standard library alone, and marks by the profiler of each framework that the job
itself has imported: TensorFlow's and JAX's (an event with ``step_num``), PyTorch's (``ProfilerStep#<n>``). While
nothing profiles, a mark does nothing (docs/reference/python.md).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")

TRAIN, TEST, PREDICT = "train", "test", "predict"  # what gputop takes for training, evaluation and prediction


def step(number: int, name: str = TRAIN) -> AbstractContextManager[None]:
    """Marks what runs inside as step ``number``; ``name`` "test" and "predict": of evaluation, of prediction."""
    return _marked(name, number)


def steps(batches: Iterable[T], name: str = TRAIN, first: int = 0) -> Iterator[T]:
    """The batches, the loop's body for each of them marked as a step, numbered from ``first``."""
    for number, batch in enumerate(batches, first):
        with step(number, name):
            yield batch


def span(name: str) -> AbstractContextManager[None]:
    """Gives what runs inside a name in the trace: "epoch", "evaluation", "checkpoint"."""
    return _marked(name)


def keras_callback(keras: Any = None) -> Any:
    """A callback for ``fit``, ``evaluate`` and ``predict`` that marks their steps, and epochs and evaluation as spans.

    It has no hooks for batches, for which Keras 3 would wait for the GPU after each step. Keras 2 marks steps itself.
    ``keras``: the module, where a job has several.
    """
    keras = keras or _keras()
    return type("Marks", (_KerasMarks, keras.callbacks.Callback), {})(int(keras.__version__.split(".")[0]) >= 3)


class _KerasMarks:
    """The methods of the callback; the other base class is that of the Keras that the job uses."""

    model: Any

    def __init__(self, marks_steps: bool) -> None:
        super().__init__()
        self._marks_steps = marks_steps
        self._numbers = {name: itertools.count() for name in (TRAIN, TEST, PREDICT)}
        self._open: dict[str, ExitStack] = {}

    def on_train_begin(self, logs: object = None) -> None:
        self._mark(TRAIN)

    def on_train_end(self, logs: object = None) -> None:
        self._unmark(TRAIN)

    def on_test_begin(self, logs: object = None) -> None:
        self._enter("evaluation")
        self._mark(TEST)

    def on_test_end(self, logs: object = None) -> None:
        self._unmark(TEST)
        self._leave("evaluation")

    def on_predict_begin(self, logs: object = None) -> None:
        self._mark(PREDICT)

    def on_predict_end(self, logs: object = None) -> None:
        self._unmark(PREDICT)

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self._enter("epoch")

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        self._leave("epoch")

    def _mark(self, name: str) -> None:
        """Have each call of the model's step function marked. What an interrupted run has left marked stays so."""
        function = getattr(self.model, f"{name}_function", None)
        if self._marks_steps and callable(function) and not isinstance(function, _Marked):
            setattr(self.model, f"{name}_function", _Marked(function, name, self._numbers[name]))

    def _unmark(self, name: str) -> None:
        function = getattr(self.model, f"{name}_function", None)
        if isinstance(function, _Marked):
            setattr(self.model, f"{name}_function", function.function)

    def _enter(self, name: str) -> None:
        self._leave(name)
        self._open[name] = stack = ExitStack()
        stack.enter_context(span(name))

    def _leave(self, name: str) -> None:
        if name in self._open:
            self._open.pop(name).close()


class _Marked:
    """A step function of Keras whose calls are marked as steps."""

    def __init__(self, function: Callable[..., Any], name: str, numbers: Iterator[int]) -> None:
        self.function, self._name, self._numbers = function, name, numbers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with step(next(self._numbers), self._name):
            return self.function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)


def _keras() -> Any:
    """The Keras that the job has imported, or that its TensorFlow has."""
    for name in ("keras", "tf_keras"):
        if name in sys.modules:
            return sys.modules[name]
    if "tensorflow" in sys.modules:
        return sys.modules["tensorflow"].keras
    return import_module("keras")


@contextmanager
def _marked(name: str, number: int | None = None) -> Iterator[None]:
    """Marks what runs inside by the profiler of each framework that is there, as a step where it has a ``number``."""
    with ExitStack() as stack:
        if "jax" in sys.modules:
            profiler = sys.modules["jax"].profiler
            stack.enter_context(profiler.TraceAnnotation(name) if number is None else
                                profiler.StepTraceAnnotation(name, step_num=number))
        if "tensorflow" in sys.modules:
            numbered = {} if number is None else {"step_num": number, "_r": 1}
            stack.enter_context(sys.modules["tensorflow"].profiler.experimental.Trace(name, **numbered))
        if "torch" in sys.modules:
            stack.enter_context(sys.modules["torch"].profiler.record_function(
                name if number is None else f"ProfilerStep#{number}"))
        yield
