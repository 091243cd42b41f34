"""``gputop record``: telemetry into a file."""

from __future__ import annotations

import argparse
import signal
import threading
from pathlib import Path

from gputop.commands.arguments import add_shared, watch_options
from gputop.commands.common import source_of
from gputop.commands.option_types import positive_seconds
from gputop.core.errors import EXIT_OK
from gputop.core.signal_handlers import signal_handlers, termination_handlers
from gputop.text.console import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, watch_options)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE",
                        help="the file to write, which must not exist yet")
    parser.add_argument("--seconds", type=positive_seconds, default=None, metavar="S",
                        help="how long (default: until ctrl-c)")


def run(args: argparse.Namespace) -> int:
    from gputop.replay.record import record

    stop = threading.Event()

    def ended(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one quits at once
        stop.set()

    with signal_handlers(termination_handlers(ended)):
        record(source_of(args), args.interval, args.output, args.seconds, stop, say)
    return EXIT_OK
