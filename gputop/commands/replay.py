"""``gputop replay``: a recording, or a snapshot, in the monitor."""

from __future__ import annotations

import argparse
import contextlib

from gputop.commands.common import options_of, preferences_of, say
from gputop.commands.monitor import unfit_terminal
from gputop.core.errors import EXIT_USAGE, GputopError


def run(args: argparse.Namespace) -> int:
    from gputop.replay.snapshot_source import open_player
    from gputop.session.session import Session

    player, snapshot = open_player(args.file, args.start, args.speed, say)
    unfit = unfit_terminal()
    if unfit:
        raise GputopError(f"replay needs a terminal: {unfit}", "A recording has no other view.", EXIT_USAGE)
    with contextlib.closing(Session(player, options_of(args), replayed_snapshot=snapshot)) as session:
        preferences = preferences_of(args)
        preferences.tell_textual()
        from gputop.tui import app

        return app.run(session, preferences)
