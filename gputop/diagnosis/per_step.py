"""Conversion of totals over a trace and its GPUs to values per step: of the whole steps where these are known, else of
the window."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

from gputop.analysis.results import Analysis, CollectiveOp, FunctionUse, KernelRow

_FILLED = 0.8  # share of the window's work by whole steps; less may be evaluation
_CUT_STEPS = 2.5  # parts of which are in the window: one at each end, either of them longer than the mean


class PerStep(NamedTuple):
    """Divisors of totals: ``steps`` of a sum over the window, ``steps_times_gpus`` of one over all GPUs, too.

    ``unit`` is "step" or "period"; "window" where steps do not fill it, and then ``steps`` is 1. ``whole``: the sums
    are of whole steps alone, per step already.
    """

    steps: float
    gpus: int
    unit: str
    whole: bool = False

    @property
    def steps_times_gpus(self) -> float:
        return self.steps * self.gpus

    def text(self, by_gpu: bool = True) -> str:
        """Words for the quotients: "per step and GPU"."""
        gpu = by_gpu and self.gpus > 1
        if self.unit == "window":
            return "per GPU in the window" if gpu else "in the window"
        return f"per {self.unit}{' and GPU' if gpu else ''}"

    @property
    def basis(self) -> str:
        """The same with how it was had: "per step and GPU (mean of the window)"."""
        return self.text() + (" (mean of the window)" if self.unit != "window" and not self.whole else "")


class KernelsPerStep(Struct, frozen=True):
    """A row of a table of kernels, of a GPU that runs them. ``share`` is of the time of all kernels."""

    row: KernelRow
    share: float
    count: float
    time_s: float


def kernels_per_step(a: Analysis, table: Sequence[KernelRow]) -> tuple[list[KernelsPerStep], PerStep]:
    """The rows that have a part in a step, by falling time, and what their figures are."""
    by = _basis(a, (row.count_per_step for row in table))
    sums = [(row, row.count_per_step or 0.0, row.time_s_per_step or 0.0) if by.whole else (row, row.count, row.time_s)
            for row in table]
    all_s, rows = sum(time_s for _, _, time_s in sums), []
    for row, count, time_s in sums:
        if count:
            parts = by.steps * (len(row.by_gpu) or by.gpus)
            rows.append(KernelsPerStep(row, time_s / all_s if all_s else 0.0, count / parts, time_s / parts))
    return sorted(rows, key=lambda kernel: (not kernel.row.name, -kernel.share)), by


class CopiesPerStep(Struct, frozen=True):
    """Copies of one GPU and way, per step. ``bytes_per_s`` is the rate of a single one."""

    gpu: int
    direction: str
    source: str
    target: str
    count: float
    bytes: float | None
    time_s: float
    bytes_per_s: float | None


class OpCopiesPerStep(Struct, frozen=True):
    """Copies of one op, per step, the mean of the GPUs."""

    op: str
    direction: str
    count: float
    bytes: float | None
    time_s: float
    bytes_per_s: float | None


def copies_per_step(a: Analysis) -> tuple[list[CopiesPerStep], list[OpCopiesPerStep], PerStep]:
    """The copies of each GPU, and of each op where the trace names them: a step has that share of an op's copies that
    it has of all in that direction."""
    table = a.copies
    if table is None:
        return [], [], per_step(a)
    by = _basis(a, (row.count_per_step for row in table.rows))
    rows = []
    seen: dict[str, float] = defaultdict(float)
    in_step: dict[str, float] = defaultdict(float)
    for row in table.rows:
        count, size, time_s = ((row.count_per_step or 0.0, row.bytes_per_step, row.time_s_per_step or 0.0) if by.whole
                               else (row.count / by.steps, over(row.bytes, by.steps), row.time_s / by.steps))
        seen[row.direction] += row.count
        in_step[row.direction] += count
        if count:
            rows.append(CopiesPerStep(row.gpu, row.direction, row.source, row.target, count, size, time_s,
                                      row.bytes_per_s))
    ops = []
    for op in table.by_op or ():
        each = in_step[op.direction] / seen[op.direction] / by.gpus
        if each:
            ops.append(OpCopiesPerStep(op.op, op.direction, op.count * each, None if op.bytes is None else
                                       op.bytes * each, op.time_s * each,
                                       op.bytes / op.time_s if op.bytes and op.time_s else None))
    return rows, ops, by


def over(total: float | None, parts: float) -> float | None:
    """The quotient, or None of what is not known."""
    return None if total is None else total / parts


class CollectivePerStep(Struct, frozen=True):
    """Collectives of one operation, of a GPU."""

    op: CollectiveOp
    count: float
    time_s: float
    transfer_s: float | None
    bytes: float | None
    exposed_s: float | None  # on the GPU where it is longest


def collectives_per_step(a: Analysis) -> tuple[list[CollectivePerStep], PerStep]:
    """Number of each operation per step, each as long as they are in the window on average."""
    operations = a.collectives.operations if a.collectives is not None else ()
    by = _basis(a, (op.count_per_step for op in operations))
    rows = []
    for op in operations:
        count = op.count_per_step or 0.0 if by.whole else op.count / by.steps_times_gpus
        if not count:
            continue
        each = count / op.count  # of the sums over all GPUs
        exposed_s = max(op.exposed_s.values(), default=None)
        rows.append(CollectivePerStep(
            op, count, op.time_s * each, None if op.transfer_s is None else op.transfer_s * each,
            None if op.bytes is None else op.bytes * each,
            None if exposed_s is None else exposed_s * each * max(len(op.exposed_s), 1)))
    return rows, by


class FunctionPerStep(Struct, frozen=True):
    """Calls of a tf.function, per step."""

    use: FunctionUse
    calls: float
    time_s: float
    xla_s: float  # of it, as in the window on average


def functions_per_step(a: Analysis) -> tuple[list[FunctionPerStep], PerStep]:
    """Functions called within a step, or all of them without steps."""
    functions = a.functions.functions if a.functions is not None else ()
    by = _basis(a, (use.calls_per_step for use in functions))
    rows = []
    for use in functions:
        calls, time_s = ((use.calls_per_step or 0.0, use.s_per_step or 0.0) if by.whole else
                         (use.calls / by.steps, use.seconds / by.steps))
        if calls or use.tracings:
            rows.append(FunctionPerStep(use, calls, time_s, use.xla_s / use.seconds * time_s if use.seconds else 0.0))
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
