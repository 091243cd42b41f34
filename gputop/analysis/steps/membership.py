"""Membership in training steps: of instants of a trace, and of the GPUs' work."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from gputop.analysis.steps.model import Steps
from gputop.trace.lookups import Mask
from gputop.trace.model import I64, Kind, Trace


def in_steps(sorted_ns: I64, steps: Steps) -> Mask:
    """Mask of these instants, in order of time, that lie within steps (which are disjoint)."""
    inside = np.zeros(len(sorted_ns), bool)
    for first, last in np.searchsorted(sorted_ns, steps.edges_ns).tolist():
        inside[first:last] = True
    return inside


def step_of(time_ns: I64, steps: Steps) -> I64:
    """The step in which each of these instants, in any order, lies; -1: in none."""
    begin, end = steps.edges_ns.T
    step = np.searchsorted(begin, time_ns, side="right") - 1
    step[time_ns >= np.append(end, 0)[step]] = -1
    return step


class WorkOfSteps(Struct, frozen=True):
    """Mask of the device events that belong to whole steps, and the number of those steps."""

    inside: Mask
    count: int


def work_of_steps(trace: Trace, steps: Steps) -> WorkOfSteps:
    """Work of steps by its launches where the steps rest on calls or markers of the host, which may be steps ahead of
    its GPUs; else, and where the launch is not known, by their starts. The last steps are left out where they launched
    less than the others: the trace ended before the GPUs did that work."""
    device, count = trace.device, steps.count
    by_launch = bool(steps.call_ends_ns)
    time_ns = np.where(device.launch_ns >= 0, device.launch_ns, device.start_ns) if by_launch else device.start_ns
    step = step_of(time_ns, steps)
    inside = step >= 0
    if by_launch:
        kernels = np.bincount(step[inside & (device.kind <= Kind.COLLECTIVE)], minlength=count)
        while count > 2 and kernels[count - 1] < np.median(kernels[:count - 1]):
            count -= 1
    return WorkOfSteps(inside & (step < count), count)
