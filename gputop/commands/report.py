"""``gputop report``: hours and days of recordings, told as GPU time, energy, worst hours and memory."""

from __future__ import annotations

import argparse
from pathlib import Path

from gputop.commands.arguments import add_shared, rules_options
from gputop.commands.common import width
from gputop.commands.option_types import price
from gputop.core.errors import EXIT_OK
from gputop.text import console
from gputop.text.console import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, rules_options)
    parser.add_argument("paths", nargs="+", metavar="RECORDING",
                        help="files of gputop record, or the folder of --rotate; several of one node are joined")
    parser.add_argument("--price-per-kwh", type=price, default=None, metavar="PRICE",
                        help="also print the cost of the GPUs' energy, in the currency of PRICE")
    parser.add_argument("--html", type=Path, default=None, metavar="FILE",
                        help="write one HTML page instead of the text")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    from gputop.goodput.recorded import report

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
