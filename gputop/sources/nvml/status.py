"""NVML return codes: which end a device, which end a field, and their messages to the user.

Codes are plain numbers here (NVML's ABI), so that this table does not need nvidia-ml-py;
newer codes are missing from older releases of that package.
"""

from __future__ import annotations

from typing import Any

from gputop.core.errors import GputopError, NoDataError

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
NO_DATA = 21
VGPU_ECC_NOT_SUPPORTED = 22
ARGUMENT_VERSION_MISMATCH = 25
DEPRECATED = 26
UNKNOWN = 999

# The device is gone: its handle must not be used again.
DEVICE_GONE = frozenset((GPU_IS_LOST, RESET_REQUIRED))
# Refused for good: a retry costs time (a refused field can take over 1 ms) and gives the same answer.
REFUSED = frozenset(
    (
        NOT_SUPPORTED,
        NO_PERMISSION,
        FUNCTION_NOT_FOUND,
        VGPU_ECC_NOT_SUPPORTED,
        ARGUMENT_VERSION_MISMATCH,
        DEPRECATED,
    )
)
# What a field value that the driver does not have is answered with for good. Not for other calls: there NOT_FOUND can
# mean that nothing is new.
FIELD_VALUE_REFUSED = REFUSED | {NOT_FOUND}

# What nvml.h says about each code, as the reason of a missing reading.
_REASONS = {
    1: "the driver library was shut down",
    INVALID_ARGUMENT: "the driver does not know what it was asked for",
    NOT_SUPPORTED: "not supported by this GPU",
    NO_PERMISSION: "no permission: run as root, or have the driver loaded with NVreg_RestrictProfilingToAdminUsers=0",
    5: "the driver reports that it was started twice",
    NOT_FOUND: "nothing found",
    INSUFFICIENT_SIZE: "the driver's answer was larger than the room it was given",
    8: "the GPU's power cables are not attached as they should be",
    DRIVER_NOT_LOADED: "the kernel module is not loaded",
    10: "the driver gave up waiting for the GPU",
    11: "the kernel has trouble with the GPU's interrupts",
    LIBRARY_NOT_FOUND: "a part of the driver library is missing",
    FUNCTION_NOT_FOUND: "this driver is too old to have it",
    14: "the GPU's infoROM is damaged",
    GPU_IS_LOST: "the GPU is lost",
    RESET_REQUIRED: "the GPU needs a reset",
    17: "the operating system refuses the driver's request",
    LIB_RM_VERSION_MISMATCH: "the kernel module and the driver library are of different versions",
    19: "the GPU is in use by something that excludes it",
    20: "the driver is short of memory",
    NO_DATA: "the driver has no value at the moment",
    VGPU_ECC_NOT_SUPPORTED: "ECC errors are not reported to a virtual GPU",
    23: "the driver is short of resources",
    24: "this GPU does not have that clock",
    ARGUMENT_VERSION_MISMATCH: "this driver does not know this version of the call",
    DEPRECATED: "withdrawn from this driver",
    27: "the GPU is not ready",
    28: "the driver does not find the GPU",
    29: "the GPU is in a state that does not allow it",
    30: "this GPU does not have that kind of reset",
    UNKNOWN: "the driver reports an unknown error",
}


def reason(code: int, call: str, mig: bool = False) -> str:
    """Reason why ``call`` gave no value, for a reading."""
    text = _REASONS.get(code, f"NVML error {code}")
    if mig and code == NOT_SUPPORTED:
        text = "not supported while the GPU is in MIG mode"
    return f"{text} ({call})"


def raise_if_gone(error: Any) -> None:
    """Raise an NVMLError again if it says that the device is gone."""
    if error.value in DEVICE_GONE:
        raise error


RESTART = " Restart gputop afterwards."


def lost_message(code: int, index: int) -> str:
    """Cause and fix for a GPU that stopped answering for good. Who will not use its handle again adds RESTART."""
    if code == RESET_REQUIRED:
        return (
            f"GPU {index} needs a reset: the driver refuses all calls to it. Stop its processes and run "
            f"`nvidia-smi --gpu-reset -i {index}`; if that fails, reboot. `dmesg | grep Xid` names the cause."
        )
    return (
        f"GPU {index} is lost: it no longer answers on the PCIe bus. Take the node out of service and reboot it "
        f"(power-cycle if it stays away); `dmesg | grep Xid` names the cause."
    )


def unreadable_message(reason: str, index: int) -> str:
    """Message for a GPU that is present but cannot be read; ``reason`` is the reason of one reading."""
    return (
        f"GPU {index} cannot be read: {reason}. gputop keeps trying. See whether `nvidia-smi -i {index}` shows more; "
        "`dmesg | grep -i nvrm` names driver faults."
    )


_DEMO = "`gputop --demo` shows a simulated node without any driver."


# What a failed nvmlInit means to the user, by its code: the kind of error, the cause, what to do.
_OPEN_ERRORS: dict[int, tuple[type[GputopError], str, str]] = {
    LIBRARY_NOT_FOUND: (
        NoDataError, "This machine has no NVIDIA driver (libnvidia-ml.so.1 is missing).",
        "Install the driver; a container needs docker run --gpus all. If the variable NVIDIA_DRIVER_CAPABILITIES "
        f"is set, it must contain utility. {_DEMO}"),
    DRIVER_NOT_LOADED: (
        NoDataError, "The NVIDIA driver is installed but its kernel module is not loaded.",
        f"Load it with `sudo modprobe nvidia`; if that fails, `dmesg | grep -i nvidia` shows the reason. {_DEMO}"),
    LIB_RM_VERSION_MISMATCH: (
        GputopError, "The NVIDIA kernel module and libnvidia-ml.so.1 are of different versions: the driver was "
        "upgraded while the old module stayed loaded.",
        "Reboot, or stop all GPU programs and reload the module (`sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset "
        "nvidia && sudo modprobe nvidia`). In a container restart the container."),
    NO_PERMISSION: (
        GputopError, "The NVIDIA driver refuses access (NVML: no permission).",
        "Look at the rights of /dev/nvidiactl and /dev/nvidia* (NVreg_DeviceFileMode, often a group such as "
        "`video`), and at the device cgroup of the container or job."),
}


def open_error(code: int) -> GputopError:
    """Error that says what a failed nvmlInit means to the user."""
    kind, cause, fix = _OPEN_ERRORS.get(code, (
        GputopError, f"NVML could not be started (error {code}).",
        "See whether `nvidia-smi` works; `dmesg | grep -i nvrm` names driver faults."))
    return kind(cause, fix)


def no_gpus() -> GputopError:
    """The driver runs but shows no GPU."""
    return NoDataError(
        "The NVIDIA driver runs, but it shows no GPU to this process.",
        "Look at `lspci | grep -i nvidia`; in a container or batch job ask for GPUs "
        f"(docker run --gpus all, sbatch --gres=gpu:N). {_DEMO}",
    )


def no_access_message(code: int, index: int) -> str:
    """Cause and fix for a GPU that NVML counts but does not hand out."""
    if code == NO_PERMISSION:
        return (
            f"GPU {index} may not be opened by this user. Look at the rights of /dev/nvidia{index} and at the "
            "device cgroup of the container or job."
        )
    return f"GPU {index} could not be opened (NVML error {code}). `nvidia-smi` and `dmesg | grep -i nvrm` show more."
