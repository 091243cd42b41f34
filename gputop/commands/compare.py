"""``gputop compare``: two traces, analyses or snapshots."""

from __future__ import annotations

import argparse

from gputop.commands.common import width
from gputop.core.errors import EXIT_OK
from gputop.text import console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, meaning in (("a", "before"), ("b", "after")):
        parser.add_argument(name, metavar=name.upper(),
                            help=f"{meaning}: a trace, what analyze --json printed, or a JSON snapshot")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    from gputop.comparison.compare import compare
    from gputop.comparison.report import text_report

    comparison = compare(args.a, args.b)
    if args.json:
        console.write_json(comparison.to_json())
    else:
        console.write_text(text_report(comparison, width()), end="")
    return EXIT_OK
