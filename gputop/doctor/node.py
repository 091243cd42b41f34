"""The node around the GPUs: Python, the container, the terminal, /proc, the disk, and the rights of gputop's pod."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import locale
import os
import platform
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from msgspec import Struct

from gputop.core import proc
from gputop.core.own_program import pip_command
from gputop.core.proc import FIRST_PID_NAMESPACE, pid_namespace
from gputop.core.version import __version__
from gputop.doctor.check import Result, text_of
from gputop.doctor.driver import in_container, no_gpu
from gputop.doctor.driver_facts import DriverFacts
from gputop.sources.host.containers import FOLDER, pod_container
from gputop.text.units import printable, size

_PACKAGES = {"textual": "textual", "nvidia-ml-py": "pynvml", "psutil": "psutil", "numpy": "numpy", "grpcio": "grpc",
             "protobuf": "google.protobuf"}
_GIB = 1 << 30
_LITTLE_DISK_BYTES = 4 * _GIB  # a capture can reach 2 GiB, protobuf's limit, and is written beside the last one
_NO_DISK_BYTES = 64 << 20
_SMALLEST = (80, 24)
_PIP = shlex.join(pip_command())


def python() -> Result:
    return Result("ok", f"gputop {__version__} on Python {platform.python_version()} ({sys.executable})")


def dependencies() -> Result:
    """Check whether the packages gputop uses can be imported, with their versions."""
    versions: list[str] = []
    broken: dict[str, str] = {}
    for name, module in _PACKAGES.items():
        try:
            importlib.import_module(module)
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} (version unknown)")
        except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, OSError) as error:
            broken[name] = f"cannot import {name} ({type(error).__name__}: {error})"
    if broken:
        return Result("fail", "; ".join(broken.values()), f"{_PIP} install --force-reinstall {' '.join(broken)}")
    spec = importlib.util.find_spec("pynvml")
    if spec is not None and spec.submodule_search_locations is not None:
        # nvidia-ml-py is one file; only the old distribution "pynvml" is a folder, and it comes first.
        return Result("warn", f"the old package pynvml hides nvidia-ml-py ({spec.origin}), so newer calls such as GPM "
                              "are missing",
                      f"{_PIP} uninstall -y pynvml\n"
                      f"{_PIP} install --force-reinstall nvidia-ml-py")
    return Result("ok", ", ".join(versions))


def container(root: Path, env: Mapping[str, str]) -> Result:
    """Check whether this is a container, and whether it sees the host's processes."""
    kubernetes = "KUBERNETES_SERVICE_HOST" in env
    inside = kubernetes or in_container(root)
    try:
        namespace = pid_namespace(root / "proc")
    except OSError:
        return Result("unknown", "gputop cannot read the PID namespace")
    if namespace == FIRST_PID_NAMESPACE:
        where = "a container with the host's PID namespace" if inside else "none: this is the host"
        return Result("ok", f"{where}; gputop can name the processes on the GPUs")
    detail = ("a container" if inside else "a separate PID namespace") + (" without the host's processes: the driver "
                                                                          "reports host PIDs, so gputop cannot show "
                                                                          "outside users, commands and profiler "
                                                                          "servers")
    fix = "hostPID: true   # in the pod's spec" if kubernetes else "docker run --pid=host --gpus all IMAGE"
    return Result("warn", detail, fix)


def host(root: Path, euid: int | None = None) -> Result:
    """Check whether /proc shows the host and other users' processes, and psutil reads it."""
    unreadable = []
    for name in ("stat", "meminfo", "self/stat"):
        try:
            (root / "proc" / name).read_bytes()
        except OSError as error:
            unreadable.append(f"/proc/{name}: {error.strerror}")
    if unreadable:
        return Result("fail", "; ".join(unreadable), "sudo mount -t proc proc /proc")
    try:
        import psutil

        cores, memory = psutil.cpu_count(), psutil.virtual_memory().total
    except (ImportError, OSError, RuntimeError) as error:
        return Result("fail", f"psutil does not work: {error}", f"{_PIP} install --force-reinstall psutil")
    mounts = text_of(root / "proc/self/mounts")
    hidden = re.search(r"^\S+ /proc proc \S*\bhidepid=(?!0\b|off\b)(\w+)", mounts, re.MULTILINE)
    if hidden and (os.geteuid() if euid is None else euid) != 0:
        return Result("warn", f"/proc is mounted with hidepid={hidden[1]}: gputop cannot show the command and CPU use "
                              "of other users' processes",
                      "sudo mount -o remount,hidepid=0 /proc   # or start gputop as root")
    return Result("ok", f"/proc and psutil work: {cores} logical cores, {size(memory)} of memory")


def terminal(env: Mapping[str, str], size: Callable[[], os.terminal_size | None] | None = None,
             encoding: str | None = None) -> Result:
    """Check whether the monitor can be drawn here: UTF-8, colors, room."""
    encoding = encoding or locale.getpreferredencoding(False)
    term = env.get("TERM", "")
    colors = "truecolor" if env.get("COLORTERM") in ("truecolor", "24bit") else \
        "256 colors" if term.endswith(("256color", "kitty")) else "16 colors or fewer"
    room = (size or _terminal_size)()
    detail = f"TERM={term or 'unset'}, {encoding}, {colors}"
    if env.get("NO_COLOR"):
        detail += ", NO_COLOR is set: no colors"
    problems, fixes = [], []
    if encoding.upper().replace("-", "").replace("_", "") not in ("UTF8", "CP65001"):
        problems.append("the spectrogram's block characters need UTF-8")
        fixes.append("export LC_ALL=C.UTF-8")
    if term in ("", "dumb", "unknown"):
        problems.append("gputop cannot draw on this terminal type")
        fixes.append("export TERM=xterm-256color")
    elif term == "linux":
        problems.append("the Linux console has 16 colors and lacks glyphs: use a terminal emulator over SSH")
    elif colors.startswith("16"):
        problems.append("few colors: levels are harder to distinguish")
        fixes.append("export TERM=xterm-256color COLORTERM=truecolor   # if your terminal supports this; most do")
    if room is None:
        return Result("warn" if problems else "unknown",
                      "; ".join(("there is no terminal here, so the size is unknown", detail, *problems)),
                      "\n".join(fixes) or None)
    detail = f"{room.columns}×{room.lines}, {detail}"
    if room.columns < _SMALLEST[0] or room.lines < _SMALLEST[1]:
        problems.append(f"smaller than {_SMALLEST[0]}×{_SMALLEST[1]}: gputop leaves out parts of the screen")
        if 0 in room:
            fixes.append(f"stty cols {_SMALLEST[0]} rows {_SMALLEST[1]}")
    return Result("warn" if problems else "ok", "; ".join((detail, *problems)), "\n".join(fixes) or None)


def _terminal_size() -> os.terminal_size | None:
    for stream in (sys.__stdout__, sys.__stderr__, sys.__stdin__):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            return os.get_terminal_size(stream.fileno())  # type: ignore[union-attr]
    return None


def _existing(path: Path) -> Path:
    """``path`` or the nearest folder above it that exists."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def logdir(path: Path) -> Result:
    """Check whether traces can be written there: writes a file without a name."""
    folder = _existing(path)
    shown = printable(str(path.absolute()))
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"gputop")
            file.flush()
    except OSError as error:
        return Result("fail", f"cannot write to {shown}: {error.strerror or error}",
                      "gputop --logdir /tmp/gputop-traces")
    return Result("ok", f"{shown} " + ("can be written" if folder == path.absolute() else "can be created"))


def disk(path: Path, usage: Callable[[Path], tuple[int, int, int]] = shutil.disk_usage) -> Result:
    """Room for traces: one capture takes from some MB to 2 GB."""
    folder = _existing(path)
    try:
        total, _, free = usage(folder)
    except OSError as error:
        return Result("unknown", f"{printable(str(folder))}: {error.strerror or error}")
    text = f"{size(free)} of {size(total)} free for traces at {printable(str(folder))}"
    fix = (f"du -xh --max-depth=2 {shlex.quote(str(folder))} | sort -h | tail\n# or elsewhere: gputop --logdir DIR")
    if free < _NO_DISK_BYTES:
        return Result("fail", text, fix)
    if free < _LITTLE_DISK_BYTES:
        return Result("warn", f"{text}; a capture can need 2 GB", fix)
    return Result("ok", text)


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


def pod_rights(facts: DriverFacts, root: Path, env: Mapping[str, str]) -> Result | None:
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
