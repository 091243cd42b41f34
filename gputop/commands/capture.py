"""``gputop capture``: one trace, headless, with its findings."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from typing import TYPE_CHECKING

from gputop.commands.common import options_of, say, source_of
from gputop.core.errors import EXIT_OK
from gputop.core.signal_handlers import signal_handlers, termination_handlers
from gputop.launch.xprof import logdir_of, open_command

if TYPE_CHECKING:
    from gputop.profiler.capture.records import CaptureRecord


def run(args: argparse.Namespace) -> int:
    from gputop.profiler.capture.records import CaptureStatus
    from gputop.session.captures import capture_and_analyse, choose_servers, find_servers

    options = options_of(args)
    if options.dips is not None:
        from gputop.commands import dips

        return dips.run(args, options)
    own: dict[str, str] = {}
    if args.demo is not None or args.source == "simulated":
        source = source_of(args)
        source.open()
        own.update(source.profiler_endpoints())
    servers, notes = find_servers(options.attach, own, discover=not own and not options.attach)
    for note in notes:
        say(note)
    chosen = choose_servers(servers)
    stop = threading.Event()
    said: list[str] = []

    def interrupted(*_: object) -> None:
        """The first ctrl-c or other signal ends the recording and keeps its data; a second ctrl-c quits."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop.set()
        if "analysing" in said:
            say(f"stopped; the trace is kept in {options.logdir}")
            raise KeyboardInterrupt

    def on_status(status: CaptureStatus) -> None:
        if status.phase not in said:
            said.append(status.phase)
            hint = ""
            if status.phase == "recording":
                hint = f" for {status.chosen_s:g} s ({status.why}); ctrl-c stops it and keeps the data"
            say(f"{status.phase} {status.address}{hint}")
        if status.message and status.message not in said:
            said.append(status.message)
            say(status.message)

    with signal_handlers(termination_handlers(interrupted)):
        record = capture_and_analyse(chosen, args.seconds, options.logdir, stop, threading.Event(), on_status,
                                     args.force)
    return tell(record, as_json=args.json)


def tell(record: CaptureRecord, *, as_json: bool) -> int:
    """Print what came of a capture; raises the problem of its analysis."""
    say(f"trace written: {record.path}")
    say(f"in XProf: {open_command(logdir_of(record.path))}")
    for remark in record.remarks:
        say(remark)
    for note in record.notes:
        say(f"profiler: {note}")
    if record.problem is not None:
        raise record.problem
    if as_json:
        json.dump({**(record.analysis or {}), "capture": record.to_json()}, sys.stdout, indent=1, allow_nan=False)
        print()
    else:
        print(record.report)
    return EXIT_OK
