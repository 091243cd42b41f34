from __future__ import annotations

from gputop.profiler import messages
from gputop.profiler.volume import count_events, step_time_s
from tests.profiler.fake_server import make_xspace


def two_planes() -> bytes:
    space = messages.XSpace.FromString(make_xspace(events=7))
    for gpu, events in ((0, 300), (1, 0), (7, 5)):
        line = space.planes.add(name=f"/device:GPU:{gpu}").lines.add(name="Stream #1(Kernel)")
        for index in range(events):
            line.events.add(metadata_id=1, offset_ps=index)
    return bytes(space.SerializeToString())


def test_host_and_devices_are_counted_apart():
    assert count_events(two_planes()) == (7, 305)
    assert count_events(make_xspace(events=0)) == (0, 0)


def test_damage_never_raises_and_never_adds():
    whole = two_planes()
    for end in range(0, len(whole), 37):
        host, devices = count_events(whole[:end])
        assert host <= 7 and devices <= 305
    for place in range(0, len(whole), 41):
        lying = bytearray(whole)
        lying[place] = 0xFF  # lengths that claim more than there is
        assert sum(count_events(bytes(lying))) <= len(whole)


def test_no_step_time_where_there_are_no_steps_or_too_much_to_read(tmp_path):
    path = tmp_path / "h.xplane.pb"
    path.write_bytes(make_xspace(events=7))
    assert step_time_s(path, 7) is None
    path.write_bytes(b"\xff" * 100)
    assert step_time_s(path, 7) is None
    assert step_time_s(tmp_path / "never looked at", 10**7) is None
