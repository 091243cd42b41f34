"""Reading the GPUs of a node, its host and the processes that hold GPUs, on threads, so that what hangs keeps nothing
else."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gputop.core.samples import FAILED, NOT_RESPONDING, OK, GpuProcess, GpuSample, HostSample, ProcessSample
from gputop.sources.base import GpuProbe, Source
from gputop.telemetry import deadline_calls
from gputop.telemetry.deadline_calls import Batch, Call, Worker, Workers

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
            if waited_s <= deadline_calls.HANG_TIMEOUT_S:
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
        from gputop.sources.host.gpu_processes import missing_process  # slow to import, not needed for the first GPUs

        held: dict[int, dict[int, GpuProcess]] = {}
        for gpu in gpus:
            for process in gpu.processes:
                held.setdefault(process.pid, {})[gpu.info.index] = process
        return tuple(missing_process(pid, on_gpus, _reason(result)) for pid, on_gpus in held.items())


def _reason(result: object) -> str:
    if isinstance(result, Exception):
        return f"could not be read: {result!r}"
    return "the host did not answer in time"
