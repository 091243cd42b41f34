"""One step as it went, GPU by GPU: the picture of a step for documents that outlive the trace."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from gputop.analysis.gpu.breakdown import parts_by_gpu
from gputop.analysis.gpu.device_time import GpuTimeline, gpu_number
from gputop.analysis.results import StepRuns, TypicalStep
from gputop.analysis.steps.model import Steps
from gputop.trace.intervals import coverage
from gputop.trace.model import Trace

SLOTS = 400  # more cannot be told apart on a page


def typical_step(trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps | None) -> TypicalStep | None:
    """None where the trace has no steps, or no GPU ran in the typical one."""
    if steps is None:
        return None
    durations = np.array([(end - begin) / 1e9 for begin, end in steps.bounds_ns])
    step = int(np.argmin(np.abs(durations - steps.times.median_s)))
    begin, end = steps.bounds_ns[step]
    gpus = parts_by_gpu(trace, gpu_timelines, [(begin, end)])
    if not gpus:
        return None
    edges = np.linspace(begin, end, SLOTS + 1).round().astype(np.int64)
    runs = []
    for gpu, parts in gpus.items():
        names = list(parts)
        most = np.argmax([coverage(spans, edges[:-1], edges[1:]) for spans in parts.values()], axis=0)
        cuts = [0, *(np.flatnonzero(np.diff(most)) + 1).tolist(), SLOTS]
        runs.append(StepRuns(gpu_number(trace, gpu), tuple((names[most[a]], a, b)
                                                           for a, b in itertools.pairwise(cuts))))
    return TypicalStep(step, float(durations[step]), SLOTS, tuple(sorted(runs, key=lambda r: r.gpu)))
