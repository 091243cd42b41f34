"""The training loops of a trace and when they wait for a batch."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from gputop.trace.intervals import Spans, overlap, union
from gputop.trace.lookups import host_rows, spans_of
from gputop.trace.model import Trace, once

# The step's own wait, the last two in TensorFlow 1. tf.data's stages run on other threads and cost nothing while a
# batch lies ready.
GET_NEXT = r"(?:(?:MultiDevice)?IteratorGetNext\w*|QueueDequeue\w*|Unstage)Op::DoCompute$"
LOADER = r"enumerate\(DataLoader\)#"
_SINGLE_PROCESS = f"{LOADER}_SingleProcess"
# grain's iterators, which a loop in JAX asks for its batches; those of its workers are on other threads.
GRAIN = r"_?\w*DatasetIterator\.__next__$"
BATCH_WAIT = f"{GET_NEXT}|{LOADER}|{GRAIN}"
_CALLS_JIT = "PjitFunction"
WORKERS = rf"{LOADER}_MultiProcessing"
HANDED_OVER_NS = 1_000_000  # a batch that lies ready takes as long: 1.2 ms and 0.2 ms per tensor were measured


class TrainingLoop(Struct, frozen=True):
    """A training loop and when it waited for a batch. ``line`` is its thread, -1 where it may use any of the host's."""

    host: str
    line: int
    waits: Spans


@once
def training_loops(trace: Trace) -> list[TrainingLoop]:
    """One per process that has a training loop; none where no calls for a batch are traced. The replicas of one
    TensorFlow process each have an iterator and are one loop; the ranks of a PyTorch job are a loop each."""
    lines = trace.lines
    hosts = {host: i for i, host in enumerate(sorted({line.host for line in lines}))}
    for pattern, loop_of_line in (
        (GET_NEXT, np.array([hosts[line.host] for line in lines], np.int64)),
        (LOADER, np.arange(len(lines))), (GRAIN, np.arange(len(lines))),
    ):
        rows = host_rows(trace, pattern)
        if pattern == GRAIN and len(rows):
            rows = rows[np.isin(trace.host.line[rows], trace.host.line[host_rows(trace, _CALLS_JIT)])]
        if len(rows):
            loop = loop_of_line[trace.host.line[rows]]
            names = list(hosts)
            return [
                TrainingLoop(names[i] if pattern == GET_NEXT else lines[i].host, -1 if pattern == GET_NEXT else int(i),
                             union(trace.host.start_ns[rows[loop == i]], trace.host.end_ns[rows[loop == i]]))
                for i in np.unique(loop)
            ]
    return []


def loads_itself(trace: Trace, within: Spans) -> bool:
    """Return whether the training loop's own thread makes PyTorch's batches (num_workers=0): most of those that it
    waits for ``within`` some time, as an evaluation may have a loader of its own; without such waits any."""
    single, every = (spans_of(trace, host_rows(trace, pattern)) for pattern in (_SINGLE_PROCESS, LOADER))
    waited_ns = overlap(every, within)
    return 2 * overlap(single, within) > waited_ns if waited_ns else bool(len(single.start))
