"""Synthetic jobs whose shuffle buffers fill; times are microseconds."""

from __future__ import annotations

from gputop.trace.model import Trace
from tests.records import replace
from tests.trace.build import Builder

PRODUCER, MAIN = "tf_data_iterator_get_next/1", "python"
SHUFFLE, BELOW = "Iterator::Root::BatchV2::Shuffle", "Iterator::Root::BatchV2::Shuffle::ParallelMapV2"
MS = 1e3  # in µs


def fill(b: Builder, begin: float, elements: int, each: float = 50.0, *, call: bool = True, step: str = "") -> float:
    """A buffer of so many elements fills; ``call``: its own call and that for the batch are recorded. Its end."""
    for i in range(elements):
        b.host(BELOW, begin + 1 + i * each, each - 2, PRODUCER)
    end = begin + elements * each + 1
    if call:
        b.host(SHUFFLE, begin, end - begin, PRODUCER)
        b.host("IteratorGetNextOp::DoCompute", begin - 2, end - begin + 4, "tf_Compute/1")
    return end


def train(b: Builder, begin: float, steps: int, batch: int = 16) -> float:
    """Steps of a full buffer: each element that it gives makes it draw one."""
    for _ in range(steps):
        for i in range(batch):
            b.host(SHUFFLE, begin + i * 20, 15, PRODUCER).host(BELOW, begin + i * 20 + 1, 10, PRODUCER)
        b.host("EagerExecute", begin, batch * 20 + 100, MAIN)
        begin += batch * 20 + 120
    return begin


def sampled(*fills: bool | None) -> Trace:
    """An overview of a part in one piece, and samples of 20 ms, in some of which a buffer fills,
    and nothing happens in those that are None."""
    b = Builder(gpus=0).host("EagerExecute", 0, 400 * MS, MAIN)
    unrecorded, last = [], 500 * MS
    for number, filling in enumerate(fills):
        begin = (number + 2) * 500 * MS
        unrecorded.append((round(last * 1e3), round(begin * 1e3)))
        last = begin + 20 * MS
        if filling:
            fill(b, begin, 390, call=False)
        elif filling is not None:
            train(b, begin, 40)
    trace = b.build()
    return replace(trace, unrecorded_ns=tuple(unrecorded), profile_window_ns=(0, round(last * 1e3)))
