"""The live figures of the workers of a job: what to choose a few of many by.

Those of workers on other nodes come from gputop there, which is asked by ssh, or from a Prometheus that knows the
nodes. Logging in on machines is for whoever asked for it: no node is asked without an option, a setting or a key.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from gputop.core.errors import GputopError, sentences
from gputop.core.metrics import GPU_METRICS
from gputop.core.samples import NodeSample, Reading
from gputop.profiler.capture.choose_workers import Choice, choose_workers
from gputop.profiler.capture.records import Server
from gputop.session.gpu_numbers import local
from gputop.session.options import FigureOptions, NodeMeans
from gputop.telemetry.history import History
from gputop.telemetry.node_answer import NodeAnswer, NodeGpu, answer_of
from gputop.text.units import ranges, reading

if TYPE_CHECKING:
    from gputop.telemetry.agents import NodeProblem

SECONDS = 5  # time that gputop on a node samples: some steps
_MAX_WAIT_S = 120.0  # longest wait for all nodes; 16 at once, that is some 250
_PROMETHEUS_S = 120  # window that a Prometheus is asked for: some scrapes
_POLL_S = 0.1
_MAX_NOTES = 6
_MAX_PLAUSIBLE = {"ratio": 1.05, "W": 1e5}  # what is more is no measurement of a GPU
_KINDS = {"util": "gpu_util"}  # of a Prometheus, by other names than a sample has
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
        with_pids = [server if server.pid is not None else replace(server, pid=asked.pids.get(server.address))
                     for server in servers]
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


def _of_this_node(servers: Sequence[Server], sample: NodeSample | None, history: History | None,
                  window_s: float) -> dict[str, WorkerFigures]:
    if history is None or sample is None:
        return {}
    host_pids = {pid: process.pid for process in sample.processes for pid in (process.pid, process.local_pid)}
    by_pid = _by_pid(answer_of(sample, history, window_s), _seen_s(history, window_s))
    return {server.address: by_pid[pid] for server in servers
            if server.pid is not None and (pid := host_pids.get(server.pid)) in by_pid}


def _seen_s(history: History, window_s: float) -> float:
    """Seconds of the window of which there are samples."""
    times = history.windows("sm_active", window_s)[0]
    return max(1.0, float(times[-1] - times[0])) if len(times) else window_s


# -- figures of other nodes -------------------------------------------------------------------------


def of_answer(answer: NodeAnswer) -> tuple[dict[int, WorkerFigures], WorkerFigures | None]:
    """Return the figures of a node's workers by the ports of their profiler servers, and those of its only process on
    GPUs, None where there are several or none."""
    pids: dict[int, set[int | None]] = {}
    for holder in (holder for gpu in answer.gpus for holder in gpu.holders):
        for port in holder.ports:
            pids.setdefault(port, set()).add(holder.pid)
    figures = _by_pid(answer, float(SECONDS))
    return ({port: figures[pid] for port, (pid, *more) in pids.items() if not more},
            next(iter(figures.values())) if len(figures) == 1 else None)


def _by_pid(answer: NodeAnswer, seconds: float) -> dict[int | None, WorkerFigures]:
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
        figures[pid] = WorkerFigures(means, seconds, ranges(numbers, ", "))
    return figures


def ask(servers: Sequence[Server], options: FigureOptions, stop: threading.Event,
        on_progress: Callable[[int, int], None] = lambda done, nodes: None) -> AskedFigures:
    """Ask as ``options`` say; blocks, until ``stop`` at the longest. ``on_progress`` as of :func:`by_ssh`."""
    if options.way == "ssh":
        return by_ssh(servers, options.remote_command, stop, on_progress)
    if options.way == "prometheus":
        return by_prometheus(servers, options.prometheus, stop)
    return AskedFigures({}, "", float(SECONDS), pids=_elsewhere(servers)[1])


def by_ssh(servers: Sequence[Server], command: str, stop: threading.Event,
           on_progress: Callable[[int, int], None] = lambda done, nodes: None) -> AskedFigures:
    """Ask gputop on the nodes of these workers, ``command`` there; blocks, until ``stop`` at the longest. Workers of
    this machine are left out. ``on_progress`` is told how many nodes have answered, and how many there are."""
    from gputop.profiler.addresses import split_address
    from gputop.telemetry.agents import SCHEMA, NodeProblem, Request, Ssh, by_cause, is_name

    others, pids = _elsewhere(servers)
    nodes: dict[str, list[Server]] = {}
    for server in others:
        nodes.setdefault(split_address(server.address)[0], []).append(server)
    names = [name for name in nodes if is_name(name)]
    problems = {name: NodeProblem("ssh does not accept this name", "") for name in nodes if not is_name(name)}
    if names:
        on_progress(0, len(names))
    answers: dict[str, NodeAnswer | NodeProblem] = {}
    until_s = time.monotonic() + _MAX_WAIT_S
    with contextlib.closing(Ssh(command, Request(SCHEMA, SECONDS, ports=True))) as ssh:
        ssh.ask(names)
        while len(answers) < len(names) and not stop.is_set() and time.monotonic() < until_s:
            if (taken := ssh.take(_POLL_S)) is not None:
                answers[taken[0]] = taken[1]
                on_progress(len(answers), len(names))
    figures: dict[str, WorkerFigures] = {}
    for name in names:
        answer = answers.get(name) or NodeProblem("it had not answered when gputop stopped waiting", "")
        if isinstance(answer, NodeProblem):
            problems[name] = answer
            continue
        by_port, only = of_answer(answer)
        for server in nodes[name]:
            worker = by_port.get(split_address(server.address)[1]) or (only if len(nodes[name]) == 1 else None)
            if worker is not None and worker.means:
                figures[server.address] = worker
            else:
                problems[server.address] = NodeProblem(
                    "gputop there finds no process on GPUs that serves this port, or several" if worker is None else
                    "its process holds no GPU that can be read", f"Try: ssh {name} {command} snapshot")
    notes = tuple(sentences(problem.message, problem.fix) for problem in by_cause(problems))
    if len(notes) > _MAX_NOTES:
        notes = (*notes[:_MAX_NOTES], f"{len(notes) - _MAX_NOTES} more causes are not listed here.")
    return AskedFigures(figures, "asked by ssh", SECONDS, pids=pids, notes=notes)


def by_prometheus(servers: Sequence[Server], prometheus: NodeMeans | None, stop: threading.Event) -> AskedFigures:
    """Ask a Prometheus for the nodes of these workers; blocks, until ``stop`` at the longest. It knows no processes:
    the figures are of all GPUs of a node."""
    from gputop.profiler.addresses import machine_name, short_name
    from gputop.telemetry.agents import NodeProblem, by_cause

    def ask(means_of: NodeMeans) -> None:
        try:
            came.append(means_of(_PROMETHEUS_S, warnings.append))
        except GputopError as error:
            came.append(error)
        except Exception as error:  # noqa: BLE001 - thread boundary
            came.append(GputopError(f"Prometheus's answer cannot be read ({type(error).__name__})"))

    if prometheus is None:
        return AskedFigures({}, "by Prometheus", float(_PROMETHEUS_S), of_nodes=True, notes=(
            "No address of Prometheus was given: --prometheus http://HOST:9090, or the setting prometheus.",))
    warnings: list[str] = []
    came: list[Mapping[str, Mapping[str, float]] | GputopError] = []
    asking = threading.Thread(target=ask, args=(prometheus,), name="gputop-prometheus", daemon=True)
    asking.start()
    while asking.is_alive() and not stop.is_set():
        asking.join(_POLL_S)
    answer = came[0] if came else GputopError("Prometheus had not answered when gputop stopped waiting")
    how, seconds = "by Prometheus", float(_PROMETHEUS_S)
    if isinstance(answer, GputopError):
        return AskedFigures({}, how, seconds, of_nodes=True, notes=(*warnings, answer.in_one_line))
    names: dict[str, str] = {}  # by host
    figures: dict[str, WorkerFigures] = {}
    for server in servers:
        host = server.address.rpartition(":")[0]
        name = names[host] = names.get(host) or short_name(machine_name(server.address))
        if name in answer:
            means = {_KINDS.get(kind, kind): mean for kind, mean in answer[name].items()}
            figures[server.address] = WorkerFigures(means, seconds)
    named = {names[address.rpartition(":")[0]] for address in figures}
    missing = [name for name in dict.fromkeys(names.values()) if name not in named]
    notes = tuple(sentences(problem.message) for problem in by_cause(dict.fromkeys(
        missing, NodeProblem("Prometheus has no GPU of such a node, or several nodes of that name"))))
    if len(named) < 3:  # the figures would not tell the workers of a node from each other
        figures = {}
        notes = (f"Prometheus has {len(named) or 'none'} of these workers' nodes: too few to compare.", *notes)
    return AskedFigures(figures, how, seconds, of_nodes=True, notes=(*warnings, *notes))


def _elsewhere(servers: Iterable[Server]) -> tuple[list[Server], dict[str, int]]:
    """Workers of other machines; and the processes of those of this one that were named, not found."""
    from gputop.profiler.addresses import is_local
    from gputop.profiler.capture.footprint import job_pid

    here: dict[str, bool] = {}  # by host: a name is looked up once
    elsewhere, pids = [], {}
    for server in servers:
        host = server.address.rpartition(":")[0]
        if host not in here:
            here[host] = server.pid is not None or is_local(server.address)
        if not here[host]:
            elsewhere.append(server)
        elif server.pid is None and (pid := job_pid(server.address, None)) is not None:
            pids[server.address] = pid
    return elsewhere, pids
