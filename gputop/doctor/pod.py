"""The rights of the pod that gputop runs in, and the lines of a manifest that grant what it lacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec import Struct

from gputop.core import proc
from gputop.doctor.check import Result
from gputop.doctor.driver import no_gpu
from gputop.doctor.driver_facts import DriverFacts
from gputop.sources.host.containers import FOLDER, pod_container

_FILE_BYTES = 1 << 16


class _Grant(Struct, frozen=True):
    """Purpose of a right, and the lines that grant it: of the pod, of its container, of its volumes."""

    lacks: str
    spec: tuple[str, ...] = ()
    container: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()


_PID_NAMESPACE = _Grant("no host PID namespace: gputop cannot show users, commands and pods of the GPUs' processes",
                        spec=("hostPID: true",))
_PTRACE = _Grant("no SYS_PTRACE: gputop cannot read stacks, attach, or show the I/O of other users' processes",
                 container=("securityContext:", "  runAsUser: 0", "  capabilities: {add: [SYS_PTRACE]}"))
_DRIVER = _Grant("no NVIDIA driver: gputop cannot show the GPUs",
                 spec=("runtimeClassName: nvidia",),
                 container=("env:", "  - {name: NVIDIA_VISIBLE_DEVICES, value: all}",
                            "  - {name: NVIDIA_DRIVER_CAPABILITIES, value: utility}"))
_NAMES = _Grant(f"no {FOLDER}: gputop shows pods by UID instead of by name",
                container=("volumeMounts:", f"  - {{name: container-logs, mountPath: {FOLDER}, readOnly: true}}"),
                volumes=("- name: container-logs", f"  hostPath: {{path: {FOLDER}}}"))
GRANTS = (_PID_NAMESPACE, _PTRACE, _DRIVER, _NAMES)


def rights(facts: DriverFacts, root: Path, env: Mapping[str, str]) -> Result | None:
    """Check which rights gputop's pod lacks to watch its node; nothing outside of Kubernetes."""
    try:
        in_pod = pod_container(proc.read(f"{root}/proc/self/cgroup", _FILE_BYTES)) is not None
    except OSError:
        in_pod = False
    if not in_pod and "KUBERNETES_SERVICE_HOST" not in env:
        return None
    capabilities = proc.effective_capabilities("self", root / "proc")
    try:
        namespace = proc.pid_namespace(root / "proc")
    except OSError:
        namespace = ""
    if capabilities is None or not namespace:
        return Result("unknown", "cannot read /proc/self, so the permissions of this pod are unknown")
    lacking = [grant for grant, granted in (
        (_PID_NAMESPACE, namespace == proc.FIRST_PID_NAMESPACE),
        (_PTRACE, bool(capabilities & proc.CAP_SYS_PTRACE)),
        (_DRIVER, not no_gpu(facts)),
        (_NAMES, (root / FOLDER.relative_to("/")).is_dir()),
    ) if not granted]
    if not lacking:
        return Result("ok", "host PID namespace, SYS_PTRACE, NVIDIA driver and pod names")
    return Result("warn", "; ".join(grant.lacks for grant in lacking), manifest_lines(lacking))


def manifest_lines(grants: Iterable[_Grant]) -> str:
    grants = list(grants)
    lines = ["spec:", *(f"  {line}" for grant in grants for line in grant.spec)]
    container = [line for grant in grants for line in grant.container]
    if container:
        lines += ["  containers:", "    - name: gputop", *(f"      {line}" for line in container)]
    volumes = [line for grant in grants for line in grant.volumes]
    if volumes:
        lines += ["  volumes:", *(f"    {line}" for line in volumes)]
    return "\n".join(lines)
