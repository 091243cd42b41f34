"""Owner of the ops on the threads that all of TensorFlow shares: the model, or functions of tf.data."""

from __future__ import annotations

import numpy as np

from gputop.trace.intervals import Spans, contains
from gputop.trace.lookups import Mask, host_rows, host_stat
from gputop.trace.model import I64, Trace
from gputop.trace.threads import INPUT, lines_of

# tf.data starts a stage's function under an id, and executors run it under the same one, on threads of tf.data's own
# or on those that the model uses as well (tensorflow/core/data/captured_function.cc).
STARTS_FUNCTION = r"InstantiatedCapturedFunction::Run"
RUNS = r"ExecutorState::Process$"


def input_executors(trace: Trace) -> I64:
    """Rows of the executors' runs for functions of tf.data, on any thread."""
    started, runs = host_rows(trace, STARTS_FUNCTION), host_rows(trace, RUNS)
    having, ids = host_stat(trace.host, "id")
    started_ids = ids[np.isin(having, started)]
    keep = np.isin(having, runs) & np.isin(ids, started_ids[started_ids != 0])
    return np.asarray(having[keep], np.int64)


def of_input_pipeline(trace: Trace) -> Mask:
    """Mask of the host events that belong to the input pipeline: all on tf.data's threads, and on others what begins
    while their executor runs a function of tf.data."""
    host = trace.host
    out = lines_of(trace, INPUT).take(host.line) if len(host) else np.zeros(0, bool)
    runs = input_executors(trace)
    for line in np.unique(host.line[runs]).tolist():
        of_line = runs[host.line[runs] == line]  # one after the other, in order of time
        rows = np.flatnonzero(host.line == line)
        out[rows] |= contains(Spans(host.start_ns[of_line], host.end_ns[of_line]), host.start_ns[rows])
    return np.asarray(out, bool)
