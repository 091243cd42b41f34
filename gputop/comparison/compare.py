"""Two captures, analyses or snapshots of a job: what changed, by how much, and for certain or not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from gputop.comparison import figures
from gputop.comparison.advice import FollowedAdvice, followed
from gputop.comparison.caveats import Note, batch_factor, gpu_count, notes, other_batch
from gputop.comparison.figures import ERROR, MIN_EFFECT, REPEAT, SMALL, STEP_ERROR, ComparedRow, Group, Verdict
from gputop.comparison.sides import Kind, Side
from gputop.comparison.statistics import BLOCKS, CPU_DRIFT, GPU_DRIFT, MIN_STEPS, THREADS_SPREAD_MOST, drift_of
from gputop.core.codec import document_of, to_document
from gputop.core.errors import NoDataError
from gputop.text.units import percent, seconds

_LEAST = 1e-9
MAX_REPEATS = 10  # captures of each job: nobody makes more
_SURE = ("better", "worse")
_LENGTH = {"better": "shorter", "worse": "longer"}
_MOVED = {"better": "; the work moved out of the steps", "worse": "; the work moved from between the steps into them"}
METHOD = (
    "gputop calls a change better or worse only under two conditions. First, its confidence interval excludes 0 "
    f"(Welch 1947, with {percent(1 - STEP_ERROR)} confidence for a step time and {percent(1 - ERROR)} for each table "
    f"as a whole). Second, it is at least {percent(MIN_EFFECT)} of the step, or a percentage point of a share. "
    "Everything else is noise, and so is a change that the live step period excludes. gputop compares times by the "
    "logarithm of their ratio, because disturbances multiply a job's time. The interval contains the variation over "
    f"time, measured in {BLOCKS} blocks of each capture. It also contains the variation between runs of an unchanged "
    f"job: a standard deviation of {percent(CPU_DRIFT)} on CPUs (measured) and of {percent(GPU_DRIFT)} with GPUs "
    "(assumed), or more if the live step period varied more. If the CPUs were full, it contains the change with and "
    "without the delay by other processes, estimated from the waits of the job's threads. This estimate has a "
    f"standard deviation of up to {percent(THREADS_SPREAD_MOST)} per side (measured), and more for few steps. For the "
    "wall time per training step, the interval also contains the variation of the long pauses between steps (a renewal "
    "process, Cox 1962)."
)


class Comparison(Struct, frozen=True):
    """``a`` is before, ``b`` after.

    ``rows`` holds every figure, ``advice`` the findings of both sides, ``notes`` what limits
    the comparison, gravest first.
    """

    a: Side
    b: Side
    notes: tuple[Note, ...]
    rows: tuple[ComparedRow, ...]
    advice: tuple[FollowedAdvice, ...]

    @property
    def step(self) -> ComparedRow | None:
        """The row of the step time that counts; None where both sides are snapshots without a capture.

        The mean decides how long a training takes; where it is too uneven, the median tells of the typical step.
        """
        rows = {row.id: row for row in self.rows if row.group == "steps"}
        if not rows:
            return None
        return min((rows["mean_s"], rows["median_s"]),
                   key=lambda row: (row.verdict not in _SURE, row.verdict != "noise"))

    @property
    def wall(self) -> ComparedRow | None:
        """The row of the wall time per training step, where more than the steps themselves lies in it."""
        rows = {row.id: row for row in self.rows if row.group == "steps"}
        wall = rows.get("wall_s")
        if wall is None or wall.low is None:
            return None
        pairs = [(getattr(rows["mean_s"], side) or 0.0, getattr(wall, side) or 0.0) for side in ("a", "b")]
        more = any(whole - step >= MIN_EFFECT * whole for step, whole in pairs)
        return wall if more or wall.verdict == "cannot be told" else None

    @property
    def decisive(self) -> ComparedRow | None:
        """The row that the verdict is of: the wall time per training step if it certainly changed, or if the step did
        and the wall time does not bear it out; else the step's."""
        step, wall = self.step, self.wall
        if step is None or wall is None:
            return step
        # It bears it out where it went the same way, by half as much at least, and by its interval as far.
        bears_out = (_may_agree(step, wall) and _same_way(step, wall)
                     and abs(wall.change or 0.0) >= abs(step.change or 0.0) / 2)
        return wall if wall.verdict in _SURE or (step.verdict in _SURE and not bears_out) else step

    @property
    def repeat(self) -> ComparedRow | None:
        """The step time that counts, where it differs, but by no more than one job does: a repeated capture may decide
        it."""
        row = self.decisive
        return row if row is not None and row.verdict == "noise" and (row.reason or "").startswith(REPEAT) else None

    @property
    def captures_needed(self) -> int | None:
        """Return how many captures of each job a difference as that of ``repeat`` takes to be certain, about: what two
        means differ by falls with the root of their number. None where there is no such difference."""
        bounds = _logarithms(self.repeat)
        if bounds is None:
            return None
        low, high, change = bounds
        made = 1 + (len(self.a.repeats) + len(self.b.repeats)) / 2
        return max(math.floor(made) + 1, math.ceil(made * ((high - low) / 2 / change) ** 2))

    @property
    def verdict(self) -> Verdict:
        """Return the verdict of what is decisive; where the batch size seems to differ, but not without doubt, only if
        the time per sample went the same way."""
        row = self.decisive
        if row is None:
            return "cannot be told"
        sample = self.sample_change
        if row.work == 1.0 and sample is not None and (row.verdict, sample < 0) in (("better", False), ("worse", True)):
            return "cannot be told"
        if row.verdict not in _SURE and row is self.wall and self.step is not None:
            return "cannot be told" if _may_agree(self.step, row) else "noise"
        return row.verdict

    @property
    def probably(self) -> Literal["faster", "slower"] | None:
        """Return which way a difference that is not proven most likely went: 5 to 1 and more, as it is by half of the
        change that it takes to be certain. None if there is no such difference."""
        bounds = _logarithms(self.repeat)
        if bounds is None:
            return None
        low, high, change = bounds
        bound = high - change if change < 0 else change - low
        return None if abs(change) < bound / 2 else "faster" if change < 0 else "slower"

    @property
    def headline(self) -> str:
        """The verdict in a sentence: "FASTER, certain: 344 → 184 ms per step on average (−49 to −45%).", and what the
        other one of step and wall time did. The step time that is told elsewhere is the median.

        It begins with the same word for the same verdict: better FASTER, worse SLOWER, noise "Probably …, not proven"
        or NOT PROVEN or NO CHANGE, and CANNOT BE TOLD.
        """
        row, step, wall = self.decisive, self.step, self.wall
        if row is None or step is None:
            return "CANNOT BE TOLD: there is no capture with step times."
        if row.a is None or row.b is None:
            return f"CANNOT BE TOLD: {row.reason}."
        if row is wall and row.verdict not in _SURE:
            return _not_borne_out(step, row)
        if self.verdict in _SURE:
            what = f"{_times(row.a, row.b_alike)} {self._per(row)} ({_range(row)})"
            text = f"{'FASTER' if self.verdict == 'better' else 'SLOWER'}, certain: {what}"
            return f"{text}{_although(step, row)}." if row is wall else f"{text}.{_beside(wall, row)}"
        what = f"{_change(row)[0]} {self._per(row)}{_change(row)[1]}"
        if row.verdict == "noise":
            word = ("NO CHANGE" if self.repeat is None else "NOT PROVEN" if self.probably is None else
                    f"Probably {self.probably}, not proven")
            return f"{word}: {what}.{_beside(wall, row)}"
        if row.verdict == "cannot be told":
            return f"CANNOT BE TOLD: {what}; {row.reason}."
        return f"CANNOT BE TOLD which is better: {what}."

    def _per(self, row: ComparedRow) -> str:
        step = "iteration" if max(self.a.iterations, self.b.iterations) > 1 else "step"
        if row.id == "wall_s":
            return f"of wall time per training {step}" + (f", for as many samples as a {step} of A has"
                                                          if row.work != 1.0 else "")
        if row.work != 1.0:
            return f"on average for as many samples as a {step} of A has"
        return f"per typical {step}" if row.id == "median_s" else f"per {step} on average"

    @property
    def sample_change(self) -> float | None:
        """Change of the time per sample as a share, where the bytes copied to the GPUs tell of another batch size."""
        row, factor = self.decisive, batch_factor(self.a, self.b)
        if row is None or factor is None or not other_batch(factor) or row.a is None or row.b is None or row.a <= 0:
            return None
        return row.b / row.a / factor - 1

    def with_note(self, note: Note) -> Comparison:
        """Return the comparison with a further caveat, the gravest."""
        return replace(self, notes=(note, *self.notes))

    def document(self, gates: Sequence[GateResult] = ()) -> CompareDocument:
        """Return what is printed, with what became of the gates if there are any."""
        from gputop.core.version import __version__

        drift = drift_of(self.a, self.b)
        return document_of(
            CompareDocument, self, gputop=__version__, a=CompareSide.of(self.a), b=CompareSide.of(self.b),
            repeat=self.repeat is not None, batch_factor=batch_factor(self.a, self.b),
            work_ratio=None if self.decisive is None else self.decisive.work,
            sample_time_change_ratio=self.sample_change, rows=tuple(map(CompareRow.of, self.rows)),
            method=CompareMethod(METHOD, 1 - ERROR, 1 - STEP_ERROR, MIN_EFFECT, MIN_STEPS,
                                 {"a": drift.a, "b": drift.b}),
            gates=tuple(gates) or UNSET)

    def to_json(self) -> dict[str, Any]:
        """The document ``gputop.compare/1``: what ``json.dump`` writes."""
        document: dict[str, Any] = to_document(self.document())
        return document


def signed(share: float) -> str:
    return f"{100 * share:+.1f}%".replace("-", "−")


def _same_way(step: ComparedRow, wall: ComparedRow) -> bool:
    return wall.reason != SMALL and (step.change or 0.0) * (wall.change or 0.0) > 0


def _may_agree(step: ComparedRow, wall: ComparedRow) -> bool:
    """Return whether the wall time may have changed by as much as the step's, by its interval."""
    if step.change is None or wall.low is None or wall.high is None:
        return True
    return wall.low <= step.change <= wall.high


def _change(row: ComparedRow) -> tuple[str, str]:
    """"344 → 184 ms", " (−46.5%)"."""
    share = figures.percent_change(row)
    return _times(row.a, row.b_alike), "" if share is None else f" ({signed(share)})"


def _logarithms(row: ComparedRow | None) -> tuple[float, float, float] | None:
    """The bounds of a time's change and the change, as logarithms of B over A; None if it was not tested, or is 0."""
    if row is None or not row.a or not row.change or row.low is None or row.high is None:
        return None
    low, high, change = (math.log(max(1 + value / row.a, _LEAST)) for value in (row.low, row.high, row.change))
    return low, high, change


def _range(row: ComparedRow) -> str:
    """"−49 to −45%": between which shares the change of a time lies; the change alone if it was not tested."""
    if not row.a or row.low is None or row.high is None:
        return _change(row)[1].strip(" ()")
    low, high = (f"{100 * max(bound, -row.a) / row.a:+.0f}".replace("-", "−") for bound in (row.low, row.high))
    return f"{low} to {high}%" if low != high else f"{low}%"


def _although(step: ComparedRow, wall: ComparedRow) -> str:
    """Say what the step did where the wall time decides."""
    what = "typical step" if step.id == "median_s" else "step"
    if step.verdict in _SURE:
        so = "also" if step.verdict == wall.verdict else "although"
        return f"; {so} the {what} became {_LENGTH[step.verdict]}: {''.join(_change(step))}"
    if step.verdict == "noise":
        sure = "" if step.reason == SMALL or step.a == step.b_alike else " for certain"
        return f"; the {what} itself did not change{sure}: {''.join(_change(step))}"
    return f"; gputop cannot tell whether the {what} itself changed"


def _beside(wall: ComparedRow | None, step: ComparedRow) -> str:
    """Return what is to be said of the wall time where the step decides."""
    if wall is None or wall.reason is None or wall.reason == step.reason or (step.verdict == "noise" == wall.verdict):
        return ""
    return (f" gputop cannot tell if the wall time per training step changed: {''.join(_change(wall))}; {wall.reason}.")


def _not_borne_out(step: ComparedRow, wall: ComparedRow) -> str:
    """The step certainly changed, and the wall time per training step did not, or nobody knows."""
    became = f"the step became {_LENGTH[step.verdict]} ({_change(step)[0]}),"
    if _may_agree(step, wall):
        return (f"CANNOT BE TOLD: {became} but gputop cannot tell whether the wall time per training step did: "
                f"{''.join(_change(wall))}; {wall.reason}.")
    text = (f"{'NO CHANGE' if wall.reason == SMALL else 'NOT PROVEN'}: {became} but "
            f"{'it is not certain that ' * (same := _same_way(step, wall))}the wall time per training step "
            f"did{'' if same else ' not'}: {''.join(_change(wall))}")
    return f"{text}{_MOVED[step.verdict] if _moved(step, wall) else ''}."


def _moved(step: ComparedRow, wall: ComparedRow) -> bool:
    """Return whether what lies between the steps changed the other way, by half of what the step did or more."""
    between = (wall.change or 0.0) - (step.change or 0.0)
    return not _may_agree(step, wall) and between * (step.change or 0.0) <= -((step.change or 0.0) ** 2) / 2


def _times(a: float | None, b: float | None) -> str:
    """"344 → 184 ms", with both units where they differ."""
    first, second = ("?" if value is None else seconds(value) for value in (a, b))
    number, _, unit = first.rpartition(" ")
    return f"{number if number and second.endswith(f' {unit}') else first} → {second}"


def compare_sides(a: Side, b: Side) -> Comparison:
    """Compare two sides; a pure function of them. Raises NoDataError where they have nothing in common."""
    rows = figures.all_rows(a, b)
    if not rows:
        raise NoDataError(f"{a.path} and {b.path} have no value in common.",
                           "Compare two traces or analyses, or two snapshots taken with --seconds 60 or more.")
    steps, parts = ({row.id: row for row in rows if row.group == group} for group in ("steps", "breakdown"))
    return Comparison(a, b, tuple(notes(a, b)), tuple(rows),
                      tuple(followed(a, b, steps.get("mean_s"), steps.get("wall_s"), parts)))


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
