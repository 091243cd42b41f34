"""Threads that make calls, and the one that receives what they have done."""

from __future__ import annotations

import threading
import time

import pytest

from gputop.telemetry.deadline_calls import Batch, Call, Worker, Workers
from tests.waiting import PATIENCE_S


def submitted(workers: Workers, worker: Worker, call: Call, *args: object) -> Call:
    call.prepare(workers.clock(), PATIENCE_S, *args)
    worker.submit(Batch([call]))
    return call


def test_a_result_comes_back_to_its_call() -> None:
    workers = Workers(time.monotonic)
    worker, divide = workers.worker("test"), workers.call(divmod)
    submitted(workers, worker, divide, 7, 2)
    assert divide.pending and not worker.idle
    workers.wait_for([divide], PATIENCE_S)
    assert not divide.pending and worker.idle
    assert divide.poll() == (3, 1) and divide.poll() is None
    submitted(workers, worker, divide, 7, 0)
    workers.wait_for([divide], PATIENCE_S)
    assert isinstance(divide.poll(), ZeroDivisionError)
    assert workers.end(PATIENCE_S)


def test_a_thread_begins_with_its_first_batch_and_ends() -> None:
    workers = Workers(time.monotonic)
    worker = workers.worker("begins-late")
    assert worker._thread.ident is None
    threads = [submitted(workers, worker, workers.call(threading.current_thread)) for _ in range(2)]
    workers.wait_for(threads, PATIENCE_S)
    assert [call.poll() for call in threads] == [worker._thread] * 2
    assert worker._thread.name == "gputop-begins-late" and worker._thread.daemon
    assert workers.end(0.0)
    worker._thread.join(PATIENCE_S)
    assert not worker._thread.is_alive()


def test_a_stop_ends_the_wait_for_a_call_that_hangs() -> None:
    workers, gate = Workers(time.monotonic), threading.Event()
    worker = workers.worker("test")
    hanging = submitted(workers, worker, workers.call(gate.wait), PATIENCE_S)
    threading.Thread(target=workers.stop, daemon=True).start()
    workers.wait_for([hanging], 1e6)
    assert workers.stopping and hanging.pending
    assert not workers.end(0.0), "a call is still under way"
    gate.set()
    assert workers.end(PATIENCE_S) and not hanging.pending


def test_to_wake_and_to_stop_each_end_one_wait() -> None:
    workers = Workers(time.monotonic)
    workers.wake()
    assert workers.receive(None) and not workers.stopping
    assert not workers.receive(workers.clock())
    workers.stop()
    assert workers.receive(workers.clock()) and workers.stopping


@pytest.mark.parametrize(("duration_s", "waits"), [(0.4, True), (0.6, False), (3.0, True)])
def test_a_call_that_is_always_slow_is_not_waited_for(duration_s: float, waits: bool) -> None:
    """One that hung is given the chance to be quick again."""
    call = Call(lambda: None)
    assert call.prepare(0.0, 0.5)
    call.end("result", duration_s)
    assert call.prepare(10.0, 0.5) == waits


def test_the_last_result_stands_in_for_one_tick() -> None:
    call = Call(lambda: None)
    call.prepare(0.0, 0.5)
    call.end("first", 0.6)
    assert call.poll_or_last(awaited=False) == "first"
    assert call.poll_or_last(awaited=False) == "first"
    assert call.poll_or_last(awaited=False) is None
