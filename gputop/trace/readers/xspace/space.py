"""One XSpace without its events: its planes, and what its profiler said."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct

from gputop.core.errors import GputopError
from gputop.trace import limits
from gputop.trace.model import I64
from gputop.trace.readers.content import Data, MemoryWatch, too_big, tpu_error
from gputop.trace.readers.xspace.wire import LENGTH, read_fields, tag
from gputop.trace.readers.xspace.xplane import XPlane, event_count, read_plane

_PLANES, _ERRORS, _WARNINGS, _HOSTNAMES = (tag(number, LENGTH) for number in (1, 2, 3, 4))
_TPU_PLANE = "/device:TPU:"
_GPU_PLANE = re.compile(r"/device:GPU:(\d{1,3})(?!\d)")
_SIMULATED_PLANE = "/gputop:simulated"

# Of one file; the hosts' names and messages that are looked at, and the bytes of each.
_AT_MOST = {_PLANES: limits.MAX_PLANES, _ERRORS: limits.MAX_MESSAGES, _WARNINGS: limits.MAX_MESSAGES,
            _HOSTNAMES: limits.MAX_MESSAGES}
_COUNTED = {_PLANES: "planes", _ERRORS: "errors", _WARNINGS: "warnings", _HOSTNAMES: "host names"}
_MAX_TEXT_BYTES = 4 * limits.MAX_NOTE_CHARS
_MANY_LINES = 256  # in a file with more of them short ones are decoded together

# The most memory that one event takes until the trace is assembled.
_EVENT_BYTES = 250


class Space(Struct, frozen=True):
    """Content of an XSpace that is read before any event of it is."""

    planes: Sequence[XPlane]
    errors: Sequence[str]
    warnings: Sequence[str]
    machine: str  # the first host that it names; "": none
    damaged: bool
    surplus: Mapping[str, int]  # what there is more of than is read, and how much

    @property
    def simulated(self) -> bool:
        return any(plane.name == _SIMULATED_PLANE for plane in self.planes)

    @property
    def many_lines(self) -> bool:
        """Return whether the lines are so many that short ones are decoded together."""
        return sum(len(plane.lines) for plane in self.planes) > _MANY_LINES

    @property
    def has_gpus(self) -> bool:
        return any(ordinal(plane) is not None for plane in self.planes)


def read_space(path: str, data: Data, watch: MemoryWatch) -> Space:
    """Raises GputopError for what is no XSpace, for one of TPUs alone, and once what its planes hold takes more memory
    than ``watch`` allows."""
    fields = read_fields(data, 0, len(data), (_PLANES, _ERRORS, _WARNINGS, _HOSTNAMES), _AT_MOST)
    surplus = Counter({what: fields.surplus.get(this, 0) for this, what in _COUNTED.items()})
    planes = _read_planes(path, data, fields.pairs(_PLANES), watch)
    for plane in planes:
        surplus.update(plane.surplus)
    surplus["lines"] += _leave_out_lines(planes)
    errors, warnings, hosts = (
        [data[b:min(e, b + _MAX_TEXT_BYTES)].decode("utf-8", "replace") for b, e in zip(
            *(s.tolist() for s in fields.pairs(which, whole=True)), strict=True)]
        for which in (_ERRORS, _WARNINGS, _HOSTNAMES))
    kept = [plane for plane in planes if plane.name or plane.lines or plane.stats]
    if data and not (kept or errors or warnings or hosts):
        raise GputopError(f"{path} is not an XSpace: it contains no readable plane.",
                          "Give the <host>.xplane.pb that the profiler wrote, or copy the file again.")
    _refuse_tpus(path, kept)
    damaged = fields.damaged or any(plane.damaged for plane in planes)
    return Space(kept, errors, warnings, next(filter(None, hosts), ""), damaged, surplus)


def ordinal(plane: XPlane) -> int | None:
    """Number of the GPU that a plane is of, as the host counts its GPUs; None: it is of none."""
    match = _GPU_PLANE.match(plane.name)
    return int(match[1]) if match else None


def _read_planes(path: str, data: Data, spans: tuple[I64, I64], watch: MemoryWatch) -> list[XPlane]:
    planes = []
    needs_bytes = float(len(data))
    max_events = int(min((watch.limit_bytes - needs_bytes) / _EVENT_BYTES, 1 << 62)) + 1
    for begin, end in zip(*(side.tolist() for side in spans), strict=True):
        if begin >= end:
            continue
        # On one core: these are many small operations, for which several threads take as long and more CPU time.
        plane = read_plane(data, begin, end, max_events)
        watch.check(path)
        needs_bytes += (_EVENT_BYTES * event_count(plane.lines)
                        + limits.LINE_BYTES * len(plane.lines)
                        + limits.METADATA_BYTES * (len(plane.event_names) + len(plane.stat_names)))
        if needs_bytes > watch.limit_bytes:
            raise too_big(path, watch.limit_bytes)
        planes.append(plane)
    return planes


def _leave_out_lines(planes: Sequence[XPlane]) -> int:
    """Keep the first lines of a file, as many as are read; returns how many go."""
    room, surplus = limits.MAX_LINES, 0
    for plane in planes:
        surplus += max(len(plane.lines) - room, 0)
        del plane.lines[room:]
        room -= len(plane.lines)
    return surplus


def _refuse_tpus(path: str, planes: Sequence[XPlane]) -> None:
    """Raises GputopError for a trace of TPUs alone."""
    if any(ordinal(plane) is not None for plane in planes):
        return
    tpus = sum(plane.name.startswith(_TPU_PLANE) and event_count(plane.lines) > 0 for plane in planes)
    if tpus:
        raise tpu_error(path, tpus)
