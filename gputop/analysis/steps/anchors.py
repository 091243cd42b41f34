"""Marks of the training steps of a trace: the result of each way to find them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gputop.analysis.steps.phases import UNKNOWN
from gputop.trace.intervals import Spans
from gputop.trace.model import I64, Trace

BY_THEIR = ", by their "  # behind an anchor's name: what shows the steps where the calls that begin them run ahead


class Anchors(NamedTuple):
    """Events that mark steps. Times are nanoseconds of the trace's clock.

    ``name`` is for people: "ProfilerStep# markers"; ``confidence`` is "high", "medium" or "low". A step begins at each
    of ``start_ns``, in any order, and ends at the next of ``edges_ns``, which holds these starts and what else ends a
    step. ``end_ns`` is when the call or marker of each start ends, the start itself where it has no length.
    ``bounds_ns``, shape (steps, 2), are the steps themselves where they are known one by one. The rest is as in
    ``StepTimes`` and ``Steps``.
    """

    name: str
    confidence: str
    start_ns: I64
    end_ns: I64
    edges_ns: I64
    bounds_ns: I64 | None = None
    unit: str = "step"
    phase: str = UNKNOWN
    left_out_s: Mapping[str, float] = {}
    other_loops: Mapping[str, Spans] = {}
    inside: tuple[str, ...] = ()


def first_to_last(name: npt.NDArray, start_ns: I64, end_ns: I64) -> tuple[I64, I64]:
    """Start of the first event and end of the last one of each name, in the order of the names' indices."""
    names, which = np.unique(name, return_inverse=True)
    start = np.full(len(names), np.iinfo(np.int64).max)
    end = np.full(len(names), np.iinfo(np.int64).min)
    np.minimum.at(start, which, start_ns)
    np.maximum.at(end, which, end_ns)
    return start, end


def steps_of_ranks(trace: Trace, rows: I64) -> tuple[I64, I64]:
    """The begin and end of each step that these host events mark, by name.

    1. Where several ranks mark the same step it begins with the first of them.
    2. It ends with the first of them that ends: that one begins the next step, and the last step is as long as the
       others.
    3. A single step ends with the last rank.
    """
    host = trace.host
    start, end = first_to_last(host.name[rows], host.start_ns[rows], host.end_ns[rows])
    if len(start) > 1:
        end, _ = first_to_last(host.name[rows], host.end_ns[rows], host.end_ns[rows])
    return start, end
