"""The PyTorch jobs of this machine that can be captured at once, as servers are listed, and those that are unsafe."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec import Struct

from gputop.core.files import folder_of_process, open_regular
from gputop.core.proc import command_of, environ_of, mappings, read_maps, user_name
from gputop.profiler.discovery import ProfilerServer, rank_of
from gputop.profiler.kineto.clients import find_clients
from gputop.profiler.kineto.guard import is_guarded

_PROC = Path("/proc")
_LIBRARY = "/torch/lib/libtorch_cpu.so"
_VERSION_BYTES = 1 << 16
_VERSION = re.compile(r"^__version__ = '([0-9A-Za-z.+]{1,40})'$", re.MULTILINE)


class Jobs(Struct, frozen=True):
    """The clients whose socket is in a folder and whose recordings are guarded, as ``pid:PID``: one that another tool
    or an older gputop made is first made ready, as any process. And ``unprotected``, the PIDs of those that any local
    user can command, because their socket has an abstract name."""

    servers: tuple[ProfilerServer, ...]
    unprotected: tuple[int, ...]


def find_jobs(proc: Path = _PROC) -> Jobs:
    clients = find_clients(proc)
    servers = (ProfilerServer(
        f"pid:{client.pid}", client.pid, user_name(client.uid), command_of(client.pid, proc), "PyTorch",
        torch_version(client.pid, proc), rank_of(environ_of(client.pid, proc)), client.uid)
        for client in clients if is_guarded(client))
    return Jobs(tuple(servers), tuple(client.pid for client in clients if client.folder is None))


def torch_version(pid: int, proc: Path = _PROC) -> str | None:
    """The version of the torch that a process has mapped, such as "2.13.0+cpu"; None where it cannot be read."""
    try:
        path = next((m.path for m in mappings(read_maps(pid, proc)) if m.path.endswith(_LIBRARY)), "")
        if not path:
            return None
        with (folder_of_process(pid, Path(path).parents[1], proc) as folder,
              open_regular("version.py", _VERSION_BYTES, follow_links=False, folder_fd=folder.fd) as file):
            match = _VERSION.search(file.read(_VERSION_BYTES).decode("utf-8", "replace"))
    except OSError:
        return None
    return match[1] if match else None
