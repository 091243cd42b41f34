"""``gputop attach PID``: a profiler server in a process that has been running without one."""

from __future__ import annotations

import argparse
import sys
import textwrap

from gputop.commands.common import width
from gputop.commands.option_types import pid, port
from gputop.core.errors import EXIT_OK, EXIT_USAGE, GputopError
from gputop.core.signal_handlers import unwinding
from gputop.text import console
from gputop.text.commands import short_command
from gputop.text.console import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pid", type=pid, metavar="PID", help="a TensorFlow, JAX or PyTorch process")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    parser.add_argument("--port", type=port, default=0, metavar="N", help="port of the server (default: any free port)")


def run(args: argparse.Namespace) -> int:
    from gputop.launch.attach import serving
    from gputop.launch.serve import examine, make_ready
    from gputop.profiler.kineto.clients import client_of

    process = examine(args.pid)
    client = client_of(args.pid)
    if client is not None and client.folder is not None:
        console.write_text(f"PyTorch's profiler in process {args.pid} is already waiting for gputop")
        return EXIT_OK
    address = serving(args.pid)
    if address is not None:
        console.write_text(f"process {args.pid} already has a profiler server at {address}")
        return EXIT_OK
    if not args.yes and not agreed(args.pid, process.user, process.command):
        say("nothing was done")
        return EXIT_OK
    with unwinding():
        ready = make_ready(args.pid, port=args.port, started=process.started)
    console.write_text(f"{ready.line}; gputop finds it automatically")
    return EXIT_OK


def agreed(pid: int, user: str, command: str) -> bool:
    """Return whether the user answers yes; raises GputopError where nobody can be asked."""
    if not sys.stdin.isatty():
        raise GputopError("gputop asks before it starts a server in a running process, but there is no "
                          "terminal", "To start the server without confirmation: --yes", EXIT_USAGE)
    from gputop.launch.serve import what_it_does

    what = (f"{what_it_does(pid)} Ctrl-c, TERM and HUP stop gputop once the thread is released. If gputop is killed "
            "with kill -9, the thread returns on its own, and the server may or may not start.")
    shown = console.one_line(short_command(command), 200)
    whole = textwrap.fill(what, width(), break_on_hyphens=False)
    return confirmed(f"Process {pid} of {console.one_line(user, 40)}: {shown}\n{whole}", "Start it? [y/N] ")


def confirmed(note: str, question: str) -> bool:
    console.note(note)
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False
