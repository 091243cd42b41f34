"""Inside the job's process: starts the profiler server of the TensorFlow or JAX it has imported.

Loaded by :mod:`gputop_inside` where the job was started with this folder on its PYTHONPATH, and as text by
``gputop attach``. Stands alone like that one. A failure is reported on stderr, in one line.

What it reads from the environment: ``GPUTOP_PORT``, the port of the node's first process, the next ones being those
of the local ranks 1, 2, … (default: any that is free); ``GPUTOP_LISTEN=all``, to be reached from other hosts (default:
from this one only); ``GPUTOP_RUN``, the token of the job (set by ``gputop run``, else by the
first process that serves, for its children).
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import os
import socket
import struct
import sys
import time

_RANKS = ("LOCAL_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
_LINE_CHARS = 1000  # of what is told on the job's stderr
_TELL_S = 1  # where others fill gputop's socket
_LISTENING = "0A"  # TCP_LISTEN in include/net/tcp_states.h

_claim: socket.socket | None = None  # the socket whose name says that this process serves; gone with the process
_jax_servers: list[object] = []  # JAX stops a server that nothing refers to


def serve(framework: str, token: str = "", port: int | None = None, listen: str | None = None) -> None:
    """Start the server of ``framework``, "tensorflow" or "jax", which is imported; unless another process of this
    job and rank has one. Raises nothing."""
    run = token or os.environ.get("GPUTOP_RUN") or os.urandom(8).hex()
    try:
        if not _claimed(run):
            return
        if not token:
            os.environ["GPUTOP_RUN"] = run  # for children: they are of this job
        wanted = _wanted_port() if port is None else port
        chosen = free_port(wanted) or free_port(0)
        module = sys.modules[framework]
        if framework == "jax":
            _start_jax(chosen)
        else:
            module.profiler.experimental.server.start(chosen)
        listening = listening_sockets(chosen)
        if not listening:
            raise RuntimeError(f"the server does not listen on port {chosen}")
        everywhere = (listen or os.environ.get("GPUTOP_LISTEN")) == "all" or not confine(listening)
        name = "TensorFlow" if framework == "tensorflow" else "JAX"
        what = f"{name} {getattr(module, '__version__', '')}"
        rank = _rank()
        more = [what,
                f"rank {rank}" if rank else "",
                f"port {wanted} was in use" if wanted not in (0, chosen) else "",
                "reachable from any host" if everywhere else ""]
        _announce(", ".join(part for part in more if part), run, f"127.0.0.1:{chosen}")
    except Exception as error:  # noqa: BLE001  whatever it is, the job must not notice
        _release()
        _announce(f"{type(error).__name__}: {error}", run)


def serve_now(token: str, port: int, listen: str, until_s: float) -> None:
    """Serve in a running process as :func:`serve` does, for the framework in use; does nothing after ``until_s``."""
    if time.time() > until_s:
        return
    jax = sys.modules.get("jax")
    bridge = sys.modules.get("jax._src.xla_bridge")
    used = jax is not None and (getattr(bridge, "_backends", None) or "tensorflow" not in sys.modules)
    framework = "jax" if used else "tensorflow"
    if framework not in sys.modules:
        _announce("neither TensorFlow nor JAX has been imported", token)
    elif getattr(sys.modules[framework].__spec__, "_initializing", False):
        _announce(f"the process is importing {framework}; try again in a moment", token)
    else:
        serve(framework, token, port, listen)


def _start_jax(port: int) -> None:
    # Not jax.profiler.start_server: it initializes the devices, too early for jax.distributed.initialize(),
    # and allows one server, which is to be the job's own should it start one.
    try:
        native = importlib.import_module("jax._src.lib")._profiler
    except AttributeError:  # before 0.8
        native = importlib.import_module("jax._src.lib").xla_client.profiler
    _jax_servers.append(native.start_server(port))


def claimed() -> bool:
    """Return whether this process is the one of its job and rank that is captured, whatever its framework is."""
    run = os.environ.get("GPUTOP_RUN") or os.urandom(8).hex()
    if not _claimed(run):
        return False
    os.environ["GPUTOP_RUN"] = run  # for children: they are of this job
    return True


def announce_pytorch(version: str) -> None:
    """Tell that gputop can capture from this process without a server."""
    rank, pid = _rank(), os.getpid()
    about = f"PyTorch {version}" + (f", rank {rank}" if rank else "")
    _tell(f"PyTorch's profiler in process {pid} is ready for gputop ({about})", os.environ["GPUTOP_RUN"], f"pid:{pid}")


def socket_name(*parts: str) -> str:
    """An abstract name for what is said between the processes of a job and gputop. Any user sees it, and may bind one
    that is free: it does not show the token, so that nobody else knows the job's other names."""
    return f"\0gputop-{parts[0]}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}"


def _claimed(token: str) -> bool:
    """Return whether this process is the one of its job and rank that serves. The claim is a socket name that the
    kernel gives to one process at a time and releases when the process ends."""
    global _claim
    if _claim is not None:
        return True
    ranks = [os.environ.get(name, "") for name in _RANKS] + [_task() or ""]
    candidate = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        candidate.bind(socket_name("claim", token, *ranks))
    except OSError:
        candidate.close()
        return False
    _claim = candidate
    os.register_at_fork(after_in_child=_release)
    return True


def _release() -> None:
    global _claim
    if _claim is not None:
        _claim.close()  # in a child: it stays the parent's
        _claim = None


def _task() -> str | None:
    """This process among those of TF_CONFIG, for example "worker0"; None without one."""
    try:
        task = json.loads(os.environ["TF_CONFIG"])["task"]
        return f"{task['type']}{int(task['index'])}"
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return None


def _rank() -> str | None:
    """The rank of this process in the job; None if it is alone."""
    names = _RANKS[1:] + _RANKS[:1]  # the rank of the whole job rather than that of the node
    return next((os.environ[name] for name in names if os.environ.get(name)), _task())


def _wanted_port() -> int:
    try:
        first = int(os.environ.get("GPUTOP_PORT", "0"))
    except ValueError:
        first = 0
    local = next((os.environ[name] for name in _LOCAL_RANKS if os.environ.get(name)), "0")
    return first + int(local) if first and local.isdecimal() else first


def free_port(port: int) -> int:
    """``port``, or any for 0; 0 if it is taken. Checked first, because gRPC shares a port with another server."""
    for family, host in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                trial.bind((host, port))
                return int(trial.getsockname()[1])
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                break  # else: no IPv6 here
    return 0


def listening_sockets(port: int) -> list[int]:
    """The descriptors of this process's sockets that listen on ``port``, 0: on any."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/self/net/{table}") as lines:  # noqa: PTH123
                for line in lines:
                    columns = line.split()
                    if columns[3] == _LISTENING and port in (0, int(columns[1].rpartition(":")[2], 16)):
                        inodes.add(f"socket:[{columns[9]}]")
        except OSError:
            continue
    descriptors = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            if os.readlink(f"/proc/self/fd/{name}") in inodes:  # noqa: PTH115
                descriptors.append(int(name))
        except OSError:  # closed meanwhile
            continue
    return descriptors


def confine(descriptors: list[int]) -> bool:
    """Let these sockets be reached over the loopback interface only; False where the kernel does not (before 5.7).
    The servers bind to all interfaces and can be told nothing else; anybody who reaches one may capture."""
    try:
        for descriptor in descriptors:
            with socket.socket(fileno=os.dup(descriptor)) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
    except OSError:
        return False
    return True


def _announce(message: str, token: str, address: str | None = None) -> None:
    """One line on the job's stderr, and the same to the gputop that started it."""
    if address is None:
        line = f"no profiler server in process {os.getpid()}: {message}"
    else:
        line = f"profiler server at {address} (process {os.getpid()}, {message})"
    _tell(line, token, address)


def _tell(line: str, token: str, address: str | None) -> None:
    line = "".join(c if c.isprintable() else " " for c in line[:_LINE_CHARS])  # an exception's text may hold anything
    try:
        if sys.__stderr__ is not None:
            sys.__stderr__.write(f"gputop: {line}\n")
            sys.__stderr__.flush()
    except (OSError, ValueError):  # closed
        pass
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as teller:
            # By the kernel: Python would ask again and again, as poll(2) knows no peer's queue.
            teller.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _TELL_S, 0))
            teller.sendto(json.dumps({"address": address, "line": line}).encode(), socket_name("run", token))
    except OSError:  # nobody listens
        pass
