"""Report of a bug in gputop: three lines on standard error, and in a private file to attach to an issue.

Neither holds the value of a variable: a monitor that runs as root holds other users' command lines. Messages and
command lines in it lose their secrets as a snapshot's do. No traceback of another form reaches the terminal.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import threading
import time
from pathlib import Path
from typing import Any

from gputop.core.errors import GputopError
from gputop.core.version import __version__
from gputop.text import console

ISSUES = "https://github.com/gputop/gputop-tf/issues"
KEPT_REPORTS = 10
REPORT_CHARS, _LINE_CHARS, _FRAMES = 100_000, 1000, 60
_PREFIX = "fault-"
_PACKAGE = Path(__file__).resolve().parents[1]


def tell(error: BaseException) -> None:
    """Say in three lines what happened, where the report of it is, and where that may be sent. Never raises.

    What it needs is imported here: nothing of it may cost the first frame a millisecond.
    """
    with contextlib.suppress(Exception):
        console.say(f"internal error in gputop: {_named(error)}{_place(error)}")
        try:
            console.say(f"report file, without variables and secrets: {write_report(error)}")
        except (GputopError, OSError) as problem:
            console.say(f"cannot write a report: {problem}")
        console.say(f"please attach the report to an issue: {ISSUES}")


def write_report(error: BaseException) -> Path:
    """A private file with :func:`report_text` in the cache directory; returns its path.

    Raises GputopError or OSError.
    """
    from gputop.core.files import write_file

    folder = _folder()
    path = folder / f"{_PREFIX}{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{time.monotonic_ns() % 1_000_000:06}.txt"
    write_file(path, report_text(error).encode("utf-8", "replace"))
    return path


def report_text(error: BaseException) -> str:
    """Versions, the command, and where it happened: no locals, no secrets, printable, of a bounded length."""
    import traceback

    from gputop.text import redaction

    lines = [f"gputop {__version__}", f"Python {platform.python_version()}, {platform.system()} {platform.release()} "
             f"{platform.machine()}", "command: " + " ".join(sys.argv), ""]
    for part in traceback.format_exception(type(error), error, error.__traceback__, limit=_FRAMES):
        lines += part.rstrip("\n")[:REPORT_CHARS].split("\n")
    text = "\n".join(redaction.command(console.clean(line, _LINE_CHARS)) for line in lines)
    if len(text) > REPORT_CHARS:  # its end names the error
        text = f"{text[:REPORT_CHARS // 2]}\n…\n{text[-REPORT_CHARS // 2:]}"
    return text + "\n"


def install_hooks() -> None:
    """Report uncaught exceptions of any thread as those of the main one, and those that Python ignores in one line."""
    reported = False

    def in_thread(fault: Any) -> None:
        nonlocal reported
        if fault.exc_value is not None and not isinstance(fault.exc_value, SystemExit) and not reported:
            reported = True  # a thread of which each attempt fails would fill the terminal
            tell(fault.exc_value)

    def not_raised(fault: Any) -> None:
        if fault.exc_value is not None:
            console.say(f"ignored: {_named(fault.exc_value)}")

    threading.excepthook = in_thread
    sys.unraisablehook = not_raised
    sys.excepthook = lambda _, error, __: tell(error)


def _named(error: BaseException) -> str:
    """The kind of an error and its message, without secrets."""
    from gputop.text import redaction

    try:
        message = console.one_line(error, 300)
    except Exception:  # noqa: BLE001  an error may not even be able to say what it is
        message = "without a message"
    return redaction.command(f"{type(error).__name__}: {message}" if message else type(error).__name__)


def _place(error: BaseException) -> str:
    """The innermost line of gputop's own on the way to the error."""
    import traceback

    line_of_gputop = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        with contextlib.suppress(ValueError):
            line_of_gputop = f" (gputop/{Path(frame.f_code.co_filename).resolve().relative_to(_PACKAGE)}:{line})"
    return line_of_gputop


def _folder() -> Path:
    """gputop's folder in the cache directory, with room made in it; a new one where others could write to that."""
    import tempfile

    from gputop.core.files import temporary_place, writable_folder

    base = os.environ.get("XDG_CACHE_HOME") or (f"{home}/.cache" if (home := os.environ.get("HOME")) else "")
    folder = Path(base) / "gputop"
    try:
        if not folder.is_absolute():
            raise FileNotFoundError
        with writable_folder(folder, "XDG_CACHE_HOME") as opened:
            reports = sorted(name for name in opened.names() if name.startswith(_PREFIX))
            for name in reports[:max(0, len(reports) - KEPT_REPORTS + 1)]:
                opened.remove(name)
    except (OSError, GputopError):  # a home that cannot be written to, or another user's
        return Path(tempfile.mkdtemp(prefix="gputop-", dir=temporary_place()))
    return folder
