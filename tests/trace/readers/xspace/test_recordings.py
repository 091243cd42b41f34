"""Recordings of a file, and when each was made."""

from __future__ import annotations

import numpy as np
import pytest

from gputop.trace.readers.clock_file import HostClock
from gputop.trace.readers.xspace.recordings import PLANE, read_recordings
from gputop.trace.readers.xspace.xplane import XLine, XPlane

UNIX_NS = 1_700_000_000 * 10**9
ONE_EVENT = np.zeros(1, np.int64), np.ones(1, np.int64)


def threads(timestamp_ns: int) -> XPlane:
    return XPlane("/host:CPU", {}, {}, {}, [XLine(1, "python", timestamp_ns, *ONE_EVENT)], False)


def environment(**stats: int | str) -> XPlane:
    return XPlane("Task Environment", {}, {}, dict(stats), [], False)


def separator() -> XPlane:
    return XPlane(PLANE, {}, {}, {}, [], False)


AHEAD = HostClock(offset_ns=5)
BEGAN = HostClock(began_ns=UNIX_NS)


@pytest.mark.parametrize(("planes", "clock", "base_ns", "wall_clock", "window_ns"), [
    ([threads(7)], None, 0, False, None),
    ([threads(7)], BEGAN, UNIX_NS, True, None),
    ([threads(UNIX_NS)], None, 0, True, None),
    ([threads(UNIX_NS)], AHEAD, -5, True, None),
    ([threads(7), environment(profile_start_time=UNIX_NS)], AHEAD, UNIX_NS - 5, True, None),
    ([threads(UNIX_NS), environment(profile_start_time=UNIX_NS, profile_stop_time=UNIX_NS + 9)], AHEAD, -5, True,
     (UNIX_NS - 5, UNIX_NS + 4)),
    ([threads(7), environment(profile_start_time=UNIX_NS, profile_stop_time=UNIX_NS - 1)], None, UNIX_NS, True, None),
    ([threads(7), environment(profile_start_time="yesterday")], None, 0, False, None),
])
def test_the_clock_of_a_recording(
    planes: list[XPlane], clock: HostClock | None, base_ns: int, wall_clock: bool, window_ns: tuple[int, int] | None,
) -> None:
    (recording,) = read_recordings(planes, clock).each
    assert (recording.base_ns, recording.wall_clock, recording.window_ns) == (base_ns, wall_clock, window_ns)


def test_between_recordings_nothing_is_recorded() -> None:
    def made(begin: int, end: int | None) -> list[XPlane]:
        stop = {} if end is None else {"profile_stop_time": UNIX_NS + end}
        return [separator(), threads(7), environment(profile_start_time=UNIX_NS + begin, **stop)]

    newest_first = read_recordings([*made(60, 90), *made(0, 50)], None)
    assert len(newest_first.each) == 2 and newest_first.wall_clock
    assert newest_first.window_ns == (UNIX_NS, UNIX_NS + 90)
    assert newest_first.unrecorded_ns == [(UNIX_NS + 50, UNIX_NS + 60)]
    unknown = read_recordings([*made(60, 90), *made(0, None)], None)
    assert unknown.window_ns == (UNIX_NS + 60, UNIX_NS + 90) and unknown.unrecorded_ns == []
    assert read_recordings([], None).window_ns is None and not read_recordings([], None).wall_clock
