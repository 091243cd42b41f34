"""The history of the node: samples go in, slices of time and windows of readings come out.

Fixed memory per GPU (1.6 MB when full, see ``benchmarks/history.py``), from single
samples of the last minutes to one slice per minute of the last day. One thread appends; any
thread may read meanwhile: a short lock keeps each result consistent.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain

from msgspec import Struct, field

from gputop.core.metrics import GPU_METRICS, LANE_METRICS, TENSOR_FLOP_PARTS, TENSOR_FLOP_UTIL
from gputop.core.samples import OK, GpuSample, HostSample, NodeSample, Reading
from gputop.telemetry.ring_buffers import Lane, LaneColumns, Rings, Series, SliceGrid, lane_of

__all__ = ["RAW_SAMPLES", "TIERS", "History", "Lane", "Series"]

RAW_SAMPLES = 12_000  # 20 minutes at 10 Hz; an hour's at most
TIERS = ((10.0, 600), (60.0, 1440))  # seconds, slices kept: 100 minutes, 24 h

HOST_HISTORY_POINTS = 3000  # 5 minutes at 10 Hz

_REASONS_KNOWN = 1  # flag: the clock event reasons of this sample could be read
_REASONS = 31  # clock event reasons that can be stored: one bit each
_LARGEST = 3.4e38  # number that the tables hold (IEEE 754, 32 bits)


class _RingSlot(Struct, frozen=True):
    rings: Rings
    gpu: int  # row of the GPU there


class HostHistoryPoint(Struct, frozen=True):
    """Figures that are kept of one host sample: None where a figure could not be read. ``process_…`` by PID."""

    time_s: float
    cpu_ratio: float | None
    full_cores: int | None  # see HostSample.full_cores
    process_cores: Mapping[int, float]
    # For processes whose control group has a CPU limit: cores used / cores granted, and the share of scheduler
    # periods in which the quota ran out.
    process_granted_ratio: Mapping[int, float] = field(default_factory=dict)
    process_throttled_ratio: Mapping[int, float] = field(default_factory=dict)
    # Of RDMA ports by name: bytes/s received and sent, and retransmits since the driver was loaded.
    rdma_bytes_per_s: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    rdma_retransmits: Mapping[str, float] = field(default_factory=dict)
    iowait_ratio: float | None = None


class History:
    """Readings of all GPUs over time.

    ``metrics`` are the ids kept, ``raw_samples`` the most single samples kept, ``tiers``
    pairs of slice length in seconds and number of slices, finest first. A GPU is addressed by
    its uuid; one that was never seen has no readings.

    A missing reading is NaN, never 0. When the clock is set back, samples later than the new time are dropped.
    """

    def __init__(self, metrics: Sequence[str] = LANE_METRICS, raw_samples: int = RAW_SAMPLES,
                 tiers: Sequence[tuple[float, int]] = TIERS) -> None:
        constant = [m for m in metrics if isinstance(GPU_METRICS[m].full_scale, (int, float))]
        scaled = [m for m in metrics if isinstance(GPU_METRICS[m].full_scale, str)]
        rest = [m for m in metrics if GPU_METRICS[m].full_scale is None]
        self._columns = LaneColumns(
            (*constant, *scaled, *rest),
            tuple(float(GPU_METRICS[m].full_scale or 0) for m in constant),
            tuple(str(GPU_METRICS[m].full_scale) for m in scaled))
        self._column = {metric: i for i, metric in enumerate(self._columns.ids)}
        columns = self._columns
        self._no_values, self._no_scales = [math.nan] * len(columns.ids), [math.nan] * len(columns.scale_ids)
        # Where the estimate of the tensor cores' FLOPs goes, and what it is made of.
        self._flop_util = (*(self._column[m] for m in (TENSOR_FLOP_UTIL, *TENSOR_FLOP_PARTS[:2])),
                           columns.scale_ids.index(TENSOR_FLOP_PARTS[2])) if self._column.keys() >= {
                               TENSOR_FLOP_UTIL, *TENSOR_FLOP_PARTS[:2]} else None
        self._raw_samples = raw_samples
        self._tiers = tuple(tiers)
        self._lock = threading.Lock()
        self._rings: list[Rings] = []  # one for the GPUs of the first sample, one for those of each later arrival
        self._slots: dict[str, _RingSlot] = {}
        self._reason_bits: dict[str, int] = {}
        self._held_since: dict[str, dict[int | None, float]] = {}
        self._last_ok_s: dict[str, float] = {}
        self._host: deque[HostHistoryPoint] = deque(maxlen=HOST_HISTORY_POINTS)
        self.newest_s: float | None = None  # Unix time; None before the first sample
        self.version = 0  # grows with each sample, so that a view knows whether anything changed

    # -- writing ------------------------------------------------------------------------------

    def append(self, sample: NodeSample) -> None:
        """Add one sample. Raises ValueError for a time that is not finite."""
        if not math.isfinite(sample.time_s):
            raise ValueError(f"the time of a sample must be finite, not {sample.time_s}")
        with self._lock:
            new = list(dict.fromkeys(g.info.uuid for g in sample.gpus if g.info.uuid not in self._slots))
            if new:  # rings of their own, so that no old array is copied
                rings = Rings(len(new), self._columns, self._raw_samples, self._tiers)
                self._rings.append(rings)
                self._slots.update((uuid, _RingSlot(rings, i)) for i, uuid in enumerate(new))
            for rings in self._rings:
                self._append_to(rings, sample)
            for gpu in sample.gpus:
                if gpu.state == OK:
                    self._last_ok_s[gpu.info.uuid] = sample.time_s
                    self._track_processes(gpu, sample.time_s)
            self._append_host(sample)
            self.newest_s = sample.time_s
            self.version += 1

    def _append_to(self, rings: Rings, sample: NodeSample) -> None:
        columns = self._columns
        values, scales, flags = [self._no_values] * rings.gpus, [self._no_scales] * rings.gpus, [0] * rings.gpus
        for gpu in sample.gpus:
            slot = self._slots[gpu.info.uuid]
            if slot.rings is rings:
                numbers = values[slot.gpu] = _numbers(gpu.readings, columns.ids)
                full = scales[slot.gpu] = [v if v > 0 else math.nan  # no share of nothing
                                           for v in _numbers(gpu.readings, columns.scale_ids)]
                flags[slot.gpu] = self._flags_of(gpu)
                if self._flop_util is not None:
                    # As GpuSample has it: no sample needs to hold it for that.
                    util, active, clock, highest = self._flop_util
                    share = numbers[active] * numbers[clock] / full[highest]
                    numbers[util] = 1.0 if share > 1 else share
        rings.append(sample.time_s, [*chain.from_iterable(values)], [*chain.from_iterable(scales)], flags)

    def _flags_of(self, gpu: GpuSample) -> int:
        if gpu.state != OK or gpu.clock_events_reason is not None:
            return 0
        flags = _REASONS_KNOWN
        for reason in gpu.clock_event_reasons:
            bit = self._reason_bits.get(reason)
            if bit is None and len(self._reason_bits) < _REASONS:
                bit = self._reason_bits[reason] = 1 << (len(self._reason_bits) + 1)
            flags |= bit or 0
        return flags

    def _track_processes(self, gpu: GpuSample, time_s: float) -> None:
        if gpu.processes_reason is not None:
            return  # a list that cannot be read does not mean that the processes are gone
        before = self._held_since.get(gpu.info.uuid, {})
        pids: list[int | None] = [p.pid for p in gpu.processes if "C" in p.kind]
        self._held_since[gpu.info.uuid] = {pid: min(before.get(pid, time_s), time_s) for pid in pids or [None]}

    def _append_host(self, sample: NodeSample) -> None:
        while self._host and self._host[-1].time_s >= sample.time_s:
            self._host.pop()
        host = sample.host
        cores = {p.pid: p.cpu_cores.value for p in sample.processes if p.cpu_cores.value is not None}
        granted: dict[int, float] = {}
        throttled: dict[int, float] = {}
        for p in sample.processes:
            if p.cgroup is not None and (limit := p.cgroup["cpu_limit_cores"].value):
                for ratios, r, scale in ((granted, p.cgroup["cpu_used_cores"], limit),
                                         (throttled, p.cgroup["cpu_throttled_ratio"], 1.0)):
                    if r.value is not None:
                        ratios[p.pid] = r.value / scale
        self._host.append(HostHistoryPoint(sample.time_s, host["cpu_ratio"].value,
                                   host.full_cores if host.core_ratios else None, cores, granted, throttled,
                                   *_adapters(host), host["iowait_ratio"].value))

    # -- reading ------------------------------------------------------------------------------

    @property
    def oldest_s(self) -> float | None:
        """Unix time of the oldest data at any resolution; None before the first sample."""
        with self._lock:
            return min((rings.oldest_s for rings in self._rings), default=None)

    @property
    def uuids(self) -> tuple[str, ...]:
        """All GPUs ever seen, in the order of their first appearance."""
        return tuple(self._slots)

    def lane(self, gpu: str, metric: str, *, end_s: float, slice_s: float, slices: int,
             full_scale: float | None = None) -> Lane:
        """``slices`` slices of ``slice_s`` seconds; the last one holds the moment just before ``end_s``.

        Slices start at whole multiples of ``slice_s`` (Unix time), so a picture scrolls by whole slices. The finest
        resolution that covers the whole range is used, or a coarser one that gives the same numbers; a slice shorter
        than the stored ones shows the stored slice it lies in. ``full_scale`` sets 100% for a metric without a scale of
        its own (default: the largest reading in view). Raises KeyError for a metric that is not kept, ValueError for
        slices shorter than 0.1 s or fewer than one.
        """
        if not slice_s >= 0.1 or slices < 1:
            raise ValueError(f"cannot cut history into {slices} slices of {slice_s} s")
        column = self._column[metric]
        grid = SliceGrid.ending(end_s, slice_s, slices)
        slot = self._slots.get(gpu)
        if slot is None:
            return lane_of(grid, [[]] * slices, None)
        with self._lock:
            return slot.rings.lane(slot.gpu, column, grid, full_scale)

    def window(self, gpu: str, metric: str, seconds: float, *, end_s: float | None = None) -> tuple[Series, Series]:
        """Times and readings of the single samples in the ``seconds`` before ``end_s`` (default: the newest).

        Copies. NaN where a sample had no reading; shorter where single samples are no longer kept.
        """
        column = self._column[metric]
        slot = self._slots.get(gpu)
        if slot is None or self.newest_s is None:
            return [], []
        end_s = self.newest_s if end_s is None else end_s
        with self._lock:
            return (slot.rings.samples.times(end_s - seconds, end_s),
                    slot.rings.samples.values(slot.gpu, column, end_s - seconds, end_s))

    def windows(self, metric: str, seconds: float, *, end_s: float | None = None) -> tuple[Series, list[Series]]:
        """Windows as :meth:`window` of all GPUs at once: times[n], values[gpu][n] in the order of :attr:`uuids`.

        ``metric`` may also be the full scale of another one, such as ``pcie_max_bytes_per_s``.
        """
        scale = metric not in self._column
        if scale and metric not in self._columns.scale_ids:
            raise KeyError(metric)
        column = self._columns.scale_ids.index(metric) if scale else self._column[metric]
        if self.newest_s is None or not self._rings:  # no sample yet, or no GPU
            return [], []
        end_s = self.newest_s if end_s is None else end_s
        with self._lock:
            # All rings got every sample since they began: a younger ring has the last of these times. It may hold more
            # than an older one, whose rows were few when the samples came slowly.
            times = self._rings[0].samples.times(end_s - seconds, end_s)
            values = []
            for rings in self._rings:
                for part in rings.samples.all_values(column, end_s - seconds, end_s, scale):
                    lacking = len(times) - len(part)
                    values.append([math.nan] * lacking + part[max(0, -lacking):])
        return times, values

    def slice_means(self, metric: str, slice_s: float, slices: int) -> tuple[float, list[Series]]:
        """The Unix time at which the newest whole slice of ``slice_s`` seconds ended, and the means[gpu][n] of the
        ``slices`` until then, in the order of :attr:`uuids`; NaN without a reading. ``slice_s`` is that of a tier.

        It takes a fraction of what :meth:`lane` takes.
        """
        column = self._column[metric]
        if self.newest_s is None:
            return 0.0, []
        end = math.floor(self.newest_s / slice_s)
        with self._lock:
            return end * slice_s, [means for rings in self._rings
                                   for means in rings.tier_means(column, slice_s, range(end - slices, end))]

    def host(self, seconds: float, *, end_s: float | None = None) -> list[HostHistoryPoint]:
        """The host history of the ``seconds`` before ``end_s`` (default: the newest), oldest first."""
        with self._lock:
            if end_s is None:
                end_s = self.newest_s if self.newest_s is not None else -math.inf
            out = []
            for point in reversed(self._host):
                if point.time_s < end_s - seconds:
                    break
                if point.time_s <= end_s:
                    out.append(point)
        return out[::-1]

    def host_cpu_lane(self, *, end_s: float, slice_s: float, slices: int) -> Lane:
        """Lane as :meth:`lane`, of the busy share of the host's CPUs: as far back as single samples of the host are
        kept."""
        grid = SliceGrid.ending(end_s, slice_s, slices)
        values: list[Series] = [[] for _ in range(slices)]
        with self._lock:
            for point in reversed(self._host):
                i = math.floor(point.time_s / slice_s) - grid.first
                if i < 0:
                    break
                if i < slices and point.cpu_ratio is not None:
                    values[i].append(point.cpu_ratio)
        return lane_of(grid, values, 1.0)

    def clock_event_share(self, gpu: str, reasons: Sequence[str], seconds: float) -> float | None:
        """Share of the last ``seconds``' samples in which any of these clock event reasons was active.

        None where the reasons could not be read in that time.
        """
        slot = self._slots.get(gpu)
        if slot is None or self.newest_s is None:
            return None
        with self._lock:
            wanted = sum(self._reason_bits.get(reason, 0) for reason in set(reasons))
            flags = slot.rings.samples.flags(slot.gpu, self.newest_s - seconds, self.newest_s)
        judged = len(flags) - flags.count(0)
        # Unknown flags are 0; the others have few values.
        return sum(flags.count(active) for active in set(flags) if active & wanted) / judged if judged else None

    def held_since(self, gpu: str, pid: int | None) -> float | None:
        """Unix time since which compute process ``pid`` has been on this GPU without a break.

        ``pid`` None: since when no compute process has been there. None where that is not the case now.
        """
        with self._lock:
            return self._held_since.get(gpu, {}).get(pid)

    def last_ok_s(self, gpu: str) -> float | None:
        """Unix time of the GPU's last good sample; None if it had none."""
        return self._last_ok_s.get(gpu)


def _numbers(readings: Mapping[str, Reading], ids: Sequence[str]) -> Series:
    """Values of the readings, NaN where there is none."""
    out = []
    for metric in ids:
        reading = readings.get(metric)
        value = None if reading is None else reading.value
        out.append(value if value is not None and -_LARGEST < value < _LARGEST else math.nan)
    return out


def _adapters(host: HostSample) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
    """Traffic and retransmits of the RDMA ports, as far as they are known."""
    traffic: dict[str, tuple[float, float]] = {}
    retransmits: dict[str, float] = {}
    for adapter in host.adapters:
        received, sent = adapter["rdma_rx_bytes_per_s"].value, adapter["rdma_tx_bytes_per_s"].value
        if received is not None and sent is not None:
            traffic[adapter.name] = received, sent
        if (again := adapter["rdma_retransmits"].value) is not None:
            retransmits[adapter.name] = again
    return traffic, retransmits
