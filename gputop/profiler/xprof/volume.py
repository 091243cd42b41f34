"""How much is in a trace: events of host and devices, counted without decoding them, and the step time."""

from __future__ import annotations

from pathlib import Path

from gputop.core.errors import GputopError
from gputop.trace import limits
from gputop.trace.readers.xspace.wire import LENGTH, Steps, read_fields, tag

# Field numbers as in gputop.profiler.xprof.messages.
_PLANES, _PLANE_NAME, _LINES, _EVENTS = tag(1, LENGTH), tag(2, LENGTH), tag(3, LENGTH), tag(4, LENGTH)
_AT_MOST = {_PLANES: limits.MAX_PLANES, _LINES: limits.MAX_LINES, _EVENTS: 0}
# A trace with more events is not read for its step time: it would hold the monitor up, and 150 MB.
_MAX_EVENTS = 600_000


def count_events(data: bytes) -> tuple[int, int]:
    """Events of the host and of the devices in a serialized XSpace, as far as it is whole.

    Nothing is kept of them but their number. Of a trace with more parts than a profiler writes those at its beginning
    count.
    """
    host = devices = 0
    steps = Steps(limits.OUTLINE_FIELDS)
    for begin, end in _spans(data, 0, len(data), _PLANES, steps):
        plane = read_fields(data, begin, end, {_PLANE_NAME, _LINES}, _AT_MOST, steps=steps)
        name = plane.last(_PLANE_NAME)
        begins, ends = plane.pairs(_LINES)
        count = sum(read_fields(data, b, e, {_EVENTS}, _AT_MOST, steps=steps).surplus.get(_EVENTS, 0)
                    for b, e in zip(begins.tolist(), ends.tolist(), strict=True))
        if name is not None and data[name[0]:name[1]].startswith(b"/device:"):
            devices += count
        else:
            host += count
    return host, devices


def _spans(data: bytes, begin: int, end: int, field: int, steps: Steps) -> list[tuple[int, int]]:
    begins, ends = read_fields(data, begin, end, {field}, _AT_MOST, steps=steps).pairs(field)
    return list(zip(begins.tolist(), ends.tolist(), strict=True))


def step_time(path: Path, events: int) -> tuple[float, bool] | None:
    """Median step time in a small trace (s), None where it holds no whole steps or is not small.

    And whether these are surely steps of training: what merely repeats, in kernels or ops, may be
    a part of a step that is longer than the trace, and those of an evaluation end with it.
    """
    if events > _MAX_EVENTS:
        return None
    from gputop.analysis.steps.phases import TRAINING, UNKNOWN
    from gputop.analysis.steps.steps import find_steps
    from gputop.trace.readers.load import load

    try:
        steps = find_steps(load([path]))
    except GputopError:
        return None
    if steps is None:
        return None
    times = steps.times
    return times.median_s, times.confidence != "low" and times.phase in (TRAINING, UNKNOWN)
