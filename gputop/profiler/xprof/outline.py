"""The little that a capture must know of an XSpace, without decoding its events: what it holds, and of how many."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import BinaryIO, cast

from msgspec import Struct

from gputop.core.files import open_regular
from gputop.trace import limits
from gputop.trace.readers.xspace.wire import LENGTH, Fields, Quota, read_fields, tag
from gputop.trace.readers.xspace.xplane import plane_stats

# Field numbers of xplane.proto.
_PLANES, _ERRORS, _WARNINGS = tag(1, LENGTH), tag(2, LENGTH), tag(3, LENGTH)
_PLANE_NAME = tag(2, LENGTH)
_LINES = tag(3, LENGTH)
_EVENTS = tag(4, LENGTH)
_AT_MOST = {_PLANES: limits.MAX_PLANES, _ERRORS: limits.MAX_MESSAGES, _WARNINGS: limits.MAX_MESSAGES,
            _LINES: limits.MAX_LINES, _EVENTS: 1}
_COUNTED = {**_AT_MOST, _EVENTS: 0}  # nothing is kept of events but their number
_MAX_TEXTS = 20  # errors, and as many warnings


class Outline(Struct, frozen=True):
    """``errors`` and ``warnings`` are the profiler's own, each told once; ``damaged``: cut off or no XSpace."""

    has_events: bool
    errors: tuple[str, ...]
    warnings: tuple[str, ...]
    damaged: bool


def outline(data: bytes) -> Outline:
    """Outline a serialized XSpace (bytes, or a mapped file). This runs in the process that captures: it takes memory
    for some thousand places in the trace, and time for a bounded number of fields, whatever a server has answered."""
    steps = Quota(limits.OUTLINE_FIELDS)
    space = read_fields(data, 0, len(data), {_PLANES, _ERRORS, _WARNINGS}, _AT_MOST, steps=steps)

    def texts(field: int) -> tuple[str, ...]:
        texts = (data[b:min(e, b + limits.MAX_NOTE_CHARS)].decode("utf-8", "replace") for b, e in _spans(space, field))
        return tuple(dict.fromkeys(texts))[:_MAX_TEXTS]

    planes = sorted(_spans(space, _PLANES), key=lambda span: span[0] - span[1])
    has_events = any(_plane_has_events(data, begin, end, steps) for begin, end in planes)
    warnings = texts(_WARNINGS)
    if steps.left < 0:
        has_events = True  # as far as can be told
        warnings = (*warnings, "it has more parts than a profiler trace should have; gputop did not check all of them")
    return Outline(has_events, texts(_ERRORS), warnings, space.damaged)


def map_file(path: Path) -> bytes:
    """A file to be indexed and sliced as bytes are, without being read whole; raises OSError."""
    with open_regular(path) as file:
        return map_open_file(file)


def map_open_file(file: BinaryIO) -> bytes:
    """The same for a file that is open."""
    try:
        return cast(bytes, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except ValueError:  # an empty file cannot be mapped
        return b""


def session_window_ns(path: Path) -> tuple[int, int] | None:
    """Begin and end of the recording, Unix time by the server's clock; None where the trace does not say, or cannot be
    read. Of several that were joined, when the first began and the last ended."""
    try:
        data = map_file(path)
    except OSError:
        return None
    windows = []
    steps = Quota(limits.OUTLINE_FIELDS)
    for begin, end in _spans(read_fields(data, 0, len(data), {_PLANES}, _AT_MOST, steps=steps), _PLANES):
        plane = read_fields(data, begin, end, {_PLANE_NAME}, {_PLANE_NAME: 1}, steps=steps, enough=True)
        name = plane.last(_PLANE_NAME)
        if name is not None and data[name[0]:name[1]] == b"Task Environment":
            stats = plane_stats(data, begin, end)
            start, stop = stats.get("profile_start_time"), stats.get("profile_stop_time")
            if isinstance(start, int) and isinstance(stop, int) and 0 < start <= stop:
                windows.append((start, stop))
    return (min(start for start, _ in windows), max(stop for _, stop in windows)) if windows else None


def _plane_has_events(data: bytes, begin: int, end: int, steps: Quota) -> bool:
    plane = read_fields(data, begin, end, {_LINES}, _AT_MOST, steps=steps, enough=True)
    return any(
        len(read_fields(data, b, e, {_EVENTS}, _AT_MOST, steps=steps, enough=True).spans[_EVENTS]) > 0
        for b, e in _spans(plane, _LINES))


def count_events(data: bytes) -> tuple[int, int]:
    """Events of the host and of the devices in a serialized XSpace, as far as it is whole. Of a trace with more parts
    than a profiler writes those at its beginning count."""
    host = devices = 0
    steps = Quota(limits.OUTLINE_FIELDS)
    for begin, end in _spans(read_fields(data, 0, len(data), {_PLANES}, _COUNTED, steps=steps), _PLANES):
        plane = read_fields(data, begin, end, {_PLANE_NAME, _LINES}, _COUNTED, steps=steps)
        name = plane.last(_PLANE_NAME)
        count = sum(read_fields(data, b, e, {_EVENTS}, _COUNTED, steps=steps).surplus.get(_EVENTS, 0)
                    for b, e in _spans(plane, _LINES))
        if name is not None and data[name[0]:name[1]].startswith(b"/device:"):
            devices += count
        else:
            host += count
    return host, devices


def _spans(fields: Fields, field: int) -> list[tuple[int, int]]:
    begins, ends = fields.pairs(field)
    return list(zip(begins.tolist(), ends.tolist(), strict=True))
