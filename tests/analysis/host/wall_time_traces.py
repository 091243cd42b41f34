"""Traces whose seconds are accounted for."""

from __future__ import annotations

import numpy as np

from gputop.trace.model import Trace
from tests.records import replace
from tests.trace.build import Builder


def overview_of(job: Builder, by_s: float, **columns: object) -> Trace:
    """A job's trace as an overview ``by_s`` seconds later: its host's events without ops."""
    trace = job.build()
    by_ns = round(by_s * 1e9)
    host = trace.host
    ops = np.array([":" in name for name in trace.names], bool)[host.name]
    keep = ~ops
    host = type(host)(host.line[keep], host.name[keep], host.start_ns[keep] + by_ns, host.end_ns[keep] + by_ns,
                      host.stats_of(keep))
    end = trace.window_ns[1] + by_ns
    return replace(trace, host=host, rank_windows_ns={0: (by_ns, end)}, profile_window_ns=(by_ns, end), **columns)


def two_grains(detail: Builder, overview: Builder, by_s: float) -> Trace:
    trace = detail.build()
    end = trace.window_ns[1]
    return replace(trace, rank_windows_ns={0: (0, end)}, profile_window_ns=(0, end),
                   overviews={0: overview_of(overview, by_s)})
