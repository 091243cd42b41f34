"""``gputop report``: hours and days of recordings, told as GPU time, energy, worst hours and memory; or what one job
of Slurm did with its GPUs, from recordings or from a Prometheus."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from gputop.commands.arguments import add_shared
from gputop.commands.common import width
from gputop.commands.option_types import hours, output_file, price
from gputop.commands.settings import PROMETHEUS_CREDENTIALS
from gputop.core.errors import EXIT_OK, EXIT_USAGE, GputopError
from gputop.text import console
from gputop.text.console import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "custom rules")
    parser.add_argument("paths", nargs="*", metavar="RECORDING",
                        help="files from gputop record, or the folder from --rotate; files of one node are joined")
    parser.add_argument("--job", default=None, metavar="ID",
                        help="summarize how this job used its GPUs in 20 lines, from the recordings or from Prometheus "
                             "(--prometheus, or the setting)")
    parser.add_argument("--prometheus", default=argparse.SUPPRESS, metavar="URL",
                        help="with --job: address of Prometheus, as for gputop cluster")
    parser.add_argument("--hours", type=hours, default=24.0, metavar="H",
                        help="with --job and Prometheus: hours to look back (24)")
    parser.add_argument("--price-per-kwh", type=price, default=None, metavar="PRICE",
                        help="also print the cost of the GPUs' energy, in the currency of PRICE")
    parser.add_argument("--html", type=output_file, default=None, metavar="FILE",
                        help="write an HTML page instead of text")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    from gputop.goodput.recorded import report

    if args.job is not None:
        return _of_job(args)
    if not args.paths:
        raise GputopError("no recording was given", "gputop report FILE…, or gputop report --job ID", EXIT_USAGE)
    done = report([Path(path) for path in args.paths], args.price_per_kwh)
    if args.html is not None:
        from gputop.core.files import write_file
        from gputop.export.days import to_html

        write_file(args.html, to_html(done).encode(), devices=True)
        say(f"report written: {args.html}")
    if args.json:
        from gputop.core.codec import to_document

        console.write_json(to_document(done))
    elif args.html is None:
        from gputop.goodput.text import to_text

        console.write_text(to_text(done, width()))
    return EXIT_OK


def _of_job(args: argparse.Namespace) -> int:
    from gputop.advice.fleet.advise import asked_limits
    from gputop.cluster.job_use import RecordedUse, history_of, lines, of_prometheus
    from gputop.cluster.prometheus import connected
    from gputop.goodput.recorded import RecordedTime
    from gputop.render.table import bars

    if args.json or args.html is not None or args.price_per_kwh is not None:
        raise GputopError("--job prints text", "Leave out --json, --html and --price-per-kwh.", EXIT_USAGE)
    url = args.prometheus or str(args.config["prometheus"])
    if args.paths:
        timeline, recorded = RecordedTime([Path(path) for path in args.paths]), RecordedUse(args.job)
        for sample, _ in timeline.samples():
            recorded.add(sample)
        use = recorded.use(f"{len(timeline.parts)} recording{'s' * (len(timeline.parts) > 1)} of {timeline.host}")
    elif url:
        settings = {name: str(args.config[name]) for name in PROMETHEUS_CREDENTIALS}
        with connected(url, settings, say, may_ask=os.isatty(0)) as client:
            use = of_prometheus(client, args.job, args.hours, time.time())
    else:
        raise GputopError("neither a recording nor a Prometheus address was given",
                          "gputop report --job ID FILE…, or gputop report --job ID --prometheus http://HOST:9090",
                          EXIT_USAGE)
    history = history_of(use)
    drawn = bars(history.values, min(len(history.values), max(10, min(60, width() - 13))))
    console.write_text("\n".join(lines(use, asked_limits().idle, drawn)))
    return EXIT_OK
