"""Two captures, analyses or snapshots of a job: what changed, by how much, and beyond noise or not."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gputop.comparison.advice import Followed, followed
from gputop.comparison.drift import CPU_DRIFT, GPU_DRIFT, drift_of
from gputop.comparison.job import Note, batch_factor, gpu_count, notes, other_batch
from gputop.comparison.rows import ERROR, MIN_EFFECT, REPEAT, STEP_ERROR, Row, Verdict, all_rows, percent_change
from gputop.comparison.sides import Side, read_side
from gputop.comparison.statistics import BLOCKS, MIN_STEPS
from gputop.core.errors import EXIT_USAGE, GputopError, NoDataError
from gputop.text.units import percent, seconds

SCHEMA = "gputop.compare/1"
_Path = str | os.PathLike[str]
MAX_REPEATS = 10  # captures of each job: nobody makes more
_STEPS = ("count", "anchor", "median_s", "mean_s", "p95_s")
METHOD = (
    "A change is called better or worse only if its interval excludes 0 (Welch 1947, with "
    f"{percent(1 - STEP_ERROR)} confidence for a step time and {percent(1 - ERROR)} for each table as a whole) and if "
    f"it is at least {percent(MIN_EFFECT)} of the step, or a percentage point of a share. All else is noise. Three "
    f"things widen the interval. First, the spread over time, by {BLOCKS} blocks of each capture. Second, the spread "
    f"between runs of an unchanged job: a standard deviation of {percent(CPU_DRIFT)} on CPUs (measured) and of "
    f"{percent(GPU_DRIFT)} with GPUs (assumed), or the spread of the live step period in the minutes before. Third, "
    "where the CPUs were full, the CPU time that other processes left to the job. A change that the live step period "
    "of those minutes excludes is noise, too."
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """``a`` is before, ``b`` after.

    ``rows`` holds every figure, ``advice`` the findings of both sides, ``notes`` what limits
    the comparison, gravest first.
    """

    a: Side
    b: Side
    notes: tuple[Note, ...]
    rows: tuple[Row, ...]
    advice: tuple[Followed, ...]

    @property
    def decisive(self) -> Row | None:
        """The row of the step time that counts; None where both sides are snapshots without a capture.

        The mean decides how long a training takes; where it is too uneven, the median tells of the typical step.
        """
        rows = {row.id: row for row in self.rows if row.group == "steps"}
        if not rows:
            return None
        mean, median = rows["mean_s"], rows["median_s"]
        for verdicts in (("better", "worse"), ("noise",)):
            for row in (mean, median):
                if row.verdict in verdicts:
                    return row
        return mean

    @property
    def repeat(self) -> Row | None:
        """The step time that counts, where it differs, but by no more than one job does: a repeated capture may decide
        it."""
        row = self.decisive
        return row if row is not None and row.verdict == "noise" and (row.reason or "").endswith(REPEAT) else None

    @property
    def captures_needed(self) -> int | None:
        """How many captures of each job a difference as that of ``repeat`` takes to be beyond doubt, about: what two
        means differ by falls with the root of their number. None where there is no such difference."""
        row = self.repeat
        if row is None or not row.change or row.low is None or row.high is None:
            return None
        made = 1 + (len(self.a.repeats) + len(self.b.repeats)) / 2
        return max(math.floor(made) + 1, math.ceil(made * ((row.high - row.low) / 2 / row.change) ** 2))

    @property
    def verdict(self) -> Verdict:
        """Of the step time; where the batch size seems to differ, but not without doubt, only if the time per sample
        went the same way."""
        row = self.decisive
        if row is None:
            return "cannot be told"
        sample = self.sample_change
        if row.work == 1.0 and sample is not None and (row.verdict, sample < 0) in (("better", False), ("worse", True)):
            return "cannot be told"
        return row.verdict

    @property
    def headline(self) -> str:
        """The verdict in a sentence: "FASTER: 344 → 184 ms per step on average (−46.5 %), beyond doubt.". The step time
        that is told elsewhere is the median."""
        row = self.decisive
        if row is None:
            return "Step times cannot be compared: there is no capture."
        if row.a is None or row.b is None:
            return f"Whether the step time changed cannot be told: {row.reason}."
        step = "iteration" if max(self.a.iterations, self.b.iterations) > 1 else "step"
        of = f"per typical {step}" if row.id == "median_s" else f"per {step} on average"
        if row.work != 1.0:
            of = f"on average for as many samples as a {step} of A has"
        change = percent_change(row)
        what = f"{_times(row.a, row.b_alike)} {of}" + ("" if change is None else f" ({signed(change)})")
        if self.verdict in ("better", "worse"):
            return f"{'FASTER' if self.verdict == 'better' else 'SLOWER'}: {what}, beyond doubt."
        if row.verdict == "noise":
            return f"{'NO CHANGE' if self.repeat is None else 'NOT BEYOND DOUBT'}: {what}."
        if row.verdict == "cannot be told":
            return f"UNDECIDED: {what}; {row.reason}."
        return f"UNDECIDED which is better: {what}."

    @property
    def sample_change(self) -> float | None:
        """Change of the time per sample as a share, where the bytes copied to the GPUs tell of another batch size."""
        row, factor = self.decisive, batch_factor(self.a, self.b)
        if row is None or factor is None or not other_batch(factor) or row.a is None or row.b is None or row.a <= 0:
            return None
        return row.b / row.a / factor - 1

    def with_note(self, note: Note) -> Comparison:
        """With a further caveat, the gravest."""
        return replace(self, notes=(note, *self.notes))

    def to_json(self) -> dict[str, Any]:
        """The document gputop.compare/1."""
        from gputop.core.version import __version__

        return {
            "schema": SCHEMA, "gputop": __version__,
            "a": _side(self.a), "b": _side(self.b),
            "notes": [note.to_json() for note in self.notes],
            "verdict": self.verdict, "headline": self.headline, "repeat": self.repeat is not None,
            "captures_needed": self.captures_needed, "batch_factor": batch_factor(self.a, self.b),
            "work_ratio": None if self.decisive is None else self.decisive.work,
            "sample_time_change_ratio": self.sample_change,
            "rows": [row.to_json() for row in self.rows],
            "advice": [entry.to_json() for entry in self.advice],
            "method": {"text": METHOD, "confidence": 1 - ERROR, "step_confidence": 1 - STEP_ERROR,
                       "min_effect_ratio": MIN_EFFECT, "min_steps": MIN_STEPS,
                       "drift_ratio": dict(zip("ab", drift_of(self.a, self.b), strict=True))},
        }


def signed(share: float) -> str:
    return f"{100 * share:+.1f} %".replace("-", "−")


def _times(a: float | None, b: float | None) -> str:
    """"344 → 184 ms", with both units where they differ."""
    first, second = ("?" if value is None else seconds(value) for value in (a, b))
    number, _, unit = first.rpartition(" ")
    return f"{number if number and second.endswith(f' {unit}') else first} → {second}"


def _side(side: Side) -> dict[str, Any]:
    steps = side.analysis.steps if side.analysis is not None else None
    return {"path": side.path, "kind": side.kind, "again": [repeat.path for repeat in side.repeats],
            "simulated": side.simulated, "gpus": gpu_count(side),
            "gpu_names": sorted(set(side.gpu_names)),
            "steps": {key: getattr(steps, key) for key in _STEPS} if steps is not None else None}


def compare(a: _Path, b: _Path, *, again_a: Sequence[_Path] = (), again_b: Sequence[_Path] = (),
            progress: Callable[[_Path], object] = lambda path: None) -> Comparison:
    """Compare two files or folders: traces, documents of ``analyze --json`` or ``capture --json``, JSON snapshots.

    ``again_a`` and ``again_b`` are further runs of the same jobs: with them the step times are means over all runs, and
    smaller changes are sure. ``progress`` is called with each path before it is read. Raises GputopError for what
    cannot be read or is given twice, and NoDataError where A and B have nothing in common.
    """
    def read(path: _Path) -> Side:
        progress(path)
        return read_side(path)

    given = {Path(path).resolve() for path in (a, b)}
    same = len(given) == 1
    for path in (*again_a, *again_b):
        if (place := Path(path).resolve()) in given:
            raise GputopError(f"{os.fspath(path)} is given twice, but two runs need two captures",
                              "Name another capture of the job, or leave it out.", EXIT_USAGE)
        given.add(place)
    only = read(a)
    first = replace(only, repeats=tuple(map(read, again_a)))
    second = only if same else read(b)
    result = compare_sides(first, replace(second, repeats=tuple(map(read, again_b))))
    if same:
        return result.with_note(Note("same_file", "A and B are the same file."))
    return result


def compare_sides(a: Side, b: Side) -> Comparison:
    """The same of two sides in memory; a pure function of them."""
    rows = all_rows(a, b)
    if not rows:
        raise NoDataError(f"{a.path} and {b.path} have no figure in common.",
                           "Compare two traces or analyses, or two snapshots taken with --seconds 60 or more.")
    mean_step = next((row for row in rows if row.group == "steps" and row.id == "mean_s"), None)
    return Comparison(a, b, tuple(notes(a, b)), tuple(rows), tuple(followed(a, b, mean_step)))
