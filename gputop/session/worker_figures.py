"""The live figures of the workers of a job, as far as they run on this node: what to choose a few of many by."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from statistics import fmean

from msgspec.structs import replace

from gputop.core.metrics import GPU_METRICS
from gputop.core.samples import NodeSample, ProcessSample, Reading
from gputop.profiler.capture.choose_workers import Choice, choose_workers
from gputop.profiler.capture.records import Server
from gputop.telemetry.history import History
from gputop.text.units import ranges, reading

_WINDOW_S = 60.0  # some steps
# The first that most of those workers have. Power tells work from waiting where activity does not.
_METRICS = ("sm_active", "power_w", "gpu_util")


def choose(servers: Sequence[Server], sample: NodeSample | None, history: History | None) -> Choice:
    """The few of these workers that are worth a capture."""
    addresses = [server.address for server in servers]
    processes = _processes(servers, sample)
    if history is None or len(processes) < 3:
        return choose_workers(addresses, {})
    known = {metric: {address: value for address, process in processes.items()
                      if (value := _mean(history, sample, process, metric)) is not None} for metric in _METRICS}
    metric = max(_METRICS, key=lambda metric: len(known[metric]))  # of several the first
    unit = GPU_METRICS[metric].unit
    by = f"{GPU_METRICS[metric].label} of the last {_seen_s(history):.0f} s"
    choice = choose_workers(addresses, known[metric], by, lambda value: reading(Reading(value, unit)))
    gpus = {address: ranges(process.gpus, ", ") for address, process in processes.items() if process.gpus}
    return replace(choice, reasons=tuple(f"GPU {gpus[address]}: {why}" if address in gpus else why for address, why
                                         in zip(choice.chosen, choice.reasons, strict=True)))


def _seen_s(history: History) -> float:
    """What of the window there are samples of."""
    times = history.windows(_METRICS[0], _WINDOW_S)[0]
    return max(1.0, float(times[-1] - times[0])) if len(times) else _WINDOW_S


def _processes(servers: Sequence[Server], sample: NodeSample | None) -> dict[str, ProcessSample]:
    """By address the process of this node that holds GPUs."""
    by_pid = {pid: p for p in (sample.processes if sample is not None else ()) for pid in (p.pid, p.local_pid)}
    return {server.address: by_pid[server.pid] for server in servers if server.pid is not None and server.pid in by_pid}


def _mean(history: History, sample: NodeSample | None, process: ProcessSample, metric: str) -> float | None:
    """Over the process's GPUs; None where one of them has no readings."""
    uuids = [gpu.info.uuid for gpu in (sample.gpus if sample is not None else ()) if gpu.info.index in process.gpus]
    readings = [[v for v in history.window(uuid, metric, _WINDOW_S)[1] if v == v]
                for uuid in uuids if uuid in history.uuids]
    if not readings or not all(readings):
        return None
    return fmean(chain.from_iterable(readings))

