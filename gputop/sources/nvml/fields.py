"""The metrics that NVML gives besides GPM: one table of calls, with their cost and period.

The table (:data:`FIELDS`) says which call gives which metric. :class:`FieldReader` reads them for one GPU, keeps to the
periods, drops calls that the driver refuses for good, and reports implausible values as missing.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gputop.core.samples import Reading, missing_of
from gputop.sources.nvml import status

Values = Sequence[float | None]  # one per metric; None: this call does not give it
Query = Callable[[], Values]

LIMIT_PERIOD_S = 10.0  # limits and maxima: they change when an administrator changes them
_HEALTH_PERIOD_S = 30.0  # error counts
_LINK_PERIOD_S = 0.9  # a little less than a tick, so that jitter does not add another tick
_ENGINE_PERIOD_S = 1.9
_MEMORY_TEMPERATURE_PERIOD_S = 5.0

_RESERVE_UNKNOWN = "this driver counts this memory as used and does not report it separately"
_NO_ECC = "ECC is off or not available on this board"
_NO_REMAPPING = "this GPU does not support row remapping, which needs a data-center board since Ampere"
_MAX_FAILURES = 3  # failures of a call that never gave a value, before the older call replaces it
_GOLDEN_RATIO = 0.6180339887498949  # its multiples modulo 1 are evenly spread, for any number of them

_MEMORY_TEMPERATURE = 82  # NVML_FI_DEV_MEMORY_TEMP
_POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT; never 185, the average: 3.3 ms


class NvmlField(Struct, frozen=True):
    """One NVML call and the metrics it fills.

    ``build`` makes the call for one handle; it and the call raise NVMLError. ``cost_us`` is what
    the call takes inside the driver, as published (telemetry measured on driver 610), None
    where nothing is. ``period_s`` 0 is every tick. ``fallback`` is an older call for the same
    metrics; ``unsupported`` the reason to show instead of the code NOT_SUPPORTED.
    """

    call: str
    metrics: tuple[str, ...]
    build: Callable[[Any, Any], Query]
    cost_us: float | None = None
    period_s: float = 0.0
    source: str = "NVML"
    coarse: bool = False
    fallback: NvmlField | None = None
    unsupported: str | None = None


# nvmlFieldValue_t: number, scope, time stamp, latency, type of the value, code, value.
_FIELD_VALUE = struct.Struct("=IIqqIi8s")
_UNSIGNED, _UNSIGNED_LONG_LONG = 1, struct.Struct("=Q")
_FORMATS = {number: struct.Struct(text) for number, text in (  # nvmlValueType_t
    (0, "=d"), (_UNSIGNED, "=I"), (4, "=q"), (5, "=i"), (6, "=H"))}


class FieldValues:
    """Some of the driver's "field values", read in one call: a batch costs the sum of its members."""

    def __init__(self, nvml: Any, handle: Any, *fields: tuple[int, int]) -> None:
        """``fields`` are pairs of NVML's number and the scope (0, or a link; see nvml.h)."""
        self._nvml, self._handle, self._count = nvml, handle, len(fields)
        self._request = b"".join(_FIELD_VALUE.pack(*field, 0, 0, 0, 0, b"") for field in fields)
        self._function = nvml._nvmlGetFunctionPointer("nvmlDeviceGetFieldValues")
        self.are_32_bits = False  # whether the driver hands the values over as 32-bit numbers; known after a read

    def read(self) -> list[float]:
        """The values in their order, in the driver's units. Raises NVMLError for the first that has none."""
        answer = ctypes.create_string_buffer(self._request, len(self._request))
        if code := self._function(self._handle, self._count, answer):
            raise self._nvml.NVMLError(code)
        numbers = []
        for *_, kind, code, value in _FIELD_VALUE.iter_unpack(answer):
            if code:
                # A driver that does not know the field reports an invalid argument.
                raise self._nvml.NVMLError(status.FUNCTION_NOT_FOUND if code == status.INVALID_ARGUMENT else code)
            self.are_32_bits = kind == _UNSIGNED
            numbers.append(_FORMATS.get(kind, _UNSIGNED_LONG_LONG).unpack_from(value)[0])
        return numbers


# -- how the calls are made ------------------------------------------------------------------


def _function(nvml: Any, name: str) -> Callable[..., Any]:
    function = getattr(nvml, name, None)
    if function is None:  # an older release of nvidia-ml-py
        raise nvml.NVMLError(status.FUNCTION_NOT_FOUND)
    return function


def _field(call: str, metrics: tuple[str, ...], read: Callable[[Any], Values], *args: int, **about: Any) -> NvmlField:
    """A call with these arguments after the handle, and what ``read`` takes out of its answer."""

    def build(nvml: Any, handle: Any) -> Query:
        function = _function(nvml, call)
        return lambda: read(function(handle, *args))

    return NvmlField(call, metrics, build, **about)


def _number(call: str, metric: str, factor: float, *args: int, cost_us: float | None = 1.0, **about: Any) -> NvmlField:
    """A call whose answer is one number; times ``factor`` it is in the metric's unit. In parentheses after its name:
    what it is asked for."""

    def build(nvml: Any, handle: Any) -> Query:
        function = _function(nvml, call.partition("(")[0])
        return lambda: (function(handle, *args) * factor,)  # most calls are such: not by one more, as _field has it

    return NvmlField(call, (metric,), build, cost_us, **about)


def _field_value(number: int, factor: float) -> Callable[[Any, Any], Query]:
    def build(nvml: Any, handle: Any) -> Query:
        values = FieldValues(nvml, handle, (number, 0))
        return lambda: (values.read()[0] * factor,)

    return build


def _decoders(nvml: Any, handle: Any) -> Query:
    """The busier of the video decoder and, where there is one, the JPEG decoder."""
    video, jpeg = _function(nvml, "nvmlDeviceGetDecoderUtilization"), getattr(nvml, "nvmlDeviceGetJpgUtilization", None)

    def query() -> Values:
        nonlocal jpeg
        percent = video(handle)[0]
        if jpeg is not None:
            try:
                percent = max(percent, jpeg(handle)[0])
            except nvml.NVMLError as error:
                status.raise_if_gone(error)
                jpeg = None
        return (percent / 100,)

    return query


def _ecc(metric: str, kind: int, lifetime: int) -> NvmlField:
    """``kind``: 0 corrected, 1 uncorrected (nvmlMemoryErrorType_t); ``lifetime``: nvmlEccCounterType_t."""
    return _number("nvmlDeviceGetTotalEccErrors", metric, 1.0, kind, lifetime, cost_us=None, period_s=_HEALTH_PERIOD_S,
                   unsupported=_NO_ECC)


_MEMORY_METRICS = ("memory_used_bytes", "memory_reserved_bytes", "memory_total_bytes")
_SM, _MEMORY = 1, 2  # nvmlClockType_t
_CORE, _SLOWDOWN = 0, 1  # nvmlTemperatureSensors_t, nvmlTemperatureThresholds_t
_MEMORY_V2 = 2 << 24 | 40  # nvmlMemory_v2: NVML_STRUCT_VERSION of a structure of 40 bytes

FIELDS: tuple[NvmlField, ...] = (
    _field("nvmlDeviceGetUtilizationRates", ("gpu_util",), lambda rates: (rates.gpu / 100,), cost_us=1.0, coarse=True),
    replace(
        _field("nvmlDeviceGetMemoryInfo", _MEMORY_METRICS,
               lambda info: (float(info.used), float(info.reserved), float(info.total)), _MEMORY_V2, cost_us=3.0),
        call="nvmlDeviceGetMemoryInfo_v2",
        fallback=_field("nvmlDeviceGetMemoryInfo", _MEMORY_METRICS,
                        lambda info: (float(info.used), None, float(info.total)), cost_us=3.0,
                        source="NVML, used memory plus the driver's reserve")),
    NvmlField(f"field value {_POWER_INSTANT}", ("power_w",), _field_value(_POWER_INSTANT, 1e-3), 3.0,
              source="NVML, instant", fallback=_number("nvmlDeviceGetPowerUsage", "power_w", 1e-3,
                                                       source="NVML, 1 s average since Ampere")),
    _number("nvmlDeviceGetTemperature", "temperature_c", 1.0, _CORE,
            # CUDA 14 is to remove the one; older drivers do not have the other.
            fallback=_field("nvmlDeviceGetTemperatureV", ("temperature_c",), lambda celsius: (
                float(celsius) if celsius != -1 else float(0xFFFFFFFF),), _CORE, cost_us=1.0)),  # all bits set
    _number("nvmlDeviceGetClockInfo(SM)", "sm_clock_hz", 1e6, _SM),
    _number("nvmlDeviceGetClockInfo(memory)", "memory_clock_hz", 1e6, _MEMORY),
    _number("nvmlDeviceGetCurrPcieLinkGeneration", "pcie_gen", 1.0, period_s=_LINK_PERIOD_S),
    _number("nvmlDeviceGetCurrPcieLinkWidth", "pcie_width", 1.0, period_s=_LINK_PERIOD_S),
    _field("nvmlDeviceGetEncoderUtilization", ("encoder_util",), lambda answer: (answer[0] / 100,), cost_us=1.0,
           period_s=_ENGINE_PERIOD_S),
    NvmlField("nvmlDeviceGetDecoderUtilization", ("decoder_util",), _decoders, 2.0, _ENGINE_PERIOD_S),
    NvmlField(f"field value {_MEMORY_TEMPERATURE}", ("memory_temperature_c",), _field_value(_MEMORY_TEMPERATURE, 1.0),
              1200.0, _MEMORY_TEMPERATURE_PERIOD_S),
    _number("nvmlDeviceGetEnforcedPowerLimit", "power_limit_w", 1e-3, period_s=LIMIT_PERIOD_S),
    _number("nvmlDeviceGetPowerManagementDefaultLimit", "power_limit_default_w", 1e-3, period_s=LIMIT_PERIOD_S),
    _number("nvmlDeviceGetTemperatureThreshold", "temperature_slowdown_c", 1.0, _SLOWDOWN, period_s=LIMIT_PERIOD_S),
    _number("nvmlDeviceGetMaxClockInfo", "sm_clock_max_hz", 1e6, _SM, period_s=LIMIT_PERIOD_S),
    _number("nvmlDeviceGetMaxClockInfo", "memory_clock_max_hz", 1e6, _MEMORY, period_s=LIMIT_PERIOD_S),
    _ecc("ecc_corrected", 0, 0),
    _ecc("ecc_uncorrected", 1, 0),
    _ecc("ecc_uncorrected_lifetime", 1, 1),
    _field("nvmlDeviceGetRemappedRows", ("rows_remapped", "row_remap_pending", "row_remap_failed"),
           lambda rows: (float(rows[0] + rows[1]), float(rows[2]), float(rows[3])),  # corrected, uncorrected, …
           period_s=_HEALTH_PERIOD_S, unsupported=_NO_REMAPPING),
)


# -- one GPU -----------------------------------------------------------------------------------


class _FieldState:
    """A field of one GPU: how to query it, when it is due, and the last result."""

    __slots__ = ("code", "due_s", "failures", "field", "query", "values")

    def __init__(self, field: NvmlField, due_s: float) -> None:
        self.field = field
        self.due_s = due_s
        self.query: Query | None = None  # built at the first read, because that can fail like the call
        self.values: Values | None = None  # of the current readings
        self.code: int | None = None  # of the current reasons
        self.failures: int | None = 0  # failures before the first value; None after it


class FieldReader:
    """The fields of one GPU, used by one thread. ``readings`` are the newest of all fields."""

    def __init__(self, nvml: Any, handle: Any, now_s: float, phase: int = 0, mig: bool = False,
                 fields: Sequence[NvmlField] = FIELDS) -> None:
        """``phase`` differs between GPUs, so that their slow calls come at different ticks."""
        self._nvml = nvml
        self._handle = handle
        self._mig = mig
        self.readings: dict[str, Reading] = {}
        self._fast = [_FieldState(field, now_s) for field in fields if not field.period_s]
        self._slow = [_FieldState(field, now_s) for field in fields if field.period_s]
        self._slow_due_s = now_s
        self._phase = phase

    def read(self, now_s: float) -> dict[str, Reading]:
        """Query for what is due; returns ``readings``, to be copied. Raises NVMLError once the device is gone."""
        for state in self._fast[:]:
            self._query(state, self._fast)
        if now_s >= self._slow_due_s:
            self._read_slow(now_s)
        return self.readings

    def _read_slow(self, now_s: float) -> None:
        for index, state in enumerate(self._slow[:]):
            if now_s < state.due_s:
                continue
            period_s = state.field.period_s
            if state.query is None:  # the first time all fields are read at once, from then on each at its own time
                shift = math.fmod((index + 1) * _GOLDEN_RATIO + self._phase * _GOLDEN_RATIO * _GOLDEN_RATIO, 1.0)
                state.due_s = now_s + period_s * (1.0 - shift)
            else:
                state.due_s += period_s * (1 + (now_s - state.due_s) // period_s)
            self._query(state, self._slow)
        self._slow_due_s = min((state.due_s for state in self._slow), default=math.inf)

    def _query(self, state: _FieldState, among: list[_FieldState]) -> None:
        try:
            if state.query is None:
                state.query = state.field.build(self._nvml, self._handle)
            values = state.query()
        except self._nvml.NVMLError as error:
            self._failed(state, error.value, among)
            return
        if values != state.values:  # equal values: the last readings stay
            self._store(state.field, values)
            state.values, state.code, state.failures = values, None, None

    def _store(self, field: NvmlField, values: Values) -> None:
        for metric, value in zip(field.metrics, values, strict=True):
            self.readings[metric] = missing_of(metric, _RESERVE_UNKNOWN, field.source) if value is None else (
                status.plausible_reading(metric, value, field.source, field.coarse))

    def _failed(self, state: _FieldState, code: int, among: list[_FieldState]) -> None:
        if code in status.DEVICE_GONE:
            raise self._nvml.NVMLError(code)
        field = state.field
        if state.failures is not None:
            state.failures += 1
        refused = code in status.REFUSED
        if field.fallback is not None and (refused or (state.failures or 0) >= _MAX_FAILURES):
            older = _FieldState(field.fallback, state.due_s)
            among[among.index(state)] = older
            self._query(older, among)
            return
        if refused:
            among.remove(state)
        if code != state.code:
            state.code, state.values = code, None
            if code == status.NOT_SUPPORTED and field.unsupported is not None and not self._mig:
                reason = f"{field.unsupported} ({field.call})"
            else:
                reason = status.reason(code, field.call, self._mig)
            for metric in field.metrics:
                self.readings[metric] = missing_of(metric, reason, field.source)
