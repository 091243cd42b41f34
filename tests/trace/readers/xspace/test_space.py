"""What a file holds besides events."""

from __future__ import annotations

import pytest

from gputop.core.errors import GputopError
from gputop.trace import limits
from gputop.trace.readers.content import MemoryWatch
from gputop.trace.readers.xspace.space import Space, read_space
from gputop.trace.readers.xspace.wire import LENGTH
from tests.trace.readers.xspace.wire_encoding import encoded


def plane(name: bytes, lines: int = 0) -> bytes:
    line = encoded(3, LENGTH, encoded(2, LENGTH, b"python") + encoded(4, LENGTH, b"\x08\x01"))
    return encoded(1, LENGTH, encoded(2, LENGTH, name) + line * lines)


def read(data: bytes, limit_bytes: float = float("inf")) -> Space:
    return read_space("/run/node.xplane.pb", data, MemoryWatch(limit_bytes))


def test_planes_messages_and_the_first_host_that_has_a_name() -> None:
    space = read(plane(b"/host:CPU", 2) + plane(b"") + encoded(2, LENGTH, b"broken") + encoded(3, LENGTH, b"late")
                 + encoded(4, LENGTH, b"") + encoded(4, LENGTH, b"node-1") + encoded(4, LENGTH, b"node-2"))
    assert [p.name for p in space.planes] == ["/host:CPU"] and len(space.planes[0].lines) == 2
    assert (space.errors, space.warnings, space.machine) == (["broken"], ["late"], "node-1")
    assert not (space.damaged or space.simulated or space.has_gpus or space.many_lines or any(space.surplus.values()))
    assert read(plane(b"/device:GPU:3") + plane(b"/device:TPU:0", 1)).has_gpus
    assert not read(plane(b"/device:GPU:3000")).has_gpus
    assert read(plane(b"/gputop:simulated")).simulated and read(b"").machine == ""


def test_of_more_lines_than_are_read_the_first_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_LINES", 3)
    space = read(plane(b"/host:CPU", 2) + plane(b"/host:other", 3) + plane(b"/host:last", 1))
    assert [len(p.lines) for p in space.planes] == [2, 1, 0] and space.surplus["lines"] == 3


def test_damage_is_said_and_what_is_no_xspace_refused() -> None:
    whole = plane(b"/host:CPU", 1)
    assert read(whole + whole[:-1]).damaged
    with pytest.raises(GputopError, match=r"/run/node\.xplane\.pb is not an XSpace"):
        read(b"\x00\x01 text")
    with pytest.raises(GputopError, match="is a trace of 2 TPUs, which gputop does not read"):
        read(plane(b"/device:TPU:0", 1) + plane(b"/device:TPU:1", 1) + plane(b"/device:TPU:2"))
    with pytest.raises(GputopError, match="memory"):
        read(whole, limit_bytes=len(whole) + 100)
