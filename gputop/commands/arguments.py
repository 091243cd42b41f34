"""The command line: the commands, the options they share, and the parser made of both.

Each command declares its own options in ``gputop/commands/NAME.py``, beside what it does. The parser of a command
is built only where the command line names it: building all of them takes as long as reading the GPUs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from gputop.commands.option_types import count, interval_s, minutes, seconds_before_dip
from gputop.core.errors import EXIT_USAGE
from gputop.core.version import __version__
from gputop.session.options import DEFAULT_RULE
from gputop.text import console

_EPILOG = """\
What is not said here, ~/.config/gputop/config.toml may say; gputop config shows all it can hold.
exit status: 0 done; 1 it failed, the message says why and what to do; 2 wrong usage; 3 nothing to show
(no GPU, no profiler server, no trace events)"""

SIMULATED_DEFAULT = "default"

COMMANDS = {
    "snapshot": "the state of the node now, headless",
    "capture": "one trace, headless, with its findings",
    "analyze": "analyze a trace that exists",
    "compare": "two traces, analyses or snapshots: what changed beyond noise",
    "record": "telemetry into a file, until ctrl-c",
    "replay": "a recording, or a snapshot, in the monitor",
    "run": "start a job with a profiler server inside, no code change",
    "attach": "start a profiler server in a process that has been running without",
    "xprof": "open a captured trace in XProf, in the browser",
    "config": "the settings in $XDG_CONFIG_HOME/gputop/config.toml, as a file",
    "doctor": "what works on this node, and the command that mends what does not",
}


class _Parser(argparse.ArgumentParser):
    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        console.note(self.format_usage())
        console.say(message)
        self.exit(EXIT_USAGE)


def watch_options(watch: argparse.ArgumentParser) -> None:
    """What to watch and how."""
    watch.add_argument("--source", choices=("auto", "nvml", "dcgm", "simulated"), default="auto",
                       help="where the figures come from: the NVIDIA driver and, for what it lacks, a DCGM host engine "
                            "that already watches it (auto); the driver alone; the host engine alone")
    watch.add_argument("--dcgm", default=None, metavar="ADDRESS",
                       help="the DCGM host engine: HOST:PORT, [IPv6]:PORT or unix:///SOCKET (127.0.0.1:5555)")
    watch.add_argument("--dcgm-bindings", type=Path, default=None, metavar="DIR",
                       help="NVIDIA's Python bindings of DCGM (default: where DCGM 4 and 3 install them)")
    watch.add_argument("--dcgm-watch", action="store_true", default=False,
                       help="let the host engine read the profiling fields (SM, tensor, DRAM activity) for gputop. Not "
                            "by default before Hopper: there that takes the GPU's counters for itself, so that ncu, "
                            "nsys and other profilers fail meanwhile, and on A10 and A40 it has wedged the GPU (Xid "
                            "119, reboot). From Hopper on the engine reads them through GPM, which takes no counters: "
                            "--source dcgm watches them without this option. Undone when gputop ends")
    watch.add_argument("--interval", type=interval_s, default=None, metavar="S", help="seconds between samples (1.0)")
    watch.add_argument("--gpus", default="", metavar="LIST",
                       help="only these GPUs: 0,2-3, GPU or MIG UUIDs or their beginnings, MIG instances as 0:1, or "
                            "the word visible: what CUDA_VISIBLE_DEVICES names")
    watch.add_argument("--attach", action="append", default=[], metavar="HOST:PORT",
                       help="a profiler server to capture from (default: find those of this node); unix:/PATH for a "
                            "socket that leads to one. Several, repeated, with commas or as node[01-04]:6009, are the "
                            "workers of one job and captured together")
    watch.add_argument("--profiler-port", default=None, metavar="PORTS",
                       help="the port of the profiler servers on every machine of the job (6009; 6009-6012: of four "
                            "ranks on each). Machines: those of --attach without a port, else of TF_CONFIG, else of "
                            "SLURM_JOB_NODELIST")
    watch.add_argument("--logdir", type=Path, default=None, metavar="DIR",
                       help="where traces and snapshots go, a TensorBoard logdir (./gputop-traces)")
    watch.add_argument("--demo", nargs="?", const=SIMULATED_DEFAULT, metavar="SCENARIO",
                       help="a simulated node; --demo list shows the scenarios")


def dip_options(dips: argparse.ArgumentParser) -> None:
    """When to capture automatically."""
    dips.add_argument("--on-dip", nargs="?", const=DEFAULT_RULE, default=None, metavar="RULE",
                      help=f"capture by itself when a GPU dips, into <logdir>/black-box (bounded); default rule: "
                           f"{DEFAULT_RULE!r}. Also tensor, dram, util, power, and levels: 'tensor<10%%', 'power<200W'")
    dips.add_argument("--dip-every", type=minutes, default=10.0, metavar="MINUTES",
                      help="at most one such capture in so many minutes (10)")
    dips.add_argument("--dip-max", type=count, default=None, metavar="N",
                      help="and so many in all (20; gputop capture: 1)")
    dips.add_argument("--dip-before", type=seconds_before_dip, default=0.0, metavar="S",
                      help="a trace of the S seconds before the dip: the job is recorded all the time for it, which "
                           "slows it as any capture does (TensorFlow 2.21 and JAX; others: of the time after)")


def screen_options(screen: argparse.ArgumentParser) -> None:
    """The appearance of the monitor. The config file may hold what the command line leaves out."""
    screen.add_argument("--theme", default=None, metavar="NAME",
                        help="gputop-dark, gputop-light, gputop-contrast (color-blind safe), or one of Textual's")
    screen.add_argument("--color", choices=("auto", "truecolor", "256", "16", "none"), default=None,
                        help="what the terminal can show (auto: what it says; none where NO_COLOR is set)")
    screen.add_argument("--ascii", action=argparse.BooleanOptionalAction, default=None,
                        help="no glyphs beyond ASCII (default: where the locale is not UTF-8)")
    screen.add_argument("--low-bandwidth", action=argparse.BooleanOptionalAction, default=None,
                        help="draw every 5 s only (default: where the line to the terminal is slow)")


def add_shared(parser: argparse.ArgumentParser, *groups: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add options that a command shares with the monitor: they may stand before the command as well as after it.

    They have no defaults here: a default would overwrite what stands before the command.
    """
    for group in groups:
        group(parser)
    for action in parser._actions:
        action.default = argparse.SUPPRESS


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of one command (None: those of this process). After the first ``--`` of ``run``
    nothing is gputop's: argparse, whose ways with ``--`` differ between versions, never sees it."""
    words = list(sys.argv[1:] if argv is None else argv)
    own, rest = words, []
    if "--" in words and "run" in words[:words.index("--")]:
        at = words.index("--")
        own, rest = words[:at], words[at:]
    args = parser(own).parse_args(own)
    if args.command == "run":
        args.job = [*args.job, *rest] if args.job else rest[1:]
    return args


def parser(words: Sequence[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """The command line: options of the monitor, and the headless commands beside it.

    Only the commands among ``words`` have their options.
    """
    main_parser = _Parser(prog="gputop", epilog=_EPILOG,
                          description="Why the GPUs are not at 100 %, and what to do about it. "
                                      "Without a command: the live monitor.")
    for group in (watch_options, dip_options, screen_options):
        group(main_parser)
    main_parser.add_argument("--version", action="version", version=f"gputop {__version__}")
    empty = _Parser(add_help=False)
    commands = main_parser.add_subparsers(  # type: ignore[call-overload]  # what makes a parser will do
        dest="command", metavar="COMMAND", prog="gputop",
        parser_class=lambda asked, **settings: _command_parser(asked, **settings) if asked else empty)
    for name, help_line in COMMANDS.items():
        commands.add_parser(name, help=help_line, asked=name if name in words else None)
    return main_parser


def _command_parser(name: str, **settings: Any) -> _Parser:
    parser = _Parser(**settings)
    import_module(f"gputop.commands.{name}").add_arguments(parser)
    return parser
