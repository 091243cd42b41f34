"""Calls that may hang: each is made by a thread of its own, which posts the result to a mailbox."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

HANG_TIMEOUT_S = 2.0  # a call that takes longer than this is called hanging; the usual ones take microseconds


class Worker:
    """A thread that does one call after the other and posts ``(call, result, seconds)`` to the mailbox."""

    def __init__(self, name: str, mailbox: queue.SimpleQueue[Any], clock: Callable[[], float]) -> None:
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._mailbox = mailbox
        self._clock = clock
        threading.Thread(target=self._run, name=f"gputop-{name}", daemon=True).start()

    def order(self, call: Call, *args: Any) -> None:
        call.ordered_s = self._clock()
        self._orders.put((call, call.ordered_s, args))

    def end(self) -> None:
        self._orders.put(None)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            call, ordered_s, args = order
            try:
                result = call.function(*args)
            except Exception as error:  # noqa: BLE001  thread boundary: one broken probe must not end the others
                result = error
            self._mailbox.put((call, result, self._clock() - ordered_s))


class Call:
    """What a worker is asked for again and again, never twice at a time. Read and written by the coordinator."""

    def __init__(self, worker: Worker, function: Callable[..., Any]) -> None:
        self.worker = worker
        self.function = function
        self.ordered_s: float | None = None  # when the one under way was ordered; None: none is
        self.took_s = 0.0  # from the order of the last finished one to its result
        self.result: Any = None  # the newest one not yet used; an exception is one, too
        self._last: Any = None  # the one that was used last

    @property
    def under_way(self) -> bool:
        return self.ordered_s is not None

    def order(self, allowed_s: float, *args: Any) -> bool:
        """Ask for this tick's result; returns whether to wait for it."""
        if self.under_way:
            return False  # still in the call of an earlier tick
        if self.took_s > HANG_TIMEOUT_S:
            self.result = None
            self.took_s = 0.0
        # One that is always slow is shown a tick late rather than making every tick late.
        slow = self.took_s > allowed_s
        self.worker.order(self, *args)
        return not slow

    def take(self) -> Any:
        """The newest result, once; None where there is none or it was begun too long ago to be shown."""
        result, self.result = self.result, None
        return None if self.took_s > HANG_TIMEOUT_S else result

    def take_late(self, awaited: bool) -> Any:
        """As :meth:`take`; where the tick did not wait, the last result stands in for one tick.

        So a call that always takes longer than a tick may wait is seen at every tick, a tick late.
        """
        result = self.take()
        if result is None and not awaited:
            result, self._last = self._last, None
        else:
            self._last = result
        return result
