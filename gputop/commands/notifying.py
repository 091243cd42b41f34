"""``--notify``: somebody is told of what happens while a command runs."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.text.console import say

if TYPE_CHECKING:
    from gputop.session.session import Session


def check_notify(args: argparse.Namespace) -> None:
    """What can be said of ``--notify`` before the first frame. Raises GputopError (wrong usage)."""
    if args.notify:
        from gputop.session.notifier import parse_ways

        if parse_ways(args.notify).bell and args.command not in (None, "run"):
            raise GputopError("--notify bell rings the monitor's terminal, but this command has no monitor",
                              "Use command:LINE or webhook.", EXIT_USAGE)


@contextlib.contextmanager
def notifying(args: argparse.Namespace, session: Session) -> Iterator[None]:
    """Tells what is new in the session during the block; a way that fails is said at the end."""
    if not args.notify:
        yield
        return
    from gputop.session.notifier import Notifier, parse_ways

    notifier = Notifier(session, parse_ways(args.notify))
    try:
        yield
    finally:
        notifier.close()
        if notifier.problem:
            say(notifier.problem)
