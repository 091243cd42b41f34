"""The container, pod or job that a process runs in, from the path of its control group."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from gputop.core.files import Folder
from gputop.core.samples import PodContainer
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


# -- pods of Kubernetes -----------------------------------------------------------------------------

# Pod UID and container id are in the control group, the readable names in the kubelet's log links. The kernel says the
# control group, and only root makes the groups that count here. What a process says of itself (HOSTNAME, KUBERNETES_…
# in its environment) is a claim, and is not read. The kubelet names the links POD_NAMESPACE_CONTAINER-ID.log; their
# names are listed, none is opened or followed.
FOLDER = Path("/var/log/containers")
NO_FOLDER = f"{FOLDER} is not visible here: mount it read-only into gputop's pod"
NOT_TRUSTED = f"{FOLDER} does not belong to root, or other users can write to it"
NO_LINK = f"no log link in {FOLDER} names this container"
RETRY_S = 30.0  # the kubelet makes the link as it starts the container
_MAX_LINKS = 10_000  # a node has a few hundred
_MAX_GROUPS = 512  # of up to 64 KiB each

# A pod's UID is a UUID, with underscores in systemd's names; of a static pod it is an MD5 sum.
_UID = "[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32}"
_QOS = "(?:burstable|besteffort)"
# What may stand above the pods: the control group of a node that is itself a container of docker or podman (kind,
# minikube), and the kubelet's --cgroup-root. All of it belongs to root.
_NODE = (rf"(?:/\.\.)*(?:/system\.slice/docker-{_ID}\.scope|/docker/{_ID}"
         rf"|/machine\.slice/libpod-{_ID}\.scope(?:/container)?)?")
# Seen from a cgroup namespace, "/.." stands for each group up to the first common one, and that one's path is not shown
# (cgroup_namespaces(7)). The common one is above gputop's own: only who can make groups there can make these.
_OUTSIDE = r"(?:/\.\.)+"
_SLICE = rf"(?:kubelet-)?kubepods(?:-{_QOS})?-pod(?P<uid>{_UID})\.slice"
_CONTAINER = rf"(?:cri-containerd-|crio-|docker-)(?P<id>{_ID})\.scope"
_PATHS = tuple(re.compile(rf"{path}(?:/.*)?", re.ASCII | re.DOTALL) for path in (
    # The driver systemd.
    rf"(?:{_NODE}(?:/kubelet\.slice)?/(?:kubelet-)?kubepods\.slice|{_OUTSIDE})"
    rf"(?:/(?:kubelet-)?kubepods-{_QOS}\.slice)?/{_SLICE}/{_CONTAINER}",
    # The driver cgroupfs.
    rf"(?:{_NODE}(?:/kubelet)?/kubepods|{_OUTSIDE})(?:/{_QOS})?/pod(?P<uid>{_UID})/(?:crio-)?(?P<id>{_ID})",
    # A runtime with the driver cgroupfs below a kubelet with systemd: systemd's name, not expanded.
    rf"(?:{_NODE}(?:/system\.slice/containerd\.service)?|{_OUTSIDE})/{_SLICE}:(?:cri-containerd|crio):(?P<id>{_ID})"))
_LABEL = "[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_LINK = re.compile(rf"(?P<pod>[a-z0-9](?:[a-z0-9.-]{{0,251}}[a-z0-9])?)_(?P<namespace>{_LABEL})_(?P<container>{_LABEL})"
                   rf"-(?P<id>{_ID})\.log", re.ASCII)


def pod_container(cgroup: bytes) -> PodContainer | None:
    """The pod's UID and the container's id in /proc/PID/cgroup, without names; None where it names no pod.

    Of pods within pods the outermost counts: what a container makes below its own group is its own claim.
    """
    for line in cgroup.decode("utf-8", "replace").split("\n"):  # a name may hold U+2028, where splitlines splits too
        path = line.split(":", 2)[2] if line.count(":") >= 2 else ""
        for pattern in _PATHS if "pod" in path else ():
            match = pattern.fullmatch(path)
            if match is not None:
                return PodContainer(match["uid"].replace("_", "-"), match["id"])
    return None


class PodContainers:
    """The containers of pods by control group, each found once. Used by one thread.

    Without a pod nothing is read. The folder of links is listed when a container is new, and every
    :data:`RETRY_S` while one has no name.
    """

    def __init__(self, clock: Callable[[], float], root: Path = Path("/")) -> None:
        self._clock = clock
        self._folder = root / FOLDER.relative_to("/")
        self._by_group: dict[bytes, PodContainer | None] = {}
        self._links: dict[str, tuple[str, str, str] | None] = {}  # by id; None: two names, so neither is believed
        self._reason = NO_LINK
        self._due_s: dict[bytes, float] = {}

    def read(self, cgroup: bytes) -> PodContainer | None:
        """The container that /proc/PID/cgroup names, with its names or the reason why they are not known."""
        if cgroup not in self._by_group:
            if len(self._by_group) >= _MAX_GROUPS:
                self._by_group.clear()
                self._due_s.clear()
            self._by_group[cgroup] = pod_container(cgroup)
        container = self._by_group[cgroup]
        if container is None or container.pod is not None or self._clock() < self._due_s.get(cgroup, float("-inf")):
            return container
        if container.container_id not in self._links or cgroup in self._due_s:
            self._list_links()
        self._due_s[cgroup] = self._clock() + RETRY_S
        names = self._links.get(container.container_id)
        self._by_group[cgroup] = named = replace(container, reason=self._reason) if names is None else replace(
            container, pod=names[0], namespace=names[1], container=names[2], reason=None)
        return named

    def _list_links(self) -> None:
        self._links = {}
        try:
            with Folder(self._folder.parent) as above, above.enter(self._folder.name) as folder:
                state = os.fstat(folder.fd)
                # Only root, or this user, can have made what is in a folder that is trusted.
                if state.st_uid not in (0, os.geteuid()) or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                    self._reason = NOT_TRUSTED
                    return
                names = folder.names(_MAX_LINKS)
        except FileNotFoundError:
            self._reason = NO_FOLDER
            return
        except OSError as error:
            self._reason = f"cannot read {FOLDER}: {error.strerror}"
            return
        self._reason = NO_LINK
        for match in filter(None, map(_LINK.fullmatch, names)):
            texts = match["pod"], match["namespace"], match["container"]
            self._links[match["id"]] = texts if self._links.get(match["id"], texts) == texts else None
