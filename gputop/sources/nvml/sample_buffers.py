"""The backfill of a few seconds, from the samples that the driver keeps anyway.

``nvmlDeviceGetSamples`` holds about 14 s of utilization, 200 ms apart, and 2.4 s of power,
20 ms apart. All other metrics of that time are missing.
"""

from __future__ import annotations

import ctypes
import math
import queue
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gputop.core.metrics import GPU_METRICS
from gputop.core.samples import GpuInfo, GpuSample, HostSample, NodeSample, Reading
from gputop.sources.nvml import status
from gputop.sources.nvml.calls import start_nvml_thread
from gputop.sources.nvml.plausibility import implausible_reason

DEADLINE_S = 0.3  # for all GPUs together: one that hangs is left out
MAX_AGE_S = 60.0  # older time stamps come from another clock
SOURCE = "NVML samples"
BEFORE_START = "before gputop was started"

# Metric, NVML's number of the samples (nvmlSamplingType_t), factor to the metric's unit, coarse.
_KINDS = (("power_w", 0, 1e-3, False), ("gpu_util", 1, 1e-2, True))
_COARSE = frozenset(metric for metric, _, _, coarse in _KINDS if coarse)
# nvmlValueType_t, and the member of the union that holds it.
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal")

Samples = Sequence[tuple[float, float]]  # (Unix time, value in the metric's unit), oldest first


def read_sample_buffers(
    nvml: Any, handles: Mapping[str, Any], now_s: float, clock: Callable[[], float] = time.monotonic
) -> dict[str, dict[str, Samples]]:
    """The driver's samples of each GPU: UUID to metric to samples.

    ``handles`` are NVML's by UUID. Each GPU is asked in a thread of its own; those that have
    not answered after ``DEADLINE_S`` are left out, and so is what a GPU refuses.
    """
    answers: queue.SimpleQueue[tuple[str, dict[str, Samples]]] = queue.SimpleQueue()

    def ask(uuid: str, handle: Any) -> Callable[[], None]:
        return lambda: answers.put((uuid, _samples(nvml, handle, now_s)))

    asked = 0
    for uuid, handle in handles.items():
        try:
            start_nvml_thread(nvml, "past", ask(uuid, handle))
        except nvml.NVMLError:
            continue
        asked += 1
    buffers: dict[str, dict[str, Samples]] = {}
    until_s = clock() + DEADLINE_S
    while len(buffers) < asked:
        try:
            uuid, samples = answers.get(timeout=max(0.0, until_s - clock()))
        except queue.Empty:
            break
        buffers[uuid] = samples
    return buffers


def _samples(nvml: Any, handle: Any, now_s: float) -> dict[str, Samples]:
    by_metric: dict[str, Samples] = {}
    for metric, kind, factor, _ in _KINDS:
        try:
            values = _read(nvml, handle, kind)
        except nvml.NVMLError as error:
            if error.value in status.DEVICE_GONE:
                return {}
            continue
        good = [
            (stamp_us / 1e6, value * factor)
            for stamp_us, value in values
            if now_s - MAX_AGE_S < stamp_us / 1e6 <= now_s and implausible_reason(metric, value * factor) is None
        ]
        if good:
            by_metric[metric] = sorted(good)
    return by_metric


def _read(nvml: Any, handle: Any, kind: int) -> list[tuple[int, float]]:
    """(microseconds of Unix time, value) of one kind of samples. Raises NVMLError."""
    function = nvml._nvmlGetFunctionPointer("nvmlDeviceGetSamples")
    value_type, count = ctypes.c_int(), ctypes.c_uint()

    def call(room: Any) -> None:
        code = function(
            handle, kind, ctypes.c_ulonglong(0), ctypes.byref(value_type), ctypes.byref(count), room
        )
        if code:
            raise nvml.NVMLError(code)

    call(None)
    size = min(count.value, 10_000)  # more than any driver keeps
    room = (nvml.c_nvmlSample_t * size)()
    count.value = size
    call(room)
    if not 0 <= value_type.value < len(_MEMBERS):
        return []
    member = _MEMBERS[value_type.value]
    values = [(room[i].timeStamp, float(getattr(room[i].sampleValue, member))) for i in range(min(count.value, size))]
    return [(stamp, value) for stamp, value in values if math.isfinite(value)]


def backfill_samples(
    buffers: Mapping[str, Mapping[str, Samples]],
    infos: Sequence[GpuInfo],
    now_s: float,
    interval_s: float,
    hostname: str,
    label: str,
    gpus_present: int | None,
) -> list[NodeSample]:
    """``buffers`` as samples of the node ``interval_s`` apart, the last one an interval before ``now_s``, oldest first.

    A value is the mean of the driver's samples in the interval before it. It is missing where they do not
    cover the interval; GPUs without any are left out.
    """
    series = {
        (uuid, metric): _Series(samples) for uuid, metrics in buffers.items() for metric, samples in metrics.items()
    }
    if not series:
        return []
    count = int((now_s - min(one.since_s for one in series.values())) / interval_s)
    host = HostSample.missing(hostname, BEFORE_START)
    samples: list[NodeSample] = []
    for intervals_back in range(count, 0, -1):
        end_s = now_s - intervals_back * interval_s
        gpus = tuple(
            _gpu_sample(info, {metric: one.mean(end_s - interval_s, end_s)
                               for (uuid, metric), one in series.items() if uuid == info.uuid})
            for info in infos
            if info.uuid in buffers
        )
        if samples or any(reading.value is not None for gpu in gpus for reading in gpu.readings.values()):
            samples.append(
                NodeSample(end_s, gpus, host, (), interval_s if samples else None, label, gpus_present=gpus_present)
            )
    return samples


class _Series:
    """The samples of one metric of one GPU."""

    def __init__(self, samples: Samples) -> None:
        self.times = [t for t, _ in samples]
        self.values = [value for _, value in samples]
        gaps = [b - a for a, b in zip(self.times, self.times[1:], strict=False)]
        # A sample covers the time since the one before.
        self.since_s = self.times[0] - (statistics.median(gaps) if gaps else 0.0)

    def mean(self, start_s: float, end_s: float) -> float | None:
        """Mean of the samples after ``start_s`` up to ``end_s``; None where they do not cover it."""
        first, last = bisect_right(self.times, start_s), bisect_right(self.times, end_s)
        if first == last or start_s < self.since_s - 1e-3:
            return None
        return sum(self.values[first:last]) / (last - first)


def _gpu_sample(info: GpuInfo, values: Mapping[str, float | None]) -> GpuSample:
    readings = {}
    for metric, value in values.items():
        unit = GPU_METRICS[metric].unit
        readings[metric] = (
            Reading.missing(unit, "the driver kept no sample of this time", SOURCE)
            if value is None
            else Reading(value, unit, SOURCE, None, metric in _COARSE)
        )
    return GpuSample(
        info, readings, processes_reason=BEFORE_START, clock_events_reason=BEFORE_START, message=BEFORE_START,
        xids_reason=BEFORE_START,
    )
