"""Asks the rules about each job of a fleet, causes before their symptoms; the report of all jobs or one. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from gputop.advice.fleet.job_view import FleetVerdict, FleetWords, JobView
from gputop.advice.fleet_rules import FLEET_RULES
from gputop.advice.registry import limit
from gputop.advice.verdict import Missing, finding
from gputop.cluster.model import Fleet, FleetLimits, Job
from gputop.core.codec import document_of
from gputop.core.errors import NoDataError
from gputop.core.findings import Abstained, Finding, ranked

_NOT_ITS_OWN = ("the GPUs of the job: other jobs hold GPUs on the same nodes, and only a job label on the metrics "
                "shows which job holds which GPU (dcgm-exporter --hpc-job-mapping-dir, or gputop export on the nodes)")
# What a user runs by one program may be several jobs: their GPUs need not do the same.
_NOT_ONE_JOB = ("GPUs that clearly belong to one job: Slurm does not name a job here, and several jobs can have the "
                "same user and program")
_NO_PAST = "samples from 15 minutes ago, which this Prometheus does not have"
_COMPARE_PEERS = ("slow_node", "straggler_gpu", "low_clock_gpu")


class FleetFinding(Finding, frozen=True, kw_only=True):
    """A finding about a job. ``places`` are its nodes and GPUs ("n07", "n07:3") that it names.

    ``since_s``: Unix time, None where that is not known; ``since_exact`` False: it may have begun before the history.
    """

    job: str
    label: str  # in a cell of a table: "held, idle 43 min"
    places: tuple[str, ...] = ()
    since_s: float | None = None
    since_exact: bool = True
    gpu_hours_lost: float | None = None


def asked_limits() -> FleetLimits:
    """Limits that a Prometheus has to be asked for, so that the rules can judge."""
    return FleetLimits(limit("held_idle.activity"), limit("held_idle.window_s"), limit("straggler_gpu.below"),
                       limit("low_clock_gpu.busy"), limit("low_clock_gpu.clock"))


def fleet_advice(fleet: Fleet) -> tuple[tuple[FleetFinding, ...], tuple[Abstained, ...]]:
    """The findings, those that lost most GPU hours first among equals; and what could not be judged, and why."""
    findings: list[FleetFinding] = []
    missing: Counter[tuple[str, str]] = Counter()
    if fleet.jobs and not fleet.has_past:
        missing.update((id_, _NO_PAST) for id_ in ("held_idle", "partly_used_job"))
    for job in fleet.jobs:
        for outcome in _of_job(job, fleet):
            if isinstance(outcome, Abstained):
                missing[outcome.id, outcome.missing] += 1
            else:
                findings.append(outcome)
    order = {id(f): i for i, f in enumerate(ranked(findings))}
    severity = {"high": 0, "medium": 1, "low": 2}
    findings.sort(key=lambda f: (severity[f.severity], -(f.gpu_hours_lost or 0.0), order[id(f)]))
    return tuple(findings), tuple(Abstained(id_, f"{what} ({count} jobs)" if count > 1 else what)
                                  for (id_, what), count in sorted(missing.items()))


def _of_job(job: Job, fleet: Fleet) -> Iterator[FleetFinding | Abstained]:
    if job.mapped == "shared node":
        yield from (Abstained(rule.id, _NOT_ITS_OWN) for rule in FLEET_RULES)
        return
    view = JobView(job, fleet.figures_s if fleet.figures_s is not None else fleet.time_s)
    seen: set[str] = set()
    for rule in FLEET_RULES:
        if "held_idle" in rule.yields_to and "held_idle" in seen:
            continue
        if job.mapped == "process" and rule.id in _COMPARE_PEERS:
            yield Abstained(rule.id, _NOT_ONE_JOB)
            continue
        verdict = rule.function("judge")(view)
        if isinstance(verdict, Missing):
            yield Abstained(rule.id, verdict.what)
        elif isinstance(verdict, FleetVerdict):
            words: FleetWords = rule.function("describe")(verdict)
            seen.add(rule.id)
            view.explained |= {*verdict.nodes, *verdict.places}
            yield document_of(
                FleetFinding, finding(rule, verdict, words), job=job.id, label=words.label, places=verdict.places,
                since_s=None if verdict.lasts_s is None else view.now_s - verdict.lasts_s,
                since_exact=verdict.since_exact, gpu_hours_lost=verdict.gpu_hours_lost)


class FleetReport(Struct, frozen=True):
    """A fleet, and what the rules say of it."""

    fleet: Fleet
    findings: tuple[FleetFinding, ...]
    abstained: tuple[Abstained, ...]

    def of_job(self, job: str) -> list[FleetFinding]:
        return [finding for finding in self.findings if finding.job == job]


class ClusterDocument(Fleet, frozen=True, kw_only=True, tag_field="schema", tag="gputop.cluster/1"):
    version: str
    findings: tuple[FleetFinding, ...]
    abstained: tuple[Abstained, ...]


def report_of(fleet: Fleet, job: str) -> FleetReport:
    """Report of all jobs, or of the one that is named. Raises NoDataError where no such job is known."""
    if job:
        jobs = tuple(each for each in fleet.jobs if each.is_named(job))
        if not jobs:
            raise NoDataError(f"no job {job} has GPU metrics",
                              "gputop cluster --job all shows them.")
        fleet = replace(fleet, jobs=jobs, free=None, free_nodes=(), gpus=sum(each.gpus for each in jobs))
    return FleetReport(fleet, *fleet_advice(fleet))
