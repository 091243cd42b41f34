"""Age of DCGM values. A value stays readable after its watch has ended, so its time decides."""

from __future__ import annotations

import time

from msgspec import Struct

from gputop.sources.dcgm import fields
from gputop.sources.dcgm.fields import FieldValue

FRESH_S = 2.0
BLANK_S = 20.0  # how long the first sample of somebody else's watch may stay blank
_LONGEST_PERIOD_S = 300.0  # a slower watch does not extend the limit


def clock_text(time_s: float) -> str:
    """A time of day for a reason. Not an age: a reason that changes at each tick would fill recordings."""
    return time.strftime("%H:%M:%S", time.localtime(time_s))


class _LastUpdate(Struct):
    time_us: int
    changed_s: float  # monotonic: when this time was first seen, less its age then
    period_s: float | None  # between the last two times
    period_before_s: float | None = None  # and between the two before


class StalenessTracker:
    """Tracks the time stamp of each value of one connection. Its age counts from its last change on our clock,
    because the engine may be on another machine with another clock."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], _LastUpdate] = {}
        self._blank_since: dict[tuple[str, int], tuple[float, float]] = {}  # monotonic and Unix time

    def blank(self, uuid: str, field_id: int, value: FieldValue, now_s: float, wall_s: float, tick_s: float,
              watch_s: float | None) -> FieldValue:
        """A blank ``value``; once that takes longer than a first sample may, without the hope for one."""
        since_s, since_wall_s = self._blank_since.setdefault((uuid, field_id), (now_s, wall_s))
        limit_s = BLANK_S if watch_s is None else max(FRESH_S, 2.5 * tick_s, 2.5 * watch_s)
        if now_s - since_s <= limit_s:
            return value
        # Of a field that never had one it is the time of gputop's first question.
        reason = (f"no value since {clock_text(since_wall_s)}" if (uuid, field_id) in self._seen else
                  f"no value yet, requested since {clock_text(since_wall_s)}")
        return FieldValue(None, reason, value.time_us, fields.STALE_DATA)

    def check(self, uuid: str, field_id: int, value: FieldValue, now_s: float, wall_s: float, tick_s: float,
              watch_s: float | None) -> tuple[FieldValue, str]:
        """``value``, or the reason that it is stale; and the source to show where it is updated slowly, else "".

        ``tick_s`` is the interval at which gputop asks, ``watch_s`` that of its own watch, if it has one.
        """
        self._blank_since.pop((uuid, field_id), None)
        seen = self._seen.get((uuid, field_id))
        if seen is None:
            age_s = max(0.0, wall_s - value.time_us / 1e6)
            seen = self._seen[uuid, field_id] = _LastUpdate(value.time_us, now_s - age_s, None)
        elif value.time_us != seen.time_us:
            seen.period_before_s = seen.period_s
            period_s = (value.time_us - seen.time_us) / 1e6
            seen.period_s = period_s if 0 < period_s <= _LONGEST_PERIOD_S else None
            seen.time_us, seen.changed_s = value.time_us, now_s
        age_s = now_s - seen.changed_s
        limit_s = max(FRESH_S, 2.5 * tick_s, 2.5 * (watch_s or 0.0))
        if seen.period_s is not None:
            limit_s = max(limit_s, 2 * seen.period_s + 1)
        if age_s > limit_s:
            when = clock_text(value.time_us / 1e6)
            reason = f"field {field_id} was last updated at {when}: its watch has ended or is very slow"
            return FieldValue(None, reason, value.time_us, fields.STALE_DATA), ""
        # Twice, because a single gap is a pause of the engine and no slow watch.
        shortest_s = min(seen.period_s or 0.0, seen.period_before_s or 0.0)
        slow = shortest_s > max(FRESH_S, 2 * tick_s)
        return value, f"{fields.SOURCE}, every {seen.period_s:.0f} s" if slow else ""
