"""Which instants of a trace lie within its training steps."""

from __future__ import annotations

import numpy as np

from gputop.analysis.steps.model import Steps
from gputop.trace.lookups import Mask
from gputop.trace.model import I64


def in_steps(sorted_ns: I64, steps: Steps) -> Mask:
    """Which of these instants, in order of time, lie within steps (which are disjoint)."""
    bounds = steps.edges_ns
    change = np.zeros(len(sorted_ns) + 1, np.int64)
    np.add.at(change, np.searchsorted(sorted_ns, bounds[:, 0]), 1)
    np.subtract.at(change, np.searchsorted(sorted_ns, bounds[:, 1]), 1)
    return np.cumsum(change[:-1]) > 0
