"""The NVIDIA driver and its GPUs, from the driver's facts and what the system shows."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

from gputop.core.own_program import gputop_command
from gputop.doctor.check import Check, Result, text_of
from gputop.doctor.driver_facts import DriverFacts, GpuFacts
from gputop.sources.nvml import status
from gputop.text.units import printable, ranges

_NVIDIA = "0x10de"  # PCI vendor
_DISPLAY = "0x03"  # PCI class: VGA or 3D controller
_VERSION = re.compile(r"\b(\d{3,}\.\d+(?:\.\d+)*)\b")
_RELOAD = "sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && sudo modprobe nvidia"
_ANSWERED = frozenset((status.SUCCESS, status.NO_PERMISSION, status.LIB_RM_VERSION_MISMATCH))  # by the module
_NOTHING = frozenset((status.LIBRARY_NOT_FOUND, status.DRIVER_NOT_LOADED))

# By ID or ID_LIKE of /etc/os-release: what installs the driver there.
_INSTALL = (
    ("ubuntu", "sudo ubuntu-drivers install --gpgpu && sudo reboot"),
    ("debian", "sudo apt-get install nvidia-driver && sudo reboot   # from the section non-free"),
    ("rhel", "sudo dnf install nvidia-open && sudo reboot   # from NVIDIA's CUDA repository"),
    ("fedora", "sudo dnf install nvidia-open && sudo reboot   # from NVIDIA's CUDA repository"),
)
_GUIDE = "# https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/"
_GPU_ACCESS = "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility IMAGE"


def no_gpu(facts: DriverFacts) -> bool:
    """Return whether there is no GPU to monitor: no driver, or none of its GPUs here."""
    return bool(facts.load_error) or facts.init_code in _NOTHING or facts.count == 0


def pci_gpus(root: Path) -> int | None:
    """Return how many NVIDIA GPUs the PCI bus shows; None where it cannot be seen."""
    try:
        devices = list((root / "sys/bus/pci/devices").iterdir())
    except OSError:
        return None
    return sum(text_of(d / "vendor") == _NVIDIA and text_of(d / "class").startswith(_DISPLAY) for d in devices)


def in_container(root: Path) -> bool:
    """Return whether docker, podman, Kubernetes or LXC started this."""
    if (root / ".dockerenv").exists() or (root / "run/.containerenv").exists():
        return True
    return re.search(r"docker|kubepods|containerd|libpod|/lxc", text_of(root / "proc/1/cgroup")) is not None


def nvml_library(facts: DriverFacts, root: Path) -> Result:
    if facts.nvml_path or not facts.load_error:
        version = f", from driver {facts.nvml_version}" if facts.nvml_version else ""
        if not facts.nvml_path and facts.died:
            return Result("fail", f"the process that loaded the library ended {facts.died}")
        return Result("ok", f"{facts.nvml_path or 'libnvidia-ml.so.1'}{version}")
    error = status.open_error(status.LIBRARY_NOT_FOUND)
    detail = f"{error.message} The loader reports: {printable(facts.load_error)}."
    if in_container(root):
        return Result("fail", detail + " If the host has GPUs, start the container with them.", _GPU_ACCESS)
    count = pci_gpus(root)
    if count == 0:
        return Result("fail", detail + " There is no NVIDIA GPU on the PCI bus either.")
    on_bus = f" The PCI bus has {count} NVIDIA GPU{'s' * (count > 1)}." if count else ""
    return Result("fail", detail + on_bus, _install(root))


def _install(root: Path) -> str:
    system = text_of(root / "etc/os-release")
    names = re.findall(r'^(?:ID|ID_LIKE)="?([^"\n]*)', system, re.MULTILINE)
    distributions = {name for line in names for name in line.split()}
    return next((command for name, command in _INSTALL if name in distributions), _GUIDE)


def module_version(root: Path) -> str:
    """Version of the loaded kernel module, or ""."""
    match = _VERSION.search(text_of(root / "proc/driver/nvidia/version").partition("\n")[0])
    return match[1] if match else ""


def kernel_module(facts: DriverFacts, root: Path) -> Result:
    text = text_of(root / "proc/driver/nvidia/version").partition("\n")[0]
    if text:
        return Result("ok", " ".join(printable(text.removeprefix("NVRM version:")).split()))
    if (root / "dev/dxg").exists():
        return Result("ok", "not used: WSL uses the Windows driver")
    if facts.init_code in _ANSWERED:
        return Result("unknown", "/proc/driver/nvidia is not visible here, but the driver answers")
    loaded = re.search(r"^nvidia ", text_of(root / "proc/modules"), re.MULTILINE)
    if loaded:
        return Result("warn", "the nvidia module is loaded, but /proc/driver/nvidia is not visible here")
    detail = "not loaded: /proc/driver/nvidia/version is missing"
    if facts.load_error:
        return Result("fail", detail + "; the module comes with the driver")
    return Result("fail", detail, "sudo modprobe nvidia\nsudo dmesg | grep -iE 'nvidia|nvrm' | tail")


def device_files(facts: DriverFacts, root: Path, access: Callable[[Path, int], bool] = os.access) -> Result:
    """Check whether this user may open /dev/nvidiactl and the GPUs' files."""
    if (root / "dev/dxg").exists():
        return Result("ok", "not used: WSL provides the GPUs through /dev/dxg")
    dev = root / "dev"
    files = sorted(p for p in dev.glob("nvidia[0-9]*") if p.name[6:].isdecimal())
    control = dev / "nvidiactl"
    if not control.exists():
        if facts.init_code in _ANSWERED:
            return Result("unknown", "/dev/nvidiactl is not visible here, but the driver answers")
        if not module_version(root):
            return Result("unknown", "none, because the kernel module is not loaded")
        if in_container(root):
            return Result("fail", "/dev/nvidiactl is missing in this container", _GPU_ACCESS)
        return Result("fail", "/dev/nvidiactl is missing", "sudo nvidia-modprobe -c 0 -u")
    refused = [p for p in (control, *files) if not access(p, os.R_OK | os.W_OK)]
    if refused:
        names = " ".join(f"/dev/{p.name}" for p in refused)
        group = _group(refused[0])
        detail = f"this user is not allowed to open {names} (group {group})"
        fix = f"ls -l {names}\n" + (f"sudo usermod -aG {group} $USER   # then log in again"
                                    if group != "root" else f"sudo chmod a+rw {names}")
        return Result("fail", detail, fix)
    if not files:
        return Result("warn", "/dev/nvidiactl exists, but no GPU device file: this user, container or job has no GPUs")
    return Result("ok", f"/dev/nvidiactl and {len(files)} GPU{'s' * (len(files) > 1)} can be opened")


def _group(path: Path) -> str:
    try:
        return path.group()
    except (KeyError, OSError):  # a group without a name
        return str(path.stat().st_gid)


def nvml(facts: DriverFacts, root: Path) -> Result:
    """Check whether the driver answers, and whether library and module are of the same version."""
    if facts.load_error:
        return Result("unknown", "not checked: there is no driver library")
    if facts.import_error:
        return Result("fail", f"cannot use nvidia-ml-py: {facts.import_error}",
                      "pip install --force-reinstall nvidia-ml-py")
    if facts.starved_s:
        return Result("unknown", "the host is overloaded: the process that queries the driver waited "
                                 f"{facts.starved_s:.1f} s for a CPU",
                      "uptime\ngputop doctor   # when the load is lower")
    if facts.hung_in:
        return Result("fail",
                      f"the driver does not answer: {facts.hung_in} did not return. A process stuck in the driver "
                      "cannot be killed. If a reset fails, only a reboot helps.",
                      "sudo dmesg | grep -iE 'xid|nvrm' | tail\nsudo reboot")
    if facts.init_code is None:
        return Result("fail", f"the process that queried the driver ended {facts.died or 'too early'}", "nvidia-smi")
    if facts.init_code == status.LIB_RM_VERSION_MISMATCH:
        module, lib = module_version(root), facts.nvml_version
        versions = f" Module {module or 'unknown'}, library {lib or 'unknown'}."
        fix = "# restart this container" if in_container(root) else f"sudo reboot\n# or, with all GPU programs "\
            f"stopped:\n{_RELOAD}"
        return Result("fail", status.open_error(facts.init_code).message + versions, fix)
    if facts.init_code != status.SUCCESS:
        error = status.open_error(facts.init_code)
        fixes = {status.DRIVER_NOT_LOADED: "sudo modprobe nvidia", status.NO_PERMISSION: "ls -l /dev/nvidia*"}
        return Result("fail", error.message, fixes.get(facts.init_code, "nvidia-smi"))
    if facts.died:
        return Result("fail", f"driver {facts.driver}; the process that queried it ended {facts.died}", "nvidia-smi")
    cuda = f", supports CUDA up to {facts.cuda}" if facts.cuda else ""
    return Result("ok", f"driver {facts.driver} answers{cuda}")


def gpus(facts: DriverFacts) -> list[Check]:
    """The GPUs that work, and one failure for each that does not."""
    if facts.count is None:
        return [Check("gpus", "unknown", "GPUs", "unknown: gputop could not query the driver")]
    if facts.count == 0:
        error = status.no_gpus()
        return [Check("gpus", "fail", "GPUs", error.message, "lspci | grep -i nvidia\n# in a container: docker run "
                      "--gpus all …; in a batch job: sbatch --gres=gpu:N")]
    checks = []
    good = [gpu for gpu in facts.gpus if gpu.code == status.SUCCESS]
    if good:
        kinds: dict[str, list[int]] = {}
        for gpu in good:
            kinds.setdefault(gpu.name + (", MIG mode" if gpu.mig else ""), []).append(gpu.index)
        text = "; ".join(f"{ranges(indices)}: {kind}" for kind, indices in kinds.items())
        checks.append(Check("gpus", "ok", "GPUs", f"{len(good)} of {facts.count} answer; {text}"))
    return checks + [_faulty(gpu) for gpu in facts.gpus if gpu.code != status.SUCCESS]


def _faulty(gpu: GpuFacts) -> Check:
    id_, title, i = f"gpu_{gpu.index}", f"GPU {gpu.index}", gpu.index
    if gpu.code is None:
        return Check(id_, "fail", title, "not responding: a call to the driver did not return",
                     f"sudo dmesg | grep -iE 'xid|nvrm' | tail\nsudo nvidia-smi --gpu-reset -i {i}\nsudo reboot   "
                     "# if the reset fails or hangs")
    if gpu.problem:
        return Check(id_, "fail", title, f"could not be queried: {gpu.problem}", f"nvidia-smi -q -i {i}")
    if gpu.code == status.RESET_REQUIRED:
        return Check(id_, "fail", title, status.lost_message(gpu.code, i), f"sudo nvidia-smi --gpu-reset -i {i}")
    if gpu.code in status.DEVICE_GONE:
        return Check(id_, "fail", title, status.lost_message(gpu.code, i), "sudo dmesg | grep -i xid\nsudo reboot")
    fix = f"ls -l /dev/nvidia{i}" if gpu.code == status.NO_PERMISSION else f"nvidia-smi -q -i {i}"
    return Check(id_, "fail", title, status.no_access_message(gpu.code, i), fix)


def sm_activity(facts: DriverFacts) -> Result:
    """Check which GPUs really deliver SM activity, and what would provide it for the others."""
    asked = [gpu for gpu in facts.gpus if gpu.code == status.SUCCESS]
    if not asked:
        return Result("unknown", "no GPU could be queried")
    reasons: dict[str, list[int]] = {}
    for gpu in asked:
        if not gpu.sm_active:
            reasons.setdefault(gpu.sm_active_reason + (" (MIG mode)" if gpu.mig else ""), []).append(gpu.index)
    readable = [gpu.index for gpu in asked if gpu.sm_active]
    have = f"read through GPM on GPU {ranges(readable)}" if readable else ""
    if not reasons:
        return Result("ok", have)
    lack = "; ".join(f"GPU {ranges(indices)}: {reason}" for reason, indices in reasons.items())
    detail = "; ".join(filter(None, (have, lack))) + ". gputop shows coarse utilization there, labeled as such."
    if "no permission" in lack:
        return Result("warn", detail, f"sudo {shlex.join(gputop_command())}")
    detail += " On data-center GPUs since Volta, a DCGM host engine can provide it: see DCGM."
    return Result("warn", detail, "gputop --dcgm-watch   # for its cost before Hopper, see gputop --help")
