"""``gputop snapshot``: print the state of the node now."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from gputop.commands.arguments import add_shared, rules_options, watch_options
from gputop.commands.common import options_of, source_of, start
from gputop.commands.option_types import positive_seconds
from gputop.core.errors import EXIT_OK, EXIT_USAGE, GputopError
from gputop.text import console
from gputop.text.console import say

# Text under such a name would be opened by what cannot show it.
_NOT_WRITTEN = frozenset((".png", ".jpg", ".jpeg", ".gif", ".webp", ".pdf", ".csv", ".xlsx", ".gz", ".zip"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, watch_options, rules_options)
    parser.add_argument("--format", choices=("json", "text", "svg", "html"), default=None,
                        help="html: one page for a ticket; default: by FILE's ending (.json, .svg, .html), else text")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write to this file instead of stdout")
    parser.add_argument("--seconds", type=positive_seconds, default=2.0, metavar="S", help="how long to sample (2)")


def run(args: argparse.Namespace) -> int:
    from gputop.core.files import write_file
    from gputop.export.snapshot import format_of, render
    from gputop.session.session import Session

    if args.format is None and args.output is not None and args.output.suffix.lower() in _NOT_WRITTEN:
        raise GputopError(f"a snapshot cannot be written as {args.output.suffix}: {args.output}",
                          "Name a file that ends in .html, .svg, .json or .txt, or say which form with --format.",
                          EXIT_USAGE)
    session = Session(source_of(args), options_of(args))
    with contextlib.closing(session):
        start(session, args.seconds)
        if not session.servers_known or args.attach:
            session.update_servers()
        for server in session.servers:
            if server.problem is not None:
                say(f"no profiler server at {server.address}: {server.problem}")
        text = render(session, args.format or format_of(args.output or Path()))
    if args.output is None:
        console.write_document(text)
    else:
        there = args.output.is_file()
        write_file(args.output, text.encode(), devices=True)
        say(f"wrote {args.output}{', and replaced the old file' if there else ''}")
    return EXIT_OK
