"""Fine-grained activity from GPM, the counters that NVML itself samples on Hopper and newer.

GPM has no momentary values: two samples are taken, and the driver computes the metrics of
the time between them. Both buffers and the request (19 KB) are allocated once.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from typing import Any

from gputop.core.metrics import GPU_METRICS, RATIO
from gputop.core.samples import GpuSample, Reading
from gputop.sources.nvml import status

SOURCE = "GPM"
FIRST = "first GPM sample: a value needs two samples"
MIN_GAP_S = 0.1  # the driver updates every 100 ms: between two closer samples the byte counters read 0

_SUPPORT_CALL = "nvmlGpmQueryDeviceSupport"
_PERCENT = 0.01
_MIB = float(1 << 20)

# NVML's number of each metric, ours, and the factor from percent or MiB/s. "TX" is from the GPU to the
# host, "RX" the other way (nvml.h: "PCIe traffic from this GPU" / "to this GPU").
METRICS: tuple[tuple[int, str, float], ...] = (
    (1, "gr_active", _PERCENT),
    (2, "sm_active", _PERCENT),
    (3, "sm_occupancy", _PERCENT),
    (5, "tensor_active", _PERCENT),
    (10, "dram_active", _PERCENT),
    (11, "fp64_active", _PERCENT),
    (12, "fp32_active", _PERCENT),
    (13, "fp16_active", _PERCENT),
    (20, "pcie_tx_bytes_per_s", _MIB),
    (21, "pcie_rx_bytes_per_s", _MIB),
    (60, "nvlink_rx_bytes_per_s", _MIB),
    (61, "nvlink_tx_bytes_per_s", _MIB),
)
PCIE = frozenset(("pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s"))
NVLINK = frozenset(("nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s"))
# Missing without GPM. PCIe and NVLink traffic have other sources.
GPM_ONLY_METRICS: tuple[str, ...] = tuple(metric for _, metric, _ in METRICS if metric not in PCIE | NVLINK)


def unavailable_reason(nvml: Any, handle: Any) -> str | None:
    """Reason why this GPU has no GPM, or None if it has. A lost GPU raises NVMLError."""
    try:
        return unsupported_reason(nvml, handle)
    except nvml.NVMLError as error:
        status.raise_if_gone(error)
        return f"cannot query GPM support: {status.reason(error.value, _SUPPORT_CALL)}"


def unsupported_reason(nvml: Any, handle: Any) -> str | None:
    """Reason as :func:`unavailable_reason`, but a transient fault raises NVMLError as well: it is worth a retry."""
    try:
        supported = nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice
    except nvml.NVMLError as error:
        if error.value not in status.REFUSED:
            raise
        if error.value == status.FUNCTION_NOT_FOUND:
            return "needs GPM: driver R520 or newer on a Hopper or newer GPU"
        return f"cannot query GPM support: {status.reason(error.value, _SUPPORT_CALL)}"
    if supported not in (0, 1):
        return f"it is unclear whether this GPU has GPM: the driver returned {supported} instead of yes or no"
    return None if supported else "this GPU has no GPM, which needs Hopper or newer"


_METRIC = struct.Struct("=Iid24x")  # nvmlGpmMetric_t: number, code, value, and pointers to its names


class Gpm:
    """The GPM metrics of one GPU, or of one MIG instance of it. Made and used by one thread."""

    def __init__(self, nvml: Any, handle: Any, clock: Callable[[], float], gpu_instance: int | None = None) -> None:
        """Allocates; raises NVMLError where the driver cannot.

        ``handle`` is the whole GPU's; ``gpu_instance`` NVML's id of the MIG instance.
        """
        self._nvml = nvml
        self._handle = handle
        self._gpu_instance = gpu_instance
        self._clock = clock
        self._older = nvml.nvmlGpmSampleAlloc()
        self._newer = nvml.nvmlGpmSampleAlloc()
        self._older_s: float | None = None
        self._request = nvml.c_nvmlGpmMetricsGet_t()
        self._request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._requested: list[tuple[int, int, str, str, float]] = []
        self._refused: dict[str, Reading] = {}
        self._last: dict[str, Reading] = {}
        self._request_metrics()
        self._set_missing(FIRST)

    def supports(self, metrics: frozenset[str]) -> bool:
        """Return whether GPM gives all of ``metrics`` on this GPU, as far as is known."""
        return not (metrics & self._refused.keys())

    def missing_reason(self, metrics: frozenset[str]) -> str:
        """The reason for the first of ``metrics`` that GPM does not give."""
        return next((self._refused[metric].reason or "" for metric in sorted(metrics) if metric in self._refused), "")

    def _request_metrics(self) -> None:
        request, metrics = self._request, [entry for entry in METRICS if entry[1] not in self._refused]
        request.numMetrics = len(metrics)
        self._requested = []
        for slot, (number, metric, factor) in enumerate(metrics):
            # In the request's memory: nvidia-ml-py's own structures are slow to read.
            offset = type(request).metrics.offset + slot * _METRIC.size
            _METRIC.pack_into(request, offset, number, 0, 0.0)
            self._requested.append((offset, number, metric, GPU_METRICS[metric].unit, factor))

    def _set_missing(self, reason: str) -> None:
        self._last = dict(self._refused)
        for _, _, metric, unit, _ in self._requested:
            self._last[metric] = Reading.missing(unit, reason, SOURCE)

    def read(self) -> dict[str, Reading]:
        """The newest metrics, over the time since the sample before, at least ``MIN_GAP_S``.

        Called sooner, it takes no sample and returns the last result again.
        Raises NVMLError if the device is gone or refuses GPM for good.
        """
        now_s = self._clock()
        if self._older_s is not None and now_s - self._older_s <= MIN_GAP_S:
            return self._last
        nvml = self._nvml
        call = "nvmlGpmSampleGet"
        try:
            if self._gpu_instance is None:
                nvml.nvmlGpmSampleGet(self._handle, self._newer)
            else:
                nvml.nvmlGpmMigSampleGet(self._handle, self._gpu_instance, self._newer)
            if self._older_s is not None:
                call = "nvmlGpmMetricsGet"
                self._request.sample1 = self._older
                self._request.sample2 = self._newer
                nvml.nvmlGpmMetricsGet(self._request)
                self._store_results()
            self._older, self._newer = self._newer, self._older
            self._older_s = now_s
        except nvml.NVMLError as error:
            if error.value in status.DEVICE_GONE or error.value in status.REFUSED:
                raise
            self._set_missing(status.reason(error.value, call))
        return self._last

    def _store_results(self) -> None:
        readings = dict(self._refused)
        last = self._last
        refused = damaged = False
        for offset, number, metric, unit, factor in self._requested:
            answered, code, measured = _METRIC.unpack_from(self._request, offset)
            value = measured * factor
            if code == status.SUCCESS and (reason := status.implausible_reason(metric, value)) is None:
                if unit == RATIO and value > 1.0:  # rounding in the driver can give 100.2%
                    value = 1.0
                before = last.get(metric)
                same = before is not None and before.value == value
                readings[metric] = before if same and before else Reading(value, unit, SOURCE)
                continue
            if code in status.DEVICE_GONE:
                raise self._nvml.NVMLError(code)
            if code != status.SUCCESS:
                reason = status.reason(code, f"GPM metric {number}")
            readings[metric] = Reading.missing(unit, reason or "", SOURCE)
            damaged |= answered != number
            if code in status.REFUSED:
                self._refused[metric] = readings[metric]
                refused = True
        self._last = readings
        if refused or damaged:
            self._request_metrics()

    def close(self) -> None:
        """Free the buffers. Not to be called for a lost GPU."""
        for sample in (self._older, self._newer):
            with contextlib.suppress(self._nvml.NVMLError):  # at worst 2 kB stay allocated
                self._nvml.nvmlGpmSampleFree(sample)


class WithGpm:
    """A probe that reads GPM as long as the device is there."""

    _gpm: Gpm | None
    _final_sample: GpuSample | None

    @property
    def has_gpm(self) -> bool:
        return self._gpm is not None

    def close(self) -> None:
        """Free GPM's buffers. A lost GPU is not touched."""
        if self._gpm is not None and self._final_sample is None:
            self._gpm.close()
        self._gpm = None
