"""``gputop``: the live monitor."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys

from gputop.commands import common
from gputop.core.imports import without
from gputop.core.own_memory import share_one_heap
from gputop.text.console import say


def run(args: argparse.Namespace) -> int:
    from gputop.telemetry.sampler import Sampler

    share_one_heap()
    source, options = common.source_of(args), common.options_of(args)
    if not source.simulated and (args.source == "dcgm" or not _has_driver()):
        source.open()  # raises with the exact cause, before the screen is taken
    unfit = unfit_terminal()
    if unfit:
        from gputop.commands import snapshot

        gc.enable()
        say(f"{unfit}: gputop prints one snapshot as text instead of the monitor (gputop snapshot has more formats)")
        if args.export is not None:
            say("--export needs the monitor; to serve metrics without the monitor: gputop export")
        return snapshot.run(argparse.Namespace(**{**vars(args), "format": "text", "output": None, "seconds": 2.0}))
    common.check_export(args)
    common.check_notify(args)
    preferences = common.preferences_of(args)
    sampler = Sampler(source, options.interval_s)
    sampler.start()
    from gputop.tui.monitor import first_paint  # while the driver starts

    with first_paint.shown(sampler, preferences.palette()) as frame:
        # The slow imports follow from here on, because the GPUs are on the screen now.
        import_asyncio_without_ssl()
        from gputop.session.session import Session

        with (contextlib.closing(Session(source, options, sampler=sampler)) as session, common.exporting(args, session),
              common.notifying(args, session)):
            from gputop.tui import app

            return app.run(session, preferences, frame)


def import_asyncio_without_ssl() -> None:
    """Import asyncio, which Textual runs on, as on a Python that was built without OpenSSL.

    It imports ``ssl`` for TLS, of which the monitor speaks none; OpenSSL takes 5 MB.
    """
    with without("ssl"):
        import asyncio  # noqa: F401


def unfit_terminal() -> str:
    """Reason why this terminal cannot show the monitor or take its keys; empty where it can."""
    if not sys.stdout.isatty():
        return "standard output is not a terminal"
    if not sys.stdin.isatty():
        return "standard input is not a terminal, so gputop cannot read keys"
    term = os.environ.get("TERM", "")
    if term in ("", "dumb", "unknown"):
        return f"TERM is {term}, a terminal without cursor control" if term else "TERM is not set"
    return ""


def _has_driver() -> bool:
    """Return whether NVML's library can be loaded at all: a cheap check before the first frame."""
    import ctypes

    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True
