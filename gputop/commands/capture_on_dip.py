"""``gputop capture --on-dip``: auto-capture when a GPU dips, headless."""

from __future__ import annotations

import argparse
import contextlib
import signal
import threading

from msgspec.structs import replace

from gputop.commands.common import check_notify, notifying, print_capture, source_of
from gputop.core.errors import EXIT_OK, EXIT_USAGE, GputopError, sentences
from gputop.core.signal_handlers import signal_handlers, termination_handlers
from gputop.profiler.capture.records import CaptureRecord, usable
from gputop.profiler.capture.request import require_no_question
from gputop.session.options import Options
from gputop.session.session import Change, Session
from gputop.text.console import say

_POLL_PERIOD_S = 0.2


def run(args: argparse.Namespace, options: Options) -> int:
    """Capture on dips until ``--dip-max`` captures (1) or ctrl-c; that ends a running capture and keeps its data."""
    assert options.auto_capture is not None
    _check(args, options.auto_capture.max_captures)
    session = Session(source_of(args), replace(options, capture_s=args.seconds))
    auto_capture = session.control.auto_capture
    assert auto_capture is not None
    stop, ended = threading.Event(), threading.Event()

    def interrupted(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second one quits at once
        stop.set()

    def changed(change: Change) -> None:
        status = session.control.status
        if change == "failed" or (change == "capture" and status is not None and not status.running):
            ended.set()

    check_notify(args)
    with contextlib.closing(session), notifying(args, session), signal_handlers(termination_handlers(interrupted)):
        session.listen(changed)
        session.start()
        say(f"waiting for {options.auto_capture.rule.text}; press ctrl-c to stop")
        reported, last_reported, job_known = "", session.results.last_capture, False
        while True:
            ended.wait(_POLL_PERIOD_S)
            if session.failure is not None:
                raise session.failure
            if not job_known and session.feed.sample is not None and usable(session.watch.servers):
                # Which job is meant is asked now: at the dip nobody is there.
                require_no_question(session.watch.question(session.control.request()))
                job_known = True
            if auto_capture.note != reported:
                reported = auto_capture.note
                say(reported)
            running = session.control.running
            if stop.is_set() and not (running and not ended.is_set()):
                return EXIT_OK
            if stop.is_set():
                session.control.stop_capture()
            if ended.is_set() and not running:
                ended.clear()
                _report(session, last_reported, as_json=args.json, full=args.full)
                last_reported = session.results.last_capture
                if auto_capture.done:
                    return EXIT_OK


def _check(args: argparse.Namespace, max_captures: int) -> None:
    """Raises GputopError where the options do not fit each other."""
    if args.json and max_captures > 1:
        raise GputopError("--json prints one document, so it requires --dip-max 1", "Leave out --dip-max or --json.",
                          EXIT_USAGE)
    if args.force:
        raise GputopError("--force cannot be combined with --on-dip, because nobody may be present to accept its cost",
                          "Leave out --force or --on-dip.", EXIT_USAGE)


def _report(session: Session, last_reported: CaptureRecord | None, *, as_json: bool, full: bool) -> None:
    """Print the result of a capture newer than ``last_reported``, or why it failed; the command goes on waiting."""
    status, record = session.control.status, session.results.last_capture
    if record is None or record is last_reported:
        assert status is not None
        say(sentences(status.message, status.fix))
        return
    try:
        print_capture(record, as_json=as_json, full=full)
    except GputopError as error:
        say(error.in_one_line)
