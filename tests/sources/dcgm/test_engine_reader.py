"""What one connection to a host engine shows, read without a client around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from gputop.sources.dcgm import fields
from gputop.sources.dcgm.bindings import find_installed, load
from gputop.sources.dcgm.connection import Engine, parse_address
from gputop.sources.dcgm.engine_reader import EngineAnswer, EngineReader
from gputop.sources.dcgm.watches import Subscription
from tests.dcgm_double.scene import Scene

POWER, SM_ACTIVE = 155, 1002
ALL = Subscription((POWER, SM_ACTIVE), None, watch_ordinary=True)


class Connected:
    """A scene and a reader of its engine, which advance together."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.reader = self.connect()

    def connect(self) -> EngineReader:
        bindings = load(find_installed(self.scene.root, {})[0])
        return EngineReader(Engine(bindings, parse_address(self.scene.engine.address)), local=True)

    def read(self, wanted: Subscription = ALL, interval_s: float = 1.0) -> EngineAnswer:
        self.scene.now_s += interval_s
        self.scene.engine.update()
        return self.reader.read(wanted, interval_s, self.scene.now_s, self.scene.now_s)


@pytest.fixture
def connected(make_scene: Callable[..., Scene]) -> Iterator[Connected]:
    connected = Connected(make_scene())
    yield connected
    connected.reader.close()


def test_a_snapshot_has_the_values_of_the_gpus_that_are_wanted(connected: Connected) -> None:
    only_one = Subscription((POWER,), frozenset(("GPU-1",)), watch_ordinary=True)
    for _ in range(3):
        snapshot = connected.read(only_one)
    assert snapshot.error is None and snapshot.local and snapshot.listed == {"GPU-0", "GPU-1"}
    assert {uuid: {i: value.value for i, value in values.items()} for uuid, values in snapshot.values.items()} == {
        "GPU-1": {POWER: 3.0}}
    assert snapshot.asked_s == snapshot.time_s == connected.scene.now_s


def test_each_field_without_a_value_says_why(connected: Connected) -> None:
    connected.scene.engine.lost.add(1)
    for _ in range(3):
        values = connected.read().values
    assert (values["GPU-0"][POWER].value, values["GPU-0"][SM_ACTIVE].code) == (3.0, fields.NOT_WATCHED)
    assert {value.code for value in values["GPU-1"].values()} == {fields.GPU_IS_LOST}


def test_the_age_of_a_value_is_judged_by_the_interval_of_the_reads(connected: Connected) -> None:
    wanted = Subscription((SM_ACTIVE,), None)
    connected.scene.engine.watched_by_others([SM_ACTIVE])
    for _ in range(3):
        connected.read(wanted)
    connected.scene.engine.watched_by_nobody_else()
    assert connected.read(wanted, interval_s=3.0).values["GPU-0"][SM_ACTIVE].value == 0.5
    assert connected.read(wanted, interval_s=1.0).values["GPU-0"][SM_ACTIVE].code == fields.STALE_DATA


def test_the_next_connection_knows_nothing_of_the_one_before(connected: Connected) -> None:
    connected.scene.engine.lost.add(0)
    for _ in range(3):
        connected.read()
    connected.reader.close()
    assert not connected.scene.engine.watched()
    connected.scene.engine.lost.clear()
    connected.reader = connected.connect()
    for _ in range(3):
        values = connected.read().values
    assert values["GPU-0"][POWER].value == 3.0
