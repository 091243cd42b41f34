"""What controls captures: the known profiler servers, the capture under way, the auto-capture.

Owns two threads: one looks for profiler servers every 10 s, one runs the capture under way.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from msgspec import Struct, structs

from gputop.core.errors import GputopError, NoDataError
from gputop.profiler.capture.choose_workers import MAX_ALL_WORKERS, MAX_WORKERS, Choice
from gputop.profiler.capture.records import CaptureRecord, CaptureStatus, Server, usable
from gputop.replay.player import Player
from gputop.session.captures import (
    CaptureRequest,
    ManyWorkers,
    MayEndJob,
    ServerOfAnotherJob,
    SeveralJobs,
    analyze,
    analyze_saved,
    capture_and_analyze,
    check_risk,
    choose_servers,
    earlier_runs,
    find_servers,
    job_of,
    left_out,
    servers_label,
    too_many,
)
from gputop.session.idle_wait import ExpectedIdle, IdleWait
from gputop.session.options import FigureOptions, Options
from gputop.session.stack_watch import StackChoice, simulated_stacks
from gputop.sources.base import Source
from gputop.sources.factory import GpusOrHost
from gputop.text.commands import command_of

if TYPE_CHECKING:
    from gputop.core.counters import GpuCounters
    from gputop.core.live_steps import LiveSteps
    from gputop.profiler.discovery import TrainingProcesses
    from gputop.session.auto_capture.controller import AutoCapture
    from gputop.session.worker_figures import AskedFigures

DISCOVERY_PERIOD_S = 10.0
_QUICK_PERIOD_S, _QUICK_SEARCHES = 1.0, 10  # while a named server does not answer
_NO_STACKS_BEFORE = ("stacks are not sampled for the time before a dip, as this would go on all day; --on-dip without "
                     "--dip-before, and c, sample stacks")
_ASKED_FOR_S = 60.0  # for which the figures of other nodes count as live
_WAIT_POLL_S = 1.0  # for whether the awaited idle time is near
_FIRST_SAMPLE_POLL_S = 0.1  # before the first sample there are no processes whose servers could be found


class CaptureReceiver(Protocol):
    """What the control of captures tells. The calls come from its threads."""

    def has_sample(self) -> bool:
        """Whether the node has been sampled yet."""

    def servers_changed(self) -> None:
        """The known servers have changed, or somebody asked for them."""

    def live_steps(self) -> LiveSteps | None:
        """The step period in the last minutes; None where none stands out."""

    def capture_changed(self, status: CaptureStatus) -> None:
        """The capture under way has come further."""

    def counters(self, record: CaptureRecord, servers: Sequence[Server]) -> GpuCounters:
        """What was sampled of the GPUs of an analyzed capture of these servers."""

    def capture_ended(self, record: CaptureRecord, servers: Sequence[Server]) -> None:
        """A capture of these servers is on disk."""

    def capture_opened(self, record: CaptureRecord) -> None:
        """An earlier capture has been analyzed, to be shown."""

    def worker_choice(self, servers: Sequence[Server], asked: AskedFigures | None) -> Choice:
        """The few of these many workers that are worth a capture, by what is sampled here and was ``asked``."""

    def expected_idle(self, servers: Sequence[Server]) -> ExpectedIdle | None:
        """When the GPUs of the job of these servers are idle next; None where that is not known."""

    def capture_waits(self) -> None:
        """There is a capture that waits for an answer, see :meth:`CaptureControl.take_waiting_capture`."""


class CaptureOrder(Struct, frozen=True):
    """How a capture is meant: ``force``, ``reason``, ``notices`` and ``accept_risk`` of
    :meth:`CaptureControl.start_capture`."""

    force: bool = False
    reason: str = ""
    notices: tuple[str, ...] = ()
    accept_risk: bool = False


class WaitingCapture(Struct, frozen=True):
    """A capture that has not begun. With a ``risk`` it waits for whether that is accepted, for ``workers`` and with the
    ``notices`` why these; else for which of many are meant, now that their nodes have told live figures."""

    force: bool
    workers: frozenset[str] | None = None
    notices: tuple[str, ...] = ()
    risk: str = ""


def _runs(pid: int) -> bool:
    """Whether a process of this node has not ended; one that its parent has yet to take notice of has."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] not in b"ZX"
    except OSError:
        return False


class CaptureControl:
    """Knows the profiler servers, and captures from them when asked or when a GPU dips."""

    def __init__(self, source: Source | Player, options: Options, clock: Callable[[], float],
                 receiver: CaptureReceiver) -> None:
        self.options = options
        self.servers: tuple[Server, ...] = ()
        self.servers_known = False
        self.earlier_captures = 0  # in the logdir when it began
        self._found_pids: frozenset[int] = frozenset()  # of the servers of the last search
        self.ended_server: Server | None = None  # of a job that has ended, until another one answers
        self.discovery_notes: tuple[str, ...] = ()
        self.status: CaptureStatus | None = None
        self.attached = list(options.attach)  # addresses the user named
        self.auto_capture: AutoCapture | None = None
        self._source = source
        self._clock = clock
        self._receiver = receiver
        self._stop_capture = threading.Event()
        self._hurry = threading.Event()  # ends the wait for an idle time
        self._hurry_force = False
        self._asked: tuple[float, AskedFigures] | None = None  # when, by the clock; for the next question
        self._waiting: WaitingCapture | None = None
        self._captured: frozenset[str] = frozenset()  # addresses of the capture under way, or of the last one
        self._allowed: set[tuple[str, str]] = set()  # address and user of servers of others, see allow
        self._of_others: set[str] = set()  # addresses of other users' servers that may be captured from
        self._job: Server | None = None  # of the job that is watched, if it was found and not named
        self._job_chosen = False  # by the user, or as the only one when a capture began
        self._beside: frozenset[tuple[str, int | None]] = frozenset()  # address and PID of all servers while it ran
        self._report_servers = False  # the outcome of the next search is reported even if nothing has changed
        self._training: TrainingProcesses | None = None
        self._quick_searches = 0
        self._closing = threading.Event()
        self._search_now = threading.Event()
        if options.auto_capture is not None and not isinstance(source, Player):
            from gputop.session.auto_capture.controller import AutoCapture

            self.auto_capture = AutoCapture(self, options.auto_capture, clock)

    def start(self) -> None:
        """Start to look for servers, and for dips. A recording has neither: its processes run no longer."""
        if isinstance(self._source, Player):
            return
        threading.Thread(target=self._watch_servers, name="gputop-discovery", daemon=True).start()
        if self.auto_capture is not None:
            self.auto_capture.start()

    def close(self) -> None:
        """End the threads and the capture under way; returns at once."""
        self._closing.set()
        self._search_now.set()
        self._stop_capture.set()
        self._hurry.set()
        if self.auto_capture is not None:
            self.auto_capture.close()

    # -- profiler servers ---------------------------------------------------------------------

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
        self.earlier_captures = earlier_runs(self.options.logdir)
        while not self._closing.is_set():
            if self._receiver.has_sample() or self.attached:
                self.update_servers()
            self._search_now.wait(self._next_search_s())
            self._search_now.clear()

    def _next_search_s(self) -> float:
        """Seconds until the next search: soon while a named server does not answer, which may be about to start."""
        if not self._receiver.has_sample():
            return _FIRST_SAMPLE_POLL_S
        if all(s.problem is None for s in self.servers if s.asked):
            self._quick_searches = 0
            return DISCOVERY_PERIOD_S
        self._quick_searches += 1
        return _QUICK_PERIOD_S if self._quick_searches <= _QUICK_SEARCHES else DISCOVERY_PERIOD_S

    def update_servers(self) -> None:
        """Look once which profiler servers there are; blocks for as long as they take to answer."""
        busy = self._captured if self.status is not None and self.status.running else ()
        try:
            servers, notes = find_servers(tuple(self.attached), self._source.profiler_endpoints(),
                                          self.options.discover and not self._source.simulated, busy)
        except GputopError as error:
            servers, notes = (), (error.in_one_line,)
        except Exception as error:  # noqa: BLE001  thread boundary: the next search may succeed
            servers, notes = (), (f"the search for profiler servers failed, a bug in gputop: {error!r}",)
        from gputop.text.redaction import command

        servers = tuple(self._as_allowed(replace(s, description=command(s.description))) for s in servers)
        self._found_pids = frozenset(s.pid for s in servers if s.pid is not None)
        if self._next_job(servers) is None and usable(servers):
            self.ended_server = None
        servers = self._watched_first(servers)
        changed = (servers, notes) != (self.servers, self.discovery_notes) or not self.servers_known
        self.servers, self.discovery_notes, self.servers_known = servers, notes, True
        if isinstance(self._source, GpusOrHost):
            self._source.watch_processes(self._jobs_without_gpu(self._source))
        if changed or self._report_servers:
            self._report_servers = False
            self._receiver.servers_changed()

    def _jobs_without_gpu(self, source: GpusOrHost) -> tuple[int, ...]:
        """The processes of a node without GPUs that are shown: those of servers, and those that could have one."""
        if source.error is None:
            return ()
        if self._training is None:
            from gputop.profiler.discovery import TrainingProcesses

            self._training = TrainingProcesses()
        served = {server.pid for server in self.servers if server.pid is not None}
        return tuple(sorted(served | set(self._training.find() if self.options.discover else ())))

    def drop_ended(self) -> None:
        """Take away the servers of jobs of this node that have ended since the last search, and search again. One that
        the user named stays, as one that does not answer."""
        ended = [s for s in self.servers if s.pid in self._found_pids and not _runs(s.pid or 0)]
        if ended:
            self.ended_server = ended[0]
            self._found_pids -= {s.pid for s in ended if s.pid is not None}
            self.servers = tuple(replace(s, problem="its process has ended") if s in ended else s for s in self.servers
                                 if s.asked or s not in ended)
            self._receiver.servers_changed()
            self._search_now.set()

    def _next_job(self, servers: Sequence[Server]) -> Server | None:
        """The server of another job that would be captured because the watched one has ended; None: there is none.

        A server that came after that end, with the same command, is of the same job, started again.
        """
        own = [s for s in servers if s.problem is None and not s.owner and not s.asked]
        if any(s.asked for s in servers) or not own:
            return None
        by_key = {(s.address, s.pid): s for s in servers}
        job, first = self._job, own[0]
        if job is not None and (job.address, job.pid) in by_key:
            first = by_key[job.address, job.pid]  # more is known of it by now, perhaps
        elif job is not None and ((first.address, first.pid) in self._beside
                                  or command_of(first.description) != command_of(job.description)):
            return first
        self._job, self._beside = first, frozenset(by_key)
        return None

    def _watched_first(self, servers: Sequence[Server]) -> tuple[Server, ...]:
        """Named servers, then that of the watched job, which is the one to capture from and to show."""
        key = (self._job.address, self._job.pid) if self._job is not None else None
        return tuple(sorted(servers, key=lambda s: (not s.asked, (s.address, s.pid) != key)))

    def _jobs(self) -> list[Server]:
        """A server of each job that was found and may be captured from; workers of one command are one job."""
        of_command: dict[str, Server] = {}
        for server in self.servers:
            if server.problem is None and not server.owner and not server.asked:
                of_command.setdefault(command_of(server.description), server)
        return list(of_command.values())

    def watch_job(self, server: Server) -> None:
        """Captures go to this server, one of those that were found, as long as its job runs."""
        self._job, self._job_chosen, self.ended_server = server, True, None
        self._beside = frozenset((s.address, s.pid) for s in self.servers)
        self.servers = self._watched_first(self.servers)
        self._receiver.servers_changed()

    def allow(self, server: Server) -> None:
        """Let captures go to a server of another user, or of another job than the one that ended, until gputop ends."""
        self._allowed.add((server.address, server.owner))
        if server.owner:
            self._of_others.add(server.address)
        else:
            self._job, self._job_chosen, self.ended_server = server, True, None
        self.servers = self._watched_first([self._as_allowed(s) for s in self.servers])

    def _as_allowed(self, server: Server) -> Server:
        return replace(server, owner="") if (server.address, server.owner) in self._allowed else server

    # -- captures -----------------------------------------------------------------------------

    def start_capture(self, *, force: bool = False, reason: str = "",
                      workers: Collection[str] | None = None, notices: tuple[str, ...] = (),
                      ask: Literal["", "ssh"] = "", accept_risk: bool = False) -> None:
        """Start a capture in the background, of all servers where several were asked for.

        ``force``: as long as asked, whatever it costs the job. ``reason``: why the auto-capture wants it.
        ``workers``: the addresses of those of many that are meant, ``notices`` why. The auto-capture takes those
        proposed. ``ask``: how the nodes of many are asked for live figures first, where the options do not say so
        already. ``accept_risk``: even if it is known that it may end the job. Where the job's GPUs are idle at regular
        intervals, a capture of a user waits for the next time unless it is forced. What becomes known only after this,
        figures or a risk, :meth:`take_waiting_capture` tells: then this is to be called again.
        Raises GputopError where none can start; ServerOfAnotherUser or ServerOfAnotherJob where somebody has to be
        asked first, see :meth:`allow`; SeveralJobs where somebody has to choose, see :meth:`watch_job`; ManyWorkers
        where somebody has to say which of them.
        """
        if isinstance(self._source, Player):
            raise GputopError("this is a recording: there is no job to capture from", "Run gputop on the node itself.")
        if self.status is not None and self.status.running:
            raise GputopError("a capture is running", "Press x to stop it and keep its data.")
        if not self.servers and not self.servers_known:
            raise GputopError("gputop is still looking for profiler servers", "Press c again in a moment.")
        chosen = choose_servers(self.servers)
        job = self._job
        if (other := self._next_job(self.servers)) is not None and job is not None:
            raise ServerOfAnotherJob(other, job)
        if not self._job_chosen and not reason and not chosen[0].asked and len(jobs := self._jobs()) > 1:
            raise SeveralJobs(jobs)
        self._job_chosen |= not reason
        answering = [s for s in chosen if s.problem is None]
        if workers is None and len(answering) > MAX_WORKERS:
            from gputop.session.worker_figures import elsewhere

            # Those that record all the time: what they have of the time before the dip is wanted.
            choice = self.auto_capture.recorded if reason and self.auto_capture is not None else None
            if choice is None:
                how = structs.replace(self.options.worker_figures, way=ask or self.options.worker_figures.way)
                asked = self._take_asked()
                if asked is None and how.way != "none" and any(map(elsewhere, answering)):
                    self._begin_asking(how, answering, chosen, CaptureOrder(force, reason))
                    return
                choice = self._receiver.worker_choice(answering, asked)
            if not reason:
                raise ManyWorkers(choice)
            workers, notices = choice.chosen, choice.notices
        if workers is not None and len(workers) > MAX_ALL_WORKERS:
            raise too_many(len(workers))
        if workers is not None:
            chosen = tuple(s for s in chosen if s.address in workers)
        if all(s.problem is not None for s in chosen):
            raise NoDataError("none of the chosen workers answers now",
                              "Press c again: gputop then proposes others.")
        self._begin_capture(chosen, CaptureOrder(force, reason, notices, accept_risk))

    def choose_workers(self, servers: Sequence[Server]) -> Choice:
        """The few of many workers that are worth a capture, by what is sampled here."""
        return self._receiver.worker_choice(servers, None)

    def _take_asked(self) -> AskedFigures | None:
        """What was asked for this capture, once."""
        asked, self._asked = self._asked, None
        return asked[1] if asked is not None and self._clock() - asked[0] <= _ASKED_FOR_S else None

    def take_waiting_capture(self) -> WaitingCapture | None:
        """A capture that waits for an answer, once."""
        waiting, self._waiting = self._waiting, None
        return waiting

    def _end_unbegun(self, waiting: WaitingCapture | None = None) -> None:
        """The capture has not begun: it waits for an answer, or was canceled."""
        self._waiting, self.status = waiting, None
        self._receiver.capture_waits()

    def _begin_asking(self, how: FigureOptions, answering: Sequence[Server], chosen: Sequence[Server],
                      request: CaptureOrder) -> None:
        self._stop_capture.clear()
        asked = "Prometheus" if how.way == "prometheus" else "the nodes"
        self.set_status(CaptureStatus("asking", f"{asked} for live figures", self.options.capture_s))
        threading.Thread(target=self._ask, args=(how, answering, chosen, request), name="gputop-ask",
                         daemon=True).start()

    def _ask(self, how: FigureOptions, answering: Sequence[Server], chosen: Sequence[Server],
             request: CaptureOrder) -> None:
        from gputop.session.node_figures import ask

        def progress(done: int, nodes: int) -> None:
            which = "1 node" if nodes == 1 else f"{nodes} nodes"
            self.set_status(CaptureStatus("asking", f"{which} for live figures, {done} answered",
                                          self.options.capture_s))

        try:
            asked = ask(answering, how, self._stop_capture, progress)
            if self._closing.is_set():
                return
            if not request.reason:
                self._asked = (self._clock(), asked)
                self._end_unbegun(WaitingCapture(request.force))
            elif self._stop_capture.is_set():
                self.set_status(CaptureStatus("failed", servers_label(answering), self.options.capture_s,
                                              message="stopped before it began"))
            else:
                choice = self._receiver.worker_choice(answering, asked)
                self._begin_capture([s for s in chosen if s.address in choice.chosen],
                                    structs.replace(request, notices=choice.notices))
        except Exception as error:  # noqa: BLE001  thread boundary: the next capture must be possible
            self._fail(servers_label(answering), self.options.capture_s, error)

    def open_saved(self, record: CaptureRecord) -> None:
        """Analyze an earlier capture in the background, then show it. Raises GputopError during a capture."""
        if self.status is not None and self.status.running:
            raise GputopError("a capture is running", "Press x to stop it and keep its data.")
        name = record.path.parent.name if record.path.suffix else record.path.name
        self.set_status(CaptureStatus("analyzing", name, 0.0))
        threading.Thread(target=self._open_saved, args=(record, name), name="gputop-open", daemon=True).start()

    def _open_saved(self, record: CaptureRecord, name: str) -> None:
        try:
            opened = analyze_saved(record, self._closing)
        except Exception as error:  # noqa: BLE001  thread boundary: the next one must be possible
            self._fail(name, 0.0, error, "the trace is kept")
            return
        self._receiver.capture_opened(opened)
        if opened.problem is None:
            self.set_status(CaptureStatus("done", name, 0.0, message=str(record.path)))
        else:
            self.set_status(CaptureStatus("failed", name, 0.0, message=opened.problem.message, fix=opened.problem.fix))

    def start_server(self, pid: int, *, force: bool = False) -> None:
        """Start a profiler server in a process of this node that has none, then a capture of it, in the background."""
        self._stop_capture.clear()
        self.set_status(CaptureStatus("starting", f"process {pid}", self.options.capture_s))
        threading.Thread(target=self._start_server, args=(pid, force), name="gputop-start-server", daemon=True).start()

    def _start_server(self, pid: int, force: bool) -> None:
        from gputop.launch.attach import start_server
        from gputop.launch.target import examine

        name, asked_s = f"process {pid}", self.options.capture_s
        try:
            started = start_server(examine(pid))
            assert started.address is not None
            self.update_servers()
            server = next((s for s in self.servers if started.address == s.address or s.pid == pid), None)
            if self._stop_capture.is_set():
                self.set_status(CaptureStatus("failed", name, asked_s, message=f"stopped; {started.line}"))
            else:
                self._begin_capture((server or Server(started.address, pid=pid),), CaptureOrder(force))
        except Exception as error:  # noqa: BLE001  thread boundary: the next attempt must be possible
            self._fail(name, asked_s, error)

    def _begin_capture(self, servers: Sequence[Server], request: CaptureOrder) -> None:
        answering = [s for s in servers if s.problem is None]
        self._captured = frozenset(s.address for s in answering)
        self._stop_capture.clear()
        self._hurry.clear()
        self._hurry_force = False
        expected = None if request.reason or request.force else self._receiver.expected_idle(answering)
        wait = IdleWait(expected, self.options.capture_s, self._clock()) if expected is not None else None
        self._tell_wait(wait, servers) if wait is not None else self.set_status(
            CaptureStatus("connecting", servers_label(answering), self.options.capture_s))
        threading.Thread(target=self._run_capture, name="gputop-capture", daemon=True,
                         args=(servers, servers_label(answering), request, wait)).start()

    def stop_capture(self) -> bool:
        """End the capture under way early, its data kept. False if there is none."""
        if self.status is None or not self.status.running:
            return False
        self._stop_capture.set()
        self._hurry.set()
        return True

    def capture_now(self, force: bool = False) -> bool:
        """End the wait for an idle time: the capture begins at once. False where none waits for that."""
        if self.status is None or self.status.phase != "waiting":
            return False
        self._hurry_force = force
        self._hurry.set()
        return True

    def set_status(self, status: CaptureStatus) -> None:
        self.status = replace(status, time_s=self._clock())
        self._receiver.capture_changed(self.status)

    def _fail(self, name: str, asked_s: float, error: Exception, goes_on: str = "the job itself goes on") -> None:
        """The capture ``name`` ended by this error, which is a bug unless it is a GputopError."""
        if isinstance(error, GputopError):
            message, fix = error.message, error.fix
        else:
            message, fix = f"a bug in gputop: {error!r}", f"Please report this; {goes_on}."
        self.set_status(CaptureStatus("failed", name, asked_s, message=message, fix=fix))

    def _run_capture(self, servers: Sequence[Server], name: str, request: CaptureOrder,
                     wait: IdleWait | None) -> None:
        asked_s = self.options.capture_s
        try:
            if wait is not None:
                if not request.accept_risk:
                    check_risk(servers)  # nobody is asked only after the wait
                if not self._wait_for_idle(wait, servers):
                    self._end_unbegun()
                    return
                request = structs.replace(request, force=self._hurry_force,
                                          notices=(*request.notices, *filter(None, (wait.missed,))))
            record = self._capture(servers, asked_s, request)
        except MayEndJob as error:
            if request.reason:
                self._fail(name, asked_s, error)
            else:
                self._end_unbegun(WaitingCapture(request.force, self._captured, request.notices, error.risk))
            return
        except Exception as error:  # noqa: BLE001  thread boundary: the next capture must be possible
            self._fail(name, asked_s, error)
            return
        record = replace(record, notices=(*request.notices, *record.notices, *left_out(self.servers, servers)))
        self._receiver.capture_ended(record, servers)
        if record.problem is None:
            self.set_status(CaptureStatus("done", name, asked_s, record.took_s, str(record.path)))
        else:
            self.set_status(CaptureStatus("failed", name, asked_s, record.took_s,
                                          f"{record.problem.message} (the trace is kept: {record.path})",
                                          record.problem.fix))

    def _wait_for_idle(self, wait: IdleWait, servers: Sequence[Server]) -> bool:
        """Block until it is time for the capture, somebody wants it now, or the job has ended; False: until it was
        canceled."""
        from gputop.profiler.xprof.probe import load_grpc

        load_grpc()  # a second that is not in the way later
        while not wait.over(self._clock(), self._receiver.expected_idle(servers)) and self.ended_server not in servers:
            self._tell_wait(wait, servers)
            if self._hurry.wait(min(_WAIT_POLL_S, max(0.0, wait.start_s - self._clock()))):
                break
        return not self._stop_capture.is_set()

    def _tell_wait(self, wait: IdleWait, servers: Sequence[Server]) -> None:
        self.set_status(CaptureStatus("waiting", servers_label(servers), self.options.capture_s,
                                      message=wait.text(self._clock())))

    def _capture(self, servers: Sequence[Server], asked_s: float, request: CaptureOrder) -> CaptureRecord:
        """Capture and analyze; raises GputopError where there is no trace."""
        auto, logdir, reason = self.auto_capture, self.options.logdir, request.reason
        live = self._receiver.live_steps()
        agreed = [s.pid for s in servers if s.pid is not None and s.address in self._of_others]
        if auto is not None and reason and (preceding := auto.fetch_preceding(servers, self.set_status)) is not None:
            return auto.finish(analyze(replace(preceding, job=job_of(servers)), self._closing, servers=servers,
                                       counters=self._receiver.counters, live_steps=live,
                                       stacks={server.address: _NO_STACKS_BEFORE for server in servers}), reason)
        with auto.paused() if auto is not None else contextlib.nullcontext():
            wanted = CaptureRequest(asked_s, auto.logdir if auto is not None and reason else logdir, request.force,
                                    StackChoice(self.options.stacks, agreed, simulated_stacks(self._source)),
                                    request.accept_risk)
            record = capture_and_analyze(servers, wanted, self._stop_capture, self._closing, self.set_status,
                                         self._receiver.counters, live)
        return auto.finish(record, reason) if auto is not None and reason else record
