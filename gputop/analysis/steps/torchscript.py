"""Calls in which TorchScript compiles a function: it runs a new one once or twice to see its types, and then compiles
it for these.

Nothing marks that work. A function shows by what it runs: fused groups, what runs in their place ("fallback_function"),
and the parts of its forward and backward pass. While it is compiled its process runs no op, before the call or in it.
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
    if not len(host_rows(trace, _MARKS)):
        return ()
    builds: list[TorchBuilds] = []
    ranks = np.array([line.rank for line in trace.lines])
    for rank in np.unique(ranks).tolist():
        builds += _of_process(trace, np.flatnonzero(ranks == rank))
    return tuple(sorted(builds, key=lambda one: (int((one.start_ns - one.end_ns).sum()), one.function)))


def _of_process(trace: Trace, lines: I64) -> list[TorchBuilds]:
    host = trace.host
    keep = ~name_mask(trace, PYTHON_FUNCTION)[host.name] & np.isin(host.line, lines)
    keep[host_stat(host, "annotation")[0]] = False
    rows = np.flatnonzero(keep)
    level = np.flatnonzero(name_mask(trace, _MARKS)[host.name[rows]])
    nesting = nest(host.line[rows], host.start_ns[rows], host.end_ns[rows], host.name[rows], trace.names)
    scripted = np.zeros(len(rows), bool)  # the marks, and what holds them
    while len(level):
        scripted[level] = True
        level = np.unique(nesting.parent[level])
        level = level[level >= 0]
    outer = nesting.parent < 0
    # The first call of a function runs no part of it yet.
    scripted |= outer & np.isin(host.name[rows], host.name[rows[scripted & outer]])
    others, calls = rows[~scripted], rows[scripted & outer]
    work = spans_of(trace, others)
    builds = []
    for name, places in by_line(host.name[calls]).items():
        start, end = host.start_ns[calls[places]], host.end_ns[calls[places]]
        begin_ns = _pauses(work, calls, host.end_ns, start)
        spans = [span for call in zip(begin_ns, end.tolist(), strict=True) if (span := _silent(work, call))]
        if spans:
            begin, over = np.array(spans, np.int64).T
            backward = re.match(_BACKWARD, trace.names[name]) is not None  # of any function: they have one name
            builds.append(TorchBuilds("the backward pass" if backward else trace.names[name], begin, over, len(start),
                                      "TorchScript", math.inf if backward else _AGAIN))
    return builds


def _pauses(work: Spans, calls: I64, ends: I64, start: I64) -> list[int]:
    """Begin of the pause before each of these calls, if it is TorchScript's, else of the call."""
    done = np.sort(np.concatenate((work.end, ends[calls])))
    before = np.searchsorted(done, start, side="right") - 1
    pause = np.where(before >= 0, start - done[np.maximum(before, 0)], 0)
    usual = float(np.median(pause)) if len(pause) > 3 else float(pause.min())
    least = _SILENT_ONCE_NS if len(pause) == 1 else max(_SILENT_NS, int(_FAR_LONGER * usual))
    out: list[int] = (start - np.where(pause >= least, pause, 0)).tolist()
    return out


def _silent(work: Spans, call: tuple[int, int]) -> tuple[int, int] | None:
    """The time from the first to the last long pause in this call; None without one."""
    pauses = subtract(union([call[0]], [call[1]]), work)
    long = np.flatnonzero(pauses.end - pauses.start >= _SILENT_NS)
    return (int(pauses.start[long[0]]), int(pauses.end[long[-1]])) if len(long) else None
