"""Decision when to capture a job that was started again: once it trains, not while it sets itself up. Pure."""

from __future__ import annotations

_BUSY_S = 10.0  # of GPUs at work, after which tracing, compilation and autotuning are mostly over
_LATEST_S = 60.0  # after the server answered: without a GPU, or of one at little work
BUSY = 0.05  # least activity of a GPU at work


class AfterRestart:
    """The wait for a job that was started again, from one sample to the next. Times are Unix seconds."""

    def __init__(self) -> None:
        self._answered_s: float | None = None
        self._busy_s: float | None = None

    def is_due(self, now_s: float, *, answers: bool, activity: float | None) -> bool:
        """Return whether to capture now. ``answers``: its profiler server does; ``activity``: the highest of the GPUs
        that the job holds, None without one."""
        if not answers:
            self._answered_s = self._busy_s = None
            return False
        if self._answered_s is None:
            self._answered_s = now_s
        if activity is None or activity < BUSY:
            self._busy_s = None
        elif self._busy_s is None:
            self._busy_s = now_s
        busy = self._busy_s is not None and now_s - self._busy_s >= _BUSY_S
        return busy or now_s - self._answered_s >= _LATEST_S
