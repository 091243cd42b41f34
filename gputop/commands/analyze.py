"""``gputop analyze``: the report of an existing trace."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import UNSET

from gputop.commands.arguments import add_shared
from gputop.commands.common import preferences_of, width
from gputop.commands.monitor import unfit_terminal
from gputop.commands.option_types import amount, count, parameter_count
from gputop.core.errors import EXIT_USAGE, GputopError
from gputop.text import console
from gputop.text.units import wrap
from gputop.trace.readers.formats import ACCEPTED_BRIEF

if TYPE_CHECKING:
    from gputop.comparison.compare import GateResult
    from gputop.export.analysis_documents import AnalyzeDocument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "custom rules", "the screen")
    parser.add_argument("paths", nargs="+", metavar="PATH", help=ACCEPTED_BRIEF)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--run", default=None, metavar="NAME",
                       help="profile run of the logdir to analyze (default: the newest)")
    which.add_argument("--all", action="store_true", dest="all_runs",
                       help="analyze all profile runs of the logdir, newest first")
    parser.add_argument("--params", type=parameter_count, default=None, metavar="N",
                        help="number of model parameters: shows whether AllReduces are too numerous or too slow")
    work = parser.add_mutually_exclusive_group()
    work.add_argument("--flops-per-step", type=amount, default=None, metavar="N",
                      help="FLOPs of one training step, summed over the GPUs of the trace; used to report the MFU and "
                           "how far the step is from this GPU's limit")
    work.add_argument("--tokens-per-step", type=amount, default=None, metavar="N",
                      help="tokens per step of a transformer, with 6 FLOPs per token and parameter; needs --params")
    parser.add_argument("--bubbles", "--idle-gaps", dest="idle_gaps", type=count, default=None, metavar="N",
                        help="also print the N idle gaps that cost the most GPU time, and the host's work during them")
    parser.add_argument("--full", action="store_true", help="print all values from the trace, not only the verdict")
    parser.add_argument("--verbose", action="store_true",
                        help="like --full, and also list each cause that could not be checked, with the reason")
    parser.add_argument("--timeline", action="store_true", help="open the timeline of the trace")
    parser.add_argument("--fail-on", action="append", default=[], metavar="GATE",
                        help="exit with status 4 if there is a finding of this severity or higher (high, medium, low), "
                             "a finding with this ID, or an exceeded budget (budget). Separate several with commas")
    parser.add_argument("--save-baseline", default=None, metavar="NAME",
                        help="save the analysis in the logdir, for compare --baseline NAME")
    parser.add_argument("--replace", action="store_true", help="replace an existing baseline with that name")
    parser.add_argument("--logdir", type=Path, default=argparse.SUPPRESS, metavar="DIR",
                        help="folder for the baselines (./gputop-traces)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    if args.timeline and args.all_runs:
        raise GputopError("--timeline shows one trace.", "Choose a run with --run NAME.", EXIT_USAGE)
    if args.all_runs and args.save_baseline is not None:
        raise GputopError("--save-baseline saves only one analysis.", "Choose a run with --run NAME.", EXIT_USAGE)
    if args.timeline:
        return _timeline(args)
    from gputop.comparison.gates import exit_status, parse_gates

    results: list[GateResult] = []
    gates = parse_gates(args.fail_on, of_comparison=False)
    if args.all_runs:
        _all_runs(args, gates, results)
        return exit_status(results)
    document = _one(args, args.paths, args.run, gates, results)
    if document is not None:
        console.write_json(document)
    return exit_status(results)


def _all_runs(args: argparse.Namespace, gates: Sequence[str], results: list[GateResult]) -> None:
    """Each run of the logdirs; one that cannot be read is said on stderr and does not end the others."""
    from gputop.comparison.compare import GateResult
    from gputop.comparison.gates import gate_lines
    from gputop.trace.readers.find_files import runs_at

    runs = [run for path in args.paths for run in runs_at(Path(path))]
    if not runs:
        raise GputopError("The path holds only one profile run.", "Give a TensorBoard logdir.", EXIT_USAGE)
    documents: dict[str, AnalyzeDocument | None] = {}
    unread: dict[str, GputopError] = {}
    for run in runs:
        if not args.json:
            console.write_text(f"Run      {run.name}")
        name = str(run.folder) if run.name in documents.keys() | unread.keys() else run.name  # of several logdirs
        try:
            documents[name] = _one(args, [str(run.folder)], None, gates, results)
        except GputopError as error:
            console.print_error(error)
            unread[name] = error
            judged = [GateResult(gate, "cannot be told", f"cannot read the run {run.name}") for gate in gates]
            results += judged
            if not args.json:
                console.write_text("\n".join(gate_lines(judged)))
        if not args.json:
            console.write_text("")
    if args.json:
        from gputop.export.analysis_documents import AnalysesDocument

        console.write_json(AnalysesDocument({name: document for name, document in documents.items() if document},
                                            {name: error.in_one_line for name, error in unread.items()}))
    if not documents:
        raise next(iter(unread.values()))


def _one(args: argparse.Namespace, paths: Sequence[str], run: str | None, gates: Sequence[str],
         results: list[GateResult]) -> AnalyzeDocument | None:
    """The report of one trace, printed, or with --json its document. ``results`` takes what became of the gates."""
    from gputop.comparison.gates import budgets, gate_lines, gates_of_analysis
    from gputop.diagnosis.diagnose import analyze_to_facts
    from gputop.diagnosis.report import short_report, text_report
    from gputop.trace.readers.load import load

    facts = analyze_to_facts(load(paths, run), args.params, _flops_per_step(args))
    analysis = facts.analysis
    idle_gaps = None
    if args.idle_gaps is not None:
        from gputop.timeline import idle_gap_report as report
        from gputop.timeline.idle_gaps import rank_idle_gaps

        idle_gaps = rank_idle_gaps(facts, args.idle_gaps)
    if args.save_baseline is not None:
        from gputop.comparison.baselines import save_baseline

        console.say(f"baseline: {save_baseline(args.logdir, args.save_baseline, analysis, replace=args.replace)}")
    judged = gates_of_analysis(gates, analysis)
    results += judged
    shown = [*judged, *(() if "budget" in gates else budgets(analysis))]
    origin_ns = facts.trace.window_ns[0]
    if args.json:
        from gputop.core.codec import document_of
        from gputop.export.analysis_documents import AnalyzeDocument

        return document_of(
            AnalyzeDocument, analysis, gates=tuple(shown) or UNSET,
            idle_gaps=UNSET if idle_gaps is None else tuple(
                report.IdleGapRow.of(ranked.idle_gap, facts, origin_ns) for ranked in idle_gaps.ranked),
            idle_gap_causes=UNSET if idle_gaps is None else idle_gaps.totals)
    console.write_text(text_report(analysis, width(), verbose=args.verbose) if args.full or args.verbose
                       else short_report(analysis, width()))
    if idle_gaps is not None:
        console.write_text(report.text_of(idle_gaps, facts, origin_ns, width()))
    for line in gate_lines(shown):
        console.write_text("\n".join(wrap(line, width())))
    return None


def _flops_per_step(args: argparse.Namespace) -> float | None:
    """FLOPs of a step that the user gives. Forward and backward pass of a transformer take 6 FLOPs per token and
    parameter (Kaplan et al., "Scaling Laws for Neural Language Models", 2020, section 2.1)."""
    if args.tokens_per_step is None:
        given: float | None = args.flops_per_step
        return given
    if args.params is None:
        raise GputopError("--tokens-per-step also needs the number of parameters.", "Add --params N.", EXIT_USAGE)
    return float(6.0 * args.tokens_per_step * args.params)


def _timeline(args: argparse.Namespace) -> int:
    unfit = unfit_terminal()
    if unfit:
        raise GputopError(f"--timeline needs a terminal: {unfit}",
                          "Without a terminal: gputop analyze PATH --idle-gaps 10, or --json.", EXIT_USAGE)
    from gputop.trace.readers.find_files import files_at

    paths: list[str] = []
    for path in args.paths:
        if not Path(path).exists():
            raise GputopError(f"{path} does not exist", "Give a trace, a run folder or a TensorBoard logdir.")
        paths += [path] if args.run is None else map(str, files_at(Path(path), [], args.run))
    preferences = preferences_of(args)
    from gputop.tui.timeline_app import show

    return show(paths, preferences)
