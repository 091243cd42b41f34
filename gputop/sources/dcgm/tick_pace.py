"""The interval at which gputop asks: that of gputop's own watches, and the measure of what is old."""

from __future__ import annotations

from gputop.sources.dcgm.connection import MIN_WATCH_S


class TickPace:
    """``interval_s`` is the one set at first, and another one once three ticks in a row have kept to it."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._tick_s: float | None = None
        self._gaps_s: list[float] = []  # the last three

    def note(self, tick_s: float) -> bool:
        """Note a tick at ``tick_s`` (Unix time); returns False for the one that was noted last."""
        if tick_s == self._tick_s:
            return False
        if self._tick_s is not None:
            self._gaps_s = [*self._gaps_s[-2:], tick_s - self._tick_s]
            self._follow(self._gaps_s)
        self._tick_s = tick_s
        return True

    def _follow(self, gaps_s: list[float]) -> None:
        if len(gaps_s) == 3 and min(gaps_s) > 0 and max(gaps_s) < 1.3 * min(gaps_s):
            pace_s = max(MIN_WATCH_S, sum(gaps_s) / 3)
            if not 0.7 < pace_s / self.interval_s < 1.4:
                self.interval_s = round(pace_s, 1)
