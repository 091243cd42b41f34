"""``gputop analyze``: a trace that exists."""

from __future__ import annotations

import argparse
import json
import sys

from gputop.commands.common import width
from gputop.errors import EXIT_OK


def run(args: argparse.Namespace) -> int:
    from gputop.trace.analysis import analyze
    from gputop.trace.report import text_report

    analysis = analyze(args.paths, params=args.params)
    if args.json:
        json.dump(analysis.to_json(), sys.stdout, indent=1, allow_nan=False)
        print()
    else:
        print(text_report(analysis, width()))
    return EXIT_OK
