"""Calls that may hang: threads of their own make them, and post that they are done to a queue."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_WAKEUP = object()  # a message that only ends the scheduler's wait
MOST_LATE = 0.1  # of a wait: this thread wakes within milliseconds on a host with CPU to spare
HANG_TIMEOUT_S = 2.0  # a call that takes longer is reported as hanging; the usual ones take microseconds


class Batch:
    """Calls that a thread makes one after the other; where one of them hangs, another thread can make the rest."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self.waiting = deque(calls)  # not begun yet
        self.done: deque[tuple[Call, Any, float]] = deque()  # with its result and when it ended

    def run(self, clock: Callable[[], float]) -> None:
        """Make the calls that wait. May run on several threads at a time."""
        while True:
            try:
                call = self.waiting.popleft()
            except IndexError:
                return
            try:
                result = call.function(*call.args)
            except Exception as error:  # noqa: BLE001  thread boundary: one broken probe must not end the others
                result = error
            self.done.append((call, result, clock()))

    def collect(self) -> None:
        """Hand the results that are there to their calls; on the scheduler thread."""
        while self.done:
            call, result, ended_s = self.done.popleft()
            call.end(result, ended_s)


class Worker:
    """A thread that makes the calls of one batch after the other and posts ``(worker, batch)`` to ``results`` after
    each. It begins with the first batch. ``idle`` belongs to the scheduler thread."""

    def __init__(self, name: str, results: queue.SimpleQueue[Any], clock: Callable[[], float]) -> None:
        self.idle, self.asked_s = True, clock()
        self._requests: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._results = results
        self._clock = clock
        self._thread = threading.Thread(target=self._run, name=f"gputop-{name}", daemon=True)

    def submit(self, batch: Batch) -> None:
        self.idle, self.asked_s = False, self._clock()
        self._requests.put(batch)
        if self._thread.ident is None:
            self._thread.start()

    def stop(self) -> None:
        """End the thread after the requests that wait; returns at once."""
        self._requests.put(None)

    def _run(self) -> None:
        while (batch := self._requests.get()) is not None:
            batch.run(self._clock)
            self._results.put((self, batch))


class Call:
    """A call made again and again, never twice at a time. Only the scheduler thread writes it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.args: tuple[Any, ...] = ()  # of the pending one
        self.submitted_s: float | None = None  # when the pending one was submitted; None: none is pending
        self.duration_s = 0.0  # of the last finished one, from submission to result
        self.result: Any = None  # the newest result that was not polled yet; may be an exception
        self._last: Any = None  # the result that was polled last

    @property
    def pending(self) -> bool:
        return self.submitted_s is not None

    def prepare(self, now_s: float, timeout_s: float, *args: Any) -> bool:
        """Make it pending, for a worker to make it next; returns whether to wait up to ``timeout_s`` for its result."""
        if self.duration_s > HANG_TIMEOUT_S:
            self.result = None
            self.duration_s = 0.0
        self.submitted_s, self.args = now_s, args
        # A call that is always slow is shown one tick late; otherwise it would make every tick late.
        return self.duration_s <= timeout_s

    def end(self, result: Any, now_s: float) -> None:
        """Note that it has ended with this result."""
        if self.submitted_s is not None:
            self.result, self.duration_s, self.submitted_s = result, now_s - self.submitted_s, None

    def poll(self) -> Any:
        """The newest result, once; None where there is none or its call hung."""
        result, self.result = self.result, None
        return None if self.duration_s > HANG_TIMEOUT_S else result

    def poll_or_last(self, awaited: bool) -> Any:
        """Poll as :meth:`poll`; where the tick did not wait, the last result stands in for one tick.

        So a call that always takes longer than the tick's timeout is shown at every tick, one tick late.
        """
        result = self.poll()
        if result is None and not awaited:
            result, self._last = self._last, None
        else:
            self._last = result
        return result


class Workers:
    """The threads and the calls of one scheduler thread, which receives here what they have done.

    Only :meth:`wake` and :meth:`stop` may be called on another thread. ``stopping``: :meth:`wait_for` no longer waits.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.stopping = False
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._workers: list[Worker] = []
        self._calls: list[Call] = []
        self._late: deque[tuple[float, float]] = deque(maxlen=256)  # when a wait ended late, by how many seconds

    def worker(self, name: str) -> Worker:
        self._workers.append(Worker(name, self._results, self.clock))
        return self._workers[-1]

    def dismiss(self, worker: Worker) -> None:
        """End a thread, after what it does."""
        self._workers.remove(worker)
        worker.stop()

    def call(self, function: Callable[..., Any]) -> Call:
        self._calls.append(Call(function))
        return self._calls[-1]

    def receive(self, until_s: float | None) -> bool:
        """Receive the results of one batch; False if none came by ``until_s`` (monotonic; None: wait forever)."""
        try:
            message = self._results.get(timeout=None if until_s is None else max(0.0, until_s - self.clock()))
        except queue.Empty:
            if until_s is not None and (now_s := self.clock()) > until_s:
                self._late.append((now_s, now_s - until_s))
            return False
        if message is not _WAKEUP:
            worker, batch = message
            worker.idle = True
            batch.collect()
        return True

    def starved_s(self, waited_s: float) -> float | None:
        """Seconds of the last ``waited_s`` in which gputop itself got no CPU; None where it got enough for a call that
        has not ended to be the driver's fault.

        What is seen is how late this thread was woken, which other threads of a starved process are at least."""
        late_s = min(waited_s, sum(late for when, late in self._late if when >= self.clock() - waited_s))
        return late_s if late_s > MOST_LATE * waited_s else None

    def wait_for(self, calls: Sequence[Call], timeout_s: float) -> None:
        """Receive results until none of ``calls`` is pending, at most for ``timeout_s``."""
        until_s = self.clock() + timeout_s
        while not self.stopping and any(call.pending for call in calls):
            if not self.receive(until_s):
                return

    def wake(self) -> None:
        """End the wait that is under way in :meth:`receive`."""
        self._results.put(_WAKEUP)

    def stop(self) -> None:
        self.stopping = True
        self.wake()

    def end(self, timeout_s: float) -> bool:
        """End the threads; returns whether none was in a call any longer after ``timeout_s`` at most.

        The stop may have come in the middle of a tick, just before the last results.
        """
        for worker in self._workers:
            worker.stop()
        until_s = self.clock() + timeout_s
        while any(call.pending for call in self._calls):
            if not self.receive(until_s):
                return False
        return True
