"""Processes that listen to a kineto daemon, and their sockets: by the kernel's tables, not by what a process says of
itself.

A client's socket is bound to DIR/dynoconfigclient<uuid>, or to such an abstract name, which any local user can answer.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path, PurePosixPath

from msgspec import Struct

from gputop.core.proc import process_ids, stat_of, status_fields
from gputop.profiler import sockets
from gputop.profiler.kineto.protocol import HOLDING_PREFIX, is_client_name
from gputop.profiler.stale_files import lives

_PROC = Path("/proc")
_ABSTRACT = "\0"
_MAX_OF_USER = 64  # processes: each costs a look at all that it and its parent have open


class DaemonClient(Struct, frozen=True):
    """A process in daemon mode. ``own_pid`` is its PID as it sees it; ``folder``, as it sees it, is that of its socket,
    None where its name is abstract: then whoever binds the daemon's name first commands it. ``holds``: torch.profiler
    records it, which holds the job at its end (:mod:`gputop.launch.inside.gputop_kineto`)."""

    pid: int
    own_pid: int
    uid: int
    folder: PurePosixPath | None
    holds: bool
    started: int  # field 22 of /proc/PID/stat: with the PID, the process's identity


def client_of(pid: int, proc: Path = _PROC) -> DaemonClient | None:
    """The client that a process is; None where it is none, has ended, or may not be read."""
    try:
        return _client(pid, proc, _client_sockets(pid, proc))
    except OSError:
        return None


def find_clients(proc: Path = _PROC) -> list[DaemonClient]:
    """The clients of this machine that may be seen, by PID, of each user at most 64; without any it is cheap."""
    networks, _ = sockets.networks(proc, sorted(process_ids(proc)))
    bound: dict[int, dict[int, str]] = {}  # by network: its owner can say what they like of sockets elsewhere
    for network, pid in networks.items():
        with contextlib.suppress(OSError):
            bound[network] = _client_sockets(pid, proc)
    inodes = {inode for names in bound.values() for inode in names}
    if not inodes:
        return []
    candidates: dict[int, dict[int, str]] = {}  # PID → the names in its network
    for inode, pids in sockets.holders(proc, inodes).items():
        with contextlib.suppress(OSError):
            names = bound.get(sockets.network_namespace(proc, pids[0]), {}) if pids else {}
            if inode in names:
                candidates[pids[0]] = names
    clients: dict[int, DaemonClient] = {}
    tried: Counter[int] = Counter()
    for pid in sorted(candidates):
        with contextlib.suppress(OSError):
            uid = os.stat(f"{proc}/{pid}").st_uid  # noqa: PTH116
            tried[uid] += 1
            if tried[uid] <= _MAX_OF_USER and (client := _client(pid, proc, candidates[pid])) is not None:
                clients[pid] = client
    return list(clients.values())


def _client(pid: int, proc: Path, bound: dict[int, str]) -> DaemonClient | None:
    """The client that a process is; ``bound``: the sockets with a client's name. Raises OSError. A forked child has its
    parent's socket open, too, and is no client: kineto's thread is not in it."""
    inodes = bound.keys() & sockets.open_inodes(proc, pid) if bound else frozenset[int]()
    stat = stat_of(pid, proc)
    if not inodes or stat is None:
        return None
    paths = sorted({bound[inode] for inode in inodes - sockets.open_inodes(proc, stat.parent)})
    if not paths:
        return None
    try:
        status = status_fields(pid, proc)
        uid, own_pid = int(status[b"Uid"].split()[1]), int(status.get(b"NSpid", b"%d" % pid).split()[-1])
    except (ValueError, KeyError, IndexError):
        return None
    named = [path for path in paths if not path.startswith(_ABSTRACT)]
    folder = PurePosixPath(named[0]).parent if len(named) == len(paths) else None
    return DaemonClient(pid, own_pid, uid, folder, all(HOLDING_PREFIX in path for path in paths), stat.start)


def is_same(client: DaemonClient) -> bool:
    """Return whether the process still is the one that was found."""
    with contextlib.suppress(OSError):
        return lives(client.pid, client.started)
    return False


def _client_sockets(pid: int, proc: Path) -> dict[int, str]:
    """Inode and name of the sockets with a client's name in the process's network. Raises OSError."""
    client_sockets = {}
    for inode, name in sockets.unix_names(proc, pid).items():
        text = os.fsdecode(name)
        if is_client_name(text.strip(_ABSTRACT) if text.startswith(_ABSTRACT) else text.rpartition("/")[2]):
            client_sockets[inode] = text
    return client_sockets
