"""Caveats that have to be said before any figure: whether A and B are the same job, measured alike."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from msgspec import Struct

from gputop.comparison.sides import Side
from gputop.comparison.statistics import cpus_of, drift_of
from gputop.text.units import percent

# Less kernel time than this under names that both sides have: another model, number type or compiler. gputop's own.
SAME_JOB_SHARE = 0.3
# Bytes copied to the GPUs per step that differ by this factor: most likely another batch size. gputop's own.
OTHER_BATCH_FACTOR = 1.25
# Kernel time that grows with the bytes copied by a power within these: a batch of another size, and not data of another
# type or shape. Half: short kernels do not grow. gputop's own.
_BATCH_POWERS = (0.5, 1.5)
# Logarithm of the ratio of the CPUs that were left to the job: a step that may differ by a tenth. gputop's own.
OTHER_LOAD = 0.1
_CALLS = re.compile(r"calls of (?:PjitFunction\((.+?)\)|the tf\.function (?:__inference_)?(\S+?))(?:,|$)")
_NUMBER = re.compile(r"_\d+$")


class Note(Struct, frozen=True):
    id: str
    message: str


def notes(a: Side, b: Side) -> list[Note]:
    """The caveats of a comparison, gravest first."""
    return [*_reality(a, b), *_hardware(a, b), *_work(a, b), *_steps(a, b)]


def _reality(a: Side, b: Side) -> Iterator[Note]:
    if a.simulated != b.simulated:
        which, other = ("A", "B") if a.simulated else ("B", "A")
        yield Note("simulated_against_real", f"{which} is SIMULATED and {other} is not: the differences show nothing "
                                             "about a real job.")
    elif a.simulated:
        yield Note("simulated", "SIMULATED: both come from gputop's simulation, not from real GPUs.")
    if (a.analysis is None) != (b.analysis is None):
        which = "A" if a.analysis is None else "B"
        yield Note("no_capture", f"{which} is a snapshot without a capture: steps and shares cannot be compared. "
                                 "Capture first (c in the monitor), then take the snapshot.")

    for which, side in (("A", a), ("B", b)):
        if is_damaged(side):
            yield Note("damaged", f"{which}'s file is damaged, so gputop does not use it. Copy it or capture again.")


def is_damaged(side: Side) -> bool:
    """Return whether the side's trace was cut off: nothing in it can be compared."""
    return side.analysis is not None and side.analysis.trace.is_damaged


def _hardware(a: Side, b: Side) -> Iterator[Note]:
    if (counts := gpu_counts(a, b)) is not None:
        yield Note("gpu_count", f"{counts}: not the same job, or not on the same GPUs. A step may be a different "
                                "amount of work.")
    if a.gpu_names and b.gpu_names and set(a.gpu_names) != set(b.gpu_names):
        yield Note("gpu_model", f"Other GPUs: {', '.join(sorted(set(a.gpu_names)))} in A, "
                                f"{', '.join(sorted(set(b.gpu_names)))} in B.")


def gpu_counts(a: Side, b: Side) -> str | None:
    """Return how many GPUs each side has, if they differ."""
    counts = [gpu_count(side) for side in (a, b)]
    if counts[0] == counts[1] or is_damaged(a) or is_damaged(b):
        return None
    return f"A has {_gpus(counts[0])} and B {_gpus(counts[1])}"


def other_gpus(a: Side, b: Side) -> str | None:
    """Return why steps on other GPUs are not the same work; None for a job that moved onto a GPU, or off it."""
    moved = min(gpu_count(a), gpu_count(b)) == 0 and a.steps is not None and b.steps is not None and (
        a.steps.anchor == b.steps.anchor)
    return None if moved else gpu_counts(a, b)


def gpu_count(side: Side) -> int:
    """GPUs in the trace or, without one, in the snapshot."""
    if side.analysis is not None:
        return len(side.analysis.gpus)
    return side.live.gpus if side.live is not None else 0


def _gpus(n: int) -> str:
    return "no GPU" if n == 0 else "1 GPU" if n == 1 else f"{n} GPUs"


def _work(a: Side, b: Side) -> Iterator[Note]:
    common = common_kernel_time(a, b)
    if common is not None and common < SAME_JOB_SHARE:
        yield Note("other_kernels", f"Not the same job? Only {percent(common)} of the kernel time is in kernels of the "
                                    "same name. Another number type, XLA or another library version also renames "
                                    "kernels.")
    factor = batch_factor(a, b)
    if factor is not None and other_batch(factor):
        copies = f"A step of B copies {factor:.3g} times as many bytes to the GPUs as a step of A"
        if work_ratio(a, b) != 1.0:
            text = (f"{copies}, and the time of its kernels changes in proportion, so the batch sizes differ. gputop "
                    f"compares times per sample: B's times are divided by {factor:.3g}.")
        else:
            text = (f"{copies}, but the time of its kernels does not change in proportion, so the batch size or the "
                    "data may differ. Compare the shares of the step.")
        yield Note("other_batch", text)


def common_kernel_time(a: Side, b: Side) -> float | None:
    """Share of a side's named kernel time in names that the other has too; the lesser of both, None without kernels."""
    times: list[dict[str, float]] = []
    for side in (a, b):
        kernels = side.analysis.kernels if side.analysis is not None else None
        times.append({row.name: row.time_s for row in kernels.by_name if row.name} if kernels is not None else {})
    if not all(sum(t.values()) > 0 for t in times):
        return None
    shared = times[0].keys() & times[1].keys()
    return min(sum(t[name] for name in shared) / sum(t.values()) for t in times)


def batch_factor(a: Side, b: Side) -> float | None:
    """Bytes copied from the host per iteration and GPU, of B over A; None where a side does not tell."""
    moved = []
    for side in (a, b):
        copies = side.analysis.copies if side.analysis is not None else None
        rows = [row for row in copies.rows if row.direction == "h2d"] if copies is not None else []
        moved_bytes = [row.bytes_per_step for row in rows if row.bytes_per_step is not None]
        if not moved_bytes or len(moved_bytes) < len(rows) or sum(moved_bytes) <= 0:
            return None
        moved.append(sum(moved_bytes) / len({row.gpu for row in rows}) / side.iterations)
    return moved[1] / moved[0]


def other_batch(factor: float) -> bool:
    """Return whether a :func:`batch_factor` is too far from 1 to call a step of A and one of B the same work."""
    return not 1 / OTHER_BATCH_FACTOR < factor < OTHER_BATCH_FACTOR


def work_ratio(a: Side, b: Side) -> float:
    """The work of a step of B in steps of A: the :func:`batch_factor` where it is another batch size without doubt,
    because the kernels take longer to match, with the same number types; else 1."""
    factor = batch_factor(a, b)
    if factor is None or not other_batch(factor):
        return 1.0
    compute = [_compute_s(side) for side in (a, b)]
    types = [_number_type(side) for side in (a, b)]
    if not all(compute) or types[0] != types[1]:
        return 1.0
    power = math.log(compute[1] / compute[0]) / math.log(factor)
    return factor if _BATCH_POWERS[0] <= power <= _BATCH_POWERS[1] else 1.0


def _compute_s(side: Side) -> float:
    parts = side.analysis.breakdown if side.analysis is not None else None
    return 0.0 if parts is None else parts.known.get("compute", 0.0) / side.iterations


def _number_type(side: Side) -> str | None:
    """That of most kernel time."""
    times: dict[str, float] = {}
    for gpu in side.analysis.gpus if side.analysis is not None else ():
        for name, time_s in (gpu.kernel_time_by_type or {}).items():
            times[name] = times.get(name, 0.0) + time_s
    return max(times, key=lambda name: times[name], default=None)


def same_phase(a: Side, b: Side) -> bool:
    """Return whether the steps of both are of training, of evaluation, or nobody knows."""
    return len({phase for side in (a, b) if (phase := _phase(side)) != "unknown"}) < 2


def _phase(side: Side) -> str:
    """The phase of the steps; for loops of PyTorch by what marks them."""
    if side.steps is None:
        return "unknown"
    anchor = side.steps.anchor
    return ("inference" if "without a backward pass" in anchor else
            "training" if "Optimizer.step" in anchor or "backward pass" in anchor else side.steps.phase)


def other_functions(a: Side, b: Side) -> tuple[str, str] | None:
    """The functions whose calls are the steps of A and of B, where they are not the same: one may be a part of the
    other, as ``add`` is of a whole update."""
    names = [name for side in (a, b) if side.steps is not None and (name := _function(side.steps.anchor))]
    return (names[0], names[1]) if len(names) == 2 and names[0] != names[1] else None


def _function(anchor: str) -> str:
    """Return the function's name, without the number that each tracing gives it; "" where calls of no function are the
    steps."""
    match = _CALLS.match(anchor)
    return _NUMBER.sub("", match[1] or match[2]) if match is not None else ""


def _steps(a: Side, b: Side) -> Iterator[Note]:
    steps = [side.steps for side in (a, b) if side.steps is not None]
    if len(steps) < 2:
        return
    per = a.iterations, b.iterations
    if max(per) > 1:
        yield Note("per_iteration", f"A step has {per[0]:.4g} iterations in A and {per[1]:.4g} in B: times and kernels "
                                    "are per iteration.")
    if not same_phase(a, b):
        yield Note("other_phase", f"A's steps are {_phase(a)}, B's {_phase(b)}: not the same work. gputop "
                                  "compares only the parts' shares of the step.")
    if (functions := other_functions(a, b)) is not None:
        yield Note("other_functions", f"A's steps are calls to {functions[0]}, and B's to {functions[1]}: one may be "
                                      "part of the other. Mark the steps (jax.profiler.StepTraceAnnotation, "
                                      "tf.profiler.experimental.Trace) in both, then compare again.")
    if drift_of(a, b).load >= OTHER_LOAD:
        used = [f"{cpus.others:.2g} of {cpus.allowed:.3g} CPUs in {name}" for name, side in (("A", a), ("B", b))
                if (cpus := cpus_of(side)) is not None]
        yield Note("other_load", f"Other processes used {' and '.join(used)}: this alone changes the times of a job "
                                 "that uses all of its CPUs.")
    low = [name for name, s in zip("AB", steps, strict=True) if s.confidence == "low"]
    if low:
        yield Note("unsure_steps", f"The steps of {' and '.join(low)} were found with low confidence: check that the "
                                   "steps of both sides are the same work.")
