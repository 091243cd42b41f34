"""A finding of idle time that recurs, as auto-capture waits for it."""

from __future__ import annotations

from gputop.core.findings import Finding, Gain


def returning(next_in_s: float | None = 40.0, gpus: tuple[int, ...] = tuple(range(8))) -> Finding:
    evidence = {"window_s": 600.0, "idle_s": 4.0}
    if next_in_s is not None:
        evidence |= {"idle_period_s": 62.0, "idle_period_spread_s": 1.0, "next_idle_in_s": next_in_s}
    return Finding(id="recurring_idle", severity="medium", title="idle again", why="", evidence=evidence, action="",
                   gain=Gain(None, ""), gpus=gpus, source="", origin="live")
