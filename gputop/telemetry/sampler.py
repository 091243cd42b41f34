"""The clock and the threads: reads every probe once per tick and delivers whole samples.

One thread reads the GPUs one after the other. A driver call can block and a wedged one never
returns: then another thread reads on, one for each GPU at most. There is one for the host, and
the scheduler thread, which keeps time and assembles samples. All are daemon threads: none is
joined while it may be inside the driver.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from gputop.core.errors import GputopError
from gputop.core.metrics import HOST_METRICS
from gputop.core.samples import (
    FAILED,
    NOT_RESPONDING,
    OK,
    GpuProcess,
    GpuSample,
    HostSample,
    NodeSample,
    ProcessSample,
    Reading,
)
from gputop.sources.base import GpuProbe, Source
from gputop.telemetry import deadline_calls
from gputop.telemetry.deadline_calls import Batch, Call, Worker

MIN_INTERVAL_S = 0.1
FIRST_DEADLINE_S = 1.0  # the first call of a GPU without persistence mode also starts it
MAX_DEADLINE_S = 0.5
# A GPU that takes longer is left to its thread, and another thread reads the next ones. GPUs that answer at once are
# all read by one: threads that compete for the interpreter switch at every driver call, and to wake one for each GPU
# takes as long as to read it.
STAGGER_S = 0.002
OWN_CPU_PERIOD_S = 10.0  # a single sample differs each time, and each new figure costs a redraw
CLOSE_DEADLINE_S = 0.2
OPEN_DEADLINE_S = 15.0
BACKFILL_TIMEOUT_S = 10.0  # the simulated node needs a third of a second on an idle machine

_T = TypeVar("_T")
_WAKEUP = object()  # a message that only ends the scheduler's wait


class Clocks(Struct, frozen=True):
    """Time in seconds: ``monotonic`` for deadlines and periods, ``wall`` (Unix time) for samples."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


class Sampler:
    """Samples ``source`` every ``interval_s`` seconds until stopped.

    ``on_sample`` gets each :class:`NodeSample`, ``on_error`` the error that ended or prevents the
    sampling. ``on_backfill``, where given, is called once, after the first sample or a later one,
    with the samples of the time before the first, oldest first; they may be none. All are called
    from the scheduler thread; a callback that raises ends the sampling. A GPU whose driver call
    does not return is reported as not responding and delays only the first tick in which it
    hangs, by at most :func:`tick_timeout_s`.

    Without ``on_sample`` it opens the source, reads the GPUs once (``first_gpus``) and waits for
    :meth:`connect`: the GPUs can be on the screen before the rest is imported.
    """

    def __init__(
        self,
        source: Source,
        interval_s: float,
        on_sample: Callable[[NodeSample], None] | None = None,
        on_error: Callable[[GputopError], None] | None = None,
        *,
        on_backfill: Callable[[Sequence[NodeSample]], None] | None = None,
        clocks: Clocks = Clocks(),  # noqa: B008  frozen
        open_deadline_s: float = OPEN_DEADLINE_S,
    ) -> None:
        self._source = source
        self._interval_s = max(MIN_INTERVAL_S, interval_s)
        self.first_gpus: NodeSample | None = None  # the GPUs, without the host, read before anybody was connected
        self.failure: GputopError | None = None  # the error that ended or prevents the sampling
        self.first_gpus_ready = threading.Event()  # set once first_gpus or failure is there
        self._connected = threading.Event()
        if on_sample is not None and on_error is not None:
            self.connect(on_sample, on_error, on_backfill)
        self._clock, self._wall_clock = clocks.monotonic, clocks.wall
        self._open_deadline_s = open_deadline_s
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._gpus: list[tuple[GpuProbe, Call]] = []
        self._gpu_workers: list[Worker] = []
        self._host = Call(self._read_host)
        self._processes = Call(self._read_processes)
        self._host_worker: Worker | None = None
        self._opener: Worker | None = None
        self._open_call = Call(source.open)
        self._backfill: Call | None = None
        self._backfill_deadline_s = 0.0  # monotonic: a backfill that arrives later is dropped
        self._hostname = "" if source.simulated else os.uname().nodename  # until the host itself says it
        self._last_s: float | None = None
        self._own_cpu = OwnCpu()

    @property
    def interval_s(self) -> float:
        return self._interval_s

    def connect(self, on_sample: Callable[[NodeSample], None], on_error: Callable[[GputopError], None],
                on_backfill: Callable[[Sequence[NodeSample]], None] | None = None) -> None:
        """Deliver samples, failures and the backfill to these callbacks from now on; once."""
        self._on_sample, self._on_error, self._on_backfill = on_sample, on_error, on_backfill
        self._connected.set()

    def start(self) -> None:
        """Begin; returns at once."""
        if self._thread is not None:
            raise RuntimeError("a sampler starts once")
        self._thread = threading.Thread(target=self._schedule, name="gputop-sampler", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 0.5) -> None:
        """End. Waits ``timeout_s`` at most; a hanging driver call is left to its thread.

        If it returns within that time, no callback follows.
        """
        self._stopping = True
        self._connected.set()
        self._results.put(_WAKEUP)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def set_interval(self, interval_s: float) -> None:
        """Tick every ``interval_s`` seconds (at least 0.1) from the last tick on."""
        self._interval_s = max(MIN_INTERVAL_S, interval_s)
        self._results.put(_WAKEUP)

    # -- the scheduler thread -----------------------------------------------------------------

    def _schedule(self) -> None:
        try:
            if self._open():
                self._run_ticks()
        except GputopError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  thread boundary: else the screen would freeze without a word
            self._fail(GputopError(f"gputop stopped sampling: {error!r}", "This is a bug in gputop: please report it."))
        finally:
            self._end()

    def _deliver(self, callback: Callable[[_T], None], value: _T) -> None:
        try:
            callback(value)
        except Exception as error:
            cause = error.message if isinstance(error, GputopError) else repr(error)
            raise GputopError(
                f"gputop stopped sampling: it could not use the sample it had taken: {cause}",
                (error.fix if isinstance(error, GputopError) else "")
                or "This is a bug in gputop, not in the driver: please report it.",
            ) from error

    def _fail(self, error: GputopError) -> None:
        self.failure = error
        self.first_gpus_ready.set()
        self._connected.wait()
        if not self._stopping:
            self._on_error(error)

    def _open(self) -> bool:
        """Open the source and start the workers; False if stopped before that was done."""
        opener = self._opener = self._worker("open")
        opening = self._open_call
        opening.prepare(self._clock(), self._open_deadline_s)
        opener.submit(Batch([opening]))
        due_s: float | None = self._clock() + self._open_deadline_s
        while opening.pending:
            if not self._receive(due_s) and due_s is not None and not self._stopping:
                self._fail(
                    GputopError(
                        f"{self._source.label} does not respond: opening it has taken {self._open_deadline_s:.0f} s.",
                        "Check whether `nvidia-smi` also hangs, and look for Xid errors in `dmesg`. A driver that "
                        "hangs needs a reboot.",
                    )
                )
                due_s = None
            if self._stopping:
                return False
        if isinstance(opening.result, Exception):
            raise opening.result
        self._gpus = [(probe, Call(probe.read)) for probe in self._source.gpus]
        self._host_worker = self._worker("host")
        return True

    # source.host is first accessed on the host's thread, because the access may import modules.
    def _read_host(self, now_s: float) -> HostSample:
        return self._source.host.read(now_s)

    def _read_processes(self, now_s: float, gpus: Sequence[GpuSample]) -> tuple[ProcessSample, ...]:
        return self._source.host.processes(now_s, gpus)

    def _worker(self, name: str) -> Worker:
        return Worker(name, self._results, self._clock)

    def _run_ticks(self) -> None:
        tick_s = self._clock()
        while not self._stopping:
            sample = self._tick()
            if self._stopping:
                return
            self._deliver(self._on_sample, sample)
            if self._on_backfill is not None:
                self._deliver_backfill(self._on_backfill, sample.time_s, tick_s + self._interval_s)
            while (now_s := self._clock()) < (due_s := tick_s + self._interval_s) and not self._stopping:
                self._receive(due_s)
            if self._stopping:
                return
            tick_s = next_tick(tick_s, now_s, self._interval_s)

    def _deliver_backfill(self, callback: Callable[[Sequence[NodeSample]], None], time_s: float,
                          until_s: float) -> None:
        """Deliver the backfill as soon as it has arrived; waits for it until ``until_s``, the next tick, at most."""
        backfill = self._backfill or self._ask_for_backfill(time_s)
        self._await([backfill], min(until_s, self._backfill_deadline_s) - self._clock())
        if not self._stopping and (not backfill.pending or self._clock() >= self._backfill_deadline_s):
            # A source that is late or fails has no backfill; sampling goes on without it.
            self._on_backfill = None
            self._deliver(callback, backfill.result if isinstance(backfill.result, tuple) else ())

    def _ask_for_backfill(self, time_s: float) -> Call:
        source, opener = self._source, self._opener
        assert opener is not None
        backfill = self._backfill = Call(lambda: tuple(source.backfill(time_s, self._interval_s)))
        backfill.prepare(self._clock(), BACKFILL_TIMEOUT_S)
        opener.submit(Batch([backfill]))
        self._backfill_deadline_s = self._clock() + BACKFILL_TIMEOUT_S
        return backfill

    def _receive(self, until_s: float | None) -> bool:
        """Receive the results of one batch; False if none came by ``until_s`` (monotonic; None: wait forever)."""
        try:
            message = self._results.get(timeout=None if until_s is None else max(0.0, until_s - self._clock()))
        except queue.Empty:
            return False
        if message is not _WAKEUP:
            worker, batch = message
            worker.idle = True
            batch.collect()
        return True

    def _await(self, calls: list[Call], timeout_s: float, ending: bool = False) -> None:
        until_s = self._clock() + timeout_s
        while (ending or not self._stopping) and any(call.pending for call in calls):
            if not self._receive(until_s):
                return

    def _tick(self) -> NodeSample:
        time_s, began_s = self._wall_clock(), self._clock()
        interval_s = None if self._last_s is None else began_s - self._last_s
        own_cpu = self._own_cpu.ratio(began_s, time.process_time())
        self._last_s = began_s
        timeout_s = tick_timeout_s(None if interval_s is None else self._interval_s)

        self._read_gpus(time_s, timeout_s)
        gpus = self._gpu_samples()
        if not self._connected.is_set():
            self.first_gpus = NodeSample(time_s, gpus, self._missing_host("not asked yet"), (), interval_s,
                                      self._source.label, self._source.simulated, own_cpu, self._source.gpus_present)
            self.first_gpus_ready.set()
            if self._source.simulated:  # whose past takes time to compute: the first whole screen has it
                self._ask_for_backfill(time_s)
            self._connected.wait()
        host, processes = self._read_node(time_s, gpus, timeout_s)
        return NodeSample(
            time_s,
            gpus,
            host,
            processes,
            interval_s,
            self._source.label,
            self._source.simulated,
            own_cpu,
            self._source.gpus_present,
        )

    def _read_gpus(self, time_s: float, timeout_s: float) -> None:
        """Read the GPUs; wait up to ``timeout_s`` for those that are not always slow."""
        awaited: list[Call] = []
        for _, call in self._gpus:
            if call.pending:
                continue  # still in the call of an earlier tick
            if call.prepare(self._clock(), timeout_s, time_s):
                awaited.append(call)
            else:
                self._gpu_worker().submit(Batch([call]))
        batch = Batch(awaited)
        while batch.waiting and not self._stopping:
            self._gpu_worker().submit(batch)
            ended = -1
            while batch.waiting and ended != (ended := len(batch.done)):
                self._receive(self._clock() + STAGGER_S)
        self._await(awaited, timeout_s)
        batch.collect()  # those before one that hangs

    def _read_node(self, time_s: float, gpus: tuple[GpuSample, ...],
                   timeout_s: float) -> tuple[HostSample, tuple[ProcessSample, ...]]:
        """Read the host and its processes, on one thread; wait up to ``timeout_s`` for what is not always slow."""
        host, processes, worker = self._host, self._processes, self._host_worker
        assert worker is not None
        now_s = self._clock()
        ready = [(call, args) for call, args in ((host, (time_s,)), (processes, (time_s, gpus))) if not call.pending]
        awaited = [call for call, args in ready if call.prepare(now_s, timeout_s, *args)]
        batch = Batch(awaited)
        if awaited:
            worker.submit(batch)
        for call, _ in ready:
            if call not in awaited:
                worker.submit(Batch([call]))
        for call in awaited:
            if not host.pending or call is host:  # processes behind a host that hangs are not waited for
                self._await([call], timeout_s)
                batch.collect()  # what it made before a call that hangs
        return (self._host_sample(host.poll_or_last(host in awaited)),
                self._process_samples(processes.poll_or_last(processes in awaited and not host.pending), gpus))

    def _gpu_worker(self) -> Worker:
        """A thread that is in no call; one more is started where there is none."""
        for worker in self._gpu_workers:
            if worker.idle:
                return worker
        self._gpu_workers.append(self._worker(f"gpu{len(self._gpu_workers)}"))
        return self._gpu_workers[-1]

    # -- from results to samples ---------------------------------------------------------------

    def _gpu_samples(self) -> tuple[GpuSample, ...]:
        return tuple(self._gpu_sample(probe, call) for probe, call in self._gpus)

    def _gpu_sample(self, probe: GpuProbe, call: Call) -> GpuSample:
        result = call.poll()
        if isinstance(result, GpuSample):
            return result
        info = probe.info
        if isinstance(result, Exception):
            state = FAILED
            message = f"GPU {info.index} could not be read: {result!r}. This is a bug in gputop: please report it."
        else:
            waited_s = call.duration_s if call.submitted_s is None else self._clock() - call.submitted_s
            if waited_s <= deadline_calls.HANG_TIMEOUT_S:
                state, message = OK, f"no value at this tick: the driver has taken {waited_s:.1f} s so far"
            else:
                state = NOT_RESPONDING
                message = (
                    f"GPU {info.index} does not respond: a driver call has hung for {waited_s:.0f} s. Look for Xid "
                    "errors in `dmesg`; if it does not come back, stop the jobs on this node and reboot it."
                )
        xids, xids_reason = probe.xids()
        return GpuSample(info, {}, processes_reason=message, clock_events_reason=message, state=state, message=message,
                         xids=xids, xids_reason=xids_reason)

    def _host_sample(self, result: object) -> HostSample:
        if isinstance(result, HostSample):
            return result
        return self._missing_host(_host_reason(result))

    def _missing_host(self, reason: str) -> HostSample:
        return HostSample(self._hostname, {m.id: Reading.missing(m.unit, reason) for m in HOST_METRICS.values()})

    def _process_samples(self, result: object, gpus: tuple[GpuSample, ...]) -> tuple[ProcessSample, ...]:
        if isinstance(result, tuple):
            return result
        from gputop.sources.host.gpu_processes import missing_process  # slow to import, not needed for the first GPUs

        held: dict[int, dict[int, GpuProcess]] = {}
        for gpu in gpus:
            for process in gpu.processes:
                held.setdefault(process.pid, {})[gpu.info.index] = process
        reason = _host_reason(result)
        return tuple(missing_process(pid, on_gpus, reason) for pid, on_gpus in held.items())

    def _end(self) -> None:
        """Stop the workers; close the source unless a call in it is pending."""
        for worker in (*self._gpu_workers, self._host_worker, self._opener):
            if worker is not None:
                worker.stop()
        calls = [*(call for _, call in self._gpus), self._host, self._processes, self._open_call]
        calls += [self._backfill] if self._backfill is not None else []
        # The stop may have come in the middle of a tick, just before the last results.
        self._await(calls, CLOSE_DEADLINE_S, ending=True)
        if not any(call.pending for call in calls):
            self._source.close()


class OwnCpu:
    """The CPU time that gputop itself uses, in cores: the mean of the last whole period, or since the first tick."""

    def __init__(self) -> None:
        self._since: tuple[float, float] | None = None  # monotonic seconds, CPU seconds
        self._ratio: float | None = None
        self._has_period = False

    def ratio(self, now_s: float, cpu_s: float) -> float | None:
        if self._since is None:
            self._since = now_s, cpu_s
            return None
        elapsed_s = now_s - self._since[0]
        if elapsed_s >= OWN_CPU_PERIOD_S or (not self._has_period and elapsed_s > 0):
            self._ratio = (cpu_s - self._since[1]) / elapsed_s
        if elapsed_s >= OWN_CPU_PERIOD_S:
            self._since, self._has_period = (now_s, cpu_s), True
        return self._ratio


def _host_reason(result: object) -> str:
    if isinstance(result, Exception):
        return f"could not be read: {result!r}"
    return "the host did not answer in time"


def tick_timeout_s(interval_s: float | None) -> float:
    """Seconds that a tick waits for the readings, and then again for the processes.

    A second at the first tick (``interval_s`` None); later 0.8 of an interval, half a second at most.
    """
    return FIRST_DEADLINE_S if interval_s is None else min(MAX_DEADLINE_S, 0.8 * interval_s)


def next_tick(tick_s: float, now_s: float, interval_s: float) -> float:
    """The scheduled time of the tick due at ``now_s``: ``tick_s`` plus a whole number of intervals.

    So ticks do not drift. Ticks missed because of a slow consumer are skipped, not caught up.
    """
    missed = math.floor((now_s - tick_s) / interval_s)
    return tick_s + max(1, missed) * interval_s
