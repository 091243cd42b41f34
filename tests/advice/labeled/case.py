"""A labeled case: a job, and the findings that its trace must, may and must not lead to.

The label follows from how the job is built and from simulating it without its faults; it knows no rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property

from gputop.simulation.timeline import MS, JobTimeline
from tests.advice.labeled.jobs import LabeledJob
from tests.advice.labeled.recorder import write_xspace
from tests.advice.labeled.timelines import lead_steps, simulate
from tests.advice.labeled.truth import capture_window

_ORIGIN_UNIX_NS = 1_790_000_000_000_000_000
HIGH, MEDIUM, LOW = "high", "medium", "low"
Window = tuple[str | None, str]  # least and greatest severity; least None: it may be absent
# Any job has a little of some faults; where fixing one would save this share of the step, it may be found too.
_WORTH_NAMING = 0.03
FUSED = 3.2  # XLA's fusions take a third of the time of the element-wise ops that they replace


def mean_call_ms(timeline: JobTimeline) -> float:
    """Mean time from one call of the step function to the next, without the warm-up and the last step."""
    starts = [s.start for s in timeline.steps if s.first]
    begin = lead_steps(timeline.job) or min(2 if len(starts) > 6 else 1, len(starts) - 2)
    return (starts[-1] - starts[begin]) / (len(starts) - 1 - begin) / MS


@cache
def call_ms(job: LabeledJob) -> float:
    """The same of a job."""
    return mean_call_ms(simulate(job))


@dataclass(frozen=True)
class Case:
    """A job and its label.

    ``fixed``: for each injected id the same job without that fault; the difference is what the fault costs.
    ``partly_fixed``: for some ids a weaker fix (the work spread over all GPUs instead of gone), where the
    estimated saving may be that of either.
    ``windows``: severities, where they do not follow from the cost. ``main``: the ids that may come first,
    empty where nothing is wrong. ``abstain``: rules whose inputs the trace lacks.
    """

    name: str
    kind: str  # fault, pair, healthy, missing
    job: LabeledJob
    fixed: Mapping[str, LabeledJob] = field(default_factory=dict)
    partly_fixed: Mapping[str, LabeledJob] = field(default_factory=dict)
    windows: Mapping[str, Window] = field(default_factory=dict)
    main: tuple[str, ...] = ()
    consequences: frozenset[str] = frozenset()
    must_not: frozenset[str] = frozenset()
    abstain: frozenset[str] = frozenset()
    params: int | None = None

    @cached_property
    def timeline(self) -> JobTimeline:
        return simulate(self.job)

    def bytes(self) -> bytes:
        return write_xspace(
            self.timeline, *capture_window(self.timeline), origin_unix_ns=_ORIGIN_UNIX_NS, hostname="trainer-0")

    @cached_property
    def shares(self) -> dict[str, float]:
        """Share of the step that each injected fault costs, by simulating the job without it."""
        step = mean_call_ms(self.timeline)
        return {id_: 1 - call_ms(job) / step for id_, job in self.fixed.items()}

    @cached_property
    def must(self) -> dict[str, Window]:
        step = mean_call_ms(self.timeline)
        least = {id_: 1 - call_ms(job) / step for id_, job in self.partly_fixed.items()}
        out = {id_: severity_window(share, least.get(id_)) for id_, share in self.shares.items()
               if id_ not in self.windows}
        return {**out, **self.windows}

    def allows(self, id_: str) -> bool:
        """Return whether this may be found, too: it follows from a fault, or costs enough to be named."""
        return id_ not in self.must_not and (id_ in self.consequences or self.ambient_share(id_) >= _WORTH_NAMING)

    def ambient_share(self, id_: str) -> float:
        """Share of the step that a fault costs of which any job has a little; 0 for other faults."""
        without = ambient_fixes(self.job).get(id_)
        return 0.0 if without is None else 1 - call_ms(without) / mean_call_ms(self.timeline)


def severity_window(share: float, least_share: float | None = None) -> Window:
    """The severities that follow from a figure within a third of the truth, or of a truth between two shares."""
    least, most = _severity((share if least_share is None else least_share) * 0.75), _severity(share * 1.35)
    return (None if least == LOW else least), most


def _severity(share: float) -> str:
    return HIGH if share >= 0.15 else MEDIUM if share >= 0.05 else LOW


def ambient_fixes(job: LabeledJob) -> dict[str, LabeledJob]:
    """The job without each of the faults of which any job has a little."""
    out = {
        "input_bound": job.replace(produce_ms=0.05, prefetch=max(job.prefetch, 2)),
        "launch_bound": job.replace(launch_us=1.0, stall_share=0.0), "step_gap_host": job.replace(gap_ms=0.01)}
    if job.gpus > 1 and job.comm_ms:
        out["communication_exposed"] = job.replace(comm_ms=0.01, comm_latency_us=1.0, comm_count=1)
    if job.batch_mb:
        out["copies_excessive"] = job.replace(batch_mb=0.01)
    if job.run_ahead == 0 and not job.cpu_only:  # without fetching each step's result the queue would bridge gaps
        out["sync_copies"] = job.replace(run_ahead=1)
    if not (job.xla or job.jax or job.cpu_only):
        left = 1 - job.elementwise * (1 - 1 / FUSED)
        out["xla_off"] = job.replace(compute_ms=job.compute_ms * left, elementwise=job.elementwise / FUSED / left)
    return out
