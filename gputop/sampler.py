"""The clock and the threads: asks every probe once per tick and hands on whole samples.

One thread per GPU, because a driver call can block and a wedged one never returns; one for
the host; one that keeps time and puts samples together. All are daemon threads of our
own: none is ever joined while it may be inside the driver.
"""

from __future__ import annotations

import math
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from gputop.errors import GputopError
from gputop.metrics import HOST_METRICS
from gputop.samples import (
    FAILED,
    NOT_RESPONDING,
    OK,
    GpuInfo,
    GpuProcess,
    GpuSample,
    HostSample,
    NodeSample,
    ProcessSample,
    Reading,
)
from gputop.sources import GpuProbe, Source
from gputop.sources.host_processes import missing_process

MIN_INTERVAL_S = 0.1
FIRST_DEADLINE_S = 1.0  # the first call of a GPU without persistence mode also starts it
MAX_DEADLINE_S = 0.5
HANG_S = 2.0  # a call that takes longer than this is called hanging; the usual ones take microseconds
CLOSE_DEADLINE_S = 0.2
OPEN_DEADLINE_S = 15.0

_WAKE = object()  # a letter to the coordinator that only ends its waiting


class _Worker:
    """A thread that does one call at a time and posts ``(worker, result, seconds)`` to the mailbox."""

    def __init__(self, name: str, mailbox: queue.SimpleQueue[Any], clock: Callable[[], float]) -> None:
        self.started_s: float | None = None  # when the call under way began; None: idle
        self.took_s = 0.0  # how long its last finished call took
        self.result: Any = None  # the newest one not yet used; an exception is one, too
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._mailbox = mailbox
        self._clock = clock
        threading.Thread(target=self._run, name=f"gputop-{name}", daemon=True).start()

    def order(self, call: Callable[..., Any], *args: Any) -> None:
        self.started_s = self._clock()
        self._orders.put((call, args))

    def end(self) -> None:
        self._orders.put(None)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            call, args = order
            began_s = self._clock()
            try:
                result = call(*args)
            except Exception as error:  # noqa: BLE001  thread boundary: one broken probe must not end the others
                result = error
            self._mailbox.put((self, result, self._clock() - began_s))


class Sampler:
    """Samples ``source`` every ``interval_s`` seconds until stopped.

    ``on_sample`` gets each :class:`NodeSample`, first those that the source knows of the
    past, and ``on_error`` what ended or prevents the sampling; both are called from the
    sampler's own thread. A GPU whose driver call does not return is reported as not
    responding and holds up nothing: at most the first tick in which it hangs comes late by
    half an interval.
    """

    def __init__(
        self,
        source: Source,
        interval_s: float,
        on_sample: Callable[[NodeSample], None],
        on_error: Callable[[GputopError], None],
        *,
        prefill: bool = True,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        open_deadline_s: float = OPEN_DEADLINE_S,
    ) -> None:
        self._source = source
        self._interval_s = max(MIN_INTERVAL_S, interval_s)
        self._on_sample = on_sample
        self._on_error = on_error
        self._prefill = prefill
        self._clock = clock
        self._wall_clock = wall_clock
        self._open_deadline_s = open_deadline_s
        self._mailbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._gpus: list[tuple[GpuProbe, _Worker]] = []
        self._host: _Worker | None = None
        self._opener: _Worker | None = None
        self._hostname = socket.gethostname()
        self._last_s: float | None = None
        self._last_cpu_s = 0.0

    @property
    def interval_s(self) -> float:
        return self._interval_s

    def start(self) -> None:
        """Begin; returns at once."""
        if self._thread is not None:
            raise RuntimeError("a sampler starts once")
        self._thread = threading.Thread(target=self._coordinate, name="gputop-sampler", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 0.5) -> None:
        """End. Waits ``timeout_s`` at most; a hanging driver call is left to its thread.

        After it returned in time no callback comes any more.
        """
        self._stopping = True
        self._mailbox.put(_WAKE)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def set_interval(self, interval_s: float) -> None:
        """Tick every ``interval_s`` seconds (at least 0.1) from the last tick on."""
        self._interval_s = max(MIN_INTERVAL_S, interval_s)
        self._mailbox.put(_WAKE)

    # -- the coordinator's thread -------------------------------------------------------------

    def _coordinate(self) -> None:
        try:
            if self._open():
                self._run_ticks()
        except GputopError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  thread boundary: else the screen would freeze without a word
            self._fail(GputopError(f"gputop stopped sampling: {error!r}", "A fault of gputop: please report it."))
        finally:
            self._end()

    def _fail(self, error: GputopError) -> None:
        if not self._stopping:
            self._on_error(error)

    def _open(self) -> bool:
        """Open the source and start the workers; False if stopped before that was done."""
        opener = self._opener = self._worker("open")
        opener.order(self._source.open)
        due_s: float | None = self._clock() + self._open_deadline_s
        while opener.started_s is not None:
            if not self._receive(due_s) and due_s is not None and not self._stopping:
                self._fail(
                    GputopError(
                        f"{self._source.label} does not respond: opening it has taken {self._open_deadline_s:.0f} s.",
                        "See whether `nvidia-smi` hangs, too, and look for Xid errors in `dmesg`; a wedged driver "
                        "needs a reboot.",
                    )
                )
                due_s = None
            if self._stopping:
                return False
        opener.end()
        if isinstance(opener.result, Exception):
            raise opener.result
        now_s = self._wall_clock()
        for sample in self._source.prefill(now_s, self._interval_s) if self._prefill else ():
            if self._stopping:
                return False
            self._on_sample(sample)
        self._gpus = [(probe, self._worker(f"gpu{probe.info.index}")) for probe in self._source.gpus]
        self._host = self._worker("host")
        return True

    def _worker(self, name: str) -> _Worker:
        return _Worker(name, self._mailbox, self._clock)

    def _run_ticks(self) -> None:
        tick_s = self._clock()
        while not self._stopping:
            sample = self._tick()
            if self._stopping:
                return
            self._on_sample(sample)
            while not self._stopping and (now_s := self._clock()) < (due_s := tick_s + self._interval_s):
                self._receive(due_s)
            tick_s = next_tick(tick_s, now_s, self._interval_s)

    def _receive(self, until_s: float | None) -> bool:
        """Take one letter from the mailbox; False if none came until then (None: wait for ever)."""
        try:
            letter = self._mailbox.get(timeout=None if until_s is None else max(0.0, until_s - self._clock()))
        except queue.Empty:
            return False
        if letter is not _WAKE:
            worker, worker.result, worker.took_s = letter
            worker.started_s = None
        return True

    def _order(self, worker: _Worker, allowed_s: float, call: Callable[..., Any], *args: Any) -> bool:
        """Give a worker its call of this tick; returns whether to wait for it."""
        if worker.started_s is not None:
            return False  # still in the call of an earlier tick
        if worker.took_s > HANG_S:
            worker.result = None  # begun long ago: too old to be shown
            worker.took_s = 0.0
        # One that is always slow is shown a tick late rather than making every tick late.
        slow = worker.took_s > allowed_s
        worker.order(call, *args)
        return not slow

    def _await(self, workers: list[_Worker], allowed_s: float, ending: bool = False) -> None:
        until_s = self._clock() + allowed_s
        while (ending or not self._stopping) and any(worker.started_s is not None for worker in workers):
            if not self._receive(until_s):
                return

    def _tick(self) -> NodeSample:
        host = self._host
        assert host is not None
        time_s, began_s, cpu_s = self._wall_clock(), self._clock(), time.process_time()
        interval_s = None if self._last_s is None else began_s - self._last_s
        own_cpu = (cpu_s - self._last_cpu_s) / interval_s if interval_s else None
        self._last_s, self._last_cpu_s = began_s, cpu_s
        allowed_s = FIRST_DEADLINE_S if interval_s is None else min(MAX_DEADLINE_S, 0.8 * self._interval_s)

        probe_host = self._source.host
        waited_for = [worker for probe, worker in self._gpus if self._order(worker, allowed_s, probe.read, time_s)]
        if self._order(host, allowed_s, probe_host.read, time_s):
            waited_for.append(host)
        self._await(waited_for, allowed_s)
        gpus = tuple(self._gpu_sample(probe.info, worker) for probe, worker in self._gpus)
        host_sample = self._host_sample(host)

        if self._order(host, allowed_s, probe_host.processes, time_s, gpus):
            self._await([host], allowed_s)
        return NodeSample(
            time_s,
            gpus,
            host_sample,
            self._process_samples(host, gpus),
            interval_s,
            self._source.label,
            self._source.simulated,
            own_cpu,
        )

    # -- from results to samples ---------------------------------------------------------------

    def _gpu_sample(self, info: GpuInfo, worker: _Worker) -> GpuSample:
        result, worker.result = worker.result, None
        if isinstance(result, GpuSample):
            return result
        if isinstance(result, Exception):
            state = FAILED
            message = f"GPU {info.index} could not be read: {result!r}. This is a fault of gputop: please report it."
        else:
            waited_s = 0.0 if worker.started_s is None else self._clock() - worker.started_s
            if waited_s <= HANG_S:
                state, message = OK, f"no value at this tick: the driver has taken {waited_s:.1f} s so far"
            else:
                state = NOT_RESPONDING
                message = (
                    f"GPU {info.index} does not respond: a driver call has hung for {waited_s:.0f} s. Look for Xid "
                    "errors in `dmesg`; if it does not come back, stop the jobs on this node and reboot it."
                )
        return GpuSample(info, {}, processes_reason=message, clock_events_reason=message, state=state, message=message)

    def _host_sample(self, worker: _Worker) -> HostSample:
        result, worker.result = worker.result, None
        if isinstance(result, HostSample):
            return result
        why = _host_reason(result)
        return HostSample(self._hostname, {m.id: Reading.missing(m.unit, why) for m in HOST_METRICS.values()})

    def _process_samples(self, worker: _Worker, gpus: tuple[GpuSample, ...]) -> tuple[ProcessSample, ...]:
        result, worker.result = worker.result, None
        if isinstance(result, tuple):
            return result
        held: dict[int, dict[int, GpuProcess]] = {}
        for gpu in gpus:
            for process in gpu.processes:
                held.setdefault(process.pid, {})[gpu.info.index] = process
        why = _host_reason(result)
        return tuple(missing_process(pid, on_gpus, why) for pid, on_gpus in held.items())

    def _end(self) -> None:
        """Let idle workers go; close the source unless a call is under way in it."""
        workers = [worker for _, worker in self._gpus]
        if self._host is not None:
            workers.append(self._host)
        if self._opener is not None and not self._gpus:
            workers.append(self._opener)
        for worker in workers:
            worker.end()
        # The stop may have come in the middle of a tick, a moment before the last answers.
        self._await(workers, CLOSE_DEADLINE_S, ending=True)
        if all(worker.started_s is None for worker in workers):
            self._source.close()


def _host_reason(result: object) -> str:
    if isinstance(result, Exception):
        return f"could not be read: {result!r}"
    return "the host did not answer in time"


def next_tick(tick_s: float, now_s: float, interval_s: float) -> float:
    """When the tick that is due at ``now_s`` should have been: on the raster of ``tick_s``.

    Keeping to the raster, ticks do not drift; those that a slow consumer made us miss are
    left out rather than made up for.
    """
    missed = math.floor((now_s - tick_s) / interval_s)
    return tick_s + max(1, missed) * interval_s


def read_once(source: Source, settle_s: float = 0.5) -> NodeSample:
    """Open ``source``, look at it twice ``settle_s`` apart, close it and return the second look.

    Two looks, because rates and GPM's metrics need two. Raises :class:`GputopError` if the
    source cannot be opened.
    """
    answers: queue.SimpleQueue[NodeSample | GputopError] = queue.SimpleQueue()
    sampler = Sampler(source, settle_s, answers.put, answers.put, prefill=False)
    sampler.start()
    try:
        while True:
            answer = answers.get()
            if isinstance(answer, GputopError):
                raise answer
            if answer.interval_s is not None:
                return answer
    finally:
        sampler.stop()
