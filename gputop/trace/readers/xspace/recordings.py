"""Several recordings of one process, one after the other, in one XSpace.

A server that records continuously hands over what it has and begins anew; meanwhile it records nothing. gputop
joins such recordings without decoding them: an XSpace is a protobuf message, so two serialized ones in a row are
one with the planes of both. An empty plane named ``/gputop:recording`` stands before those of each.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from gputop.trace.readers.clock_file import HostClock
from gputop.trace.readers.xspace.xplane import XPlane

PLANE = "/gputop:recording"
_NAME = PLANE.encode()
_SEPARATOR = bytes((0x0A, len(_NAME) + 2, 0x12, len(_NAME))) + _NAME  # XSpace.planes { XPlane.name }


class FileRecording(Struct, frozen=True):
    """One recording of a file, and its clock."""

    planes: Sequence[XPlane]
    base_ns: int  # to be added to the times of its lines
    wall_clock: bool  # the result is Unix time
    window_ns: tuple[int, int] | None  # when its profiler began and ended; None: not known


class Recordings(Struct, frozen=True):
    """The recordings of a file, in the file's order: one at least."""

    each: Sequence[FileRecording]

    @property
    def wall_clock(self) -> bool:
        return all(recording.wall_clock for recording in self.each)

    @property
    def windows_ns(self) -> list[tuple[int, int]]:
        """The windows that are known."""
        return [recording.window_ns for recording in self.each if recording.window_ns is not None]

    @property
    def window_ns(self) -> tuple[int, int] | None:
        """Time from the first one's begin to the last one's end; None: not known of any."""
        windows = self.windows_ns
        return (min(begin for begin, _ in windows), max(end for _, end in windows)) if windows else None

    @property
    def unrecorded_ns(self) -> list[tuple[int, int]]:
        """The times between them; none where a window is not known."""
        windows = self.windows_ns
        return unrecorded_between(windows) if len(windows) == len(self.each) else []


def read_recordings(planes: Sequence[XPlane], clock: HostClock | None) -> Recordings:
    """``clock``: what the capture measured of the host's clock."""
    return Recordings([_with_clock(recording, clock) for recording in split_recordings(planes)])


def _with_clock(planes: Sequence[XPlane], clock: HostClock | None) -> FileRecording:
    """See "Clocks" in docs/contributing/trace-notes.md."""
    stats = next((plane.stats for plane in planes if plane.name == "Task Environment"), {})
    start, stop = stats.get("profile_start_time"), stats.get("profile_stop_time")
    latest = max((line.timestamp_ns for plane in planes for line in plane.lines if len(line.begin)), default=0)
    absolute = latest > 10**18  # after 2001
    ahead = clock.offset_ns if clock is not None else 0
    if not isinstance(start, int) or not 0 < start < 1 << 61:
        began = clock.began_ns if clock is not None else None
        if not absolute and began is not None:
            return FileRecording(planes, began, True, None)
        return FileRecording(planes, -ahead if absolute else 0, absolute, None)
    window = (start - ahead, stop - ahead) if isinstance(stop, int) and start <= stop < 1 << 61 else None
    return FileRecording(planes, (0 if absolute else start) - ahead, True, window)


def join_recordings(recordings: Sequence[bytes]) -> bytes:
    """One XSpace of several serialized ones. The newest comes first: XProf shows the first plane of each name."""
    return recordings[0] if len(recordings) == 1 else b"".join(_SEPARATOR + data for data in recordings)


def split_recordings(planes: Sequence[XPlane]) -> list[list[XPlane]]:
    """The planes of each recording of a file, in the file's order; one list where nothing was joined."""
    recordings: list[list[XPlane]] = [[]]
    for plane in planes:
        if plane.name == PLANE:
            recordings.append([])
        else:
            recordings[-1].append(plane)
    return [recording for recording in recordings if recording] or [[]]


def unrecorded_between(windows_ns: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The times between recordings, by when each began and ended."""
    out: list[tuple[int, int]] = []
    last: int | None = None
    for begin, end in sorted(windows_ns):
        if last is not None and begin > last:
            out.append((last, begin))
        last = end if last is None else max(last, end)
    return out
