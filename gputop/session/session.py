"""Session of what is watched now: a facade over the samples, the captures and the findings.

A :class:`Session` owns every thread that touches hardware, sockets or files, by its parts: a
:class:`~gputop.session.sample_feed.SampleFeed` brings samples, a
:class:`~gputop.session.capture.capture_control.CaptureControl` finds servers and captures, a
:class:`~gputop.session.finding_store.FindingStore` keeps what was found out. Views read the attributes of these parts,
which are replaced and never changed in place, and ask the session for actions. After each change it calls the
listeners, from the thread on which the change was made.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from signal import Signals
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from gputop.core.errors import GputopError
from gputop.core.proc import user_name
from gputop.core.samples import ENDED, ZOMBIE, NodeSample, ProcessSample
from gputop.profiler.capture.records import CaptureRecord, CaptureStatus, Server, usable
from gputop.profiler.capture.request import CaptureQuestion, CaptureRequest
from gputop.replay.player import Player
from gputop.session.capture.capture_control import CaptureControl
from gputop.session.capture.which_job import gpu_use, is_of_earlier_job, unserved_on_gpus
from gputop.session.finding_store import FindingStore
from gputop.session.options import Options
from gputop.session.rank_watch import RankWatch
from gputop.session.sample_feed import Arrival, SampleFeed
from gputop.session.watched_node import WatchedNode
from gputop.sources.base import Source
from gputop.telemetry.sampler import Sampler

if TYPE_CHECKING:
    from gputop.ranks.stacks import ProcessStacks
    from gputop.replay.snapshot_document import Snapshot
    from gputop.session.simulated_ranks import SimulatedRanks

Change = Literal["sample", "servers", "capture", "failed"]


def _simulated_ranks(source: Source | Player) -> SimulatedRanks | None:
    """Ranks of a simulated node that runs a job that hangs."""
    if isinstance(source, Player) or not source.simulated:
        return None
    from gputop.sources.simulated import SimulatedSource

    if not isinstance(source, SimulatedSource) or not source.may_hang:
        return None
    from gputop.session.simulated_ranks import SimulatedRanks

    return SimulatedRanks(source)


class Session:
    """Everything that is known about the node, kept up to date by background threads."""

    def __init__(self, source: Source | Player, options: Options | None = None,
                 clock: Callable[[], float] = time.time, replayed_snapshot: Snapshot | None = None,
                 sampler: Sampler | None = None) -> None:
        """``replayed_snapshot``: a snapshot to show; its findings and its capture take the place of own ones.
        ``sampler``: one of this source that runs already and waits to be connected."""
        options = options or Options()
        self.replayed_snapshot = replayed_snapshot
        self.failure: GputopError | None = None
        self.ring: Callable[[str], None] | None = None  # how the terminal is reached, where there is a screen
        # The parts: samples, captures, profiler servers and their jobs, findings and finished captures.
        self.feed = SampleFeed(source, options.interval_s, clock, sampler, self,
                               estimate_step_period=replayed_snapshot is None)
        self.control = CaptureControl(source, options, self.feed.clock, self)
        self.watch = self.control.watch
        self.results = FindingStore(self.feed.clock, replayed_snapshot)
        # Of a job of this node and of now.
        self._simulated_ranks = simulated = _simulated_ranks(source)
        self.rank_watch = RankWatch(simulated.ask, simulated.hosts, simulated.earlier) if simulated is not None else (
            None if isinstance(source, Player) or source.simulated else RankWatch())
        if replayed_snapshot is not None:
            self.watch.servers, self.watch.servers_known = replayed_snapshot.servers, True
        self.started_s = self.feed.clock()
        self._job_restarted_s: float | None = None  # the simulated one, by the user
        self._listeners: list[Callable[[Change], None]] = []
        self._started = False
        self._closing = threading.Event()

    # -- life ---------------------------------------------------------------------------------

    def listen(self, listener: Callable[[Change], None]) -> None:
        """Call ``listener`` after each change, from the thread that made it."""
        self._listeners.append(listener)

    def start(self) -> None:
        """Start the threads; once is enough."""
        if self._started:
            return
        self._started = True
        self.feed.start()
        self.control.start()

    def close(self) -> None:
        """Stop everything; returns within half a second, whatever a driver or a server is doing."""
        self._closing.set()
        self.control.close()
        if self.rank_watch is not None:
            self.rank_watch.close()
        self.feed.stop()

    def _notify(self, change: Change) -> None:
        if not self._closing.is_set():
            for listener in self._listeners:
                try:
                    listener(change)
                except Exception as error:  # noqa: BLE001  reported as where it ends a thread; this one samples on
                    threading.excepthook(threading.ExceptHookArgs(
                        (type(error), error, error.__traceback__, threading.current_thread())))

    # -- actions ------------------------------------------------------------------------------

    def start_capture(self, request: CaptureRequest | None = None) -> CaptureQuestion | None:
        """See :meth:`CaptureControl.start_capture`; None: a capture as the options have it."""
        return self.control.start_capture(request or self.control.request())

    def processes_to_serve(self, chosen: ProcessSample | None = None) -> tuple[ProcessSample, ...]:
        """The processes of the newest sample in which a profiler server could be wanted, of this node and of now: the
        ``chosen`` one; else all while none answers; else those of jobs on the GPUs while no server is of one."""
        sample, answering = self.feed.sample, usable(self.watch.servers)
        if sample is None or self.feed.player is not None or self.feed.source.simulated or not (
                answering or self.watch.servers_known):  # or not known to be without
            return ()
        alive = [p for p in sample.processes if p.reason not in (ENDED, ZOMBIE)]
        if not answering:
            return tuple(p for p in alive if chosen is None or p.pid == chosen.pid)
        if any(s.asked or s.pid is None for s in answering):
            return ()
        if chosen is not None:
            return tuple(p for p in alive if p.pid == chosen.pid and not any(gpu_use(s, [p]).gpus for s in answering))
        if any(self.watch.job.is_watched(s) for s in answering):
            return ()
        return unserved_on_gpus(answering, alive, user_name(os.geteuid()))

    @property
    def captured_before_restart(self) -> bool:
        """Return whether the last capture is of another job than the one that is watched now, or of an earlier start of
        it. False where that is not known."""
        record, answering = self.results.last_capture, usable(self.watch.servers)
        if record is None or self.feed.player is not None or not answering:
            return False
        if self.feed.source.simulated:  # its jobs end with gputop
            taken = any(one.path == record.path for one in self.results.captures_this_run)
            return not taken or (self._job_restarted_s is not None and record.time_s < self._job_restarted_s)
        processes = self.feed.sample.processes if self.feed.sample is not None else ()
        starts = (p.started_s for p in processes if (p.local_pid or p.pid) == answering[0].pid)
        return (any(start_s is not None and start_s > record.time_s for start_s in starts)
                or is_of_earlier_job(record, answering))

    @property
    def restarted_s(self) -> float | None:
        """Unix time at which the watched job was started again while it was watched; None: it was not."""
        restarted = self.watch.job.restarted
        first = next(iter(usable(self.watch.servers)), None)
        if restarted is None or first is None or (first.address, first.pid) != (restarted.address, restarted.pid):
            return None
        return restarted.started_s

    @property
    def pids_to_read(self) -> tuple[int, ...]:
        """The processes of the newest sample whose stacks can be read, by their PIDs in here; raises GputopError where
        they are not of this node and of now."""
        if self.feed.player is not None:
            raise GputopError("a recording has no stacks", "Run gputop on the node itself.")
        if self._simulated_ranks is not None and self._simulated_ranks.pids:
            return self._simulated_ranks.pids
        if self.feed.source.simulated:
            raise GputopError("simulated processes have no stacks", "To see simulated stacks: gputop --demo hang")
        return tuple(p.local_pid or p.pid for p in self.feed.sample.processes) if self.feed.sample is not None else ()

    def read_stacks(self, pids: Sequence[int], native: bool) -> tuple[ProcessStacks, ...]:
        """Read where these processes stand, by py-spy. Blocks; raises GputopError where that is not installed."""
        if self._simulated_ranks is not None:
            return self._simulated_ranks.stacks(pids, native)
        from gputop.ranks.stacks import read_all

        return read_all(pids, native=native)

    def read_flight_recorder(self, pids: Sequence[int]) -> tuple[str, ...]:
        """Read the dumps of PyTorch's flight recorder of these processes, as lines. Blocks."""
        if self._simulated_ranks is not None:
            return ()
        from gputop.session.flight_recorder_worker import read_in_worker

        return read_in_worker(pids)

    def forget_failure(self) -> None:
        """The user has read why the last capture failed."""
        if self.control.status is not None and self.control.status.phase == "failed":
            self.control.status = replace(self.control.status, time_s=0.0)
            self._notify("capture")

    def open_capture(self, record: CaptureRecord) -> None:
        """Show a capture as the last one is shown, once it is analyzed, in the background. Raises GputopError."""
        if self.replayed_snapshot is not None and record is not self.results.last_capture:
            raise GputopError("a snapshot does not contain other captures", "Run gputop to open the capture.")
        if record.analysis is None:
            self.control.open_saved(record)
        else:
            self.capture_opened(record)
            self._notify("capture")

    def compare_captures(self, a: CaptureRecord, b: CaptureRecord) -> None:
        """Take two captures, of which one or both may be of the logdir, among those that are compared; ``a`` is A."""
        for record in (a, b):
            self.results.keep_capture(record)
        self.results.baseline = a

    def drop_capture(self, record: CaptureRecord) -> None:
        self.results.drop_capture(record.path)
        self._notify("capture")

    def run_next_job(self) -> str:
        """Have the simulated node run its next job, as the same one with its cure; returns what it is. Blocks a little.
        Raises GputopError where there is none, and while a capture runs."""
        from gputop.sources.simulated import SimulatedSource

        if self.control.running:
            raise GputopError("a capture is running", "Wait for it to end, or press x to stop it and keep its data.")
        title = self.feed.source.next_job() if isinstance(self.feed.source, SimulatedSource) else None
        if title is None:
            raise GputopError("this demo has no other job to show", "To try a fix: gputop --demo input-bound")
        self._job_restarted_s = self.feed.clock()
        return title

    def signal(self, process: ProcessSample, number: Signals) -> None:
        """Send a signal to a process of the newest sample; raises GputopError where it must not or cannot be sent."""
        if self.feed.player is not None:
            raise GputopError("no signal was sent: this is a recording", "Its processes may no longer exist.")
        if self.feed.source.simulated:
            raise GputopError("no signal was sent: this process is simulated", "Run gputop without --demo.")
        from gputop.session.process_signals import send

        send(process, number)

    @property
    def watched_node(self) -> WatchedNode:
        return WatchedNode(self.feed.sample, self.feed.history, self.feed.interval_s, self.results.live.findings,
                           self.results.rules_ran_s)

    # -- what the parts tell ------------------------------------------------------------------

    def sample_stored(self, sample: NodeSample) -> None:
        self.results.events.note_sample(sample)

    def sample_updated(self, sample: NodeSample, arrival: Arrival) -> None:
        self.watch.drop_ended()
        self.results.mark_earlier(self.captured_before_restart)
        history = self.feed.history
        if arrival != "before_backfill" and history is not None:
            ranks = self.rank_watch.report if self.rank_watch is not None else None
            self.results.run_live_rules(history, sample, self.feed.interval_s, ranks, self.watch.unprotected,
                                        self.control.profiled())
            if self.rank_watch is not None and arrival == "live":
                self.rank_watch.check(self.results.live.findings, sample)
        self.control.update_node(self.watched_node)
        if arrival == "live" and history is not None and self.control.auto_capture is not None:
            self.control.auto_capture.check(history, sample)
        self._notify("sample")

    def sampling_failed(self, error: GputopError) -> None:
        self.failure = error
        self._notify("failed")

    def servers_changed(self) -> None:
        self.results.mark_earlier(self.captured_before_restart)
        self._notify("servers")

    def capture_changed(self, status: CaptureStatus) -> None:
        self.results.events.note_capture(status)
        self._notify("capture")

    def capture_ended(self, record: CaptureRecord, servers: Sequence[Server]) -> None:
        self.results.add_capture(record, servers, self.feed.sample)
        self.results.mark_earlier(self.captured_before_restart)

    def capture_opened(self, record: CaptureRecord) -> None:
        self.results.open_capture(record)
        self.results.mark_earlier(self.captured_before_restart)

    def capture_waits(self) -> None:
        self._notify("capture")
