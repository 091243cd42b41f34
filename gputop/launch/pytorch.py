"""Captures from running PyTorch jobs, prepared or not: the one call for all of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from gputop.core.errors import GputopError
from gputop.launch.kineto import UsedBefore, switch_on
from gputop.launch.kineto_thread import record_by_thread
from gputop.profiler.capture.plan import Plan
from gputop.profiler.client import Progress
from gputop.profiler.kineto.folder import sweep
from gputop.profiler.kineto.record import KinetoCapture, record


def capture(pids: Sequence[int], *, seconds: float, logdir: str | Path, force: bool = False, hold: bool = False,
            on_progress: Callable[[Progress], None] | None = None, on_plan: Callable[[Plan], None] | None = None,
            stop: threading.Event | None = None) -> KinetoCapture:
    """Record the ranks ``pids`` of a PyTorch job over the same seconds, as :func:`record` does, each switched on first
    where it is no client yet.

    ``hold``: a single process that has used torch.profiler itself may be held by it, see
    :mod:`gputop.launch.kineto_thread`; raises UsedBefore otherwise. What one process lacks is its own; raises
    GputopError where none can be recorded.
    """
    stop = stop or threading.Event()
    sweep()
    found, errors = [], {}
    for pid in pids:
        try:
            found.append(switch_on(pid, stop))
        except GputopError as error:
            errors[pid] = error
    if not found:
        first = next(iter(errors.values()))
        if len(errors) == 1 and hold and isinstance(first, UsedBefore):
            return record_by_thread(pids[0], seconds=seconds, logdir=logdir, force=force, on_progress=on_progress,
                                    on_plan=on_plan, stop=stop)
        raise first
    captured = record(found, seconds=seconds, logdir=logdir, force=force, on_progress=on_progress, on_plan=on_plan,
                      stop=stop)
    return replace(captured, errors={**errors, **captured.errors})
