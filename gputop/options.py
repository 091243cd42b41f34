"""The command line: commands, options and what they may be."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import NoReturn

from gputop import __version__
from gputop.errors import EXIT_USAGE

_EPILOG = """\
exit status: 0 done; 1 it failed, the message says why and what to do; 2 wrong usage; 3 nothing to look at
(no GPU, no profiler server, no trace events)"""

SIMULATED_DEFAULT = "default"


class _Parser(argparse.ArgumentParser):
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


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= 1000):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 to 1000")
    return int(text)


def _speed(text: str) -> float:
    if text == "max":
        return math.inf
    value = float(text)
    if not 0.01 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.01 and 1000, or max")
    return value


def _interval(text: str) -> float:
    value = _number(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 3600 seconds")
    return value


def _watch_options(*, after_command: bool) -> _Parser:
    """What to watch and how. After a command the defaults are left out, so that they do not
    overwrite the same options given before it."""
    watch = _Parser(add_help=False)
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
    watch.add_argument("--interval", type=_interval, default=1.0, metavar="S", help="seconds between samples (1.0)")
    watch.add_argument("--gpus", default="", metavar="LIST",
                       help="only these GPUs: 0,2-3, GPU or MIG UUIDs or their beginnings, MIG instances as 0:1, or "
                            "the word visible: what CUDA_VISIBLE_DEVICES names")
    watch.add_argument("--attach", action="append", default=[], metavar="HOST:PORT",
                       help="a profiler server to capture from (default: find those of this node). Several, repeated, "
                            "with commas or as node[01-04]:6009, are the workers of one job and captured together")
    watch.add_argument("--profiler-port", default=None, metavar="PORTS",
                       help="the port of the profiler servers on every machine of the job (6009; 6009-6012: of four "
                            "ranks on each). Machines: those of --attach without a port, else of TF_CONFIG, else of "
                            "SLURM_JOB_NODELIST")
    watch.add_argument("--logdir", type=Path, default=None, metavar="DIR",
                       help="where traces and snapshots go, a TensorBoard logdir (./gputop-traces)")
    watch.add_argument("--demo", nargs="?", const=SIMULATED_DEFAULT, metavar="SCENARIO",
                       help="a simulated node; --demo list shows the scenarios")

    if after_command:
        for action in watch._actions:
            action.default = argparse.SUPPRESS
    return watch


def parser() -> argparse.ArgumentParser:
    """The command line: options of the monitor, and the headless commands beside it."""
    watch = _watch_options(after_command=True)
    main_parser = _Parser(prog="gputop", parents=[_watch_options(after_command=False)], epilog=_EPILOG,
                          formatter_class=argparse.RawDescriptionHelpFormatter,
                          description="Why the GPUs are not at 100 %, and what to do about it. "
                                      "Without a command: the live monitor.")
    main_parser.add_argument("--version", action="version", version=f"gputop {__version__}")
    commands = main_parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

    snapshot = commands.add_parser("snapshot", parents=[watch], help="one look, headless")
    snapshot.add_argument("--format", choices=("json", "text", "svg", "html"), default=None,
                          help="html: one page for a ticket; default: by FILE's ending (.json, .svg, .html), else text")
    snapshot.add_argument("-o", "--output", type=Path, metavar="FILE", help="write there instead of to stdout")
    snapshot.add_argument("--seconds", type=_positive, default=2.0, metavar="S", help="how long to look (2)")

    capture = commands.add_parser("capture", parents=[watch], help="one trace, headless, with its findings")
    capture.add_argument("--seconds", type=_positive, default=10.0, metavar="S",
                         help="length of the trace at most (10): a short probe may find that less will do")
    capture.add_argument("--force", action="store_true",
                         help="record all of --seconds, without a probe, whatever it costs the job and the node")
    capture.add_argument("--json", action="store_true", help="one JSON document on stdout")

    analyze = commands.add_parser("analyze", help="analyse a trace that exists")
    analyze.add_argument("paths", nargs="+", metavar="PATH",
                         help=".xplane.pb, run folder, TensorBoard logdir, Chrome/kineto .json[.gz], Nsight .sqlite")
    analyze.add_argument("--params", type=int, default=None, metavar="N",
                         help="parameters of the model, for rules on AllReduce (none yet)")
    analyze.add_argument("--bubbles", type=_count, default=None, metavar="N",
                         help="also the N places where the GPUs lose most time, and what the host did there")
    analyze.add_argument("--json", action="store_true", help="one JSON document on stdout")

    compare = commands.add_parser("compare", help="two traces, analyses or snapshots: what changed beyond noise")
    for name, meaning in (("a", "before"), ("b", "after")):
        compare.add_argument(name, metavar=name.upper(),
                             help=f"{meaning}: a trace, what analyze --json printed, or a JSON snapshot")
    compare.add_argument("--json", action="store_true", help="one JSON document on stdout")

    record = commands.add_parser("record", parents=[watch], help="telemetry into a file, until ctrl-c")
    record.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="a file that does not exist")
    record.add_argument("--seconds", type=_positive, default=None, metavar="S", help="how long (default: until ctrl-c)")

    replay = commands.add_parser("replay", help="a recording, or a snapshot, in the monitor")
    replay.add_argument("file", type=Path, metavar="FILE", help="of gputop record, or a snapshot (json or html)")
    replay.add_argument("--speed", type=_speed, default=1.0, metavar="X", help="times as fast, or max (1)")
    replay.add_argument("--start", type=_not_negative, default=0.0, metavar="S", help="seconds into the recording (0)")

    doctor = commands.add_parser("doctor", help="what works on this node, and the command that mends what does not")
    doctor.add_argument("--attach", action="append", default=argparse.SUPPRESS, metavar="HOST:PORT",
                        help="a profiler server that should answer; may be repeated")
    doctor.add_argument("--logdir", type=Path, default=argparse.SUPPRESS, metavar="DIR",
                        help="where traces are to go (./gputop-traces)")
    doctor.add_argument("--dcgm", default=argparse.SUPPRESS, metavar="ADDRESS",
                        help="a DCGM host engine: HOST:PORT, [IPv6]:PORT or unix:///SOCKET (127.0.0.1:5555)")
    doctor.add_argument("--dcgm-bindings", type=Path, default=argparse.SUPPRESS, metavar="DIR",
                        help="NVIDIA's Python bindings of DCGM")
    doctor.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return main_parser
