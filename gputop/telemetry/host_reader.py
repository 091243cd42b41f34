"""Reading the host and the processes that hold GPUs, on one thread."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gputop.core.metrics import HOST_METRICS
from gputop.core.samples import GpuProcess, GpuSample, HostSample, ProcessSample, Reading
from gputop.sources.base import Source
from gputop.telemetry.deadline_calls import Batch, Workers


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
        return (self._host_sample(host.poll_or_last(host in awaited)),
                self._process_samples(processes.poll_or_last(processes in awaited and not host.pending), gpus))

    def missing(self, reason: str) -> HostSample:
        """A sample of the host without values."""
        return HostSample(self._hostname, {m.id: Reading.missing(m.unit, reason) for m in HOST_METRICS.values()})

    def _host_sample(self, result: object) -> HostSample:
        return result if isinstance(result, HostSample) else self.missing(_reason(result))

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
