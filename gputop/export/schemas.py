"""JSON Schemas of the documents that gputop prints, made of the types that write and read them.

What a command puts together by itself is typed here. ``tests/export/test_schemas.py`` holds each to real documents.
Keys may be added in later versions; those that are here stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import Struct

from gputop.advice.fleet.advise import FleetFinding
from gputop.analysis.results import Analysis
from gputop.cluster.model import Fleet
from gputop.core.findings import Abstained
from gputop.core.version import __version__
from gputop.diagnosis.rule_trials import Trial
from gputop.goodput.model import Report
from gputop.replay.snapshot_document import Document as Snapshot
from gputop.session.notifications import Kind
from gputop.timeline.model import IdleTotal

_Verdict = Literal["better", "worse", "changed", "noise", "cannot be told"]


class Gate(Struct):
    gate: str
    outcome: Literal["passed", "failed", "cannot be told"]
    why: str


class IdleGapHost(Struct):
    """What a host thread did in an idle gap; ``op`` is null where no event was recorded."""

    thread: str
    threads: int
    role: str
    op: str | None
    time_s: float


class IdleGapLine(Struct):
    line: str
    file: str
    inner: str | None
    time_s: float
    traced: bool


class IdleGapRow(Struct):
    """``start_s`` and ``end_s`` count from the start of the window, ``step`` from 0; ``cost_s`` is GPU time."""

    gpus: list[int]
    start_s: float
    end_s: float
    cost_s: float
    step: int | None
    part: str
    cause: str
    finding: str | None
    ended_by: str | None
    meanwhile: str | None
    host: list[IdleGapHost]
    python: list[IdleGapLine]


class AnalyzeDocument(Analysis, frozen=True, kw_only=True):
    """gputop analyze --json: ``bubbles`` and ``idle_gap_causes`` with --idle-gaps, ``gates`` with gates or budgets."""

    idle_gaps: list[IdleGapRow] | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="bubbles")
    idle_gap_causes: list[IdleTotal] | msgspec.UnsetType = msgspec.UNSET
    gates: list[Gate] | msgspec.UnsetType = msgspec.UNSET


class CaptureProbe(Struct):
    """The short capture that decided the length; ``bytes`` is the size of its answer."""

    seconds: float
    took_s: float
    bytes: int
    host_events_per_s: float
    device_events_per_s: float
    step_s: float | None
    growth_bytes: int | None


class CaptureCost(Struct):
    """What the capture cost the job: its memory, and the steps at the beginning and at the end of it."""

    call_s: float
    recorded_s: float
    memory_before_bytes: int | None
    memory_peak_bytes: int | None
    memory_after_bytes: int | None
    first_steps_s: float | msgspec.UnsetType | None = msgspec.UNSET
    last_steps_s: float | msgspec.UnsetType | None = msgspec.UNSET


class CaptureProblem(Struct):
    message: str
    fix: str


class CaptureWorker(Struct):
    """One of several workers; ``path`` is null where its capture failed, and ``error`` says why."""

    address: str
    path: str | None
    took_s: float | None
    began_s: float | None
    overview_s: float
    clock_offset_s: float | None
    clock_error_s: float | None
    cost: CaptureCost | None
    error: CaptureProblem | None


class CaptureFacts(Struct):
    """``asked_s`` is the most, ``chosen_s`` what was recorded in detail and ``why``, ``overview_s`` the overview after
    it; ``ended`` says what ended either early; ``unknown``: what could not be looked at."""

    address: str
    path: str
    time_s: float
    asked_s: float
    took_s: float
    notes: list[str]
    chosen_s: float | msgspec.UnsetType = msgspec.UNSET
    overview_s: float | msgspec.UnsetType = msgspec.UNSET
    why: str | msgspec.UnsetType = msgspec.UNSET
    ended: str | msgspec.UnsetType = msgspec.UNSET
    unknown: list[str] | msgspec.UnsetType = msgspec.UNSET
    probe: CaptureProbe | msgspec.UnsetType | None = msgspec.UNSET
    cost: CaptureCost | msgspec.UnsetType = msgspec.UNSET
    workers: list[CaptureWorker] | msgspec.UnsetType = msgspec.UNSET


class CaptureDocument(Analysis, frozen=True, kw_only=True):
    """gputop capture --json: the analysis, and how the capture was made."""

    capture: CaptureFacts


class AnalysesDocument(Struct):
    """gputop analyze --all --json: the analysis of each run by its name, or why it could not be read."""

    schema: Literal["gputop.analyses/1"]
    runs: dict[str, AnalyzeDocument]
    unread: dict[str, str]


class CompareSteps(Struct):
    count: int
    anchor: str
    median_s: float
    mean_s: float
    p95_s: float


class CompareSide(Struct):
    path: str
    kind: Literal["trace", "analysis", "snapshot"]
    again: list[str]
    simulated: bool
    gpus: int | None
    gpu_names: list[str]
    steps: CompareSteps | None


class CompareNote(Struct):
    id: str
    message: str


class CompareRow(Struct):
    """One figure, in base units; ``low`` and ``high`` bound its change."""

    group: str
    id: str
    gpu: int | None
    unit: str
    a: float | None
    b: float | None
    change: float | None
    change_ratio: float | None
    low: float | None
    high: float | None
    verdict: _Verdict
    reason: str | None
    per: Literal["step", "sample", "recording"]
    change_for_same_work: float | None


class CompareAdvice(Struct):
    """A finding of A or B, and what became of it."""

    id: str
    title: str
    status: Literal["gone", "weaker", "same", "stronger", "new", "not judged"]
    severity_a: str | None
    severity_b: str | None
    gpus: list[int]
    shown_saving: float | None = msgspec.field(name="promised")
    measured: float | None
    low: float | None
    high: float | None
    outcome: str | None
    reason: str | None
    per: str
    when: str | None
    together: list[float] | None
    fulfilled: str | None


class CompareDocument(Struct, kw_only=True):
    """gputop compare --json."""

    schema: Literal["gputop.compare/1"]
    gputop: str
    a: CompareSide
    b: CompareSide
    notes: list[CompareNote]
    verdict: _Verdict
    headline: str
    repeat: bool
    probably: Literal["faster", "slower"] | None
    captures_needed: int | None
    batch_factor: float | None
    work_ratio: float | None
    sample_time_change_ratio: float | None
    rows: list[CompareRow]
    advice: list[CompareAdvice]
    method: dict[str, Any]
    gates: list[Gate] | msgspec.UnsetType = msgspec.UNSET


class Check(Struct):
    id: str
    status: Literal["ok", "warn", "fail", "unknown"]
    title: str
    detail: str
    fix: str | None


class SavedBaseline(Struct):
    """``median_s`` is the step time, null where there are no steps or the file cannot be read."""

    name: str
    time_s: float
    readable: bool
    paths: list[str]
    median_s: float | None


class BaselinesDocument(Struct):
    """gputop compare --baselines --json."""

    schema: Literal["gputop.baselines/1"]
    baselines: list[SavedBaseline]


class DoctorDocument(Struct):
    """gputop doctor --json."""

    schema: Literal["gputop.doctor/1"]
    checks: list[Check]


class ListedRule(Struct):
    """``when``, ``hold_s``, ``severity`` and ``title`` are of a rule of the user's own."""

    id: str
    on: Literal["live", "trace", "fleet"]
    origin: str
    when: str | msgspec.UnsetType = msgspec.UNSET
    hold_s: float | msgspec.UnsetType = msgspec.UNSET
    severity: str | msgspec.UnsetType = msgspec.UNSET
    title: str | msgspec.UnsetType = msgspec.UNSET


class ListedLimit(Struct):
    id: str
    value: float
    unit: str
    default: float
    source: str
    yours: bool


class ListedBudget(Struct):
    id: str
    keep: str
    origin: str


class RulesDocument(Struct):
    """gputop rules list --json."""

    schema: Literal["gputop.rules/1"]
    rules: list[ListedRule]
    limits: list[ListedLimit]
    budgets: list[ListedBudget]


class TrialsDocument(Struct):
    """gputop rules test --json."""

    schema: Literal["gputop.rule-trials/1"]
    trials: list[Trial]


@dataclass(frozen=True, kw_only=True)
class ClusterDocument(Fleet):
    """gputop cluster --json."""

    schema: Literal["gputop.cluster/1"]
    version: str
    findings: tuple[FleetFinding, ...]
    abstained: tuple[Abstained, ...]


class StacksRank(Struct):
    rank: int
    host: str
    pid: int | None
    gpu: int | None
    trouble: str


class StacksAbsence(Struct):
    """A collective that some ranks have launched and others have not (gputop.ranks.hang)."""

    operation: str | None
    absent_at: int
    waiting_at: int
    absent: list[StacksRank]
    absent_count: int
    waiting: list[StacksRank]
    waiting_count: int
    silent: bool
    crossed: bool
    circle: bool


class StacksNccl(Struct):
    """``unchanged``: whether no rank launched anything between two answers; null where NCCL's format does not tell."""

    version: str | None
    apart_s: float | None
    unchanged: bool | None
    absence: StacksAbsence | None
    problem: str | None


class StacksCollective(Struct):
    """``elements`` of its input tensors. ``line``, as "train.py:112"; null: the dump has no frames."""

    number: int
    operation: str
    elements: int | None
    line: str | None


class StacksRankState(Struct):
    """Numbers of the newest collective that a rank launched (0: none), that started and that completed; null: the dump
    shows none. ``launched``: as the number in question; null: the dump does not hold it."""

    rank: int
    scheduled: int
    started: int | None
    completed: int | None
    last: StacksCollective | None
    launched: StacksCollective | None


class StacksProcessGroup(Struct):
    """A process group of PyTorch (gputop.ranks.desync). ``without_dump``: members; null: they are not known."""

    name: str
    description: str
    verdict: Literal["absent", "mismatch", "inactive", "inside", "idle", "unclear"]
    number: int
    operation: str | None
    apart: list[StacksRankState]
    others: list[StacksRankState]
    without_dump: list[int] | None


class StacksDumps(Struct):
    """What the flight recorder's dumps of a job say; the group that explains a hang comes first."""

    ranks: list[int]
    missing_ranks: list[int]
    problems: list[str]
    groups_not_compared: list[str]
    groups: list[StacksProcessGroup]


class StacksAnswers(StacksDumps):
    """What the debug servers of a job's ranks say, asked twice. ``moved``: ranks launched or ended collectives in
    between; then ``groups`` is empty."""

    moved: bool


class StacksGroup(Struct):
    place: str
    file: str | None
    line: int | None
    pids: list[int]


class StacksJob(Struct):
    command: str
    summary: str
    odd_pids: list[int]
    groups: list[StacksGroup]


class StacksFrame(Struct):
    function: str
    file: str
    line: int | None
    native: bool


class StacksThread(Struct):
    name: str
    main: bool
    active: bool
    frames: list[StacksFrame]


class StacksProcess(Struct):
    """``note``: why PyTorch's debug server shows the threads; null: py-spy does."""

    pid: int
    rank: str | None
    problem: str | None
    note: str | None
    threads: list[StacksThread]


class StacksDocument(Struct):
    """gputop stacks --json."""

    schema: Literal["gputop.stacks/1"]
    nccl: StacksNccl
    flight_recorder: list[StacksDumps]
    debug_server: list[StacksAnswers]
    jobs: list[StacksJob]
    processes: list[StacksProcess]


class NotificationDocument(Struct):
    """What a command or a webhook of --notify gets; ``text`` and ``content`` are its line, as chats show it."""

    schema: Literal["gputop.notification/1"]
    kind: Kind
    time_s: float
    host: str
    title: str
    details: str
    simulated: bool
    left_out: int
    text: str
    content: str


# By the command that prints them.
SCHEMAS: Mapping[str, type] = {
    "analyze": AnalyzeDocument, "analyze-all": AnalysesDocument, "baselines": BaselinesDocument,
    "capture": CaptureDocument, "cluster": ClusterDocument, "compare": CompareDocument, "doctor": DoctorDocument,
    "notification": NotificationDocument, "report": Report, "rules": RulesDocument, "rules-test": TrialsDocument,
    "snapshot": Snapshot, "stacks": StacksDocument,
}


def json_schema(name: str) -> dict[str, Any]:
    """The JSON Schema (2020-12) of a document; raises KeyError for a name that is not in :data:`SCHEMAS`."""
    schema = msgspec.json.schema(SCHEMAS[name])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"gputop {name}",
            "$comment": f"gputop {__version__}", **schema}
