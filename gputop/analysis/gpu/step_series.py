"""Series of a trace with one value for each step, for telling a change from the spread of the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from msgspec import Struct

from gputop.analysis.gpu.breakdown import PartsByGpu, breakdown_by_step
from gputop.analysis.gpu.collectives import by_operation, matched, of_gpus
from gputop.analysis.gpu.device_time import NO_LAUNCH, GpuTimeline, gpu_number, launch_delays_ns
from gputop.analysis.gpu.packed_series import PackedSeries
from gputop.analysis.steps.membership import step_of
from gputop.analysis.steps.model import Steps
from gputop.trace.intervals import coverage, subtract
from gputop.trace.kernel_names import classify
from gputop.trace.lookups import computes_on_cpu, numbered
from gputop.trace.model import F64, I64, Kind, Trace


class StepArrays(Struct, frozen=True):
    """One value per step, arrays of shape (steps,).

    ``parts`` are seconds by part of the breakdown. ``gpus`` holds by GPU (numbered as in
    :func:`~gputop.analysis.gpu.device_time.gpu_number`): ``busy``, ``compute``, ``collectives``,
    ``collectives_exposed``, ``copies`` and ``idle`` as shares of the step; ``kernels`` that start in it; and, NaN in
    steps without, ``launch_delay_s`` (median) and ``tensor_core_time`` (share of the time of compute kernels).
    ``waiting`` is the share of the collectives' time spent waiting for the last GPU, NaN in steps without; None where
    they cannot be matched across GPUs.
    """

    step_s: F64
    parts: Mapping[str, F64]
    gpus: Mapping[int, Mapping[str, F64]]
    waiting: F64 | None

    def packed(self) -> PackedSeries:
        return PackedSeries(
            self.step_s.tobytes(), {name: part.tobytes() for name, part in self.parts.items()},
            {gpu: {name: values.astype(float).tobytes() for name, values in figures.items()}
             for gpu, figures in self.gpus.items()},
            None if self.waiting is None else self.waiting.tobytes())

    @classmethod
    def unpacked(cls, packed: PackedSeries) -> StepArrays:
        """Raises ValueError where the lengths do not fit together."""
        count = len(np.frombuffer(packed.step_s, np.float64))

        def numbers(data: bytes) -> F64:
            figures = np.frombuffer(data, np.float64)
            if len(figures) != count:
                raise ValueError(f"{len(figures)} figures for {count} steps")
            return figures

        return cls(numbers(packed.step_s), {name: numbers(part) for name, part in packed.parts.items()},
                   {gpu: {name: numbers(values) for name, values in figures.items()}
                    for gpu, figures in packed.gpus.items()},
                   None if packed.waiting is None else numbers(packed.waiting))


def step_series(trace: Trace, steps: Steps, gpu_timelines: Sequence[GpuTimeline], by_gpu: PartsByGpu) -> StepArrays:
    """The series of a trace. Without a GPU in it, or with GPUs on which nothing ran, ``gpus`` is empty. ``by_gpu``:
    :func:`~gputop.analysis.gpu.breakdown.parts_by_gpu` of the steps."""
    start, end = steps.edges_ns.T
    readable = bool(gpu_timelines) or computes_on_cpu(trace)
    return StepArrays(
        step_s=(end - start) / 1e9,
        parts=breakdown_by_step(trace, by_gpu, steps.bounds_ns) if readable else {},
        gpus={gpu_number(trace, timeline.gpu): _of_gpu(trace, timeline, steps) for timeline in gpu_timelines},
        waiting=_waiting(trace, gpu_timelines, steps))


def _waiting(trace: Trace, gpu_timelines: Sequence[GpuTimeline], steps: Steps) -> F64 | None:
    """Ratio of waiting per step: 1 - transfer / summed time of the collectives that begin in it. See
    :mod:`gputop.analysis.gpu.collectives`."""
    device = trace.device
    summed, transfer = np.zeros((2, len(steps.bounds_ns)))
    for rows in by_operation(trace, of_gpus(gpu_timelines)[1]).values():
        same = matched(trace, [r for r in rows if len(r)])
        if isinstance(same, str):
            return None
        length = device.end_ns[same] - device.start_ns[same]
        step = step_of(device.start_ns[same].min(axis=1), steps)
        length, step = length[step >= 0], step[step >= 0]
        summed += np.bincount(step, weights=length.sum(axis=1), minlength=len(summed))
        transfer += np.bincount(step, weights=length.min(axis=1) * length.shape[1], minlength=len(summed))
    with np.errstate(invalid="ignore"):
        return 1 - transfer / summed if summed.any() else None


def _of_gpu(trace: Trace, timeline: GpuTimeline, steps: Steps) -> dict[str, F64]:
    start, end = steps.edges_ns.T
    length = end - start
    shares = {name: coverage(spans, start, end) / length for name, spans in (
        ("busy", timeline.busy), ("compute", timeline.compute), ("collectives", timeline.collectives),
        ("collectives_exposed", subtract(timeline.collectives, timeline.compute)), ("copies", timeline.copies))}
    step = step_of(timeline.start_ns[places := timeline.kernel_places], steps)
    kernels, step = (timeline.events.start + places)[step >= 0], step[step >= 0]
    return {
        **shares, "idle": 1 - shares["busy"],
        "kernels": np.bincount(step, minlength=len(length)).astype(float),
        "launch_delay_s": _launch_delay(trace, kernels, step, len(length)),
        "tensor_core_time": _tensor_share(trace, kernels, step, len(length)),
    }


def _launch_delay(trace: Trace, kernels: I64, step: I64, count: int) -> F64:
    """Median per step of a kernel's start after its launching call. See
    :func:`~gputop.analysis.gpu.device_time.gpu_use`."""
    delay_ns = launch_delays_ns(trace, kernels, trace.device.start_ns[kernels])
    with_launch = delay_ns != NO_LAUNCH
    delay, step = delay_ns[with_launch] / 1e9, step[with_launch]
    edges = np.searchsorted(step, np.arange(count + 1))  # events come by start, so steps in order
    medians = np.array([np.median(delay[a:b]) if b > a else np.nan for a, b in pairwise(edges.tolist())])
    return np.where(medians >= 0, medians, np.nan)


def _tensor_share(trace: Trace, kernels: I64, step: I64, count: int) -> F64:
    """NaN throughout where no kernel's name tells, as in :func:`~gputop.analysis.gpu.device_time.kernel_types`."""
    device = trace.device
    compute = device.kind[kernels] == Kind.COMPUTE
    rows, step = kernels[compute], step[compute]
    length = device.end_ns[rows] - device.start_ns[rows]
    names, which = numbered(device.name[rows])
    tensor = [classify(trace.names[n] if n >= 0 else "").tensor_core for n in names.tolist()]
    if all(t is None for t in tensor):
        return np.full(count, np.nan)
    on = np.array([bool(t) for t in tensor])[which]
    total = np.bincount(step, weights=length, minlength=count)
    with np.errstate(invalid="ignore"):
        return np.bincount(step, weights=length * on, minlength=count) / total
