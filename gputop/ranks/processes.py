"""The processes of a job on this node, and what their environment says."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from gputop.core.proc import process_ids
from gputop.sources.host import proc_files
from gputop.text import redaction

_PROC = Path("/proc")


def local_addresses() -> frozenset[str]:
    import psutil

    local = set()
    with contextlib.suppress(OSError):
        for addresses in psutil.net_if_addrs().values():
            local |= {a.address.partition("%")[0] for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)}
    return frozenset(local)


def environment(pid: int, names: Iterable[str], proc: Path = _PROC) -> Mapping[str, str]:
    """Values of these variables of a process, as far as they are set and may be read; nothing else of it is kept."""
    try:
        environ = proc_files.read(f"{proc}/{pid}/environ", proc_files.ENVIRON_BYTES)
    except OSError:
        return {}
    return {name: value for name in names if (value := proc_files.variable(environ, name.encode())) is not None}


def command_line(pid: int, proc: Path = _PROC) -> str:
    """Command of a process, the secrets in it hidden; "" where it is gone."""
    try:
        raw = proc_files.read(f"{proc}/{pid}/cmdline", proc_files.LARGE_BYTES)
    except OSError:
        return ""
    return redaction.command(proc_files.command(raw, b""))


def rank_label(pid: int, proc: Path = _PROC) -> str:
    """Label of a process in its job, as "rank 3" or "worker 1"; "" where its environment has none."""
    from gputop.profiler.discovery import RANK_VARIABLES, rank_of

    return rank_of(environment(pid, ("TF_CONFIG", *RANK_VARIABLES), proc)) or ""


def training_processes(proc: Path = _PROC) -> list[int]:
    """The processes that have TensorFlow, JAX or CUDA loaded, as far as that may be read; gputop's own is left out."""
    from gputop.profiler.discovery import is_training

    return sorted(pid for pid in process_ids(proc) if pid != os.getpid() and is_training(pid, proc))
