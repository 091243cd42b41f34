"""Which processes listen to a kineto daemon, and where: by the kernel's tables, not by what a process says of itself.

A client's socket is bound to DIR/dynoconfigclient<uuid>, or to such an abstract name, which any local user can answer.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path, PurePosixPath

from msgspec import Struct

from gputop.core.proc import read
from gputop.profiler import sockets
from gputop.profiler.kineto.protocol import CLIENT_PREFIX, HOLDING_PREFIX, is_client_name
from gputop.profiler.stale_files import lives

_PROC = Path("/proc")
_TABLE_BYTES = 16 << 20  # of /proc/PID/net/unix: a line of a hundred bytes for each socket of the network
_STATUS_BYTES = 1 << 14
_ABSTRACT = "@"


class Client(Struct, frozen=True):
    """A process in daemon mode. ``own_pid`` is its PID as it sees it; ``folder``, as it sees it, is that of its socket,
    None where its name is abstract: then whoever binds the daemon's name first commands it. ``holds``: torch.profiler
    records it, which holds the job at its end (:mod:`gputop.launch.inside.gputop_kineto`)."""

    pid: int
    own_pid: int
    uid: int
    folder: PurePosixPath | None
    holds: bool
    started: int  # field 22 of /proc/PID/stat: with the PID, the process's identity


def client_of(pid: int, proc: Path = _PROC) -> Client | None:
    """The client that a process is; None where it is none, has ended, or may not be read.

    A forked child has its parent's socket open, too, and is no client: kineto's thread is not in it.
    """
    try:
        bound = _client_sockets(pid, proc)
        if not bound:
            return None
        inodes = bound.keys() & sockets.open_inodes(proc, pid)
        fields = sockets.stat_fields(proc, pid)
        if not inodes or fields is None:
            return None
        inodes -= sockets.open_inodes(proc, fields[0])
        status = dict(re.findall(rb"^(\w+):\s*(.*)$", read(f"{proc}/{pid}/status", _STATUS_BYTES), re.MULTILINE))
        uid, own_pid = int(status[b"Uid"].split()[1]), int(status.get(b"NSpid", b"%d" % pid).split()[-1])
    except (OSError, ValueError, KeyError, IndexError):
        return None
    paths = sorted({bound[inode] for inode in inodes})
    if not paths:
        return None
    named = [path for path in paths if not path.startswith(_ABSTRACT)]
    folder = PurePosixPath(named[0]).parent if len(named) == len(paths) else None
    return Client(pid, own_pid, uid, folder, all(HOLDING_PREFIX in path for path in paths), fields[1])


def find_clients(proc: Path = _PROC) -> list[Client]:
    """The clients of this machine that may be seen, by PID; a few files read where there are none."""
    namespaces: dict[int, int] = {}
    for pid in sorted(sockets.process_ids(proc)):
        with contextlib.suppress(OSError):
            namespaces.setdefault(sockets.network_namespace(proc, pid), pid)
    inodes: set[int] = set()
    for pid in namespaces.values():
        with contextlib.suppress(OSError):
            inodes |= _client_sockets(pid, proc).keys()
    if not inodes:
        return []
    holders = sockets.holders(proc, inodes).values()
    found = {pid: client_of(pid, proc) for pids in holders for pid in pids[:1]}
    return [client for _, client in sorted(found.items()) if client is not None]


def is_same(client: Client) -> bool:
    """Whether the process still is the one that was found."""
    with contextlib.suppress(OSError):
        return lives(client.pid, client.started)
    return False


def _client_sockets(pid: int, proc: Path) -> dict[int, str]:
    """Inode and name of the sockets with a client's name in the process's network. Raises OSError."""
    found = {}
    marker = CLIENT_PREFIX.encode()
    for line in read(f"{proc}/{pid}/net/unix", _TABLE_BYTES).split(b"\n"):
        if marker not in line:
            continue
        columns = line.split(None, 7)  # proc_net_unix: num, refcount, protocol, flags, type, state, inode, path
        if len(columns) < 8 or not columns[6].isdigit():
            continue
        name = columns[7].decode("utf-8", "surrogateescape")
        if is_client_name(name.removeprefix(_ABSTRACT).rpartition("/")[2].rstrip(_ABSTRACT)):
            found[int(columns[6])] = name
    return found
