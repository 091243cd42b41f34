"""How full the frameworks' own allocators were. TensorFlow and JAX reserve nearly all of a
GPU's memory, so that only this tells what is really in use."""

from __future__ import annotations

import numpy as np

from gputop.trace.model import Trace
from gputop.trace.results import AllocatorUse


def memory(trace: Trace) -> list[AllocatorUse]:
    """Peak and capacity by allocator, by name. Those whose records tell no sizes are left out.

    The peak is of the allocator's lifetime where recorded; capacity is in use plus available.
    """
    events = trace.allocator
    out = []
    for allocator in np.unique(events.allocator[events.allocator >= 0]):
        own = (events.allocator == allocator) & (events.in_use_bytes >= 0)
        sized = own & (events.available_bytes >= 0)
        if not sized.any():
            continue
        in_window = int(events.in_use_bytes[own].max())
        out.append(AllocatorUse(
            trace.names[allocator],
            peak_bytes=max(in_window, int(events.peak_bytes[own].max())),
            capacity_bytes=int((events.in_use_bytes[sized] + events.available_bytes[sized]).max()),
            peak_in_window_bytes=in_window,
        ))
    return sorted(out, key=lambda use: use.allocator)
