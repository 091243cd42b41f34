"""The live figures of the workers of a job on this node: what to choose a few of many by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from msgspec import Struct
from msgspec.structs import replace

from gputop.core.metrics import GPU_METRICS
from gputop.core.samples import NodeSample, Reading
from gputop.profiler.addresses import is_local
from gputop.profiler.capture.choose_workers import Choice, choose_workers
from gputop.profiler.capture.records import Server
from gputop.session.gpu_numbers import local
from gputop.telemetry.agents import NodeAnswer, NodeGpu, answer_of
from gputop.telemetry.history import History
from gputop.text.units import ranges, reading

_MAX_PLAUSIBLE = {"ratio": 1.05, "W": 1e5}  # what is more is no measurement of a GPU
_WINDOW_S = 60.0  # some steps
# The first that most of those workers have. Power tells work from waiting where activity does not.
METRICS = ("sm_active", "power_w", "gr_active", "gpu_util")


class WorkerFigures(Struct, frozen=True):
    """Mean by metric over the GPUs of a worker and the last seconds; ``gpus`` are their numbers there."""

    means: Mapping[str, float]
    gpus: str = ""


def choose(servers: Sequence[Server], sample: NodeSample | None, history: History | None) -> Choice:
    """The few of these workers that are worth a capture, by the samples of this node."""
    seconds, figures = _of_this_node(servers, sample, history)
    metric = max(METRICS, key=lambda metric: sum(metric in worker.means for worker in figures.values()))
    chosen_from = {address: worker for address, worker in figures.items() if metric in worker.means}
    unit = GPU_METRICS[metric].unit
    choice = choose_workers([server.address for server in servers],
                            {address: worker.means[metric] for address, worker in chosen_from.items()},
                            f"{GPU_METRICS[metric].label} in the last {seconds:.0f} s",
                            lambda value: reading(Reading(value, unit)))
    gpus = {address: worker.gpus for address, worker in chosen_from.items() if worker.gpus}
    return replace(choice, reasons=tuple(
        f"GPU {gpus[address]}: {reason}" if address in gpus else reason
        for address, reason in zip(choice.chosen, choice.reasons, strict=True)))


def elsewhere(server: Server) -> bool:
    """Return whether a worker may be on another node, by its address alone."""
    return not local(server) and not server.address.startswith("unix")


def _of_this_node(servers: Sequence[Server], sample: NodeSample | None,
                  history: History | None) -> tuple[float, dict[str, WorkerFigures]]:
    """The figures by address, and over how many seconds."""
    if history is None or sample is None:
        return _WINDOW_S, {}
    host_pids = {pid: process.pid for process in sample.processes for pid in (process.pid, process.local_pid)}
    times = history.windows("sm_active", _WINDOW_S)[0]
    seen_s = max(1.0, float(times[-1] - times[0])) if len(times) else _WINDOW_S
    by_pid = _by_pid(answer_of(sample, history, _WINDOW_S))
    return seen_s, {server.address: by_pid[pid] for server in servers
                    if server.pid is not None and (pid := host_pids.get(server.pid)) in by_pid}


def _by_pid(answer: NodeAnswer) -> dict[int | None, WorkerFigures]:
    """Means over the GPUs of each process; a metric that one of them lacks is missing."""
    gpus: dict[int | None, list[NodeGpu]] = {}
    for gpu in answer.gpus:
        for holder in gpu.holders:
            gpus.setdefault(holder.pid, []).append(gpu)
    figures = {}
    for pid, held in gpus.items():
        means = {}
        for metric in METRICS:
            most = _MAX_PLAUSIBLE[GPU_METRICS[metric].unit]
            plausible = [mean for gpu in held if 0.0 <= (mean := gpu.figures.get(metric, -1.0)) <= most]
            if len(plausible) == len(held):
                means[metric] = fmean(plausible)
        numbers = {int(number) for gpu in held if (number := gpu.label.partition(":")[0]).isdecimal()}
        figures[pid] = WorkerFigures(means, ranges(numbers, ", "))
    return figures


def with_pids(servers: Iterable[Server]) -> list[Server]:
    """The servers, with the processes of those of this machine that were named, not found."""
    from gputop.profiler.capture.job_memory import job_pid

    here: dict[str, bool] = {}  # by host: a name is looked up once
    out = []
    for server in servers:
        host = server.address.rpartition(":")[0]
        if host not in here:
            here[host] = server.pid is None and is_local(server.address)
        out.append(replace(server, pid=job_pid(server.address, None)) if here[host] and server.pid is None else server)
    return out
