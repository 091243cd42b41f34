"""Asks gputop on other nodes for a snapshot, by the system's ssh with the user's configuration.

ssh never asks for a password here (BatchMode): a node that wants one is said to. Nothing secret is in an argument.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.core.files import read_regular, temporary_place
from gputop.core.findings import Problem
from gputop.profiler.workers import MAX_HOSTS, expand_hostlist
from gputop.text.programs import NO_SUCH_PROGRAM, Ended, ErrorTail, run_program
from gputop.text.units import printable

AT_ONCE = 16  # connections that ask at the same time
TIMEOUT_S = 20.0  # of a node, from the connection to the last byte
MAX_BYTES = 8 << 20  # of a snapshot; one of eight GPUs has some 100 kB
KEPT_S = 60  # for which a connection waits for the next question
_POLL_S = 0.1  # for whether to stop asking
_END_TIMEOUT_S = 2.0  # of a program that has closed its output
_NAMED = 8  # nodes in a sentence
_MAX_FILE_BYTES = 1 << 20
# No dash at the beginning, no character that a shell or ssh reads as something else.
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]{0,63}@)?[A-Za-z0-9_][A-Za-z0-9._:-]{0,253}")
# Of a socket: ssh reads spaces and % as its own, and adds 17 characters while it connects; 107 is the most (unix(7)).
_SOCKET = re.compile(r"[A-Za-z0-9_./-]{1,90}")
_HOW = "Write n[01-16], n01,n02 or @FILE with a name in each line; ports and users can be in ~/.ssh/config."
_BY_HAND = "Connect once yourself: ssh NODE true"
# What ssh says where it fails itself (status 255), the surest first: the cause, and what to do.
_CAUSES = (
    ("IDENTIFICATION HAS CHANGED", "its host key differs from the one that ssh knows",
     "Find out why; only then remove the old one: ssh-keygen -R NODE"),
    ("Host key verification failed", "ssh does not know its host key", f"{_BY_HAND}, and compare the fingerprint."),
    ("Permission denied", "it asks for a password or refuses the key",
     "ssh NODE true must work without a question: a key (ssh-copy-id NODE), an agent, or a connection that is shared "
     "(ControlMaster in ~/.ssh/config)."),
    ("Could not resolve", "its name is unknown here", "Write the names as ssh NODE knows them."),
    ("Connection refused", "it refuses connections", f"Check whether sshd runs there. {_BY_HAND}"),
    ("timed out", "it does not answer", "Check whether it is up, and reachable from here."),
    ("No route", "it does not answer", "Check whether it is up, and reachable from here."),
)


T = TypeVar("T")


class NodeProblem(GputopError):
    """Reason why a node could not be asked, in words that name no node: nodes with one cause are told together."""


def by_cause(problems: Mapping[str, NodeProblem]) -> list[Problem]:
    """The problems of nodes, those with one cause together: "n02, n07: it does not answer"."""
    causes: dict[tuple[str, str], list[str]] = {}
    for name, problem in problems.items():
        causes.setdefault((problem.message, problem.fix), []).append(name)
    out = []
    for (message, fix), names in causes.items():
        shown = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
        out.append(Problem(f"{shown}: {message}", fix.replace("NODE", names[0])))
    return out


def is_name(text: str) -> bool:
    """Return whether a node can be called so: neither ssh nor a shell reads it as something else."""
    return _NAME.fullmatch(text) is not None


def parse_nodes(text: str) -> list[str]:
    """The names of a host list, or of the lists in a file: ``n[01-16]``, ``n01,n02``, ``@FILE``.

    Raises GputopError (wrong usage) for a name that ssh could take for an option, or a shell for a command.
    """
    if text.startswith("@"):
        try:
            lines = read_regular(Path(text[1:]).expanduser(), _MAX_FILE_BYTES).decode().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise GputopError(f"cannot read the nodes in {printable(text[1:])}: "
                              f"{getattr(error, 'strerror', None) or 'it is not UTF-8'}", _HOW, EXIT_USAGE) from None
        text = ",".join(entry for line in lines if (entry := line.partition("#")[0].strip()))
    names = expand_hostlist(text)
    for name in names:
        if not is_name(name):
            raise GputopError(f"{printable(name)[:100]!r} is not the name of a node", _HOW, EXIT_USAGE)
    if not names or len(names) > MAX_HOSTS:
        raise GputopError("no node is named", _HOW, EXIT_USAGE)
    return names


class Ssh(Generic[T]):
    """Asks nodes for a snapshot; from several threads.

    ``shared``: connections are kept for the next question, unless the user's configuration shares them already.
    """

    def __init__(self, command: str, read: Callable[[bytes], T], *, shared: bool, seconds: int = 1,
                 options: Sequence[str] = (), forms: Sequence[str] = ("json",)) -> None:
        """``command`` starts gputop there, as a shell reads it. ``read`` makes what is wanted of a snapshot that took
        ``seconds``; it raises GputopError. ``forms`` of it: the last one of a gputop that knows none before."""
        self._command, self._read, self._options = command, read, list(options)
        self._asked, *self._older = (f"{command} snapshot --format {form} --seconds {seconds}" for form in forms)
        self._asked_of: dict[str, str] = {}  # by node, of an older gputop
        self._folder = (tempfile.TemporaryDirectory(prefix="gputop-ssh-", dir=temporary_place())  # of this user alone
                        if shared else None)
        self._kept: dict[str, list[str]] = {}  # by node: the options that share its connection
        self._numbers = itertools.count()
        self._running: set[subprocess.Popen[bytes]] = set()  # and some that have ended
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, node: str) -> tuple[T, int]:
        """Return what was read of the node's snapshot, and the bytes that came. Raises :class:`NodeProblem`."""
        words = [*self._words(node), "--", node]
        ended = self._run([*words, self._asked_of.get(node, self._asked)])
        for asked in self._older if ended.status == EXIT_USAGE and node not in self._asked_of else ():
            ended = self._run([*words, asked])
            if ended.status == 0:
                self._asked_of[node] = asked
        if ended.status == 0 and ended.in_bounds:
            try:
                return self._read(document_in(ended.out)), len(ended.out)
            except GputopError as error:
                raise NodeProblem(f"its answer is not a snapshot: {error.message}",
                                  "Check what a login prints there, and which gputop it has: ssh NODE gputop "
                                  "--version") from None
        raise self._problem(ended)

    def talk(self, node: str, command: str) -> tuple[subprocess.Popen[bytes], ErrorTail]:
        """A program on a node whose standard input and output are pipes, and what ssh and it say on stderr; whoever
        calls this ends and closes them. Raises :class:`NodeProblem`."""
        words = [word for word in self._words(node) if word != "-n"]  # that is: standard input is not read
        try:
            process = subprocess.Popen([*words, "--", node, command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       stderr=subprocess.PIPE, env={**os.environ, "LC_ALL": "C"})
        except OSError as error:
            raise NodeProblem(f"ssh cannot be started: {error.strerror or error}",
                              "Install OpenSSH's client here.") from None
        assert process.stderr is not None
        return process, ErrorTail(process.stderr, process.kill)

    def problem_of(self, process: subprocess.Popen[bytes], errors: ErrorTail) -> NodeProblem | None:
        """Return why a program of :meth:`talk` ended; None where it goes on or did what it was to do. Blocks for a
        moment."""
        try:
            status = process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None
        return self._problem(Ended(b"", errors.text(), status, True, not errors.is_flood)) if status else None

    def _words(self, node: str) -> list[str]:
        quiet = ["ssh", "-T", "-n", "-C", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "LogLevel=ERROR",
                 "-o", "ClearAllForwardings=yes", "-o", "ForwardAgent=no", "-o", "ServerAliveInterval=5",
                 *self._options]
        if self._folder is None:
            return quiet
        if node not in self._kept:
            # One for each name: ssh's own %C is the same for two nodes with one address behind different jumps.
            socket_path = f"{self._folder.name}/{next(self._numbers)}"
            self._kept[node] = [] if not _SOCKET.fullmatch(socket_path) or self._is_shared(node) else [
                "-o", "ControlMaster=auto", "-o", f"ControlPath={socket_path}", "-o", f"ControlPersist={KEPT_S}"]
        return [*quiet, *self._kept[node]]

    def _is_shared(self, node: str) -> bool:
        """Return whether the user's configuration shares connections to the node."""
        with contextlib.suppress(NodeProblem):
            text = self._run(["ssh", *self._options, "-G", "--", node]).out.decode("utf-8", "replace")
            return re.search(r"^controlpath (?!none$)", text, re.M) is not None
        return False

    def _run(self, words: Sequence[str]) -> Ended:
        def started(process: subprocess.Popen[bytes]) -> None:
            with self._lock:
                self._running = {other for other in self._running if other.returncode is None} | {process}
                if self._closed:
                    process.kill()

        try:
            return run_program(words, TIMEOUT_S, MAX_BYTES, started)
        except OSError as error:
            raise NodeProblem(f"ssh cannot be started: {error.strerror or error}",
                              "Install OpenSSH's client here.") from None

    def _problem(self, ended: Ended) -> NodeProblem:
        reason = f" ({ended.error})" if ended.error else ""
        if not ended.in_bounds:
            return NodeProblem(f"it prints more than {MAX_BYTES >> 20} MB", "Check what a login prints there.")
        if not ended.in_time:
            return NodeProblem(f"it does not answer within {TIMEOUT_S:.0f} s", f"Try: ssh NODE {self._asked}")
        if ended.status == 255:
            for text, cause, fix in _CAUSES:
                if text in ended.error:
                    return NodeProblem(cause, fix)
            return NodeProblem(f"ssh fails{reason}", _BY_HAND)
        if ended.status in (126, NO_SUCH_PROGRAM):
            return NodeProblem(f"{printable(self._command)} is not installed there",
                               "Install it on the nodes (from a clone), or name its path: --remote-command "
                               "/PATH/gputop")
        return NodeProblem(f"gputop there fails: {ended.error or f'status {ended.status}'}",
                           f"Try: ssh NODE {self._command} doctor")

    def close(self) -> None:
        """End what runs, and the connections that were kept."""
        with self._lock:
            self._closed = True
            for process in self._running:
                process.kill()
        if self._folder is not None:
            for name in os.listdir(self._folder.name):  # noqa: PTH208
                with contextlib.suppress(OSError):
                    run_program(["ssh", "-O", "exit", "-o", f"ControlPath={self._folder.name}/{name}", "--", "kept"],
                                2.0, 4096)
            with contextlib.suppress(OSError):
                self._folder.cleanup()
            self._folder = None


def answer_of(ssh: Ssh[T], node: str) -> tuple[T | NodeProblem, int]:
    """Ask as :meth:`Ssh.ask` does, for a thread that an odd answer must not end: what is wrong is returned."""
    try:
        return ssh.ask(node)
    except NodeProblem as error:
        return error, 0
    except Exception as error:  # noqa: BLE001 - thread boundary
        return NodeProblem(f"its answer cannot be read ({type(error).__name__})", "ssh NODE gputop --version"), 0


def ask_all(ssh: Ssh[T], nodes: Sequence[str], stop: threading.Event, most_s: float,
            on_answer: Callable[[int], None] = lambda count: None) -> dict[str, T | NodeProblem]:
    """The answers of nodes, :data:`AT_ONCE` of them at the same time; blocks.

    Ends after ``most_s`` or with ``stop``: nodes that have not answered by then are missing. ``on_answer`` is told how
    many have. Closes ``ssh``.
    """
    waiting: SimpleQueue[str] = SimpleQueue()
    came: SimpleQueue[tuple[str, T | NodeProblem]] = SimpleQueue()
    for node in nodes:
        waiting.put(node)

    def work() -> None:
        with contextlib.suppress(Empty):
            while not ended.is_set():
                node = waiting.get_nowait()
                came.put((node, answer_of(ssh, node)[0]))

    ended, until_s = threading.Event(), time.monotonic() + most_s
    answers: dict[str, T | NodeProblem] = {}
    for _ in range(min(AT_ONCE, len(nodes))):
        threading.Thread(target=work, name="gputop-ssh", daemon=True).start()
    try:
        while len(answers) < len(nodes) and not stop.is_set() and time.monotonic() < until_s:
            with contextlib.suppress(Empty):
                node, answer = came.get(timeout=_POLL_S)
                answers[node] = answer
                on_answer(len(answers))
    finally:
        ended.set()
        ssh.close()
    return answers


def document_in(out: bytes) -> bytes:
    """The JSON object in what a node printed: a login may print more, before it and after."""
    begin = 0 if out.startswith(b"{") else out.find(b"\n{") + 1
    end = out.rfind(b"\n}")
    return out[begin:end + 2] if end >= begin else out
