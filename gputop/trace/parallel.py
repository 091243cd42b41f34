"""Work on several cores at once: NumPy lets go of the interpreter's lock while it computes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")
_AT_MOST = 4  # the job that was captured has a use for the others


def pool() -> ThreadPoolExecutor:
    """A thread for each core that this process may use, four at most. What is submitted first begins first."""
    return ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _AT_MOST), "gputop-trace")


def map_ordered(threads: ThreadPoolExecutor, calls: Iterable[Callable[[], _T]]) -> Iterator[_T]:
    """The calls' results in their order. Few are begun ahead of those already taken, so that few results wait."""
    begun: deque[Future[_T]] = deque()
    for call in calls:
        begun.append(threads.submit(call))
        if len(begun) > _AT_MOST:
            yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()
