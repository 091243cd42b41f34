"""Captures of the ranks that a PyTorch job has on other nodes: gputop there is asked by ssh, and records with ours.

The socket of kineto's daemon cannot be reached from another node. So each node has a gputop of its own for the capture
(:mod:`gputop.commands.capture_ranks`), in the steps of :mod:`gputop.profiler.capture.multi_worker`: it probes its
ranks and says how long they can be recorded; gputop here tells all of them the shortest length and a common start; then
it sends the traces. Lines of JSON in both directions, and after the last one the traces' bytes. What a node sends is as
hostile as a file.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from msgspec import Struct
from msgspec.structs import replace

from gputop.core.errors import GputopError, os_errors_as, sentences
from gputop.launch.target import MAX_RANKS
from gputop.profiler.capture.job_memory import Cost
from gputop.profiler.capture.outcomes import Outcome
from gputop.profiler.capture.plan import Plan
from gputop.profiler.capture.request import CaptureRequest
from gputop.profiler.clocks import ClockBounds
from gputop.profiler.kineto.recorder import ENDING
from gputop.profiler.recording import CaptureResult
from gputop.profiler.storage import MAX_COPY_BYTES, RunFolder
from gputop.telemetry.agents import SCHEMA as AGENT
from gputop.telemetry.agents import Agent, NodeProblem, Request, by_cause, read_line, write_line
from gputop.text.units import printable

SCHEMA = "gputop.ranks/1"
MAX_NODES = 64
_READY_TIMEOUT_S = 90.0  # switching on and probing: 30 s at most for a rank that does not answer, and some recordings
_LINE_S = 0.5  # time for a line to get there
_MAX_LEAD_S = 10.0
_LEAST_S = 0.04  # length of a recording, less than any that gputop chooses: nothing would be left of all others
# A node that can be recorded for less than this part of the median is left out: it would shorten all others.
_FAR_BELOW = 0.25
_MAX_OFFSET_S = 2e9  # offset of a node's clock, which may begin in 1970; a file of clocks holds no more
# After the recording: how long nothing may come (a node says every 5 s that it goes on), how long the traces may be
# built, and how slowly they may come.
_SILENT_S, _BUILD_S, _LEAST_BYTES_PER_S = 30.0, 240.0, 100_000
ALIVE_PERIOD_S = 5.0
_STOPPED_S = 5.0  # for what is on its way when the capture is stopped
_POLL_S, _END_S = 0.05, 1.0
_PIECE_BYTES, _EDGE_BYTES = 1 << 18, 64
_CHECK = "Check gputop's version on that node: ssh NODE gputop --version"
_NODE_BYTES = 8 << 30  # of all traces of a node


class NodeReady(Struct, frozen=True):
    """Message of a node once its ranks are probed: they can be recorded for ``seconds``, and must be asked ``lead_s``
    before; ``time_s`` is Unix time there. ``schema`` tells it from what a login prints."""

    schema: str
    seconds: float
    lead_s: float
    time_s: float


class Alive(Struct, frozen=True):
    """Message of a node that still records or builds its traces; gputop before this version leaves it out."""

    schema: str
    alive: bool = True


class Start(Struct, frozen=True):
    """Message to all nodes: when to begin, by the clock of the one that tells it, at ``now_s`` by that clock.
    ``low_s``: a node's clock is ahead of it by no less."""

    start_s: float
    seconds: float
    now_s: float
    low_s: float


class RankTrace(Struct, frozen=True):
    """One rank's trace of ``size`` bytes, or why there is none (``problem`` and ``fix``)."""

    address: str
    name: str
    size: int = 0
    took_s: float = 0.0
    began_s: float | None = None  # Unix time there
    problem: str = ""
    fix: str = ""


class Ranks(Struct, frozen=True):
    """The last line of a node; the traces follow in this order. ``received_s``: Unix time there of :class:`Start`."""

    schema: str
    received_s: float
    ranks: tuple[RankTrace, ...]


class _Node:
    """The conversation with one node, in a thread of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ready: NodeReady | None = None
        self.low_s = 0.0
        self.start: Start | None = None
        self.answered = threading.Event()  # ``start`` is there, or there will be none
        self.outcomes: list[Outcome] = []
        self.problem: NodeProblem | None = None
        self.agent: Agent | None = None
        self.thread: threading.Thread | None = None
        self.due_s = self.latest_s = math.inf  # monotonic: when something must have come, and all of it
        self.ended_s = math.inf  # monotonic: since when its end is waited for

    def expect(self, seconds: float) -> None:
        """All that is still to come must have come in so many seconds, and something of it soon."""
        self.latest_s = time.monotonic() + seconds
        self.came()

    def came(self) -> None:
        self.due_s = min(self.latest_s, time.monotonic() + _SILENT_S)

    def goes_on(self) -> bool:
        """Return whether something may still come; a thread that does not end is left behind."""
        return self.thread is not None and self.thread.is_alive() and time.monotonic() < self.ended_s + _END_S

    def end(self, reason: str, fix: str = "") -> None:
        """End the conversation; what has come is kept."""
        if self.problem is None:
            self.problem, self.ended_s = NodeProblem(reason, fix), time.monotonic()
        if self.agent is not None:
            self.agent.process.kill()


class _Trace:
    """A trace on its way from a node. ``room`` returns how many bytes may still be written here."""

    def __init__(self, size: int, source: IO[bytes], came: Callable[[], None], room: Callable[[], int]) -> None:
        self._left, self._source, self._came, self._room = size, source, came, room
        self._last = b""

    def read(self, most: int) -> bytes:
        """The next piece, b"" at the end. Raises NodeProblem for what is not a trace, and OSError without room."""
        if not self._left:
            if not self._last.rstrip().endswith(b"}"):
                raise NodeProblem("the node sent data that is not a trace", _CHECK)
            return b""
        if self._room() < min(self._left, _PIECE_BYTES):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        piece = self._source.read(min(most, _PIECE_BYTES, self._left))
        if not piece:
            raise NodeProblem("the connection was lost while the node sent its traces", "")
        if not self._last and (not piece.lstrip().startswith(b"{") or b'"traceEvents"' not in piece):
            raise NodeProblem("the node sent data that is not a trace", _CHECK)
        self._came()
        self._left -= len(piece)
        self._last = piece[-_EDGE_BYTES:]
        return piece


class OtherNodes:
    """The capture of a job's ranks on other nodes, beside that of this node's ranks."""

    def __init__(self, names: Sequence[str], meeting: str, command: str, stop: threading.Event) -> None:
        """``meeting``: where the job's ranks meet; ``command`` starts gputop there, as a shell reads it."""
        self._nodes = [_Node(name) for name in names]
        self._meeting, self._command, self._stop = meeting, command, stop
        self._run: Path | None = None  # the run folder that the traces go to
        self._collecting = threading.Event()  # or there is nothing to collect them for

    @contextlib.contextmanager
    def running(self, request: CaptureRequest) -> Iterator[None]:
        """Ask the nodes to begin with their probes; nothing of it goes on after the block."""
        try:
            for node in self._nodes:
                node.thread = threading.Thread(target=self._talk, args=(node, request), name="gputop-node", daemon=True)
                node.thread.start()
            yield
        finally:
            self._collecting.set()
            for node in self._nodes:
                node.answered.set()
                if node.agent is not None:
                    node.agent.process.kill()

    def agree(self, plan: Plan, start_s: float) -> tuple[Plan, float]:
        """The shortest plan of all nodes and the moment at which all can begin; the nodes are told. Blocks until the
        last is ready, 90 s at most."""
        lead_s = start_s - time.time()
        until_s = time.monotonic() + _READY_TIMEOUT_S
        while time.monotonic() < until_s and not self._stop.is_set() and any(
                node.ready is None and node.problem is None for node in self._nodes):
            time.sleep(_POLL_S)
        median_s = statistics.median([plan.chosen_s, *(
            node.ready.seconds for node in self._nodes if node.ready is not None and node.problem is None)])
        for node in self._nodes:
            if node.ready is not None and node.problem is None and node.ready.seconds < _FAR_BELOW * median_s:
                node.problem = NodeProblem(
                    f"the node's ranks can be recorded for only {node.ready.seconds:g} s, and half of the nodes for "
                    f"{median_s:g} s or more. gputop left out the node to avoid a shorter capture",
                    "Capture on that node: gputop capture PID.")
        ready = [(node, node.ready) for node in self._nodes if node.ready is not None and node.problem is None]
        for node, ready_node in ready:
            if ready_node.seconds < plan.chosen_s:
                plan = replace(plan, chosen_s=ready_node.seconds, why=f"the ranks on {node.name} produce more events",
                               overview_s=0.0)
            lead_s = max(lead_s, ready_node.lead_s)
        start_s = time.time() + lead_s + (_LINE_S if ready else 0.0)
        for node, _ in ready:
            node.start = Start(start_s, plan.chosen_s, time.time(), node.low_s)
        for node in self._nodes:
            if node.ready is None and node.problem is None:
                node.end("the node was not ready in time")
            node.answered.set()
        return plan, start_s

    def collect(self, run_dir: Path) -> tuple[tuple[Outcome, ...], tuple[str, ...]]:
        """The traces of the other nodes, saved in a run folder, and why some are missing, in sentences. Blocks as long
        as something comes; once the capture is stopped, for 5 s."""
        self._run = run_dir
        self._collecting.set()
        stopped_s = math.inf
        while going := [node for node in self._nodes if node.goes_on()]:
            now_s = time.monotonic()
            stopped_s = min(stopped_s, now_s) if self._stop.is_set() else stopped_s
            for node in going:
                if now_s > stopped_s + _STOPPED_S:
                    node.end("the capture was stopped before all traces from the node arrived")
                elif now_s > node.due_s:
                    node.end(*(("traces from the node arrive too slowly", "Check the network and the load on the node.")
                               if node.due_s == node.latest_s else
                               (f"the node sent nothing for {_SILENT_S:.0f} s",
                                "Check whether the node is up. The recording of its ranks may be lost.")))
            time.sleep(_POLL_S)
        problems = {node.name: node.problem for node in self._nodes if node.problem is not None}
        return (tuple(outcome for node in self._nodes for outcome in node.outcomes),
                tuple(sentences(f"not captured: {one.message}", one.fix) for one in by_cause(problems)))

    def _talk(self, node: _Node, request: CaptureRequest) -> None:
        try:
            node.agent = Agent(node.name, self._command, follow=True)
            try:
                self._converse(node, node.agent, request)
            except (NodeProblem, OSError, ValueError) as error:
                node.problem = node.problem or node.agent.problem() or (
                    error if isinstance(error, NodeProblem) else NodeProblem("the connection was lost", ""))
            except GputopError as error:  # a trace could not be saved here
                node.problem = node.problem or NodeProblem(error.message, error.fix)
            finally:
                node.agent.end()
        except NodeProblem as error:
            node.problem = error
        except Exception as error:  # noqa: BLE001  thread boundary: the other nodes go on
            node.problem = NodeProblem(f"internal error in gputop: {error!r}", "Please report this.")

    def _converse(self, node: _Node, agent: Agent, request: CaptureRequest) -> None:
        """Raises NodeProblem, OSError or ValueError."""
        with contextlib.suppress(OSError):  # it has ended: what it said shows why
            write_line(agent.to_node, Request(AGENT, request.seconds, ranks_of=self._meeting, force=request.force))
        from_node = agent.from_node
        ready = read_line(from_node, NodeReady)
        least_s = min(_LEAST_S, request.seconds)
        if not (least_s <= ready.seconds <= request.seconds and 0 <= ready.lead_s <= _MAX_LEAD_S):
            raise NodeProblem("gputop on the node reported an invalid capture length", _CHECK)
        node.low_s = _offset_s(ready.time_s)
        node.ready = ready
        node.answered.wait()
        if node.start is None:
            return
        sent_s = time.time()
        recorded_s = max(0.0, node.start.start_s - sent_s) + node.start.seconds
        node.expect(recorded_s + _BUILD_S)
        node.due_s = min(node.latest_s, time.monotonic() + recorded_s + _SILENT_S)
        write_line(agent.to_node, node.start)
        last = read_line(from_node, Ranks, lambda _: node.came())
        high_s = _offset_s(last.received_s, sent_s)
        clock = ClockBounds(min(node.low_s, high_s), max(node.low_s, high_s)).clock()
        sizes = [rank.size for rank in last.ranks[:MAX_RANKS] if not rank.problem]
        if any(not 0 < size <= MAX_COPY_BYTES for size in sizes) or sum(sizes) > _NODE_BYTES:
            raise NodeProblem(f"the node's traces are too large ({sum(sizes) / 1e9:,.1f} GB)", "")
        node.due_s = node.latest_s = math.inf
        self._collecting.wait()  # until this node's own ranks are recorded
        if self._run is None:
            return
        node.expect(2 * _SILENT_S + sum(sizes) / _LEAST_BYTES_PER_S)
        for rank in last.ranks[:MAX_RANKS]:
            outcome = Outcome(f"{node.name} {printable(rank.address)[:40]}", printable(rank.name)[:200], clock=clock)
            if rank.problem:
                outcome = replace(outcome, error=GputopError(printable(rank.problem)[:500], printable(rank.fix)[:500]))
            else:
                took_s = min(max(rank.took_s, 0.0), node.start.seconds + _BUILD_S)
                cost = Cost(took_s, min(took_s, node.start.seconds))
                began_s = None if rank.began_s is None else sent_s + _offset_s(rank.began_s, sent_s) - (
                    clock.offset_ns / 1e9)
                path = self._save(rank, from_node, request.logdir, node.came)
                outcome = replace(outcome, name=path.name, cost=cost, began_s=began_s, result=CaptureResult(
                    path, node.start.seconds, took_s, rank.size, False))
            node.outcomes.append(outcome)

    def _save(self, rank: RankTrace, source: IO[bytes], logdir: Path, came: Callable[[], None]) -> Path:
        """Raises NodeProblem."""
        assert self._run is not None
        with (os_errors_as("cannot save the node's traces here", "Free some space or choose another --logdir.",
                           NodeProblem),
              RunFolder.create(logdir, rank.name[:100], self._run.name, ENDING) as run):
            def room() -> int:
                return run.free_bytes(reserve=True)

            if rank.size > room():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return run.receive(_Trace(rank.size, source, came, room), rank.size)


def _offset_s(time_s: float, now_s: float | None = None) -> float:
    """Distance of a time that a node names from ours. Raises NodeProblem for one that no clock shows: it would be of no
    use in the file of all clocks."""
    offset_s = time_s - (time.time() if now_s is None else now_s)
    if abs(offset_s) > _MAX_OFFSET_S:
        raise NodeProblem("gputop on the node reported an impossible time", "Check the node's clock: ssh NODE date")
    return offset_s
