"""The training steps of a trace, as the analyses need them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec import Struct, field

from gputop.analysis.results import StepTimes
from gputop.trace.intervals import Spans, union
from gputop.trace.model import I64


class Steps(Struct, frozen=True):
    """Bounds of each training step, and the figures of them all.

    ``bounds_ns`` are (start, end) pairs relative to the trace's origin, disjoint and in order. ``call_ends_ns`` are
    the ends of the calls or markers at which the steps begin; empty where steps rest on kernels. ``last_call_ns`` is
    when the last of all such calls ended, which no other follows; None where they have no end. ``warm_up_ns`` are
    the steps that were left out as warm-up, ``other_loops`` by phase when a loop ran that is not the steps' own,
    and ``inside`` the phases that each step holds: a callback that predicts after each batch.
    """

    bounds_ns: tuple[tuple[int, int], ...]
    times: StepTimes
    call_ends_ns: tuple[int, ...] = ()
    last_call_ns: int | None = None
    warm_up_ns: tuple[tuple[int, int], ...] = ()
    other_loops: Mapping[str, Spans] = field(default_factory=dict)
    inside: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return len(self.bounds_ns)

    @property
    def edges_ns(self) -> I64:
        """The bounds as an array of shape (count, 2)."""
        return np.array(self.bounds_ns, np.int64).reshape(-1, 2)

    @property
    def call_spans(self) -> Spans:
        """The calls at which the steps begin."""
        return union([a for a, _ in self.bounds_ns[:len(self.call_ends_ns)]], self.call_ends_ns)

    @property
    def spans(self) -> Spans:
        """The time within steps; steps that touch are one span."""
        return union([a for a, _ in self.bounds_ns], [b for _, b in self.bounds_ns])
