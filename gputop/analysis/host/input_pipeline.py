"""Waiting for input, and which stage of tf.data takes the time."""

from __future__ import annotations

import re

import numpy as np

from gputop.analysis.host.tf_data import pipelines
from gputop.analysis.results import InputPipeline
from gputop.analysis.steps.model import Steps
from gputop.analysis.steps.training_loops import GET_NEXT, training_loops
from gputop.trace.intervals import coverage
from gputop.trace.lookups import host_rows, name_mask
from gputop.trace.model import Trace
from gputop.trace.nesting import nest

_STAGE = r"Iterator::"


def input_pipeline(trace: Trace, steps: Steps | None) -> InputPipeline | None:
    """Mean wait per step, as the union of the calls within the steps, and tf.data's stages.

    Mean over the loops where several ranks are traced. Without steps the share is that of
    the whole window and ``wait_s_per_step`` the mean per wait. None where the trace has no
    events of an input pipeline.
    """
    waits = [loop.waits for loop in training_loops(trace)]
    if not waits:
        return None
    how = "tf.data IteratorGetNext" if len(host_rows(trace, GET_NEXT)) else "PyTorch DataLoader"
    if steps is not None:
        bounds = steps.edges_ns
        waited = sum(int(coverage(loop, bounds[:, 0], bounds[:, 1]).sum()) for loop in waits)
        length, count = int((bounds[:, 1] - bounds[:, 0]).sum()) * len(waits), steps.count * len(waits)
        how += ", union of the calls within steps"
    else:
        lo, hi = trace.window_ns
        waited, length = sum(loop.total for loop in waits), (hi - lo) * len(waits)
        count = sum(len(loop.start) for loop in waits)
        how += ", union of the calls in the window; per call, because no steps were found"
    return InputPipeline(waited / max(count, 1) / 1e9, waited / max(length, 1), stage_self_times(trace), how,
                         pipelines(trace))


def stage_self_times(trace: Trace) -> dict[str, float]:
    """tf.data stage → seconds in its own code in the window, longest first, summed over threads.

    A stage is the last part of ``Iterator::Root::Prefetch::Map``, its position stripped. Self
    time is an event's length minus that of the stages directly inside it on the same thread; a
    parallel stage waiting for its own workers counts as that stage. ``Root`` and ``Prefetch``
    only hand on or wait, so they are left out.
    """
    host = trace.host
    rows = np.flatnonzero(name_mask(trace, _STAGE)[host.name] & (host.end_ns > host.start_ns))
    if not len(rows):
        return {}
    nesting = nest(host.line[rows], host.start_ns[rows], host.end_ns[rows], host.name[rows], trace.names)
    self_ns = nesting.own(host.end_ns[rows] - host.start_ns[rows])
    names, which = np.unique(host.name[rows], return_inverse=True)
    totals: dict[str, float] = {}
    for name, total in zip(names, np.bincount(which, weights=self_ns), strict=True):
        stage = re.sub(r"\[\d+\]$", "", trace.names[name].rsplit("::", 1)[-1])
        if stage not in ("Root", "Prefetch"):
            totals[stage] = totals.get(stage, 0.0) + float(total) / 1e9
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))

