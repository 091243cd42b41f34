"""The live figures of the workers of a job: what to choose a few of many by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import fmean

from msgspec import Struct, field
from msgspec.structs import replace

from gputop.core.metrics import GPU_METRICS
from gputop.core.samples import GpuSample, NodeSample, ProcessSample, Reading
from gputop.profiler.capture.choose_workers import Choice, choose_workers
from gputop.profiler.capture.records import Server
from gputop.session.gpu_numbers import local
from gputop.telemetry.history import History
from gputop.text.units import ranges, reading

_WINDOW_S = 60.0  # some steps
# The first that most of those workers have. Power tells work from waiting where activity does not.
METRICS = ("sm_active", "power_w", "gr_active", "gpu_util")


class WorkerFigures(Struct, frozen=True):
    """Mean by metric over the GPUs of a worker and the last ``seconds``; ``gpus`` are their numbers there."""

    means: Mapping[str, float]
    seconds: float
    gpus: str = ""


class AskedFigures(Struct, frozen=True):
    """Answers of the workers' nodes, or of a Prometheus, by address. ``how``: "asked by ssh"; "" where nobody was
    asked.

    ``of_nodes``: the figures are of all GPUs of a worker's node. ``pids``: of workers of this machine that were named,
    not found. ``notes`` say why workers have no figure.
    """

    by_address: Mapping[str, WorkerFigures]
    how: str
    seconds: float  # that each was asked for
    of_nodes: bool = False
    pids: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def choose(servers: Sequence[Server], sample: NodeSample | None, history: History | None,
           asked: AskedFigures | None = None) -> Choice:
    """The few of these workers that are worth a capture, by the samples of this node and what was ``asked``."""
    addresses = [server.address for server in servers]
    was_asked = asked is not None and asked.how != ""
    figures: Mapping[str, WorkerFigures]
    if asked is None:
        figures = _of_this_node(servers, sample, history, _WINDOW_S)
    elif asked.of_nodes:
        figures = asked.by_address  # the figures of single processes cannot be compared with these
    else:
        with_pids = [_with_pid(server, asked.pids) for server in servers]
        figures = {**asked.by_address, **_of_this_node(with_pids, sample, history, asked.seconds)}
    metric = max(METRICS, key=lambda metric: sum(metric in worker.means for worker in figures.values()))
    chosen_from = {address: worker for address, worker in figures.items() if metric in worker.means}
    unit = GPU_METRICS[metric].unit
    by = f"{GPU_METRICS[metric].label} of "
    if asked is not None and asked.of_nodes:
        by += "their nodes in "
    by += f"the last {max((worker.seconds for worker in chosen_from.values()), default=1.0):.0f} s"
    choice = choose_workers(addresses, {address: worker.means[metric] for address, worker in chosen_from.items()},
                            f"{by}, {asked.how}" if asked is not None and asked.by_address else by,
                            lambda value: reading(Reading(value, unit)),
                            *(["fewer than three of them have live figures"] if was_asked else []))
    gpus = {address: worker.gpus for address, worker in chosen_from.items() if worker.gpus}
    reasons = tuple(f"GPU {gpus[address]}: {reason}" if address in gpus else reason
                    for address, reason in zip(choice.chosen, choice.reasons, strict=True))
    here = asked.pids if asked is not None else {}
    return replace(choice, reasons=reasons, notes=asked.notes if asked is not None else (),
                   others_unasked=not was_asked and any(elsewhere(s) and s.address not in here for s in servers))


def elsewhere(server: Server) -> bool:
    """Return whether a worker may be on another node, by its address alone."""
    return not local(server) and not server.address.startswith("unix")


def gpus_of(process: ProcessSample, gpus: Sequence[GpuSample]) -> list[GpuSample]:
    """The GPUs, or MIG instances, that a process holds."""
    return [gpu for gpu in gpus if (held := process.gpus.get(gpu.info.index)) is not None and held.mig == gpu.info.mig]


def _with_pid(server: Server, pids: Mapping[str, int]) -> Server:
    return server if server.pid is not None else replace(server, pid=pids.get(server.address))


def _of_this_node(servers: Sequence[Server], sample: NodeSample | None, history: History | None,
                  window_s: float) -> dict[str, WorkerFigures]:
    if history is None or sample is None:
        return {}
    by_pid = {pid: process for process in sample.processes for pid in (process.pid, process.local_pid)}
    figures = {}
    for server in servers:
        process = by_pid.get(server.pid) if server.pid is not None else None
        if process is not None:
            uuids = [gpu.info.uuid for gpu in gpus_of(process, sample.gpus)]
            means = {metric: _mean(history, uuids, metric, window_s) for metric in METRICS}
            figures[server.address] = WorkerFigures({m: mean for m, mean in means.items() if mean is not None},
                                                    _seen_s(history, window_s), ranges(process.gpus, ", "))
    return figures


def _seen_s(history: History, window_s: float) -> float:
    """Seconds of the window of which there are samples."""
    times = history.windows("sm_active", window_s)[0]
    return max(1.0, float(times[-1] - times[0])) if len(times) else window_s


def _mean(history: History, uuids: Sequence[str], metric: str, window_s: float) -> float | None:
    """Mean over these GPUs; None where one of them has no readings."""
    if not GPU_METRICS[metric].lane:
        return None
    readings = [[v for v in history.window(uuid, metric, window_s)[1] if v == v] for uuid in uuids
                if uuid in history.uuids]
    if not readings or not all(readings):
        return None
    return fmean(chain.from_iterable(readings))
