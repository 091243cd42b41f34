"""Work on several cores: NumPy releases the interpreter's lock while it computes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")
_MAX_THREADS = 4  # the other cores are left to the job that was captured


def pool(*, beside: int = 0) -> ThreadPoolExecutor:
    """A thread for each core that this process may use, four at most. Work starts in the order of its submission.

    ``beside``: how many threads work at the same time, such as the caller's own: so many fewer, but one. Threads in
    excess take the interpreter's lock from each other after each small operation.
    """
    return ThreadPoolExecutor(max(min(len(os.sched_getaffinity(0)), _MAX_THREADS) - beside, 1), "gputop-trace")


def map_ordered(threads: ThreadPoolExecutor, calls: Iterable[Callable[[], _T]]) -> Iterator[_T]:
    """The calls' results in their order. Few calls run ahead of the consumer, so that few results are held."""
    begun: deque[Future[_T]] = deque()
    for call in calls:
        begun.append(threads.submit(call))
        if len(begun) > _MAX_THREADS:
            yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()
