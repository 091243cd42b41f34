"""The container or job that a process runs in, from the path of its control group."""

from __future__ import annotations

import re

from gputop.text.units import printable

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
    (re.compile(r"job_([0-9]{1,19})"), "slurm"),
)
_BARE_ID = re.compile(_ID)
_HEX = re.compile(r"\\x([0-9a-f]{2})")
_SHORT = 12  # digits of an id, as docker ps shows it
_NAME_CHARS = 64


def container_of(cgroup: bytes) -> str | None:
    """Runtime and id of the innermost container in /proc/PID/cgroup: "docker 0123456789ab", "slurm 1234".

    None where the path names none: on the host, or inside the container, where the path is
    that of the container's own root.
    """
    for line in cgroup.decode("utf-8", "replace").split("\n"):  # a name may hold U+2028, where splitlines splits too
        fields = line.split(":", 2)
        parts = [part for part in fields[2].split("/") if part] if len(fields) == 3 else []
        for depth in range(len(parts) - 1, -1, -1):
            container = _container(parts, depth)
            if container is not None:
                return container
    return None


def _container(parts: list[str], depth: int) -> str | None:
    part, above = parts[depth], parts[:depth]
    for pattern, runtime in _SCOPES:
        match = pattern.fullmatch(part)
        if match is None or (runtime == "slurm" and not _is_slurms(above)):
            continue
        if _BARE_ID.fullmatch(match[1]):
            return f"{runtime} {match[1][:_SHORT]}"
        return f"{runtime} {printable(_HEX.sub(lambda m: chr(int(m[1], 16)), match[1]))[:_NAME_CHARS]}"
    if _BARE_ID.fullmatch(part):
        return f"{_runtime_above(above)} {part[:_SHORT]}"
    if above and above[-1] in ("lxc", "lxc.payload"):
        return f"lxc {printable(part)[:_NAME_CHARS]}"
    return None


def _is_slurms(above: list[str]) -> bool:
    """Return whether these are the groups that slurmd makes its jobs' groups in: a user can make some of the same
    names, but only below one that is delegated to that user.

    Of version 1 ``slurm/uid_1000`` or ``slurm_NODE/uid_1000`` at the top, of version 2
    ``system.slice/slurmstepd.scope`` or ``…/NODE_slurmstepd.scope``. With slurmd in a pod they stand in that pod's
    group, which kubelet makes; seen from a cgroup namespace there is ".." before them (cgroup_namespaces(7)).
    """
    top = [part for part in above if part != ".."]
    if top and top[0].startswith("kubepods"):
        top = top[-2:]
    return (len(top) == 2 and top[0] == "system.slice" and top[1].endswith("slurmstepd.scope")) or (
        1 <= len(top) <= 2 and re.match(r"slurm(?:_|$)", top[0]) is not None
        and all(part.startswith("uid_") for part in top[1:]))


def _runtime_above(above: list[str]) -> str:
    """The runtime of a cgroup named only by an id, from the folders above it."""
    if above and above[-1] == "docker":
        return "docker"
    return "kubernetes" if any(part.startswith("kubepods") for part in above) else "container"
