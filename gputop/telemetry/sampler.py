"""The clock and the threads: reads every probe once per tick and delivers whole samples.

One thread reads the GPUs one after the other. A driver call can block and a wedged one never returns: then another
thread reads on, one for each GPU at most (:mod:`.deadline_calls`). There is one for the host, one that opens the
source, and the scheduler thread, which keeps time and assembles samples. All are daemon threads: none is joined while
it may be inside the driver.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from gputop.core.errors import GputopError
from gputop.core.metrics import BYTES
from gputop.core.samples import OK, UNIFIED_MEMORY, GpuSample, HostSample, NodeSample, Reading
from gputop.sources.base import Source
from gputop.telemetry.deadline_calls import Batch, Call, GpuReader, HostReader, Workers

MIN_INTERVAL_S = 0.1
FIRST_DEADLINE_S = 1.0  # the first call of a GPU without persistence mode also starts it
MAX_DEADLINE_S = 0.5
OWN_CPU_PERIOD_S = 10.0  # a single sample differs each time, and each new figure costs a redraw
CLOSE_DEADLINE_S = 0.2
OPEN_DEADLINE_S = 15.0

_UNIFIED = re.compile(r"\b(?:GB10|Xavier|Orin|Thor|Tegra)\b", re.IGNORECASE)  # names of GPUs without own memory
_T = TypeVar("_T")


class Clocks(Struct, frozen=True):
    """Time in seconds: ``monotonic`` for deadlines and periods, ``wall`` (Unix time) for samples."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


class Sampler:
    """Samples ``source`` every ``interval_s`` seconds until stopped.

    ``on_sample`` gets each :class:`NodeSample`, ``on_error`` the error that ended or prevents the sampling.
    ``on_backfill``, where given, is called once, after the first sample or a later one, with the samples of the time
    before the first, oldest first; they may be none. All are called from the scheduler thread; a callback that raises
    ends the sampling. A GPU whose driver call does not return is reported as not responding and delays only the first
    tick in which it hangs, by at most :func:`tick_timeout_s`.

    Without ``on_sample`` it opens the source, reads the GPUs once (``first_gpus``) and waits for
    :meth:`connect`: the GPUs can be on the screen before the rest is imported. The first sample is a second
    reading then, with the rates and counters that need two.
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
        self.interval_s = max(MIN_INTERVAL_S, interval_s)
        self.first_gpus: NodeSample | None = None  # the GPUs, without the host, read before anybody was connected
        self.failure: GputopError | None = None  # the error that ended or prevents the sampling
        self.first_gpus_ready = threading.Event()  # set once first_gpus or failure is there
        self._connected = threading.Event()
        if on_sample is not None and on_error is not None:
            self.connect(on_sample, on_error, on_backfill)
        self._wall_clock = clocks.wall
        self._open_deadline_s = open_deadline_s
        self._thread: threading.Thread | None = None
        self._workers = Workers(clocks.monotonic)
        self._opener = self._workers.worker("open")
        self._backfill: Call | None = None  # None: not asked for yet
        self._gpus = GpuReader((), self._workers)  # none until the source is open
        self._host = HostReader(source, self._workers)
        self._last_s: float | None = None  # monotonic: when the last tick began
        self._own_cpu = OwnCpu()

    def connect(self, on_sample: Callable[[NodeSample], None], on_error: Callable[[GputopError], None],
                on_backfill: Callable[[Sequence[NodeSample]], None] | None = None) -> None:
        """Deliver samples, failures and the backfill to these callbacks from now on; once."""
        self._on_sample, self._on_error, self._on_backfill = on_sample, on_error, on_backfill
        self._connected.set()

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread = threading.Thread(target=self._schedule, name="gputop-sampler", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 0.5) -> None:
        """End. Waits ``timeout_s`` at most; a hanging driver call is left to its thread.

        If it returns within that time, no callback follows.
        """
        self._workers.stop()
        self._connected.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def set_interval(self, interval_s: float) -> None:
        """Tick every ``interval_s`` seconds (at least 0.1) from the last tick on."""
        self.interval_s = max(MIN_INTERVAL_S, interval_s)
        self._workers.wake()

    # -- the scheduler thread -----------------------------------------------------------------

    def _schedule(self) -> None:
        try:
            if self._open():
                self._run_ticks()
        except GputopError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  thread boundary: else the screen would freeze without a word
            self._fail(GputopError(f"gputop stopped sampling: {error!r}", "This is a bug in gputop; please report it."))
        finally:
            if self._workers.end(CLOSE_DEADLINE_S):  # not under a call that is still in the driver
                self._source.close()

    def _deliver(self, callback: Callable[[_T], None], value: _T) -> None:
        try:
            callback(value)
        except Exception as error:
            cause = error.message if isinstance(error, GputopError) else repr(error)
            raise GputopError(
                f"gputop stopped sampling because it could not process the last sample: {cause}",
                (error.fix if isinstance(error, GputopError) else "")
                or "This is a bug in gputop, not in the driver; please report it.",
            ) from error

    def _fail(self, error: GputopError) -> None:
        self.failure = error
        self.first_gpus_ready.set()
        self._connected.wait()
        if not self._workers.stopping:
            self._on_error(error)

    def _open(self) -> bool:
        """Open the source; False if stopped before that was done."""
        workers = self._workers
        opening = workers.call(self._source.open)
        opening.prepare(workers.clock(), self._open_deadline_s)
        self._opener.submit(Batch([opening]))
        began_s = workers.clock()
        due_s: float | None = began_s + self._open_deadline_s
        while opening.pending:
            until_s = None if due_s is None else min(due_s, workers.clock() + 1.0)  # often: to see how late it wakes
            if not workers.receive(until_s) and until_s == due_s and not workers.stopping:
                if workers.starved_s(self._open_deadline_s) is not None:
                    due_s = workers.clock() + self._open_deadline_s
                    continue
                waited_s = workers.clock() - began_s
                self._fail(GputopError(
                    f"{self._source.label} does not respond: opening it has taken {waited_s:.0f} s so far.",
                    "Check whether `nvidia-smi` also hangs, and look for Xid errors in `dmesg`. If the driver is "
                    "hanging, reboot the node."))
                due_s = None
            if workers.stopping:
                return False
        if isinstance(opening.result, Exception):
            raise opening.result
        self._gpus = GpuReader(self._source.gpus, workers)
        return True

    def _run_ticks(self) -> None:
        workers = self._workers
        tick_s = workers.clock()
        while not workers.stopping:
            sample = self._tick()
            if workers.stopping:
                return
            if sample.interval_s is None:
                tick_s = self._last_s or tick_s  # after the wait for a connection
            self._deliver(self._on_sample, sample)
            if self._on_backfill is not None:
                self._deliver_backfill(self._on_backfill, sample.time_s, tick_s + self.interval_s)
            while (now_s := workers.clock()) < (due_s := tick_s + self.interval_s) and not workers.stopping:
                workers.receive(due_s)
            if workers.stopping:
                return
            tick_s = next_tick(tick_s, now_s, self.interval_s)

    def _deliver_backfill(self, callback: Callable[[Sequence[NodeSample]], None], time_s: float,
                          until_s: float) -> None:
        """Deliver the backfill as soon as it is there; waits for it until ``until_s``, the next tick, at most."""
        call = self._ask_for_backfill(time_s)
        self._workers.wait_for([call], until_s - self._workers.clock())
        if not call.pending and not self._workers.stopping:
            self._on_backfill = None
            self._deliver(callback, call.result if isinstance(call.result, tuple) else ())  # one that failed has none

    def _ask_for_backfill(self, time_s: float) -> Call:
        """The call of the samples of the time before ``time_s`` (Unix time). Only a simulated source has any, and
        computes them for a third of a second: sampling goes on meanwhile."""
        if self._backfill is None:
            call = self._backfill = self._workers.call(lambda: tuple(self._source.backfill(time_s, self.interval_s)))
            call.prepare(self._workers.clock(), 0.0)
            self._opener.submit(Batch([call]))
        return self._backfill

    def _tick(self) -> NodeSample:
        time_s, began_s = self._wall_clock(), self._workers.clock()
        interval_s = None if self._last_s is None else began_s - self._last_s
        own_cpu = self._own_cpu.ratio(began_s, time.process_time())
        self._last_s = began_s
        timeout_s = tick_timeout_s(None if interval_s is None else self.interval_s)

        gpus = self._gpus.read(time_s, timeout_s)
        if not self._connected.is_set():
            self.first_gpus = NodeSample(time_s, gpus, self._host.missing("not asked yet"), (), interval_s,
                                         self._source.label, self._source.simulated, own_cpu,
                                         self._source.gpus_present)
            self.first_gpus_ready.set()
            if self._source.simulated:  # whose past takes time to compute: the first whole screen has it
                self._ask_for_backfill(time_s)
            self._connected.wait()
            if not self._source.simulated and not self._workers.stopping:
                self._last_s = None
                return self._tick()
        host, processes = self._host.read(time_s, gpus, timeout_s)
        gpus = tuple(with_unified_memory(gpu, host) for gpu in gpus)
        return NodeSample(time_s, gpus, host, processes, interval_s, self._source.label, self._source.simulated,
                          own_cpu, self._source.gpus_present)


def with_unified_memory(gpu: GpuSample, host: HostSample) -> GpuSample:
    """The GPU with the host's memory, said to be that, where the two share one and the driver has no answer of the GPU:
    NVML's memory calls are not supported on GB10 and Jetson."""
    used, total = host["memory_used_bytes"].value, host["memory_total_bytes"].value
    if (gpu.state != OK or gpu["memory_used_bytes"].value is not None or used is None or total is None
            or not _UNIFIED.search(gpu.info.name)):
        return gpu
    shared = {name: Reading(value, BYTES, UNIFIED_MEMORY)
              for name, value in (("memory_used_bytes", used), ("memory_total_bytes", total))}
    return replace(gpu, readings={**gpu.readings, **shared})


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
