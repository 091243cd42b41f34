"""Work on several cores: NumPy releases the interpreter's lock while it computes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")
_MAX_THREADS = 4  # the other cores are left to the job that was captured


def pool() -> ThreadPoolExecutor:
    """A thread for each core that this process may use, four at most. Work starts in the order of its submission."""
    return ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MAX_THREADS), "gputop-trace")


def map_ordered(
    threads: ThreadPoolExecutor, calls: Iterable[Callable[[], _T]], ahead: int = _MAX_THREADS,
) -> Iterator[_T]:
    """The calls' results in their order. At most so many calls run ``ahead`` of the consumer, so that few results are
    held."""
    begun: deque[Future[_T]] = deque()
    for call in calls:
        begun.append(threads.submit(call))
        if len(begun) > ahead:
            yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()
