"""``gputop compare``: two traces, analyses or snapshots."""

from __future__ import annotations

import argparse

from gputop.commands.arguments import add_shared, rules_options
from gputop.commands.common import width
from gputop.core.errors import EXIT_OK
from gputop.text import console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, rules_options)
    for name, meaning in (("a", "before"), ("b", "after")):
        parser.add_argument(name, metavar=name.upper(),
                            help=f"{meaning}: a trace, what analyze --json printed, or a JSON snapshot")
    for name in "ab":
        parser.add_argument(f"--again-{name}", metavar="PATH", action="append", default=[],
                            help=f"another run of {name.upper()}'s job, any number of times: makes small changes surer")
    parser.add_argument("--verbose", action="store_true", help="also what did not change, and how it is judged")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    from gputop.comparison.compare import compare
    from gputop.comparison.report import text_report

    comparison = compare(args.a, args.b, again_a=args.again_a, again_b=args.again_b)
    if args.json:
        console.write_json(comparison.to_json())
    else:
        console.write_text(text_report(comparison, width(), everything=args.verbose), end="")
    return EXIT_OK
