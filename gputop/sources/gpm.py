"""Fine-grained activity from GPM, the counters that NVML itself samples on Hopper and newer.

GPM gives no value of a moment: two samples are taken and the driver computes the metrics
of the time between them. Both buffers and the request (19 KB) are allocated once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

from gputop.metrics import GPU_METRICS, RATIO
from gputop.samples import Reading
from gputop.sources import nvml_status as status

SOURCE = "GPM"
FIRST = "first GPM sample: a value needs two"
MIN_GAP_S = 0.1  # the driver's own updates lie 100 ms apart: of two closer samples the byte counters read 0

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
# What only GPM gives, so what is missing without it. PCIe has other sources.
ONLY_GPM: tuple[str, ...] = tuple(metric for _, metric, _ in METRICS if metric not in PCIE)


def refusal(nvml: Any, handle: Any) -> str | None:
    """Why this GPU has no GPM, or None if it has. A lost GPU raises NVMLError."""
    try:
        supported = nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice
    except nvml.NVMLError as error:
        if error.value in status.DEVICE_GONE:
            raise
        if error.value == status.FUNCTION_NOT_FOUND:
            return "needs GPM: driver R520 or newer on a Hopper or newer GPU, or DCGM"
        return f"GPM cannot be asked for: {status.reason(error.value, 'nvmlGpmQueryDeviceSupport')}"
    return None if supported else "this GPU has no GPM: needs Hopper or newer, or DCGM"


class Gpm:
    """The GPM metrics of one GPU. Made and used by one thread."""

    def __init__(self, nvml: Any, handle: Any, clock: Callable[[], float]) -> None:
        """Allocates; raises NVMLError where the driver cannot."""
        self._nvml = nvml
        self._handle = handle
        self._clock = clock
        self._older = nvml.nvmlGpmSampleAlloc()
        self._newer = nvml.nvmlGpmSampleAlloc()
        self._older_s: float | None = None
        self._request = nvml.c_nvmlGpmMetricsGet_t()
        self._request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._wanted: list[tuple[Any, str, str, float]] = []
        self._gone: dict[str, Reading] = {}
        self._last: dict[str, Reading] = {}
        self._ask_for(METRICS)
        self._set_missing(FIRST)

    @property
    def gives_pcie(self) -> bool:
        """Whether GPM serves the PCIe rates of this GPU, as far as is known."""
        return not (PCIE & self._gone.keys())

    def _ask_for(self, metrics: tuple[tuple[int, str, float], ...]) -> None:
        self._request.numMetrics = len(metrics)
        self._wanted = []
        for slot, (number, metric, factor) in enumerate(metrics):
            result = self._request.metrics[slot]  # shares the request's memory
            result.metricId = number
            self._wanted.append((result, metric, GPU_METRICS[metric].unit, factor))

    def _set_missing(self, why: str) -> None:
        self._last = dict(self._gone)
        for _, metric, unit, _ in self._wanted:
            self._last[metric] = Reading.missing(unit, why, SOURCE)

    def read(self) -> dict[str, Reading]:
        """The newest metrics: of the time since the sample before, at least ``MIN_GAP_S``.

        Asked again sooner, it takes no sample and returns the last result once more.
        Raises NVMLError if the device is gone or refuses GPM for good.
        """
        now_s = self._clock()
        if self._older_s is not None and now_s - self._older_s <= MIN_GAP_S:
            return self._last
        nvml = self._nvml
        call = "nvmlGpmSampleGet"
        try:
            nvml.nvmlGpmSampleGet(self._handle, self._newer)
            if self._older_s is not None:
                call = "nvmlGpmMetricsGet"
                self._request.sample1 = self._older
                self._request.sample2 = self._newer
                nvml.nvmlGpmMetricsGet(self._request)
                self._take()
            self._older, self._newer = self._newer, self._older
            self._older_s = now_s
        except nvml.NVMLError as error:
            if error.value in status.DEVICE_GONE or error.value in status.REFUSED:
                raise
            self._set_missing(status.reason(error.value, call))
        return self._last

    def _take(self) -> None:
        readings = dict(self._gone)
        refused = False
        for result, metric, unit, factor in self._wanted:
            code = result.nvmlReturn
            value = result.value
            if code == status.SUCCESS and math.isfinite(value) and value >= 0:
                value *= factor
                # Rounding in the driver can give 100.2 %.
                readings[metric] = Reading(min(value, 1.0) if unit == RATIO else value, unit, SOURCE)
                continue
            why = status.reason(code, f"GPM metric {result.metricId}") if code else f"GPM gave {value}, unusable"
            readings[metric] = Reading.missing(unit, why, SOURCE)
            if code in status.REFUSED:
                self._gone[metric] = readings[metric]
                refused = True
        self._last = readings
        if refused:
            self._ask_for(tuple(entry for entry in METRICS if entry[1] not in self._gone))

    def close(self) -> None:
        """Free the buffers. Not to be called for a lost GPU."""
        for sample in (self._older, self._newer):
            with contextlib.suppress(self._nvml.NVMLError):  # at worst 2 kB stay allocated
                self._nvml.nvmlGpmSampleFree(sample)
