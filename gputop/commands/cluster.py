"""``gputop cluster``: the jobs of a cluster and their GPUs, as a Prometheus knows them, or the nodes themselves."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gputop.commands.arguments import add_shared
from gputop.commands.common import preferences_of, width
from gputop.commands.option_types import hours, positive_seconds, refresh_s
from gputop.commands.settings import PROMETHEUS_CREDENTIALS
from gputop.core.errors import EXIT_OK, EXIT_USAGE, GputopError
from gputop.text import console
from gputop.text.console import say

if TYPE_CHECKING:
    from gputop.advice.fleet.advise import FleetReport
    from gputop.cluster.collect import Collector, FleetCollector
    from gputop.commands.settings import Config

_ALL = "all"
_HISTORY_COLUMNS = 90


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "other nodes", "gputop on other nodes", "the screen")
    parser.add_argument("--nodes", default=None, metavar="LIST",
                        help="without Prometheus, ask gputop on these nodes over passwordless ssh: n[01-16], n01,n02, "
                             "or @FILE. The history then begins when gputop starts")
    parser.add_argument("--job", default=None, metavar="ID",
                        help="show only this job: a Slurm job ID (for an array, all of its tasks, or one task such as "
                             f"4711_3) or a pod. Inside a job, the default is that job, and '{_ALL}' shows all")
    parser.add_argument("--once", action="store_true", help="print one sample as text and exit")
    parser.add_argument("--json", action="store_true", help="print one sample as a JSON document")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE",
                        help="write one sample to a file: .json, .html, otherwise text")
    parser.add_argument("--logdir", type=Path, default=argparse.SUPPRESS, metavar="DIR",
                        help="folder for snapshots made with the s key (./gputop-traces)")
    parser.add_argument("--hours", type=hours, default=3.0, metavar="H", help="hours of history to show (3)")
    parser.add_argument("--timeout", type=positive_seconds, default=20.0, metavar="S",
                        help="seconds to wait for an answer from Prometheus (20)")
    parser.add_argument("--refresh", type=refresh_s, default=15.0, metavar="S", help="seconds between samples (15)")


def run(args: argparse.Namespace) -> int:
    from gputop.advice.fleet.advise import report_of
    from gputop.cluster.collect import complete_fleet
    from gputop.cluster.model import FleetView
    from gputop.commands.monitor import unfit_terminal
    from gputop.render.time_slices import slice_for

    span_s = 3600 * args.hours
    view = FleetView(span_s=span_s, step_s=max(30.0, slice_for(span_s, _HISTORY_COLUMNS)))
    job = wanted_job(args.job, os.environ)
    once = args.once or args.json or args.output is not None
    unfit = "" if once else unfit_terminal()
    if unfit:
        say(f"{unfit}: gputop prints one sample as text instead")
    with _collector(args) as (collector, login):
        if once or unfit:
            return _print(report_of(complete_fleet(collector, view), job), args)
        preferences = preferences_of(args)
        from gputop.tui.cluster import cluster_app as app
        from gputop.tui.cluster.fleet_rows import commands_for

        commands = partial(commands_for, login=login, remote=args.remote_command)
        return app.run(collector, lambda fleet: report_of(fleet, job), view, args.refresh, commands, args.logdir,
                       preferences)


def wanted_job(named: str | None, environ: Mapping[str, str]) -> str:
    """The one job to show, "" for all: the one that was named, else the one that gputop runs in."""
    if named is not None:
        return "" if named == _ALL else named
    slurm_job = environ.get("SLURM_JOB_ID", "")
    return slurm_job if re.fullmatch(r"\d{1,12}", slurm_job) else ""


@contextlib.contextmanager
def _collector(args: argparse.Namespace) -> Iterator[tuple[FleetCollector, str]]:
    """Yield the collector of the fleet, and the login node that leads to the others, with its port if it has one; ""
    without."""
    if args.nodes is not None and args.prometheus:
        raise GputopError("--nodes and --prometheus cannot be combined", "", EXIT_USAGE)
    if args.nodes is None:
        with _of_prometheus(args) as collector:
            yield collector
        return
    from gputop.advice.fleet.advise import asked_limits
    from gputop.cluster.collect import NodesCollector
    from gputop.telemetry.agents import SCHEMA, Request, Ssh, parse_nodes

    ssh = Ssh(args.remote_command, Request(SCHEMA, 1.0))
    with contextlib.closing(NodesCollector(parse_nodes(args.nodes), ssh, asked_limits(), _squeue(),
                                           args.refresh)) as nodes:
        yield nodes, ""


@contextlib.contextmanager
def _of_prometheus(args: argparse.Namespace) -> Iterator[tuple[Collector, str]]:
    from gputop.advice.fleet.advise import asked_limits
    from gputop.cluster.collect import Collector
    from gputop.cluster.prometheus import connected

    config: Config = args.config
    url = args.prometheus or str(config["prometheus"])
    if not url:
        raise GputopError("no Prometheus address was given",
                          "gputop cluster --prometheus http://HOST:9090, or set prometheus in the config file. Without "
                          "Prometheus, gputop cluster --nodes n[01-16] asks the nodes directly.", EXIT_USAGE)
    settings = {name: str(config[name]) for name in PROMETHEUS_CREDENTIALS}
    with connected(url, settings, say, may_ask=os.isatty(0), timeout_s=args.timeout) as client:
        endpoint = client.endpoint
        port = "" if endpoint.login_port is None else f":{endpoint.login_port}"
        yield Collector(client, asked_limits(), _squeue(endpoint.login, endpoint.login_port)), endpoint.login + port


def _squeue(login: str = "", port: int | None = None) -> Callable[[], bytes]:
    from gputop.cluster import slurm
    from gputop.text.programs import run_on

    return lambda: run_on(login, port, slurm.COMMAND, slurm.TIMEOUT_S, slurm.MAX_BYTES)


def _print(report: FleetReport, args: argparse.Namespace) -> int:
    from gputop.core.files import write_file
    from gputop.export.cluster import render, to_document

    if args.output is not None and str(args.output) != "-":
        form = {".json": "json", ".html": "html", ".htm": "html"}.get(args.output.suffix.lower(), "text")
        write_file(args.output, render(report, form).encode(), devices=True)
        say(f"wrote {args.output}")
    elif args.json:
        console.write_json(to_document(report))
    else:
        console.write_text(render(report, "text", width()), end="")
    return EXIT_OK
