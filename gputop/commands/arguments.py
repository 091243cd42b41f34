"""The command line: commands, options and what they may be."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from gputop import __version__
from gputop.core.errors import EXIT_USAGE
from gputop.session.options import DEFAULT_RULE

_EPILOG = """\
What is not said here, ~/.config/gputop/config.toml may say; gputop config shows all it can hold.
exit status: 0 done; 1 it failed, the message says why and what to do; 2 wrong usage; 3 nothing to look at
(no GPU, no profiler server, no trace events)"""

_RUN_EPILOG = """\
The server starts in the first Python process of the job that imports TensorFlow or JAX, and in each rank
(LOCAL_RANK, OMPI_COMM_WORLD_RANK, SLURM_PROCID, TF_CONFIG, …). Without gputop run, one variable prepares a job:
  export PYTHONPATH=$(gputop run --print-path)${PYTHONPATH:+:$PYTHONPATH}
and, where wanted, GPUTOP_PORT=6009 and GPUTOP_LISTEN=all.
The monitor has the terminal: beside it the job's standard input is empty, and its output goes to a file (l shows it).
exit status: the job's; 126 or 127 where it cannot be started"""

SIMULATED_DEFAULT = "default"


class _Parser(argparse.ArgumentParser):
    def __init__(self, **how: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **how)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"gputop: {message}\n")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None


def _positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes above 0")
    return value


def _not_negative(text: str) -> float:
    value = _number(text)
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0 on")
    return value


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= 1000):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 to 1000")
    return int(text)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text} is not a port from 1 to 65535")
    return int(text)


def _pid(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a process")
    return int(text)


def _parameters(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) < 10**15):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of parameters, in digits")
    return int(text)


def _before(text: str) -> float:
    value = _number(text)
    if not (value == 0 or 2 <= value <= 60):
        raise argparse.ArgumentTypeError(f"{text} is not between 2 and 60 seconds")
    return value


def _speed(text: str) -> float:
    if text == "max":
        return math.inf
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.01 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0.01 and 1000, or max")
    return value


def _interval(text: str) -> float:
    value = _number(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 3600 seconds")
    return value


def _watch_options(watch: _Parser) -> None:
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
                            "by default: before Hopper that takes the node's counters for itself, so that ncu, nsys "
                            "and other profilers fail meanwhile, and on A10 and A40 it has wedged the GPU (Xid 119, "
                            "reboot). Undone when gputop ends")
    watch.add_argument("--interval", type=_interval, default=None, metavar="S", help="seconds between samples (1.0)")
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


def _dip_options(dips: _Parser) -> None:
    """When to capture without being told to."""
    dips.add_argument("--on-dip", nargs="?", const=DEFAULT_RULE, default=None, metavar="RULE",
                      help=f"capture by itself when a GPU dips, into <logdir>/black-box (bounded); default rule: "
                           f"{DEFAULT_RULE!r}. Also tensor, dram, util, power, and levels: 'tensor<10%%', 'power<200W'")
    dips.add_argument("--dip-every", type=_minutes, default=10.0, metavar="MINUTES",
                      help="at most one such capture in so many minutes (10)")
    dips.add_argument("--dip-max", type=_count, default=None, metavar="N",
                      help="and so many in all (20; gputop capture: 1)")
    dips.add_argument("--dip-before", type=_before, default=0.0, metavar="S",
                      help="a trace of the S seconds before the dip: the job is recorded all the time for it, which "
                           "slows it as any capture does (TensorFlow 2.21 and JAX; others: of the time after)")


def _screen_options(screen: _Parser) -> None:
    """How the monitor looks. What is left out here, the config file may say."""
    screen.add_argument("--theme", default=None, metavar="NAME",
                        help="gputop-dark, gputop-light, gputop-contrast (colour-blind safe), or one of Textual's")
    screen.add_argument("--color", choices=("auto", "truecolor", "256", "16", "none"), default=None,
                        help="what the terminal can show (auto: what it says; none where NO_COLOR is set)")
    screen.add_argument("--ascii", action=argparse.BooleanOptionalAction, default=None,
                        help="no glyphs beyond ASCII (default: where the locale is not UTF-8)")
    screen.add_argument("--low-bandwidth", action=argparse.BooleanOptionalAction, default=None,
                        help="draw every 5 s only (default: where the line to the terminal is slow)")


def _snapshot(snapshot: _Parser) -> None:
    snapshot.add_argument("--format", choices=("json", "text", "svg", "html"), default=None,
                          help="html: one page for a ticket; default: by FILE's ending (.json, .svg, .html), else text")
    snapshot.add_argument("-o", "--output", type=Path, metavar="FILE", help="write there instead of to stdout")
    snapshot.add_argument("--seconds", type=_positive, default=2.0, metavar="S", help="how long to look (2)")


def _capture(capture: _Parser) -> None:
    capture.add_argument("--seconds", type=_positive, default=10.0, metavar="S",
                         help="length of the trace at most (10): a short probe may find that less will do")
    capture.add_argument("--force", action="store_true",
                         help="record all of --seconds, without a probe, whatever it costs the job and the node")
    capture.add_argument("--json", action="store_true", help="one JSON document on stdout")


def _analyze(analyze: _Parser) -> None:
    analyze.add_argument("paths", nargs="+", metavar="PATH",
                         help=".xplane.pb, run folder, TensorBoard logdir, Chrome/kineto .json[.gz], Nsight .sqlite")
    analyze.add_argument("--params", type=_parameters, default=None, metavar="N",
                         help="parameters of the model: tells whether its AllReduces are more, or slower, than needed")
    analyze.add_argument("--bubbles", type=_count, default=None, metavar="N",
                         help="also the N places where the GPUs lose most time, and what the host did there")
    analyze.add_argument("--timeline", action="store_true", help="the timeline of the trace, on the screen")
    analyze.add_argument("--json", action="store_true", help="one JSON document on stdout")


def _compare(compare: _Parser) -> None:
    for name, meaning in (("a", "before"), ("b", "after")):
        compare.add_argument(name, metavar=name.upper(),
                             help=f"{meaning}: a trace, what analyze --json printed, or a JSON snapshot")
    compare.add_argument("--json", action="store_true", help="one JSON document on stdout")


def _record(record: _Parser) -> None:
    record.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="a file that does not exist")
    record.add_argument("--seconds", type=_positive, default=None, metavar="S", help="how long (default: until ctrl-c)")


def _replay(replay: _Parser) -> None:
    replay.add_argument("file", type=Path, metavar="FILE", help="of gputop record, or a snapshot (json or html)")
    replay.add_argument("--speed", type=_speed, default=1.0, metavar="X", help="times as fast, or max (1)")
    replay.add_argument("--start", type=_not_negative, default=0.0, metavar="S", help="seconds into the recording (0)")


def _run(run: _Parser) -> None:
    run.add_argument("job", nargs=argparse.REMAINDER, metavar="-- COMMAND…",
                     help="what to start: python train.py …, bash train.sh, torchrun-like launchers")
    run.add_argument("--headless", action="store_true",
                     help="without the monitor: gputop becomes the job, whose terminal, standard input and signals "
                          "stay its own")
    run.add_argument("--port", type=_port, default=0, metavar="N",
                     help="of the node's first process, the next ones for its other ranks (default: any free one)")
    run.add_argument("--listen", choices=("local", "all"), default="local",
                     help="who reaches the server: this host (default), or any, without a password")
    run.add_argument("--output", type=Path, default=None, metavar="FILE",
                     help="a new file for the job's output while the monitor has the terminal (LOGDIR/run-….log)")
    run.add_argument("--print-path", action="store_true", help="print the folder that prepares a job, and end")


def _attach(attach: _Parser) -> None:
    attach.add_argument("pid", type=_pid, metavar="PID", help="a TensorFlow or JAX process")
    attach.add_argument("--yes", action="store_true", help="do not ask first")
    attach.add_argument("--port", type=_port, default=0, metavar="N", help="for the server (default: any free one)")


def _xprof(xprof: _Parser) -> None:
    xprof.add_argument("path", nargs="?", type=Path, default=None, metavar="RUN|LOGDIR",
                       help="a trace, its run folder or a logdir (./gputop-traces)")
    xprof.add_argument("--port", type=_port, default=8791, metavar="N", help="on the loopback interface (8791)")
    xprof.add_argument("--print", action="store_true", help="only print the command")


def _config(config: _Parser) -> None:
    config.add_argument("--path", action="store_true", help="only where they are")


def _doctor(doctor: _Parser) -> None:
    doctor.add_argument("--attach", action="append", default=argparse.SUPPRESS, metavar="HOST:PORT",
                        help="a profiler server that should answer; may be repeated")
    doctor.add_argument("--logdir", type=Path, default=argparse.SUPPRESS, metavar="DIR",
                        help="where traces are to go (./gputop-traces)")
    doctor.add_argument("--dcgm", default=argparse.SUPPRESS, metavar="ADDRESS",
                        help="a DCGM host engine: HOST:PORT, [IPv6]:PORT or unix:///SOCKET (127.0.0.1:5555)")
    doctor.add_argument("--dcgm-bindings", type=Path, default=argparse.SUPPRESS, metavar="DIR",
                        help="NVIDIA's Python bindings of DCGM")
    doctor.add_argument("--json", action="store_true", help="one JSON document on stdout")


class _Command(NamedTuple):
    """A command beside the monitor: its own options, and those that may stand before it as well as after it."""

    help: str
    own: Callable[[_Parser], None]
    shared: tuple[Callable[[_Parser], None], ...] = ()
    more: dict[str, Any] = {}  # noqa: RUF012  never changed


_COMMANDS = {
    "snapshot": _Command("one look, headless", _snapshot, (_watch_options,)),
    "capture": _Command("one trace, headless, with its findings", _capture, (_watch_options, _dip_options)),
    "analyze": _Command("analyse a trace that exists", _analyze, (_screen_options,)),
    "compare": _Command("two traces, analyses or snapshots: what changed beyond noise", _compare),
    "record": _Command("telemetry into a file, until ctrl-c", _record, (_watch_options,)),
    "replay": _Command("a recording, or a snapshot, in the monitor", _replay, (_screen_options,)),
    "run": _Command("start a job with a profiler server inside, no code change", _run,
                    (_watch_options, _screen_options),
                    {"usage": "gputop run [options] -- COMMAND…", "epilog": _RUN_EPILOG}),
    "attach": _Command("start a profiler server in a process that has been running without", _attach),
    "xprof": _Command("open a captured trace in XProf, in the browser", _xprof),
    "config": _Command("the settings in $XDG_CONFIG_HOME/gputop/config.toml, as a file", _config),
    "doctor": _Command("what works on this node, and the command that mends what does not", _doctor),
}


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


def parser(words: Sequence[str] = tuple(_COMMANDS)) -> argparse.ArgumentParser:
    """The command line: options of the monitor, and the headless commands beside it.

    Only commands that are among ``words`` have their options: to make all of them takes as long as to read the GPUs.
    """
    main_parser = _Parser(prog="gputop", epilog=_EPILOG,
                          description="Why the GPUs are not at 100 %, and what to do about it. "
                                      "Without a command: the live monitor.")
    for shared in (_watch_options, _dip_options, _screen_options):
        shared(main_parser)
    main_parser.add_argument("--version", action="version", version=f"gputop {__version__}")
    empty = _Parser(add_help=False)
    commands = main_parser.add_subparsers(  # type: ignore[call-overload]  # what makes a parser will do
        dest="command", metavar="COMMAND", prog="gputop",
        parser_class=lambda asked, **how: _parser_of(asked, **how) if asked else empty)
    for name, command in _COMMANDS.items():
        commands.add_parser(name, help=command.help, asked=command if name in words else None)
    return main_parser


def _parser_of(command: _Command, **how: Any) -> _Parser:
    parser = _Parser(**how, **command.more)
    for shared in command.shared:
        shared(parser)
    for action in parser._actions:
        action.default = argparse.SUPPRESS  # else it would overwrite what was said before the command
    command.own(parser)
    return parser
