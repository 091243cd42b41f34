"""Asks NCCL's RAS, which every process of a job with NCCL 2.24 or newer serves on the loopback interface.

One answer covers the whole job. A status takes as long as the slowest rank, up to some seconds where one is gone;
whoever listens there may also send for ever, or nothing: an answer has an end in bytes and in time. Anybody can listen
at a port that is free: nothing is sent before the user who listens at the very address is known.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from gputop.core.errors import GputopError
from gputop.core.proc import owner
from gputop.profiler.sockets import listening_uids
from gputop.ranks.model import RasAnswer
from gputop.ranks.processes import environment
from gputop.text.units import printable

_PROC = Path("/proc")
DEFAULT_ADDRESS = "localhost:28028"
ADDRESS_VARIABLE, ENABLE_VARIABLE = "NCCL_RAS_ADDR", "NCCL_RAS_ENABLE"
TIMEOUT_S = 20.0
_LEG_TIMEOUT_S = 5  # what RAS waits for each half of its way through the ranks; NCCL's own default
_CONNECT_TIMEOUT_S = 2.0
_MAX_BYTES = 4 << 20  # as JSON a rank takes some 700 bytes in each communicator; of more, the text is read
_MAX_LINE_BYTES = 1000
_NEEDS = ("NCCL 2.24 and newer provides RAS in every process of a job unless NCCL_RAS_ENABLE=0 is set. A container "
          "with its own network hides RAS. NCCL_RAS_ADDR sets another address.")


Read = Callable[[bytes, bool, float], RasAnswer]  # an answer, whether it is JSON, and when it came; raises GputopError


class NotServed(GputopError):
    """Nobody listens there."""


class _TooLarge(GputopError):
    """More than is read."""


def read_here(data: bytes, as_json: bool, time_s: float) -> RasAnswer:
    """See :data:`Read`."""
    from gputop.ranks.ras_answers import read_json, read_text  # takes 2 MB, and most jobs have no RAS that answers

    return read_json(data, time_s) if as_json else read_text(data, time_s)


def ask(address: str = DEFAULT_ADDRESS, timeout_s: float = TIMEOUT_S, *, read: Read = read_here,
        owners: frozenset[int] | None = None, on_connected: Callable[[str], object] | None = None) -> RasAnswer:
    """The status of the job. Blocks for at most ``timeout_s``. ``on_connected`` is told the address once somebody
    listens there: from then on it may take a while. ``owners``: the users that are believed; None: all.

    Raises :class:`NotServed` where nothing listens, GputopError where what answers is damaged, late or not RAS.
    """
    ends_s = time.monotonic() + timeout_s
    with contextlib.suppress(_TooLarge):
        data, as_json = _status(address, ends_s, "json", owners, on_connected)
        if not as_json:
            return read(data, False, time.time())
        with contextlib.suppress(GputopError):
            return read(data, True, time.time())
    data, _ = _status(address, ends_s, "text", owners)
    return read(data, False, time.time())


def _connect(address: str, owners: frozenset[int] | None) -> socket.socket:
    """A connection to the first of a name's addresses at which one of the ``owners`` listens. Raises OSError, and
    GputopError where only others do."""
    refused: OSError | GputopError = OSError("the host name has no address")
    host, port = split(address)
    for family, kind, protocol, _, socket_address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(_CONNECT_TIMEOUT_S)
            connection.connect(socket_address)
            if owners is not None:
                _check_owner(str(socket_address[0]), port, owners)
        except (OSError, GputopError) as error:
            connection.close()
            if isinstance(error, GputopError) or not isinstance(refused, GputopError):
                refused = error
            continue
        return connection
    raise refused


def _check_owner(ip: str, port: int, owners: frozenset[int]) -> None:
    uids = listening_uids(_PROC, ip, port)
    if not uids or not uids <= owners:
        who = f"user {min(uids - owners)}, who owns none of these processes," if uids else ("a user unknown to gputop")
        address = f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
        raise GputopError(f"{who} listens at {address}",
                          f"If this address still belongs to the job, set {ADDRESS_VARIABLE}={address} for gputop.")


def _status(address: str, ends_s: float, format: str, owners: frozenset[int] | None,
            on_connected: Callable[[str], object] | None = None) -> tuple[bytes, bool]:
    """The raw status, and whether it is JSON."""
    try:
        with _connect(address, owners) as connection:
            if on_connected is not None:
                on_connected(address)
            line = _exchange(connection, "CLIENT PROTOCOL 2", ends_s)
            if not line.startswith("SERVER PROTOCOL "):
                raise GputopError(f"the program at {address} is not NCCL's RAS: {printable(line)[:60]!r}",
                                  "Another program uses this port.")
            _exchange(connection, f"TIMEOUT {_LEG_TIMEOUT_S}", ends_s)
            as_json = format == "json" and _exchange(connection, "SET FORMAT json", ends_s) == "OK"
            connection.sendall(b"VERBOSE STATUS\n")
            return _read_all(connection, ends_s), as_json
    except ConnectionRefusedError:
        raise NotServed(f"NCCL's RAS is not listening at {address}", _NEEDS) from None
    except TimeoutError:
        raise GputopError(f"NCCL's RAS at {address} did not answer in time",
                          "RAS may hang with the job. Try again, or check the stacks.") from None
    except OSError as error:
        raise GputopError(f"cannot query NCCL's RAS at {address}: {error.strerror or error}", _NEEDS) from None


def _exchange(connection: socket.socket, command: str, ends_s: float) -> str:
    """Send a line and return the one that answers it."""
    connection.sendall(command.encode() + b"\n")
    line = b""
    while not line.endswith(b"\n"):
        _wait(connection, ends_s)
        byte = connection.recv(1)  # no more: what follows belongs to the next answer
        line += byte
        if not byte or len(line) > _MAX_LINE_BYTES:
            raise GputopError("the program there does not answer like NCCL's RAS", "Another program uses this port.")
    return line.decode("utf-8", "replace").rstrip("\r\n")


def _read_all(connection: socket.socket, ends_s: float) -> bytes:
    """All until the other side closes the connection."""
    whole = bytearray()  # which may come a byte at a time
    while True:
        _wait(connection, ends_s)
        part = connection.recv(1 << 16)
        if not part:
            return bytes(whole)
        whole += part
        if len(whole) > _MAX_BYTES:
            raise _TooLarge(f"NCCL's answer is larger than {_MAX_BYTES >> 20} MB", "Larger answers are not supported.")


def _wait(connection: socket.socket, ends_s: float) -> None:
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    connection.settimeout(left_s)


def split(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT or [IPv6]:PORT; raises GputopError."""
    host, _, port = address.strip().rpartition(":")
    host = host.strip("[]")
    if not host or not (port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 65536):
        raise GputopError(f"{ADDRESS_VARIABLE}={printable(address)[:80]} is not HOST:PORT", "Example: localhost:28028.")
    return host, int(port)


def ask_job(pids: Iterable[int], hosts: frozenset[str],
            on_connected: Callable[[str], object] | None = None, read: Read = read_here) -> RasAnswer:
    """The status of the job that these processes belong to; ``hosts`` are this node's addresses. As :func:`ask`.

    Raises GputopError, too, where only another user than theirs, or root, listens there.
    """
    pids = list(pids)
    environs = (environment(pid, (ADDRESS_VARIABLE, ENABLE_VARIABLE)) for pid in pids)
    address = address_of(os.environ, environs, hosts)
    owners = None
    if not os.environ.get(ADDRESS_VARIABLE) and pids:
        owners = frozenset({uid for pid in pids if (uid := owner(pid)) is not None} | {0})
    return ask(address, read=read, owners=owners, on_connected=on_connected)


def address_of(environ_here: Mapping[str, str], of_jobs: Iterable[Mapping[str, str]], local: frozenset[str]) -> str:
    """Address to ask: what gputop's own environment says, else that of a job, else NCCL's default.

    Only an address of this node (``local``) is taken from a job, which may belong to another user. Raises GputopError
    where a job has RAS turned off.
    """
    if environ_here.get(ADDRESS_VARIABLE):
        return environ_here[ADDRESS_VARIABLE]
    for environ in of_jobs:
        if environ.get(ENABLE_VARIABLE) == "0":
            raise GputopError("NCCL's RAS is turned off in the job (NCCL_RAS_ENABLE=0)", "Start the job without it.")
        with contextlib.suppress(GputopError):
            host, port = split(environ.get(ADDRESS_VARIABLE, ""))
            if (here := _here(host, local)) is not None:
                return f"{here}:{port}"
    return DEFAULT_ADDRESS


def _here(host: str, local: frozenset[str]) -> str | None:
    """The host, to connect to it, where it is this node."""
    if host == "localhost":
        return host
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    if ip.is_unspecified:
        return "localhost"
    shown = f"[{host}]" if ip.version == 6 else host
    return shown if ip.is_loopback or host in local else None
