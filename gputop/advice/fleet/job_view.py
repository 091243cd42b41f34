"""What the rules about a fleet see of a job, and what they hand back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gputop.advice.verdict import Explanation, Verdict
from gputop.cluster.model import History, Job
from gputop.text.units import seconds

HOUR_S = 3600.0


@dataclass(slots=True)
class JobView:
    """A job at ``now_s`` (Unix time). ``explained``: nodes that a finding has named."""

    job: Job
    now_s: float
    explained: set[str] = field(default_factory=set)

    @property
    def age_s(self) -> float | None:
        return None if self.job.start_s is None else self.now_s - self.job.start_s

    def past(self, history: History | None) -> list[tuple[float, float]]:
        """(end of a slice in Unix time, its value), oldest first."""
        return [] if history is None else [(history.time_s(i), value) for i, value in enumerate(history.values)
                                           if value is not None]

    def lasts_s(self, past: list[tuple[float, float]], holds: Callable[[float, float], bool]) -> tuple[float, bool]:
        """How long ``holds(time, value)`` has been true up to now; and whether its beginning was seen.

        0 s where it does not hold in the newest slice, or nothing is known.
        """
        begin_s, seen = self.now_s, False
        for i in range(len(past) - 1, -1, -1):
            if not holds(*past[i]):
                seen = True
                break
            begin_s = past[i - 1][0] if i else past[i][0]
        if not past or begin_s >= self.now_s:
            return 0.0, False
        starts_with_job = self.job.start_s is not None and begin_s - self.job.start_s < 2 * _step_s(past)
        return self.now_s - begin_s, seen or starts_with_job


def _step_s(past: list[tuple[float, float]]) -> float:
    return past[-1][0] - past[-2][0] if len(past) > 1 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetVerdict(Verdict):
    """``lasts_s`` None: not known; ``since_exact`` False: at least so long."""

    job: str
    count: int  # GPUs of the job
    nodes: tuple[str, ...] = ()  # that it explains wholly
    places: tuple[str, ...] = ()
    lasts_s: float | None = None
    since_exact: bool = True
    gpu_hours_lost: float | None = None


@dataclass(frozen=True, slots=True)
class FleetWords(Explanation):
    label: str = ""


def lasting(verdict: FleetVerdict) -> str:
    """For a sentence: "for 43 min", "for more than 3.0 h", "" where it is not known."""
    if not verdict.lasts_s:
        return ""
    return f" for {'' if verdict.since_exact else 'more than '}{seconds(verdict.lasts_s)}"


def evidence(verdict: FleetVerdict, more: Mapping[str, float]) -> dict[str, float]:
    known = {"lasts_s": verdict.lasts_s, "gpu_hours_lost": verdict.gpu_hours_lost}
    return {**{name: float(value) for name, value in more.items()},
            **{name: value for name, value in known.items() if value is not None}}


NO_STEP = "the figures of a cluster show no steps: the GPU hours lost are in the evidence"
