"""The commands. Thin: parse, choose a source, hand over; heavy imports happen where they are used."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gputop.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, GputopError
from gputop.options import SIMULATED_DEFAULT, parser

if TYPE_CHECKING:
    from gputop.session import Options, Session
    from gputop.sources import Source


def _source(args: argparse.Namespace) -> Source:
    gpus = tuple(g for g in args.gpus.split(",") if g)
    if args.demo is not None or args.source == "simulated":
        from gputop.sources.simulated import SimulatedSource

        if args.demo in (None, SIMULATED_DEFAULT):
            return SimulatedSource(gpus=gpus)
        return SimulatedSource(args.demo, gpus=gpus)
    from gputop.sources.live import live_source

    return live_source(args.source, gpus, args.interval, dcgm=args.dcgm, dcgm_bindings=args.dcgm_bindings,
                       dcgm_watch=args.dcgm_watch)


def _options(args: argparse.Namespace) -> Options:
    from gputop.session import DEFAULT_LOGDIR, Options

    for address in args.attach:
        from gputop.profiler.client import parse_address

        parse_address(address)  # wrong usage is said before anything starts
    return Options(interval_s=args.interval, attach=tuple(args.attach), logdir=args.logdir or Path(DEFAULT_LOGDIR))


def _monitor(args: argparse.Namespace) -> int:
    from gputop.session import Session
    from gputop.tui import first_frame

    source = _source(args)
    if not source.simulated and (args.source == "dcgm" or not _has_driver()):
        source.open()  # raises with the exact cause, before the screen is taken
    if not sys.stdout.isatty():
        raise GputopError("the monitor needs a terminal", "Headless: gputop snapshot --format json|text",
                          EXIT_USAGE)
    with contextlib.closing(Session(source, _options(args))) as session:
        painted = first_frame.show(session)
        try:
            from gputop.tui.app import run
        except BaseException:
            if painted:
                first_frame.leave()
            raise
        return run(session)


def _has_driver() -> bool:
    """Whether NVML's library can be loaded at all: a cheap look before the first frame."""
    import ctypes

    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def _start(session: Session, seconds: float) -> None:
    """Run a session until it has looked for ``seconds``, two samples at least; raises its failure."""
    ready = threading.Event()

    def listener(change: str) -> None:
        sample, history = session.sample, session.history
        looked = (history is not None and sample is not None and sample.interval_s is not None
                  and sample.time_s - session.started_s >= seconds)
        if change == "failed" or looked:
            ready.set()

    session.listen(listener)
    session.start()
    patience_s = max(seconds, 2 * session.interval_s) + 30.0
    if not ready.wait(patience_s):
        raise GputopError(f"no sample within {patience_s:.0f} s: the driver does not answer",
                          "See whether nvidia-smi returns; a hung driver needs a GPU reset or a reboot.")
    if session.failure is not None:
        raise session.failure


def _snapshot(args: argparse.Namespace) -> int:
    from gputop.export.files import write_private
    from gputop.export.snapshot import format_of, render
    from gputop.session import Session

    session = Session(_source(args), _options(args))
    with contextlib.closing(session):
        _start(session, args.seconds)
        if not session.servers_known or args.attach:
            session.look_for_servers()
        for server in session.servers:
            if server.problem is not None:
                _say(f"no profiler server at {server.address}: {server.problem}")
        text = render(session, args.format or format_of(args.output or Path()))
    if args.output is None:
        sys.stdout.write(text)
    else:
        there = args.output.is_file()
        write_private(args.output, text.encode(), make_folder=False)
        _say(f"wrote {args.output}{', in place of what was there' if there else ''}")
    return EXIT_OK


def _capture(args: argparse.Namespace) -> int:
    from gputop.captures import CaptureStatus, capture_and_analyse, choose_server, find_servers

    options = _options(args)
    own: dict[str, str] = {}
    if args.demo is not None or args.source == "simulated":
        source = _source(args)
        source.open()
        own.update(source.profiler_endpoints())
    servers, notes = find_servers(options.attach, own, discover=not own and not options.attach)
    for note in notes:
        _say(note)
    server = choose_server(servers)
    for other in servers:
        if other.asked and other is not server:
            _say(f"not captured: {other.address}, " + (other.problem or "one server is captured at a time"))
    stop = threading.Event()
    # The first ctrl-c ends the recording and keeps its data; the second one quits.

    said: list[str] = []

    def interrupted(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop.set()
        if "analysing" in said:
            _say(f"stopped; the trace is kept in {options.logdir}")
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupted)
    signal.signal(signal.SIGTERM, interrupted)  # what a job scheduler sends: the data is kept, too

    def on_status(status: CaptureStatus) -> None:
        if status.phase not in said:
            said.append(status.phase)
            hint = ""
            if status.phase == "recording":
                hint = f" for {status.chosen_s:g} s ({status.why}); ctrl-c stops it and keeps the data"
            _say(f"{status.phase} {status.address}{hint}")

    record = capture_and_analyse(server, args.seconds, options.logdir, stop, threading.Event(), on_status,
                                 args.force)
    _say(f"trace written: {record.path}")
    for remark in record.remarks:
        _say(remark)
    for note in record.notes:
        _say(f"profiler: {note}")
    if record.problem is not None:
        raise record.problem
    if args.json:
        json.dump({**(record.analysis or {}), "capture": record.to_json()}, sys.stdout, indent=1, allow_nan=False)
        print()
    else:
        print(record.report)
    return EXIT_OK


def _say(message: str) -> None:
    print(f"gputop: {message}", file=sys.stderr)


def _analyze(args: argparse.Namespace) -> int:
    from gputop.trace.analysis import analyze
    from gputop.trace.report import text_report

    analysis = analyze(args.paths, params=args.params)
    if args.json:
        json.dump(analysis.to_json(), sys.stdout, indent=1, allow_nan=False)
        print()
    else:
        print(text_report(analysis, _width()))
    return EXIT_OK


def _compare(args: argparse.Namespace) -> int:
    from gputop.comparison.compare import compare
    from gputop.comparison.report import text_report

    comparison = compare(args.a, args.b)
    if args.json:
        json.dump(comparison.to_json(), sys.stdout, indent=1, allow_nan=False)
        print()
    else:
        print(text_report(comparison, _width()), end="")
    return EXIT_OK


def _width() -> int:
    """Columns for a report: the terminal's within 60 to 120, 100 where there is none."""
    with contextlib.suppress(OSError):
        return min(120, max(60, os.get_terminal_size(sys.stdout.fileno()).columns))
    return 100


def _record(args: argparse.Namespace) -> int:
    from gputop.recording.record import record

    stop = threading.Event()

    def ended(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one quits at once
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, ended) for number in numbers}
    try:
        record(_source(args), args.interval, args.output, args.seconds, stop, _say)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return EXIT_OK


def _replay(args: argparse.Namespace) -> int:
    from gputop.session import Session
    from gputop.sources.snapshot import open_player

    player, snapshot = open_player(args.file, args.start, args.speed, _say)
    if not sys.stdout.isatty():
        raise GputopError("replay needs a terminal", "Run it in one; a recording has no other view.", EXIT_USAGE)
    with contextlib.closing(Session(player, _options(args), told=snapshot)) as session:
        from gputop.tui.app import run

        return run(session)


def _doctor(args: argparse.Namespace) -> int:
    from gputop.doctor import examine, print_report

    options = _options(args)
    report = examine(options.logdir, options.attach, dcgm_address=args.dcgm, dcgm_bindings=args.dcgm_bindings)
    print_report(report, as_json=args.json)
    return report.exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status of the contract."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show an arrow still gets the rest
    args = parser().parse_args(argv)
    commands = {None: _monitor, "snapshot": _snapshot, "capture": _capture, "analyze": _analyze, "compare": _compare,
                "doctor": _doctor, "record": _record, "replay": _replay}
    try:
        if getattr(args, "demo", None) == "list":
            from gputop.simulation.scenarios import describe

            print(describe())
            return EXIT_OK
        if sys.stdout is None:
            raise GputopError("standard output is closed", "Redirect it to a file, or use -o FILE.")
        status = commands[args.command](args)
        sys.stdout.flush()  # a full disk is said here, not by the interpreter on its way out
        return status
    except GputopError as error:
        _say(error.message)
        if error.fix:
            print(f"  {error.fix}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `gputop snapshot | head`: nobody reads on, which is no fault
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except OSError as error:  # what GputopError does not already explain: standard output itself
        _say(f"cannot write the output: {error.strerror or error}")
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def command() -> NoReturn:
    """The process: :func:`main`, then out at once.

    The interpreter's own way out would wait for, or pull the ground from under, daemon threads
    that may be inside the driver or gRPC; a hung driver must not keep gputop from ending.
    """
    try:
        status = main()
    except SystemExit as ending:  # argparse: --help, --version, wrong usage
        status = ending.code if isinstance(ending.code, int) else EXIT_OK
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, AttributeError, ValueError):
            stream.flush()
    os._exit(status)
