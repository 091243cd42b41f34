"""``gputop xprof``: the captured traces in XProf, in the browser."""

from __future__ import annotations

import argparse
from pathlib import Path

from gputop.core.errors import EXIT_OK
from gputop.launch import xprof
from gputop.session.options import DEFAULT_LOGDIR


def run(args: argparse.Namespace) -> int:
    logdir = xprof.logdir_of(args.path or Path(DEFAULT_LOGDIR))
    if args.print:
        print(xprof.open_command(logdir))
        return EXIT_OK
    return xprof.serve(logdir, args.port)
