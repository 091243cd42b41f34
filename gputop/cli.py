"""The command line's process: parse, hand over to the command, turn errors into messages and exit statuses."""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from msgspec.structs import replace

from gputop.commands.arguments import parse
from gputop.commands.settings import Config, apply_settings, config_path, load
from gputop.core.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, GputopError
from gputop.core.own_memory import ANALYSIS_SCORE, MONITOR_SCORE, NUMPY_SETTINGS, keep_freed_memory, offer_to_oom_killer
from gputop.text import console, crash

_REAL_ONLY = {"attach", "cluster", "doctor", "run", "xprof"}  # they never touch real things as a part of a demo
_ANALYSES = {"analyze", "compare"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status of the contract."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show an arrow still gets the rest
    args = parse(argv)
    settings = load(config_path())
    for warning in settings.warnings:
        console.say(warning)
    try:
        problems = use_user_rules(args, settings)
        for problem in problems:
            console.say(problem)
        apply_settings(args, replace(settings, warnings=(*settings.warnings, *problems)))
        if args.command != "run":  # it starts the job first, which would inherit this
            offer_to_oom_killer(ANALYSIS_SCORE if args.command in _ANALYSES else MONITOR_SCORE)
        if args.command in _ANALYSES:
            keep_freed_memory()
        return _run(args)
    except GputopError as error:
        console.print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `gputop snapshot | head`: nobody reads on, which is no fault
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED if getattr(args, "fail_on", None) else EXIT_OK  # a gate that was not told has not passed
    except OSError as error:  # what GputopError does not already explain: standard output itself
        console.say(f"cannot write the output: {error.strerror or error}")
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _run(args: argparse.Namespace) -> int:
    demo = getattr(args, "demo", None)
    if demo == "list":
        from gputop.simulation.scenarios import describe

        console.write_text(describe())
        return EXIT_OK
    for_real = args.command or demo  # gputop --demo doctor takes the command for a scenario
    if demo is not None and for_real in _REAL_ONLY:
        raise GputopError(f"gputop {for_real} does not work with --demo, because it needs real hardware or jobs",
                          f"Run gputop {for_real} without --demo, or explore the demo: gputop --demo", EXIT_USAGE)
    if sys.stdout is None:
        raise GputopError("standard output is closed", "Redirect the output to a file, or use -o FILE.")
    if args.command is not None:
        gc.enable()
    status: int = import_module(f"gputop.commands.{args.command or 'monitor'}").run(args)
    sys.stdout.flush()  # a full disk is said here, not by the interpreter on its way out
    return status


def command() -> NoReturn:
    """The process: :func:`main`, then out at once.

    The interpreter's own shutdown would wait for daemon threads inside the driver or gRPC, or crash them; a hung
    driver must not keep gputop from ending.
    """
    crash.install_hooks()
    for variable, value in NUMPY_SETTINGS.items():
        os.environ.setdefault(variable, value)
    try:
        status = main()
    except SystemExit as ending:  # argparse: --help, --version, wrong usage
        status = ending.code if isinstance(ending.code, int) else EXIT_OK
    except Exception as error:  # noqa: BLE001  the process's end: a fault of gputop's own is told, without locals
        crash.tell(error)
        status = EXIT_FAILED
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, AttributeError, ValueError):
            stream.flush()
    os._exit(status)


# Those that judge nothing: they need no rules.
_WITHOUT = {"agent", "attach", "cluster", "completion", "config", "doctor", "record", "schema", "xprof"}


def use_user_rules(args: argparse.Namespace, config: Config) -> list[str]:
    """Have the command judge by them; returns what is wrong in files that it finds by itself.

    Raises GputopError (wrong usage) for what is wrong in a file that --rules names, and with --fail-on in any.
    """
    if args.command in _WITHOUT:
        return []
    from gputop.advice.user_registry import UserRules, use
    from gputop.rules.read_files import rule_paths

    paths = rule_paths(config.path, args.rules)
    use(UserRules(paths=paths))
    if not paths:
        return []
    from gputop.diagnosis.rules_in_process import use_rules

    problems = use_rules(paths)
    named = [text for text in problems if text.startswith(tuple(f"{path}{end}" for path in args.rules for end in ": "))]
    if getattr(args, "fail_on", None):  # a gate that lacks a rule or a budget would pass for want of it
        named = problems
    if named:
        raise GputopError(named[0], "\n  ".join(named[1:]), EXIT_USAGE)
    # "rules check" and "rules test" say so themselves, of the files that they are given.
    return [] if args.command == "rules" and args.action in ("check", "test") else problems
