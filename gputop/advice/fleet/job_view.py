"""The view of a job that the rules about a fleet judge, and the verdicts that they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

from msgspec import Struct, field

from gputop.advice.verdict import Explanation, Missing, Verdict, known
from gputop.cluster.model import History, Job
from gputop.text.units import seconds

HOUR_S = 3600.0
_GAP_STEPS, _GAP_S = 3, 300.0  # slices of the history without a measurement are bridged up to the longer of these


class JobView(Struct):
    """A job at ``now_s`` (Unix time). ``explained``: nodes and GPUs that a finding has named."""

    job: Job
    now_s: float
    explained: set[str] = field(default_factory=set)

    @property
    def age_s(self) -> float | None:
        """Lower bound of the job's age: by Slurm, else by its history. None: neither is known."""
        if self.job.start_s is not None:
            return self.now_s - self.job.start_s
        past, history = self.past(self.job.history), self.job.history
        return self.now_s - (past[0][0] - history.step_s) if past and history is not None else None

    def is_younger(self, seconds: float) -> bool:
        """Return whether the job is known to be younger: what its GPUs did before was another's, or its start."""
        return self.job.start_s is not None and self.now_s - self.job.start_s < seconds

    def past(self, history: History | None) -> list[tuple[float, float]]:
        """(end of a slice in Unix time, its value), oldest first."""
        return [] if history is None else [(history.time_s(i), value) for i, value in enumerate(history.values)
                                           if value is not None]

    def lasts_s(self, past: list[tuple[float, float]], holds: Callable[[float, float], bool]) -> tuple[float, bool]:
        """Seconds for which ``holds(time, value)`` has been true up to now, and whether its beginning was seen.

        0 s where it does not hold in the newest slice, or nothing is known; nothing is said of a time without
        measurements.
        """
        begin_s, seen = self.now_s, False
        step_s = min((b - a for (a, _), (b, _) in pairwise(past)), default=0.0)
        for i in range(len(past) - 1, -1, -1):
            if not holds(*past[i]):
                seen = True
                break
            begin_s = past[i - 1][0] if i else past[i][0]
            if i and past[i][0] - begin_s > max(_GAP_STEPS * step_s, _GAP_S):
                begin_s = past[i][0] - step_s
                break  # nothing was measured before
        if not past or begin_s >= self.now_s:
            return 0.0, False
        starts_with_job = self.job.start_s is not None and begin_s - self.job.start_s < 2 * step_s
        return self.now_s - begin_s, seen or starts_with_job


class FleetVerdict(Verdict, frozen=True, kw_only=True):
    """``lasts_s`` None: not known; ``since_exact`` False: at least so long. ``lost``: the work of so many GPUs."""

    gpus: tuple[int, ...] = ()
    job: str
    count: int  # GPUs of the job
    nodes: tuple[str, ...] = ()  # that it explains wholly
    places: tuple[str, ...] = ()
    lasts_s: float | None
    since_exact: bool = True
    lost: float

    @property
    def gpu_hours_lost(self) -> float | None:
        return None if self.lasts_s is None else self.lost * self.lasts_s / HOUR_S


class FleetWords(Explanation, frozen=True):
    gain: str = "unknown, because cluster metrics contain no step boundaries; the evidence includes the lost GPU hours"
    label: str = ""


def lasting(verdict: FleetVerdict) -> str:
    """Duration for a sentence: "for 43 min", "for more than 3.0 h", "" where it is not known."""
    if not verdict.lasts_s:
        return ""
    return f" for {'' if verdict.since_exact else 'more than '}{seconds(verdict.lasts_s)}"


def evidence(verdict: FleetVerdict, more: Mapping[str, float | None]) -> dict[str, float]:
    return known({**more, "lasts_s": verdict.lasts_s, "gpu_hours_lost": verdict.gpu_hours_lost})


NO_PAST = Missing("data on the job's activity in the previous hours")
