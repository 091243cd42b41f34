"""``gputop``: the live monitor."""

from __future__ import annotations

import argparse
import contextlib
import sys

from gputop.commands.common import options_of, source_of
from gputop.errors import EXIT_USAGE, GputopError


def run(args: argparse.Namespace) -> int:
    from gputop.session import Session
    from gputop.tui import first_frame

    source = source_of(args)
    if not source.simulated and (args.source == "dcgm" or not _has_driver()):
        source.open()  # raises with the exact cause, before the screen is taken
    if not sys.stdout.isatty():
        raise GputopError("the monitor needs a terminal", "Headless: gputop snapshot --format json|text",
                          EXIT_USAGE)
    with contextlib.closing(Session(source, options_of(args))) as session:
        painted = first_frame.show(session)
        try:
            from gputop.tui import app
        except BaseException:
            if painted:
                first_frame.leave()
            raise
        return app.run(session)


def _has_driver() -> bool:
    """Whether NVML's library can be loaded at all: a cheap look before the first frame."""
    import ctypes

    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True
