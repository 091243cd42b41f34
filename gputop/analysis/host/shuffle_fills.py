"""Shuffle buffers of tf.data that fill: a new iterator's first element comes once the buffer is full.

A call of a Shuffle draws as many elements from the stage below it as its buffer lacks: all of them at first, then one
for each that it gives (tensorflow/core/kernels/data/shuffle_dataset_op.cc). Both stages run on one thread. TensorFlow
writes a call when it ends, so of a fill that began before a recording, or had not ended with it, the draws alone are
seen, in no call.
"""

from __future__ import annotations

import re

import numpy as np
from msgspec import Struct

from gputop.analysis.host.tf_data import iterator_paths
from gputop.analysis.steps.training_loops import training_loops
from gputop.trace.intervals import EMPTY, Spans, complement, coverage, intersect, merge, subtract, union
from gputop.trace.lookups import host_rows, spans_of
from gputop.trace.model import I64, Trace, once

_SHUFFLE = re.compile(r"Shuffle(?:AndRepeat)?$")
# A full buffer draws one element for each that it gives; at the edges of a recording one may be in no call.
_WHOLE, _CUT = 8, 4
# Samples of an overview are far shorter than its parts in one piece (SAMPLE_EVERY_S and MIN_OVERVIEW_S of
# gputop.profiler.capture.plan).
_MOST_OF_SAMPLE_NS = 200_000_000
_MOST_OF_IT = 0.5  # share of a sample
# Calls of the training loop: in none of them, and without its work on a GPU, it waits for the fill.
_LOOP_RUNS = r"EagerExecute$|EagerLocalExecute|PjitFunction"
_MAX_SHUFFLES = 32  # more than any job has; a damaged file may have any number


class ShuffleFill(Struct, frozen=True):
    """A buffer fills from ``start_ns`` to ``end_ns``; ``elements`` were drawn meanwhile. ``whole``: its begin and its
    end were recorded. ``stage`` is the name of the one below the shuffle."""

    start_ns: int
    end_ns: int
    elements: int
    whole: bool
    stage: str

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class OverviewSamples(Struct, frozen=True):
    """Number of short recordings of an overview, of those in which a buffer filled for most of the time, and of the
    times that one filled after the training loop had run. They stand for ``seconds``: the time from the first to the
    last, and the distance of two."""

    samples: int = 0
    filling: int = 0
    rounds: int = 0
    seconds: float = 0.0

    @property
    def filled_s(self) -> float:
        return self.seconds * self.filling / max(self.samples, 1)


@once
def shuffle_fills(trace: Trace) -> tuple[ShuffleFill, ...]:
    """Fills in a trace, in the order of their begin; none where no iterator is traced."""
    rows, path, paths = iterator_paths(trace)
    host, out = trace.host, []
    above = [text.rpartition("::")[0] for text in paths]
    for shuffle in sorted({text for text in above if _SHUFFLE.search(text)})[:_MAX_SHUFFLES]:
        below = [i for i, text in enumerate(above) if text == shuffle]
        draws = rows[np.isin(path, below)]
        calls = rows[path == paths.index(shuffle)] if shuffle in paths else draws[:0]
        stage = paths[below[0]].rpartition("::")[2]
        for line in np.unique(host.line[draws]).tolist():
            out += _of_line(trace, calls[host.line[calls] == line], draws[host.line[draws] == line], stage)
    return tuple(sorted(out, key=lambda fill: fill.start_ns))


def _of_line(trace: Trace, calls: I64, draws: I64, stage: str) -> list[ShuffleFill]:
    host = trace.host
    calls, draws = (rows[np.argsort(host.start_ns[rows], kind="stable")] for rows in (calls, draws))
    begin, end = host.start_ns[calls], host.end_ns[calls]
    start = host.start_ns[draws]
    first, last = np.searchsorted(start, begin), np.searchsorted(start, end)
    out = [ShuffleFill(int(begin[i]), int(end[i]), int(last[i] - first[i]), True, stage)
           for i in np.flatnonzero(last - first >= _WHOLE).tolist()]
    # What is in no call, in runs that no call and no pause of the recorder divides.
    before = np.searchsorted(begin, start, side="right") - 1
    in_none = np.flatnonzero(start >= np.append(start[0], end)[before + 1])
    piece = np.searchsorted(sorted(edge for edge, _ in trace.unrecorded_ns), start[in_none])
    cuts = np.flatnonzero((np.diff(in_none) > 1) | (np.diff(before[in_none]) > 0) | (np.diff(piece) > 0)) + 1
    for run in np.split(in_none, cuts):
        if len(run) >= _CUT:
            out.append(ShuffleFill(int(start[run[0]]), int(host.end_ns[draws[run[-1]]]), len(run), False, stage))
    return out


def waits_for_fills(trace: Trace, busy: Spans = EMPTY) -> Spans:
    """Spans in which the training loop waits while a buffer fills: in a call for a batch, or in no call at all, as that
    one was cut off. ``busy``: a GPU works."""
    fills = shuffle_fills(trace)
    filled = union([fill.start_ns for fill in fills], [fill.end_ns for fill in fills])
    waits = merge(EMPTY, *(loop.waits for loop in training_loops(trace)))
    runs = spans_of(trace, host_rows(trace, _LOOP_RUNS))
    return subtract(merge(intersect(filled, waits), subtract(filled, runs)), busy)


def sample_spans(overview: Trace) -> Spans:
    """Spans of an overview's samples; none of one in one piece, or of a trace."""
    if not overview.unrecorded_ns:
        return EMPTY
    begin, end = np.array(overview.unrecorded_ns, np.int64).T
    pieces = complement(union(begin, end), *(overview.profile_window_ns or overview.window_ns))
    short = pieces.end - pieces.start <= _MOST_OF_SAMPLE_NS
    return Spans(pieces.start[short], pieces.end[short])


def samples_of(overview: Trace) -> OverviewSamples:
    begin, end = sample_spans(overview)
    if not len(begin):
        return OverviewSamples()
    filling = coverage(waits_for_fills(overview), begin, end) >= _MOST_OF_IT * (end - begin)
    running = coverage(spans_of(overview, host_rows(overview, _LOOP_RUNS)), begin, end) > 0
    rounds, ran = 0, False
    for fills, runs in zip(filling.tolist(), running.tolist(), strict=True):
        rounds += fills and ran
        ran = not fills and (ran or runs)  # a sample without either may be a pause of the fill
    return OverviewSamples(len(begin), int(filling.sum()), rounds,
                           int(begin[-1] - begin[0]) / 1e9 * len(begin) / max(len(begin) - 1, 1))
