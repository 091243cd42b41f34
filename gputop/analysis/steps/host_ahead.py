"""The steps by their kernels, where the host runs ahead of the GPU: its calls then show no step time.

0. The last steps are left out where the recording ended before the GPU began them, or did all that it does in others:
   a host that had been held up fills the queue of launches at once, which may hold seconds of work. (PyTorch, H200:
   17 steps of 84.8 ms launched in 2.5 ms each.)
1. A step runs from the begin of the first kernel launched in it to that of the first kernel launched after it; the last
   one ends with its own last kernel, if no other begins before.
2. The host is ahead where these steps together take ``_AHEAD_FACTOR`` times as long as the host's calls for them. The
   smaller factor does where the kernels of every step begin a step late or more: then the GPU never waits for the host.
3. Steps by kernels that are uneven are none: other threads launch the kernels of a step after its call.
"""

from __future__ import annotations

import numpy as np

from gputop.analysis.steps.whole_steps import alike
from gputop.trace.lookups import rows_of
from gputop.trace.model import I64, Kind, Trace

# gputop's own figures; a queue that is merely deep keeps the same pace.
_FEWEST = 2  # of several steps that the GPU must have done
_AHEAD_FACTOR, _BEHIND_A_STEP_FACTOR = 1.5, 1.05


def steps_on_gpu(trace: Trace, bounds_ns: I64) -> I64 | None:
    """Begin and end of these steps on the GPUs, both of shape (steps, 2); None where the host is not ahead of them."""
    done = _steps_done(trace, bounds_ns)
    on_gpu = _bounds_of_kernels(trace, bounds_ns[:done]) if done >= min(_FEWEST, len(bounds_ns)) else None
    if on_gpu is None:
        return None
    bounds_ns = bounds_ns[:done]
    late = (on_gpu[:, 0] - bounds_ns[:, 0] >= bounds_ns[:, 1] - bounds_ns[:, 0]).all()
    factor = _BEHIND_A_STEP_FACTOR if late else _AHEAD_FACTOR
    ahead = on_gpu[-1, 1] - on_gpu[0, 0] >= factor * (bounds_ns[-1, 1] - bounds_ns[0, 0])
    length = on_gpu[:, 1] - on_gpu[:, 0]
    return on_gpu if ahead and (length > 0).all() and alike(length, float(np.median(length))).all() else None


def _steps_done(trace: Trace, bounds_ns: I64) -> int:
    """The number of steps but those at the end that the GPU did not do (0)."""
    device = trace.device
    launch = device.launch_ns[(device.launch_ns >= 0) & (device.kind <= Kind.COLLECTIVE)]
    if ((launch >= bounds_ns[-1, 0]) & (launch < bounds_ns[-1, 1])).any():
        return len(bounds_ns)
    launch.sort()
    kernels = np.diff(np.searchsorted(launch, bounds_ns), axis=1)[:, 0]
    if not kernels.any():
        return len(kernels)
    count = int(np.flatnonzero(kernels)[-1]) + 1
    return count - 1 if kernels[count - 1] < np.median(kernels[:count]) else count


def _bounds_of_kernels(trace: Trace, bounds_ns: I64) -> I64 | None:
    """The steps by their kernels (1); None where no kernel is launched after the first step begins."""
    device = trace.device
    rows = rows_of((device.launch_ns >= bounds_ns[0, 0]) & (device.kind <= Kind.COLLECTIVE))
    launch, start, end = device.launch_ns[rows], device.start_ns[rows], device.end_ns[rows]
    if not len(launch):
        return None
    # In the order of their starts the first launched at an instant or later is the first to exceed all before it.
    first = np.searchsorted(np.maximum.accumulate(launch), bounds_ns)
    on_gpu = np.append(start, end.max())[first]
    # What is launched after the last step may come much later.
    ends_of_steps = end[launch < bounds_ns[-1, 1]]
    on_gpu[-1, 1] = min(on_gpu[-1, 1], ends_of_steps.max()) if len(ends_of_steps) else on_gpu[-1, 0]
    return on_gpu
