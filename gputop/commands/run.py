"""``gputop run``: a job with a profiler server inside, and the monitor beside it."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from gputop.commands import common
from gputop.commands.arguments import add_shared
from gputop.commands.monitor import unfit_terminal
from gputop.commands.option_types import port
from gputop.core.errors import EXIT_OK, EXIT_USAGE, GputopError
from gputop.launch import environment
from gputop.text import console, crash
from gputop.text.console import say

_EPILOG = """\
The server starts in the first Python process of the job that imports TensorFlow or JAX, and in each rank
(LOCAL_RANK, OMPI_COMM_WORLD_RANK, SLURM_PROCID, TF_CONFIG, …). With PyTorch, the job's profiler is waiting for gputop.
To prepare a job without gputop run, set this variable:
  export PYTHONPATH=$(gputop run --print-path)${PYTHONPATH:+:$PYTHONPATH}
and optionally GPUTOP_PORT=6009 and GPUTOP_LISTEN=all.
The monitor uses the terminal, so the job's standard input is empty and its output goes to a file (press l to see it).
exit status: that of the job; 126 or 127 if the job cannot be started"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage, parser.epilog = "gputop run [options] -- COMMAND…", _EPILOG
    add_shared(parser, "what to watch", "profiler servers", "captures", "custom rules", "the screen", "metrics",
               "notifications")
    parser.add_argument("job", nargs=argparse.REMAINDER, metavar="-- COMMAND…",
                        help="the command to start: python train.py …, bash train.sh, or a launcher such as torchrun")
    parser.add_argument("--headless", action="store_true",
                        help="run without the monitor: the job replaces gputop, with its terminal, input and signals")
    parser.add_argument("--port", type=port, default=0, metavar="N",
                        help="port of the node's first process; other ranks use the following ports (default: any "
                             "free)")
    parser.add_argument("--listen", choices=("local", "all"), default="local",
                        help="hosts that can reach the server: this host (default), or any host without a password")
    parser.add_argument("--output", type=Path, default=None, metavar="FILE",
                        help="new file for the job's output while the monitor uses the terminal (LOGDIR/run-….log)")
    parser.add_argument("--print-path", action="store_true",
                        help="print the folder to add to PYTHONPATH to prepare a job, and exit")


def run(args: argparse.Namespace) -> int:
    if args.print_path:
        console.write_text(str(environment.INSIDE))
        return EXIT_OK
    if not args.job:
        raise GputopError("there is no command to "
                          "run", "Write the command after --: gputop run -- python train.py", EXIT_USAGE)
    file = environment.find_command(args.job)
    warning = environment.launch_warning(args.job, file)
    if warning is not None:
        say(warning)
    token = environment.new_token()
    environ = environment.job_environ(environment.inherited_environ(), token, args.port, args.listen)
    if args.headless:
        _become(file, args.job, environ, args.output)
    unfit = unfit_terminal()
    if unfit:
        say(f"{unfit}: the job runs without the monitor, as with --headless")
        _become(file, args.job, environ, args.output)
    return _beside(args, token, environ)


def _become(file: str, argv: list[str], environ: dict[str, str], output: Path | None) -> NoReturn:
    """Replace gputop's process by the job, so that it has the same parent, terminal and PID."""
    sys.stdout.flush()
    sys.stderr.flush()
    own_stderr = os.dup(2)  # not the job's
    if output is not None:
        from gputop.launch.job import open_log

        descriptor = open_log(output)
        for number in (1, 2):
            os.dup2(descriptor, number)
        os.close(descriptor)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the job would inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(file, argv, environ)
    except OSError as error:
        os.dup2(own_stderr, 2)
        if output is not None:
            output.unlink(missing_ok=True)
        raise GputopError(f"cannot start {argv[0]}: {error.strerror}",
                          "Check that it is a program, or a script with a #! line.",
                          environment.EXIT_NOT_EXECUTABLE) from None


def _beside(args: argparse.Namespace, token: str, environ: dict[str, str]) -> int:
    """Run the job beside the monitor; once the monitor is quit, show the job's own output."""
    from gputop.launch.attach import Announcement, Announcements
    from gputop.launch.job import StartedJob, exit_like, forward_signals, log_path, wait_for_exit
    from gputop.session.session import Session

    options = common.options_of(args)
    common.check_export(args)
    common.check_notify(args)
    source = common.source_of(args)
    try:
        source.open()  # what keeps the monitor from running is reported before the job starts
    except GputopError as error:
        raise GputopError(error.message, f"{error.fix} Without the monitor: gputop run --headless -- …",
                          error.exit_code) from None
    session = Session(source, options)
    announced: list[Announcement] = []

    def on_announcement(announcement: Announcement) -> None:
        announced.append(announcement)
        if announcement.address is not None:
            session.watch.attach(announcement.address)
        job.set_server(announcement.address, announcement.line)

    with contextlib.closing(Announcements(token)) as announcements:
        job = StartedJob(args.job, environ, args.output or log_path(options.logdir))
        announcements.start(on_announcement)
        try:
            with (contextlib.closing(session), common.exporting(args, session), common.notifying(args, session),
                  forward_signals(job)):
                preferences = common.preferences_of(args)
                from gputop.tui.run_app import run as run_monitor

                run_monitor(session, job, preferences)
        except GputopError as error:  # of the monitor's, not of the job's
            say(f"the monitor ended: {error.message}")
        except Exception as error:  # noqa: BLE001  a fault of gputop's; the job is to be waited for all the same
            crash.tell(error)
        wait_for_exit(job)
    if not any(announcement.address for announcement in announced):
        say(announced[-1].line if announced else
            "no profiler server started: none of the job's Python processes that read PYTHONPATH imported TensorFlow, "
            "JAX or PyTorch")
    assert job.returncode is not None
    return exit_like(job.returncode)
