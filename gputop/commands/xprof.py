"""``gputop xprof``: the captured traces in XProf, in the browser."""

from __future__ import annotations

import argparse
from pathlib import Path

from gputop.commands.option_types import port
from gputop.core.errors import EXIT_OK
from gputop.launch import xprof
from gputop.session.options import DEFAULT_LOGDIR
from gputop.text import console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", type=Path, default=None, metavar="RUN|LOGDIR",
                        help="a trace, its run folder, or a logdir (./gputop-traces)")
    parser.add_argument("--port", type=port, default=8791, metavar="N", help="local port (8791)")
    parser.add_argument("--print", action="store_true", help="print the command without running it")


def run(args: argparse.Namespace) -> int:
    logdir = xprof.logdir_of(args.path or Path(DEFAULT_LOGDIR))
    if args.print:
        console.write_text(xprof.open_command(logdir))
        return EXIT_OK
    return xprof.serve(logdir, args.port)
