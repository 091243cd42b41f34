"""Listening sockets and their processes, read from /proc: without psutil's look at every open file each time."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import itertools
import os
import re
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from gputop.core.proc import children_by_parent, process_ids, read, stat_of, status_fields, with_descendants

T = TypeVar("T")
_LISTEN = "0A"  # TCP_LISTEN in include/net/tcp_states.h
# sock_diag(7), include/uapi/linux/inet_diag.h: all TCP sockets of a family in a state, and what is told of each.
_SOCK_DIAG, _DIAG_BY_FAMILY, _REQUEST, _DUMP, _ERROR, _DONE = 4, 20, 0x1, 0x300, 2, 3
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_QUERY = struct.Struct("=BBxxI48x")  # struct inet_diag_req_v2: family, protocol, states
_ANSWER = struct.Struct("=B3x2s2x16s40xII")  # struct inet_diag_msg: family, port, address, user, inode
# include/uapi/linux/unix_diag.h: all UNIX sockets, with their names.
_UNIX_QUERY = struct.Struct("=BBxxIII8x")  # struct unix_diag_req: family, protocol, states, inode, what is shown
_UNIX_ANSWER = struct.Struct("=4xI8x")  # struct unix_diag_msg: inode
_ATTRIBUTE = struct.Struct("=HH")  # struct nlattr: length, type
_SHOW_NAME, _NAME = 1, 0
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_CLONE_NEWNET = 0x40000000  # linux/sched.h
_NETLINK_TIMEOUT_S = 1.0
_KERNEL = 0  # its address (netlink(7))
_MAX_FOREIGN = 100  # messages that are not the kernel's
_ETHERNET = "1"  # ARPHRD_ETHER in linux/if_arp.h: those of containers are, tunnels are not
_MAX_NETWORKS = 64  # of one user: each costs a thread and some tables
_MAX_CLAIMED = 256  # addresses of a container that are looked at
# A job has thousands of files open; a user may have a million in each process, and each is a look of the kernel's.
_MANY_DESCRIPTORS, _MAX_DESCRIPTORS, _MAX_DESCRIPTORS_OF_USER = 1 << 8, 1 << 16, 1 << 19
_ARRIVALS, _ARRIVAL_PERIOD_S = 20, 0.01  # looks for a connection on the other side, which has it at once
# A network's own user fills its tables at will: a line of tcp has 150 bytes, so that this holds 100,000 connections.
_TABLE_BYTES = 16 << 20
_IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_LOCAL_ADDRESS = re.compile(r"\|-- (\d+\.\d+\.\d+\.\d+)\n\s+/32 host LOCAL")


class Listener(Struct, frozen=True):
    """A TCP socket that accepts connections on all interfaces. ``namespace`` is its network's inode."""

    inode: int
    port: int
    namespace: int


def with_children(proc: Path, pids: Iterable[int]) -> set[int]:
    return with_descendants(pids, children_by_parent(
        (pid, stat.parent) for pid in process_ids(proc) if (stat := stat_of(pid, proc)) is not None))


def network_namespace(proc: Path, pid: int) -> int:
    """Raises OSError: PermissionError where the process belongs to someone else."""
    return os.stat(f"{proc}/{pid}/ns/net").st_ino  # noqa: PTH116  asked of every process


def networks(proc: Path, pids: Iterable[int]) -> tuple[dict[int, int], list[int]]:
    """A process of each network among some: by the network's inode the first PID, gputop's own network first, and the
    PIDs that may not be looked at. Of each user but root at most 64 networks: whoever makes thousands is not waited
    for."""
    own_network: int | None = None
    with contextlib.suppress(OSError):
        own_network = network_namespace(proc, os.getpid())
    first_pids: dict[int, int] = {}
    refused: list[int] = []
    of_user: Counter[int] = Counter()
    for pid in pids:
        try:
            inode = network_namespace(proc, pid)
            if inode in first_pids:
                continue
            user = os.stat(f"{proc}/{pid}").st_uid  # noqa: PTH116
        except PermissionError:
            refused.append(pid)
        except OSError:  # gone
            continue
        else:
            of_user[user] += inode != own_network
            if not user or of_user[user] <= _MAX_NETWORKS:
                first_pids[inode] = pid
    return dict(sorted(first_pids.items(), key=lambda item: item[0] != own_network)), refused


class _Row(Struct, frozen=True):
    """A TCP socket that listens. ``address`` has the bytes of the network: 4, or 16 of IPv6."""

    address: bytes
    port: int
    uid: int
    inode: int


def listeners(proc: Path, pid: int, namespace: int) -> list[Listener]:
    """Wildcard listeners of the process's network. Others are not of interest: the profiler
    servers of TensorFlow and JAX bind to all interfaces, NCCL's and other inner sockets to one.

    Of the kernel, if gputop may enter that network: the tables of /proc hold all connections, which its user makes as
    many as they like, and for them the kernel walks through all places that one could be in: 5 ms a table, even where
    there is none.
    """
    rows = None
    if proc == Path("/proc"):
        with contextlib.suppress(OSError):  # the process is gone
            rows = _in_network(pid, _kernel_rows)
    return [Listener(row.inode, row.port, namespace)
            for row in (_table_rows(f"{proc}/{pid}/net") if rows is None else rows) if not any(row.address)]


def _table_rows(folder: str) -> Iterator[_Row]:
    """The sockets that listen by the tables tcp and tcp6 of ``folder``, as far as these are read."""
    for table in _tables(folder):
        for line in table.decode("ascii", "replace").splitlines()[1:]:
            columns = line.split(None, 10)
            with contextlib.suppress(ValueError, IndexError):  # the line at which the text is cut
                if columns[3] == _LISTEN:
                    address, _, port = columns[1].partition(":")
                    yield _Row(_network_order(bytes.fromhex(address)), int(port, 16), int(columns[7]), int(columns[9]))


def _tables(folder: str) -> Iterator[bytes]:
    """The tables tcp and tcp6 of ``folder``, each as far as it is read."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # no IPv6 there, or the process is gone
            yield read(f"{folder}/{table}", _TABLE_BYTES)


def _kernel_rows() -> list[_Row] | None:
    """The sockets that listen in this thread's network; None where the kernel does not say."""
    rows = []
    try:
        for family in (socket.AF_INET, socket.AF_INET6):
            for message in _messages(_QUERY.pack(family, socket.IPPROTO_TCP, 1 << int(_LISTEN, 16))):
                kind, port, address, uid, inode = _ANSWER.unpack_from(message)
                address = address[:4] if kind == socket.AF_INET else address
                rows.append(_Row(address, int.from_bytes(port, "big"), uid, inode))
    except (OSError, struct.error):
        return None
    return rows


def _messages(query: bytes) -> Iterator[bytes]:
    """Yield the kernel's answers to a query for all sockets of a kind, of very many the first. Raises OSError."""
    left = _TABLE_BYTES
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(_NETLINK_TIMEOUT_S)
        kernel.send(_HEADER.pack(_HEADER.size + len(query), _DIAG_BY_FAMILY, _REQUEST | _DUMP, 0, 0) + query)
        for message in _answers(kernel):
            yield message
            left -= len(message)
            if left < 0:
                return  # no error: what is used without the kernel can be forged


def _answers(kernel: socket.socket) -> Iterator[bytes]:
    """The messages of the kernel alone: who owns a network may send others to any socket in it (netlink(7))."""
    foreign = 0
    while True:
        (answer, (sender, _)), pos = kernel.recvfrom(1 << 16), 0
        if sender != _KERNEL:
            foreign += 1
            if foreign > _MAX_FOREIGN:  # no error: what is used without the kernel can be forged
                return
            continue
        while pos < len(answer):
            length, kind, _, _, _ = _HEADER.unpack_from(answer, pos)
            if kind == _DONE:
                return
            if kind == _ERROR or length < _HEADER.size:
                raise OSError("the kernel does not list its sockets")
            yield answer[pos + _HEADER.size:pos + length]
            pos += (length + 3) & ~3


def receive(receiver: socket.socket, most_bytes: int) -> tuple[bytes, tuple[int, int] | None, object]:
    """A datagram, the PID and the user of who sent it, as the kernel tells them (SO_PASSCRED), and the name of their
    socket. Raises OSError."""
    data, ancillary, _, name = receiver.recvmsg(most_bytes, socket.CMSG_SPACE(_CREDENTIALS.size))
    senders = [_CREDENTIALS.unpack(value)[:2] for level, kind, value in ancillary
               if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(value) == _CREDENTIALS.size]
    return data, senders[0] if senders else None, name


def listening_uids(proc: Path, host: str, port: int) -> frozenset[int]:
    """The users of the sockets that listen at a TCP port of this network, and at this very address where ``host`` is
    one. Mostly one user; none where nobody listens."""
    return frozenset(uid for uid, _ in _listening(proc, host, port))


def listening_pid(proc: Path, host: str, port: int) -> int | None:
    """The process whose socket listens there; None where that may not be seen. A job's loader workers that were forked
    have the socket open, too: it is the oldest that serves."""
    held = holders(proc, {inode for _, inode in _listening(proc, host, port)})
    return next((pids[0] for pids in held.values() if pids), None)


def _listening(proc: Path, host: str, port: int) -> list[tuple[int, int]]:
    """User and inode of the sockets that listen at a TCP port: of those at several addresses, which may be different
    users', those that the kernel lets answer at ``host``: one of that very address goes before one of all."""
    rows = _kernel_rows() if proc == Path("/proc") else None
    by_address: dict[_IpAddress, list[tuple[int, int]]] = {}
    for row in _table_rows(f"{proc}/net") if rows is None else rows:
        if row.port == port:
            by_address.setdefault(ipaddress.ip_address(row.address), []).append((row.uid, row.inode))
    try:
        wanted = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:  # a name
        return [holder for holders_there in by_address.values() for holder in holders_there]
    best = [wanted, ipaddress.ip_address("::")]
    if wanted.version == 4:
        best[1:1] = [ipaddress.ip_address(f"::ffff:{wanted}"), ipaddress.ip_address("0.0.0.0")]
    return next((by_address[address] for address in best if address in by_address), [])


def _network_order(words: bytes) -> bytes:
    """An address as /proc prints it, in words of 32 bits in this machine's order of bytes, in that of the network."""
    if sys.byteorder == "little":
        words = b"".join(words[start:start + 4][::-1] for start in range(0, len(words), 4))
    return words


def bound(proc: Path, name: str) -> set[int]:
    """Inodes of the sockets of this machine bound to a path, or to an abstract name after a zero (unix(7))."""
    return {inode for inode, other in unix_names(proc, os.getpid()).items() if other == os.fsencode(name)}


def unix_names(proc: Path, pid: int) -> dict[int, bytes]:
    """Inodes and names of the UNIX sockets of a process's network that have one: a path, or an abstract name after a
    zero. Raises OSError.

    Who binds a socket may put line ends into its name, and with them whole lines of other sockets into the table of
    /proc. The kernel gives each name with its length to who may enter that network; of the table only what is not
    claimed twice is taken.
    """
    names = _in_network(pid, _kernel_names) if proc == Path("/proc") else None
    return _table_names(read(f"{proc}/{pid}/net/unix", _TABLE_BYTES)) if names is None else names


def _kernel_names() -> dict[int, bytes] | None:
    """None where the kernel does not say."""
    names = {}
    try:
        for message in _messages(_UNIX_QUERY.pack(socket.AF_UNIX, 0, 0xffffffff, 0, _SHOW_NAME)):
            length, kind = _ATTRIBUTE.unpack_from(message, _UNIX_ANSWER.size) if len(message) > 16 else (0, -1)
            if kind == _NAME:
                name = message[_UNIX_ANSWER.size + _ATTRIBUTE.size:_UNIX_ANSWER.size + length]
                names[_UNIX_ANSWER.unpack_from(message)[0]] = name if name[:1] == b"\0" else name.rstrip(b"\0")
    except (OSError, struct.error):
        return None
    return names


def _in_network(pid: int, call: Callable[[], T | None]) -> T | None:
    """Return the result of ``call`` in the network of a process; None where gputop may not enter it. Raises OSError."""
    if network_namespace(Path("/proc"), pid) == network_namespace(Path("/proc"), os.getpid()):
        return call()
    results: list[T | None] = []

    def work() -> None:  # in a thread of its own: setns(2) is for one thread
        with contextlib.suppress(OSError), open(f"/proc/{pid}/ns/net") as network:  # noqa: PTH123
            if ctypes.CDLL(None).setns(network.fileno(), _CLONE_NEWNET) == 0:
                results.append(call())

    thread = threading.Thread(target=work, name="gputop-network")
    thread.start()
    thread.join()
    return results[0] if results else None


def _table_names(table: bytes) -> dict[int, bytes]:
    names: dict[int, bytes] = {}
    claimed: set[int] = set()
    for line in table.split(b"\n"):
        columns = line.split(b" ", 6)  # the number of blanks before an inode varies, and a path may hold some
        text, _, name = columns[-1].strip().partition(b" ")
        if len(columns) < 7 or not text.isdigit():
            continue
        inode = int(text)
        if name and inode not in claimed:
            # The table shows a zero as "@": kineto's names end with one.
            names[inode] = b"\0" + name[1:].removesuffix(b"@") + b"\0" * name[1:].endswith(b"@") if (
                name[:1] == b"@") else name
        elif inode in claimed:
            names.pop(inode, None)
        claimed.add(inode)
    return names


def holders(proc: Path, inodes: set[int]) -> dict[int, list[int]]:
    """Processes that have these sockets open, as far as that may be read, the oldest first. Of very many open files of
    a process, and of a user's processes, the first ones are looked at."""
    pids_of: dict[int, list[int]] = {inode: [] for inode in inodes}
    counted: Counter[bytes] = Counter()  # descriptors by user, of processes that have many
    for pid in process_ids(proc):
        for count, link in enumerate(_links(f"{proc}/{pid}/fd"), 1):
            match = _SOCKET.fullmatch(link)
            if match and int(match[1]) in pids_of and pid not in pids_of[int(match[1])]:
                pids_of[int(match[1])].append(pid)
            if count % _MANY_DESCRIPTORS == 0:
                user = _real_user(proc, pid)
                counted[user] += _MANY_DESCRIPTORS
                if count >= _MAX_DESCRIPTORS or counted[user] > _MAX_DESCRIPTORS_OF_USER:
                    break
    for pids in pids_of.values():
        pids.sort(key=lambda pid: stat.start if (stat := stat_of(pid, proc)) is not None else 0)
    return pids_of


def _real_user(proc: Path, pid: int) -> bytes:
    """User of a process by its status: its folder is root's once it has made itself undumpable (prctl(2))."""
    try:
        return status_fields(pid, proc).get(b"Uid", b"").split()[0]
    except (OSError, IndexError):
        return b""


def open_inodes(proc: Path, pid: int) -> set[int]:
    """The inodes of the sockets that a process has open; none where it may not be read."""
    return {int(match[1]) for link in itertools.islice(_links(f"{proc}/{pid}/fd"), _MAX_DESCRIPTORS)
            if (match := _SOCKET.fullmatch(link))}


def _links(folder: str) -> Iterator[str]:
    """Yield the targets of a folder's links; strings all along, a job may have thousands of files open."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:  # else someone else's process, or gone
        for entry in entries:
            with contextlib.suppress(OSError):  # closed meanwhile
                yield os.readlink(entry.path)  # noqa: PTH115


def addresses_of(proc: Path, pid: int) -> list[str]:
    """IPv4 addresses of the process's network at which this machine reaches it, loopback left out.

    A container can claim any address, that of another machine, too. Only those count that this machine's routes send
    out over an interface that stays in it, such as a container's bridge. There it may still claim a neighbor's: see
    :func:`arrives_in`. Of very many claimed addresses the first ones are looked at.
    """
    try:
        text = read(f"{proc}/{pid}/net/fib_trie", _TABLE_BYTES).decode("ascii", "replace")
        local = set(_LOCAL_ADDRESS.findall(read(f"{proc}/net/fib_trie", _TABLE_BYTES).decode("ascii", "replace")))
        routes = _routes(read(f"{proc}/net/route", _TABLE_BYTES).decode("ascii", "replace"))
    except OSError:
        return []
    claimed = dict.fromkeys(match[1] for match in itertools.islice(_LOCAL_ADDRESS.finditer(text), _MAX_CLAIMED))
    return [a for a in claimed
            if not a.startswith("127.") and a not in local and _stays(a, local, routes, proc.parent / "sys/class/net")]


def arrives_in(proc: Path, pid: int, host: str, port: int, timeout_s: float) -> bool:
    """Return whether what is sent to an IPv4 address and port arrives in the network of a process, which claims that
    address.

    A connection is made, and looked for in that network's own table. One that was there before is no proof: a container
    could hold some for each port that the connection may come from.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.bind(("", 0))
        until_s = time.monotonic() + timeout_s
        patterns = _connection_patterns(host, port, connection.getsockname()[1])
        if _has_connection(proc, pid, patterns):
            return False
        try:
            connection.connect((host, port))
        except OSError:
            return False
        for _ in range(_ARRIVALS):
            if _has_connection(proc, pid, patterns):
                return True
            if time.monotonic() > until_s:  # its tables are long
                return False
            time.sleep(_ARRIVAL_PERIOD_S)
    return False


def _connection_patterns(host: str, port: int, remote_port: int) -> tuple[re.Pattern[bytes], ...]:
    """Match the line of a connection between these ends in the tables tcp and tcp6, whatever it calls the other end's
    address. Each begins with a text: that is sought fast in a table of 100,000 lines that somebody made."""
    address = ipaddress.ip_address(host).packed
    local = (_network_order(packed).hex().upper() for packed in (address, bytes(10) + b"\xff\xff" + address))
    return tuple(re.compile(f" {words}:{port:04X} [0-9A-F]{{8,32}}:{remote_port:04X} (?!{_LISTEN})".encode())
                 for words in local)


def _has_connection(proc: Path, pid: int, patterns: tuple[re.Pattern[bytes], ...]) -> bool:
    return any(pattern.search(table) for table in _tables(f"{proc}/{pid}/net") for pattern in patterns)


class _Route(Struct, frozen=True):
    """A line of /proc/net/route; addresses are numbers."""

    interface: str
    destination: int
    mask: int
    metric: int
    gateway: int


def _routes(table: str) -> list[_Route]:
    """The best first."""
    routes = []
    for line in table.splitlines()[1:]:
        columns = line.split()
        with contextlib.suppress(ValueError, IndexError):
            destination, gateway, mask = (
                int.from_bytes(_network_order(bytes.fromhex(columns[n])), "big") for n in (1, 2, 7))
            routes.append(_Route(columns[0], destination, mask, int(columns[6]), gateway))
    return sorted(routes, key=lambda route: (-route.mask, route.metric))


def _stays(address: str, local: Collection[str], routes: Sequence[_Route], interfaces: Path) -> bool:
    """Return whether what is sent to an address does not leave this machine: the best route to it leads to no other
    machine, and over no physical interface."""
    number = int(ipaddress.ip_address(address))
    best = next((route for route in routes if number & route.mask == route.destination), None)
    if best is None or (best.gateway and str(ipaddress.ip_address(best.gateway)) not in local):
        return False
    return _is_internal(interfaces, best.interface)


def _is_internal(interfaces: Path, name: str, depth: int = 4) -> bool:
    """Return whether an interface and those below it (of a bridge, a bond, a VLAN) are no devices or tunnels."""
    folder = interfaces / name
    try:
        if not depth or (folder / "type").read_text().strip() != _ETHERNET or (folder / "device").exists():
            return False
        below = [entry.name.removeprefix("lower_") for entry in folder.iterdir() if entry.name.startswith("lower_")]
    except OSError:
        return False
    return all(_is_internal(interfaces, other, depth - 1) for other in below)
