"""The figures of two sides in pairs, each with a verdict: better, worse, changed, noise, or cannot be told."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from gputop.analysis.results import GpuUse
from gputop.comparison.caveats import is_damaged, other_functions, other_gpus, same_phase, work_ratio
from gputop.comparison.sides import Side
from gputop.comparison.statistics import MIN_STEPS, Drift, Interval, difference, drift_of, live_steps_s, ratio
from gputop.comparison.wall import ENOUGH_PAUSES, Walls, wall_difference
from gputop.core.metrics import BYTES, BYTES_PER_S, COUNT, GPU_METRICS, RATIO
from gputop.render.step_parts import WORK_FIRST
from gputop.trace.model import F64

if TYPE_CHECKING:
    from gputop.analysis.gpu.step_series import StepArrays

Verdict = Literal["better", "worse", "changed", "noise", "cannot be told"]
Group = Literal["steps", "breakdown", "gpus", "collectives", "memory", "live"]

# Chance of a verdict where nothing changed, at most: of each of the two figures of the step time (on reruns it is less:
# benchmarks/compare_reruns.md), and of each other table as a whole (shared between its rows: O. J. Dunn, J. Am. Stat.
# Assoc. 56, 1961).
STEP_ERROR = 0.05
ERROR = 0.01
# A smaller change is of no use to anybody, however surely it is there: of the step time, of a share of it
# (percentage point), of memory and rates. gputop's own figures.
MIN_EFFECT = 0.01
_MIN_RATE = 50e6  # bytes/s
SECONDS = "s"

PART_ORDER = tuple(part.id for part in WORK_FIRST)
# What is to be wished of a figure: 1 more, -1 less, 0 neither in itself.
_GPU_FIGURES = {"busy": 1, "compute": 1, "collectives": 0, "collectives_exposed": -1, "copies": -1, "idle": -1,
                "launch_delay_s": 0, "kernels": -1, "tensor_core_time": 1}
_GPU_UNITS = {"launch_delay_s": SECONDS, "kernels": COUNT}
_LANES = {"sm_active": 1, "gpu_util": 1, "tensor_active": 1}
_NO_STEPS = "no training steps were found in {}"
_NO_SERIES = "no values of single steps from {}: compare the traces themselves"
# What a reason begins with if more captures may decide.
REPEAT = "these captures allow any change from", "the live step period in the minutes before changed by only"
_WITHIN_RERUNS = f"{REPEAT[0]} {{:+.0%}} to {{:+.0%}}"
_NOT_LIVE = f"{REPEAT[1]} {{:+.1%}}"
SMALL = "a change too small to matter"
_WITHIN_PAUSES = f"the pauses between steps vary in length and number, so {_WITHIN_RERUNS}"
_FEW_PAUSES = ("only a few long pauses between steps were recorded ({} in A, {} in B), so one more or less would "
               "change the result; a longer capture contains more")
_OTHER_WORK = "a step of A and one of B do different work"
_OTHER_FUNCTIONS = "the steps of A are calls to {}, and those of B are calls to {}: one may be a part of the other"
_TOO_FEW_STEPS = f"too few steps: each side needs {MIN_STEPS}"


class ComparedRow(Struct, frozen=True):
    """One figure of A and B in base units, ``low`` and ``high`` bounding the change where it was tested.

    The change is ``b_alike`` - a: where a step of B is ``work`` times the work of one of A (a larger batch), times are
    compared for the same work. ``verdict`` is "changed" for a figure of which neither more nor less is better in
    itself; ``reason`` says why it is "noise" although the recordings differ, or "cannot be told".
    """

    group: Group
    id: str
    unit: str
    a: float | None
    b: float | None
    verdict: Verdict = "cannot be told"
    gpu: int | None = None
    low: float | None = None
    high: float | None = None
    reason: str | None = None
    work: float = 1.0

    @property
    def b_alike(self) -> float | None:
        """B's figure for the work of one step of A."""
        return None if self.b is None else self.b / self.work

    @property
    def change(self) -> float | None:
        return None if self.a is None or self.b_alike is None else self.b_alike - self.a


class _Test(Struct, frozen=True):
    """Test that a change has to pass: ``minimum``, and ``interval`` must exclude 0. ``exact`` figures need no interval:
    they were counted, not sampled, or are surely apart. ``reason``: why there is neither."""

    minimum: float
    interval: Interval | None = None
    exact: bool = False
    reason: str | None = None


def _judged(row: ComparedRow, wish: int, test: _Test) -> ComparedRow:
    """The row with its verdict. ``wish``: 1 where more of the figure is better, -1 where less is, 0 where neither is in
    itself."""
    a, b, interval, reason = row.a, row.b_alike, test.interval, test.reason
    low, high = (interval.low, interval.high) if interval is not None else (None, None)
    verdict = row.verdict
    if a is None or b is None:
        reason = reason or "unknown for " + (" and ".join(s for s, v in (("A", a), ("B", b)) if v is None))
    elif a == b:
        verdict, reason = "noise", "the same figure"
    elif interval is not None or test.exact:
        reason = None
        beyond = interval is None or interval.excludes_zero
        if beyond and abs(b - a) >= test.minimum:
            verdict = "changed" if wish == 0 else "better" if (b > a) == (wish > 0) else "worse"
        else:
            verdict, reason = "noise", SMALL if beyond else None
    return replace(row, verdict=verdict, low=low, high=high, reason=reason)


def step_rows(a: Side, b: Side) -> list[ComparedRow]:
    """Median and mean time of a step, wall time and live time of one; of one iteration where a side packs several into
    its step."""
    if a.steps is None or b.steps is None:
        reason = _no_steps(a, b)
        return [_step_time(id_, _per_iteration(a, id_), _per_iteration(b, id_), _Test(0.0, reason=reason))
                for id_ in ("median_s", "mean_s")]
    minimum, work = MIN_EFFECT * step_scale(a, b), work_ratio(a, b)
    series = [[steps_s for side in (job, *job.repeats) if (steps_s := _series(side)) is not None] for job in (a, b)]
    live = _live_row(a, b, minimum, work)
    rows, unlikely_s = [], 0.0
    not_alike = _not_alike(a, b)
    for id_, statistic in (("median_s", np.median), ("mean_s", np.mean)):
        first, second = (getattr(side.steps, id_) / side.iterations for side in (a, b))
        if not all(series):
            reason = _NO_SERIES.format(" and ".join(n for n, runs in zip("AB", series, strict=True) if not runs))
            rows.append(_step_time(id_, first, second, _Test(minimum, reason=reason), work))
            continue
        first, second = (value if len(runs) == 1 else float(np.mean([statistic(one) for one in runs]))
                         for value, runs in zip((first, second), series, strict=True))
        by_ratio = None if not_alike is not None else ratio(
            series[0], [one / work for one in series[1]], 1 - STEP_ERROR, drift_of(a, b), statistic=statistic)
        interval = None if by_ratio is None else by_ratio.of(first)
        row = _step_time(id_, first, second, _Test(minimum, interval, reason=not_alike or _TOO_FEW_STEPS), work)
        if row.verdict in ("better", "worse") and live is not None and _contradicts(live, percent_change(row)):
            unlikely_s = (row.change or 0.0) - (live.change or 0.0) if id_ == "mean_s" else 0.0
            row = replace(row, verdict="noise", reason=_NOT_LIVE.format(percent_change(live)))
        rows.append(_with_reason(row, minimum, _WITHIN_RERUNS))
    return [*rows, *filter(None, (wall_row(a, b, unlikely_s), live))]


def _no_steps(a: Side, b: Side) -> str:
    damaged = [name for name, side in (("A", a), ("B", b)) if is_damaged(side)]
    if damaged:
        return f"the file of {' and of '.join(damaged)} is damaged"
    return _NO_STEPS.format(" and ".join(name for name, side in (("A", a), ("B", b)) if side.steps is None))


def _per_iteration(side: Side, id_: str) -> float | None:
    return None if side.steps is None else getattr(side.steps, id_) / side.iterations


def _step_time(id_: str, a: float | None, b: float | None, test: _Test, work: float = 1.0) -> ComparedRow:
    return _judged(ComparedRow("steps", id_, SECONDS, a, b, work=work), -1, test)


def wall_row(a: Side, b: Side, unlikely_s: float = 0.0) -> ComparedRow | None:
    """Wall time per training step, with what lies between the steps; per iteration where a side packs several into its
    step. None where a side does not know it. ``unlikely_s``: what the live step period rules out of the change."""
    one, other = Walls.of(a), Walls.of(b)
    if one is None or other is None:
        return None
    work = work_ratio(a, b)
    first, second = one.per_step_s, other.per_step_s
    minimum = MIN_EFFECT * (first + second) / 2
    not_alike = _not_alike(a, b)
    difference = wall_difference(one, other, work, 1 - STEP_ERROR, drift_of(a, b)) if not_alike is None else None
    interval = None if difference is None else difference[0]
    if interval is not None:
        interval = interval._replace(low=interval.low - max(unlikely_s, 0.0), high=interval.high - min(unlikely_s, 0.0))
    row = _step_time("wall_s", first, second, _Test(minimum, interval, reason=not_alike or _TOO_FEW_STEPS), work)
    if difference is None or row.verdict != "noise" or first == second / work:
        return row
    of_pauses, counts = difference[1], (len(one.pauses_s), len(other.pauses_s))
    if of_pauses and min(counts) < ENOUGH_PAUSES:
        return replace(row, verdict="cannot be told", reason=_FEW_PAUSES.format(*counts))
    return _with_reason(row, minimum, _WITHIN_PAUSES if of_pauses else _WITHIN_RERUNS)


def _with_reason(row: ComparedRow, minimum: float, within: str) -> ComparedRow:
    """The row with the reason why a difference is noise: ``within`` some variation, or less than ``minimum``."""
    change = percent_change(row)
    if row.verdict != "noise" or row.reason is not None or change is None:
        return row
    low, high = (bound / row.a if row.a and bound is not None else change for bound in (row.low, row.high))
    return replace(row, reason=SMALL if abs(row.change or 0.0) < minimum else
                   within.format(max(low, -1.0), high).replace("-", "−"))


def _not_alike(a: Side, b: Side) -> str | None:
    """Return why a step of A and one of B are not the same work; None where they may be."""
    functions = other_functions(a, b)
    return (_OTHER_WORK if not same_phase(a, b) else other_gpus(a, b) or
            (_OTHER_FUNCTIONS.format(*functions) if functions is not None else None))


def _live_row(a: Side, b: Side, minimum: float, work: float) -> ComparedRow | None:
    """The step time in the minutes before each capture, where both are known."""
    first, second = live_steps_s(a, b), live_steps_s(b, a)
    if first is None or second is None:
        return None
    by_ratio = ratio([first], [second / work], 1 - STEP_ERROR, drift_of(a, b))
    interval = None if by_ratio is None else by_ratio.of(float(first.mean()))
    return _step_time("live_s", float(first.mean()), float(second.mean()), _Test(minimum, interval), work)


def _contradicts(live: ComparedRow, change: float | None) -> bool:
    """Return whether the live step times rule out a change of the captured ones (share of A): it lies beyond their
    interval, and they changed by less than half as much, or the other way."""
    live_change = percent_change(live)
    if change is None or live_change is None or not live.a or live.low is None or live.high is None:
        return False
    return not live.low <= change * live.a <= live.high and live_change * math.copysign(1, change) < abs(change) / 2


def _series(side: Side) -> F64 | None:
    """The time of each step per iteration."""
    if side.steps is None:
        return None
    if side.series is not None:
        return side.series.step_s / side.iterations
    lengths = side.steps.durations_s
    return np.array(lengths) / side.iterations if lengths and min(lengths) > 0 else None


def step_scale(a: Side, b: Side) -> float:
    """Seconds against which changes are measured: the mean of both mean steps, so that A and B can be swapped."""
    means = [side.steps.mean_s / side.iterations for side in (a, b) if side.steps is not None]
    return sum(means) / len(means) if means else 0.0


def breakdown_rows(a: Side, b: Side) -> list[ComparedRow]:
    """Each part of the mean step: in seconds per iteration or, where the steps are other work, as a share of it."""
    if _not_alike(a, b) is not None:
        pairs = {name: _pair(a, b, partial(_part, name=name, of_step=True)) for name in PART_ORDER}
        interval, reason = _tested(a, b, pairs)
        return [_judged(ComparedRow("breakdown", name, RATIO, float(pair[0].mean()), float(pair[1].mean())), 0,
                        _Test(MIN_EFFECT, interval.get(name), reason=reason))
                for name, pair in pairs.items() if pair is not None]
    breakdowns = [side.analysis.breakdown if side.analysis is not None else None for side in (a, b)]
    per, work = (a.iterations, b.iterations), work_ratio(a, b)
    pairs = {name: _pair(a, b, partial(_part, name=name), (per[0], per[1] * work)) for name in PART_ORDER}
    interval, reason = _tested(a, b, pairs, times=True)
    minimum = MIN_EFFECT * step_scale(a, b)
    rows = []
    for name in PART_ORDER:
        first, second = (parts.known[name] / n if parts is not None and name in parts.known else None
                         for parts, n in zip(breakdowns, per, strict=True))
        if first is None and second is None:
            continue
        test = _Test(minimum, interval.get(name), _within(pairs[name], minimum), reason)
        rows.append(_judged(ComparedRow("breakdown", name, SECONDS, first, second, work=work), -1, test))
    return rows


def _part(series: StepArrays, name: str, of_step: bool = False) -> F64 | None:
    return series.parts[name] / series.step_s if of_step and name in series.parts else series.parts.get(name)


def gpu_rows(a: Side, b: Side) -> list[ComparedRow]:
    """Shares of the step, launch delay, kernels per iteration and tensor-core time of each GPU that both have."""
    gpus = [{gpu.gpu: gpu for gpu in side.analysis.gpus} if side.analysis is not None else {} for side in (a, b)]
    shared = sorted(gpus[0].keys() & gpus[1].keys())
    keys = [(gpu, figure) for gpu in shared for figure in _GPU_FIGURES]
    per = a.iterations, b.iterations
    pairs = {(gpu, figure): _pair(a, b, partial(_of_gpu, gpu=gpu, figure=figure),
                                  per if figure == "kernels" else (1.0, 1.0)) for gpu, figure in keys}
    interval, reason = _tested(a, b, pairs)
    rows = []
    for gpu, figure in keys:
        values = [_gpu_value(side, of[gpu], figure) for side, of in zip((a, b), gpus, strict=True)]
        pair = pairs[gpu, figure]
        if pair is not None:  # of steps on both sides, or of the whole window on both
            values = [float(series.mean()) for series in pair]
        elif values[0] is None and values[1] is None:
            continue
        size = max(abs(v) for v in values if v is not None)
        minimum = MIN_EFFECT if _GPU_UNITS.get(figure, RATIO) == RATIO else MIN_EFFECT * size
        row = ComparedRow("gpus", figure, _GPU_UNITS.get(figure, RATIO), values[0], values[1], gpu=gpu)
        rows.append(_judged(row, _GPU_FIGURES[figure],
                            _Test(minimum, interval.get((gpu, figure)), _within(pair, minimum), reason)))
    return rows


def _of_gpu(series: StepArrays, gpu: int, figure: str) -> F64 | None:
    return _known(series.gpus.get(gpu, {}).get(figure))


def _known(series: F64 | None) -> F64 | None:
    """The steps that have a value."""
    if series is None:
        return None
    measured = series[~np.isnan(series)]
    return measured if len(measured) else None


def _gpu_value(side: Side, gpu: GpuUse, figure: str) -> float | None:
    if figure == "idle":
        return 1 - gpu.busy
    if figure == "kernels":  # of the window, which says nothing on its own
        return None if side.steps is None else gpu.kernels_per_s * side.steps.mean_s / side.iterations
    value: float | None = getattr(gpu, "launch_delay_median_s" if figure == "launch_delay_s" else figure)
    return value


def collective_rows(a: Side, b: Side) -> list[ComparedRow]:
    """The share of collectives spent waiting, and their number per step, which is counted."""
    collectives = [side.analysis.collectives if side.analysis is not None else None for side in (a, b)]
    waiting = [None if one is None else one.waiting for one in collectives]
    count = [None if one is None or one.count_per_step is None else one.count_per_step / side.iterations
             for side, one in zip((a, b), collectives, strict=True)]
    rows = []
    if waiting != [None, None]:
        pair = _pair(a, b, lambda series: _known(series.waiting))
        interval, reason = _tested(a, b, {"waiting": pair})
        rows.append(_judged(ComparedRow("collectives", "waiting", RATIO, waiting[0], waiting[1]), -1, _Test(
            MIN_EFFECT, interval.get("waiting"), reason=None if None in waiting else reason)))
    if count != [None, None]:
        size = max(n for n in count if n is not None)
        rows.append(_judged(ComparedRow("collectives", "count_per_step", COUNT, count[0], count[1]), -1,
                            _Test(MIN_EFFECT * size, exact=True)))
    return rows


def memory_rows(a: Side, b: Side) -> list[ComparedRow]:
    """The peak of each allocator that both sides name: counted, so without spread."""
    peaks = [{use.allocator: use.peak_bytes for use in side.analysis.memory} if side.analysis is not None else {}
             for side in (a, b)]
    rows = []
    for name in sorted(peaks[0].keys() & peaks[1].keys()):
        first, second = (float(of[name]) for of in peaks)
        rows.append(_judged(ComparedRow("memory", name, BYTES, first, second), 0,
                            _Test(MIN_EFFECT * max(first, second), exact=True)))
    return rows


def live_rows(a: Side, b: Side) -> list[ComparedRow]:
    """Means over the minutes that two snapshots hold, of every lane and GPU that both have, matched by index."""
    if a.live is None or b.live is None:
        return []
    keys = sorted(a.live.means.keys() & b.live.means.keys())
    error = ERROR / max(len(keys), 1)
    rows = []
    for gpu, metric in keys:
        first, second = (np.array(live.means[gpu, metric]) for live in (a.live, b.live))
        unit = GPU_METRICS[metric].unit
        means = float(first.mean()), float(second.mean())
        minimum = MIN_EFFECT if unit == RATIO else MIN_EFFECT * max(map(abs, means))
        if unit == BYTES_PER_S:
            minimum = max(minimum, _MIN_RATE)
        reason = f"each snapshot needs at least {MIN_STEPS} slices of 5 s: gputop snapshot --seconds 60"
        rows.append(_judged(ComparedRow("live", metric, unit, *means, gpu=gpu), _LANES.get(metric, 0),
                            _Test(minimum, difference([first], [second], 1 - error), reason=reason)))
    return rows


def _pair(a: Side, b: Side, of: Callable[[StepArrays], F64 | None], per: tuple[float, float] = (1.0, 1.0),
          ) -> tuple[F64, F64] | None:
    """The series of both sides per iteration, or None where one lacks it."""
    first, second = (None if side.series is None else of(side.series) for side in (a, b))
    return None if first is None or second is None else (first / per[0], second / per[1])


def _within(pair: tuple[F64, F64] | None, minimum: float) -> bool:
    """Return whether not one step of either side differs from another by what would count: no interval is needed
    then."""
    return pair is not None and float(np.ptp(np.concatenate(pair))) < minimum


def _change(pair: tuple[F64, F64], confidence: float, drift: Drift, *, times: bool) -> Interval | None:
    """The interval of a change; of ``times`` by their ratio, as long as none is 0."""
    first, second = pair
    by_ratio = ratio([first], [second], confidence, drift) if times else None
    return difference([first], [second], confidence, drift) if by_ratio is None else by_ratio.of(float(first.mean()))


def _tested(a: Side, b: Side, pairs: Mapping[Any, tuple[F64, F64] | None], *, times: bool = False,
            ) -> tuple[dict[Any, Interval | None], str]:
    """Intervals of a table whose rows share one error, and why there are none where there are none."""
    comparable = {key: pair for key, pair in pairs.items() if pair is not None}
    error = ERROR / max(len(comparable), 1)
    drift = drift_of(a, b)
    changes = {key: _change(pair, 1 - error, drift, times=times) for key, pair in comparable.items()}
    bare = [name for name, side in (("A", a), ("B", b)) if side.series is None]
    if a.steps is None or b.steps is None:
        return changes, _no_steps(a, b)
    return changes, _NO_SERIES.format(" and ".join(bare)) if bare else _TOO_FEW_STEPS


def all_rows(a: Side, b: Side) -> list[ComparedRow]:
    rows: list[ComparedRow] = []
    if a.analysis is not None and b.analysis is not None:
        for table in (step_rows, breakdown_rows, gpu_rows, collective_rows, memory_rows):
            rows += table(a, b)
    return rows + live_rows(a, b)


def of_group(rows: Iterable[ComparedRow], group: Group) -> Iterator[ComparedRow]:
    return (row for row in rows if row.group == group)


def percent_change(row: ComparedRow) -> float | None:
    """The change as a share of A, None where that has no meaning."""
    if not row.a or row.change is None or not math.isfinite(row.change / row.a):
        return None
    return row.change / row.a
