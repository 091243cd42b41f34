"""Several recordings of one process, one after the other, in one XSpace.

A server that records continuously hands over what it has and begins anew; meanwhile it records nothing. gputop
joins such recordings without decoding them: an XSpace is a protobuf message, so two serialized ones in a row are
one with the planes of both. An empty plane named ``/gputop:recording`` stands before those of each.
"""

from __future__ import annotations

from collections.abc import Sequence

from gputop.trace.readers.xspace.xplane import XPlane

PLANE = "/gputop:recording"
_NAME = PLANE.encode()
_SEPARATOR = bytes((0x0A, len(_NAME) + 2, 0x12, len(_NAME))) + _NAME  # XSpace.planes { XPlane.name }


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
