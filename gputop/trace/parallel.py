"""Work on several cores: NumPy releases the interpreter's lock while it computes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

_T = TypeVar("_T")
_MANY_EVENTS = 2_000
_MAX_THREADS = 4  # the other cores are left to the job that was captured


class _InThisThread(ThreadPoolExecutor):
    """Runs each call while it is submitted, in the caller's thread."""

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        future = Future[_T]()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  whoever asks for the result gets it, as of a thread
            future.set_exception(error)
        return future


def pool(events: int = _MANY_EVENTS, *, beside: int = 0) -> ThreadPoolExecutor:
    """A thread for each core that this process may use, four at most. Work starts in the order of its submission.

    ``events``: how many the work is about; of few it takes less time than threads do, and there are none.
    ``beside``: how many threads work at the same time, such as the caller's own: so many fewer, but one. Threads in
    excess take the interpreter's lock from each other after each small operation.
    """
    if events < _MANY_EVENTS:
        return _InThisThread()
    return ThreadPoolExecutor(max(_cores() - beside, 1), "gputop-trace")


def _cores() -> int:
    return min(len(os.sched_getaffinity(0)), _MAX_THREADS)


def map_ordered(threads: ThreadPoolExecutor, calls: Iterable[Callable[[], _T]]) -> Iterator[_T]:
    """The calls' results in their order. Few calls run ahead of the consumer, so that few results are held."""
    begun: deque[Future[_T]] = deque()
    ahead = _cores()
    for call in calls:
        begun.append(threads.submit(call))
        if len(begun) > ahead:
            yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()
