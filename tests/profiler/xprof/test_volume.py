from __future__ import annotations

import gzip
import os
from pathlib import Path

import msgspec
import pytest

from gputop.analysis.steps import steps
from gputop.analysis.steps.model import Steps
from gputop.profiler.capture.safe_capture import step_time
from gputop.profiler.xprof.outline import count_events
from gputop.trace.model import Trace
from gputop.trace.readers import load
from tests import xspace_messages as messages
from tests.profiler.fake_server import make_xspace
from tests.records import replace

DATA = Path(__file__).parents[2] / "data"


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


def test_no_step_time_where_there_are_no_steps_or_too_much_to_read(tmp_path, monkeypatch):
    path = tmp_path / "h.xplane.pb"
    path.write_bytes(make_xspace(events=7))
    assert step_time(path, 7) is None
    path.write_bytes(b"\xff" * 100)
    assert step_time(path, 7) is None
    assert step_time(tmp_path / "never looked at", 10**7) is None
    # Few events, as a hostile job has them counted, in a file of which half of the node's memory would be read.
    os.truncate(path, 1 << 40)
    monkeypatch.setattr(load, "load", pytest.fail)
    assert step_time(path, 7) is None


@pytest.mark.parametrize("trace", ["keras3_fast", "keras2_tf215", "tf_retracing", "jax_cpu"])
def test_steps_that_the_framework_marks_are_sure(tmp_path, trace):
    step_s, sure = step_time(unpacked(trace, tmp_path), 10_000)
    assert 0 < step_s < 1 and sure


@pytest.mark.parametrize(("found", "sure"), [
    ({"confidence": "low"}, False), ({"confidence": "medium"}, True), ({"phase": "evaluation"}, False),
    ({"phase": "prediction"}, False), ({"phase": "unknown"}, True),
])
def test_what_merely_repeats_or_is_no_training_is_not(tmp_path, monkeypatch, found, sure):
    real = steps.find_steps

    def other_steps(trace: Trace) -> Steps:
        here = real(trace)
        return replace(here, times=msgspec.structs.replace(here.times, **found))

    monkeypatch.setattr(steps, "find_steps", other_steps)
    assert step_time(unpacked("keras3_fast", tmp_path), 10_000)[1] == sure


def unpacked(trace: str, folder: Path) -> Path:
    path = folder / "h.xplane.pb"
    path.write_bytes(gzip.decompress((DATA / f"{trace}.xplane.pb.gz").read_bytes()))
    return path
