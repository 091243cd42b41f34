"""``gputop capture``: capture one trace and print its findings."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gputop.commands import common
from gputop.commands.arguments import add_shared
from gputop.commands.attach import agreed, confirmed
from gputop.commands.option_types import positive_seconds
from gputop.core.errors import EXIT_OK, EXIT_USAGE, GputopError, sentences
from gputop.core.signal_handlers import signal_handlers, termination_handlers, unwinding
from gputop.text.console import say

if TYPE_CHECKING:
    from gputop.profiler.capture.choose_workers import Choice
    from gputop.profiler.capture.records import CaptureRecord, CaptureStatus, Server
    from gputop.profiler.capture.request import CaptureQuestion, CaptureRequest
    from gputop.session.gpu_samples import CounterWatch
    from gputop.session.options import Options
    from gputop.session.other_nodes import OtherNodes
    from gputop.session.session import Change, Session

_BEFORE_S = 2.0  # of live figures before a PyTorch job is recorded: they show how much that slows it
_FIGURES_S = 5  # time in which workers are compared: some steps
_POLL_PERIOD_S = 0.2  # while a dip is waited for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "gputop capture [options] [HOST:PORT… | PID…]"  # an address alone is taken as that of --attach
    add_shared(parser, "what to watch", "profiler servers", "captures", "custom rules",
               "automatic captures", "notifications", "gputop on other nodes")
    parser.add_argument("--seconds", type=positive_seconds, default=10.0, metavar="S",
                        help="length of the capture (10). A short probe decides how much is recorded in detail; during "
                             "the rest, gputop watches for rare events")
    parser.add_argument("--force", action="store_true",
                        help="record all of --seconds in detail without a probe, even if it slows the job and the node")
    parser.add_argument("--all-workers", action="store_true",
                        help="capture all workers named by --attach, at most 64. By default, if there are more than 8, "
                             "gputop captures only three: those with the lowest, median and highest activity if they "
                             "are on this node, otherwise the first, the middle and the last")
    parser.add_argument("--accept-risk", action="store_true",
                        help="capture even if this may crash the job, as TensorFlow 2.21's profiler can if workers "
                             "call each other over gRPC")
    parser.add_argument("--yes", action="store_true",
                        help="do not ask before preparing the process PID for captures, as gputop attach does")
    parser.add_argument("--nodes", default="", metavar="LIST",
                        help="also capture the PyTorch job's ranks on these nodes (n[02-16]) with the gputop installed "
                             "there, over passwordless ssh. Without a PID, gputop finds this node's ranks")
    parser.set_defaults(pids=[])
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--full", action="store_true", help="print all values from the trace, not only the verdict")
    shown.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    try:
        return _run(args)
    except GputopError as error:
        from gputop.advice.live.torch_profiler import refused_capture
        from gputop.session.capture.captures import profiles_itself

        refusal = profiles_itself(error)
        finding = refused_capture(refusal.pid, refusal.share) if refusal is not None else None
        if finding is None or args.json:  # whoever reads the JSON wants that of a trace
            raise
        common.print_refusal(finding)
        return error.exit_code


def _run(args: argparse.Namespace) -> int:
    from gputop.profiler.capture.request import CaptureRequest, require_no_question
    from gputop.session.capture.captures import CaptureRun, capture_and_analyze, risk_question
    from gputop.session.gpu_samples import CounterWatch
    from gputop.session.stack_watch import StackChoice, simulated_stacks

    options = common.options_of(args)
    if options.auto_capture is not None:
        return _run_on_dip(args, options)
    common.check_notify(args)
    source = common.source_of(args)
    if source.simulated:
        source.open()
    stop = threading.Event()
    pids, other_nodes = _with_other_nodes(args, stop)
    attached_now: list[int] = []
    attached = [*options.attach, *(_ready(pid, attached_now, yes=args.yes) for pid in pids)]
    request = CaptureRequest(args.seconds, options.logdir, args.force, accept_risk=args.accept_risk)
    watch = CounterWatch(source, options.interval_s)
    reported: list[str] = []

    def interrupted(*_: object) -> None:
        """The first ctrl-c or other signal ends the recording and keeps its data; a second ctrl-c quits."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop.set()
        if "analyzing" in reported:
            say(f"stopped; the trace is kept in {options.logdir}")
            raise KeyboardInterrupt

    def on_status(status: CaptureStatus) -> None:
        if status.phase not in reported:
            reported.append(status.phase)
            say(f"{status.phase} {status.address}{_how_long(status)}")

    with watch.running():
        chosen = _servers(attached, source.profiler_endpoints(), request, watch, every=args.all_workers)
        try:
            chosen = _workers(chosen, watch, every=args.all_workers)
            with signal_handlers(termination_handlers(interrupted)):
                require_no_question(risk_question(chosen, request))
                record = capture_and_analyze(chosen, request, CaptureRun(
                    stop, threading.Event(), on_status, StackChoice(options.stacks, simulated=simulated_stacks(source)),
                    watch.counters, other_nodes=other_nodes, attached=attached_now))
        except GputopError as error:
            common.tell_capture(args, error, simulated=source.simulated)
            raise
    try:
        return common.print_capture(record, as_json=args.json, full=args.full)
    finally:
        common.tell_capture(args, record, simulated=source.simulated)


def _workers(chosen: tuple[Server, ...], watch: CounterWatch, *, every: bool) -> tuple[Server, ...]:
    """The workers to capture; of many some, unless ``every`` one is asked for. Samples the node for a while before."""
    from gputop.profiler.addresses import process_of
    from gputop.profiler.capture.choose_workers import MAX_WORKERS

    answering = [s for s in chosen if s.problem is None]
    if not every and len(answering) > MAX_WORKERS:
        choice = _choose_workers(answering, watch)
        return tuple(s for s in chosen if s.address in choice.chosen)
    if any(process_of(s.address) is not None for s in answering):
        watch.wait(_BEFORE_S)
    return chosen


def _servers(attached: Sequence[str], endpoints: Mapping[str, str], request: CaptureRequest, watch: CounterWatch, *,
             every: bool) -> tuple[Server, ...]:
    """The servers to capture, of which nothing has to be asked; says what was left out. Raises GputopError."""
    from gputop.profiler.capture.choose_workers import MAX_ALL_WORKERS
    from gputop.profiler.capture.request import require_no_question
    from gputop.session.capture.captures import choose_servers, find_named_servers, left_out, server_question, too_many
    from gputop.session.capture.server_watch import WatchedJob

    servers, notes, _ = find_named_servers(attached, endpoints, discover=not endpoints and not attached)
    for note in notes:
        say(note)
    chosen = choose_servers(servers)
    require_no_question(WatchedJob().question(servers, request) or server_question(chosen, request))
    if not attached and not endpoints:
        require_no_question(_job_without_server(servers, request, watch))
    if note := left_out(servers, chosen):
        say(note)
    if every and (count := sum(s.problem is None for s in chosen)) > MAX_ALL_WORKERS:
        raise too_many(count)
    return chosen


def _job_without_server(servers: Sequence[Server], request: CaptureRequest,
                        watch: CounterWatch) -> CaptureQuestion | None:
    """Question which job is meant, if one on the GPUs has no server while these have one."""
    from gputop.core.proc import user_name
    from gputop.profiler.capture.records import Server
    from gputop.profiler.capture.request import ask_job
    from gputop.session.capture.which_job import jobs_of, unserved_on_gpus

    watch.wait(0.0)
    processes = watch.sample.processes if watch.sample is not None else ()
    unserved = unserved_on_gpus(servers, processes, user_name(os.geteuid()))
    jobs = [Server(f"pid:{pid}", p.command or "", pid) for p in unserved if (pid := p.local_pid or p.pid)]
    return ask_job(request, [*jobs, *jobs_of(servers, processes)]) if jobs else None


def _how_long(status: CaptureStatus) -> str:
    """Words for how long a recording or an overview takes; "" for other phases."""
    if status.phase == "overview":
        return f" for {status.overview_s:g} s"
    if status.phase != "recording":
        return ""
    overview = f" in detail, then {status.overview_s:g} s of rare events" if status.overview_s else ""
    stop = "ctrl-c stops it and keeps the data" if status.stoppable else "it cannot be stopped earlier"
    return f" for {status.chosen_s:g} s ({status.why}){overview}; {stop}"


def _with_other_nodes(args: argparse.Namespace, stop: threading.Event) -> tuple[Sequence[int], OtherNodes | None]:
    """The processes of this node that are meant, and the other nodes of their job, if some are named. Raises
    GputopError."""
    if not args.nodes:
        return args.pids, None
    from gputop.launch.target import find_ranks, meeting_addresses
    from gputop.session.other_nodes import MAX_NODES, OtherNodes
    from gputop.telemetry.agents import parse_nodes

    nodes = parse_nodes(args.nodes)
    if len(nodes) > MAX_NODES:
        raise GputopError(f"--nodes accepts at most {MAX_NODES} nodes, not {len(nodes)}", "Name fewer.", EXIT_USAGE)
    meetings = meeting_addresses(args.pids)
    if len(meetings) != 1:
        which = "several jobs have" if meetings else "no PyTorch job has"
        raise GputopError(f"{which} ranks here that can rendezvous with ranks on other nodes (MASTER_ADDR, "
                          "MASTER_PORT, RANK)", "Name the PIDs of the ranks on this node." if meetings else
                          "Start gputop on a node of the job, as the job's user. --nodes works for jobs that torchrun "
                          "starts and for jobs that set these variables.")
    (meeting,) = meetings
    if not args.yes:
        say(f"your answer for the ranks on this node also applies to those on {', '.join(nodes)}")
    return args.pids or find_ranks(meeting), OtherNodes(nodes, meeting, args.remote_command, stop)


def _ready(pid: int, attached: list[int], *, yes: bool) -> str:
    """The address to capture a process at, which is made ready for it after a question, and is then one of those
    ``attached``. Raises GputopError."""
    from gputop.launch.attach import serving
    from gputop.launch.serve import examine, make_ready
    from gputop.profiler.kineto.clients import client_of
    from gputop.profiler.kineto.guard import UsedBefore

    if client_of(pid) is not None:
        return make_ready(pid).address
    process = examine(pid)
    address = serving(pid)
    if address is not None:
        return address
    if not yes and not agreed(pid, process.user, process.command):
        raise GputopError("nothing was done", "")
    with unwinding():
        try:
            ready = make_ready(pid, started=process.started)
        except UsedBefore as error:
            if not yes and not confirmed(error.message, "Record it anyway? [y/N] "):
                raise
            ready = make_ready(pid, hold=True, started=process.started)
    say(ready.line)
    attached.append(pid)
    return ready.address


def _choose_workers(servers: Sequence[Server], watch: CounterWatch) -> Choice:
    """The few of many workers to capture, by live figures as far as there are any; says which and why."""
    from gputop.profiler.capture.choose_workers import MAX_ALL_WORKERS
    from gputop.session.worker_figures import choose, with_pids

    here = with_pids(servers)
    if here != list(servers):
        say(f"sampling this machine's GPUs for {_FIGURES_S} s")
        watch.wait(_FIGURES_S)
    choice = choose(here, watch.sample, watch.history)
    ways = ["--all-workers captures all"] if len(servers) <= MAX_ALL_WORKERS else []
    say("; ".join((f"capturing {choice.text()}", *ways)))
    return choice


def _run_on_dip(args: argparse.Namespace, options: Options) -> int:
    """Capture on dips until ``--dip-max`` captures (1) or ctrl-c; that ends a running capture and keeps its data."""
    from gputop.profiler.capture.records import usable
    from gputop.profiler.capture.request import require_no_question
    from gputop.session.session import Session

    session = Session(common.source_of(args), _options_on_dip(args, options))
    auto_capture = session.control.auto_capture
    assert options.auto_capture is not None and auto_capture is not None
    stop, ended = threading.Event(), threading.Event()

    def interrupted(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second one quits at once
        stop.set()

    def changed(change: Change) -> None:
        status = session.control.status
        if change == "failed" or (change == "capture" and status is not None and not status.running):
            ended.set()

    common.check_notify(args)
    with (contextlib.closing(session), common.notifying(args, session),
          signal_handlers(termination_handlers(interrupted))):
        session.listen(changed)
        session.start()
        say(f"waiting for {options.auto_capture.rule.text}; press ctrl-c to stop")
        reported, last_reported, job_known = "", session.results.last_capture, False
        while True:
            ended.wait(_POLL_PERIOD_S)
            if session.failure is not None:
                raise session.failure
            if not job_known and session.feed.sample is not None and usable(session.watch.servers):
                # Which job is meant is asked now: at the dip nobody is there.
                require_no_question(session.watch.question(session.control.request()))
                job_known = True
            if auto_capture.note != reported:
                reported = auto_capture.note
                say(reported)
            running = session.control.running
            if stop.is_set() and not (running and not ended.is_set()):
                return EXIT_OK
            if stop.is_set():
                session.control.stop_capture()
            if ended.is_set() and not running:
                ended.clear()
                _report(session, last_reported, as_json=args.json, full=args.full)
                last_reported = session.results.last_capture
                if auto_capture.done:
                    return EXIT_OK


def _options_on_dip(args: argparse.Namespace, options: Options) -> Options:
    """The options with the jobs of ``args.pids`` made ready. Raises GputopError where they do not fit each other."""
    if args.nodes:
        raise GputopError("--nodes cannot be combined with --on-dip: gputop detects dips only on its own node",
                          "Run gputop capture --on-dip on each node.", EXIT_USAGE)
    if args.json and options.auto_capture is not None and options.auto_capture.max_captures > 1:
        raise GputopError("--json prints one document, so it requires --dip-max 1", "Leave out --dip-max or --json.",
                          EXIT_USAGE)
    if args.force:
        raise GputopError("--force cannot be combined with --on-dip, because nobody may be present to accept its cost",
                          "Leave out --force or --on-dip.", EXIT_USAGE)
    ready = tuple(_ready(pid, [], yes=args.yes) for pid in args.pids)
    return replace(options, attach=(*options.attach, *ready), capture_s=args.seconds)


def _report(session: Session, last_reported: CaptureRecord | None, *, as_json: bool, full: bool) -> None:
    """Print the result of a capture newer than ``last_reported``, or why it failed; the command goes on waiting."""
    status, record = session.control.status, session.results.last_capture
    if record is None or record is last_reported:
        assert status is not None
        say(sentences(status.message, status.fix))
        return
    try:
        common.print_capture(record, as_json=as_json, full=full)
    except GputopError as error:
        say(error.in_one_line)
