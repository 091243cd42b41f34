"""``gputop report``: hours and days of recordings, told as GPU time, energy, worst hours and memory."""

from __future__ import annotations

import argparse
from pathlib import Path

from gputop.commands.common import width
from gputop.commands.option_types import price
from gputop.core.errors import EXIT_OK
from gputop.text import console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="RECORDING",
                        help="of gputop record; several of one node are one line of time")
    parser.add_argument("--price-per-kwh", type=price, default=None, metavar="PRICE",
                        help="also say what the GPUs' energy cost, in the currency of PRICE")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    from gputop.goodput.recorded import report

    done = report([Path(path) for path in args.paths], args.price_per_kwh)
    if args.json:
        from gputop.core.codec import to_document

        console.write_json(to_document(done))
    else:
        from gputop.goodput.text import to_text

        console.write_text(to_text(done, width()))
    return EXIT_OK
