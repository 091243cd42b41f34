"""Offset of a server's clock from ours, by one of its captures. Pure functions.

A recording begins after its request was sent and ends before its answer came. The trace tells both
moments by the server's clock, we know the other two by ours: that bounds the difference, as a round
trip does in NTP. The bound from above is good (a session begins within milliseconds of the request),
the one from below as loose as the gathering of the trace took.
"""

from __future__ import annotations

from msgspec import Struct

from gputop.trace.readers.clock_file import HostClock


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
