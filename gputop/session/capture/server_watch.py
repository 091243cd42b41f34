"""Watches which profiler servers there are, and which of their jobs is meant.

Owns a thread that looks for them every 10 s.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gputop.core.errors import GputopError
from gputop.core.proc import stat_of
from gputop.core.samples import NodeSample, ProcessSample
from gputop.profiler.capture.records import Server, usable
from gputop.profiler.capture.request import CaptureQuestion, CaptureRequest, ask_job, ask_other_job
from gputop.replay.player import Player
from gputop.session.capture.captures import EarlierCaptures, earlier_captures, find_servers
from gputop.session.capture.which_job import gpu_use, in_order, jobs_of, only_job_on_gpus, same_job
from gputop.session.options import Options
from gputop.sources.base import Source
from gputop.sources.factory import GpusOrHost
from gputop.text.redaction import command

if TYPE_CHECKING:
    from gputop.profiler.discovery import TrainingProcesses

DISCOVERY_PERIOD_S = 10.0
_QUICK_PERIOD_S, _QUICK_SEARCHES = 1.0, 10  # while a named server does not answer
_FIRST_SAMPLE_POLL_S = 0.1  # before the first sample there are no processes whose servers could be found


def _runs(pid: int) -> bool:
    """Return whether a process of this node has not ended; one that its parent has yet to take notice of has."""
    stat = stat_of(pid)
    return stat is not None and stat.state not in "ZX"


class WatchedJob:
    """Choice of the job with a profiler server that is meant, by what was found and what the user has answered."""

    def __init__(self) -> None:
        self.server: Server | None = None  # of the job that the user chose or has captured, if it was found, not named
        self.chosen = False  # by the user, not as the only one when a capture began
        self.restarted: Server | None = None  # the server of a job that was started again while it was watched
        self.agreed: set[str] = set()  # addresses of other users' servers that may be captured from
        self._allowed: set[tuple[str, str]] = set()  # address and user of servers of others
        self._beside: frozenset[tuple[str, int | None]] = frozenset()  # address and PID of all servers while it ran
        self._named: dict[str, Server] = {}  # by the address that the user named, the job that answered there first
        self._starts_again = False  # the named job: the next server that is named is its

    def watch(self, server: Server, servers: Sequence[Server] = ()) -> None:
        """Captures go to this server, one of these that were found, as long as its job runs."""
        self.server, self.chosen = server, False
        self._beside = frozenset((s.address, s.pid) for s in servers)

    def allow(self, server: Server) -> None:
        """Let captures go to a server of another user, or to one that took the place of a named one, until gputop
        ends."""
        if server.owner:
            self._allowed.add((server.address, server.owner))
            self.agreed.add(server.address)
        if server.asked:
            self._named[server.address] = self.as_allowed(server)

    def as_allowed(self, server: Server) -> Server:
        return replace(server, owner="") if (server.address, server.owner) in self._allowed else server

    def follow(self, servers: Sequence[Server]) -> None:
        """Go on with the watched job, and with named ones, where they were started again (:func:`same_job`)."""
        for server in servers:
            before = self._named.get(server.address)
            if not server.asked or server.problem is not None:
                continue
            if self._starts_again and (before is None or before.pid != server.pid):
                self._starts_again = False
                self._named[server.address] = self.restarted = server
            elif before is None or before.pid is None or before.pid == server.pid:
                self._named[server.address] = server
            elif same_job(server, before):
                self._named[server.address] = self.restarted = server
        if self.server is None:
            return
        answering = {(s.address, s.pid): s for s in servers if s.problem is None}
        watched = self.server.address, self.server.pid
        if watched not in answering:
            again = [s for key, s in answering.items()
                     if key not in self._beside and not s.asked and same_job(s, self.server)]
            if not again:
                return
            address = self.server.address
            self.restarted = min(again, key=lambda s: s.address != address)
            watched = self.restarted.address, self.restarted.pid
        self.server = answering[watched]  # more is known of it by now, perhaps
        self._beside = frozenset(answering)

    def expect_restart(self) -> None:
        """The job that was named is started again, and its new servers are named as they come up."""
        self._starts_again = True

    def has_ended(self, servers: Sequence[Server]) -> bool:
        """Return whether the watched job has ended and was not started again, which leaves open which job is meant."""
        return (self.server is not None and not any(s.asked for s in servers)
                and not any(self.is_watched(s) for s in servers if s.problem is None))

    def is_watched(self, server: Server) -> bool:
        return self.server is not None and (server.address, server.pid) == (self.server.address, self.server.pid)

    def to_capture(self, servers: Sequence[Server]) -> tuple[Server, ...]:
        """The server of the watched job where captures go to that; none where the user named some, or none answers."""
        return tuple(s for s in usable(servers) if not s.asked and self.is_watched(s))

    def _replaced_by(self, server: Server) -> Server | None:
        """The job that answered at a named address before this server, which is not of that job."""
        before = self._named.get(server.address)
        if before is None or before.pid in (None, server.pid) or (server.pid is None and _runs(before.pid or 0)):
            return None
        return before

    def question(self, servers: Sequence[Server], request: CaptureRequest,
                 processes: Sequence[ProcessSample] = ()) -> CaptureQuestion | None:
        """Question which job a request means, where that is not known: the only one on the GPUs is."""
        answering = usable(servers)
        if answering[0].asked:
            replaced = next(((s, before) for s in answering if (before := self._replaced_by(s)) is not None), None)
            return ask_other_job(request, *replaced) if replaced is not None else None
        jobs = jobs_of(servers, processes)
        if self.has_ended(servers):
            return ask_job(request, jobs, self.server)
        if self.server is not None or request.reason or only_job_on_gpus(jobs, processes) is not None:
            return None
        own_jobs = sum(not server.owner for server in jobs)
        return ask_job(request, jobs) if own_jobs > 1 or (own_jobs == 0 and len(jobs) > 1) else None


class ServerWatch:
    """The profiler servers there are, kept up to date by a thread."""

    def __init__(self, source: Source | Player, options: Options, on_change: Callable[[], None]) -> None:
        self.servers: tuple[Server, ...] = ()
        self.servers_known = False
        self.earlier = EarlierCaptures()  # in the logdir when it began
        self.ended_server: Server | None = None  # of a job that has ended, until another one answers
        self.discovery_notes: tuple[str, ...] = ()
        self.unprotected: tuple[int, ...] | None = None  # see FoundServers
        self.attached = list(options.attach)  # addresses the user named
        self.job = WatchedJob()
        self.busy: Collection[str] = ()  # addresses of the capture under way, which must not be probed
        self.sample: NodeSample | None = None  # the newest of the node
        self._source, self._options, self._on_change = source, options, on_change
        self._found_pids: frozenset[int] = frozenset()  # of the servers of the last search
        self._report_servers = False  # the outcome of the next search is reported even if nothing has changed
        self._training: TrainingProcesses | None = None
        self._tried: tuple[str, ...] = ()  # addresses that the user named while another server answered
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
        Raises GputopError (usage) for what cannot be an address."""
        from gputop.profiler.addresses import parse_address
        from gputop.profiler.workers import addresses

        self._quick_searches = 0
        parsed = addresses([address]) or (parse_address(address),)  # an empty text is refused, too
        more = [one for one in parsed if one not in self.attached]
        self.attached += more
        self._tried = tuple(more) if usable(self.servers) else ()
        self._report_servers = True
        self._search_now.set()
        return parsed[0]

    def expect_restart(self, addresses: Sequence[str]) -> None:
        """The job that served at these addresses is started again: they are named no longer, and the next is its."""
        self.attached = [address for address in self.attached if address not in addresses]
        self.job.expect_restart()
        self.servers = tuple(s for s in self.servers if s.address not in addresses)
        self.ended_server = None
        self._on_change()

    def _watch_servers(self) -> None:
        self.earlier = earlier_captures(self._options.logdir)
        while not self._closing.is_set():
            if self.sample is not None or self.attached:
                self.update()
            self._search_now.wait(self._next_search_s())
            self._search_now.clear()

    def _next_search_s(self) -> float:
        """Seconds until the next search: soon while a named server does not answer, which may be about to start."""
        if self.sample is None:
            return _FIRST_SAMPLE_POLL_S
        if all(s.problem is None for s in self.servers if s.asked):
            self._quick_searches = 0
            return DISCOVERY_PERIOD_S
        self._quick_searches += 1
        return _QUICK_PERIOD_S if self._quick_searches <= _QUICK_SEARCHES else DISCOVERY_PERIOD_S

    def update(self) -> None:
        """Look once which profiler servers there are; blocks for as long as they take to answer."""
        try:
            servers, notes, self.unprotected = find_servers(
                tuple(self.attached), self._source.profiler_endpoints(),
                self._options.discover and not self._source.simulated, self.busy)
        except GputopError as error:
            servers, notes = (), (error.in_one_line,)
        except Exception as error:  # noqa: BLE001  thread boundary: the next search may succeed
            servers, notes = (), (f"internal error in gputop's search for profiler servers: {error!r}",)

        servers = tuple(self.job.as_allowed(replace(s, description=command(s.description))) for s in servers)
        self._found_pids = frozenset(s.pid for s in servers if s.pid is not None)
        servers = self._without_failed(servers)
        self.job.follow(servers)
        if usable(servers) and not self.job.has_ended(servers):
            self.ended_server = None
        servers = self._in_order(servers)
        changed = (servers, notes) != (self.servers, self.discovery_notes) or not self.servers_known
        self.servers, self.discovery_notes, self.servers_known = servers, notes, True
        if isinstance(self._source, GpusOrHost):
            self._source.watch_processes(self._jobs_without_gpu())
        if changed or self._report_servers:
            self._report_servers = False
            self._on_change()

    def _without_failed(self, servers: tuple[Server, ...]) -> tuple[Server, ...]:
        """An address that was named while another server answered, and at which none does, is named no longer."""
        tried = [s for s in servers if s.address in self._tried]
        if not tried:
            return servers
        self._tried = ()
        if any(s.problem is None for s in tried):
            return servers
        failed = {s.address for s in tried}
        self.attached = [address for address in self.attached if address not in failed]
        return tuple(replace(s, asked=False) if s.address in failed else s for s in servers)

    @property
    def _processes(self) -> tuple[ProcessSample, ...]:
        return self.sample.processes if self.sample is not None else ()

    def _in_order(self, servers: Sequence[Server]) -> tuple[Server, ...]:
        return in_order(servers, self.job.server, self._processes, next(iter(self.servers), None))

    def question(self, request: CaptureRequest) -> CaptureQuestion | None:
        """See :meth:`WatchedJob.question`."""
        if self.ended_server is not None and not request.reason and not self.servers[0].asked:
            # The job line still shows that one.
            return ask_job(request, jobs_of(self.servers, self._processes), self.ended_server)
        return self.job.question(self.servers, request, self._processes)

    def update_sample(self, sample: NodeSample | None) -> None:
        """This is the newest sample of the node: the job that holds most GPU memory comes first."""
        self.sample = sample
        servers = self.servers if isinstance(self._source, Player) else self._in_order(self.servers)
        if servers != self.servers:
            self.servers = servers
            self._on_change()

    def _jobs_without_gpu(self) -> tuple[int, ...]:
        """The processes that are shown where none holds a GPU: those of servers, and those that could have one."""
        sample = self.sample
        if sample is None or sample.gpus_unwatched or any(g.processes or g.processes_reason for g in sample.gpus):
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
            self.ended_server = next(filter(self._is_shown, ended), self.ended_server)
            self._found_pids -= {s.pid for s in ended if s.pid is not None}
            self.servers = tuple(replace(s, problem="its process has ended") if s in ended else s for s in self.servers
                                 if s.asked or s not in ended)
            self._on_change()
            self._search_now.set()

    def _is_shown(self, server: Server) -> bool:
        """Return whether a job's end is shown: of a job that the user named or chose, else of the one that is shown and
        on the GPUs, or of any where the node has none."""
        if server.asked or self.job.is_watched(server):
            return True
        has_gpus = self.sample is not None and bool(self.sample.gpus)
        return (self.job.server is None and not server.owner and server == self.servers[0]
                and (not has_gpus or bool(gpu_use(server, self._processes).gpus)))

    def choose_job(self, server: Server) -> None:
        """Captures go to this server, one of those that were found, as long as its job runs: the user chose it."""
        self.job.watch(server, self.servers)
        self.job.chosen = True
        self.ended_server = None
        self.servers = self._in_order(self.servers)
        self._on_change()

    def allow(self, server: Server) -> None:
        self.job.allow(server)
        self.ended_server = None
        self.servers = self._in_order([self.job.as_allowed(s) for s in self.servers])
