"""The samples of a job's GPUs while it was captured, out of the history, to lie beside the trace."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from gputop.core.captured_samples import MAX_VALUES, CounterLane, GpuCounters
from gputop.core.errors import GputopError
from gputop.core.metrics import GPU_METRICS
from gputop.core.samples import NodeSample
from gputop.profiler.capture.records import CaptureRecord, Server
from gputop.session.gpu_numbers import local, numbers_of
from gputop.sources.base import Source
from gputop.text.units import percent
from gputop.text.units import seconds as seconds_text

if TYPE_CHECKING:
    from gputop.analysis.results import GpuUse
    from gputop.telemetry.history import History

_LATE_S = 20.0  # time that a driver may take to start
_BEFORE_S = 15.0  # of the time before a recording: a probe of PyTorch takes up to ten seconds
# A recording that lengthens the host's launches by less is not worth a word; below so much activity is noise.
_SLOWED, _LEAST_ACTIVITY = 1.2, 0.002
_FEWEST, _LACKING = 2, 0.15  # samples, and by how much of the time more. gputop's own figures
METRICS = ("sm_active", "gpu_util", "tensor_active", "tensor_flop_util", "dram_active", "pcie_rx_bytes_per_s",
           "pcie_tx_bytes_per_s", "nvlink_rx_bytes_per_s", "nvlink_tx_bytes_per_s", "power_w", "sm_clock_hz")


def counters_of(record: CaptureRecord, servers: Sequence[Server], sample: NodeSample | None, history: History | None,
                interval_s: float) -> GpuCounters:
    """The samples of the recorded time, and a little more, of the GPUs in the trace; or why there are none."""
    elsewhere = [server.address for server in servers if not local(server)]
    numbers = numbers_of(record, servers, sample)
    if elsewhere:
        return GpuCounters(reason=f"{elsewhere[0]} is on another machine, whose GPUs gputop does not sample")
    if sample is None or history is None:
        return GpuCounters(reason="no GPU was sampled during the capture")
    if not sample.gpus:
        return GpuCounters(reason="gputop cannot read any GPU on that machine")
    if numbers.reason is not None:
        return GpuCounters(reason=f"gputop cannot match them to the GPUs of this machine: {numbers.reason}")
    # A trace may be of the time before it was asked for; the sample after it tells of its last moments.
    seconds, end_s = record.took_s + record.asked_s + _BEFORE_S + 3 * interval_s, record.time_s + interval_s
    uuids = {g.info.index: g.info.uuid for g in sample.gpus if g.info.mig is None}
    gpus = {job: uuids[node] for job, node in sorted(numbers.by_ordinal.items()) if node in uuids}
    all_times = [history.window(uuid, METRICS[0], seconds, end_s=end_s)[0] for uuid in gpus.values()]
    times: list[float] = max(all_times, key=len, default=[])
    lanes = {job: _lanes(history, uuid, end_s, seconds, len(times)) for job, uuid in gpus.items()}
    if not times or not any(lanes.values()):
        return GpuCounters(reason="no GPU was sampled during the capture")
    kept = math.ceil(len(times) / max(1, MAX_VALUES // sum(map(len, lanes.values()))))  # of many each n-th
    return GpuCounters(
        times_s=tuple(round(time_s, 4) for time_s in times[::kept]), interval_s=interval_s * kept,
        gpus={job: {metric: CounterLane(lane.values[::kept], lane.full_scale) for metric, lane in lanes_of_gpu.items()}
              for job, lanes_of_gpu in lanes.items()})


def remarks_of_activity(counters: GpuCounters, record: CaptureRecord, began_s: float) -> tuple[str, ...]:
    """Sentences that the activity of a job's GPUs, by their driver, adds to its trace: that the recording slowed the
    job, and that the trace lacks work of a GPU. ``began_s`` is the Unix time at which the capture was asked for."""
    if record.analysis is None or record.analysis.trace.start_s is None:
        return ()
    begin_s = record.analysis.trace.start_s
    window_s = begin_s, begin_s + record.analysis.trace.window_s
    activity = {gpu: _activity(counters.times_s, lanes["sm_active"], began_s, window_s)
                for gpu, lanes in counters.gpus.items() if "sm_active" in lanes}
    return (*_slowed(list(activity.values()), record.step_s), *_lacking(activity, record.analysis.gpus))


class _Activity(Struct, frozen=True):
    """Samples of one GPU's SM activity (ratio): from before the capture was asked for, those that the recording at
    least half fills, and those within it."""

    before: list[float]
    meanwhile: list[float]
    within: list[float]


def _activity(times_s: Sequence[float | None], lane: CounterLane, began_s: float,
              window_s: tuple[float, float]) -> _Activity:
    activity = _Activity([], [], [])
    begin_s, end_s = window_s
    for start_s, time_s, value in zip(times_s, times_s[1:], lane.values[1:], strict=False):
        if value is None or start_s is None or time_s is None:
            continue
        if time_s <= began_s:
            activity.before.append(value)
        elif min(time_s, end_s) - max(start_s, begin_s) >= (time_s - start_s) / 2:
            activity.meanwhile.append(value)
            if begin_s <= start_s and time_s <= end_s:
                activity.within.append(value)
    return activity


def _slowed(gpus: Sequence[_Activity], step_s: float | None) -> Iterator[str]:
    """Words for how much the recording slowed the job.

    The GPUs do the same work in each step, so where the host's launches bound it they are the less active, the longer
    its steps: 4.5% before and 2.6% in a recording whose steps took 11.2 ms and then 18 to 26 (PyTorch, H200). A sample
    that the recording only half fills shows less than that, hence "at most".
    """
    before = [value for gpu in gpus for value in gpu.before]
    meanwhile = [value for gpu in gpus for value in gpu.meanwhile]
    if not before or not sum(meanwhile):
        return
    activity_before, activity = sum(before) / len(before), sum(meanwhile) / len(meanwhile)
    if activity_before < max(_LEAST_ACTIVITY, _SLOWED * activity):
        return
    times = activity_before / activity
    shorter = f". At that time, a step took at most about {seconds_text(step_s / times)}" if step_s else ""
    yield f"the recording slowed the job: in the seconds before it, the GPUs were {times:.1f} times as active{shorter}"


def _lacking(activity: Mapping[int, _Activity], gpus: Sequence[GpuUse]) -> Iterator[str]:
    """Words for work of a GPU that the trace lacks: an SM is active only while a kernel runs."""
    for gpu in gpus:
        within = activity[gpu.gpu].within if gpu.gpu in activity else []
        if len(within) >= _FEWEST and sum(within) / len(within) >= gpu.busy + _LACKING:
            yield (f"GPU {gpu.gpu} was active {percent(sum(within) / len(within))} of the time according to the driver "
                   f"but only {percent(gpu.busy)} according to the trace. Either the profiler lost kernels or another "
                   "process uses that GPU. Its idle time in this trace is not reliable")


def _lanes(history: History, uuid: str, end_s: float, seconds: float, count: int) -> dict[str, CounterLane]:
    """Measurements of one GPU in the ``count`` samples; coarse utilization where there is nothing better."""
    lanes = {}
    for metric in METRICS:
        if metric == "gpu_util" and "sm_active" in lanes:
            continue
        values = history.window(uuid, metric, seconds, end_s=end_s)[1]
        if len(values) == count and any(value == value for value in values):
            scale = GPU_METRICS[metric].full_scale
            if isinstance(scale, str):
                scale = history.lane(uuid, metric, end_s=end_s, slice_s=seconds, slices=1).full_scale
            lanes[metric] = CounterLane(tuple(float(f"{v:.4g}") if v == v else None for v in values), scale)
    return lanes


class CounterWatch:
    """Samples the GPUs during a capture without a monitor. A source that fails is a reason, no error."""

    def __init__(self, source: Source, interval_s: float) -> None:
        from gputop.telemetry.history import History
        from gputop.telemetry.sampler import Sampler

        self._interval_s = interval_s
        self.sample: NodeSample | None = None
        self.history = History()
        self._changed = threading.Condition()
        self._first_s = 0.0
        self._sampler = Sampler(source, interval_s, self._add, self._failed)

    def _add(self, sample: NodeSample) -> None:
        self.history.append(sample)
        with self._changed:
            self._first_s = self._first_s or sample.time_s
            self.sample = sample
            self._changed.notify_all()

    def _failed(self, error: GputopError) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until it has sampled for so long, or cannot."""
        def sampled() -> bool:
            return self._sampler.failure is not None or (
                self.sample is not None and self.sample.time_s - self._first_s >= seconds)

        with self._changed:
            self._changed.wait_for(sampled, seconds + _LATE_S)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._sampler.start()
        try:
            yield
        finally:
            self._sampler.stop()

    def counters(self, record: CaptureRecord, servers: Sequence[Server]) -> GpuCounters:
        if self._sampler.failure is not None:
            return GpuCounters(reason=f"gputop could not sample any GPU: {self._sampler.failure.message}")
        return counters_of(record, servers, self.sample, self.history, self._interval_s)
