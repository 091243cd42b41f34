"""NVML as it is called, and what it answers: return codes (which end a device, which end a field) with their messages
to the user, texts whatever bytes they hold, and values that cannot be.

Codes are plain numbers here (NVML's ABI), so that this table does not need nvidia-ml-py;
newer codes are missing from older releases of that package.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from gputop.core.errors import GputopError, NoDataError
from gputop.core.metrics import BYTES, BYTES_PER_S, CELSIUS, COUNT, GPU_METRICS, HERTZ, RATIO, WATTS
from gputop.core.samples import Reading
from gputop.text.units import printable

SUCCESS = 0
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIB_RM_VERSION_MISMATCH = 18
VGPU_ECC_NOT_SUPPORTED = 22
ARGUMENT_VERSION_MISMATCH = 25
DEPRECATED = 26

# The device is gone: its handle must not be used again.
DEVICE_GONE = frozenset((GPU_IS_LOST, RESET_REQUIRED))
# Refused for good: a retry costs time (a refused field can take over 1 ms) and gives the same answer.
REFUSED = frozenset((NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, VGPU_ECC_NOT_SUPPORTED,
                     ARGUMENT_VERSION_MISMATCH, DEPRECATED))
# What a field value that the driver does not have is answered with for good. Not for other calls: there NOT_FOUND can
# mean that nothing is new.
FIELD_VALUE_REFUSED = REFUSED | {NOT_FOUND}

UNSUPPORTED = "not supported by this GPU"  # by all its calls, as on Jetson: no fault
# What nvml.h says about each code, as the reason of a missing reading.
_REASONS = {
    UNINITIALIZED: "the driver library was shut down",
    INVALID_ARGUMENT: "the driver does not know the requested value",
    NOT_SUPPORTED: UNSUPPORTED,
    NO_PERMISSION: "no permission: run as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0",
    5: "the driver reports that it was initialized twice",
    NOT_FOUND: "nothing found",
    INSUFFICIENT_SIZE: "the driver's answer did not fit into the buffer",
    8: "the GPU's power cables are not attached properly",
    DRIVER_NOT_LOADED: "the kernel module is not loaded",
    TIMEOUT: "the driver timed out waiting for the GPU",
    11: "the kernel has a problem with the GPU's interrupts",
    LIBRARY_NOT_FOUND: "a part of the driver library is missing",
    FUNCTION_NOT_FOUND: "this driver is too old for this function",
    14: "the GPU's infoROM is damaged",
    GPU_IS_LOST: "the GPU is lost",
    RESET_REQUIRED: "the GPU needs a reset",
    17: "the operating system rejected the driver's request",
    LIB_RM_VERSION_MISMATCH: "the kernel module and the driver library have different versions",
    19: "another program uses the GPU exclusively",
    20: "the driver is short of memory",
    21: "the driver currently has no value",
    VGPU_ECC_NOT_SUPPORTED: "ECC errors are not reported for a virtual GPU",
    23: "the driver is short of resources",
    24: "this GPU does not have that clock",
    ARGUMENT_VERSION_MISMATCH: "this driver does not support this version of the call",
    DEPRECATED: "removed from this driver",
    27: "the GPU is not ready",
    28: "the driver cannot find the GPU",
    29: "the GPU is in a state that does not allow this call",
    30: "this GPU does not support this kind of reset",
    999: "the driver reported an unknown error",
}


def reason(code: int, call: str, mig: bool = False) -> str:
    """Reason why ``call`` gave no value, for a reading."""
    text = _text(code)
    if mig and code == NOT_SUPPORTED:
        text = "not supported while the GPU is in MIG mode"
    return f"{text} ({call})"


def _text(code: int) -> str:
    return _REASONS.get(code, f"NVML error {code}")


def raise_if_gone(error: Any) -> int:
    """Raise an NVMLError again if it says that the device is gone; else return its code."""
    if error.value in DEVICE_GONE:
        raise error
    return int(error.value)


RESTART = " Restart gputop afterwards."


def lost_message(code: int, index: int) -> str:
    """Cause and fix for a GPU that stopped answering for good. Who will not use its handle again adds RESTART."""
    if code == RESET_REQUIRED:
        return (f"GPU {index} needs a reset: the driver rejects all calls to it. Stop the GPU's processes and run "
                f"`nvidia-smi --gpu-reset -i {index}`; if that fails, reboot. `dmesg | grep Xid` shows the cause.")
    return (f"GPU {index} is lost: it no longer responds on the PCIe bus. Take the node out of service and reboot it "
            "(power-cycle it if the GPU does not return). `dmesg | grep Xid` shows the cause.")


def unreadable_message(reason: str, index: int) -> str:
    """Message for a GPU that is present but cannot be read; ``reason`` is the reason of one reading."""
    return (f"GPU {index} cannot be read: {reason}. gputop keeps trying. Check whether `nvidia-smi -i {index}` shows "
            "more. `dmesg | grep -i nvrm` shows driver faults.")


_DEMO = "`gputop --demo` shows a simulated node without a driver."
# What a failed nvmlInit means to the user, by its code: the kind of error, the cause, what to do.
_OPEN_ERRORS: dict[int, tuple[type[GputopError], str, str]] = {
    LIBRARY_NOT_FOUND: (
        NoDataError, "This machine has no NVIDIA driver (libnvidia-ml.so.1 is missing).",
        "Install the driver. For a container, use docker run --gpus all. If the variable NVIDIA_DRIVER_CAPABILITIES is "
        f"set, it must contain utility. {_DEMO}"),
    DRIVER_NOT_LOADED: (
        NoDataError, "The NVIDIA driver is installed but its kernel module is not loaded.",
        f"Load it with `sudo modprobe nvidia`; if that fails, `dmesg | grep -i nvidia` shows the reason. {_DEMO}"),
    LIB_RM_VERSION_MISMATCH: (
        GputopError, "The NVIDIA kernel module and libnvidia-ml.so.1 have different versions: the driver was upgraded "
                     "while the old module stayed loaded.",
        "Reboot, or stop all GPU programs and reload the module (`sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset "
        "nvidia && sudo modprobe nvidia`). In a container restart the container."),
    NO_PERMISSION: (
        GputopError, "The NVIDIA driver denied access (NVML: no permission).",
        "Check the permissions of /dev/nvidiactl and /dev/nvidia* (NVreg_DeviceFileMode, often a group such as "
        "`video`), and the device cgroup of the container or job."),
}


def open_error(code: int) -> GputopError:
    """Error that says what a failed nvmlInit means to the user."""
    kind, cause, fix = _OPEN_ERRORS.get(code, (
        GputopError, f"NVML could not be initialized: {_text(code)}.",
        "Check whether `nvidia-smi` works. `dmesg | grep -i nvrm` shows driver faults."))
    return kind(cause, fix)


def no_gpus() -> GputopError:
    """The driver runs but shows no GPU."""
    return NoDataError(
        "The NVIDIA driver is running, but this process cannot see any GPU.",
        "Check `lspci | grep -i nvidia`. In a container or batch job, request GPUs (docker run --gpus all, sbatch "
        f"--gres=gpu:N). {_DEMO}")


def no_access_message(code: int, index: int) -> str:
    """Cause and fix for a GPU that NVML counts but does not hand out."""
    if code == NO_PERMISSION:
        return (f"This user is not allowed to open GPU {index}. Check the permissions of /dev/nvidia{index} and the "
                "device cgroup of the container or job.")
    return f"GPU {index} could not be opened: {_text(code)}. `nvidia-smi` and `dmesg | grep -i nvrm` show details."


# -- calls: the library, threads that keep NVML open, texts --------------------------------------

def import_pynvml() -> Any:
    """pynvml, without waiting for ``ctypes.util``, which imports shutil and subprocess: 3 ms of the first frame. Where
    pynvml asks it to look for a library that the loader does not find, it is imported."""
    if "pynvml" not in sys.modules and "ctypes.util" not in sys.modules:
        stand_in = ModuleType("ctypes.util")
        vars(stand_in)["find_library"] = _find_library
        sys.modules["ctypes.util"] = stand_in
        try:
            import pynvml
        finally:
            del sys.modules["ctypes.util"]
    import pynvml

    return pynvml


def _find_library(name: str) -> str | None:
    from ctypes.util import find_library

    return find_library(name)


def start_nvml_thread(nvml: Any, name: str, work: Callable[[], None]) -> None:
    """Run ``work`` in a daemon thread that holds NVML open for itself.

    NVML counts its users and shuts down after the last one, so closing a source never shuts down the library under a
    call that is still in it. ``work`` must not raise. Raises NVMLError where NVML cannot be opened once more.
    """
    nvml.nvmlInit()

    def run() -> None:
        try:
            work()
        finally:
            with contextlib.suppress(nvml.NVMLError):  # closed for good by somebody else
                nvml.nvmlShutdown()

    threading.Thread(target=run, name=f"gputop-nvml-{name}", daemon=True).start()


def nvml_text(call: Callable[..., Any], *args: Any) -> str:
    """The text that an NVML call returns, made safe to show.

    nvidia-ml-py decodes as UTF-8 and raises for anything else; the function it wraps returns the bytes as they are.
    """
    return printable(getattr(call, "__wrapped__", call)(*args))


# -- plausible ranges of values, and the reasons for the others ----------------------------------
# Sick drivers were seen to report success together with all bits set, stale memory or several thousand percent. The
# limits are wide: they catch impossible values, not rare ones.

MAX_PID = 1 << 22  # Linux, PID_MAX_LIMIT
MAX_COUNTER = 1 << 63  # bytes: four years of PCIe 5.0 at full speed

# By unit: lowest and highest plausible value. A ratio may be slightly above 1: drivers round.
_BY_UNIT: dict[str, tuple[float, float]] = {
    RATIO: (0.0, 1.05),
    CELSIUS: (-50.0, 150.0),  # a GPU shuts down below 130
    WATTS: (0.0, 10e3),
    HERTZ: (0.0, 10e9),
    BYTES: (0.0, float(64 << 40)),
    BYTES_PER_S: (0.0, 20e12),
}
_SMALLEST_NONZERO = 1e-9  # no measurement gives so small a value; misread bits do
_ABOVE_ZERO = 1e-9  # for metrics of which 0 is not plausible
_BY_METRIC: dict[str, tuple[float, float]] = {
    "memory_total_bytes": (_ABOVE_ZERO, _BY_UNIT[BYTES][1]),
    "power_limit_w": (_ABOVE_ZERO, _BY_UNIT[WATTS][1]),
    "power_limit_default_w": (_ABOVE_ZERO, _BY_UNIT[WATTS][1]),
    "sm_clock_max_hz": (_ABOVE_ZERO, _BY_UNIT[HERTZ][1]),
    "memory_clock_max_hz": (_ABOVE_ZERO, _BY_UNIT[HERTZ][1]),
    "temperature_slowdown_c": (_ABOVE_ZERO, _BY_UNIT[CELSIUS][1]),
    "pcie_gen": (1.0, 16.0),
    "pcie_width": (1.0, 64.0),
    # A count says nothing of its scale: each has its own. Errors that are corrected may come a thousand a second; those
    # that are not end jobs. A GPU has some hundred spare rows (512 on an A100).
    "ecc_corrected": (0.0, 1e9),
    "ecc_uncorrected": (0.0, 1e6),
    "ecc_uncorrected_lifetime": (0.0, 1e7),
    "rows_remapped": (0.0, 8192.0),
    "row_remap_pending": (0.0, 1.0),
    "row_remap_failed": (0.0, 1.0),
}
# A metric of a unit without limits has to have its own: a KeyError here tells of a new one.
_LIMITS = {metric.id: _BY_METRIC.get(metric.id) or _BY_UNIT[metric.unit] for metric in GPU_METRICS.values()}


def implausible_reason(metric: str, value: float) -> str | None:
    """Reason why ``value``, in the metric's unit, is implausible; None if it is plausible."""
    low, high = _LIMITS[metric]
    if low <= value <= high and not 0 < value < _SMALLEST_NONZERO:  # the first is false for NaN
        return None
    return implausible_text(value, GPU_METRICS[metric].unit)


def plausible_reading(metric: str, value: float, source: str, coarse: bool = False) -> Reading:
    """The reading of a value from the driver, or from DCGM: missing, with the reason, if it is implausible."""
    unit = GPU_METRICS[metric].unit
    reason = implausible_reason(metric, value)
    if reason is not None:
        return Reading.missing(unit, reason, source)
    return Reading(min(value, 1.0) if unit == RATIO else value, unit, source, None, coarse)


def implausible_text(value: float, unit: str) -> str:
    """The reason to show in place of such a value."""
    if unit == RATIO:
        value, unit = value * 100, "%"
    elif unit == HERTZ:
        value, unit = value / 1e6, "MHz"
    shown = f"{value:.10g}" if unit == COUNT else f"{value:.10g}%" if unit == "%" else f"{value:.10g} {unit}"
    return f"the driver reported an impossible value, {shown}"
