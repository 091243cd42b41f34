"""``gputop record``: telemetry into a file."""

from __future__ import annotations

import argparse
import signal
import threading

from gputop.commands.common import say, source_of
from gputop.core.errors import EXIT_OK
from gputop.core.signal_handlers import signal_handlers, termination_handlers


def run(args: argparse.Namespace) -> int:
    from gputop.replay.record import record

    stop = threading.Event()

    def ended(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one quits at once
        stop.set()

    with signal_handlers(termination_handlers(ended)):
        record(source_of(args), args.interval, args.output, args.seconds, stop, say)
    return EXIT_OK
