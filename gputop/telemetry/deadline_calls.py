"""Calls that may hang: each is made on a thread of its own, which posts the result to a queue."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

HANG_TIMEOUT_S = 2.0  # a call that takes longer is reported as hanging; the usual ones take microseconds


class Worker:
    """A thread that makes one call after the other and posts ``(call, result, duration_s)`` to ``results``."""

    def __init__(self, name: str, results: queue.SimpleQueue[Any], clock: Callable[[], float]) -> None:
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._results = results
        self._clock = clock
        threading.Thread(target=self._run, name=f"gputop-{name}", daemon=True).start()

    def submit(self, call: Call, *args: Any) -> None:
        call.submitted_s = self._clock()
        self._requests.put((call, call.submitted_s, args))

    def stop(self) -> None:
        """End the thread after the requests that wait; returns at once."""
        self._requests.put(None)

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            call, submitted_s, args = request
            try:
                result = call.function(*args)
            except Exception as error:  # noqa: BLE001  thread boundary: one broken probe must not end the others
                result = error
            self._results.put((call, result, self._clock() - submitted_s))


class Call:
    """A call made again and again, never twice at a time. Only the scheduler thread reads and writes it."""

    def __init__(self, worker: Worker, function: Callable[..., Any]) -> None:
        self.worker = worker
        self.function = function
        self.submitted_s: float | None = None  # when the pending one was submitted; None: none is pending
        self.duration_s = 0.0  # of the last finished one, from submission to result
        self.result: Any = None  # the newest result that was not polled yet; may be an exception
        self._last: Any = None  # the result that was polled last

    @property
    def pending(self) -> bool:
        return self.submitted_s is not None

    def submit(self, timeout_s: float, *args: Any) -> bool:
        """Submit the call for this tick; returns whether to wait up to ``timeout_s`` for its result."""
        if self.pending:
            return False  # still in the call of an earlier tick
        if self.duration_s > HANG_TIMEOUT_S:
            self.result = None
            self.duration_s = 0.0
        # A call that is always slow is shown one tick late; otherwise it would make every tick late.
        slow = self.duration_s > timeout_s
        self.worker.submit(self, *args)
        return not slow

    def poll(self) -> Any:
        """The newest result, once; None where there is none or its call hung."""
        result, self.result = self.result, None
        return None if self.duration_s > HANG_TIMEOUT_S else result

    def poll_or_last(self, awaited: bool) -> Any:
        """As :meth:`poll`; where the tick did not wait, the last result stands in for one tick.

        So a call that always takes longer than the tick's timeout is shown at every tick, one tick late.
        """
        result = self.poll()
        if result is None and not awaited:
            result, self._last = self._last, None
        else:
            self._last = result
        return result
