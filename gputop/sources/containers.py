"""What control groups tell: the container or job a process runs in, and how much CPU is granted."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from gputop.text import printable

_ID = "[0-9a-f]{64}"
# The last part of a cgroup's path, as container runtimes name it. Their monitors
# (crio-conmon-…, libpod-conmon-…) are outside of the container and do not match.
_SCOPES = (
    (re.compile(rf"(?:.*:)?cri-containerd[-:]({_ID})(?:\.scope)?"), "containerd"),
    (re.compile(rf"docker-({_ID})\.scope"), "docker"),
    (re.compile(rf"crio-({_ID})(?:\.scope)?"), "cri-o"),
    (re.compile(rf"libpod-({_ID})(?:\.scope)?"), "podman"),
    (re.compile(rf"nerdctl-({_ID})\.scope"), "containerd"),
    (re.compile(r"lxc\.payload\.(.+)"), "lxc"),
    (re.compile(r"systemd-nspawn@(.+)\.service"), "nspawn"),
    (re.compile(r"machine-(?!qemu|lxc)(.+)\.scope"), "nspawn"),
    (re.compile(r"job_(\d+)"), "slurm"),
)
_BARE_ID = re.compile(_ID)
_HEX = re.compile(r"\\x([0-9a-f]{2})")
_SHORT = 12  # digits of an id, as docker ps shows it
_NAME_LETTERS = 64


def container_of(cgroup: bytes) -> str | None:
    """Runtime and id of the innermost container in /proc/PID/cgroup: "docker 0123456789ab", "slurm 1234".

    None where the path names none: on the host, or seen from within the container, where
    the path is that of the container's own root.
    """
    for line in cgroup.decode("utf-8", "replace").splitlines():
        fields = line.split(":", 2)
        parts = [part for part in fields[2].split("/") if part] if len(fields) == 3 else []
        for depth in range(len(parts) - 1, -1, -1):
            found = _container(parts, depth)
            if found is not None:
                return found
    return None


def _container(parts: list[str], depth: int) -> str | None:
    part, above = parts[depth], parts[:depth]
    for pattern, runtime in _SCOPES:
        match = pattern.fullmatch(part)
        if match is None or (runtime == "slurm" and not any("slurm" in p for p in above)):
            continue
        name = match[1]
        if not _BARE_ID.fullmatch(name):
            name = printable(_HEX.sub(lambda m: chr(int(m[1], 16)), name))[:_NAME_LETTERS]
            return f"{runtime} {name}"
        return f"{runtime} {name[:_SHORT]}"
    if _BARE_ID.fullmatch(part):
        return f"{_runtime_above(above)} {part[:_SHORT]}"
    if above and above[-1] in ("lxc", "lxc.payload"):
        return f"lxc {printable(part)[:_NAME_LETTERS]}"
    return None


def _runtime_above(above: list[str]) -> str:
    """Which runtime names a cgroup by nothing but the id, told by the folders above."""
    if above and above[-1] == "docker":
        return "docker"
    return "kubernetes" if any(part.startswith("kubepods") for part in above) else "container"


def cpu_quota_cores(root: Path = Path("/")) -> float | None:
    """How many cores' time the control groups of this process grant it; None: no limit, or none to be seen.

    The least quota from its group up to the root that is mounted here: ``cpu.max`` of
    version 2, ``cpu.cfs_quota_us`` of version 1 (the kernel's cgroup-v2 and sched-bwc
    documents).
    """
    try:
        mounts = (root / "proc/self/mountinfo").read_text("utf-8", "replace")
        groups = (root / "proc/self/cgroup").read_text("utf-8", "replace")
    except OSError:
        return None
    paths: dict[str, str] = {}  # controllers -> path
    for line in groups.splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            paths[fields[1]] = fields[2]
    quotas: list[float] = []
    for line in mounts.splitlines():
        # Fields before " - ": …, root of the mount, mount point, …; after it: type, source, options (proc(5)).
        before, _, after = line.partition(" - ")
        place, kind = before.split(), after.split()
        if len(place) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            path = paths.get("")
        elif kind[0] == "cgroup" and "cpu" in kind[2].split(","):
            path = next((p for names, p in paths.items() if "cpu" in names.split(",")), None)
        else:
            continue
        if path is not None:
            quotas += _quotas(root / place[4].lstrip("/"), place[3], path)
    return min(quotas, default=None)


def _quotas(mount: Path, mount_root: str, path: str) -> list[float]:
    # Without a cgroup namespace a container sees the host's path, of which only its own end is mounted.
    inner = path.removeprefix(mount_root.rstrip("/")) if path.startswith(mount_root) else ""
    parts = [part for part in inner.split("/") if part]
    if ".." in parts:
        parts = []
    found = []
    for depth in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:depth])
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            found.append(_quota(folder))
    return [cores for cores in found if cores is not None]


def _quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except FileNotFoundError:
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    if quota in ("max", "-1"):
        return None
    return int(quota) / int(period)
