"""Volume of a trace: events of host and devices, counted without decoding them."""

from __future__ import annotations

from gputop.trace import limits
from gputop.trace.readers.xspace.wire import LENGTH, Steps, read_fields, tag

# Field numbers as in gputop.profiler.xprof.messages.
_PLANES, _PLANE_NAME, _LINES, _EVENTS = tag(1, LENGTH), tag(2, LENGTH), tag(3, LENGTH), tag(4, LENGTH)
_AT_MOST = {_PLANES: limits.MAX_PLANES, _LINES: limits.MAX_LINES, _EVENTS: 0}


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
