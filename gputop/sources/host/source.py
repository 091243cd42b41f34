"""The host beside the GPUs: CPU, memory, disks, network, RDMA, and the processes that hold GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gputop.core.samples import GpuSample, HostSample, ProcessSample, Reading, missing_of, reading_of
from gputop.sources.host.cpu import CpuTimes, core_ratios, cpu_limit, read_times, shares
from gputop.sources.host.gpu_processes import GpuProcessTable
from gputop.sources.host.proc_files import FIRST
from gputop.sources.host.rdma import RdmaPorts
from gputop.text.units import printable

SOURCE = "psutil"
CPU_SOURCE = "/proc/stat"
PERIOD_S = 0.45  # a sample costs half a millisecond; a little under half a second, so that jitter does not skip one
CORES_PERIOD_S = 0.9  # the kernel counts in ticks of 10 ms: over a shorter time one core's share is mostly rounding
_NO_DISK = "the kernel does not report disk counters here"
_NO_NETWORK = "no network interface except loopback"


class PsutilHost:
    """Satisfies :class:`gputop.sources.base.HostProbe`. Used by one thread.

    Disk and network count only physical devices, where there are any: bytes through a RAID, a bond or a bridge would be
    counted again on each of its members. In a container, which has none, every interface except loopback counts.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, root: Path = Path("/")) -> None:
        import psutil

        self._psutil = psutil
        self._clock = clock
        self._root = root
        self._hostname = os.uname().nodename
        self._cpu: CpuTimes | None = None
        self._cores_before: tuple[float, CpuTimes] | None = None  # monotonic seconds, counters
        self._core_ratios: tuple[float, ...] = ()
        self._counts: dict[str, tuple[float, int]] = {}  # metric -> (monotonic seconds, bytes)
        self._physical: dict[tuple[str, str], bool] = {}
        self._processes = GpuProcessTable(clock, root / "proc")
        self._rdma = RdmaPorts(clock, root)
        self._last: tuple[float, HostSample] | None = None
        self.watched_pids: tuple[int, ...] = ()  # told of although they hold no GPU; replaced by any thread

    def read(self, now_s: float) -> HostSample:
        """The last sample again, between the periods."""
        clock_s = self._clock()
        if self._last is not None and 0 <= clock_s - self._last[0] < PERIOD_S:
            return self._last[1]
        readings, cpu_count = self._cpu_readings(clock_s)
        memory, reason = _ask(self._psutil.virtual_memory)
        for metric, used in (("memory_used_bytes", True), ("memory_total_bytes", False)):
            readings[metric] = missing_of(metric, reason, SOURCE) if memory is None else reading_of(
                metric, memory.total - memory.available if used else memory.total, SOURCE)
        disks, reason = _ask(self._psutil.disk_io_counters, perdisk=True, nowrap=False)
        disks = self._physical_of("block", disks or {})
        for metric, count in (("disk_read_bytes_per_s", "read_bytes"), ("disk_write_bytes_per_s", "write_bytes")):
            readings[metric] = self._rate(metric, disks, count, reason or _NO_DISK)
        cards, reason = _ask(self._psutil.net_io_counters, pernic=True, nowrap=False)
        cards = self._physical_of("class/net", {name: card for name, card in (cards or {}).items() if name != "lo"})
        for metric, count in (("net_rx_bytes_per_s", "bytes_recv"), ("net_tx_bytes_per_s", "bytes_sent")):
            readings[metric] = self._rate(metric, cards, count, reason or _NO_NETWORK)
        own_group = self._processes.cgroups.own()
        top, why_none = self._processes.node.top()
        sample = HostSample(self._hostname, readings, cpu_count, self._core_ratios, cpu_limit(own_group, cpu_count),
                            own_group, top, why_none, self._rdma.read())
        self._last = clock_s, sample
        return sample

    def processes(self, now_s: float, gpus: Sequence[GpuSample]) -> tuple[ProcessSample, ...]:
        """The processes that ``gpus`` name and the watched ones, joined with what the host knows of each."""
        samples = self._processes.read(gpus, self.watched_pids)
        if not self._processes.follows:
            self._processes.node.scan_if_due()
        return samples

    def _cpu_readings(self, clock_s: float) -> tuple[dict[str, Reading], int | None]:
        """CPU and iowait of all cores, and how many are online; refreshes the cores' own shares."""
        times = read_times(self._root)
        if isinstance(times, str):
            self._cpu = self._cores_before = None
            self._core_ratios = ()
            return {m: missing_of(m, times, CPU_SOURCE) for m in ("cpu_ratio", "iowait_ratio")}, None
        before, self._cpu = self._cpu, times
        if self._cores_before is None:
            self._cores_before = clock_s, times
        elif clock_s - self._cores_before[0] >= CORES_PERIOD_S:
            self._core_ratios = core_ratios(times, self._cores_before[1])
            self._cores_before = clock_s, times
        busy_and_waiting = None if before is None else shares(times.total, before.total)
        cores = len(times.cores) or None
        if busy_and_waiting is None:  # two samples within one kernel tick of 10 ms
            reason = FIRST if before is None else "the interval is too short"
            return {m: missing_of(m, reason, CPU_SOURCE) for m in ("cpu_ratio", "iowait_ratio")}, cores
        busy, waiting = busy_and_waiting
        return {"cpu_ratio": reading_of("cpu_ratio", busy, CPU_SOURCE),
                "iowait_ratio": reading_of("iowait_ratio", waiting, CPU_SOURCE)}, cores

    def _physical_of(self, folder: str, devices: Mapping[str, Any]) -> list[Any]:
        """The counters of the physical devices, of all where none is physical."""
        for name in devices:
            if (folder, name) not in self._physical:
                # Partitions are no entries of /sys/block; virtual devices have no "device" link.
                self._physical[folder, name] = (self._root / "sys" / folder / name / "device").exists()
        return [device for name, device in devices.items() if self._physical[folder, name]] or [*devices.values()]

    def _rate(self, metric: str, devices: Sequence[Any], counter: str, why_none: str) -> Reading:
        """The rate of a counter, all devices together, or ``why_none`` where there is no device."""
        now_s = self._clock()
        before = self._counts.pop(metric, None)
        if not devices:
            return missing_of(metric, why_none, SOURCE)
        count = sum(getattr(device, counter) for device in devices)
        self._counts[metric] = (now_s, count)
        if before is None:
            return missing_of(metric, FIRST, SOURCE)
        elapsed_s = now_s - before[0]
        if count < before[1] or elapsed_s <= 0:
            return missing_of(metric, "a counter went backward because a device was removed or reset", SOURCE)
        return reading_of(metric, (count - before[1]) / elapsed_s, SOURCE)


def _ask(function: Callable[..., Any], **how: object) -> tuple[Any, str]:
    """psutil's answer and no reason, or None and the reason."""
    try:
        return function(**how), ""
    except (OSError, RuntimeError, ValueError, LookupError) as error:  # what it raises on a /proc it cannot read
        return None, f"psutil: {printable(str(error)) or type(error).__name__}"
