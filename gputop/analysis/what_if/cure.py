"""The changes of the recorded window that a fix makes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from msgspec import Struct, field

from gputop.trace.intervals import EMPTY, Spans, merge
from gputop.trace.model import F64, I64

NO_ROWS = np.empty(0, np.int64)


class Calls(NamedTuple):
    """Calls of the host: their threads (lines of the trace), and when they run."""

    line: I64 = NO_ROWS
    start_ns: I64 = NO_ROWS
    end_ns: I64 = NO_ROWS


class Cure(Struct, frozen=True, kw_only=True):
    """The changes that a finding's advice makes. What it does not name stays as it was recorded.

    ``assumes`` is a sentence about the change. ``scaled``: rows of the trace's device events and what is left of their
    durations (ratio, one or one for each). ``host``: by GPU (index into ``Trace.gpus``) time that the threads which
    launch to it no longer need. ``launching``: the host needs no time from one launch to the next. ``pauses``: a kernel
    follows the one before it in its stream at once. ``calls``: calls of the host that take it no more time than a
    launch, and wait for nothing. ``input_left``: what is left of the waits for a batch (ratio). ``together``: the last
    GPU comes to each collective when the others do.
    """

    assumes: str
    scaled: tuple[tuple[I64, float | F64], ...] = ()
    host: Mapping[int, Spans] = field(default_factory=dict)
    launching: bool = False
    pauses: bool = False
    calls: Calls = field(default_factory=Calls)
    input_left: float = 1.0
    together: bool = False


AS_RECORDED = Cure(assumes="")


def combined(cures: Iterable[Cure]) -> Cure:
    several = list(cures)
    gpus = {gpu for cure in several for gpu in cure.host}
    return Cure(
        assumes=" ".join(dict.fromkeys(cure.assumes for cure in several)),
        scaled=tuple(part for cure in several for part in cure.scaled),
        host={gpu: merge(*(cure.host.get(gpu, EMPTY) for cure in several)) for gpu in gpus},
        launching=any(cure.launching for cure in several), pauses=any(cure.pauses for cure in several),
        calls=Calls(*map(np.concatenate, zip(*(cure.calls for cure in several), strict=True))),
        input_left=min([1.0, *(cure.input_left for cure in several)]),
        together=any(cure.together for cure in several))
