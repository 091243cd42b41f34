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
HANG_S = 1.0  # a call that takes longer than this is called hanging; the usual ones take microseconds
OPEN_DEADLINE_S = 15.0

_WAKE = object()  # a letter to the coordinator that only ends its waiting


class _Worker:
    """A thread that does one call at a time and posts ``(worker, result)`` to the mailbox."""

    def __init__(self, name: str, mailbox: queue.SimpleQueue[Any], clock: Callable[[], float]) -> None:
        self.started_s: float | None = None  # when the call under way began; None: idle
        self.late = False  # it missed its last deadline, so nobody waits for it until it is back
        self.result: Any = None  # the newest one not yet used
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
            try:
                result = call(*args)
            except Exception as error:  # noqa: BLE001  thread boundary: one broken probe must not end the others
                result = error
            self._mailbox.put((self, result))


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
        cpu_clock: Callable[[], float] = time.process_time,
        open_deadline_s: float = OPEN_DEADLINE_S,
    ) -> None:
        self._source = source
        self._interval_s = max(MIN_INTERVAL_S, interval_s)
        self._on_sample = on_sample
        self._on_error = on_error
        self._prefill = prefill
        self._clock = clock
        self._wall_clock = wall_clock
        self._cpu_clock = cpu_clock
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
            self._fail(GputopError(f"gputop stopped sampling: {error!r}", "This is a fault of gputop: please report it."))
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
                        f"The NVIDIA driver does not respond: opening it has taken {self._open_deadline_s:.0f} s so far.",
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
        while True:
            sample = self._tick(tick_s)
            if self._stopping or sample is None:
                return
            self._on_sample(sample)
            while not self._stopping:
                due_s = tick_s + self._interval_s
                if self._clock() >= due_s:
                    break
                self._receive(due_s)
            # Ticks keep to a raster; those that a slow consumer made us miss are left out.
            behind_s = self._clock() - due_s
            tick_s = due_s + max(0, math.floor(behind_s / self._interval_s)) * self._interval_s

    def _receive(self, until_s: float | None) -> bool:
        """Take one letter from the mailbox; False if none came until then (None: wait for ever)."""
        try:
            letter = self._mailbox.get(timeout=None if until_s is None else max(0.0, until_s - self._clock()))
        except queue.Empty:
            return False
        if letter is not _WAKE:
            worker, worker.result = letter
            worker.started_s = None
        return True

    def _await(self, workers: list[_Worker], until_s: float) -> None:
        while not self._stopping and any(worker.started_s is not None for worker in workers):
            if not self._receive(until_s):
                break
        for worker in workers:
            worker.late = worker.started_s is not None

    def _tick(self, tick_s: float) -> NodeSample | None:
        host = self._host
        assert host is not None
        time_s, began_s, cpu_s = self._wall_clock(), self._clock(), self._cpu_clock()
        allowed_s = min(MAX_DEADLINE_S, 0.8 * self._interval_s) if self._last_s is not None else FIRST_DEADLINE_S
        deadline_s = began_s + allowed_s
        waited_for: list[_Worker] = []
        for probe, worker in self._gpus:
            if worker.started_s is None:
                worker.order(probe.read, time_s)
                if not worker.late:
                    waited_for.append(worker)
        ...
        return None
