"""Records of what is known of a profiler server, of a capture under way and of a finished one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from gputop.core.errors import GputopError
from gputop.core.findings import Finding
from gputop.text.units import seconds, step_time

if TYPE_CHECKING:
    from gputop.analysis.gpu.packed_series import ComparedTrace
    from gputop.analysis.results import Analysis, StepTimes
    from gputop.profiler.capture.job_memory import Cost
    from gputop.profiler.capture.outcomes import Outcome
    from gputop.profiler.capture.plan import Plan

_LONG_S = 60.0  # of an overview that most checkpoints and evaluations are in
_FEW_STEPS = 5  # gputop.diagnosis.diagnose calls fewer a sample


class Server(Struct, frozen=True):
    """A profiler server a capture can go to, or one asked for that does not answer (``problem``)."""

    address: str
    description: str = ""
    pid: int | None = None
    problem: str | None = None
    asked: bool = False  # named by the user, not found
    owner: str = ""  # the user it belongs to where that is another one, who has to be asked about before a capture
    user: str = ""  # whoever it belongs to; "": not known
    started_s: float | None = None  # Unix time at which its process began; None: not known


def usable(servers: Iterable[Server]) -> tuple[Server, ...]:
    """The servers that a capture can go to: of those that the user named, or, without any, of those found."""
    servers = tuple(servers)
    named = tuple(s for s in servers if s.asked)
    return tuple(s for s in named or servers if s.problem is None)


class CaptureStatus(Struct, frozen=True):
    phase: Literal["starting", "waiting", "connecting", "probing", "recording", "overview", "receiving",
                   "saving", "analyzing", "done", "failed"]
    address: str
    asked_s: float
    elapsed_s: float = 0.0
    message: str = ""  # waiting: for what; done: what came of it; failed: the cause
    fix: str = ""
    time_s: float = 0.0  # Unix time it was reached
    chosen_s: float | None = None  # what is recorded in detail, once that is known
    why: str = ""  # and the reason for it
    overview_s: float = 0.0  # the overview that follows
    stoppable: bool = True  # a recording that has begun can be ended early

    @property
    def running(self) -> bool:
        return self.phase not in ("done", "failed")

    @property
    def begun(self) -> bool:
        """Return whether it is running and no longer waits for a moment at which it may begin."""
        return self.running and self.phase != "waiting"


class CaptureRecord(Struct, frozen=True):
    """A finished capture: its raw trace on disk and, where the analysis succeeded, what it says."""

    address: str
    path: Path
    time_s: float  # Unix time of its end
    asked_s: float
    took_s: float
    notes: tuple[str, ...] = ()  # errors and warnings of the profiler server
    analysis: Analysis | None = None
    report: str = ""  # the analysis as text
    limit: str = ""  # what bounds the job, should nothing be wrong with it
    problem: GputopError | None = None  # why there is no analysis
    plan: Plan | None = None
    cost: Cost | None = None  # of several workers, that of the one that was held longest
    workers: tuple[Outcome, ...] = ()  # where several were captured at once
    notices: tuple[str, ...] = ()  # what to know of it first: why gputop made it by itself, which worker is missing
    job: str = ""  # the job's command line, its secrets hidden; empty where only its address is known
    pid: int | None = None  # of the job's process, of several workers the first one's; None: not known
    started_s: float | None = None  # Unix time at which that process began; None: not known
    uncaptured: str = ""  # in a line: the other jobs and workers that were not captured
    compared: ComparedTrace | None = None  # what a comparison needs of the trace; None: it was not read for one
    saved_step_s: float | None = None  # the step time as gputop.capture.json tells it, until it is analyzed

    @property
    def findings(self) -> tuple[Finding, ...]:
        return self.analysis.findings if self.analysis is not None else ()

    @property
    def step_s(self) -> float | None:
        """Mean step time, where the trace has steps."""
        return self.steps.mean_s if self.steps is not None else self.saved_step_s

    @property
    def median_step_s(self) -> float | None:
        return self.steps.median_s if self.steps is not None else self.saved_step_s

    @property
    def step_text(self) -> str:
        """The mean step, and the median where it differs; "" where the trace has no steps."""
        return "" if self.step_s is None else step_time(self.step_s, self.median_step_s)

    @property
    def steps(self) -> StepTimes | None:
        return self.analysis.steps if self.analysis is not None else None

    @property
    def steps_slowed_s(self) -> tuple[float, float] | None:
        """Median of the first and of the last fifth of the steps in the trace; ten steps at least."""
        from statistics import median  # 4 ms of the first frame otherwise

        durations = self.steps.durations_s if self.steps is not None else ()
        fifth = len(durations) // 5
        return (median(durations[:fifth]), median(durations[-fifth:])) if fifth >= 2 else None

    @property
    def remarks(self) -> tuple[str, ...]:
        """Return what was done to the job and why, as a person reads it."""
        lines = list(self.notices)
        if self.plan is not None:
            plan = self.plan
            lines.append(f"{plan.chosen_s:g} s in detail: {plan.why}; then {plan.overview_s:g} s of rare events"
                         if plan.overview_s else f"{plan.chosen_s:g} s: {plan.why}")
            lines += [text for text in (plan.ended, *plan.notes) if text]
            count = self.steps.count if self.steps is not None else 0
            if self.plan.shortened and self.analysis is not None and count < _FEW_STEPS:
                lines.append(f"gputop found {count or 'no'} complete step{'s' if count != 1 else ''}; to capture "
                             f"longer: gputop capture --seconds {self.asked_s:g} --force")
            elif self.plan.overview_s:
                lines.append("less frequent events may be missing; to watch for longer: gputop capture --seconds "
                             f"{max(_LONG_S, 2 * self.asked_s):g}")
            elif self.plan.enough:
                lines.append("rare events, such as a checkpoint, may be missing; to capture longer: "
                             f"gputop capture --seconds {self.asked_s:g} --force")
        if self.cost is not None:
            lines.append(self.cost.text())
        slowed = self.steps_slowed_s
        if slowed is not None and slowed[1] > 1.1 * slowed[0]:
            lines.append(f"steps slowed down from {seconds(slowed[0])} to {seconds(slowed[1])} during the trace")
        return (*lines, self.uncaptured) if self.uncaptured else tuple(lines)
