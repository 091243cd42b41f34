"""The little that a capture must know of an XSpace at once, without decoding its events."""

from __future__ import annotations

from dataclasses import dataclass

from gputop.trace.wire import LENGTH, read_fields, tag

# Field numbers as in gputop.profiler.messages.
_PLANES, _ERRORS, _WARNINGS = tag(1, LENGTH), tag(2, LENGTH), tag(3, LENGTH)
_LINES = tag(3, LENGTH)
_EVENTS = tag(4, LENGTH)


@dataclass(frozen=True, slots=True)
class Outline:
    """``errors`` and ``warnings`` are the profiler's own, each told once; ``damaged``: cut off or no XSpace."""

    has_events: bool
    errors: tuple[str, ...]
    warnings: tuple[str, ...]
    damaged: bool


def outline(data: bytes) -> Outline:
    """Outline a serialised XSpace (bytes, or a mapped file)."""
    space = read_fields(data, 0, len(data), {_PLANES, _ERRORS, _WARNINGS})

    def texts(field: int) -> tuple[str, ...]:
        begins, ends = space.pairs(field)
        found = (data[b:e].decode("utf-8", "replace") for b, e in zip(begins.tolist(), ends.tolist(), strict=True))
        return tuple(dict.fromkeys(found))

    begins, ends = space.pairs(_PLANES)
    planes = sorted(zip(begins.tolist(), ends.tolist(), strict=True), key=lambda span: span[0] - span[1])
    has_events = any(_plane_has_events(data, begin, end) for begin, end in planes)
    return Outline(has_events, texts(_ERRORS), texts(_WARNINGS), space.damaged)


def _plane_has_events(data: bytes, begin: int, end: int) -> bool:
    begins, ends = read_fields(data, begin, end, {_LINES}).pairs(_LINES)
    return any(
        len(read_fields(data, b, e, {_EVENTS}).spans[_EVENTS]) > 0
        for b, e in zip(begins.tolist(), ends.tolist(), strict=True)
    )
