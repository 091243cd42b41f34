"""The step time that a probe shows, of whatever format it is."""

from __future__ import annotations

from pathlib import Path

from gputop.core.errors import GputopError

# A trace with more events is not read for its step time: it would hold the monitor up, and 150 MB.
_MAX_EVENTS = 600_000
_MAX_BYTES = 512 << 20  # an event of kineto's takes 300 to 800 bytes; what else a hostile file holds is not counted


def step_time(path: Path, events: int) -> tuple[float, bool] | None:
    """Median step time in a small trace (s), None where it holds no whole steps or is not small.

    And whether these are surely steps of training: what merely repeats, in kernels or ops, may be
    a part of a step that is longer than the trace, and those of an evaluation end with it.
    """
    if events > _MAX_EVENTS:
        return None
    from gputop.analysis.steps.phases import TRAINING, UNKNOWN
    from gputop.analysis.steps.steps import find_steps
    from gputop.trace.readers.load import load

    try:
        if path.stat().st_size > _MAX_BYTES:
            return None
        steps = find_steps(load([path]))
    except (GputopError, OSError):
        return None
    if steps is None:
        return None
    times = steps.times
    return times.median_s, times.confidence != "low" and times.phase in (TRAINING, UNKNOWN)
