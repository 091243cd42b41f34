"""``gputop compare``: two traces, analyses or snapshots."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from gputop.commands.arguments import add_shared
from gputop.commands.common import width
from gputop.core.errors import EXIT_OK, EXIT_USAGE, GputopError
from gputop.text import console
from gputop.text.units import counted, seconds, size, wrap


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "custom rules")
    parser.add_argument("paths", nargs="*", metavar="PATH",
                        help="A (before) and B (after): traces, output of analyze --json, or JSON snapshots; with "
                             "--baseline, only B")
    parser.add_argument("--baseline", default=None, metavar="NAME",
                        help="use the baseline with this name as A; analyze --save-baseline saves one in the logdir")
    parser.add_argument("--baselines", action="store_true", help="list the baselines in the logdir")
    parser.add_argument("--logdir", type=Path, default=argparse.SUPPRESS, metavar="DIR",
                        help="folder for the baselines (./gputop-traces)")
    parser.add_argument("--fail-on", action="append", default=[], metavar="GATE",
                        help="exit with status 4 in these cases. regression: the step is significantly longer, or the "
                             "wall time per training step if that decides. regression:5%%: only if it is at least 5%% "
                             "longer. budget: B exceeds a budget from your rules")
    parser.add_argument("--markdown", action="store_true",
                        help="print the verdict, gates and report as text for a pull request or a chat")
    for name in "ab":
        parser.add_argument(f"--again-{name}", metavar="PATH", action="append", default=[],
                            help=f"another run of the job in {name.upper()}; repeat the option for more runs. Smaller "
                                 "changes then become significant")
    parser.add_argument("--verbose", action="store_true", help="also print what did not change, and the method used")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _tell(path: str | os.PathLike[str]) -> None:
    """Say on a terminal what is being read: a large trace takes seconds."""
    if sys.stderr.isatty():
        file = Path(path)
        console.say(f"reading {path}" + (f", {size(file.stat().st_size)}" if file.is_file() else ""))


def run(args: argparse.Namespace) -> int:
    from gputop.comparison.gates import exit_status, gate_lines, gates_of_comparison, parse_gates
    from gputop.comparison.report_lines import text_report
    from gputop.replay.compared_files import compare

    if args.baselines:
        return _list_baselines(args.logdir, args.json)
    a, b = _sides(args)
    gates = parse_gates(args.fail_on, of_comparison=True)
    comparison = compare(a, b, again_a=args.again_a, again_b=args.again_b, progress=_tell)
    results = gates_of_comparison(gates, comparison)
    if args.json:
        console.write_json(comparison.document(results))
    elif args.markdown:
        from gputop.comparison.report_lines import markdown

        console.write_text(markdown(comparison, results), end="")
    else:
        console.write_text(text_report(comparison, width(), everything=args.verbose), end="")
        for line in gate_lines(results):
            console.write_text("\n".join(wrap(line, width())))
    return exit_status(results)


def _sides(args: argparse.Namespace) -> tuple[str | Path, str]:
    wanted = 1 if args.baseline is not None else 2
    if len(args.paths) != wanted:
        raise GputopError(f"compare needs {'A and B' if wanted == 2 else 'only B with --baseline'}, not "
                          f"{counted(len(args.paths), 'path')}",
                          "gputop compare A B, or gputop compare --baseline NAME B", EXIT_USAGE)
    if args.baseline is None:
        return args.paths[0], args.paths[1]
    from gputop.comparison.baselines import saved_baseline

    return saved_baseline(args.logdir, args.baseline), args.paths[0]


def _list_baselines(logdir: Path, as_json: bool) -> int:
    from gputop.comparison.baselines import BaselinesDocument, SavedBaseline, baselines

    saved = list(baselines(logdir))
    if as_json:
        console.write_json(BaselinesDocument(tuple(
            SavedBaseline(name, saved_s, False, (), None) if analysis is None else
            SavedBaseline(name, saved_s, True, analysis.trace.paths,
                          None if analysis.steps is None else analysis.steps.median_s)
            for name, saved_s, analysis in saved)))
        return EXIT_OK
    for name, saved_s, analysis in saved:
        steps = analysis.steps if analysis is not None else None
        about = "cannot be read" if analysis is None else "no steps" if steps is None else (
            f"{steps.count} steps, median {seconds(steps.median_s)}")
        of = f"  {', '.join(analysis.trace.paths)}" if analysis is not None else ""
        console.write_text(f"{name:<24}{time.strftime('%Y-%m-%d %H:%M', time.localtime(saved_s))}  {about}{of}")
    if not saved:
        console.say(f"{logdir} has no baseline. To save one: gputop analyze TRACE --save-baseline NAME")
    return EXIT_OK
