"""Captures, from a profiler server to a record on disk with its findings; used by the monitor and headless.

Plain functions: whoever calls them brings the thread they may block.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from gputop.core.errors import EXIT_USAGE, GputopError, NoDataError
from gputop.profiler.capture.choose_workers import MAX_ALL_WORKERS
from gputop.profiler.capture.records import CaptureRecord, CaptureStatus, Server, usable
from gputop.profiler.capture.request import CaptureQuestion, CaptureRequest, ask_other_user, ask_risk
from gputop.session.stack_watch import OWN_STACKS, StackChoice, StackWatch
from gputop.text.commands import command_of
from gputop.text.redaction import command

if TYPE_CHECKING:
    from gputop.core.captured_samples import GpuCounters, JobCpus, LiveSteps
    from gputop.core.host_stacks import StackSamples
    from gputop.diagnosis.worker import AnalysisAhead
    from gputop.profiler.capture.outcomes import MultiWorkerCapture
    from gputop.profiler.capture.plan import Plan
    from gputop.profiler.discovery import ProfilerServer
    from gputop.profiler.kineto.guard import ProfilesItself
    from gputop.profiler.recording import Progress, Recorder
    from gputop.session.other_nodes import OtherNodes

# What was sampled of the GPUs of an analyzed capture of these servers.
Counters = Callable[[CaptureRecord, Sequence[Server]], "GpuCounters"]

# A named server that does not answer may be starting, or a loaded machine slow.
ATTEMPTS, RETRY_DELAY_S = 3, 0.5
_MAX_NAMED = 5  # other servers that are named
ATTACHED = "attached"  # the description of a server of which only the address is known
HOW_TO_SERVE = (
    "To record a running TensorFlow, JAX or PyTorch job: gputop capture PID. To start a job ready for captures: gputop "
    "run -- python train.py. To start a server in your code: tf.profiler.experimental.server.start(6009) or "
    "jax.profiler.start_server(6009). For a job on another machine: gputop --attach HOST:PORT."
)


class FoundServers(NamedTuple):
    """The servers a capture can go to, those asked for first, and what could not be looked at. ``unprotected``: the
    PIDs of jobs whose profiler any local user can command; None: nobody looked."""

    servers: tuple[Server, ...]
    notes: tuple[str, ...] = ()
    unprotected: tuple[int, ...] | None = None


def find_servers(attached: Sequence[str], endpoints: Mapping[str, str], discover: bool,
                 busy: Collection[str] = ()) -> FoundServers:
    """Look once for servers. ``endpoints`` are servers the source itself brings; ``busy`` are addresses that are being
    captured from, which must not be probed meanwhile."""
    from gputop.core.proc import started_s
    from gputop.profiler.addresses import parse_address
    from gputop.profiler.ways import check as check_address

    listed, notes, unprotected = _listed_servers(attached, discover)
    discovered: dict[str, Server] = {a: Server(a, text) for a, text in endpoints.items()}
    discovered |= {s.address: Server(s.address, s.about(), s.pid, owner=s.owner_if_other, user=s.user or "",
                                     started_s=started_s(s.pid)) for s in listed}

    def check(text: str) -> Server:
        try:
            address = parse_address(text)
        except GputopError as error:
            return Server(text, problem=error.message, asked=True)
        if address in discovered:
            return replace(discovered[address], asked=True)
        try:
            if address not in busy:
                check_address(address, timeout_s=2.0)
        except GputopError as error:
            return Server(address, problem=error.message, asked=True)
        return Server(address, ATTACHED, asked=True)

    if len(attached) > 1:  # those that are down must not add up
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(min(32, len(attached)), "gputop-servers") as threads:
            checked = {s.address: s for s in threads.map(check, attached)}
    else:
        checked = {s.address: s for s in map(check, attached)}
    return FoundServers(tuple((checked | {a: s for a, s in discovered.items() if a not in checked}).values()), notes,
                        unprotected)


def _listed_servers(attached: Sequence[str], discover: bool,
                    ) -> tuple[list[ProfilerServer], tuple[str, ...], tuple[int, ...] | None]:
    """Servers of this node's processes, notes on the search, and PIDs whose profiler any local user can command (None:
    nobody looked)."""
    from gputop.profiler.addresses import process_of

    if not discover and not any(process_of(text) is not None for text in attached):
        return [], (), None
    from gputop.profiler.kineto.jobs import find_jobs

    jobs = find_jobs()
    if not discover:
        return [server for server in jobs.servers if server.address in attached], (), None
    from gputop.profiler.discovery import find_servers as discover_servers
    from gputop.profiler.kineto.recorder import unsafe

    discovery = discover_servers(None)
    notes = (*discovery.notes, *(unsafe(pid).in_one_line for pid in jobs.unprotected))
    return [*discovery.servers, *jobs.servers], notes, jobs.unprotected


def find_named_servers(attached: Sequence[str], endpoints: Mapping[str, str], discover: bool,
                       wait: Callable[[float], object] = time.sleep) -> FoundServers:
    """Do :func:`find_servers`, but look again within a second for named servers that do not answer at once."""
    servers = find_servers(attached, endpoints, discover)
    for _ in range(ATTEMPTS - 1):
        if all(s.problem is None for s in servers.servers if s.asked):
            break
        wait(RETRY_DELAY_S)
        servers = find_servers(attached, endpoints, discover)
    return servers


class EarlierCaptures(Struct, frozen=True):
    """Captures that a logdir holds already: the number of runs, and the scripts of the jobs of this user's newest."""

    count: int = 0
    scripts: frozenset[str] = frozenset()


def earlier_captures(logdir: Path) -> EarlierCaptures:
    """Look for runs in a logdir by TensorBoard's layout; no trace is read. Blocks as long as its file system does."""
    from gputop.core.files import Folder

    try:
        with Folder(logdir.expanduser().absolute() / "plugins" / "profile") as profiles:
            count = len(profiles.names())
    except (OSError, RuntimeError):  # none yet, or a home that is not known
        return EarlierCaptures()
    from gputop.session.capture.saved_captures import captured_scripts

    return EarlierCaptures(count, captured_scripts(logdir))


def job_of(servers: Sequence[Server]) -> str:
    """The command line of the job that is captured, its secrets hidden; empty where only addresses are known."""
    return next((command(s.description) for s in servers if s.description not in ("", ATTACHED)), "")


def of_job(record: CaptureRecord, servers: Sequence[Server]) -> CaptureRecord:
    """The record with the job that these captured servers are of."""
    first = servers[0]
    return replace(record, job=job_of(servers), pid=first.pid, started_s=first.started_s)


def too_many(count: int) -> GputopError:
    return GputopError(f"gputop can capture at most {MAX_ALL_WORKERS} workers at once, not {count}",
                       "Name the workers to capture: --attach n[01-08]:6009.", EXIT_USAGE)


def choose_servers(servers: Iterable[Server]) -> tuple[Server, ...]:
    """The servers to capture from: all that the user named, or else the first that was found of gputop's own user.

    Named servers that do not answer are included, with their ``problem``. Raises NoDataError with cause and fix where
    none answers. Where only those of other users do, it returns one of these, see :func:`server_question`. A server
    that was found never replaces a named one: a capture slows its job down.
    """
    servers = tuple(servers)
    asked = tuple(s for s in servers if s.asked)
    answering = usable(servers)
    if asked and answering:
        return asked
    if answering:
        return (next((s for s in answering if not s.owner), answering[0]),)
    if servers:
        first = (asked or servers)[0]
        raise NoDataError(f"no profiler server at {first.address}: {first.problem}", HOW_TO_SERVE)
    raise NoDataError("no profiler server found on this node", HOW_TO_SERVE)


def left_out(servers: Iterable[Server], chosen: Sequence[Server], *, job_chosen: bool = False) -> str:
    """Line that names the other workers and, unless the user chose the job, the other jobs of this user that were found
    and not captured; empty where the servers were named."""
    if any(s.asked for s in chosen):
        return ""
    others = [s for s in servers if s.problem is None and not s.owner and s not in chosen]
    script = command_of(chosen[0].description)
    workers = [s.address for s in others if script and command_of(s.description) == script]
    jobs = {} if job_chosen else {command_of(s.description) or s.address: s.address for s in others
                                  if s.address not in workers}
    return " ".join(f"{len(addresses)} {what.format('' if len(addresses) == 1 else 's')} "
                    f"{'was' if len(addresses) == 1 else 'were'} not captured: {', '.join(addresses[:_MAX_NAMED])}"
                    f"{', …' if len(addresses) > _MAX_NAMED else ''}; {hint}."
                    for addresses, what, hint in (
                        (workers, "other worker{} of this job", "to capture several, use --attach"),
                        (list(jobs.values()), "other job{} with a profiler server", "to capture another, use --attach"))
                    if addresses)


def servers_label(servers: Sequence[Server]) -> str:
    """A short name for several servers: "a:6009 and 3 more"."""
    more = len(servers) - 1
    return servers[0].address + (f" and {more} more" if more else "")


def _pids(servers: Iterable[Server]) -> dict[str, int | None]:
    """PIDs by address, as far as they are of this node."""
    from gputop.profiler.capture.job_memory import job_pid

    return {s.address: job_pid(s.address, s.pid) for s in servers}


def server_question(chosen: Sequence[Server], request: CaptureRequest) -> CaptureQuestion | None:
    """Question whether to capture from a server of another user that nobody named; None: none is among them."""
    others = [s for s in chosen if s.owner and not s.asked]
    return ask_other_user(request, others[0]) if others else None


def risk_question(servers: Iterable[Server], request: CaptureRequest) -> CaptureQuestion | None:
    """Question whether to take the risk, where a capture is known to end such jobs. Blocks a little."""
    from gputop.profiler.discovery import crash_risk

    if request.accept_risk:
        return None
    risk = crash_risk([pid for pid in _pids(s for s in servers if s.problem is None).values() if pid is not None])
    return None if risk is None else ask_risk(request, risk)


class CaptureRun(Struct, frozen=True):
    """Context of a capture besides the request: ``stop`` ends the recording early and keeps its data, ``closing`` gives
    up the analysis. ``stacks``: whose Python stacks are sampled meanwhile. ``counters`` and ``live_steps``: what is
    known of the job's GPUs and of its step period. ``other_nodes`` records the job's ranks there. ``attached``: the
    processes that gputop may do more to than ask their servers, as somebody agreed to."""

    stop: threading.Event
    closing: threading.Event
    on_status: Callable[[CaptureStatus], None]
    stacks: StackChoice = OWN_STACKS
    counters: Counters | None = None
    live_steps: LiveSteps | None = None
    other_nodes: OtherNodes | None = None
    attached: Collection[int] = ()


def _capture_workers(servers: Sequence[Server], recorders: Sequence[Recorder], request: CaptureRequest, run: CaptureRun,
                     on_progress: Callable[[Progress], None], on_plan: Callable[[Plan], None],
                     ) -> tuple[MultiWorkerCapture, tuple[str, ...]]:
    """Capture all workers of a job at once, on other nodes as well, and say which took no part."""
    from gputop.profiler.capture.multi_worker import capture_workers

    missing = tuple(f"not captured: {s.address}: {s.problem}" for s in servers if s.problem is not None)
    others = run.other_nodes
    if others is None:
        return capture_workers(recorders, request, on_progress, on_plan, run.stop), missing
    with others.running(request):
        captured = capture_workers(recorders, request, on_progress, on_plan, run.stop, others.agree)
        outcomes, not_reached = others.collect(captured.run_dir)
    return replace(captured, outcomes=(*captured.outcomes, *outcomes)), (*missing, *not_reached)


def _capture_one(recorder: Recorder, request: CaptureRequest, run: CaptureRun, on_progress: Callable[[Progress], None],
                 on_plan: Callable[[Plan], None]) -> CaptureRecord:
    """The record of a capture, not analyzed yet. Raises GputopError."""
    from gputop.profiler.capture.safe_capture import capture_with_probe

    result, plan, cost = capture_with_probe(recorder, request, on_progress, on_plan, run.stop)
    return CaptureRecord(recorder.address, result.path, time.time(), request.seconds, cost.call_s,
                         (*result.errors, *result.warnings), plan=plan, cost=cost)


# What a job may keep of a capture: having it returned takes a tenth of a second of its main thread.
_MAX_KEPT_BYTES = 256 << 20


def capture_and_analyze(servers: Sequence[Server], request: CaptureRequest, run: CaptureRun) -> CaptureRecord:
    """Capture, save and analyze; blocks. Whoever calls this has asked :func:`risk_question` first.

    Several servers are captured at once, as the workers of one job; those with a ``problem`` are named as missing.
    Raises GputopError where there is no trace to keep. A trace that cannot be analyzed is a record with its
    ``problem``: the file is safe on disk.
    """
    from gputop.diagnosis.worker import AnalysisAhead
    from gputop.profiler.stale_files import remove_stale_files
    from gputop.profiler.ways import recorder_of
    from gputop.session.cpu_watch import JobCpusWatch

    asked_s, began_s = request.seconds, time.time()
    answering = [s for s in servers if s.problem is None]
    name = servers_label(answering)
    pids = _pids(answering)
    remove_stale_files(request.logdir)
    chosen: list[Plan] = []

    def status(phase: Any, elapsed_s: float) -> None:
        plan = chosen[-1] if chosen else None
        run.on_status(CaptureStatus(phase, name, asked_s, elapsed_s, chosen_s=plan.chosen_s if plan else None,
                                    why=plan.why if plan else "", overview_s=plan.overview_s if plan else 0.0,
                                    stoppable=all(recorder.limits.stoppable for recorder in recorders)))
        if phase == "receiving":
            ahead.begin()
            import gputop.comparison.gates  # noqa: F401  there is time for it now

    job_cpus = JobCpusWatch(pids.items(), lambda p: status(p.phase, p.elapsed_s))
    recorders = [recorder_of(address, pid) for address, pid in pids.items()]
    with AnalysisAhead(run.closing) as ahead:
        with StackWatch(pids, run.stacks, asked_s, job_cpus) as on_progress:
            if len(servers) == 1 and run.other_nodes is None:
                record = _capture_one(recorders[0], request, run, on_progress, chosen.append)
            else:
                captured, missing = _capture_workers(servers, recorders, request, run, on_progress, chosen.append)
                record = record_of_workers(name, asked_s, captured, missing)
            status("analyzing", record.took_s)
            sampled = on_progress.samples()
        costs = {o.address: o.cost for o in record.workers} or {answering[0].address: record.cost}
        _have_returned({pid for address, cost in costs.items() if (pid := pids.get(address)) in run.attached
                        and pid is not None and cost is not None
                        and (cost.memory_after_bytes or 0) - (cost.memory_before_bytes or 0) > _MAX_KEPT_BYTES})
        cpus = {address: job_cpus.cpus(address) for address in pids}
        if run.other_nodes is None:
            record = replace(record, notices=(*record.notices, *_ranks_elsewhere(pids)))
        return analyze(of_job(record, answering), run, servers, cpus, sampled, began_s, ahead)


def profiles_itself(error: GputopError) -> ProfilesItself | None:
    """Return the error behind one that ended a capture, if it is that a job's own torch.profiler records it."""
    from gputop.profiler.kineto.guard import ProfilesItself

    return next((one for one in (error, error.__cause__) if isinstance(one, ProfilesItself)), None)


def _have_returned(pids: Collection[int]) -> None:
    """Have jobs return the memory that they keep free."""
    from gputop.launch.serve import give_back

    for pid in pids:
        with contextlib.suppress(GputopError):  # it has ended, or its main thread runs no Python: no harm is done
            give_back(pid)


def _ranks_elsewhere(pids: Mapping[str, int | None]) -> tuple[str, ...]:
    """Line that names the ranks on other nodes, of the PyTorch jobs among these processes by address."""
    from gputop.core.proc import environ_of
    from gputop.launch.target import ranks_elsewhere
    from gputop.profiler.addresses import process_of

    count = max((ranks_elsewhere(environ_of(pid)) for address in pids if (pid := process_of(address)) is not None),
                default=0)
    if not count:
        return ()
    return (f"{count} rank{'s' if count > 1 else ''} of this job on other nodes {'were' if count > 1 else 'was'} not "
            "captured; to capture all, run gputop capture --nodes LIST on a node of the job",)


def analyze(record: CaptureRecord, run: CaptureRun, servers: Sequence[Server] = (),
            cpus: Mapping[str, JobCpus | None] | None = None,
            stacks: Mapping[str, StackSamples | str] | None = None, began_s: float = 0.0,
            ahead: AnalysisAhead | None = None) -> CaptureRecord:
    """The record with what its trace says, or with the ``problem`` of not knowing; blocks. The capture was asked for at
    Unix time ``began_s``.

    Beside the trace it leaves ``cpus``, by address what the jobs could use, the step period before, and ``stacks``, by
    address the Python stacks of the jobs, for any later analysis, the findings and, of ``servers``, what the run's
    ``counters`` knows of the GPUs.
    """
    from gputop.session.gpu_samples import remarks_of_activity
    from gputop.trace.readers.capture_file import CaptureFile, write_capture
    from gputop.trace.readers.stacks_file import write_stacks

    paths = {o.address: o.result.path for o in record.workers if o.result is not None} or {record.address: record.path}
    about = CaptureFile(files={path.name: (cpus or {}).get(address) for address, path in paths.items()},
                        address=record.address, job=record.job, time_s=record.time_s, live_steps=run.live_steps,
                        pid=record.pid, started_s=record.started_s,
                        ended=record.plan.ended if record.plan is not None else "",
                        recorded_s=record.plan.chosen_s if record.plan is not None else None)
    folder = next(iter(paths.values())).parent
    # Where it cannot be written, the trace tells what it tells without.
    with contextlib.suppress(OSError):
        write_capture(folder, about)
        if stacks:
            write_stacks(folder, {path.name: stacks[address] for address, path in paths.items() if address in stacks})
    analyzed = analyze_saved(record, run.closing, ahead)
    counters = run.counters
    if analyzed.analysis is not None:
        if analyzed.compared is not None:
            analyzed = replace(analyzed, compared=replace(analyzed.compared, findings_at_capture=analyzed.findings))
        sampled = None if counters is None or len(paths) > 1 else counters(analyzed, servers)
        if sampled is not None:
            remarks = remarks_of_activity(sampled, analyzed, began_s)
            analyzed = replace(analyzed, notices=(*analyzed.notices, *remarks))
        with contextlib.suppress(OSError):
            write_capture(folder, replace(
                about, findings=analyzed.findings, step_s=analyzed.step_s, counters=sampled,
                counters_by_file={} if counters is None or len(paths) == 1 else {
                    paths[server.address].name: counters(analyzed, (server,))
                    for server in servers if server.address in paths}))
    return analyzed


def analyze_saved(record: CaptureRecord, closing: threading.Event, ahead: AnalysisAhead | None = None) -> CaptureRecord:
    """The record of an earlier capture with what its trace says, or with the ``problem``; blocks. Writes nothing."""
    from gputop.comparison.gates import broken_budgets
    from gputop.diagnosis.worker import AnalysisAhead

    try:
        result = (ahead or AnalysisAhead(closing)).analyze([str(record.path)])
    except GputopError as error:
        return replace(record, problem=error)
    broken = tuple(broken_budgets(result.analysis))
    return replace(record, analysis=result.analysis, report=result.report, limit=result.limit, compared=result.compared,
                   notices=(*broken, *(notice for notice in record.notices if notice not in broken)))


def record_of_workers(name: str, asked_s: float, captured: MultiWorkerCapture,
                      missing: tuple[str, ...]) -> CaptureRecord:
    """The record of several workers' capture, not analyzed yet; ``missing`` are remarks on those that took no part."""
    results = [(o.address, o.result) for o in captured.captured if o.result is not None]
    notes = tuple(f"{address}: {note}" for address, r in results for note in (*r.errors, *r.warnings))
    costs = [o.cost for o in captured.captured if o.cost is not None]
    return CaptureRecord(name, captured.run_dir, time.time(), asked_s, max(r.took_s for _, r in results), notes,
                         plan=captured.plan, cost=max(costs, key=lambda c: c.call_s, default=None),
                         workers=captured.outcomes, notices=(*missing, *captured.notes()))
