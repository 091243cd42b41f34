"""Conversion of totals over a trace and its GPUs to values per step: of the whole steps where these are known, else of
the window. A row of a table is the same row then, with the figures of a step in place of the totals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from gputop.analysis.results import Analysis, CollectiveOp, CopyRow, FunctionUse, KernelRow, OpCopies

_FILLED = 0.8  # share of the window's work by whole steps; less may be evaluation
_CUT_STEPS = 2.5  # parts of which are in the window: one at each end, either of them longer than the mean


class PerStep(NamedTuple):
    """Divisors of totals: ``steps`` of a sum over the window, ``steps_times_gpus`` of one over all GPUs, too. ``unit``
    is "step" or "period"; "window" where steps do not fill it, and then ``steps`` is 1. ``whole``: the sums are of
    whole steps alone, per step already."""

    steps: float
    gpus: int
    unit: str
    whole: bool = False

    @property
    def steps_times_gpus(self) -> float:
        return self.steps * self.gpus

    def sum_of(self, total: float, in_step: float | None) -> float:
        """A sum over the window, and over whole steps per step, as a sum per step."""
        return in_step or 0.0 if self.whole else total / self.steps

    def text(self, by_gpu: bool = True) -> str:
        """Words for the quotients: "per GPU in each step"."""
        gpu = by_gpu and self.gpus > 1
        if self.unit == "window":
            return "per GPU in the window" if gpu else "in the window"
        return f"per GPU in each {self.unit}" if gpu else f"per {self.unit}"

    @property
    def basis(self) -> str:
        """The same with how it was had: "per GPU in each step (mean of the window)"."""
        return self.text() + (" (mean of the window)" if self.unit != "window" and not self.whole else "")


def kernels_per_step(a: Analysis, table: Sequence[KernelRow]) -> tuple[list[KernelRow], PerStep]:
    """The rows that have a part in a step, by falling time, with figures of a step and a GPU that runs them; shares are
    of the time of all kernels."""
    by = _basis(a, (row.count_per_step for row in table))
    sums = [(row, by.sum_of(row.count, row.count_per_step), by.sum_of(row.time_s, row.time_s_per_step))
            for row in table]
    all_s = sum(time_s for _, _, time_s in sums)
    rows = [replace(row, count=count / gpus, time_s=time_s / gpus, mean_s=time_s / count,
                    share=time_s / all_s if all_s else 0.0)
            for row, count, time_s in sums if count for gpus in [len(row.by_gpu) or by.gpus]]
    return sorted(rows, key=lambda row: (not row.name, -row.share)), by


def copies_per_step(a: Analysis) -> tuple[list[CopyRow], list[OpCopies], PerStep]:
    """The copies of each GPU with figures of a step, and those of each op where the trace names them, the mean of the
    GPUs: a step has that share of an op's copies that it has of all in that direction."""
    table = a.copies
    if table is None:
        return [], [], per_step(a)
    by = _basis(a, (row.count_per_step for row in table.rows))
    rows = [replace(row, count=by.sum_of(row.count, row.count_per_step),
                    bytes=row.bytes_per_step if by.whole else over(row.bytes, by.steps),
                    time_s=by.sum_of(row.time_s, row.time_s_per_step)) for row in table.rows]
    ops = []
    for op in table.by_op or ():
        seen = sum(row.count for row in table.rows if row.direction == op.direction)
        parts = seen * by.gpus / (sum(row.count for row in rows if row.direction == op.direction) or math.inf)
        if math.isfinite(parts):
            ops.append(replace(op, count=op.count / parts, bytes=over(op.bytes, parts), time_s=op.time_s / parts))
    return [row for row in rows if row.count], ops, by


def over(total: float | None, parts: float) -> float | None:
    """The quotient, or None of what is not known."""
    return None if total is None else total / parts


def collectives_per_step(a: Analysis) -> tuple[list[CollectiveOp], PerStep]:
    """Each operation with figures of a step and a GPU: as many as in a step, each as long as in the window on
    average."""
    operations = a.collectives.operations if a.collectives is not None else ()
    by = _basis(a, (op.count_per_step for op in operations))
    rows = []
    for op in operations:
        count = op.count_per_step or 0.0 if by.whole else op.count / by.steps_times_gpus
        if count:
            parts = op.count / count  # of the sums over all GPUs
            exposed = {gpu: time_s * max(len(op.exposed_s), 1) / parts for gpu, time_s in op.exposed_s.items()}
            rows.append(replace(op, count=count, time_s=op.time_s / parts, transfer_s=over(op.transfer_s, parts),
                                bytes=over(op.bytes, parts), exposed_s=exposed))
    return rows, by


def functions_per_step(a: Analysis) -> tuple[list[FunctionUse], PerStep]:
    """Functions called within a step, or all of them without steps, with calls and times of a step; of the time with
    XLA the same share as in the window."""
    functions = a.functions.functions if a.functions is not None else ()
    by = _basis(a, (use.calls_per_step for use in functions))
    rows = []
    for use in functions:
        calls, time_s = by.sum_of(use.calls, use.calls_per_step), by.sum_of(use.seconds, use.s_per_step)
        if calls or use.tracings:
            rows.append(replace(use, calls=calls, seconds=time_s,
                                xla_s=use.xla_s / use.seconds * time_s if use.seconds else 0.0))
    return rows, by


def _basis(a: Analysis, counts: Iterable[float | None]) -> PerStep:
    """The whole steps where all these numbers per step are known, else what the window is worth."""
    by = per_step(a)
    return PerStep(1.0, by.gpus, a.steps.unit, True) if a.steps is not None and None not in counts else by


def per_step(a: Analysis) -> PerStep:
    """The steps that the window is worth, and the GPUs at work."""
    gpus = max(1, sum(gpu.kernels > 0 for gpu in a.gpus))
    s, steps = a.steps, _steps_worth(a)
    if s is None or steps is None:
        return PerStep(1.0, gpus, "window")
    # The window cuts a step at each end, and what is left out of the steps was seen: more is other work.
    most = max(s.count + (0 if s.left_out_s else max(_CUT_STEPS, s.dropped)), s.count / _FILLED)
    return PerStep(steps, gpus, s.unit) if steps <= most else PerStep(1.0, gpus, "window")


def _steps_worth(a: Analysis) -> float | None:
    """Length of a window in steps, by the work of its compute kernels; where that of a step is not known, by time."""
    if a.steps is None or not a.steps.mean_s:
        return None
    in_steps = [sum(sizes.time_s_per_step or ()) for sizes in a.kernel_sizes]
    if in_steps and all(in_steps):
        return sum(sum(sizes.time_s) for sizes in a.kernel_sizes) / sum(in_steps)
    return a.trace.window_s / a.steps.mean_s
