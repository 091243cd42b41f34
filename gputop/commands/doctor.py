"""``gputop doctor``: what works on this node, and how to fix what does not."""

from __future__ import annotations

import argparse
from pathlib import Path

from gputop.commands.common import options_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--attach", action="append", default=argparse.SUPPRESS, metavar="HOST:PORT",
                        help="a profiler server to check; repeat the option for several")
    parser.add_argument("--logdir", type=Path, default=argparse.SUPPRESS, metavar="DIR",
                        help="folder for traces (./gputop-traces)")
    parser.add_argument("--dcgm", default=argparse.SUPPRESS, metavar="ADDRESS",
                        help="a DCGM host engine: HOST:PORT, [IPv6]:PORT or unix:///SOCKET (127.0.0.1:5555)")
    parser.add_argument("--dcgm-bindings", type=Path, default=argparse.SUPPRESS, metavar="DIR",
                        help="NVIDIA's Python bindings for DCGM")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    from gputop.doctor.examine import examine, print_report

    options = options_of(args)
    report = examine(options.logdir, options.attach, dcgm_address=args.dcgm, dcgm_bindings=args.dcgm_bindings)
    print_report(report, as_json=args.json)
    return report.exit_code
