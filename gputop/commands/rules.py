"""``gputop rules``: rules of one's own, and the limits of gputop's."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec import UNSET, Struct, UnsetType

from gputop.commands.arguments import add_shared
from gputop.commands.common import width
from gputop.core.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, GputopError
from gputop.render.table import Column, Table, table_lines
from gputop.text import console
from gputop.text.markup import plain_lines
from gputop.text.units import clock_time, counted, figure, percent, printable, ranges, wrap

if TYPE_CHECKING:
    from gputop.advice.rule import Limit
    from gputop.analysis.results import Analysis
    from gputop.core.samples import NodeSample
    from gputop.replay.rule_trials import Trial
    from gputop.rules.rule_file import RuleText

_DEMO = "default"
_UNCUT = 1000  # cells
_TRACE_S, _AGO_S = 4.0, 20.0  # of the demo's trace, as a capture takes
_ACTIONS = {
    "list": "(default) list all rules and the limits that you set; --limits: all limits",
    "check": "show the mistakes in FILE… (default: in the files that gputop reads)",
    "explain": "explain the finding with this ID: its meaning, how to confirm and fix it, when it is wrong, its limits",
    "names": "list the names that an expression can use",
    "test": "test the rules in FILE on a TRACE, an analysis or a recording, or with --demo",
}


class ListedRule(Struct, frozen=True):
    """``when``, ``hold_s``, ``severity`` and ``title`` are of a rule of the user's own."""

    id: str
    on: Literal["live", "trace", "fleet"]
    origin: str
    when: str | UnsetType = UNSET
    hold_s: float | UnsetType = UNSET
    severity: str | UnsetType = UNSET
    title: str | UnsetType = UNSET


class ListedLimit(Struct, frozen=True):
    id: str
    value: float
    unit: str
    default: float
    source: str
    yours: bool


class ListedBudget(Struct, frozen=True):
    id: str
    keep: str
    origin: str


class RulesDocument(Struct, frozen=True, tag_field="schema", tag="gputop.rules/1"):
    rules: tuple[ListedRule, ...]
    limits: tuple[ListedLimit, ...]
    budgets: tuple[ListedBudget, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "custom rules")
    parser.add_argument("action", choices=tuple(_ACTIONS), nargs="?", default="list", metavar="ACTION",
                        help="; ".join(f"{name}: {text}" for name, text in _ACTIONS.items()))
    parser.add_argument("words", nargs="*", default=[], metavar="WORD", help="the ID, or FILE and TRACE")
    parser.add_argument("--limits", action="store_true", help="with list: also show the limits of all rules")
    parser.add_argument("--demo", nargs="?", const=_DEMO, default=argparse.SUPPRESS, metavar="SCENARIO",
                        help="with test: use the simulated job of a scenario")
    parser.add_argument("--json", action="store_true", help="with list and test: print one JSON document")


def run(args: argparse.Namespace) -> int:
    if args.action in ("list", "names") and args.words:
        raise GputopError(f"gputop rules {args.action} does not accept {args.words[0]}", "", EXIT_USAGE)
    status: int = globals()[f"_{args.action}"](args)
    return status


def _list(args: argparse.Namespace) -> int:
    from gputop.advice.registry import LIMITS, RULES, limit_record
    from gputop.advice.user_registry import user_rules
    from gputop.core.codec import document_of

    shown = list(map(limit_record, LIMITS if args.limits or args.json else user_rules().limits))
    if args.json:
        console.write_json(RulesDocument(
            tuple(document_of(ListedRule, rule, on=rule.condition.source, when=rule.condition.text)
                  for rule in user_rules().rules)
            + tuple(ListedRule(rule.id, rule.origin, "gputop") for rule in RULES),
            tuple(document_of(ListedLimit, limit, default=(default := LIMITS[limit.id]).value,
                              yours=limit is not default) for limit in shown),
            tuple(document_of(ListedBudget, budget, keep=budget.condition.text) for budget in user_rules().budgets)))
        return EXIT_OK
    lines = _lines(("rule", "on", "from"), (
        *((rule.id, rule.condition.source, rule.origin) for rule in user_rules().rules),
        *((budget.id, "budget", budget.origin) for budget in user_rules().budgets),
        *((rule.id, rule.origin, "gputop") for rule in RULES)))
    if shown:
        lines += ["", *_lines(("limit", "value", "default", "source"), (
            (used.id, _value(used), _value(LIMITS[used.id]), used.source) for used in shown))]
    elif not args.limits:
        lines += ["", "You have not set any limits; --limits shows all of them."]
    console.write_text("\n".join(lines))
    from importlib.metadata import entry_points

    for point in entry_points(group="gputop.rules"):  # of an earlier version
        console.say(f"gputop no longer reads rules written in Python ({printable(point.name)}): write them in TOML, "
                    "see docs/tasks/custom-rules.md")
    return EXIT_OK


def _lines(titles: Sequence[str], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """A table in which no cell is cut."""
    columns = (Column(title, str if title in ("value", "default") else None, most=_UNCUT) for title in titles)
    return table_lines(Table("", tuple(columns), tuple(rows), ""), _UNCUT)


def _value(used: Limit) -> str:
    return f"{used.value:g} {used.unit}"


def _check(args: argparse.Namespace) -> int:
    """Mistakes with their lines; exit status 1 where there is one."""
    from gputop.advice.user_registry import user_rules
    from gputop.advice.user_rules import install
    from gputop.rules.read_files import RulePath, load_rules

    paths = [RulePath(word, "named") for word in args.words] or list(user_rules().paths or ())
    if not paths:
        console.say("there is no rules file: name one, or write gputop.toml in this folder")
        return EXIT_OK
    files, unread = load_rules(paths)
    problems = install(files)
    for text in unread:
        console.say(text)
    sources = {rule_path.path: _lines_of(rule_path.path) for rule_path in paths}
    for problem in problems:
        console.write_text(str(problem))
        lines = sources[problem.file]
        if problem.place.line <= len(lines):
            line = lines[problem.place.line - 1].expandtabs(1)
            console.write_text(f"  {line}\n  {' ' * (problem.place.column - 1)}^")
    for file in files:
        whose = "" if file.owner in (os.geteuid(), 0) else f" (belongs to another user, uid {file.owner})"
        counts = ((len(file.rules), "rule"), (len(file.limits), "limit"), (len(file.budgets), "budget"),
                  (sum(problem.file == file.name for problem in problems), "mistake"))
        console.write_text(f"{file.name}{whose}: {', '.join(counted(*count_and_word) for count_and_word in counts)}")
    return EXIT_FAILED if problems or unread else EXIT_OK


def _lines_of(path: str) -> list[str]:
    from gputop.core.files import read_regular
    from gputop.rules.rule_file import MAX_BYTES

    try:
        return read_regular(path, MAX_BYTES).decode("utf-8-sig", "replace").splitlines()
    except OSError:
        return []


def _explain(args: argparse.Namespace) -> int:
    from gputop.advice.finding_pages import page
    from gputop.advice.registry import FINDING_IDS, limit_record
    from gputop.advice.user_registry import user_rules

    if len(args.words) != 1:
        raise GputopError("explain needs the ID of one rule", "To list all rules: gputop rules list", EXIT_USAGE)
    id_ = args.words[0]
    rules_of_user = [rule for rule in user_rules().rules if rule.id == id_]
    if not rules_of_user and id_ not in FINDING_IDS:
        raise GputopError(f"there is no rule {id_}", _near(id_, [rule.id for rule in user_rules().rules]), EXIT_USAGE)
    if id_ in FINDING_IDS:
        console.write_text("\n".join(plain_lines(page(id_, limit_record), width())).rstrip())
    lines = [line for rule in rules_of_user for line in _about_own(rule)]
    if lines:
        console.write_text("\n".join(lines))
    return EXIT_OK


def _near(id_: str, own_ids: Iterable[str]) -> str:
    """The ids that may have been meant: spelled alike, or with a word in common."""
    from difflib import get_close_matches

    from gputop.advice.registry import FINDING_IDS

    ids = sorted({*own_ids, *FINDING_IDS})
    words = {word for word in id_.lower().split("_") if len(word) > 2}
    alike = [other for other in ids if any(word in other for word in words)][:3]
    near = get_close_matches(id_.lower(), ids, 3) or alike
    return f"Did you mean {' or '.join(near)}?" if near else "To list all rules: gputop rules list"


def _about_own(rule: RuleText) -> Iterator[str]:
    yield f"{rule.id}   {rule.severity}, on {rule.condition.source}, from {rule.origin}"
    yield from wrap(rule.title, width(), "  ")
    yield from wrap(rule.condition.text + (f" for {rule.hold_s:g} s" if rule.hold_s else ""), width(), "  when  ")
    for name in {reference.quantity.name: reference for reference in rule.condition.references}.values():
        if not name.finding:
            yield from wrap(f"{name.text}   {name.quantity.unit}   {name.quantity.help}", width(), "  ", "      ")
    yield from wrap(rule.action, width(), "  → ") if rule.action else ()


def _names(_: argparse.Namespace) -> int:
    console.write_text("\n".join(names_table()))
    return EXIT_OK


def names_table() -> Iterator[str]:
    """All names with their units, for each kind of rule."""
    from gputop.rules.names import AGGREGATES, FUNCTIONS, NAMES, TABLES

    for source, title in (("live", "on = \"live\""), ("trace", "on = \"trace\", and budgets")):
        yield title
        rows = [(f"  {one.name}", str(one.unit), f"{'g' if one.per_gpu else ' '}{'t' if one.past else ' '}", one.help)
                for one in NAMES[source].values()]  # type: ignore[index]
        if source == "trace":
            rows += [(f'  {table.name}("…").{one.name}', str(one.unit), "", one.help)
                     for table in TABLES.values() for one in table.fields.values()]
        yield from (*_lines(("  name", "unit", "", "what"), rows), "")
    yield f"g: one value per GPU. t: also over a time window: name.{'(30s), name.'.join(AGGREGATES)}(30s)"
    yield from (f"{name:<18}{text}" for name, text in FUNCTIONS.items())


def _test(args: argparse.Namespace) -> int:
    from gputop.advice.user_registry import user_rules
    from gputop.diagnosis.rules_in_process import use_rules
    from gputop.replay.rule_trials import TrialsDocument, over_samples, over_trace
    from gputop.rules.read_files import RulePath

    if not args.words or (args.demo is None) != (len(args.words) == 2):
        raise GputopError("test needs a rules file and a trace, a recording, or --demo",
                          "gputop rules test FILE TRACE, or gputop rules test FILE --demo", EXIT_USAGE)
    problems = use_rules([RulePath(args.words[0], "named")])
    if problems:
        raise GputopError(problems[0], "\n  ".join(problems[1:]), EXIT_USAGE)
    if not user_rules().rules and not user_rules().budgets:
        raise GputopError(f"{args.words[0]} has no rules and no budgets", "docs/tasks/custom-rules.md shows some.",
                          EXIT_USAGE)
    analysis, samples = _demo(args.demo) if args.demo is not None else _subject(args.words[1])
    trials = [*(over_trace(analysis) if analysis is not None else ()),
              *(over_samples(samples) if samples is not None else ())]
    if args.json:
        console.write_json(TrialsDocument(tuple(trials)))
        return EXIT_OK
    left_out = [rule.id for rule in user_rules().rules if rule.id not in {trial.id for trial in trials}]
    for trial in trials:
        console.write_text("\n".join(_trial(trial)))
    if left_out:
        on = "live samples, which need a recording" if samples is None else "traces, which need a trace"
        text = f"Not tested, because these rules use {on}: {', '.join(left_out)}."
        console.write_text("\n".join(wrap(text, width())))
    return EXIT_OK


def _trial(trial: Trial) -> Iterator[str]:
    from gputop.render.evidence_words import evidence_label

    gpus = f" on GPU {ranges(trial.gpus, ', ')}" if trial.gpus else ""
    yield from wrap(f"{trial.id}: {trial.outcome.upper()}{gpus}   {trial.when}", width(), "", "    ")
    if trial.evidence:
        figures = "; ".join(f"{evidence_label(name)} {figure(name, value)}" for name, value in trial.evidence.items())
        yield from wrap(figures, width(), "    ")
    if trial.times and trial.first_s is not None:
        times = "once" if trial.times == 1 else f"{trial.times} times"
        yield (f"    {times}, first at {clock_time(trial.first_s)}, in {percent(trial.held_ratio or 0.0)} of the "
               "samples")
    if trial.missing:
        yield from wrap(f"it needs {trial.missing}", width(), "    ")


def _subject(path: str) -> tuple[Analysis | None, Iterable[NodeSample] | None]:
    """Content of a file: of a trace or a document its analysis, of a recording its samples."""
    from gputop.replay.compared_files import read_side
    from gputop.replay.reader import is_recording

    if is_recording(path):
        return None, _samples(path)
    analysis = read_side(path).analysis
    if analysis is None:
        raise GputopError(f"{path} is neither a trace nor a recording",
                          "Give a trace, the output of gputop analyze --json, or a recording from gputop record.")
    return analysis, None


def _samples(path: str) -> Iterator[NodeSample]:
    from gputop.replay.reader import open_recording

    with open_recording(path) as recording:
        for i in range(len(recording)):
            yield recording.sample(i)


def _demo(scenario: str) -> tuple[Analysis, Iterable[NodeSample]]:
    """Five minutes of the simulated job, and a trace of it."""
    import tempfile

    from gputop.core.files import temporary_place
    from gputop.diagnosis.diagnose import analyze
    from gputop.simulation.scenarios import DEFAULT_SCENARIO
    from gputop.sources.simulated import SimulatedSource

    source = SimulatedSource(DEFAULT_SCENARIO if scenario == _DEMO else scenario)
    source.open()
    now_s = time.time()
    begin_ns = int((now_s - _AGO_S) * 1e9)
    with tempfile.TemporaryDirectory(dir=temporary_place()) as folder:
        path = Path(folder) / "demo.xplane.pb"
        path.write_bytes(source.capture(begin_ns, begin_ns + int(_TRACE_S * 1e9)))
        analysis = analyze(path)
    console.say("SIMULATED: values from the demo's job")
    return analysis, source.backfill(now_s, 1.0)
