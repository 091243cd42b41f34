"""Capturing from several servers at once: the workers of one job, over the same seconds.

As :mod:`gputop.profiler.capture.safe_capture` does for one: all are probed together, each probe says how long its
job and its node would bear it, and the shortest counts for all. The recordings begin at a common time,
which the servers wait for by their own clocks, as TensorFlow's client has them do; but only where a
probe has shown what that clock says: a server told to wait waits, its profiler taken, whatever it costs.
What one worker lacks is its own: the others are captured.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec.structs import replace

from gputop.core.errors import GputopError
from gputop.profiler.addresses import machine_name, split_address, unix_name
from gputop.profiler.capture.job_memory import JobMemory, MemoryGuard, Watch, free_resources, with_more
from gputop.profiler.capture.outcomes import MultiWorkerCapture, Outcome
from gputop.profiler.capture.overview import OverviewMade, also, record_overview
from gputop.profiler.capture.plan import FreeResources, MemoryLimits, Plan, Probe, memory_limits, needs_probe, plan
from gputop.profiler.capture.request import CaptureRequest
from gputop.profiler.capture.requirements import check_limits
from gputop.profiler.capture.safe_capture import full_length, keep_probe, probe_job, probe_logdir, record_counted
from gputop.profiler.clocks import SAME_MACHINE, ClockBounds, began_between, bounds_of_call, intersect
from gputop.profiler.discovery import is_training
from gputop.profiler.recording import CaptureResult, Progress, Recorder, RecordingOrder
from gputop.profiler.storage import RunFolder
from gputop.trace.readers.clock_file import write_clocks

# Ahead of the common start: a request must be there by then, and nothing can end a server's wait for it.
_LEAD_S, _LEAD_PER_WORKER_S = 0.3, 0.01
_MAX_START_WAIT_S = 5.0  # the longest a wrong guess of a server's clock may make it wait
_PHASES = ("connecting", "probing", "recording", "overview", "receiving", "saving")


class _Worker:
    """One server on its way through the phases; each phase runs in a thread of its own."""

    def __init__(self, recorder: Recorder, name: str, report: Callable[[_Worker, Progress], None]) -> None:
        self.recorder, self.address, self.name = recorder, recorder.address, name
        # A port of this machine may be a tunnel to another one's, with another clock: only a job's own process counts.
        self.local = recorder.pid is not None and is_training(recorder.pid) is True
        self.memory = JobMemory(recorder.pid, lambda progress: report(self, progress))
        self.probe: Probe | None = None
        self.probed: CaptureResult | None = None
        self.plan: Plan | None = None
        self.bounds: ClockBounds | None = SAME_MACHINE if self.local else None
        self.round_trip_s = 0.0
        self.result: CaptureResult | None = None
        self.error: GputopError | None = None
        self.start_s: float | None = None  # by our clock, where it was told to wait for it
        self.limits = MemoryLimits()
        self.free: Callable[[], FreeResources] = FreeResources
        self.guard: MemoryGuard | None = None
        self.overview: OverviewMade | None = None

    def attempt(self, step: Callable[[], None]) -> None:
        """Run a phase; what goes wrong is this worker's own."""
        try:
            step()
        except GputopError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001  thread boundary: the other workers go on
            self.error = GputopError(f"internal error in gputop: {error!r}", "Please report this.")

    def probe_server(self, folder: Path, stop: threading.Event) -> None:
        """The probe, and what it tells about the server's clock."""
        self.round_trip_s = self.recorder.round_trip_s()
        self.probed, self.probe = probe_job(self.recorder, folder, self.memory, stop)
        if self.probed is not None:
            self.bounds = intersect(self.bounds, self._bounds(self.probed)) if not self.local else self.bounds

    def watch(self, stop: threading.Event) -> Watch:
        return Watch(self.memory, self.limits, self.free, stop)

    def record(self, recording: RecordingOrder, start_s: float, guard: MemoryGuard, stop: threading.Event) -> None:
        """Record from ``start_s`` on, Unix time by our clock, as far as the server's clock is known."""
        self.guard, start_ns = guard, None
        if self.bounds is not None and self.bounds.width_s <= _MAX_START_WAIT_S:
            start_ns = round((start_s + self.bounds.estimate_s(self.round_trip_s / 2)) * 1e9)
            self.start_s = start_s
        else:
            stop.wait(max(0.0, start_s - time.time()))
        most = self.plan.most_events(self.probe) if self.plan is not None and self.probe is not None else 0
        order = replace(recording, host_name=self.name, start_ns=start_ns, most_events=most)
        self.result = record_counted(self.recorder, order, guard, guard.halt)

    def record_overview(self, chosen: Plan, workers: int, scratch: Path, stop: threading.Event) -> None:
        assert self.result is not None
        self.overview = record_overview(
            self.recorder, self.result.path, replace(chosen, probe=self.probe, ended=""), self.watch(stop), scratch,
            workers)

    def outcome(self, length_s: float) -> Outcome:
        result, clock, began_s, cost = self.result, None, None, None
        if result is not None:
            window_ns = self.recorder.window_ns(result.path)
            if window_ns is None:
                clock = began_between(result.sent_s, result.sent_s + result.took_s, length_s, self.start_s)
                began_s = (clock.began_ns or 0) / 1e9
            else:
                bounds = self.bounds if self.local else intersect(self.bounds, self._bounds(result))
                clock = bounds.clock(self.round_trip_s / 2) if bounds is not None else None
                began_s = (window_ns[0] - (clock.offset_ns if clock else 0)) / 1e9
            cost = self.memory.cost(result.took_s, length_s)
            if self.start_s is not None and began_s is not None:  # the wait for the common start took nothing
                cost = replace(cost, call_s=max(cost.recorded_s, result.took_s - max(0.0, began_s - result.sent_s)))
            if self.overview is not None:
                cost = replace(cost, call_s=cost.call_s + self.overview.call_s,
                               recorded_s=cost.recorded_s + self.overview.recorded_s)
        return Outcome(self.address, self.name, result, self.plan, cost, self.error, clock, began_s, self.overview_s)

    @property
    def overview_s(self) -> float:
        return self.overview.plan.overview_s if self.overview is not None else 0.0

    def _bounds(self, result: CaptureResult) -> ClockBounds | None:
        window_ns = self.recorder.window_ns(result.path)
        return bounds_of_call(result.sent_s, result.sent_s + result.took_s, window_ns) if window_ns else None


def capture_workers(recorders: Sequence[Recorder], request: CaptureRequest, on_progress: Callable[[Progress], None],
                    on_plan: Callable[[Plan], None], stop: threading.Event,
                    agree: Callable[[Plan, float], tuple[Plan, float]] = lambda plan, start_s: (plan, start_s),
                    ) -> MultiWorkerCapture:
    """Capture at most ``request.seconds`` from all ``recorders`` into one run folder. Blocks.

    ``on_progress`` is called from several threads, one at a time, with where the slowest worker stands. Each worker has
    an overview, all of them recorded at once: only its own one tells what a worker does while the others wait for it,
    and as they wait at every step, an overview of one would cost the job as much time. ``agree`` is given the plan and
    the earliest common start, Unix time by our clock, and returns those of this and of other nodes. Raises GputopError
    where no worker could be captured.
    """
    seconds = request.seconds
    logdir = Path(request.logdir).expanduser().absolute()
    run = RunFolder.create(request.logdir, "workers")
    workers = _CombinedProgress(each_once(recorders), on_progress).workers
    threads = ThreadPoolExecutor(len(workers), "gputop-worker")

    def record(chosen: Plan) -> Plan:
        lead_s = max((w.recorder.limits.lead_s for w in workers if w.error is None), default=0.0)
        chosen, start_s = agree(chosen, time.time() + lead_s + _LEAD_S + _LEAD_PER_WORKER_S * len(workers))
        if any(w.error is None for w in workers):
            on_plan(chosen)
        halt = threading.Event()  # of all: what one job does not bear ends it for the others, too
        recording = RecordingOrder(chosen.chosen_s, logdir, run=run.path.name, shapes=chosen.shapes)
        label = with_more if chosen.overview_s else None
        _run_phase(threads, workers, lambda w: w.record(
            recording, start_s, MemoryGuard(w.watch(stop), halt, label=label), stop))
        overview = all(w.recorder.limits.overview for w in workers)
        for guard in (w.guard for w in workers if w.guard is not None):
            chosen = guard.plan_as_recorded(chosen, overview=overview)
        return chosen

    try:
        _run_phase(threads, workers, lambda w: check_limits(w.recorder.pid, jobs=len(workers)))
        if request.force or not any(needs_probe(seconds, w.recorder.limits) for w in workers):
            chosen = record(full_length(request))
            return _finish(workers, chosen, run)
        with probe_logdir(request.logdir) as folder:
            _run_phase(threads, workers, lambda w: w.probe_server(folder / w.name, stop))
            if stop.is_set() and any(w.probed for w in workers):
                return _probes(workers, seconds, logdir, run)
            _run_phase(threads, workers, lambda w: _set_plan(w, seconds, len(workers), logdir))
            chosen = record(shortest_plan(seconds, [(w.address, w.plan) for w in workers if w.plan and not w.error]))
            if chosen.overview_s:
                _run_phase(threads, workers, lambda w: w.record_overview(
                    chosen, len(workers), folder / "overviews" / w.name, stop))
                chosen = _with_overviews(chosen, workers)
            return _finish(workers, chosen, run)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)  # who wants to quit at once need not wait for the servers
        run.discard()


def _with_overviews(chosen: Plan, workers: Sequence[_Worker]) -> Plan:
    """The plan as it was carried out: with the shortest of the overviews, and what ended it."""
    recorded = [w for w in workers if w.result is not None]
    if not recorded:
        return replace(chosen, overview_s=0.0)
    shortest = min(recorded, key=lambda w: w.overview_s)
    reason = shortest.overview.plan.ended if shortest.overview is not None else ""
    ended = f"{shortest.address}: {reason}" if reason else ""
    return replace(chosen, overview_s=shortest.overview_s, ended=also(chosen.ended, ended))


def _run_phase(threads: ThreadPoolExecutor, workers: Sequence[_Worker], step: Callable[[_Worker], None]) -> None:
    """Let all that are well take a step, and wait for the last."""
    list(threads.map(lambda w: w.attempt(lambda: step(w)), [w for w in workers if w.error is None]))


def _finish(workers: Sequence[_Worker], chosen: Plan, run: RunFolder) -> MultiWorkerCapture:
    """Return what came of it, the clocks written down beside the traces; raises GputopError where nothing did."""
    outcomes = tuple(w.outcome(chosen.chosen_s) for w in workers)
    if all(o.result is None for o in outcomes):
        errors = {o.address: o.error for o in outcomes if o.error is not None}
        first = next(iter(errors.values()))
        others = "".join(f"; {address}: {error.message}" for address, error in list(errors.items())[1:])
        raise GputopError(f"none of the {len(outcomes)} workers could be captured: {first.message}{others}", first.fix,
                          first.exit_code) from first
    clocks = {o.result.path.name: o.clock for o in outcomes if o.result is not None and o.clock is not None}
    with contextlib.suppress(OSError):  # the traces are there; without it their own clocks count
        write_clocks(run.path, clocks)
    return MultiWorkerCapture(run.path, chosen, outcomes)


def _probes(workers: Sequence[_Worker], asked_s: float, logdir: Path, run: RunFolder) -> MultiWorkerCapture:
    """The probes as the traces: stopped while they ran."""
    for worker in workers:
        if worker.probed is not None and worker.error is None:
            worker.result = keep_probe(worker.recorder, worker.probed, logdir, worker.name, run.path.name)
        elif worker.error is None:
            worker.error = GputopError("stopped before anything was recorded", "")
    length_s = max(w.probe.seconds for w in workers if w.probe)
    return _finish(workers, Plan(asked_s, length_s, "stopped during the probes; the trace contains only the probes"),
                   run)


def _set_plan(worker: _Worker, seconds: float, workers: int, logdir: Path) -> None:
    """Raises GputopError where this worker's node or ours lacks the memory or disk space."""
    assert worker.probe is not None

    def free() -> FreeResources:
        return per_worker(free_resources(worker.address, worker.recorder.pid, logdir), workers)

    share, limits = free(), worker.recorder.limits
    worker.plan, worker.free = plan(seconds, worker.probe, share, limits), free
    worker.limits = memory_limits(worker.probe, share, limits)


def per_worker(free: FreeResources, workers: int) -> FreeResources:
    """Return what is free for one of several workers whose traces come to this node at once."""
    def part(free: float | None) -> float | None:
        return None if free is None else free / workers

    return replace(free, shared_bytes=part(free.shared_bytes), own_bytes=part(free.own_bytes),
                   disk_bytes=part(free.disk_bytes), job_disk_bytes=part(free.job_disk_bytes))


def shortest_plan(asked_s: float, plans: Sequence[tuple[str, Plan]]) -> Plan:
    """The plan that hurts nobody: the shortest of all, its worker named. As asked where there are none."""
    if not plans:
        return Plan(asked_s, asked_s, "full length")
    address, least = min(plans, key=lambda one: one[1].chosen_s)
    notes = tuple(dict.fromkeys(note for _, one in plans for note in one.notes))
    reason = f"{address}: {least.why}" if least.shortened and len(plans) > 1 else least.why
    return replace(least, why=reason, notes=notes, shapes=all(one.shapes for _, one in plans))


def trace_names(addresses: Sequence[str]) -> list[str]:
    """Return what to call each worker's trace: its host, with the port (socket) where several are on one host. Several
    addresses can have one host name and one port (two loopback addresses, two namespaces): they are counted."""
    hosts = [machine_name(address) for address in addresses]
    places = [re.sub(r"[^A-Za-z0-9._-]+", "_", unix_name(address) or str(split_address(address)[1])).strip("_")
              for address in addresses]
    names: list[str] = []
    for host, port in zip(hosts, places, strict=True):
        name = f"{host}_{port}" if hosts.count(host) > 1 else host
        names.append(next(n for n in (name, *(f"{name}_{i}" for i in range(2, len(hosts) + 1))) if n not in names))
    return names


def each_once(recorders: Sequence[Recorder]) -> list[Recorder]:
    """Return the recorders of different processes, without further addresses of the same port of one."""
    first: dict[tuple[int, int] | str, Recorder] = {}
    for recorder in recorders:
        address, pid = recorder.address, recorder.pid
        port = None if unix_name(address) is not None else split_address(address)[1]
        first.setdefault((pid, port) if pid is not None and port is not None else address, recorder)
    return list(first.values())


class _CombinedProgress:
    """The workers, and their progress as one: the phase of the one that is furthest behind."""

    def __init__(self, recorders: Sequence[Recorder], report: Callable[[Progress], None]) -> None:
        names = trace_names([recorder.address for recorder in recorders])
        self.workers = [_Worker(recorder, name, self) for recorder, name in zip(recorders, names, strict=True)]
        self._report = report
        self._lock = threading.Lock()
        self._latest: dict[str, Progress] = {}

    def __call__(self, worker: _Worker, progress: Progress) -> None:
        with self._lock:
            self._latest[worker.address] = progress
            going = [self._latest[w.address] for w in self.workers if w.error is None and w.address in self._latest]
            if going:
                self._report(min(going, key=lambda p: (_PHASES.index(p.phase), p.elapsed_s)))

