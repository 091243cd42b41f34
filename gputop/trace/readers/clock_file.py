"""The file ``gputop.clocks.json`` of a run folder: what the capture measured of the hosts' clocks.

It lies beside the traces; other tools ignore it. For each trace file, in nanoseconds: how far the host's
clock is ahead of the capturing machine's, the error of that, and when the recording began by the capturing
machine's clock, for servers that do not write that into the trace (docs/contributing/trace-notes.md, "Clocks").
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, field

from gputop.core.codec import convert, encode, parse
from gputop.core.files import read_regular, replacing

FILE = "gputop.clocks.json"
_MAX_BYTES = 16 << 20  # 150 bytes a host
_LIMIT_NS = 1 << 61  # as for times in traces: sums of two must fit an int64
_Ns = Annotated[int, Meta(gt=-_LIMIT_NS, lt=_LIMIT_NS)]


class HostClock(Struct, frozen=True):
    """``offset_ns`` is the host's clock less ours, ``error_ns`` the error of that; ``began_ns`` is Unix time,
    None where the trace contains it."""

    offset_ns: _Ns = 0
    error_ns: Annotated[int, Meta(ge=0, lt=_LIMIT_NS)] = 0
    began_ns: _Ns | None = None


class _ClocksFile(Struct, frozen=True, tag_field="schema", tag="gputop.clocks/1"):
    files: Mapping[str, HostClock] = field(default_factory=dict)


def write_clocks(folder: Path, clocks: Mapping[str, HostClock]) -> None:
    """Write the clocks, by name of the trace file; raises OSError."""
    with replacing(folder / FILE) as file:
        file.write(encode(_ClocksFile(clocks)) + b"\n")


def read_clocks(folder: Path) -> Mapping[str, HostClock]:
    """The clocks by name of the trace file; empty where there is no such file, or not a valid one."""
    with contextlib.suppress(OSError, ValueError):
        return convert(parse(read_regular(folder / FILE, _MAX_BYTES)), _ClocksFile).files
    return {}


def clocks_of(files: Sequence[Path]) -> dict[str, HostClock]:
    """The clocks of several trace files, by path; of one nothing is to be aligned."""
    folders = {folder: read_clocks(folder) for folder in {file.parent for file in files}} if len(files) > 1 else {}
    return {str(file): clock for file in files
            if (clock := folders.get(file.parent, {}).get(file.name.removesuffix(".gz")))}


# -- clocks -------------------------------------------------------------------------------------------
#
# Offset of a server's clock from ours, by one of its captures. Pure functions.
#
# A recording begins after its request was sent and ends before its answer came. The trace tells both moments by the
# server's clock, we know the other two by ours: that bounds the difference, as a round trip does in NTP. The bound
# from above is good (a session begins within milliseconds of the request), the one from below as loose as the
# gathering of the trace took.

class ClockBounds(Struct, frozen=True):
    """A server's clock less ours, in seconds, lies from ``low_s`` to ``high_s``."""

    low_s: float
    high_s: float

    @property
    def width_s(self) -> float:
        return self.high_s - self.low_s

    def estimate_s(self, latency_s: float = 0.0) -> float:
        """The likeliest: no difference where that is possible, as clocks are mostly kept; else that of a
        session which began ``latency_s`` after its request."""
        if self.low_s <= 0 <= self.high_s:
            return 0.0
        return self.high_s - min(latency_s, self.width_s / 2)

    def clock(self, latency_s: float = 0.0) -> HostClock:
        """The same for the trace's folder."""
        estimate_s = self.estimate_s(latency_s)
        error_s = max(self.high_s - estimate_s, estimate_s - self.low_s)
        return HostClock(round(estimate_s * 1e9), round(error_s * 1e9))


SAME_MACHINE = ClockBounds(0.0, 0.0)


def bounds_of_call(sent_s: float, received_s: float, window_ns: tuple[int, int]) -> ClockBounds:
    """Bounds from our Unix times of request and answer, and the server's of begin and end of the recording."""
    began_s, ended_s = window_ns[0] / 1e9, window_ns[1] / 1e9
    low_s, high_s = ended_s - received_s, began_s - sent_s
    if low_s > high_s:  # one of the two clocks was set during the call: the offset lies between the two
        low_s, high_s = high_s, low_s
    return ClockBounds(low_s, high_s)


def intersect(a: ClockBounds | None, b: ClockBounds | None) -> ClockBounds | None:
    """Intersection of both bounds; the narrower one where they exclude each other: a clock was set between them."""
    if a is None or b is None:
        return a or b
    low_s, high_s = max(a.low_s, b.low_s), min(a.high_s, b.high_s)
    if low_s > high_s:
        return min(a, b, key=lambda bounds: bounds.width_s)
    return ClockBounds(low_s, high_s)


def began_between(sent_s: float, received_s: float, recorded_s: float, start_s: float | None) -> HostClock:
    """Bounds of the begin of a recording by our clock, for a trace that does not say: after the request and, where one
    was agreed on, ``start_s``; and so early that ``recorded_s`` fit in before the answer."""
    earliest_s = sent_s if start_s is None else max(sent_s, start_s)
    latest_s = max(earliest_s, received_s - recorded_s)
    return HostClock(0, round((latest_s - earliest_s) * 1e9), round(earliest_s * 1e9))
