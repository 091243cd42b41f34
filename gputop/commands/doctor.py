"""``gputop doctor``: what works on this node, and how to mend what does not."""

from __future__ import annotations

import argparse

from gputop.commands.common import options_of


def run(args: argparse.Namespace) -> int:
    from gputop.doctor.checkup import examine, print_report

    options = options_of(args)
    report = examine(options.logdir, options.attach, dcgm_address=args.dcgm, dcgm_bindings=args.dcgm_bindings)
    print_report(report, as_json=args.json)
    return report.exit_code
