"""``gputop export``: the node's figures for Prometheus, over HTTP or as a file for node_exporter."""

from __future__ import annotations

import argparse
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gputop.commands.arguments import add_shared
from gputop.commands.common import check_metrics, check_notify, notifying, options_of, serving, source_of
from gputop.commands.option_types import listen_address
from gputop.core.errors import EXIT_OK, EXIT_USAGE, GputopError
from gputop.core.signal_handlers import stop_at_end
from gputop.text.console import say

if TYPE_CHECKING:
    from gputop.core.files import Folder
    from gputop.export.openmetrics import Exporter
    from gputop.session.session import Session

DEFAULT_ADDRESS = ("127.0.0.1", 9810)
TEXTFILE_NAME = "gputop.prom"
TEXTFILE_MODE = 0o644  # node_exporter runs as a user of its own
FIRST_SAMPLE_POLL_S = 0.2
TEXTFILE_PERIOD_S = 15.0  # about as often as Prometheus asks node_exporter for it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "what to watch", "custom rules", "notifications", idle=("profiler servers", "captures"))
    parser.add_argument("--listen", type=listen_address, default=None, metavar="[HOST:]PORT",
                        help="serve http://HOST:PORT/metrics, without a password (127.0.0.1:9810). Only this machine "
                             "can reach this address; for others, name another HOST, such as 0.0.0.0")
    parser.add_argument("--textfile", type=Path, default=None, metavar="DIR",
                        help=f"write DIR/{TEXTFILE_NAME} every {TEXTFILE_PERIOD_S:.0f} s, for node_exporter's textfile "
                             "collector; gputop then does not serve metrics unless you also give --listen")


def run(args: argparse.Namespace) -> int:
    from gputop.export.openmetrics import Exporter
    from gputop.session.session import Session

    address = args.listen or (DEFAULT_ADDRESS if args.textfile is None else None)
    check_metrics(address)
    check_notify(args)
    source = source_of(args)
    with contextlib.ExitStack() as parts, stop_at_end() as stop:
        session = Session(source, replace(options_of(args), discover=False))  # nothing is captured here
        folder = None if args.textfile is None else parts.enter_context(_textfile_folder(args.textfile, session))
        exporter = Exporter(session)
        if address is not None:
            say(f"metrics at http://{parts.enter_context(serving(exporter, address))}/metrics")
        parts.enter_context(contextlib.closing(session))
        parts.enter_context(notifying(args, session))
        session.listen(lambda change: stop.set() if change == "failed" else None)
        session.start()
        if folder is None:
            stop.wait()
        else:
            _write_until(stop, folder, exporter)
    if session.failure is not None:
        raise session.failure
    return EXIT_OK


@contextlib.contextmanager
def _textfile_folder(path: Path, session: Session) -> Iterator[Folder]:
    """node_exporter's folder, held open; the file is removed at the end, so that no old figures stay.

    Raises GputopError.
    """
    from gputop.core.files import writable_folder

    if session.feed.source.simulated:
        raise GputopError("gputop does not write simulated values for node_exporter, which would report them as real",
                          "Use --listen, or leave out --demo.", EXIT_USAGE)
    try:
        folder = writable_folder(path, "--textfile DIR", make=False)
    except OSError as error:
        raise GputopError(f"cannot write to {path}: {error.strerror}",
                          "Use the folder that node_exporter's option --collector.textfile.directory names.",
                          EXIT_USAGE) from error
    with folder:
        try:
            yield folder
        finally:
            folder.remove(TEXTFILE_NAME)


def _write_until(stop: threading.Event, folder: Folder, exporter: Exporter) -> None:
    """Write the file now and then; a failure is said when it begins, and the next time may succeed."""
    failed = False
    wait_s = 0.0
    while not stop.wait(wait_s):
        wait_s = FIRST_SAMPLE_POLL_S
        if not exporter.has_rates:
            continue
        wait_s = TEXTFILE_PERIOD_S
        try:
            with folder.replacing(TEXTFILE_NAME, TEXTFILE_MODE) as file:
                file.write(exporter.render(openmetrics=False))
            failed = False
        except OSError as error:
            if not failed:
                say(f"cannot write {folder.path / TEXTFILE_NAME}: {error.strerror or error}; trying again")
            failed = True
