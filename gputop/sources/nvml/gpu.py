"""One GPU through NVML: its fields, GPM, processes and clock events in one sample."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from gputop.core.samples import CLOCK_EVENTS, FAILED, LOST, OK, GpuInfo, GpuSample, Reading, missing_of
from gputop.sources.nvml import status
from gputop.sources.nvml.fields import FieldReader
from gputop.sources.nvml.gpm import GPM_ONLY_METRICS, NVLINK, PCIE, Gpm, WithGpm, unsupported_reason
from gputop.sources.nvml.processes import ProcessReader
from gputop.sources.nvml.traffic import NvlinkTraffic, PcieTraffic, link_bytes_per_s, link_rate

GPM_RETRY_S = 10.0  # after a transient fault
_GPM_SOURCE = "GPM"
# A GPU without any of these is reported as failed.
_ESSENTIAL_METRICS = ("memory_used_bytes", "gpu_util", "power_w", "temperature_c", "sm_clock_hz", "memory_clock_hz")
_EVENTS_CALL = "nvmlDeviceGetCurrentClocksEventReasons"

_ANY_EVENT = 0xFFFF  # nvml.h names nine bits; the others are room for newer ones


@lru_cache(64)
def clock_events(mask: int) -> tuple[str, ...]:
    """Short names of the clock event (throttle) reasons set in ``mask``."""
    return tuple(name for bit, name in CLOCK_EVENTS.items() if mask & bit)


class NvmlGpu(WithGpm):
    """Satisfies :class:`gputop.sources.base.GpuProbe`. Everything of one GPU, read by one thread at a time.

    A call that the driver refuses for good is not repeated: its metrics stay missing with that
    reason. Once the device is lost, its handle is dropped and never used again.
    """

    def __init__(self, nvml: Any, handle: Any, info: GpuInfo, clock: Callable[[], float],
                 wall_clock: Callable[[], float], divided_reason: str = "") -> None:
        """``divided_reason``, for a GPU in MIG mode: why its activity is missing."""
        self.info = info
        self._nvml = nvml
        self.handle = handle  # NVML's; None once the GPU is lost
        self._clock = clock
        self._final_sample: GpuSample | None = None
        self._missing_without_gpm: dict[str, Reading] = {}  # metrics that are missing without GPM, with the reason
        self._link: tuple[Reading, Reading, Reading] | None = None  # generation, lanes, and the rate of both
        # The first is the name since R535.
        self._events_calls = [_EVENTS_CALL, "nvmlDeviceGetCurrentClocksThrottleReasons"]
        self._events_reason: str | None = None
        self._mig = info.mig_mode
        self._divided_reason = divided_reason
        self._gpm: Gpm | None = None
        self._gpm_due_s: float | None = None  # when to try again to open it
        self._no_gpm_reason = ""
        self._pcie: PcieTraffic | None = None
        self._nvlink: NvlinkTraffic | None = None
        try:
            self._open_gpm()
        except nvml.NVMLError as error:
            self._mark_unusable(error.value)
            return
        self._fields = FieldReader(nvml, handle, clock(), info.index, self._mig)
        self._processes = ProcessReader(nvml, handle, clock, wall_clock, info.index)

    @classmethod
    def unavailable(cls, nvml: Any, info: GpuInfo, code: int) -> NvmlGpu:
        """A GPU that NVML counts but does not open: its samples only say so."""
        probe = cls.__new__(cls)
        probe.info = info
        probe._gpm = None
        probe._mark_unusable(code)
        return probe

    def read(self, now_s: float) -> GpuSample:
        if self._final_sample is not None:
            return self._final_sample
        try:
            return self._sample()
        except self._nvml.NVMLError as error:
            return self._mark_unusable(error.value)

    def _mark_unusable(self, code: int) -> GpuSample:
        self.handle = self._gpm = self._pcie = self._nvlink = None
        state = LOST if code in status.DEVICE_GONE else FAILED
        if state == LOST:
            message = status.lost_message(code, self.info.index) + status.RESTART
        else:
            message = status.no_access_message(code, self.info.index)
        self._final_sample = GpuSample(self.info, {}, processes_reason=message, state=state, message=message)
        return self._final_sample

    def _sample(self) -> GpuSample:
        readings = self._fields.read(self._clock()).copy()
        readings.update(self._missing_without_gpm)
        readings["pcie_max_bytes_per_s"] = self._read_link_rate(readings)
        self._read_gpm(readings)
        gpm = self._gpm
        if gpm is None or not gpm.supports(NVLINK):
            if self._nvlink is None:
                before = self._no_gpm_reason if gpm is None else gpm.missing_reason(NVLINK)
                self._nvlink = NvlinkTraffic(self._nvml, self.handle, self._clock, before, self._mig)
            readings.update(self._nvlink.read())
        events, events_reason = self._read_clock_events()
        processes, processes_reason = ((), self._divided_reason) if self._mig else self._processes.read()
        if gpm is None or not gpm.supports(PCIE):  # last: one of its methods blocks for 40 ms
            readings.update(self._pcie_traffic().read())
        state, message = OK, ""
        reason = readings[_ESSENTIAL_METRICS[0]].reason or ""
        if all(readings[metric].value is None for metric in _ESSENTIAL_METRICS) and any(
                not (readings[metric].reason or "").startswith(status.UNSUPPORTED) for metric in _ESSENTIAL_METRICS):
            state, message = FAILED, status.unreadable_message(reason, self.info.index)
        return GpuSample(self.info, readings, processes, processes_reason, events, events_reason, state, message)

    # -- what needs more than one call ---------------------------------------------------

    def _open_gpm(self) -> None:
        nvml = self._nvml
        try:
            reason = self._divided_reason if self._mig else unsupported_reason(nvml, self.handle)
            if reason is None:
                self._gpm = Gpm(nvml, self.handle, self._clock)
                self._missing_without_gpm = {}
                return
        except nvml.NVMLError as error:
            code = status.raise_if_gone(error)
            reason = f"cannot open GPM: {status.reason(code, 'nvmlGpmQueryDeviceSupport, nvmlGpmSampleAlloc')}"
            if code not in status.REFUSED:
                self._gpm_due_s = self._clock() + GPM_RETRY_S
        self._disable_gpm(reason)

    def _disable_gpm(self, reason: str) -> None:
        self._gpm = None
        self._no_gpm_reason = reason
        for metric in GPM_ONLY_METRICS:
            self._missing_without_gpm[metric] = missing_of(metric, reason, _GPM_SOURCE)

    def _read_gpm(self, readings: dict[str, Reading]) -> None:
        """Add GPM's metrics; where GPM is refused for good, disable it."""
        nvml, gpm = self._nvml, self._gpm
        if gpm is None and self._gpm_due_s is not None and self._clock() >= self._gpm_due_s:
            self._gpm_due_s = None
            self._open_gpm()
            gpm = self._gpm
        if gpm is None:
            return
        try:
            readings.update(gpm.read())
        except nvml.NVMLError as error:
            status.raise_if_gone(error)
            gpm.close()
            self._disable_gpm(status.reason(error.value, "GPM", self._mig))
            readings.update(self._missing_without_gpm)

    def _read_link_rate(self, readings: dict[str, Reading]) -> Reading:
        generation, lanes = readings["pcie_gen"], readings["pcie_width"]
        if self._link is None or generation is not self._link[0] or lanes is not self._link[1]:
            self._link = generation, lanes, link_rate(generation, lanes, "NVML")
        return self._link[2]

    def _pcie_traffic(self) -> PcieTraffic:
        if self._pcie is None:
            # The maximum, not the current rate: an idle link is slower than the traffic that wakes it.
            link_max = link_bytes_per_s(self.info.pcie_gen_max or 0, self.info.pcie_width_max or 0)
            self._pcie = PcieTraffic(self._nvml, self.handle, self._clock, link_max)
        return self._pcie

    def _read_clock_events(self) -> tuple[tuple[str, ...], str | None]:
        nvml = self._nvml
        while self._events_calls:
            try:
                mask = getattr(nvml, self._events_calls[0])(self.handle)
            except nvml.NVMLError as error:
                code = status.raise_if_gone(error)
                reason = status.reason(code, _EVENTS_CALL, self._mig)
                if code not in status.REFUSED:
                    return (), reason
                self._events_reason = reason
                # The older name is for drivers that lack the newer one, not for a call that was refused.
                self._events_calls = self._events_calls[1:] if code == status.FUNCTION_NOT_FOUND else []
            else:
                if mask > _ANY_EVENT:
                    return (), f"the driver reported impossible reasons, {mask:#x}"
                return clock_events(mask), None
        return (), self._events_reason
