"""The report of a fleet: all of it or one job, and what the rules say. Pure."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from gputop.advice.fleet.advise import FleetFinding, fleet_advice
from gputop.cluster.model import Fleet
from gputop.core.errors import NoDataError
from gputop.core.findings import Abstained


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
            raise NoDataError(f"there is no job {job} among the {len(fleet.jobs)} jobs that have GPU metrics",
                              "gputop cluster --job all shows them.")
        fleet = replace(fleet, jobs=jobs, free=None, free_nodes=(), gpus=sum(each.gpus for each in jobs))
    return FleetReport(fleet, *fleet_advice(fleet))
