"""Calls that may hang, such as those that read GPUs and the host: threads of their own make them, and post to a queue
that they are done."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gputop.core.samples import FAILED, NOT_RESPONDING, OK, GpuSample, HostSample, ProcessSample
from gputop.sources.base import GpuProbe, Source

_WAKEUP = object()  # a message that only ends the scheduler's wait
MOST_LATE = 0.1  # of a wait: this thread wakes within milliseconds on a host with CPU to spare
HANG_TIMEOUT_S = 2.0  # a call that takes longer is reported as hanging; the usual ones take microseconds


class Batch:
    """Calls that a thread makes one after the other; where one of them hangs, another thread can make the rest."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self.waiting = deque(calls)  # not begun yet
        self.done: deque[tuple[Call, Any, float]] = deque()  # with its result and when it ended

    def run(self, clock: Callable[[], float]) -> None:
        """Make the calls that wait. May run on several threads at a time."""
        while True:
            try:
                call = self.waiting.popleft()
            except IndexError:
                return
            try:
                result = call.function(*call.args)
            except Exception as error:  # noqa: BLE001  thread boundary: one broken probe must not end the others
                result = error
            self.done.append((call, result, clock()))

    def collect(self) -> None:
        """Hand the results that are there to their calls; on the scheduler thread."""
        while self.done:
            call, result, ended_s = self.done.popleft()
            call.end(result, ended_s)


class Worker:
    """A thread that makes the calls of one batch after the other and posts ``(worker, batch)`` to ``results`` after
    each. It begins with the first batch. ``idle`` belongs to the scheduler thread."""

    def __init__(self, name: str, results: queue.SimpleQueue[Any], clock: Callable[[], float]) -> None:
        self.idle, self.asked_s = True, clock()
        self._requests: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._results = results
        self._clock = clock
        self._thread = threading.Thread(target=self._run, name=f"gputop-{name}", daemon=True)

    def submit(self, batch: Batch) -> None:
        self.idle, self.asked_s = False, self._clock()
        self._requests.put(batch)
        if self._thread.ident is None:
            self._thread.start()

    def stop(self) -> None:
        """End the thread after the requests that wait; returns at once."""
        self._requests.put(None)

    def _run(self) -> None:
        while (batch := self._requests.get()) is not None:
            batch.run(self._clock)
            self._results.put((self, batch))


class Call:
    """A call made again and again, never twice at a time. Only the scheduler thread writes it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.args: tuple[Any, ...] = ()  # of the pending one
        self.submitted_s: float | None = None  # when the pending one was submitted; None: none is pending
        self.duration_s = 0.0  # of the last finished one, from submission to result
        self.result: Any = None  # the newest result that was not polled yet; may be an exception
        self._last: Any = None  # the result that was polled last

    @property
    def pending(self) -> bool:
        return self.submitted_s is not None

    def prepare(self, now_s: float, timeout_s: float, *args: Any) -> bool:
        """Make it pending, for a worker to make it next; returns whether to wait up to ``timeout_s`` for its result."""
        if self.duration_s > HANG_TIMEOUT_S:
            self.result = None
            self.duration_s = 0.0
        self.submitted_s, self.args = now_s, args
        # A call that is always slow is shown one tick late; otherwise it would make every tick late.
        return self.duration_s <= timeout_s

    def end(self, result: Any, now_s: float) -> None:
        if self.submitted_s is not None:
            self.result, self.duration_s, self.submitted_s = result, now_s - self.submitted_s, None

    def poll(self) -> Any:
        """The newest result, once; None where there is none or its call hung."""
        result, self.result = self.result, None
        return None if self.duration_s > HANG_TIMEOUT_S else result

    def poll_or_last(self, awaited: bool) -> Any:
        """Poll as :meth:`poll`; where the tick did not wait, the last result stands in for one tick.

        So a call that always takes longer than the tick's timeout is shown at every tick, one tick late.
        """
        result = self.poll()
        if result is None and not awaited:
            result, self._last = self._last, None
        else:
            self._last = result
        return result


class Workers:
    """The threads and the calls of one scheduler thread, which receives here what they have done.

    Only :meth:`wake` and :meth:`stop` may be called on another thread. ``stopping``: :meth:`wait_for` no longer waits.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.stopping = False
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._workers: list[Worker] = []
        self._calls: list[Call] = []
        self._late: deque[tuple[float, float]] = deque(maxlen=256)  # when a wait ended late, by how many seconds

    def worker(self, name: str) -> Worker:
        self._workers.append(Worker(name, self._results, self.clock))
        return self._workers[-1]

    def dismiss(self, worker: Worker) -> None:
        """End a thread, after what it does."""
        self._workers.remove(worker)
        worker.stop()

    def call(self, function: Callable[..., Any]) -> Call:
        self._calls.append(Call(function))
        return self._calls[-1]

    def receive(self, until_s: float | None) -> bool:
        """Receive the results of one batch; False if none came by ``until_s`` (monotonic; None: wait forever)."""
        try:
            message = self._results.get(timeout=None if until_s is None else max(0.0, until_s - self.clock()))
        except queue.Empty:
            if until_s is not None and (now_s := self.clock()) > until_s:
                self._late.append((now_s, now_s - until_s))
            return False
        if message is not _WAKEUP:
            worker, batch = message
            worker.idle = True
            batch.collect()
        return True

    def starved_s(self, waited_s: float) -> float | None:
        """Seconds of the last ``waited_s`` in which gputop itself got no CPU; None where it got enough for a call that
        has not ended to be the driver's fault.

        What is seen is how late this thread was woken, which other threads of a starved process are at least."""
        late_s = min(waited_s, sum(late for when, late in self._late if when >= self.clock() - waited_s))
        return late_s if late_s > MOST_LATE * waited_s else None

    def wait_for(self, calls: Sequence[Call], timeout_s: float) -> None:
        """Receive results until none of ``calls`` is pending, at most for ``timeout_s``."""
        until_s = self.clock() + timeout_s
        while not self.stopping and any(call.pending for call in calls):
            if not self.receive(until_s):
                return

    def wake(self) -> None:
        """End the wait that is under way in :meth:`receive`."""
        self._results.put(_WAKEUP)

    def stop(self) -> None:
        self.stopping = True
        self.wake()

    def end(self, timeout_s: float) -> bool:
        """End the threads; returns whether none was in a call any longer after ``timeout_s`` at most.

        The stop may have come in the middle of a tick, just before the last results.
        """
        for worker in self._workers:
            worker.stop()
        until_s = self.clock() + timeout_s
        while any(call.pending for call in self._calls):
            if not self.receive(until_s):
                return False
        return True


# -- the GPUs, the host and the processes of a node -------------------------------------------------

# A GPU that takes longer is left to its thread, and another thread reads the next ones. GPUs that answer at once are
# all read by one: threads that compete for the interpreter switch at every driver call, and to wake one for each GPU
# takes as long as to read it.
STAGGER_S = 0.002
_SPARE_S = 60.0  # without work, after which a thread more than one ends: each has a stack and a heap of its own


class GpuReader:
    """One call for each of ``probes``, and as many ``threads`` as GPUs were slow to answer at a time of late."""

    def __init__(self, probes: Sequence[GpuProbe], workers: Workers) -> None:
        self._workers = workers
        self._calls = [(probe, workers.call(probe.read)) for probe in probes]
        self.threads: list[Worker] = []

    def read(self, time_s: float, timeout_s: float) -> tuple[GpuSample, ...]:
        """Read the GPUs for the tick at ``time_s`` (Unix time); wait up to ``timeout_s`` for those that are not always
        slow. A GPU that has not answered has a sample without values, which says why."""
        workers, awaited = self._workers, []
        for _, call in self._calls:
            if call.pending:
                continue  # still in the call of an earlier tick
            if call.prepare(workers.clock(), timeout_s, time_s):
                awaited.append(call)
            else:
                self._thread().submit(Batch([call]))
        batch, until_s = Batch(awaited), workers.clock() + timeout_s
        while batch.waiting and not workers.stopping:
            self._thread().submit(batch)
            ended, starved = -1, False
            while batch.waiting and (ended != len(batch.done) or (starved and workers.clock() < until_s)):
                ended, begun_s = len(batch.done), workers.clock()
                workers.receive(begun_s + STAGGER_S)
                # Woken so late itself, gputop has no CPU to spare: another thread would get none either.
                starved = workers.clock() - begun_s > 2 * STAGGER_S
        workers.wait_for(awaited, timeout_s)
        batch.collect()  # those before one that hangs
        if len(self.threads) > 1 and workers.clock() - self.threads[-1].asked_s > _SPARE_S:
            workers.dismiss(self.threads.pop())
        return tuple(self._sample(probe, call) for probe, call in self._calls)

    def _thread(self) -> Worker:
        """A thread that is in no call; one more is made if there is none."""
        for thread in self.threads:
            if thread.idle:
                return thread
        self.threads.append(self._workers.worker(f"gpu{len(self.threads)}"))
        return self.threads[-1]

    def _sample(self, probe: GpuProbe, call: Call) -> GpuSample:
        result = call.poll()
        if isinstance(result, GpuSample):
            return result
        info = probe.info
        if isinstance(result, Exception):
            state = FAILED
            message = f"GPU {info.index} could not be read: {result!r}. This is a bug in gputop; please report it."
        else:
            waited_s = call.duration_s if call.submitted_s is None else self._workers.clock() - call.submitted_s
            if waited_s <= HANG_TIMEOUT_S:
                state, message = OK, f"no value in this sample: the driver has taken {waited_s:.1f} s so far"
            elif (starved_s := self._workers.starved_s(waited_s)) is not None:
                state = OK
                message = (f"no value for {waited_s:.0f} s; for {starved_s:.0f} s of this, gputop got no CPU because "
                           "the host is overloaded")
            else:
                state = NOT_RESPONDING
                message = (
                    f"GPU {info.index} does not respond: a driver call has hung for {waited_s:.0f} s. Look for Xid "
                    "errors in `dmesg`. If the GPU does not respond again, stop the jobs on this node and reboot it."
                )
        xids, xids_reason = probe.xids()
        return GpuSample(info, {}, processes_reason=message, clock_events_reason=message, state=state, message=message,
                         xids=xids, xids_reason=xids_reason)


class HostReader:
    """Two calls, the host and then its processes, neither of which delays a tick beyond its timeout."""

    def __init__(self, source: Source, workers: Workers) -> None:
        self._source = source
        self._workers = workers
        self._thread = workers.worker("host")
        self._host = workers.call(self._read_host)
        self._processes = workers.call(self._read_processes)
        self._hostname = "" if source.simulated else os.uname().nodename  # until the host itself says it

    # source.host is first accessed on the host's thread, because the access may import modules.
    def _read_host(self, now_s: float) -> HostSample:
        return self._source.host.read(now_s)

    def _read_processes(self, now_s: float, gpus: Sequence[GpuSample]) -> tuple[ProcessSample, ...]:
        return self._source.host.processes(now_s, gpus)

    def read(self, time_s: float, gpus: tuple[GpuSample, ...],
             timeout_s: float) -> tuple[HostSample, tuple[ProcessSample, ...]]:
        """Read the host, and the processes on ``gpus``, for the tick at ``time_s`` (Unix time); wait up to
        ``timeout_s`` for what is not always slow."""
        host, processes, workers = self._host, self._processes, self._workers
        now_s = workers.clock()
        ready = [(call, args) for call, args in ((host, (time_s,)), (processes, (time_s, gpus))) if not call.pending]
        awaited = [call for call, args in ready if call.prepare(now_s, timeout_s, *args)]
        batch = Batch(awaited)
        if awaited:
            self._thread.submit(batch)
        for call, _ in ready:
            if call not in awaited:
                self._thread.submit(Batch([call]))
        for call in awaited:
            if not host.pending or call is host:  # processes behind a host that hangs are not waited for
                workers.wait_for([call], timeout_s)
                batch.collect()  # what it made before a call that hangs
        sample = host.poll_or_last(host in awaited)
        return (sample if isinstance(sample, HostSample) else self.missing(_reason(sample)),
                self._process_samples(processes.poll_or_last(processes in awaited and not host.pending), gpus))

    def missing(self, reason: str) -> HostSample:
        return HostSample.missing(self._hostname, reason)

    def _process_samples(self, result: object, gpus: tuple[GpuSample, ...]) -> tuple[ProcessSample, ...]:
        if isinstance(result, tuple):
            return result
        # Slow to import, and not needed for the first GPUs.
        from gputop.sources.host.gpu_processes import holders, missing_process

        return tuple(missing_process(pid, on_gpus, _reason(result)) for pid, on_gpus in holders(gpus).items())


def _reason(result: object) -> str:
    if isinstance(result, Exception):
        return f"could not be read: {result!r}"
    return "the host did not answer in time"
