"""Calls in which TorchScript compiles a function: it runs a new one once or twice to see its types, and then compiles
it for these.

Nothing marks that work. A function shows by what it runs: fused groups, what runs in their place ("fallback_function"),
and the parts of its forward and backward pass. While it is compiled the job runs no op, before the call or in it.
A pause before the call may be Python's, too: it counts where those before other calls of the function are far shorter.
"""

from __future__ import annotations

import math
import re

import numpy as np

from gputop.analysis.steps.torch_compilations import TorchBuilds
from gputop.trace.intervals import Spans, subtract, union
from gputop.trace.lookups import PYTHON_FUNCTION, by_line, host_rows, host_stat, name_mask, spans_of
from gputop.trace.model import I64, Trace
from gputop.trace.nesting import nest

_MARKS = (r"(?:autograd::engine::evaluate_function: )?(?:fallback_function|<(?:forward|backward) op>|"
          r"(?:prim::)?(?:TensorExpr|CudaFusion)\w*Group\w*)$")
_BACKWARD = r"(?:autograd::engine::evaluate_function: .*|<backward op>)$"
# gputop's own figures. Of a function that is called once no other pause tells what is usual.
_SILENT_NS, _SILENT_ONCE_NS, _FAR_LONGER = 10_000_000, 50_000_000, 3.0
_AGAIN = 4  # compilations: it takes three calls to settle


def script_builds(trace: Trace) -> tuple[TorchBuilds, ...]:
    """Compilations of each scripted function, the one that takes most time first."""
    host = trace.host
    if not len(host_rows(trace, _MARKS)):
        return ()
    keep = ~name_mask(trace, PYTHON_FUNCTION)[host.name]
    keep[host_stat(host, "annotation")[0]] = False
    rows = np.flatnonzero(keep)
    nesting = nest(host.line[rows], host.start_ns[rows], host.end_ns[rows], host.name[rows], trace.names)
    scripted = name_mask(trace, _MARKS)[host.name[rows]]  # and what holds such an event
    level = np.flatnonzero(scripted)
    while len(level):
        level = nesting.parent[level]
        scripted[level := np.unique(level[level >= 0])] = True
    outer = nesting.parent < 0
    # The first call of a function runs no part of it yet.
    scripted |= outer & np.isin(host.name[rows], host.name[rows[scripted & outer]])
    calls, work = rows[scripted & outer], spans_of(trace, rows[~scripted])
    done = np.sort(np.concatenate((work.end, host.end_ns[calls])))
    builds = []
    for name, places in by_line(host.name[calls]).items():
        backward = re.match(_BACKWARD, trace.names[name]) is not None  # of any function: they have one name
        spans = _silent(work, done, host.start_ns[calls[places]], host.end_ns[calls[places]])
        if len(spans):
            builds.append(TorchBuilds("the backward pass" if backward else trace.names[name], spans[:, 0], spans[:, 1],
                                      len(places), "TorchScript", math.inf if backward else _AGAIN))
    return tuple(sorted(builds, key=lambda one: (int((one.start_ns - one.end_ns).sum()), one.function)))


def _silent(work: Spans, done: I64, start: I64, end: I64) -> I64:
    """The time from the first to the last long pause in these calls, or before them, where that is TorchScript's; shape
    (pauses, 2)."""
    before = np.searchsorted(done, start, side="right") - 1
    pause = np.where(before >= 0, start - done[np.maximum(before, 0)], 0)
    usual = float(np.median(pause)) if len(pause) > 3 else float(pause.min())
    least = _SILENT_ONCE_NS if len(pause) == 1 else max(_SILENT_NS, int(_FAR_LONGER * usual))
    spans = []
    for call in zip((start - np.where(pause >= least, pause, 0)).tolist(), end.tolist(), strict=True):
        pauses = subtract(union([call[0]], [call[1]]), work)
        long = pauses.end - pauses.start >= _SILENT_NS
        if long.any():
            spans.append((pauses.start[long][0], pauses.end[long][-1]))
    return np.array(spans, np.int64)
