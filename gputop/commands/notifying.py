"""``--notify``: somebody is told of what happens while a command runs."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.text.console import say

if TYPE_CHECKING:
    from gputop.profiler.capture.records import CaptureRecord
    from gputop.session.session import Session


_SCREEN_WAIT_S = 1.0


def check_notify(args: argparse.Namespace) -> None:
    """Check ``--notify`` before the first frame. Raises GputopError (wrong usage)."""
    if args.notify:
        from gputop.session.notifier import parse_ways

        ways = parse_ways(args.notify)
        if host := ways.in_the_clear:
            say(f"the webhook's address and token go to {host} unencrypted: use https://")
        if ways.bell and args.command not in (None, "run"):
            raise GputopError("--notify bell rings the monitor's terminal, but this command has no monitor",
                              "Use command:LINE or webhook.", EXIT_USAGE)


@contextlib.contextmanager
def notifying(args: argparse.Namespace, session: Session) -> Iterator[None]:
    """Tells what is new in the session during the block; a way that fails is said at the end. What is still being told
    then has a second beside a screen, which closes at once, and elsewhere the time that a receiver has."""
    if not args.notify:
        yield
        return
    from gputop.session.notifier import TIMEOUT_S, Notifier, parse_ways

    notifier = Notifier(session, parse_ways(args.notify))
    try:
        yield
    finally:
        notifier.close(_SCREEN_WAIT_S if args.command in (None, "run") else TIMEOUT_S + 1)
        if notifier.problem:
            say(notifier.problem)


@contextlib.contextmanager
def notifying_of_capture(args: argparse.Namespace, *, simulated: bool) -> Iterator[list[CaptureRecord]]:
    """Tells, behind the block, the end of a capture that no session makes: of the record that the block adds to the
    list, else of the error that it raises."""
    made: list[CaptureRecord] = []
    try:
        yield made
    except GputopError as error:
        if not made and args.notify:
            _tell_capture(args, "the capture failed", error.in_one_line, simulated=simulated)
        raise
    finally:
        if made and args.notify:
            from gputop.session.notifications import captured

            _tell_capture(args, captured(made[0]), str(made[0].path), simulated=simulated)


def _tell_capture(args: argparse.Namespace, title: str, text: str, *, simulated: bool) -> None:
    from gputop.session.notifications import Notification
    from gputop.session.notifier import parse_ways, tell
    from gputop.simulation.node import HOSTNAME

    host = HOSTNAME if simulated else os.uname().nodename
    notification = Notification.of("capture", time.time(), host, title, text, simulated)
    if problem := tell(parse_ways(args.notify), notification):
        say(problem)
