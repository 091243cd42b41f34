"""Shared by several commands: the source and the options by the arguments, a started session, messages; and what goes
on while a command runs: metrics that are served (``--export``), notifications of what happens (``--notify``).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from ipaddress import ip_address
from typing import TYPE_CHECKING

from gputop.commands.arguments import SIMULATED_DEFAULT
from gputop.commands.settings import save_setting
from gputop.core.errors import EXIT_OK, EXIT_USAGE, GputopError
from gputop.core.own_program import install_command
from gputop.core.samples import OK
from gputop.session.options import AutoCaptureOptions, Options
from gputop.text import console
from gputop.text.console import say

if TYPE_CHECKING:
    from gputop.core.findings import Finding
    from gputop.export.openmetrics import Exporter
    from gputop.profiler.capture.records import CaptureRecord
    from gputop.session.session import Session
    from gputop.sources.base import Source
    from gputop.tui.terminal.color_support import Preferences

MAX_LATE_SAMPLES = 5
_SCREEN_WAIT_S = 1.0  # for what is still being told when the screen closes


def source_of(args: argparse.Namespace) -> Source:
    gpus = tuple(g for g in args.gpus.split(",") if g)
    if args.demo is not None or args.source == "simulated":
        from gputop.sources.simulated import SimulatedSource

        if args.demo in (None, SIMULATED_DEFAULT):
            return SimulatedSource(gpus=gpus)
        return SimulatedSource(args.demo, gpus=gpus)
    from gputop.sources.factory import GpusOrHost, live_source

    source = live_source(args.source, gpus, args.interval, dcgm=args.dcgm, dcgm_bindings=args.dcgm_bindings,
                         dcgm_watch=args.dcgm_watch)
    if args.source != "auto" or args.command == "record":
        return source  # GPUs are what was asked for
    return GpusOrHost(source, lambda: args.command == "run" or bool(_attached(args)) or _has_screen_and_job(args))


def _has_screen_and_job(args: argparse.Namespace) -> bool:
    """Return whether this is the monitor on a terminal, and a job of this node can be captured from or be given a
    server."""
    if args.command is not None or not sys.stdout.isatty():
        return False
    from gputop.profiler.discovery import TrainingProcesses, find_servers

    return bool(find_servers().servers) or bool(TrainingProcesses().find())


def options_of(args: argparse.Namespace) -> Options:
    return Options(interval_s=args.interval, attach=_attached(args), logdir=args.logdir,
                   auto_capture=_auto_capture_options(args), stacks=args.stacks)


def _auto_capture_options(args: argparse.Namespace) -> AutoCaptureOptions | None:
    """The auto-capture of the monitor and ``capture``; None without one. Raises GputopError (wrong usage)."""
    if args.command not in (None, "capture"):
        return None
    if args.on_dip is None:
        if args.dip_max is not None:
            raise GputopError("--dip-max needs --on-dip", "Add --on-dip.", EXIT_USAGE)
        return None
    from gputop.session.auto_capture import parse_rule

    most = args.dip_max or (1 if args.command == "capture" else 20)
    return AutoCaptureOptions(parse_rule(args.on_dip), 60 * args.dip_every, most)


def preferences_of(args: argparse.Namespace) -> Preferences:
    """The appearance of the monitor on this terminal; Textual, imported later, learns how many colors there are."""
    from gputop.tui.terminal.color_support import Preferences, full_theme_name, terminal_colors, terminal_glyphs

    config = args.config
    preferences = Preferences(
        theme=full_theme_name(args.theme), colors=terminal_colors() if args.color == "auto" else args.color,
        glyphs=terminal_glyphs() if args.ascii == "auto" else "ascii" if args.ascii else "unicode",
        metric=str(config["metric"]), span_s=float(config["span"]), warnings=config.warnings,
        keep_theme=lambda name: save_setting(config.path, "theme", name))
    preferences.set_textual_colors()
    return preferences


def _attached(args: argparse.Namespace) -> tuple[str, ...]:
    """The addresses of the named servers; raises GputopError (wrong usage) before anything starts."""
    if not args.attach and args.profiler_port is None:
        return ()
    from gputop.profiler.workers import addresses, parse_ports

    return addresses(args.attach, parse_ports(args.profiler_port) if args.profiler_port is not None else (), os.environ)


def start(session: Session, seconds: float) -> None:
    """Run a session until it has sampled for ``seconds``, two samples at least; raises its failure."""
    ready = threading.Event()

    def listener(change: str) -> None:
        sample, history = session.feed.sample, session.feed.history
        sampled = False
        if history is not None and sample is not None and sample.interval_s is not None:
            # A GPU whose driver was late for just this sample is waited for; one that hangs is not.
            late = any(gpu.state == OK and not gpu.readings for gpu in sample.gpus)
            wait_s = seconds + (MAX_LATE_SAMPLES * sample.interval_s if late else 0.0)
            sampled = sample.time_s - session.started_s >= wait_s
        if change == "failed" or sampled:
            ready.set()

    session.listen(listener)
    session.start()
    timeout_s = max(seconds, 2 * session.feed.interval_s) + 30.0
    if not ready.wait(timeout_s):
        raise GputopError(f"no sample within {timeout_s:.0f} s", "This host has no CPU to spare."
                          if session.feed.source.simulated else "If nvidia-smi does not return either, the driver is "
                                                                "hanging and needs a GPU reset or a reboot. Otherwise "
                                                                "this host has no CPU to spare.")
    if session.failure is not None:
        raise session.failure


def print_capture(record: CaptureRecord, *, as_json: bool, full: bool) -> int:
    """Print the result of a capture, the verdict last, or with ``full`` all its figures; raises the problem of its
    analysis."""
    from gputop.launch.xprof import logdir_of, open_command

    say(f"trace written: {record.path}")
    if record.address.startswith("pid:"):  # kineto's JSON
        say("open it in Perfetto: https://ui.perfetto.dev")
    else:
        say(f"open it in XProf: {open_command(logdir_of(record.path))}")
    for remark in record.remarks:
        say(remark)
    for note in record.notes:
        say(f"profiler: {note}")
    if record.problem is not None:
        raise record.problem
    if as_json:
        from gputop.core.codec import document_of
        from gputop.export.analysis_documents import CaptureDocument
        from gputop.profiler.capture.facts import facts_of

        facts = facts_of(record)
        console.write_json({"capture": facts} if record.analysis is None else
                           document_of(CaptureDocument, record.analysis, capture=facts))
    else:
        from gputop.diagnosis.report import short_report, text_report

        report = text_report if full else short_report
        console.write_text(record.report if record.analysis is None else report(record.analysis, width()))
    return EXIT_OK


def print_refusal(finding: Finding) -> None:
    from gputop.render.finding_text import VerdictRow, plain_lines, verdict_of

    verdict = verdict_of(finding, VerdictRow("From", "what the process reports about itself; there is no trace"))
    console.write_text("\n".join(plain_lines(verdict, width(), loud=True)) + "\n")


def width() -> int:
    """Columns for a report: the terminal's within 60 to 120, 100 where there is none."""
    with contextlib.suppress(OSError):
        return min(120, max(60, os.get_terminal_size(sys.stdout.fileno()).columns))
    return 100


# -- metrics: gputop export --listen, and --export of the monitor and of run ------------------------


def check_export(args: argparse.Namespace) -> None:
    """Check ``--export`` before the first frame. Raises GputopError."""
    if args.export is not None:
        check_metrics(args.export)


def exporting(args: argparse.Namespace, session: Session) -> contextlib.AbstractContextManager[object]:
    """Serves the session's figures during the block, where ``--export`` asks for it. Raises GputopError."""
    if args.export is None:
        return contextlib.nullcontext()
    from gputop.export.openmetrics import Exporter

    return serving(Exporter(session), args.export)


@contextlib.contextmanager
def serving(exporter: Exporter, address: tuple[str, int]) -> Iterator[str]:
    """Serve metrics there for the block, which is given the address. Raises GputopError where that cannot be had."""
    from gputop.export.metrics_server import MetricsServer, listen

    server = MetricsServer(exporter, listen(*address))
    with contextlib.closing(server):
        server.start()
        yield server.address


def check_metrics(address: tuple[str, int] | None) -> None:
    """Raises GputopError where prometheus_client is not installed; says who can read what is served at ``address``.

    Cheap: nothing is imported.
    """
    from importlib.util import find_spec

    if find_spec("prometheus_client") is None:
        raise GputopError("prometheus_client, which writes the metrics, is not installed", install_command("export"))
    if address is not None and not is_loopback(address[0]):
        say(f"anyone who can reach {address[0]} can read the metrics without a password")


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# -- notifications: --notify ------------------------------------------------------------------------


def check_notify(args: argparse.Namespace) -> None:
    """Check ``--notify`` before the first frame. Raises GputopError (wrong usage)."""
    if args.notify:
        from gputop.session.notifier import parse_ways

        ways = parse_ways(args.notify)
        if host := ways.in_the_clear:
            say(f"the webhook's address and token are sent to {host} unencrypted; use https://")
        if ways.bell and args.command not in (None, "run"):
            raise GputopError("--notify bell rings the monitor's terminal, but this command has no monitor",
                              "Use command:LINE or webhook.", EXIT_USAGE)


@contextlib.contextmanager
def notifying(args: argparse.Namespace, session: Session) -> Iterator[None]:
    """Tells what is new in the session during the block; a way that fails is said at the end. What is still being told
    then has a second beside a screen, which closes at once, and elsewhere the time that a receiver has."""
    if not args.notify:
        yield
        return
    from gputop.session.notifier import TIMEOUT_S, Notifier, parse_ways

    notifier = Notifier(session, parse_ways(args.notify))
    try:
        yield
    finally:
        notifier.close(_SCREEN_WAIT_S if args.command in (None, "run") else TIMEOUT_S + 1)
        if notifier.problem:
            say(notifier.problem)


def tell_capture(args: argparse.Namespace, outcome: CaptureRecord | GputopError, *, simulated: bool) -> None:
    """Tells the end of a capture that no session makes: its record, or the error that ended it."""
    if not args.notify:
        return
    from gputop.session.notifier import Notification, Teller, captured, parse_ways
    from gputop.simulation.node import HOSTNAME

    news = ("the capture failed", outcome.in_one_line) if isinstance(outcome, GputopError) else (
        captured(outcome), str(outcome.path))
    host = HOSTNAME if simulated else os.uname().nodename
    teller = Teller(parse_ways(args.notify))
    teller.tell(Notification.of("capture", time.time(), host, *news, simulated))
    teller.close()
    if teller.problem:
        say(teller.problem)
