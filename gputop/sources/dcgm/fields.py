"""DCGM's fields as gputop's metrics: numbers, units, blanks and what its error codes mean.

Numbers, not names: DCGM 4.6 renamed the symbols. All from dcgm_fields.h and dcgm_structs.h.
"""

from __future__ import annotations

import math

from msgspec import Struct

from gputop.core.metrics import BYTES, GPU_METRICS, RATIO

SOURCE = "DCGM"

CLOCK_EVENTS = 112  # the bits are NVML's
XID = 230
NVML_INDEX = 52
COMPUTE_CAPABILITY = 63  # major version in the upper 16 bits
PCIE_GEN_MAX = 235
PCIE_WIDTH_MAX = 236

# dcgmReturn_t
OK = 0
BADPARAM = -1
GENERIC_ERROR = -3
NOT_SUPPORTED = -6
UNINITIALIZED = -10
TIMEOUT = -11
NO_DATA = -14
STALE_DATA = -15
NOT_WATCHED = -16
NO_PERMISSION = -17
GPU_IS_LOST = -18
RESET_REQUIRED = -19
FUNCTION_NOT_FOUND = -20
CONNECTION_NOT_VALID = -21
LIBRARY_NOT_FOUND = -25
DUPLICATE_KEY = -26
REQUIRES_ROOT = -29
MODULE_NOT_LOADED = -33
IN_USE = -34
PROFILING_NOT_SUPPORTED = -36

SILENT = 1  # gputop's own: no field has a value, and the engine has no code for that

# The connection is of no use any more: a new handle is needed, and groups and watches with it.
CONNECTION_GONE = frozenset((CONNECTION_NOT_VALID, TIMEOUT, UNINITIALIZED))

_MEANINGS = {
    BADPARAM: "the engine rejected a parameter",
    GENERIC_ERROR: "the engine reported an error without a cause",
    -4: "the engine is out of memory",
    -5: "not configured",
    NOT_SUPPORTED: "not supported by this GPU",
    -8: "NVML failed in the engine",
    -9: "still pending",
    UNINITIALIZED: "the engine is not initialized",
    TIMEOUT: "the engine did not answer in time",
    -12: "the client and engine versions are not compatible",
    -13: "the engine does not know the field",
    NO_DATA: "no value yet",
    STALE_DATA: "the value is stale",
    NOT_WATCHED: "no program watches this field",
    NO_PERMISSION: "no permission",
    GPU_IS_LOST: "the GPU is lost",
    RESET_REQUIRED: "the GPU needs a reset",
    FUNCTION_NOT_FOUND: "the engine lacks this function, because client and engine have different versions",
    CONNECTION_NOT_VALID: "the connection broke",
    -22: "DCGM does not support this GPU",
    -24: "the engine reached a limit",
    LIBRARY_NOT_FOUND: "the DCGM library could not be loaded",
    DUPLICATE_KEY: "the name is already in use",
    REQUIRES_ROOT: "the host engine does not run as root",
    MODULE_NOT_LOADED: "the engine's profiling module is not loaded, so profiling is not supported here",
    IN_USE: "another program uses the counters",
    PROFILING_NOT_SUPPORTED: "profiling is not supported on this GPU",
    -37: "the engine's profiling library failed",
    -54: "the engine is paused",
    -56: "the engine cannot use NVML",
    -57: "the driver does not answer the engine",
    -67: "the engine's GPUs are detached",
}

# dcgm_structs.h: a blank is the base or above it, by how much says why.
_INT_BLANK = 0x7FFFFFFFFFFFFFF0
_DOUBLE_BLANK = 140737488355328.0
_BLANKS = {
    0: "no value yet (the first sample of a watch is blank)",
    1: "not found",
    2: "not supported by this GPU",
    3: "the host engine lacks permission",
}

_MAX_TIME_US = 1 << 52  # in the year 2112: a later time is no time

_MIB = float(1 << 20)


def meaning(code: int) -> str:
    """Meaning of a DCGM return code, for a reading or a message."""
    return f"{_MEANINGS.get(code, 'error')} (DCGM {code})"


class DcgmField(Struct, frozen=True):
    """One DCGM field: its value times ``factor`` is the metric's."""

    id: int
    metric: str
    factor: float = 1.0
    coarse: bool = False


# Ratios of time, and rates in bytes/s. "TX" is from the GPU, as everywhere in gputop.
PROFILING: tuple[DcgmField, ...] = (
    DcgmField(1001, "gr_active"),
    DcgmField(1002, "sm_active"),
    DcgmField(1003, "sm_occupancy"),
    DcgmField(1004, "tensor_active"),
    DcgmField(1005, "dram_active"),
    DcgmField(1006, "fp64_active"),
    DcgmField(1007, "fp32_active"),
    DcgmField(1008, "fp16_active"),
    DcgmField(1009, "pcie_tx_bytes_per_s"),
    DcgmField(1010, "pcie_rx_bytes_per_s"),
    DcgmField(1011, "nvlink_tx_bytes_per_s"),
    DcgmField(1012, "nvlink_rx_bytes_per_s"),
)
FAST: tuple[DcgmField, ...] = (
    DcgmField(100, "sm_clock_hz", 1e6),
    DcgmField(101, "memory_clock_hz", 1e6),
    DcgmField(150, "temperature_c"),
    DcgmField(155, "power_w"),
    DcgmField(203, "gpu_util", 0.01, coarse=True),
    DcgmField(252, "memory_used_bytes", _MIB),
    DcgmField(253, "memory_reserved_bytes", _MIB),
)
LINK: tuple[DcgmField, ...] = (
    DcgmField(206, "encoder_util", 0.01),
    DcgmField(207, "decoder_util", 0.01),
    DcgmField(237, "pcie_gen"),
    DcgmField(238, "pcie_width"),
)
SLOW: tuple[DcgmField, ...] = (
    DcgmField(113, "sm_clock_max_hz", 1e6),
    DcgmField(114, "memory_clock_max_hz", 1e6),
    DcgmField(140, "memory_temperature_c"),
    DcgmField(158, "temperature_slowdown_c"),
    DcgmField(164, "power_limit_w"),
    DcgmField(250, "memory_total_bytes", _MIB),
    DcgmField(310, "ecc_corrected"),
    DcgmField(311, "ecc_uncorrected"),
    DcgmField(313, "ecc_uncorrected_lifetime"),
    DcgmField(393, "rows_remapped"),  # for uncorrectable errors;
    DcgmField(394, "rows_remapped"),  # for correctable ones: the metric is their sum
    DcgmField(395, "row_remap_failed"),
    DcgmField(396, "row_remap_pending"),
)
PROFILING_IDS: tuple[int, ...] = tuple(field.id for field in PROFILING)
FAST_METRIC_IDS: tuple[int, ...] = tuple(field.id for field in FAST)
FAST_IDS: tuple[int, ...] = (*FAST_METRIC_IDS, CLOCK_EVENTS, XID)
LINK_IDS: tuple[int, ...] = tuple(field.id for field in LINK)
SLOW_IDS: tuple[int, ...] = (*(field.id for field in SLOW), NVML_INDEX, COMPUTE_CAPABILITY, PCIE_GEN_MAX,
                             PCIE_WIDTH_MAX)
# What a MIG instance has of its own; the rest is of the whole GPU.
INSTANCE_FAST_IDS: tuple[int, ...] = (252, 253)
INSTANCE_SLOW_IDS: tuple[int, ...] = (250,)
INSTANCE_IDS = frozenset((*PROFILING_IDS, *INSTANCE_FAST_IDS, *INSTANCE_SLOW_IDS))
INSTANCE_METRICS = frozenset(
    field.metric for field in (*PROFILING, *FAST, *SLOW)
    if field.id in INSTANCE_IDS and GPU_METRICS[field.metric].unit in (RATIO, BYTES))

_FIELDS = (*PROFILING, *FAST, *LINK, *SLOW)
BY_METRIC: dict[str, tuple[DcgmField, ...]] = {
    metric: tuple(field for field in _FIELDS if field.metric == metric)
    for metric in dict.fromkeys(field.metric for field in _FIELDS)}


def is_profiling(field_id: int) -> bool:
    """Return whether DCGM counts the field among the profiling ones, whose watches need the counters of the GPU."""
    return 1001 <= field_id < 2000


def instance_key(index: int, gpu_instance: int) -> str:
    """The stand-in for the UUID of a MIG instance, which DCGM does not give: NVML's numbers of GPU and instance."""
    return f"mig:{index}:{gpu_instance}"


class FieldValue(Struct, frozen=True):
    """One value of one field of one GPU, in DCGM's unit, or why there is none.

    ``time_us`` is the engine's clock (Unix time); ``code`` the status that came with it.
    """

    value: float | None
    reason: str = ""
    time_us: int = 0
    code: int = OK


def decode(status: int, is_double: bool, integer: int, double: float, time_us: int) -> FieldValue:
    """Decode what the engine returned: a value, a blank, or an error."""
    time_us = time_us if 0 <= time_us < _MAX_TIME_US else 0
    if status != OK:
        return FieldValue(None, meaning(status), time_us, status)
    if is_double:
        if double >= _DOUBLE_BLANK or not math.isfinite(double):
            return _blank(double - _DOUBLE_BLANK, time_us)
        value = double
    else:
        if integer >= _INT_BLANK:
            return _blank(integer - _INT_BLANK, time_us)
        value = float(integer)
    if value < 0:
        return FieldValue(None, f"DCGM returned an invalid value, {value:g}", time_us)
    return FieldValue(value, "", time_us)


def _blank(above: float, time_us: int) -> FieldValue:
    if not math.isfinite(above) or above >= 16:
        return FieldValue(None, "DCGM did not return a valid number", time_us)
    code = int(above)
    return FieldValue(None, _BLANKS.get(code, "blank"), time_us, OK if code else NO_DATA)
