"""Requests between callers that must not wait and a thread that may hang."""

from __future__ import annotations

import queue
import threading

from gputop.sources.dcgm.client import UpdateRequests
from tests.waiting import PATIENCE_S


def test_one_answer_serves_all_requests_before_it_and_none_made_meanwhile() -> None:
    requests = UpdateRequests()
    assert requests.wait(0.0), "nothing was requested"
    assert requests.make() and requests.make()
    assert not requests.wait(0.0)
    assert requests.take() == 2
    requests.make()
    requests.answer(2)
    assert not requests.wait(0.0)
    assert requests.take() == 3
    requests.answer(3)
    assert requests.wait(0.0)


def test_the_end_wakes_the_thread_and_takes_no_request_any_more() -> None:
    requests, taken = UpdateRequests(), queue.SimpleQueue[object]()
    threading.Thread(target=lambda: taken.put(requests.take()), daemon=True).start()
    requests.end()
    assert taken.get(timeout=PATIENCE_S) is None
    assert not requests.make() and requests.take() is None


def test_a_caller_is_woken_by_the_answer() -> None:
    requests, seen = UpdateRequests(), queue.SimpleQueue[bool]()
    requests.make()
    threading.Thread(target=lambda: seen.put(requests.wait(PATIENCE_S)), daemon=True).start()
    number = requests.take()
    assert number is not None
    requests.answer(number)
    assert seen.get(timeout=PATIENCE_S)
