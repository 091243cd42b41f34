"""The host beside the GPUs: CPU, memory, disks, network, and the processes that hold GPUs."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gputop.metrics import HOST_METRICS
from gputop.samples import GpuSample, HostSample, ProcessSample, Reading
from gputop.sources.host_processes import ProcessTable

SOURCE = "psutil"
FIRST = "first look: a rate needs two"
_NO_DISK = "the kernel shows no disk counters here"
_NO_NETWORK = "no network interface but loopback"


class PsutilHost:
    """Satisfies :class:`gputop.sources.HostProbe`. Used by one thread.

    Disk and network count physical devices only, where there are any: bytes that pass a
    RAID, a bond or a bridge would be counted once more on each of its members. In a
    container, which has none, every interface except loopback counts.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, root: Path = Path("/")) -> None:
        import psutil

        self._psutil = psutil
        self._clock = clock
        self._sys = root / "sys"
        self._hostname = socket.gethostname()
        self._cpu_count = psutil.cpu_count()
        self._cpu: Any = None
        self._counts: dict[str, tuple[float, int]] = {}  # metric -> (monotonic seconds, bytes)
        self._physical: dict[tuple[str, str], bool] = {}
        self._processes = ProcessTable(psutil, clock, root / "proc")

    def read(self, now_s: float) -> HostSample:
        """One look; rates cover the time since the look before and are missing at the first."""
        readings = self._cpu_readings()
        memory = self._psutil.virtual_memory()
        readings["memory_used_bytes"] = _reading("memory_used_bytes", memory.total - memory.available)
        readings["memory_total_bytes"] = _reading("memory_total_bytes", memory.total)
        disks = self._psutil.disk_io_counters(perdisk=True, nowrap=False) or {}
        read, written = self._sum(disks, "block", "read_bytes", "write_bytes")
        readings["disk_read_bytes_per_s"] = self._rate("disk_read_bytes_per_s", read, _NO_DISK)
        readings["disk_write_bytes_per_s"] = self._rate("disk_write_bytes_per_s", written, _NO_DISK)
        cards = self._psutil.net_io_counters(pernic=True, nowrap=False) or {}
        cards.pop("lo", None)
        received, sent = self._sum(cards, "class/net", "bytes_recv", "bytes_sent")
        readings["net_rx_bytes_per_s"] = self._rate("net_rx_bytes_per_s", received, _NO_NETWORK)
        readings["net_tx_bytes_per_s"] = self._rate("net_tx_bytes_per_s", sent, _NO_NETWORK)
        return HostSample(self._hostname, readings, self._cpu_count)

    def processes(self, now_s: float, gpus: Sequence[GpuSample]) -> tuple[ProcessSample, ...]:
        """The processes that ``gpus`` name, joined with what the host knows of each."""
        return self._processes.read(gpus)

    def _cpu_readings(self) -> dict[str, Reading]:
        times = self._psutil.cpu_times()
        before, self._cpu = self._cpu, times
        if before is None:
            return {metric: _missing(metric, FIRST) for metric in ("cpu_ratio", "iowait_ratio")}
        # guest and guest_nice are already in user and nice.
        passed = {
            name: max(0.0, getattr(times, name) - getattr(before, name))
            for name in times._fields
            if not name.startswith("guest")
        }
        total = sum(passed.values())
        if total <= 0:  # two looks within one kernel tick of 10 ms
            return {metric: _missing(metric, "too short a time") for metric in ("cpu_ratio", "iowait_ratio")}
        waiting = passed.get("iowait", 0.0)
        busy = total - passed["idle"] - waiting
        return {
            "cpu_ratio": _reading("cpu_ratio", busy / total),
            "iowait_ratio": _reading("iowait_ratio", waiting / total),
        }

    def _sum(self, devices: Mapping[str, Any], folder: str, first: str, second: str) -> tuple[int | None, int | None]:
        names = [name for name in devices if self._is_physical(folder, name)] or list(devices)
        if not names:
            return None, None
        return sum(getattr(devices[n], first) for n in names), sum(getattr(devices[n], second) for n in names)

    def _is_physical(self, folder: str, name: str) -> bool:
        known = self._physical.get((folder, name))
        if known is None:
            # Partitions are no entries of /sys/block; virtual devices have no "device" link.
            known = self._physical[folder, name] = (self._sys / folder / name / "device").exists()
        return known

    def _rate(self, metric: str, count: int | None, why_none: str) -> Reading:
        if count is None:
            self._counts.pop(metric, None)
            return _missing(metric, why_none)
        now_s = self._clock()
        before = self._counts.get(metric)
        self._counts[metric] = (now_s, count)
        if before is None:
            return _missing(metric, FIRST)
        elapsed_s = now_s - before[0]
        if count < before[1] or elapsed_s <= 0:
            return _missing(metric, "a counter went back: a device was removed or reset")
        return _reading(metric, (count - before[1]) / elapsed_s)


def _reading(metric: str, value: float) -> Reading:
    return Reading(float(value), HOST_METRICS[metric].unit, SOURCE)


def _missing(metric: str, why: str) -> Reading:
    return Reading.missing(HOST_METRICS[metric].unit, why, SOURCE)
