"""``gputop record``: telemetry into a file."""

from __future__ import annotations

import argparse
import signal
import threading

from gputop.commands.common import say, source_of
from gputop.errors import EXIT_OK


def run(args: argparse.Namespace) -> int:
    from gputop.recording.record import record

    stop = threading.Event()

    def ended(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one quits at once
        stop.set()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, ended) for number in numbers}
    try:
        record(source_of(args), args.interval, args.output, args.seconds, stop, say)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return EXIT_OK
