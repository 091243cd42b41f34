"""The longest part of a trace in which nothing is missing."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gputop.trace.model import Trace


def longest_recording(trace: Trace) -> Trace:
    """The events of the longest recording only, where several were joined (``Trace.unrecorded_ns``)."""
    begin, end = trace.window_ns
    edges = [begin, *(edge for span in trace.unrecorded_ns for edge in span), end + 1]
    begin, end = max(zip(edges[::2], edges[1::2], strict=True), key=lambda span: span[1] - span[0])

    def within(times: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        return (times >= begin) & (times < end)

    host_rows = within(trace.host.start_ns)
    host = _taken(trace.host, host_rows)
    place = np.cumsum(host_rows) - 1
    host.stats = {name: (place[rows[host_rows[rows]]], values[host_rows[rows]])
                  for name, (rows, values) in trace.host.stats.items()}
    return replace(trace, device=_taken(trace.device, within(trace.device.start_ns)), host=host,
                   allocator=_taken(trace.allocator, within(trace.allocator.time_ns)), unrecorded_ns=())


def _taken(events: Any, keep: npt.NDArray[np.bool_]) -> Any:
    """The rows of ``keep``, in the columns that were read."""
    columns = {f.name: getattr(events, f.name) for f in fields(events) if f.name != "stats"}
    return type(events)(**{name: column[keep] if len(column) else column for name, column in columns.items()})
