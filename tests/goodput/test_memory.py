"""Growing host memory: a leak's date is right, and what only looks like one is not accused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count, islice

import pytest

from gputop.goodput.memory_creep import MAX_POINTS, Memory, MemorySeries
from gputop.goodput.model import Creep
from tests.fakes import cgroup_sample
from tests.goodput.days import GIB, START_S, node
from tests.records import replace

HOUR = 3600.0


def creeps(rss: Callable[[float], float], hours: float = 24.0, *, limit: float | None = None,
           ended_h: float | None = None) -> list[Creep]:
    """Of a process with this RSS (GiB, by hours) on a node of 256 GiB, or in a group with ``limit`` (GiB)."""
    memory = Memory(lambda process: process.command or "")
    for minute in range(int(60 * hours)):
        own = rss(minute / 60) * GIB
        group = None if limit is None else cgroup_sample(memory_limit_bytes=limit * GIB,
                                                         memory_used_bytes=own + 2 * GIB)
        ended = ended_h is not None and minute / 60 > ended_h
        memory.add(node(START_S + 60 * minute, "free" if ended else "train", rss=own, used=90 * GIB + own, group=group))
    return list(memory.creeps())


def test_a_leak_is_told_with_its_date() -> None:
    noise = random.Random(1)
    leak, = creeps(lambda hour: 8 + 0.5 * hour + noise.uniform(0, 1))
    assert (leak.what, leak.pid, leak.limit) == ("process", 100, "node")
    assert leak.bytes_per_s * HOUR == pytest.approx(0.5 * GIB, rel=0.05)
    assert leak.full_in_s == pytest.approx((256 - 90 - 8 - 12) / 0.5 * HOUR, rel=0.2)
    assert leak.full_in_low_s <= leak.full_in_s <= leak.full_in_high_s  # type: ignore[operator]


def test_the_limit_of_its_control_group_comes_first() -> None:
    leak, = creeps(lambda hour: 8 + 0.5 * hour, limit=32)
    assert leak.limit == "cgroup" and leak.limit_bytes == 32 * GIB
    assert leak.full_in_s == pytest.approx((32 - 2 - 8 - 12) / 0.5 * HOUR, rel=0.2)


def test_a_leak_in_teeth_is_one() -> None:
    leak, = creeps(lambda hour: 8 + 0.5 * hour + 3 * (hour % 1))
    assert leak.bytes_per_s * HOUR == pytest.approx(0.5 * GIB, rel=0.2)


@pytest.mark.parametrize(("healthy", "hours"), [
    (lambda hour: 8 + 6 * (hour % 1.7) / 1.7, 8), (lambda hour: 8 + 6 * (hour % 1.7) / 1.7, 100),  # a buffer's teeth
    (lambda hour: 8 + 20 * (hour % 17) / 17, 24), (lambda hour: 8 + 20 * (hour % 17) / 17, 100),  # long teeth
    (lambda hour: 8 + min(hour, 6.0) * 4, 8), (lambda hour: 8 + min(hour, 6.0) * 4, 24),  # a cache that fills
    (lambda hour: 8 + 10 * hour, 6.0),  # so steep, but it may be such a cache
    (lambda hour: 8 + 4 * min(hour // 11, 2), 100),  # steps
    (lambda hour: 8 + random.Random(hour).uniform(0, 2), 24),
    (lambda hour: 8 + 0.0001 * hour, 100),  # not worth a word
    (lambda hour: 40 - 0.3 * hour, 24)])
def test_what_is_healthy_is_not_accused(healthy: Callable[[float], float], hours: float) -> None:
    assert not creeps(healthy, hours)


def by_seconds(used: Callable[[float], float], limit: float = 4.0) -> Iterator[Memory]:
    """The memory after each second, of a process in a group with ``limit`` (GiB) that is sampled once in each."""
    memory = Memory(lambda process: process.command or "")
    for second in count():
        yield memory
        rss = used(second) * GIB
        group = cgroup_sample(memory_limit_bytes=limit * GIB, memory_used_bytes=rss)
        memory.add(node(START_S + second, "train", rss=rss, group=group))


def of_seconds(used: Callable[[float], float], seconds: int, limit: float = 4.0) -> list[Creep]:
    return list(next(islice(by_seconds(used, limit), seconds, None)).creeps())


def test_over_minutes_a_leak_is_told_once_it_has_come_half_the_way() -> None:
    def used(second: float) -> float:
        return 1 + 0.01 * second

    assert not of_seconds(used, 140)
    leak, = of_seconds(used, 200)
    assert leak.full_in_s == pytest.approx(101, rel=0.02)
    assert not of_seconds(used, 55, limit=1.6)  # a minute it takes all the same


def test_the_limit_is_met_by_the_teeth_on_top() -> None:
    leak, = of_seconds(lambda second: 1 + 0.01 * second + 0.4 * (second % 7) / 6, 200)
    assert leak.full_in_s == pytest.approx((4 - 1.4) / 0.01 - 200, rel=0.1)


@pytest.mark.parametrize("healthy", [
    lambda second: 1 + 0.01 * min(second, 140),  # a cache that is full before it has come half the way
    lambda second: 0.3 + 3 * (second % 31) / 31, lambda second: 0.3 + 3 * (second % 47) / 47,
    lambda second: 1 + 2 * (second > 100), lambda second: 3.9, lambda second: 3.9 - 0.005 * second])
def test_over_minutes_what_is_healthy_is_not_accused(healthy: Callable[[float], float]) -> None:
    for seconds, memory in enumerate(islice(by_seconds(healthy), 400)):
        assert seconds not in range(60, 400, 9) or not list(memory.creeps()), seconds


def test_a_process_that_ended_has_no_date() -> None:
    leak, = creeps(lambda hour: 8 + 0.5 * hour, ended_h=20.0)
    assert leak.full_in_s is None and leak.end_s == START_S + 20 * HOUR


def test_random_walks_are_seldom_accused() -> None:
    """Memory that wanders; the bound is one in fifty."""
    rng, accused = random.Random(7), 0
    for _ in range(100):
        series, level = MemorySeries(), 50.0
        for minute in range(0, 1440, 4):
            level += rng.uniform(-1, 1)
            series.add(60.0 * minute, level * GIB)
        accused += series.trend(None) is not None
    assert accused <= 2


def test_a_series_stays_small() -> None:
    series = MemorySeries()
    for minute in range(30_000):
        series.add(60.0 * minute, (8 + minute * 0.001) * GIB)
    assert len(series) <= MAX_POINTS
    found = series.trend(None)
    assert found is not None and found.bytes_per_s == pytest.approx(0.001 * GIB / 60, rel=0.01)


def test_the_node_creeps_where_no_process_accounts_for_it() -> None:
    memory = Memory(lambda process: process.command or "")
    for minute in range(1440):
        memory.add(replace(node(START_S + 60 * minute, "train", used=(90 + minute * 0.01) * GIB)))
    creep, = memory.creeps()
    assert (creep.what, creep.pid) == ("node", None)
    assert creep.full_in_s == pytest.approx((256 - 104.4) / 0.01 * 60, rel=0.05)
