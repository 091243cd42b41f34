"""``gputop snapshot``: print the state of the node now."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from gputop.commands.arguments import add_shared
from gputop.commands.common import options_of, source_of, start
from gputop.commands.option_types import positive_seconds
from gputop.core.errors import EXIT_NO_DATA, EXIT_OK, EXIT_USAGE, GputopError
from gputop.core.samples import FAILED
from gputop.text import console
from gputop.text.console import say

if TYPE_CHECKING:
    from gputop.session.session import Session

# Text under such a name would be opened by what cannot show it.
_NOT_WRITTEN = frozenset((".png", ".jpg", ".jpeg", ".gif", ".webp", ".pdf", ".svg", ".csv", ".xlsx", ".gz", ".zip"))


SERVERS_S = 20.0  # time for the profiler servers' answers, once the samples are there
RENDER_S = 60.0  # time to render the document
_SLOW_S = 5.0  # what takes longer is named
_T = TypeVar("_T")


class _TooLong(Exception):
    """Says what takes so long, and where it is."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "what to watch", "profiler servers", "custom rules", idle=("captures",))
    parser.add_argument("--format", choices=("json", "text", "html"), default=None,
                        help="html: a page for a ticket; default: by FILE's extension (.json, .html), otherwise text")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE",
                        help="output file (default: standard output, also written as -)")
    parser.add_argument("--seconds", type=positive_seconds, default=2.0, metavar="S", help="seconds to sample (2)")


def run(args: argparse.Namespace) -> int:
    from gputop.core.files import write_file
    from gputop.export.snapshot import format_of, render
    from gputop.session.session import Session

    if args.format is None and args.output is not None and args.output.suffix.lower() in _NOT_WRITTEN:
        raise GputopError(f"gputop cannot write a snapshot as {args.output.suffix}: {args.output}",
                          "Name a file that ends in .html, .json or .txt, or choose a format with --format.",
                          EXIT_USAGE)
    session = Session(source_of(args), options_of(args))
    with contextlib.closing(session):
        start(session, args.seconds)
        if not session.watch.servers_known or args.attach:
            try:
                _within(SERVERS_S, "looking for profiler servers", session.watch.update)
            except _TooLong as error:
                say(f"continuing without profiler servers: {error}")
        for server in session.watch.servers:
            if server.problem is not None:
                say(f"no profiler server at {server.address}: {server.problem}")
        kind = args.format or format_of(args.output or Path())
        try:
            text = _within(RENDER_S, f"writing the snapshot as {kind}", lambda: render(session, kind))
        except _TooLong as error:
            raise GputopError(f"no snapshot: {error}", "Check with top whether the node has a free CPU, and try "
                                                       f"--format {'json' if kind == 'text' else 'text'}. If neither "
                                                       "helps, report the problem with this message.") from error
    if args.output is None or str(args.output) == "-":
        console.write_document(text)
    else:
        replaces = args.output.is_file()
        write_file(args.output, text.encode(), devices=True)
        say(f"wrote {args.output}{', and replaced the old file' if replaces else ''}")
    return _status(session)


def _status(session: Session) -> int:
    """Return that of a snapshot without data where no GPU has given any, as of an engine that ended meanwhile."""
    sample = session.feed.sample
    if sample is None or not sample.gpus or any(gpu.state != FAILED for gpu in sample.gpus):
        return EXIT_OK
    say(f"no GPU returned values: {sample.gpus[0].message}")
    return EXIT_NO_DATA


def _within(limit_s: float, what: str, work: Callable[[], _T]) -> _T:
    """Return the result of ``work``. Raises _TooLong after ``limit_s``: the work is left to its thread. Work that is
    done but took long is named."""
    done: list[_T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # noqa: BLE001  thread boundary: raised by the caller
            failed.append(error)

    begun_s = time.monotonic()
    thread = threading.Thread(target=run, name="gputop-snapshot", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not done and not failed:
        raise _TooLong(f"{what} took longer than {limit_s:g} s{_place(thread)}")
    if failed:
        raise failed[0]
    took_s = time.monotonic() - begun_s
    if took_s > _SLOW_S:
        say(f"{what} took {took_s:.0f} s")
    return done[0]


def _place(thread: threading.Thread) -> str:
    """The function of gputop that a thread is in: "; it is in render (snapshot.py, line 291)"."""
    frame = sys._current_frames().get(thread.ident or 0)
    calls = [step for step in traceback.extract_stack(frame) if "gputop" in Path(step.filename).parts] if frame else []
    return f"; it is in {calls[-1].name} ({Path(calls[-1].filename).name}, line {calls[-1].lineno})" if calls else ""
