"""``gputop schema``: the JSON Schema of a document that gputop prints."""

from __future__ import annotations

import argparse

from gputop.core.errors import EXIT_OK, EXIT_USAGE, GputopError
from gputop.text import console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default=None, metavar="NAME",
                        help="analyze, analyze-all, baselines, capture, cluster, compare, doctor, notification, "
                             "report, rules, rules-test, snapshot, stacks; without a name: this list")


def run(args: argparse.Namespace) -> int:
    from gputop.commands.documents import SCHEMAS, json_schema

    if args.name is None:
        console.write_text("\n".join(SCHEMAS))
        return EXIT_OK
    if args.name not in SCHEMAS:
        raise GputopError(f"there is no schema {args.name}", f"There are {', '.join(SCHEMAS)}.", EXIT_USAGE)
    console.write_json(json_schema(args.name))
    return EXIT_OK
