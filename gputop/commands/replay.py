"""``gputop replay``: open a recording or a snapshot in the monitor."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from gputop.commands.arguments import add_shared
from gputop.commands.common import options_of, preferences_of
from gputop.commands.monitor import unfit_terminal
from gputop.commands.option_types import replay_speed, seconds_from_zero
from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.text.console import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "custom rules", "the screen")
    parser.add_argument("file", type=Path, metavar="FILE", help="a file from gputop record, or a JSON or HTML snapshot")
    parser.add_argument("--speed", type=replay_speed, default=1.0, metavar="X",
                        help="playback speed: a factor, or max (1)")
    parser.add_argument("--start", type=seconds_from_zero, default=0.0, metavar="S",
                        help="start this many seconds into the recording (0)")


def run(args: argparse.Namespace) -> int:
    from gputop.replay.snapshot_source import open_player
    from gputop.session.session import Session

    player, snapshot = open_player(args.file, args.start, args.speed, say)
    unfit = unfit_terminal()
    if unfit:
        raise GputopError(f"replay needs a terminal: {unfit}", "To summarize a recording: gputop report FILE",
                          EXIT_USAGE)
    with contextlib.closing(Session(player, options_of(args), replayed_snapshot=snapshot)) as session:
        preferences = preferences_of(args)
        from gputop.tui import app

        return app.run(session, preferences)
