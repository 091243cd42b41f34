"""The live figures that a few of many workers are chosen by."""

from __future__ import annotations

import pytest

from gputop.profiler.capture.records import Server
from gputop.session.worker_figures import choose
from tests.advice.live.scene import Job, Level, Scene, recorded
from tests.records import replace


def workers(active: dict[int, Level], **other: Level | None) -> tuple[list[Server], Scene]:
    scene = Scene(active, jobs=[Job(100 + i, [i], f"python train.py {i}") for i in range(8)], other=other)
    return [Server(f"127.0.0.1:{6000 + i}", pid=100 + i) for i in range(8)], scene


def test_lowest_median_and_highest_activity() -> None:
    servers, scene = workers({i: 0.7 + i / 100 for i in range(8)} | {5: 0.2, 2: 0.9})
    history, (*_, sample) = recorded(scene, 100)
    choice = choose(servers, sample, history)
    assert choice.chosen == ("127.0.0.1:6005", "127.0.0.1:6003", "127.0.0.1:6002")
    assert choice.by == "SM active in the last 60 s" and choice.reasons[0] == "GPU 5: lowest, 20%"


def test_a_worker_without_readings_does_not_hide_the_others() -> None:
    servers, scene = workers({i: 0.7 + i / 100 for i in range(8)} | {5: 0.2})
    history, (*_, sample) = recorded(scene, 20)
    sample = replace(sample, gpus=tuple(g for g in sample.gpus if g.info.index != 2))
    choice = choose(servers, sample, history)
    assert choice.chosen[0] == "127.0.0.1:6005" and "127.0.0.1:6002" not in choice.chosen
    assert choice.by.startswith("SM active in the last ") and choice.by.endswith("(1 has no value)")
    assert "last 60 s" not in choice.by  # there are samples of a part of it


def test_power_where_there_is_no_activity() -> None:
    servers, scene = workers(dict.fromkeys(range(8), 0.7))
    history, (*_, sample) = recorded(replace(scene, fine=False), 100)
    assert choose(servers, sample, history).by.startswith("Power")


def test_workers_of_other_nodes_have_no_figures() -> None:
    servers, scene = workers(dict.fromkeys(range(8), 0.7))
    history, (*_, sample) = recorded(scene, 100)
    far = [replace(server, pid=None) for server in servers]
    for choice in (choose(far, sample, history), choose(servers, None, None)):
        assert choice.chosen == ("127.0.0.1:6000", "127.0.0.1:6003", "127.0.0.1:6007") and "no live" in choice.by


@pytest.mark.parametrize("seen", [3, 2])
def test_few_that_are_seen_are_enough_from_three_on(seen: int) -> None:
    servers, scene = workers({i: 0.7 + i / 100 for i in range(8)})
    history, (*_, sample) = recorded(scene, 100)
    mixed = [server if i < seen else replace(server, pid=None) for i, server in enumerate(servers)]
    assert ("SM active" in choose(mixed, sample, history).by) == (seen == 3)
