"""Control of captures: the capture under way, the auto-capture, and the questions before either.

Owns a thread that runs the capture under way; the profiler servers are watched by a
:class:`~gputop.session.capture.server_watch.ServerWatch`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from gputop.advice.registry import limit
from gputop.core.errors import GputopError, NoDataError
from gputop.core.proc import stat_of
from gputop.profiler.capture.choose_workers import MAX_ALL_WORKERS, MAX_WORKERS
from gputop.profiler.capture.records import CaptureRecord, CaptureStatus, Server
from gputop.profiler.capture.request import CaptureQuestion, CaptureRequest, ask_hold, ask_workers, require_no_question
from gputop.replay.player import Player
from gputop.session.capture import captures
from gputop.session.capture.server_watch import ServerWatch
from gputop.session.options import Options
from gputop.session.stack_watch import StackChoice, simulated_stacks
from gputop.session.watched_node import IdleWait, WatchedNode
from gputop.sources.base import Source

if TYPE_CHECKING:
    from gputop.session.auto_capture import AutoCapture

_WAIT_POLL_S = 1.0  # for whether the awaited idle time is near


class CaptureReceiver(Protocol):
    """Receiver of what the control of captures reports. The calls come from its threads."""

    def servers_changed(self) -> None:
        """The known servers have changed, or somebody asked for them."""

    def capture_changed(self, status: CaptureStatus) -> None:
        """The capture under way has come further."""

    def capture_ended(self, record: CaptureRecord, servers: Sequence[Server]) -> None:
        """A capture of these servers is on disk."""

    def capture_opened(self, record: CaptureRecord) -> None:
        """An earlier capture has been analyzed, to be shown."""

    def capture_waits(self) -> None:
        """A capture has not begun: it was canceled, or waits for an answer (:meth:`CaptureControl.take_question`)."""


class CaptureControl:
    """Captures from the profiler servers when asked or when a GPU dips."""

    def __init__(self, source: Source | Player, options: Options, clock: Callable[[], float],
                 receiver: CaptureReceiver) -> None:
        self.options = options
        self.watch = ServerWatch(source, options, receiver.servers_changed)
        self.status: CaptureStatus | None = None
        self.auto_capture: AutoCapture | None = None
        self._node = WatchedNode()
        self._source = source
        self._clock = clock
        self._receiver = receiver
        self._question: CaptureQuestion | None = None
        self._stop_capture = threading.Event()
        self._hurry = threading.Event()  # ends the wait for an idle time
        self._hurry_force = False
        self._captured: frozenset[str] = frozenset()  # addresses of the capture under way, or of the last one
        self._closing = threading.Event()
        # What the last capture found of the job's own torch.profiler: PID and start of the process, share of its steps
        # that are recorded, and when; () is nothing, None: no capture was tried.
        self._profiled: tuple[int, int, float, float] | tuple[()] | None = None
        if options.auto_capture is not None and not isinstance(source, Player):
            from gputop.session.auto_capture import AutoCapture

            self.auto_capture = AutoCapture(self, options.auto_capture)

    def start(self) -> None:
        """Start to look for servers. A recording has none: its processes run no longer."""
        if not isinstance(self._source, Player):
            self.watch.start()

    def close(self) -> None:
        """End the threads and the capture under way; returns at once."""
        self._closing.set()
        self.watch.close()
        self._stop_capture.set()
        self._hurry.set()

    @property
    def running(self) -> bool:
        return self.status is not None and self.status.running

    def profiled(self) -> Mapping[int, float] | None:
        """The share of its steps that a job's own torch.profiler records, by PID, as the last capture found while the
        job still runs; None: no capture was tried."""
        if not self._profiled:
            return None if self._profiled is None else {}
        pid, start, share, time_s = self._profiled
        stat = stat_of(pid)
        lasts = stat is not None and stat.start == start and self._clock() - time_s <= limit("merge.fresh_s")
        return {pid: share} if lasts else {}

    def update_node(self, node: WatchedNode) -> None:
        """This is known of the node now."""
        self._node = node
        self.watch.update_sample(node.sample)

    # -- captures -----------------------------------------------------------------------------

    def request(self, *, force: bool = False) -> CaptureRequest:
        """A capture as the options have it."""
        return CaptureRequest(self.options.capture_s, self.options.logdir, force)

    def start_capture(self, request: CaptureRequest) -> CaptureQuestion | None:
        """Start a capture in the background, of all servers where several were asked for; or return what somebody has
        to answer first. The request that the answer makes is to be started then.

        A request with a ``reason`` has nobody to ask: it takes the workers proposed. Where the job's GPUs are idle at
        regular intervals, a capture of a user waits for the next time unless it is forced. A risk that becomes
        known only after this, :meth:`take_question` tells.
        Raises GputopError where none can start, also for a question that nobody can answer.
        """
        if isinstance(self._source, Player):
            raise GputopError("this is a recording, so there is no job to capture", "Run gputop on the node.")
        if self.running:
            raise GputopError("a capture is already running", "Press x to stop the capture and keep its data.")
        if request.process is not None:
            self.start_server(request.process, request)
            return None
        watch = self.watch
        if not watch.servers and not watch.servers_known:
            raise GputopError("gputop is still looking for profiler servers", "Press c again in a moment.")
        if request.job is not None:
            watch.choose_job(request.job)
        if request.allowed is not None:
            watch.allow(request.allowed)
        request = replace(request, job=None, allowed=None)
        chosen = watch.job.to_capture(watch.servers) or captures.choose_servers(watch.servers)
        question = watch.question(request) or captures.server_question(chosen, request)
        if question is not None:
            if request.reason:
                raise question.refusal()
            if question.kind == "other user":
                watch.job.server = None  # the answer chooses it
            return question
        if not (request.reason or chosen[0].asked or watch.job.server is not None):
            watch.job.watch(chosen[0], watch.servers)
        return self._start_workers(chosen, request)

    def _start_workers(self, chosen: tuple[Server, ...], request: CaptureRequest) -> CaptureQuestion | None:
        """Start a capture of those that the request names; of many, ask first which."""
        answering = [s for s in chosen if s.problem is None]
        if request.workers is None and len(answering) > MAX_WORKERS:
            choice = self._node.worker_choice(answering)
            if not request.reason:
                return ask_workers(request, chosen, choice)
            request = replace(request, workers=frozenset(choice.chosen), notices=(choice.text(),))
        if request.workers is not None:
            if len(request.workers) > MAX_ALL_WORKERS:
                raise captures.too_many(len(request.workers))
            chosen = tuple(s for s in chosen if s.address in request.workers)
        if all(s.problem is not None for s in chosen):
            raise NoDataError("none of the chosen workers is responding",
                              "Press c again, and gputop proposes other workers.")
        self._begin_capture(chosen, request)
        return None

    def take_question(self) -> CaptureQuestion | None:
        """Return, once, the question that a capture waits for."""
        question, self._question = self._question, None
        return question

    def _end_unbegun(self, question: CaptureQuestion | None = None) -> None:
        """The capture has not begun: it waits for an answer, or was canceled."""
        self._question = question
        self._set_status(None)
        self._receiver.capture_waits()

    def open_saved(self, record: CaptureRecord) -> None:
        """Analyze an earlier capture in the background, then show it. Raises GputopError during a capture."""
        if self.running:
            raise GputopError("a capture is already running", "Press x to stop the capture and keep its data.")
        name = record.path.parent.name if record.path.suffix else record.path.name
        self.set_status(CaptureStatus("analyzing", name, 0.0))
        threading.Thread(target=self._open_saved, args=(record, name), name="gputop-open", daemon=True).start()

    def _open_saved(self, record: CaptureRecord, name: str) -> None:
        try:
            opened = captures.analyze_saved(record, self._closing)
        except Exception as error:  # noqa: BLE001  thread boundary: the next one must be possible
            self._fail(name, 0.0, error, "; the trace is kept")
            return
        self._receiver.capture_opened(opened)
        if opened.problem is None:
            self.set_status(CaptureStatus("done", name, 0.0, message=str(record.path)))
        else:
            self.set_status(CaptureStatus("failed", name, 0.0, message=opened.problem.message, fix=opened.problem.fix))

    def start_server(self, pid: int, request: CaptureRequest) -> None:
        """Start a profiler server in a process of this node that has none, or have its PyTorch listen, then a capture
        of it, in the background."""
        self._stop_capture.clear()
        self.set_status(CaptureStatus("starting", f"process {pid}", request.seconds))
        threading.Thread(target=self._start_server, args=(pid, request), name="gputop-start-server",
                         daemon=True).start()

    def _start_server(self, pid: int, request: CaptureRequest) -> None:
        from gputop.launch.serve import make_ready
        from gputop.profiler.kineto.guard import UsedBefore

        name = f"process {pid}"
        try:
            ready = make_ready(pid, self._stop_capture, hold=request.hold, started=request.process_started)
            self.watch.update()
            server = next((s for s in self.watch.servers if ready.address == s.address or s.pid == pid), None)
            if server is not None and not server.asked:
                self.watch.choose_job(server)
            if self._stop_capture.is_set():
                self.set_status(CaptureStatus("failed", name, request.seconds, message=f"stopped; {ready.line}"))
            else:
                self._begin_capture((server or Server(ready.address, pid=pid),), request)
        except UsedBefore as error:
            self._end_unbegun(ask_hold(request, pid, error))
        except Exception as error:  # noqa: BLE001  thread boundary: the next attempt must be possible
            self._fail(name, request.seconds, error)

    def _begin_capture(self, servers: Sequence[Server], request: CaptureRequest) -> None:
        answering = [s for s in servers if s.problem is None]
        self._captured = frozenset(s.address for s in answering)
        self._stop_capture.clear()
        self._hurry.clear()
        self._hurry_force = False
        expected = None if request.reason or request.force else self._node.expected_idle(answering)
        wait = IdleWait(expected, request.seconds, self._clock()) if expected is not None else None
        self._tell_wait(wait, servers) if wait is not None else self.set_status(
            CaptureStatus("connecting", captures.servers_label(answering), request.seconds))
        threading.Thread(target=self._run_capture, name="gputop-capture", daemon=True,
                         args=(servers, request, wait)).start()

    def stop_capture(self) -> bool:
        """End the capture under way early, its data kept. False if there is none."""
        if not self.running:
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
        status = replace(status, time_s=self._clock())
        self._set_status(status)
        self._receiver.capture_changed(status)

    def _set_status(self, status: CaptureStatus | None) -> None:
        self.status = status
        self.watch.busy = self._captured if status is not None and status.running else ()

    def _fail(self, name: str, asked_s: float, error: Exception, kept: str = "") -> None:
        """The capture ``name`` ended by this error, which is a bug unless it is a GputopError."""
        if isinstance(error, GputopError):
            message, fix = error.message, error.fix
            refusal = captures.profiles_itself(error)
            if refusal is not None and (stat := stat_of(refusal.pid)) is not None:
                self._profiled = refusal.pid, stat.start, refusal.share, self._clock()
        else:
            message, fix = f"internal error in gputop: {error!r}", f"Please report this{kept}."
        self.set_status(CaptureStatus("failed", name, asked_s, message=message, fix=fix))

    def _run_capture(self, servers: Sequence[Server], request: CaptureRequest, wait: IdleWait | None) -> None:
        name, asked_s = captures.servers_label([s for s in servers if s.problem is None]), request.seconds
        try:
            # Before a wait: nobody is asked only after it.
            if not request.reason and (question := captures.risk_question(servers, request)) is not None:
                self._end_unbegun(question)
                return
            if wait is not None:
                if not self._wait_for_idle(wait, servers):
                    self._end_unbegun()
                    return
                request = replace(request, force=self._hurry_force,
                                          notices=(*request.notices, *filter(None, (wait.missed,))))
            record = self._capture(servers, request)
        except Exception as error:  # noqa: BLE001  thread boundary: the next capture must be possible
            self._fail(name, asked_s, error)
            return
        self._profiled = ()
        record = replace(record, notices=(*request.notices, *record.notices),
                         uncaptured=captures.left_out(self.watch.servers, servers, job_chosen=self.watch.job.chosen))
        self._receiver.capture_ended(record, servers)
        if record.problem is None:
            self.set_status(CaptureStatus("done", name, asked_s, record.took_s, str(record.path)))
        else:
            self.set_status(CaptureStatus("failed", name, asked_s, record.took_s,
                                          f"{record.problem.message} (the trace is kept: {record.path})",
                                          record.problem.fix))

    def _wait_for_idle(self, wait: IdleWait, servers: Sequence[Server]) -> bool:
        """Block until it is time, somebody wants it now, or the job has ended; False: until it was canceled."""
        from gputop.profiler.ways import prepare

        prepare()  # a second that is not in the way later
        while not wait.over(self._clock(), self._node.expected_idle(servers)):
            if self.watch.ended_server in servers:
                break
            self._tell_wait(wait, servers)
            if self._hurry.wait(min(_WAIT_POLL_S, max(0.0, wait.start_s - self._clock()))):
                break
        return not self._stop_capture.is_set()

    def _tell_wait(self, wait: IdleWait, servers: Sequence[Server]) -> None:
        self.set_status(CaptureStatus("waiting", captures.servers_label(servers), self.options.capture_s,
                                      message=wait.text(self._clock())))

    def _capture(self, servers: Sequence[Server], request: CaptureRequest) -> CaptureRecord:
        """Capture and analyze; raises GputopError where there is no trace."""
        auto = self.auto_capture if request.reason else None
        agreed = [s.pid for s in servers if s.pid is not None and s.address in self.watch.job.agreed]
        run = captures.CaptureRun(self._stop_capture, self._closing, self.set_status,
                                  StackChoice(self.options.stacks, agreed, simulated_stacks(self._source)),
                                  lambda record, of: self._node.counters(record, of), self._node.live_steps(servers),
                                  attached=() if request.process is None else (request.process,))
        if request.reason:
            from gputop.ranks.stacks import is_ending

            require_no_question(captures.risk_question(servers, request))
            for pid in (s.pid for s in servers if s.pid is not None):
                if is_ending(pid):  # that is why its GPU is idle
                    raise GputopError(f"process {pid} is exiting", "Nothing was recorded.")
        record = captures.capture_and_analyze(servers, request, run)
        return auto.finish(record, request.reason) if auto is not None else record
