"""One GPU through NVML: which calls give which metric, and what happens when one is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gputop.metrics import BYTES_PER_S, GPU_METRICS
from gputop.samples import FAILED, LOST, GpuInfo, GpuSample, Reading
from gputop.sources import nvml_status as status
from gputop.sources.gpm import ONLY_GPM, Gpm, refusal
from gputop.sources.nvml_processes import ProcessReader
from gputop.sources.pcie import PcieTraffic, link_bytes_per_s

SLOW_PERIOD_S = 10.0  # limits and maxima: they change when an administrator changes them
_GPM_SOURCE = "GPM"
_NOT_TOLD = "this driver counts it as used and does not tell how much it is"

# nvml.h, nvmlClocksEventReason*.
_CLOCK_EVENTS = (
    (0x001, "idle"),
    (0x002, "application clocks"),
    (0x004, "power cap"),
    (0x008, "hw slowdown"),
    (0x010, "sync boost"),
    (0x020, "thermal"),
    (0x040, "hw thermal"),
    (0x080, "power brake"),
    (0x100, "display clocks"),
)


def clock_events(mask: int) -> tuple[str, ...]:
    """Short names of the clock event (throttle) reasons set in ``mask``."""
    return tuple(name for bit, name in _CLOCK_EVENTS if mask & bit)


@dataclass(frozen=True, slots=True)
class _Field:
    """One NVML call and the metrics it fills; ``fallback`` is an older call for the same."""

    call: str
    metrics: tuple[str, ...]
    read: Callable[[], Sequence[float | None]]  # one value per metric; None: this call does not tell
    source: str = "NVML"
    coarse: bool = False
    fallback: _Field | None = None


class NvmlGpu:
    """Satisfies :class:`gputop.sources.GpuProbe`. Everything of one GPU, read by one thread.

    A call that the driver refuses for good is not made again: its metrics stay missing
    with that reason. Once the device is lost its handle is dropped and never used again.
    """

    def __init__(
        self,
        nvml: Any,
        handle: Any,
        info: GpuInfo,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self.info = info
        self._nvml = nvml
        self._handle = handle
        self._clock = clock
        self._ended: GpuSample | None = None
        self._steady: dict[str, Reading] = {}  # missing for good, or read on the slow period
        self._slow_due_s = clock()
        self._clock_events: dict[int, tuple[str, ...]] = {}
        self._events_call: Callable[[Any], int] | None = nvml.nvmlDeviceGetCurrentClocksEventReasons
        self._events_reason: str | None = None
        self._mig = False
        self._gpm: Gpm | None = None
        self._pcie: PcieTraffic | None = None
        try:
            self._mig = self._in_mig_mode()
            self._open_gpm()
        except nvml.NVMLError as error:
            self._end(error.value)
            return
        self._fast = self._fast_fields()
        self._slow = self._slow_fields()
        self._processes = ProcessReader(nvml, handle, clock, wall_clock)

    @classmethod
    def unavailable(cls, nvml: Any, info: GpuInfo, code: int) -> NvmlGpu:
        """A GPU that NVML counts but would not open: it only says so."""
        probe = cls.__new__(cls)
        probe.info = info
        probe._gpm = None
        probe._end(code)
        return probe

    @property
    def has_gpm(self) -> bool:
        return self._gpm is not None

    def read(self, now_s: float) -> GpuSample:
        """One look; blocks for as long as the driver does."""
        if self._ended is not None:
            return self._ended
        try:
            return self._sample()
        except self._nvml.NVMLError as error:
            return self._end(error.value)

    def close(self) -> None:
        """Give back what GPM holds. A lost GPU is not touched."""
        if self._gpm is not None and self._ended is None:
            self._gpm.close()
        self._gpm = None

    def _end(self, code: int) -> GpuSample:
        self._handle = self._gpm = self._pcie = None
        state = LOST if code in status.DEVICE_GONE else FAILED
        if state == LOST:
            message = status.lost_message(code, self.info.index)
        else:
            message = status.no_access_message(code, self.info.index)
        self._ended = GpuSample(self.info, {}, processes_reason=message, state=state, message=message)
        return self._ended

    def _sample(self) -> GpuSample:
        now_s = self._clock()
        if now_s >= self._slow_due_s:
            self._slow_due_s = now_s + SLOW_PERIOD_S
            self._read_fields(self._slow, self._steady)
        readings = dict(self._steady)
        self._read_fields(self._fast, readings)
        self._add_link_rate(readings)
        gives_pcie = False
        if self._gpm is not None:
            gives_pcie = self._read_gpm(readings)
        events, events_reason = self._read_clock_events()
        processes, processes_reason = self._processes.read()
        if not gives_pcie:  # last: one of its ways blocks for 40 ms
            readings.update(self._pcie_traffic(readings).read())
        return GpuSample(self.info, readings, processes, processes_reason, events, events_reason)

    # -- single calls ------------------------------------------------------------------

    def _read_fields(self, fields: list[_Field], readings: dict[str, Reading]) -> None:
        nvml_error = self._nvml.NVMLError
        refused: list[tuple[_Field, int]] = []
        for field in fields:
            try:
                values = field.read()
            except nvml_error as error:
                code = error.value
                if code in status.DEVICE_GONE:
                    raise
                self._miss(field, code, readings)
                if code in status.REFUSED:
                    refused.append((field, code))
                continue
            for metric, value in zip(field.metrics, values, strict=True):
                unit = GPU_METRICS[metric].unit
                if value is None:
                    readings[metric] = Reading.missing(unit, _NOT_TOLD, field.source)
                else:
                    readings[metric] = Reading(value, unit, field.source, None, field.coarse)
        for field, code in refused:
            place = fields.index(field)
            if field.fallback is not None:
                fields[place] = field.fallback
                self._read_fields([field.fallback], readings)
            else:
                del fields[place]
                self._miss(field, code, self._steady)

    def _miss(self, field: _Field, code: int, readings: dict[str, Reading]) -> None:
        why = status.reason(code, field.call, self._mig)
        for metric in field.metrics:
            readings[metric] = Reading.missing(GPU_METRICS[metric].unit, why, field.source)

    def _fast_fields(self) -> list[_Field]:
        nvml, handle = self._nvml, self._handle
        gpu_sensor, sm, memory = nvml.NVML_TEMPERATURE_GPU, nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM
        memory_v2 = nvml.nvmlMemory_v2

        def memory_by_v2() -> Sequence[float | None]:
            info = nvml.nvmlDeviceGetMemoryInfo(handle, memory_v2)
            return float(info.used), float(info.reserved), float(info.total)

        def memory_by_v1() -> Sequence[float | None]:
            info = nvml.nvmlDeviceGetMemoryInfo(handle)
            return float(info.used), None, float(info.total)

        held = ("memory_used_bytes", "memory_reserved_bytes", "memory_total_bytes")
        fields = [
            _Field(
                "nvmlDeviceGetUtilizationRates",
                ("gpu_util",),
                lambda: (nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,),
                coarse=True,
            ),
            _Field(
                "nvmlDeviceGetMemoryInfo_v2",
                held,
                memory_by_v2,
                fallback=_Field("nvmlDeviceGetMemoryInfo", held, memory_by_v1, "NVML, used with the driver's reserve"),
            ),
            _Field("nvmlDeviceGetPowerUsage", ("power_w",), lambda: (nvml.nvmlDeviceGetPowerUsage(handle) / 1000,)),
            _Field(
                "nvmlDeviceGetTemperature",
                ("temperature_c",),
                lambda: (float(nvml.nvmlDeviceGetTemperature(handle, gpu_sensor)),),
                fallback=self._newer_temperature(),
            ),
            _Field(
                "nvmlDeviceGetClockInfo(SM)",
                ("sm_clock_hz",),
                lambda: (nvml.nvmlDeviceGetClockInfo(handle, sm) * 1e6,),
            ),
            _Field(
                "nvmlDeviceGetClockInfo(memory)",
                ("memory_clock_hz",),
                lambda: (nvml.nvmlDeviceGetClockInfo(handle, memory) * 1e6,),
            ),
            _Field(
                "nvmlDeviceGetCurrPcieLinkGeneration",
                ("pcie_gen",),
                lambda: (float(nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)),),
            ),
            _Field(
                "nvmlDeviceGetCurrPcieLinkWidth",
                ("pcie_width",),
                lambda: (float(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),),
            ),
        ]
        return fields

    def _newer_temperature(self) -> _Field | None:
        """The call that replaces nvmlDeviceGetTemperature, which CUDA 14 is to remove."""
        nvml, handle = self._nvml, self._handle
        newer = getattr(nvml, "nvmlDeviceGetTemperatureV", None)
        if newer is None:
            return None
        sensor = nvml.NVML_TEMPERATURE_GPU
        return _Field("nvmlDeviceGetTemperatureV", ("temperature_c",), lambda: (float(newer(handle, sensor)),))

    def _slow_fields(self) -> list[_Field]:
        nvml, handle = self._nvml, self._handle
        sm, memory = nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM
        return [
            _Field(
                "nvmlDeviceGetEnforcedPowerLimit",
                ("power_limit_w",),
                lambda: (nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,),
            ),
            _Field(
                "nvmlDeviceGetMaxClockInfo(SM)",
                ("sm_clock_max_hz",),
                lambda: (nvml.nvmlDeviceGetMaxClockInfo(handle, sm) * 1e6,),
            ),
            _Field(
                "nvmlDeviceGetMaxClockInfo(memory)",
                ("memory_clock_max_hz",),
                lambda: (nvml.nvmlDeviceGetMaxClockInfo(handle, memory) * 1e6,),
            ),
        ]

    # -- what needs more than one call ---------------------------------------------------

    def _in_mig_mode(self) -> bool:
        nvml = self._nvml
        try:
            return bool(nvml.nvmlDeviceGetMigMode(self._handle)[0])
        except nvml.NVMLError as error:
            if error.value in status.DEVICE_GONE:
                raise
            return False  # GPUs without MIG refuse the question

    def _open_gpm(self) -> None:
        nvml = self._nvml
        why = refusal(nvml, self._handle)
        if why is None:
            try:
                self._gpm = Gpm(nvml, self._handle, self._clock)
            except nvml.NVMLError as error:
                why = status.reason(error.value, "nvmlGpmSampleAlloc")
        if why is not None:
            self._without_gpm(why)

    def _without_gpm(self, why: str) -> None:
        self._gpm = None
        for metric in ONLY_GPM:
            self._steady[metric] = Reading.missing(GPU_METRICS[metric].unit, why, _GPM_SOURCE)

    def _read_gpm(self, readings: dict[str, Reading]) -> bool:
        """Add what GPM says; returns whether that holds the PCIe rates."""
        nvml, gpm = self._nvml, self._gpm
        assert gpm is not None
        try:
            readings.update(gpm.read())
        except nvml.NVMLError as error:
            if error.value in status.DEVICE_GONE:
                raise
            gpm.close()
            self._without_gpm(status.reason(error.value, "GPM", self._mig))
            readings.update(self._steady)
            return False
        return gpm.gives_pcie

    def _add_link_rate(self, readings: dict[str, Reading]) -> None:
        generation, lanes = readings["pcie_gen"], readings["pcie_width"]
        if generation.value is None or lanes.value is None:
            why = generation.reason or lanes.reason or ""
            readings["pcie_max_bytes_per_s"] = Reading.missing(BYTES_PER_S, why, "NVML")
            return
        rate = link_bytes_per_s(int(generation.value), int(lanes.value))
        readings["pcie_max_bytes_per_s"] = (
            Reading(rate, BYTES_PER_S, "NVML")
            if rate is not None
            else Reading.missing(BYTES_PER_S, f"unknown PCIe generation {generation.value:.0f}", "NVML")
        )

    def _pcie_traffic(self, readings: dict[str, Reading]) -> PcieTraffic:
        if self._pcie is None:
            info = self.info
            known = info.pcie_gen_max is not None and info.pcie_width_max is not None
            link_max = link_bytes_per_s(info.pcie_gen_max or 0, info.pcie_width_max or 0) if known else None
            self._pcie = PcieTraffic(
                self._nvml, self._handle, self._clock, link_max or readings["pcie_max_bytes_per_s"].value
            )
        return self._pcie

    def _read_clock_events(self) -> tuple[tuple[str, ...], str | None]:
        nvml = self._nvml
        while self._events_call is not None:
            try:
                mask = self._events_call(self._handle)
            except nvml.NVMLError as error:
                code = error.value
                if code in status.DEVICE_GONE:
                    raise
                older = getattr(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", self._events_call)
                if code == status.FUNCTION_NOT_FOUND and self._events_call is not older:
                    self._events_call = older  # the name before R535
                    continue
                why = status.reason(code, "nvmlDeviceGetCurrentClocksEventReasons", self._mig)
                if code not in status.REFUSED:
                    return (), why
                self._events_call, self._events_reason = None, why
            else:
                if mask not in self._clock_events:
                    self._clock_events[mask] = clock_events(mask)
                return self._clock_events[mask], None
        return (), self._events_reason
