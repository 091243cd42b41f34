"""The Python that ran in each process of a trace: its stacks over time, whoever recorded them.

py-spy samples them at random times, and only where a stack differs from the one before is its time known. A profiler's
own tracer records every call of a function (gputop.analysis.host.python_tracer). Both become the same record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from gputop.analysis.host.python_libraries import is_library
from gputop.core.host_stacks import StackFrame, StackSamples, ThreadStacks
from gputop.text.units import printable
from gputop.trace.intervals import Spans
from gputop.trace.model import I64

BUILT_IN = "<built-in>"  # in place of the file of a function that is not written in Python
# Time for which a thread other than the main one is taken to keep the stack seen last: it may have gone.
_TRUSTED_S = 2.0
# Where threads of the standard library wait for work.
_WAITING = ("threading.py", "queue.py", "selectors.py", "socket.py", "socketserver.py", "connection.py", "thread.py",
            "popen_fork.py", "subprocess.py")


class StackSpans(NamedTuple):
    """Spans of a thread's stacks (index into those of its process; -1: none), on the trace's clock: in order, and
    apart. ``seen`` are the instants at which a sample first saw each of them."""

    start: I64
    end: I64
    stack: I64
    seen: I64

    def around(self, spans: Spans) -> StackSpans:
        """Spans between the first and the last of these instants."""
        if not len(spans.start):
            return StackSpans(*(column[:0] for column in self))
        first = np.searchsorted(self.end, spans.start[0], side="right")
        last = np.searchsorted(self.start, spans.end[-1])
        return StackSpans(*(column[first:last] for column in self))


NO_SPANS = StackSpans(*(np.empty(0, np.int64) for _ in range(4)))


class PythonStacks(Struct, frozen=True):
    """One process: ``stacks`` are tuples of indices into ``frames``, the outermost first.

    ``loop`` is the training loop's thread, ``others`` the rest. ``of_library``: whether a frame is not of the user's
    own code, None where its caller tells. ``rate_hz`` is how often each thread was looked at, infinite where every call
    was recorded. ``loop_loads``: the loop itself runs the Python that it waits for, as of a DataLoader. Times may be
    off by ``error_ns``.
    """

    frames: Sequence[StackFrame]
    of_library: Sequence[bool | None]
    stacks: Sequence[tuple[int, ...]]
    loop: StackSpans
    others: tuple[StackSpans, ...]
    rate_hz: float
    loop_loads: bool = False
    error_ns: int = 0

    @property
    def exact(self) -> bool:
        return math.isinf(self.rate_hz)

    def own(self, stack: int) -> list[int]:
        """The frames of a stack that are of the user's own code."""
        out, in_library = [], True  # of an outermost one that has no caller it is not known
        for frame in self.stacks[stack]:
            library = self.of_library[frame]
            in_library = in_library if library is None else library
            if not in_library:
                out.append(frame)
        return out

    def waits(self, stack: int) -> bool:
        """Return whether it waits for work in the standard library."""
        inner = next((frame for frame in reversed(self.stacks[stack]) if self.frames[frame].file != BUILT_IN), None)
        return (inner is not None and bool(self.of_library[inner])
                and PurePosixPath(self.frames[inner].file).name in _WAITING)


def sampled_stacks(samples: StackSamples, origin_ns: int, loop_loads: bool = False) -> PythonStacks:
    loop = training_thread(samples)
    return PythonStacks(
        samples.frames, [is_library(frame.file) for frame in samples.frames], samples.stacks,
        stack_spans(samples, loop, origin_ns) if loop is not None else NO_SPANS,
        tuple(stack_spans(samples, thread, origin_ns, trusted_s=_TRUSTED_S) for thread in samples.threads
              if thread is not loop), samples.rate_hz, loop_loads, round(samples.error_s * 1e9))


def stack_spans(samples: StackSamples, thread: ThreadStacks, origin_ns: int, *, trusted_s: float = math.inf,
                ) -> StackSpans:
    """A change is put at half of the time between two stacks seen, one mean interval before the sample that saw it at
    most. ``trusted_s``: a stack counts no longer than this after it was seen."""
    begin = round(samples.start_s * 1e9) - origin_ns
    seen = begin + np.array(thread.times_us, np.int64) * 1000
    interval = round(1e9 / samples.rate_hz)
    earlier = np.zeros_like(seen)
    earlier[1:] = np.minimum(interval, (seen[1:] - seen[:-1]) // 2)
    start = seen - earlier
    end = np.append(start[1:], begin + round(samples.length_s * 1e9))
    if math.isfinite(trusted_s):
        end = np.minimum(end, seen + round(trusted_s * 1e9))
    return StackSpans(start, np.maximum(end, start), np.array(thread.stacks, np.int64), seen)


def training_thread(samples: StackSamples) -> ThreadStacks | None:
    """The main thread; where that waits for another one all the time, the one whose stacks change most."""
    main = next((thread for thread in samples.threads if thread.main), None)
    library = [is_library(frame.file) for frame in samples.frames]
    process = PythonStacks(samples.frames, library, samples.stacks, NO_SPANS, (), samples.rate_hz)
    if main is not None and not all(stack < 0 or process.waits(stack) for stack in main.stacks):
        return main
    return max((thread for thread in samples.threads if thread is not main), key=lambda thread: len(thread.times_us),
               default=main)


def line_text(frame: StackFrame) -> str:
    """"metrics.py:112 confusion_matrix"; of a library with its package: "keras/…/progbar.py:93 update"."""
    if frame.file == BUILT_IN:
        return printable(f"{frame.function} (built-in)")
    path = PurePosixPath(frame.file)
    function, parts, name = _function(frame.function), path.parts, path.name
    if name.startswith("__autograph_generated_file"):  # TensorFlow's rewriting of a function: its lines are no user's
        return printable(f"{function} (AutoGraph)")
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            inside = parts[len(parts) - parts[::-1].index(folder):]
            name = "/".join(inside) if len(inside) <= 2 else f"{inside[0]}/…/{inside[-1]}"
    return printable(f"{name}:{frame.line} {function}" if frame.line else f"{name} {function}")


def _function(qualified: str) -> str:
    """The end of a qualified name: "Slow.on_train_batch_end", "load.<lambda>"."""
    parts = [part.removeprefix("tf__") for part in qualified.split(".")
             if part not in ("<locals>", "outer_factory", "inner_factory", "if_body", "else_body", "loop_body")]
    return ".".join(parts[-2:])
