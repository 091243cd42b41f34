"""Watches which profiler servers there are, and which of their jobs is meant.

Owns a thread that looks for them every 10 s.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gputop.core.errors import GputopError
from gputop.profiler.capture.records import Server, usable
from gputop.profiler.capture.request import CaptureQuestion, CaptureRequest, ask_job, ask_other_job
from gputop.replay.player import Player
from gputop.session.captures import earlier_runs, find_servers
from gputop.session.options import Options
from gputop.sources.base import Source
from gputop.sources.factory import GpusOrHost
from gputop.text.commands import command_of

if TYPE_CHECKING:
    from gputop.profiler.discovery import TrainingProcesses

DISCOVERY_PERIOD_S = 10.0
_QUICK_PERIOD_S, _QUICK_SEARCHES = 1.0, 10  # while a named server does not answer
_FIRST_SAMPLE_POLL_S = 0.1  # before the first sample there are no processes whose servers could be found


def _runs(pid: int) -> bool:
    """Whether a process of this node has not ended; one that its parent has yet to take notice of has."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] not in b"ZX"
    except OSError:
        return False


class WatchedJob:
    """Which of the jobs with a profiler server is meant, by what was found and what the user has answered."""

    def __init__(self) -> None:
        self.server: Server | None = None  # of the job that is watched, if it was found and not named
        self.chosen = False  # by the user, or as the only one when a capture began
        self.agreed: set[str] = set()  # addresses of other users' servers that may be captured from
        self._allowed: set[tuple[str, str]] = set()  # address and user of servers of others
        self._beside: frozenset[tuple[str, int | None]] = frozenset()  # address and PID of all servers while it ran

    def watch(self, server: Server, servers: Sequence[Server] | None = None) -> None:
        """Captures go to this server, one of these that were found, as long as its job runs."""
        self.server, self.chosen = server, True
        if servers is not None:
            self._beside = frozenset((s.address, s.pid) for s in servers)

    def allow(self, server: Server) -> None:
        """Let captures go to a server of another user until gputop ends."""
        self._allowed.add((server.address, server.owner))
        self.agreed.add(server.address)

    def as_allowed(self, server: Server) -> Server:
        return replace(server, owner="") if (server.address, server.owner) in self._allowed else server

    def next(self, servers: Sequence[Server]) -> Server | None:
        """The server of another job that would be captured because the watched one has ended; None: there is none.

        A server that came after that end, with the same command, is of the same job, started again.
        """
        of_user = [s for s in servers if s.problem is None and not s.owner and not s.asked]
        if any(s.asked for s in servers) or not of_user:
            return None
        by_key = {(s.address, s.pid): s for s in servers}
        job, first = self.server, of_user[0]
        if job is not None and (job.address, job.pid) in by_key:
            first = by_key[job.address, job.pid]  # more is known of it by now, perhaps
        elif job is not None and ((first.address, first.pid) in self._beside
                                  or command_of(first.description) != command_of(job.description)):
            return first
        self.server, self._beside = first, frozenset(by_key)
        return None

    def first_of(self, servers: Sequence[Server]) -> tuple[Server, ...]:
        """Named servers, then that of the watched job, which is the one to capture from and to show."""
        key = (self.server.address, self.server.pid) if self.server is not None else None
        return tuple(sorted(servers, key=lambda s: (not s.asked, (s.address, s.pid) != key)))

    @staticmethod
    def of(servers: Sequence[Server]) -> list[Server]:
        """A server of each job that was found and may be captured from; workers of one command are one job."""
        of_command: dict[str, Server] = {}
        for server in servers:
            if server.problem is None and not server.owner and not server.asked:
                of_command.setdefault(command_of(server.description), server)
        return list(of_command.values())

    def question(self, servers: Sequence[Server], request: CaptureRequest) -> CaptureQuestion | None:
        """Which job a request of the user means, where that is not known."""
        if (other := self.next(servers)) is not None and self.server is not None:
            return ask_other_job(request, other, self.server)
        if self.chosen or request.reason or usable(servers)[0].asked:
            return None
        jobs = self.of(servers)
        return ask_job(request, jobs) if len(jobs) > 1 else None


class ServerWatch:
    """The profiler servers there are, kept up to date by a thread."""

    def __init__(self, source: Source | Player, options: Options, on_change: Callable[[], None]) -> None:
        self.servers: tuple[Server, ...] = ()
        self.servers_known = False
        self.earlier_captures = 0  # in the logdir when it began
        self.ended_server: Server | None = None  # of a job that has ended, until another one answers
        self.discovery_notes: tuple[str, ...] = ()
        self.attached = list(options.attach)  # addresses the user named
        self.job = WatchedJob()
        self.busy: Collection[str] = ()  # addresses of the capture under way, which must not be probed
        self.has_sample = False  # of the node
        self._source, self._options, self._on_change = source, options, on_change
        self._found_pids: frozenset[int] = frozenset()  # of the servers of the last search
        self._report_servers = False  # the outcome of the next search is reported even if nothing has changed
        self._training: TrainingProcesses | None = None
        self._quick_searches = 0
        self._closing = threading.Event()
        self._search_now = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch_servers, name="gputop-discovery", daemon=True).start()

    def close(self) -> None:
        """End the thread; returns at once."""
        self._closing.set()
        self._search_now.set()

    def attach(self, address: str) -> str:
        """Watch a profiler server, or several in the syntax of ``--attach``; returns the first in its canonical form.

        Raises GputopError (usage) for what cannot be an address.
        """
        from gputop.profiler.addresses import parse_address
        from gputop.profiler.workers import addresses

        self._quick_searches = 0
        parsed = addresses([address]) or (parse_address(address),)  # an empty text is refused, too
        self.attached += [one for one in parsed if one not in self.attached]
        self._report_servers = True
        self._search_now.set()
        return parsed[0]

    def _watch_servers(self) -> None:
        self.earlier_captures = earlier_runs(self._options.logdir)
        while not self._closing.is_set():
            if self.has_sample or self.attached:
                self.update()
            self._search_now.wait(self._next_search_s())
            self._search_now.clear()

    def _next_search_s(self) -> float:
        """Seconds until the next search: soon while a named server does not answer, which may be about to start."""
        if not self.has_sample:
            return _FIRST_SAMPLE_POLL_S
        if all(s.problem is None for s in self.servers if s.asked):
            self._quick_searches = 0
            return DISCOVERY_PERIOD_S
        self._quick_searches += 1
        return _QUICK_PERIOD_S if self._quick_searches <= _QUICK_SEARCHES else DISCOVERY_PERIOD_S

    def update(self) -> None:
        """Look once which profiler servers there are; blocks for as long as they take to answer."""
        try:
            servers, notes = find_servers(tuple(self.attached), self._source.profiler_endpoints(),
                                          self._options.discover and not self._source.simulated, self.busy)
        except GputopError as error:
            servers, notes = (), (error.in_one_line,)
        except Exception as error:  # noqa: BLE001  thread boundary: the next search may succeed
            servers, notes = (), (f"the search for profiler servers failed, a bug in gputop: {error!r}",)
        from gputop.text.redaction import command

        servers = tuple(self.job.as_allowed(replace(s, description=command(s.description))) for s in servers)
        self._found_pids = frozenset(s.pid for s in servers if s.pid is not None)
        if self.job.next(servers) is None and usable(servers):
            self.ended_server = None
        servers = self.job.first_of(servers)
        changed = (servers, notes) != (self.servers, self.discovery_notes) or not self.servers_known
        self.servers, self.discovery_notes, self.servers_known = servers, notes, True
        if isinstance(self._source, GpusOrHost):
            self._source.watch_processes(self._jobs_without_gpu(self._source))
        if changed or self._report_servers:
            self._report_servers = False
            self._on_change()

    def _jobs_without_gpu(self, source: GpusOrHost) -> tuple[int, ...]:
        """The processes of a node without GPUs that are shown: those of servers, and those that could have one."""
        if source.error is None:
            return ()
        if self._training is None:
            from gputop.profiler.discovery import TrainingProcesses

            self._training = TrainingProcesses()
        served = {server.pid for server in self.servers if server.pid is not None}
        return tuple(sorted(served | set(self._training.find() if self._options.discover else ())))

    def drop_ended(self) -> None:
        """Take away the servers of jobs of this node that have ended since the last search, and search again. One that
        the user named stays, as one that does not answer."""
        ended = [s for s in self.servers if s.pid in self._found_pids and not _runs(s.pid or 0)]
        if ended:
            self.ended_server = ended[0]
            self._found_pids -= {s.pid for s in ended if s.pid is not None}
            self.servers = tuple(replace(s, problem="its process has ended") if s in ended else s for s in self.servers
                                 if s.asked or s not in ended)
            self._on_change()
            self._search_now.set()

    def choose_job(self, server: Server) -> None:
        """Captures go to this server, one of those that were found, as long as its job runs."""
        self.job.watch(server, self.servers)
        self.ended_server = None
        self.servers = self.job.first_of(self.servers)
        self._on_change()

    def allow(self, server: Server) -> None:
        """Let captures go to a server of another user, or of another job than the one that ended, until gputop ends."""
        if server.owner:
            self.job.allow(server)
        else:
            self.job.watch(server)
            self.ended_server = None
        self.servers = self.job.first_of([self.job.as_allowed(s) for s in self.servers])
