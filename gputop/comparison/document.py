"""The document ``gputop.compare/1``: a comparison as it is printed and read by programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from gputop.comparison.advice import FollowedAdvice
from gputop.comparison.caveats import Note, gpu_count
from gputop.comparison.figures import ComparedRow, Group, Verdict
from gputop.comparison.sides import Kind, Side
from gputop.core.codec import document_of


class GateResult(Struct, frozen=True):
    """Outcome of one gate; ``why`` is a sentence."""

    gate: str
    outcome: Literal["passed", "failed", "cannot be told"]
    why: str


class CompareSteps(Struct, frozen=True):
    count: int
    anchor: str
    median_s: float
    mean_s: float
    p95_s: float


class CompareSide(Struct, frozen=True):
    """One side; ``again`` are the paths of further captures of its job."""

    path: str
    kind: Kind
    again: tuple[str, ...]
    simulated: bool
    gpus: int | None
    gpu_names: tuple[str, ...]
    steps: CompareSteps | None

    @classmethod
    def of(cls, side: Side) -> CompareSide:
        return document_of(
            cls, side, again=tuple(repeat.path for repeat in side.repeats), gpus=gpu_count(side),
            gpu_names=tuple(sorted(set(side.gpu_names))), steps=side.steps and document_of(CompareSteps, side.steps))


class CompareRow(Struct, frozen=True):
    """One figure, in base units; ``low`` and ``high`` bound its change."""

    group: Group
    id: str
    gpu: int | None
    unit: str
    a: float | None
    b: float | None
    change: float | None
    change_ratio: float | None
    low: float | None
    high: float | None
    verdict: Verdict
    reason: str | None
    per: Literal["step", "sample"]
    change_for_same_work: float | None

    @classmethod
    def of(cls, row: ComparedRow) -> CompareRow:
        change = None if row.a is None or row.b is None else row.b - row.a
        return document_of(
            cls, row, change=change, change_ratio=change / row.a if change is not None and row.a else None,
            per="step" if row.work == 1.0 else "sample", change_for_same_work=row.change)


class CompareMethod(Struct, frozen=True):
    """Method of the comparison, in words and figures; ``drift_ratio``: by which standard deviation runs of each job
    differ."""

    text: str
    confidence: float
    step_confidence: float
    min_effect_ratio: float
    min_steps: int
    drift_ratio: Mapping[str, float]


class CompareDocument(Struct, frozen=True, kw_only=True, tag_field="schema", tag="gputop.compare/1"):
    gputop: str
    a: CompareSide
    b: CompareSide
    notes: tuple[Note, ...]
    verdict: Verdict
    headline: str
    repeat: bool
    probably: Literal["faster", "slower"] | None
    captures_needed: int | None
    batch_factor: float | None
    work_ratio: float | None
    sample_time_change_ratio: float | None
    rows: tuple[CompareRow, ...]
    advice: tuple[FollowedAdvice, ...]
    method: CompareMethod
    gates: tuple[GateResult, ...] | UnsetType = UNSET
