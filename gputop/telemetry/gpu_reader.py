"""Reading the GPUs of a node on threads, so that one that hangs keeps none of the others."""

from __future__ import annotations

from collections.abc import Sequence

from gputop.core.samples import FAILED, NOT_RESPONDING, OK, GpuSample
from gputop.sources.base import GpuProbe
from gputop.telemetry import deadline_calls
from gputop.telemetry.deadline_calls import Batch, Call, Worker, Workers

# A GPU that takes longer is left to its thread, and another thread reads the next ones. GPUs that answer at once are
# all read by one: threads that compete for the interpreter switch at every driver call, and to wake one for each GPU
# takes as long as to read it.
STAGGER_S = 0.002


class GpuReader:
    """One call for each of ``probes``, and as many ``threads`` as GPUs were slow to answer at a time."""

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
        batch = Batch(awaited)
        while batch.waiting and not workers.stopping:
            self._thread().submit(batch)
            ended = -1
            while batch.waiting and ended != (ended := len(batch.done)):
                workers.receive(workers.clock() + STAGGER_S)
        workers.wait_for(awaited, timeout_s)
        batch.collect()  # those before one that hangs
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
            message = f"GPU {info.index} could not be read: {result!r}. This is a bug in gputop: please report it."
        else:
            waited_s = call.duration_s if call.submitted_s is None else self._workers.clock() - call.submitted_s
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
