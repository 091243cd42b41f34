"""``gputop capture``: capture one trace and print its findings."""

from __future__ import annotations

import argparse
import signal
import threading

from gputop.commands.arguments import add_shared, dip_options, notify_options, rules_options, watch_options
from gputop.commands.common import options_of, print_capture, source_of
from gputop.commands.notifying import check_notify, notifying_of_capture
from gputop.commands.option_types import positive_seconds
from gputop.core.signal_handlers import signal_handlers, termination_handlers
from gputop.text.console import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "gputop capture [options] [HOST:PORT…]"  # an address alone is taken as that of --attach
    add_shared(parser, watch_options, rules_options, dip_options, notify_options)
    parser.add_argument("--seconds", type=positive_seconds, default=10.0, metavar="S",
                        help="maximum length of the trace (10); a short probe may find that less is enough")
    parser.add_argument("--force", action="store_true",
                        help="record all of --seconds without a probe, even if it slows the job and the node")
    parser.add_argument("--all-workers", action="store_true",
                        help="capture all workers that --attach names, at most 64; without it, of more than 8 only the "
                             "first, the middle and the last")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    from gputop.profiler.capture.choose_workers import MAX_ALL_WORKERS, MAX_WORKERS, choose_workers
    from gputop.profiler.capture.records import CaptureStatus
    from gputop.session.captures import capture_and_analyze, choose_servers, find_named_servers, left_out, too_many
    from gputop.session.counters import CounterWatch
    from gputop.session.stack_watch import StackChoice, simulated_stacks

    options = options_of(args)
    if options.auto_capture is not None:
        from gputop.commands import capture_on_dip

        return capture_on_dip.run(args, options)
    check_notify(args)
    own: dict[str, str] = {}
    source = source_of(args)
    if source.simulated:
        source.open()
        own.update(source.profiler_endpoints())
    servers, notes = find_named_servers(options.attach, own, discover=not own and not options.attach)
    for note in notes:
        say(note)
    chosen = choose_servers(servers)
    for note in left_out(servers, chosen):
        say(note)
    answering = sum(s.problem is None for s in chosen)
    if args.all_workers and answering > MAX_ALL_WORKERS:
        raise too_many(answering)
    if not args.all_workers and answering > MAX_WORKERS:
        choice = choose_workers([s.address for s in chosen if s.problem is None], {})
        say(f"capturing {choice.text()}; --all-workers captures all")
        chosen = tuple(s for s in chosen if s.address in choice.chosen)
    stop = threading.Event()
    reported: list[str] = []

    def interrupted(*_: object) -> None:
        """The first ctrl-c or other signal ends the recording and keeps its data; a second ctrl-c quits."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop.set()
        if "analyzing" in reported:
            say(f"stopped; the trace is kept in {options.logdir}")
            raise KeyboardInterrupt

    def on_status(status: CaptureStatus) -> None:
        if status.phase not in reported:
            reported.append(status.phase)
            hint = ""
            if status.phase == "recording":
                hint = f" for {status.chosen_s:g} s ({status.why}); ctrl-c stops it and keeps the data"
            say(f"{status.phase} {status.address}{hint}")
        if status.message and status.message not in reported:
            reported.append(status.message)
            say(status.message)

    watch = CounterWatch(source, options.interval_s)
    with notifying_of_capture(args, simulated=source.simulated) as made:
        with signal_handlers(termination_handlers(interrupted)), watch.running():
            made.append(capture_and_analyze(chosen, args.seconds, options.logdir, stop, threading.Event(), on_status,
                                            args.force, watch.counters,
                                            stacks=StackChoice(options.stacks, simulated=simulated_stacks(source))))
        return print_capture(made[0], as_json=args.json)
