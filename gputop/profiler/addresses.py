"""Addresses of profiler servers: host and port, or a Unix socket; and whose they are."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
from pathlib import Path

from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.profiler import sockets

# Servers listen on TCP. A socket in the file system leads to one: ssh -L, socat.
_UNIX, _ABSTRACT = "unix:", "unix-abstract:"
_PROCESS = "pid:"
_UNIX_BYTES = 107  # unix(7): sun_path less its zero
_PROC = Path("/proc")


def parse_address(text: str) -> str:
    """``host:port`` in its canonical form: this host is 127.0.0.1, IPv6 is in brackets.

    Accepts ``host:port``, ``[::1]:port``, ``:port``, ``port``, and as gRPC names sockets of this machine
    ``unix:/path`` and ``unix-abstract:name``. Raises GputopError (wrong usage).
    """
    rest = text.strip().removeprefix("grpc://")
    if rest.startswith((_UNIX, _ABSTRACT)):
        return _parse_unix(text, rest)
    if process_of(rest) is not None:
        return rest
    if "://" in rest or "/" in rest:
        raise _usage(text, "it is a URL")
    if rest.startswith("["):
        host, bracket, port_text = rest[1:].partition("]")
        if not bracket or not port_text.startswith(":"):
            raise _usage(text, ":PORT must follow [IPv6]")
        port_text = port_text[1:]
    elif rest.count(":") > 1:
        raise _usage(text, "an IPv6 address needs brackets: [::1]:6009")
    elif ":" in rest:
        host, port_text = rest.split(":")
    elif rest.isdecimal():
        host, port_text = "", rest
    else:
        raise _usage(text, "the port is missing")
    if not (port_text.isascii() and port_text.isdecimal() and 1 <= int(port_text) <= 65535):
        raise _usage(text, "a port is a number from 1 to 65535")
    if re.search(r"[\s\x00-\x1f]", host):
        raise _usage(text, "a host name cannot contain spaces")
    if host.lower() in ("", "localhost", "0.0.0.0", "::"):
        host = "127.0.0.1"
    elif ":" in host:
        try:
            host = f"[{ipaddress.IPv6Address(host.partition('%')[0])}]"
        except ValueError:
            raise _usage(text, f"{host} is not an IPv6 address") from None
    else:
        try:
            host.encode("idna")  # as the resolver would, which raises no OSError for it
        except UnicodeError:
            raise _usage(text, "each part of a host name must have 1 to 63 characters") from None
    return f"{host}:{int(port_text)}"


def process_of(address: str) -> int | None:
    """The PID in ``pid:PID``, a process that is recorded without a server; None for any other address."""
    number = address.removeprefix(_PROCESS)
    return int(number) if number != address and number.isascii() and number.isdecimal() and len(number) < 10 else None


def _parse_unix(text: str, rest: str) -> str:
    scheme, _, name = rest.partition(":")
    name = "/" + name.lstrip("/") if name.startswith("///") else name
    if not name or name.startswith("//"):
        raise _usage(text, "unix: must be followed by a path, and unix-abstract: by a name")
    if re.search(r"[\x00-\x1f\x7f]", name):
        raise _usage(text, "it contains control characters")
    if f"{scheme}:" == _UNIX:
        name = str(Path(name).absolute())
    if len(os.fsencode(name)) > _UNIX_BYTES:
        raise _usage(text, f"a socket name can have at most {_UNIX_BYTES} bytes")
    return f"{scheme}:{name}"


def _usage(text: str, reason: str) -> GputopError:
    return GputopError(f"{text!r} is not an address: {reason}",
                       "Write HOST:PORT, for example localhost:6009, or unix:/PATH.", EXIT_USAGE)


def unix_name(address: str) -> str | None:
    """The name that a Unix socket is bound to, with a leading zero byte for an abstract one; None for TCP."""
    if address.startswith(_ABSTRACT):
        return "\0" + address.removeprefix(_ABSTRACT)
    return address.removeprefix(_UNIX) if address.startswith(_UNIX) else None


def split_address(address: str) -> tuple[str, int]:
    """Host (without brackets) and port of a TCP address from :func:`parse_address`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_local(address: str) -> bool:
    """Return whether an address is of this machine: its loopback, its name, one of its interfaces, a Unix socket."""
    if unix_name(address) is not None or process_of(address) is not None:
        return True
    host = split_address(address)[0]
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    if any(ipaddress.ip_address(str(a).partition("%")[0]).is_loopback for a in addresses):
        return True
    import psutil

    here = {a.address.partition("%")[0] for interface in psutil.net_if_addrs().values() for a in interface}
    return bool(here & {str(a).partition("%")[0] for a in addresses})


def machine_name(address: str) -> str:
    """The name of the machine that an address leads to: the host name for this one, else the name in the address."""
    return socket.gethostname() if is_local(address) else split_address(address)[0]


def short_name(node: str) -> str:
    """A node as Slurm calls it mostly: without the domain, in small letters."""
    return node if re.fullmatch(r"[\d.:]+", node) else node.partition(".")[0].lower()


def listening_pid(address: str) -> int | None:
    """The process that listens at an address of this machine; None where that is not known."""
    if (pid := process_of(address)) is not None:
        return pid
    name = unix_name(address)
    with contextlib.suppress(OSError):
        if name is None:
            return sockets.listening_pid(_PROC, *split_address(address))
        pids = sockets.holders(_PROC, sockets.bound(_PROC, name)).values()
        return next((pid for holding in pids for pid in holding), None)
    return None
