"""Finds the profiler servers of this machine's training processes.

The steps: sockets that listen on all interfaces → the processes that hold them → those that have TensorFlow, JAX or
CUDA mapped → the ports that greet as gRPC servers do → the one call of :mod:`gputop.profiler.xprof.probe`. Each step is
taken once per socket and its result kept, so a search every few seconds reads a few files only, and no port is asked
again and again.

A process of another user can map any file. So a mapped library counts only if it is mapped as code, and for another
user's process only if the file at that path is an ELF library. That is a hint, no proof: see ``owner_if_other``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from gputop.core.errors import GputopError
from gputop.core.files import folder_of_process, open_regular
from gputop.core.proc import command_of, effective_uid, environ_of, process_ids, read_maps, stat_of, user_name
from gputop.profiler import sockets
from gputop.profiler.sockets import Listener
from gputop.profiler.xprof.probe import check_http2, probe
from gputop.text.units import first_few

Framework = Literal["TensorFlow", "JAX"]

_TIMEOUT_S = 1.0
_OWN_HOSTS = ["127.0.0.1", "[::1]"]  # a socket on all of IPv6 takes IPv4, too, unless it was told not to
_MAX_GREETED = 8  # ports of one process
_MAX_HOSTS = 4  # addresses of a container
_PROBES_AT_ONCE, _PROBES_A_SEARCH = 16, 64  # the others' turn comes with the next search
_SETTLED_S = 600.0
_ROLE_CHARS = 64
_MAX_RANK, _RANK = 10**9, re.compile(r"[0-9]{1,9}")  # whoever reads it as a number fails at thousands of digits
_ATTEMPTS = 3  # a server in a process that is starting or stopped may be slow to greet
_PACKAGES = frozenset({"tensorflow", "jaxlib", "libtpu", "torch_xla"})
_LIBRARY = re.compile(r"libcuda\.so|libtensorflow.*\.so|libtorch_cpu\.so")  # the beginning of a file's name
_EXECUTABLE = re.compile(r"^\S+ ..x. \S+ \S+ \d+ +(/.*)$", re.MULTILINE)  # proc_pid_maps(5): the path of mapped code
_MAX_LIBRARIES = 64  # of another user's process, whose files are looked at
_MAX_DISTRIBUTIONS = 10_000  # names in site-packages
_ELF, _ELF_SHARED = b"\x7fELF", 3  # elf(5): e_ident, and ET_DYN as e_type
# Of torchrun and its like, Open MPI, PMIx, MPICH and Slurm; the last is that of the node.
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID", "JAX_PROCESS_ID",
                  "LOCAL_RANK")
_DISTRIBUTION = {
    "TensorFlow": re.compile(r"(?:tensorflow(?:_cpu|_gpu|_rocm|_intel)?|tf_nightly\w*)-([^-]+)\.dist-info"),
    "JAX": re.compile(r"jax-([^-]+)\.dist-info"),
}


class ProfilerServer(Struct, frozen=True):
    """A server that answered. ``framework`` and ``version`` are those of the libraries the process has mapped,
    ``rank`` is its place in the job by its environment, ``uid`` its effective user, each as far as it may be read."""

    address: str
    pid: int
    user: str | None
    command: str
    framework: Framework | Literal["PyTorch"] | None = None
    version: str | None = None
    rank: str | None = None
    uid: int | None = None

    @property
    def owner_if_other(self) -> str:
        """The user it belongs to where that is not the one gputop runs as; empty where it is. Such a server is captured
        from only where its address was named, or a question answered."""
        if self.uid is None or self.uid == os.geteuid():
            return ""
        return self.user or str(self.uid)

    def about(self) -> str:
        """Description for people: "TensorFlow 2.21.0, worker 1, ana: python train.py"; the user where it is another."""
        framework = f"{self.framework} {self.version or ''}".strip() if self.framework else ""
        user = self.user if self.user is not None and self.user != user_name(os.geteuid()) else ""
        description = ", ".join(part for part in (framework, self.rank or "", user) if part)
        return f"{description}: {self.command}" if description and self.command else description or self.command


def rank_of(environ: Mapping[str, str]) -> str | None:
    """A process's place in its job, from its environment: "rank 3", "worker 1" (TF_CONFIG); None where it has none. A
    rank in the whole job is preferred to one on the machine."""
    task = _tf_config(environ).get("task")
    if isinstance(task, dict) and isinstance(task.get("type"), str):
        with contextlib.suppress(ValueError, TypeError, OverflowError, KeyError):
            if 0 <= (index := int(task["index"])) < _MAX_RANK:
                return f"{task['type'][:_ROLE_CHARS]} {index}"
    ranks = (environ.get(name, "") for name in RANK_VARIABLES)
    return next((f"rank {rank}" for rank in ranks if _RANK.fullmatch(rank)), None)


def _tf_config(environ: Mapping[str, str]) -> dict[str, Any]:
    """The object in TF_CONFIG; empty where there is none."""
    from gputop.core.codec import parse  # with a job's environment, which most first frames do without

    with contextlib.suppress(KeyError, ValueError):
        if isinstance(config := parse(environ["TF_CONFIG"]), dict):
            return config
    return {}


class Discovery(Struct, frozen=True):
    """The servers found, and notes on what could not be examined and why."""

    servers: tuple[ProfilerServer, ...] = ()
    notes: tuple[str, ...] = ()


class _SocketState(Struct):
    holders: tuple[int, ...]  # pids, the oldest first
    relevant: bool | None = None  # whether a holder may be a training job; None: not examined yet
    framework: Framework | None = None
    version: str | None = None
    server: ProfilerServer | None = None
    attempts_left: int = _ATTEMPTS
    note: str | None = None


class Finder:
    """Finds servers and keeps what it knows of each socket. One call at a time; safe from any thread."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._lock = threading.Lock()
        self._sockets: dict[Listener, _SocketState] = {}

    def find(self, pids: Iterable[int] | None = None) -> Discovery:
        """The profiler servers of the given processes and their children, or (None) of all
        processes that may be looked at and have TensorFlow, JAX or CUDA mapped.

        gputop's own process is left out. Blocks for up to some seconds where a new port does not answer; otherwise
        cheap enough to be called every few seconds from a background thread. What it cannot read is in the notes and
        raises nothing.
        """
        with self._lock:
            wanted = None if pids is None else sockets.with_children(self._proc, pids) - {os.getpid()}
            listening, notes = self._listening(wanted)
            self._remember(listening)
            servers: dict[str, ProfilerServer] = {}
            examined = {listener: state for listener in listening if (state := self._sockets[listener]).holders
                         and os.getpid() not in state.holders
                         and (wanted is None or not wanted.isdisjoint(state.holders))}
            self._probe_listeners({listener: listening[listener] for listener, state in examined.items()
                                   if state.server is None and state.attempts_left > 0}, named=wanted is not None)
            for state in examined.values():
                if state.server is not None:
                    servers.setdefault(state.server.address, state.server)
                elif state.note is not None:
                    notes.append(state.note)
        ordered = sorted(servers.values(), key=lambda server: (server.pid, server.address))
        return Discovery(tuple(ordered), tuple(dict.fromkeys(notes)))

    def _listening(self, wanted: set[int] | None) -> tuple[dict[Listener, list[str]], list[str]]:
        """Listening sockets with the hosts where they can be reached, and notes on processes of others."""
        networks, refused = sockets.networks(self._proc, sorted(process_ids(self._proc) if wanted is None else wanted))
        notes = [f"process {pid} belongs to {self._user(pid) or 'another user'}, so gputop cannot read its sockets. "
                 "Run gputop as that user or root, or attach to HOST:PORT." for pid in refused if wanted is not None]
        here = sockets.network_namespace(self._proc, os.getpid())
        listening: dict[Listener, list[str]] = {}
        for namespace, pid in networks.items():
            hosts = _OWN_HOSTS if namespace == here else sockets.addresses_of(self._proc, pid)[:_MAX_HOSTS]
            for listener in sockets.listeners(self._proc, pid, namespace):
                listening[listener] = hosts
        return listening, notes

    def _remember(self, listening: dict[Listener, list[str]]) -> None:
        for gone in self._sockets.keys() - listening.keys():
            del self._sockets[gone]
        new = listening.keys() - self._sockets.keys()
        if new:
            holders = sockets.holders(self._proc, {listener.inode for listener in new})
            for listener in new:
                self._sockets[listener] = _SocketState(tuple(holders[listener.inode]))

    def _probe_listeners(self, listening: Mapping[Listener, list[str]], *, named: bool) -> None:
        """One attempt at each socket of a process that may train; at several at once, because jobs that are stopped
        or hang answer none. Of very many, which somebody may have opened to be waited for, some at a time: as many
        of each user's, gputop's own first."""
        def attempt(listener: Listener) -> None:
            self._probe_listener(listener, self._sockets[listener], listening[listener])

        libraries_of: dict[int, tuple[bool, Framework | None, str | None]] = {}  # by PID, for this search
        of_users: dict[int | None, list[Listener]] = {}
        for listener in sorted(listening, key=lambda listener: -self._sockets[listener].attempts_left):
            if self._may_train(self._sockets[listener], named, libraries_of):
                of_users.setdefault(effective_uid(self._sockets[listener].holders[0], self._proc), []).append(listener)
        own_first = sorted(of_users, key=lambda uid: uid != os.geteuid())
        in_turn = itertools.chain.from_iterable(itertools.zip_longest(*(of_users[uid] for uid in own_first)))
        asked = list(itertools.islice(filter(None, in_turn), _PROBES_A_SEARCH))
        if len(asked) < 2:
            for listener in asked:
                attempt(listener)
            return
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(min(_PROBES_AT_ONCE, len(asked)), "gputop-probes") as threads:
            list(threads.map(attempt, asked))

    def _may_train(self, state: _SocketState, named: bool,
                   libraries_of: dict[int, tuple[bool, Framework | None, str | None]]) -> bool:
        """Return whether the process that holds the socket is worth asking; what it has mapped is noted in ``state``,
        and in ``libraries_of`` for its other sockets."""
        if named or state.relevant is not False:
            pid = state.holders[0]
            if pid not in libraries_of:
                libraries_of[pid] = self._libraries(pid)
            state.relevant, state.framework, state.version = libraries_of[pid]
        return named or bool(state.relevant)

    def _probe_listener(self, listener: Listener, state: _SocketState, hosts: list[str]) -> None:
        """One attempt to find out whether a socket is a profiler server's."""
        pid = state.holders[0]
        state.attempts_left -= 1
        problem = "none of its addresses belong to a network inside this machine"
        for host in hosts:
            address = f"{host}:{listener.port}"
            if hosts is not _OWN_HOSTS and not sockets.arrives_in(self._proc, pid, host, listener.port, _TIMEOUT_S):
                problem = f"packets to {address} do not reach it"
                continue
            try:
                check_http2(address, _TIMEOUT_S, listen_only=True)
                probe(address, _TIMEOUT_S)
            except GputopError as error:
                problem = error.message
                continue
            state.server = ProfilerServer(
                address, pid, self._user(pid), command_of(pid, self._proc), state.framework, state.version,
                rank_of(environ_of(pid, self._proc)), effective_uid(pid, self._proc))
            state.note = None
            return
        if hosts is not _OWN_HOSTS and state.relevant:
            state.note = (
                f"process {pid} listens on port {listener.port} inside a container and cannot be reached from here "
                f"({problem}). If its profiler server uses this port, publish it or run the container with --net=host."
            )

    def _libraries(self, pid: int) -> tuple[bool, Framework | None, str | None]:
        """Return whether the process may be a training job; its framework and version by the mapped libraries."""
        paths = _mapped_libraries(self._proc, pid)
        packages: dict[str, str] = {}
        for path in paths or ():
            if (package_and_folder := _package_of(path)) is not None and package_and_folder[0]:
                packages.setdefault(*package_and_folder)
        # As gputop.core.framework has it, which needs no path and no version.
        framework: Framework
        for package, framework in (("jaxlib", "JAX"), ("tensorflow", "TensorFlow")):
            if package in packages:
                return True, framework, self._version(pid, framework, packages[package])
        return bool(paths), None, None

    def _version(self, pid: int, framework: Framework, site_packages: str) -> str | None:
        try:
            with (folder_of_process(pid, Path(site_packages), self._proc) as folder, os.scandir(folder.fd) as entries):
                names = sorted(entry.name for entry in itertools.islice(entries, _MAX_DISTRIBUTIONS))
        except OSError:
            return None
        matches = (_DISTRIBUTION[framework].fullmatch(name) for name in names)
        return next((match[1] for match in matches if match), None)

    def crash_risk(self, pids: Iterable[int]) -> str | None:
        """The known risk of capturing from these processes; None where there is none, or they may not be read."""
        at_risk = [pid for pid in pids if self._calls_workers(pid)]
        if not at_risk:
            return None
        return ("TensorFlow 2.21's profiler can crash workers that call each other over gRPC, such as workers without "
                f"GPUs, with any capture tool ({_processes(at_risk)})")

    def _calls_workers(self, pid: int) -> bool:
        """Return whether it is one of several workers of TensorFlow 2.21, without the driver that NCCL needs."""
        try:
            maps = read_maps(pid, self._proc).decode("utf-8", "replace")
        except OSError:
            return False
        _, framework, version = self._libraries(pid)
        if "/libcuda.so" in maps or framework != "TensorFlow" or not (version or "").startswith("2.21."):
            return False
        cluster = _tf_config(environ_of(pid, self._proc)).get("cluster")
        if isinstance(cluster, dict):
            return sum(len(addresses) for addresses in cluster.values() if isinstance(addresses, list)) > 1
        # A script may set it by itself, which /proc does not show: its worker's server does.
        return self._grpc_servers(pid) > 1

    def _grpc_servers(self, pid: int) -> int:
        """Number of ports of a process that greet as gRPC servers do; blocks for a second at most for each other."""
        try:
            listening, _ = self._listening({pid})
        except OSError:
            return 0
        held = sockets.holders(self._proc, {listener.inode for listener in listening})
        ports = {listener.port: hosts for listener, hosts in listening.items() if pid in held[listener.inode]}
        return sum(any(_greets(f"{host}:{port}") for host in hosts)
                   for port, hosts in sorted(ports.items())[:_MAX_GREETED])

    def _user(self, pid: int) -> str | None:
        uid = effective_uid(pid, self._proc)
        return None if uid is None else user_name(uid)


def _greets(address: str) -> bool:
    """Return whether a gRPC server answers there; nothing is sent."""
    try:
        check_http2(address, _TIMEOUT_S, listen_only=True)
    except GputopError:
        return False
    return True


_NAMED = 4  # processes in a sentence


def _processes(pids: list[int]) -> str:
    return f"process{'es' if len(pids) > 1 else ''} {first_few(pids, _NAMED)}"


def is_training(pid: int, proc: Path = Path("/proc")) -> bool | None:
    """Return whether a process has TensorFlow, JAX or CUDA mapped; None where that may not be read."""
    paths = _mapped_libraries(proc, pid)
    return None if paths is None else bool(paths)


class TrainingProcesses:
    """The jobs of gputop's user on this node by the libraries they have loaded, served or not.

    What a process has mapped is read once it is ten minutes old, and until then each time: it imports its framework
    early. One call at a time.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._settled: dict[tuple[int, int], bool] = {}  # PID and start time → whether it trains

    def find(self) -> tuple[int, ...]:
        """The PIDs, gputop's own and those whose parent is one of them (they share its libraries) left out."""
        uptime_s = 0.0  # where that cannot be read each is looked at each time
        with contextlib.suppress(OSError, ValueError, IndexError):
            uptime_s = float((self._proc / "uptime").read_text().split()[0])
        ticks_per_s = os.sysconf("SC_CLK_TCK")
        settled: dict[tuple[int, int], bool] = {}
        training: dict[int, int] = {}  # PID → its parent's
        for pid in process_ids(self._proc):
            if pid == os.getpid() or effective_uid(pid, self._proc) != os.geteuid():
                continue
            stat = stat_of(pid, self._proc)
            if stat is None:
                continue
            trains = self._settled.get((pid, stat.start))
            if trains is None:
                trains = bool(is_training(pid, self._proc))
            if trains or uptime_s - stat.start / ticks_per_s > _SETTLED_S:
                settled[pid, stat.start] = trains
            if trains:
                training[pid] = stat.parent
        self._settled = settled
        return tuple(sorted(pid for pid, parent in training.items() if parent not in training))


def _mapped_libraries(proc: Path, pid: int) -> list[str] | None:
    """Paths of the libraries of TensorFlow, JAX and CUDA that a process runs code of; None where it may not be read."""
    try:
        paths = dict.fromkeys(_EXECUTABLE.findall(read_maps(pid, proc).decode("utf-8", "replace")))
    except OSError:
        return None
    libraries = [path for path in paths if _package_of(path) is not None]
    if not libraries or effective_uid(pid, proc) == os.geteuid():
        return libraries
    return [path for path in libraries[:_MAX_LIBRARIES] if _is_library(proc, pid, Path(path))]


def _package_of(path: str) -> tuple[str, str] | None:
    """The package of a framework that a library is of, and the folder that it is installed in; "" for one that is of
    none but counts all the same; None for any other file. In time linear in the path, which its user chose."""
    folder, _, name = path.rpartition("/")
    parts = folder.split("/")
    index = next((i for i in range(len(parts) - 1, 0, -1) if parts[i] in _PACKAGES), 0)
    if index and ".so" in name:
        return parts[index], "/".join(parts[:index]) + "/"
    return ("", "") if _LIBRARY.match(name) else None


def _is_library(proc: Path, pid: int, path: Path) -> bool:
    """Return whether the file that a process has mapped is there and begins as a shared library does."""
    try:
        with folder_of_process(pid, path.parent, proc) as folder, open_regular(path.name, follow_links=False,
                                                                        folder_fd=folder.fd) as file:
            header = file.read(18)
    except PermissionError:  # not even for root: a network file system. The kernel has mapped it all the same
        return True
    except OSError:
        return False
    return header.startswith(_ELF) and int.from_bytes(header[16:18], "little") == _ELF_SHARED


_finder = Finder()
find_servers, crash_risk = _finder.find, _finder.crash_risk
