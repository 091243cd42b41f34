"""Talks with gputop's agent on other nodes, by the system's ssh with the user's configuration.

``gputop agent`` is started there and reads a :class:`Request`, a line of JSON; it answers by lines of JSON, and ends
with the connection. ssh never asks for a password here (BatchMode): a node that wants one is said to. Nothing secret is
in an argument. What a node sends is as hostile as a file.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import fmean
from typing import IO, TYPE_CHECKING, Annotated, TypeVar

from msgspec import Meta, Struct

from gputop.core.codec import convert, encode, parse
from gputop.core.errors import EXIT_USAGE, GputopError, os_errors_as
from gputop.core.files import read_regular
from gputop.core.findings import Problem
from gputop.core.metrics import GPU_METRICS
from gputop.core.samples import MAX_GPUS, OK, GpuSample, NodeSample, ProcessSample
from gputop.core.version import __version__
from gputop.profiler.workers import MAX_HOSTS, expand_hostlist
from gputop.text.programs import NO_SUCH_PROGRAM, ErrorTail
from gputop.text.units import first_few, printable

if TYPE_CHECKING:
    from gputop.telemetry.history import History

SCHEMA = "gputop.agent/1"
AT_ONCE = 16  # connections that ask at the same time
TIMEOUT_S = 20.0  # of a node, from the connection to the last byte
_LINE_BYTES, _LINES_BEFORE = 1 << 20, 200  # a login may print more before
_SSH_FAILS = 255
_END_TIMEOUT_S = 2.0  # of a program that has closed its output
_NAMED = 8  # nodes in a sentence
_MAX_FILE_BYTES = 1 << 20
# No dash at the beginning, no character that a shell or ssh reads as something else.
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]{0,63}@)?[A-Za-z0-9_][A-Za-z0-9._:-]{0,253}")
_HOW = "Write n[01-16], n01,n02 or @FILE with one name per line. Ports and users can be set in ~/.ssh/config."
_CHECK = "Check what a login on the node prints, and the version: ssh NODE gputop --version"
_BY_HAND = "Connect manually once: ssh NODE true"
# What ssh says where it fails itself, the surest first: the cause, and what to do.
_CAUSES = (
    ("IDENTIFICATION HAS CHANGED", "the node's host key differs from the one that ssh knows",
     "Find out why before you remove the old key: ssh-keygen -R NODE"),
    ("Host key verification failed", "the node's host key is unknown", f"{_BY_HAND}, and compare the fingerprint."),
    ("Permission denied", "the node asks for a password or rejects the key",
     "ssh NODE true must work without a prompt: use a key (ssh-copy-id NODE), an agent, or a shared connection "
     "(ControlMaster in ~/.ssh/config)."),
    ("Could not resolve", "the node's name is unknown here", "Use names that work with ssh NODE."),
    ("Connection refused", "the node refuses connections", f"Check whether sshd is running on the node. {_BY_HAND}"),
    ("timed out", "the node does not answer", "Check whether the node is up and reachable from here."),
    ("No route", "the node does not answer", "Check whether the node is up and reachable from here."),
)


T = TypeVar("T")


class Request(Struct, frozen=True):
    """Question to gputop's agent on a node: for the figures of its GPUs, means of the last ``seconds``; or for
    traces of the ranks of the job that meets at ``ranks_of``."""

    schema: str
    seconds: float
    ranks_of: str = ""
    force: bool = False


class NodeProblem(GputopError):
    """Reason why a node could not be asked, in words that name no node: nodes with one cause are told together."""


def by_cause(problems: Mapping[str, NodeProblem]) -> list[Problem]:
    """The problems of nodes, those with one cause together: "n02, n07: it does not answer"."""
    causes: dict[tuple[str, str], list[str]] = {}
    for name, problem in problems.items():
        causes.setdefault((problem.message, problem.fix), []).append(name)
    return [Problem(f"{first_few(names, _NAMED)}: {message}", fix.replace("NODE", names[0]))
            for (message, fix), names in causes.items()]


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
            raise GputopError(f"{printable(name)[:100]!r} is not a valid node name", _HOW, EXIT_USAGE)
    if not names or len(names) > MAX_HOSTS:
        raise GputopError("no nodes were named", _HOW, EXIT_USAGE)
    return names


def write_line(out: IO[bytes], line: Struct) -> None:
    """Raises OSError."""
    out.write(encode(line) + b"\n")
    out.flush()


def read_line(source: IO[bytes], kind: type[T], came: Callable[[int], None] = lambda count: None) -> T:
    """The next line that is one of this kind; raises NodeProblem where none comes. ``came`` is given the bytes of each
    line."""
    for _ in range(_LINES_BEFORE):
        line = source.readline(_LINE_BYTES)
        if not line:
            break
        came(len(line))
        if line.startswith(b"{"):
            with contextlib.suppress(ValueError):
                return convert(parse(line), kind)
    raise NodeProblem("gputop on the node exited without an answer", _CHECK)


class Agent:
    """A gputop on a node that answers lines of JSON by lines of JSON; whoever has it ends it."""

    def __init__(self, node: str, command: str, *, follow: bool) -> None:
        """Raises :class:`NodeProblem`. ``command`` starts gputop there, as a shell reads it; ``follow``: read all the
        time what it says on stderr."""
        self._command, self._late = command, False
        words = ["ssh", "-T", "-C", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "LogLevel=ERROR", "-o",
                 "ClearAllForwardings=yes", "-o", "ForwardAgent=no", "-o", "ServerAliveInterval=5", "--", node,
                 f"{command} agent"]
        with os_errors_as("cannot start ssh", "Install the OpenSSH client on this machine.", NodeProblem):
            self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=subprocess.PIPE, env={**os.environ, "LC_ALL": "C"})
        assert self.process.stdin is not None and self.process.stdout is not None and self.process.stderr is not None
        self.to_node, self.from_node = self.process.stdin, self.process.stdout
        self._errors = ErrorTail(self.process.stderr, self.process.kill, follow=follow)

    def ask(self, request: Request, kind: type[T], most_s: float) -> tuple[T, int]:
        """Return the answer and its bytes. Raises :class:`NodeProblem`; it is then of no further use."""
        def late() -> None:
            self._late = True
            self.process.kill()

        counts: list[int] = []
        timer = threading.Timer(most_s, late)
        timer.daemon = True
        timer.start()
        try:
            with contextlib.suppress(OSError, ValueError):  # it has ended: what it said shows why
                write_line(self.to_node, request)
            return read_line(self.from_node, kind, counts.append), sum(counts)
        except NodeProblem as error:
            raise self.problem() or error from None
        finally:
            timer.cancel()

    def problem(self) -> NodeProblem | None:
        """Return why it ended; None where it goes on or did what it was to do. Blocks for a moment."""
        with contextlib.suppress(OSError):
            self.to_node.close()
        try:
            status = self.process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None
        text = self._errors.text()
        if self._errors.is_flood:
            return NodeProblem("the node printed more than 8 MB", "Check what a login on the node prints.")
        if self._late:
            return NodeProblem("the node does not answer in time", f"Try: ssh NODE {self._command} snapshot")
        if status == _SSH_FAILS:
            fails = NodeProblem(f"ssh fails{f' ({text})' if text else ''}", _BY_HAND)
            return next((NodeProblem(cause, fix) for sign, cause, fix in _CAUSES if sign in text), fails)
        if status in (126, NO_SUCH_PROGRAM):
            return NodeProblem(f"{printable(self._command)} is not installed on the node",
                               "Install gputop on the nodes (from a clone), or use --remote-command /PATH/gputop")
        if status == EXIT_USAGE and "'agent'" in text:
            return NodeProblem(f"gputop on the node is older than gputop {__version__} here, and cannot answer",
                               "Install the same version there. To see the node's version: ssh NODE gputop --version")
        return None if status == 0 else NodeProblem(f"gputop on the node failed: {text or f'status {status}'}",
                                                    f"Try: ssh NODE {self._command} doctor")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._errors.close()
        for pipe in (self.to_node, self.from_node):
            with contextlib.suppress(OSError):
                pipe.close()


class Ssh:
    """Asks agents on nodes, :data:`AT_ONCE` at the same time. An agent is kept for the next question to its node."""

    def __init__(self, command: str, request: Request) -> None:
        """``command`` starts gputop there, as a shell reads it."""
        self._command, self._request = command, request
        self._agents: dict[str, Agent] = {}  # by node: that were asked last
        self._waiting: SimpleQueue[str | None] = SimpleQueue()
        self._came: SimpleQueue[tuple[str, NodeAnswer | NodeProblem, int]] = SimpleQueue()
        self._threads = 0
        self._closed = False

    def ask(self, nodes: Sequence[str]) -> None:
        """Begin to ask these."""
        for node in nodes:
            self._waiting.put(node)
        for _ in range(min(AT_ONCE, len(nodes)) - self._threads):
            self._threads += 1
            threading.Thread(target=self._work, name="gputop-ssh", daemon=True).start()

    def take(self, most_s: float) -> tuple[str, NodeAnswer | NodeProblem, int] | None:
        """Return the next node that has answered, its answer or why there is none, and the bytes that came; None where
        none comes in time."""
        with contextlib.suppress(Empty):
            return self._came.get(timeout=max(0.0, most_s))
        return None

    def _work(self) -> None:
        while (node := self._waiting.get()) is not None and not self._closed:
            try:
                self._came.put((node, *self._answer(node)))
            except NodeProblem as error:
                self._came.put((node, error, 0))
            except Exception as error:  # noqa: BLE001 - thread boundary: an odd answer must not end it
                self._came.put((node, NodeProblem(f"its answer is not valid ({type(error).__name__})", _CHECK), 0))

    def _answer(self, node: str) -> tuple[NodeAnswer, int]:
        """Raises NodeProblem."""
        kept = self._agents.get(node)
        agent = self._agents[node] = kept or Agent(node, self._command, follow=False)
        if self._closed:
            agent.process.kill()
        try:
            return agent.ask(self._request, NodeAnswer, TIMEOUT_S)
        except NodeProblem:
            self._agents.pop(node).end()
            if kept is None or self._closed:
                raise
        return self._answer(node)  # its connection had ended meanwhile

    def close(self) -> None:
        self._closed = True
        for _ in range(self._threads):
            self._waiting.put(None)
        for agent in list(self._agents.values()):
            agent.end()


# -- what an agent tells of its node ----------------------------------------------------------------

# New ones at the end: an older gputop reads what it knows.
FIGURES = ("tensor_active", "memory_used_bytes", "memory_total_bytes", "power_w", "power_limit_w", "sm_clock_hz",
           "temperature_c", "memory_temperature_c", "pcie_width", "ecc_uncorrected", "rows_remap_failed",
           "clock_reasons", "xid", "sm_active", "gr_active", "gpu_util")
_METRICS = {"rows_remap_failed": "row_remap_failed"}
_MAX_HOLDERS, _MAX_FIGURES = 64, 64
_TEXT_CHARS = 300
_Text = Annotated[str, Meta(max_length=_TEXT_CHARS)]


class GpuHolder(Struct, frozen=True, array_like=True):
    user: _Text | None = None
    program: _Text = ""
    container: _Text | None = None
    started_s: float | None = None
    pid: int | None = None


class NodeGpu(Struct, frozen=True, array_like=True):
    """A GPU or MIG instance. ``values`` are of :data:`FIGURES`; None: not known."""

    uuid: _Text
    label: _Text
    model: _Text = ""
    kind: _Text = ""
    activity: float | None = None
    values: Annotated[tuple[float | None, ...], Meta(max_length=_MAX_FIGURES)] = ()
    holders: Annotated[tuple[GpuHolder, ...], Meta(max_length=_MAX_HOLDERS)] = ()

    @property
    def figures(self) -> dict[str, float]:
        return {name: value for name, value in zip(FIGURES, self.values, strict=False) if value is not None}


class NodeAnswer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node now: what the columns and rules of a cluster need, some 200 bytes a GPU, as JSON arrays in the order of
    the fields, figures to five digits. A GPU that is divided into MIG instances has its work in them, and is not among
    ``gpus``."""

    hostname: _Text
    gpus: Annotated[tuple[NodeGpu, ...], Meta(max_length=MAX_GPUS)]
    source: _Text = ""
    simulated: bool = False


def answer_of(sample: NodeSample, history: History, seconds: float) -> NodeAnswer:
    """Return what is wanted of a node's newest sample and of its history over some seconds."""
    holders = [(process, GpuHolder(
        _text(process.user), _program(process.command), _text(process.container), process.started_s, process.pid))
        for process in sample.processes]
    return NodeAnswer(hostname=sample.host.hostname[:_TEXT_CHARS], source=sample.source[:_TEXT_CHARS],
                      simulated=sample.simulated, gpus=tuple(
                          _gpu(gpu, holders, history, seconds) for gpu in sample.gpus if not gpu.info.mig_mode))


def _gpu(gpu: GpuSample, processes: Sequence[tuple[ProcessSample, GpuHolder]], history: History,
         seconds: float) -> NodeGpu:
    def figure(metric: str) -> float | None:
        """Return the mean of the last seconds, of what has no history the newest value."""
        values = [value for value in history.window(gpu.info.uuid, metric, seconds)[1] if value == value] if (
            GPU_METRICS[metric].lane and gpu.info.uuid in history.uuids) else []
        return fmean(values) if values else gpu[metric].value

    metric, activity = gpu.activity()
    measured = activity.value is not None
    read = {"clock_reasons": gpu.clock_event_bits, "xid": gpu.xids[-1].xid if gpu.xids else None}
    computing = (holder for process, holder in processes if (held := process.gpus.get(gpu.info.index)) is not None
           and "C" in held.kind and held.mig in (None, gpu.info.mig))
    return NodeGpu(
        gpu.info.uuid[:_TEXT_CHARS], gpu.info.label[:_TEXT_CHARS], (gpu.info.name or "")[:_TEXT_CHARS],
        ("sm_active" if metric == "sm_active" else "util") if measured else "",
        _short(figure(metric)) if measured and gpu.state == OK else None,
        tuple(_short(read[name] if name in read else figure(_METRICS.get(name, name))) for name in FIGURES),
        tuple(islice(computing, _MAX_HOLDERS)))


def _short(value: float | None) -> float | None:
    if value is None:
        return None
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded.is_integer() else rounded


def _text(text: str | None) -> str | None:
    return None if text is None else text[:_TEXT_CHARS]


def _program(command: str | None) -> str:
    """The script of a command, else its first word."""
    words: Iterable[str] = (command or "").split()
    first = next(iter(words), "?")
    return next((word for word in words if word.endswith(".py")), first).rpartition("/")[2][:_TEXT_CHARS]
