"""Facts of how a capture was made, as documents have it: ``gputop capture --json`` and a snapshot.

A field with a default may be missing in an older document; one that is UNSET is not written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET, Struct, UnsetType, structs

from gputop.core.codec import document_of
from gputop.core.findings import Problem
from gputop.core.samples import UnixTime
from gputop.profiler.capture.job_memory import Cost

if TYPE_CHECKING:
    from gputop.profiler.capture.outcomes import Outcome
    from gputop.profiler.capture.records import CaptureRecord


class CaptureProbe(Struct, frozen=True):
    """The short capture that decided the length; ``bytes`` is the size of its answer."""

    seconds: float
    took_s: float
    bytes: int
    host_events_per_s: float
    device_events_per_s: float
    step_s: float | None
    growth_bytes: int | None = None


class CaptureWorker(Struct, frozen=True):
    """One of several workers; ``path`` is null if its capture failed, and ``error`` says why."""

    address: str
    path: str | None
    took_s: float | None
    began_s: float | None
    overview_s: float
    clock_offset_s: float | None
    clock_error_s: float | None
    cost: Cost | None
    error: Problem | None


class CaptureFacts(Struct, frozen=True, kw_only=True):
    """``asked_s`` is the most, ``chosen_s`` what was recorded in detail and ``why``, ``overview_s`` the overview after
    it; ``ended`` says what ended either early; ``unknown``: what could not be looked at."""

    address: str
    path: str
    time_s: UnixTime
    asked_s: float
    took_s: float
    notes: tuple[str, ...]
    chosen_s: float | UnsetType = UNSET
    overview_s: float | UnsetType = UNSET
    why: str | UnsetType = UNSET
    ended: str | UnsetType = UNSET
    unknown: tuple[str, ...] | UnsetType = UNSET
    probe: CaptureProbe | UnsetType | None = UNSET
    cost: Cost | UnsetType = UNSET
    workers: tuple[CaptureWorker, ...] | UnsetType = UNSET


def facts_of(record: CaptureRecord) -> CaptureFacts:
    plan, cost = record.plan, record.cost
    facts = CaptureFacts(
        address=record.address, path=str(record.path), time_s=record.time_s, asked_s=record.asked_s,
        took_s=record.took_s, notes=record.notes, workers=tuple(map(_worker, record.workers)) or UNSET)
    if plan is not None:
        facts = structs.replace(
            facts, asked_s=plan.asked_s, chosen_s=plan.chosen_s, overview_s=plan.overview_s, why=plan.why,
            ended=plan.ended, unknown=plan.notes, probe=plan.probe and document_of(CaptureProbe, plan.probe))
    if cost is None:
        return facts
    first_s, last_s = record.steps_slowed_s or (None, None)
    return structs.replace(facts, cost=structs.replace(cost, first_steps_s=first_s, last_steps_s=last_s))


def _worker(outcome: Outcome) -> CaptureWorker:
    result, clock, error = outcome.result, outcome.clock, outcome.error
    return document_of(
        CaptureWorker, outcome, path=result and str(result.path), took_s=result and result.took_s,
        clock_offset_s=clock and clock.offset_ns / 1e9, clock_error_s=clock and clock.error_ns / 1e9,
        error=error and Problem(error.message, error.fix))
