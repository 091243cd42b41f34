"""The whole steps that anchors mark, without those that say nothing of a usual one.

1. Cut the time: a step runs from its anchor to the next edge. The last anchor, which no edge follows, begins none. Only
   if one event is surely one step, and each ends where the next begins, is the last event a step as well.
2. Leave out steps that touch time which was not recorded.
3. Leave out those in which the profiler itself ended or wrote its trace, unless that is all of them.
4. Leave out, from the head on, steps in which kernels were tried out, or which are mostly work of a job's start, up to
   the first without, if there is one.
5. Leave out, from there on, steps whose length is far off the median of those after them, up to the first that is like
   those kept.
6. Leave out periods with a pause, where they are few: nothing shows that the pause belongs to what repeats.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gputop.analysis.steps.anchors import Anchors
from gputop.analysis.steps.compilations import CUDNN, trials
from gputop.analysis.steps.start_up import PROFILER_STOP, StartUpSpan, mostly_start_up
from gputop.trace.intervals import coverage
from gputop.trace.lookups import host_rows, line_by_line, rows_of
from gputop.trace.model import I64, Kind, Trace

# A step that takes this many times the median of those after it, at the head of the window, is warm-up
# (compilation, autotuning, a launch queue that still fills). gputop's own figure.
_WARM_UP_FACTOR = 2.0
_MIN_COMPARED = 3  # steps: the leading one, and two or more whose median shows the usual length
# A pause is in a period that takes this many times the usual one. More than this share of the periods are no accidents.
# gputop's own figures.
_PAUSE_FACTOR, _MAX_PAUSES = 5.0, 0.25
_LEAST_OF_TIME = 0.2  # what repeats for less of it does not stand for the job
# Markers whose own end meets the next one's start within this share of the step are contiguous. gputop's own figure.
_CONTIGUOUS_SHARE = 0.02


class WholeSteps(Struct, frozen=True):
    """Begin and end (ns) of the steps, and of those left out as warm-up, both of shape (n, 2). ``incomplete`` anchors
    begin no whole step."""

    bounds_ns: I64
    warm_up_ns: I64
    incomplete: int


def whole_steps(trace: Trace, anchors: Anchors, start_up: Sequence[StartUpSpan], *, one_is_enough: bool,
                max_warm_up: int | None) -> WholeSteps:
    """The steps by the rules above. ``one_is_enough``: one anchor is surely one step; ``max_warm_up`` is how many steps
    rule 5 may leave out, None: any number."""
    bounds = anchors.bounds_ns if anchors.bounds_ns is not None else _between_edges(anchors, last_too=one_is_enough)
    incomplete = len(anchors.start_ns) - len(bounds)
    for begin, end in trace.unrecorded_ns:
        bounds = bounds[(bounds[:, 1] <= begin) | (bounds[:, 0] >= end)]
    bounds = _without_profilers_end(trace, bounds)
    start = _count_start_up(trace, bounds, start_up)
    warm_up = start + _count_warm_up(bounds[start:], max_warm_up)
    whole = bounds[warm_up:]
    if anchors.unit == "period" and len(whole):
        whole = whole[without_pause(whole[:, 1] - whole[:, 0])]
    return WholeSteps(whole, bounds[:warm_up], incomplete + len(bounds) - warm_up - len(whole))


def alike(length_ns: I64, usual_ns: float) -> npt.NDArray[np.bool_]:
    """Mask of these lengths of steps that are not far off the usual one."""
    return (usual_ns / _WARM_UP_FACTOR <= length_ns) & (length_ns <= usual_ns * _WARM_UP_FACTOR)


def without_pause(length_ns: I64) -> npt.NDArray[np.bool_]:
    """Mask of these lengths of periods but those, if few, that have a pause (6)."""
    usual = length_ns <= _PAUSE_FACTOR * np.median(length_ns)
    few = usual.mean() >= 1 - _MAX_PAUSES and length_ns[usual].sum() >= _LEAST_OF_TIME * length_ns.sum()
    return usual if few else np.ones(len(usual), bool)


def _between_edges(anchors: Anchors, *, last_too: bool) -> I64:
    """The steps from anchor to edge (1); ``last_too``: the last one may be a step as well."""
    edges, start = np.unique(anchors.edges_ns), np.unique(anchors.start_ns)
    following = np.searchsorted(edges, start, side="right")
    has_next = following < len(edges)
    bounds = np.stack((start[has_next], edges[following[has_next]]), axis=1)
    if last_too and not has_next.all():
        bounds = np.concatenate((bounds, _last_event(anchors)))
    return bounds


def _last_event(anchors: Anchors) -> I64:
    """The last anchor's event as a step, shape (1, 2), where each event ends where the next one begins; else none."""
    order = np.argsort(anchors.start_ns, kind="stable")
    gaps = anchors.start_ns[order][1:] - anchors.end_ns[order][:-1]
    last = int(np.argmax(anchors.start_ns))
    begin, end = int(anchors.start_ns[last]), int(anchors.end_ns[last])
    contiguous = not len(gaps) or abs(float(np.median(gaps))) <= _CONTIGUOUS_SHARE * (end - begin)
    return np.array([[begin, end]] if end > begin and contiguous else [], np.int64).reshape(-1, 2)


def _without_profilers_end(trace: Trace, bounds: I64) -> I64:
    """The steps without those in which the profiler ended (3)."""
    stops = trace.host.start_ns[host_rows(trace, PROFILER_STOP)]
    if not len(stops) or not len(bounds):
        return bounds
    with_stop = np.searchsorted(stops, bounds[:, 1]) > np.searchsorted(stops, bounds[:, 0])
    return bounds if with_stop.all() else bounds[~with_stop]


def _count_start_up(trace: Trace, bounds: I64, start_up: Sequence[StartUpSpan]) -> int:
    """Number of leading steps that belong to the job's start (4); 0 where no other follows."""
    if not len(bounds) or not start_up:
        return 0
    tried = coverage(trials(trace)[CUDNN], bounds[:, 0], bounds[:, 1]) > 0
    usual = np.flatnonzero(~(mostly_start_up(start_up, bounds) | tried))
    return int(usual[0]) if len(usual) else 0


def _count_warm_up(bounds: I64, most: int | None) -> int:
    """Number of leading steps that are warm-up (5); 0 where that is more than ``most``. Long steps behind one like
    those kept are none: a function that is traced anew, after the recording's begin."""
    length = bounds[:, 1] - bounds[:, 0]
    count = 0
    while len(length) - count >= _MIN_COMPARED and not alike(length[count], float(np.median(length[count + 1:]))):
        count += 1
    if count:
        like_settled = np.flatnonzero(alike(length[:count], float(np.median(length[count:]))))
        count = int(like_settled[0]) if len(like_settled) else count
    return 0 if most is not None and count > most else count


# -- host ahead ---------------------------------------------------------------------------------------
#
# The steps by their kernels, where the host runs ahead of the GPU: its calls then show no step time.
#
# 0. The last steps are left out where the recording ended before the GPU began them, or did all that it does in
#    others: a host that had been held up fills the queue of launches at once, which may hold seconds of work. (PyTorch,
#    H200: 17 steps of 84.8 ms launched in 2.5 ms each.)
# 1. A step runs from the begin of the first kernel launched in it to that of the first kernel launched after it; the
#    last one ends with its own last kernel, if no other begins before.
# 2. The host is ahead where these steps together take ``_AHEAD_FACTOR`` times as long as the host's calls for them.
#    The smaller factor does where the kernels of every step begin a step late or more: then the GPU never waits for it.
# 3. Steps by kernels that are uneven are none: other threads launch the kernels of a step after its call.

# gputop's own figures; a queue that is merely deep keeps the same pace.
_FEWEST = 2  # of several steps that the GPU must have done
_AHEAD_FACTOR, _BEHIND_A_STEP_FACTOR = 1.5, 1.05


def steps_on_gpu(trace: Trace, bounds_ns: I64) -> I64 | None:
    """Begin and end of these steps on the GPUs, both of shape (steps, 2); None where the host is not ahead of them."""
    done = _steps_done(trace, bounds_ns)
    on_gpu = _bounds_of_kernels(trace, bounds_ns[:done]) if done >= min(_FEWEST, len(bounds_ns)) else None
    if on_gpu is None:
        return None
    bounds_ns = bounds_ns[:done]
    late = (on_gpu[:, 0] - bounds_ns[:, 0] >= bounds_ns[:, 1] - bounds_ns[:, 0]).all()
    factor = _BEHIND_A_STEP_FACTOR if late else _AHEAD_FACTOR
    ahead = on_gpu[-1, 1] - on_gpu[0, 0] >= factor * (bounds_ns[-1, 1] - bounds_ns[0, 0])
    length = on_gpu[:, 1] - on_gpu[:, 0]
    return on_gpu if ahead and (length > 0).all() and alike(length, float(np.median(length))).all() else None


def _steps_done(trace: Trace, bounds_ns: I64) -> int:
    """The number of steps but those at the end that the GPU did not do (0)."""
    device = trace.device
    launch = device.launch_ns[(device.launch_ns >= 0) & (device.kind <= Kind.COLLECTIVE)]
    if ((launch >= bounds_ns[-1, 0]) & (launch < bounds_ns[-1, 1])).any():
        return len(bounds_ns)
    launch.sort()
    kernels = np.diff(np.searchsorted(launch, bounds_ns), axis=1)[:, 0]
    if not kernels.any():
        return len(kernels)
    count = int(np.flatnonzero(kernels)[-1]) + 1
    return count - 1 if kernels[count - 1] < np.median(kernels[:count]) else count


def _bounds_of_kernels(trace: Trace, bounds_ns: I64) -> I64 | None:
    """The steps by their kernels (1); None where no kernel is launched after the first step begins."""
    device = trace.device
    rows = rows_of((device.launch_ns >= bounds_ns[0, 0]) & (device.kind <= Kind.COLLECTIVE))
    launch, start, end = device.launch_ns[rows], device.start_ns[rows], device.end_ns[rows]
    if not len(launch):
        return None
    on_gpu = np.full(bounds_ns.shape, end.max())
    for _, places in line_by_line(device.gpu[rows]):
        # In the order of their starts the first launched at an instant or later is the first to exceed all before it.
        first = np.searchsorted(np.maximum.accumulate(launch[places]), bounds_ns)
        on_gpu = np.minimum(on_gpu, np.append(start[places], end.max())[first])
    # What is launched after the last step may come much later.
    ends_of_steps = end[launch < bounds_ns[-1, 1]]
    on_gpu[-1, 1] = min(on_gpu[-1, 1], ends_of_steps.max()) if len(ends_of_steps) else on_gpu[-1, 0]
    return on_gpu
