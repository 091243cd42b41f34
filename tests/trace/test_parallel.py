from __future__ import annotations

import threading
from functools import partial

import pytest

from gputop.trace.parallel import map_ordered, pool


def test_results_come_in_the_order_of_the_calls_whichever_ends_first():
    second_done = threading.Event()

    def slow() -> int:
        second_done.wait(1)  # on a single core it only ends when the time is over
        return 0

    def quick() -> int:
        second_done.set()
        return 1

    with pool() as threads:
        assert list(map_ordered(threads, [slow, quick, lambda: 2])) == [0, 1, 2]


def test_work_on_few_events_needs_no_threads():
    for events, here in ((10, True), (10**6, False)):
        with pool(events) as threads:
            assert (threads.submit(threading.get_ident).result() == threading.get_ident()) == here


def test_few_are_begun_ahead():
    begun: list[int] = []

    def calls():
        for i in range(100):
            begun.append(i)
            yield partial(int, i)

    with pool() as threads:
        results = map_ordered(threads, calls())
        assert next(results) == 0
        assert len(begun) < 10
        assert list(results) == list(range(1, 100))


@pytest.mark.parametrize("events", [10, 10**6])
def test_an_error_arrives_where_its_result_would(events):
    with pool(events) as threads:
        results = map_ordered(threads, [lambda: 1, lambda: 1 // 0, lambda: 3])
        assert next(results) == 1
        with pytest.raises(ZeroDivisionError):
            next(results)
