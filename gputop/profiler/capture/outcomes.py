"""Outcome of a capture of several workers."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from gputop.core.errors import GputopError
from gputop.profiler.capture.job_memory import Cost
from gputop.profiler.capture.plan import Plan
from gputop.profiler.recording import CaptureResult
from gputop.text.units import seconds as duration
from gputop.trace.readers.clock_file import HostClock


class Outcome(Struct, frozen=True):
    """The outcome for one worker: ``result`` or ``error``. ``began_s`` is Unix time by gputop's clock, ``overview_s``
    the length of its overview."""

    address: str
    name: str  # of its trace in the run folder, without the ending
    result: CaptureResult | None = None
    plan: Plan | None = None
    cost: Cost | None = None
    error: GputopError | None = None
    clock: HostClock | None = None
    began_s: float | None = None
    overview_s: float = 0.0


class MultiWorkerCapture(Struct, frozen=True):
    """A capture of several workers: the run folder, what was recorded and why, and what came of each."""

    run_dir: Path
    plan: Plan
    outcomes: tuple[Outcome, ...]

    @property
    def captured(self) -> tuple[Outcome, ...]:
        return tuple(o for o in self.outcomes if o.result is not None)

    @property
    def start_spread_s(self) -> float | None:
        """Return how far apart the recordings began, as far as that can be told; None with fewer than two."""
        began = [o.began_s for o in self.captured if o.began_s is not None]
        return max(began) - min(began) if len(began) > 1 else None

    def notes(self) -> tuple[str, ...]:
        """Return what a person should know of it besides plan and cost."""
        lines = [f"not captured: {o.address}: {o.error.message}" for o in self.outcomes if o.error is not None]
        if self.start_spread_s is not None:
            errors = [o.clock.error_ns / 1e9 for o in self.captured if o.clock is not None]
            lines.append(f"{len(self.captured)} workers started within {duration(self.start_spread_s)} of each other"
                         + (f", clocks known to within {duration(max(errors))}" if any(errors) else ""))
        longest = max(self.captured, key=lambda o: o.overview_s, default=None)
        if longest is not None and longest.overview_s > self.plan.overview_s:
            lines.append(f"gputop watched for rare events for {self.plan.overview_s:g} to {longest.overview_s:g} s, "
                         "depending on the worker")
        lines += [f"the clock of {o.address} differs by {o.clock.offset_ns / 1e9:+.3f} s; gputop corrected for this"
                  for o in self.captured if o.clock is not None and o.clock.offset_ns]
        return tuple(lines)
