"""Moments in local time, with the offset from UTC where the clock is set back and one time of day comes twice."""

from __future__ import annotations

import time

_SHIFTS_S = (1800, 3600, 7200)  # by which clocks are set: half an hour on Lord Howe Island, two hours at some bases


def clock_time(time_s: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Format a time in the form of strftime: "2026-10-25 02:10:00", and " (UTC+02:00)" behind it where that alone says
    which."""
    text = time.strftime(form, time.localtime(time_s))
    return f"{text} ({utc_offset(time_s)})" if comes_twice(time_s) else text


def comes_twice(time_s: float) -> bool:
    """Return whether the clocks show this time of this day twice."""
    clock = time.localtime(time_s)
    return any(time.localtime(time_s + shift_s)[:6] == clock[:6] for s in _SHIFTS_S for shift_s in (s, -s))


def utc_offset(time_s: float) -> str:
    """"UTC+02:00"."""
    minutes = int(time.localtime(time_s).tm_gmtoff or 0) // 60
    return f"UTC{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02d}:{abs(minutes) % 60:02d}"
