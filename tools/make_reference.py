"""Makes the pages of docs that come from the code. `make reference` writes those that are in the repository, findings
and steps; the site also has the others (`make docs`).

`tests/test_reference.py` holds that what is on disk is what this makes. Nothing here depends on the width of a
terminal or on how a version of argparse lays out its help.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from make_completion import ENVIRONMENT, PLACES
from textual.binding import Binding

import gputop.tui
from gputop.advice.finding_pages import page, title
from gputop.advice.registry import RULES
from gputop.analysis.steps.steps import STEP_DETECTORS
from gputop.commands.arguments import COMMANDS, parser
from gputop.commands.rules import names_table
from gputop.commands.settings import SETTINGS, Value
from gputop.core.metrics import ADAPTER_METRICS, GPU_METRICS, HOST_METRICS, Metric
from gputop.export.openmetrics import families
from gputop.simulation.scenarios import SCENARIOS
from gputop.tui import keys

DOCS = Path(__file__).parents[1] / "docs"
_MADE = "<!-- Made from the code by tools/make_reference.py: make reference. -->\n\n"
ORIGINS = (
    ("trace", "From a trace", "`gputop capture`, `gputop analyze`, and `c` in the monitor report these findings."),
    ("live", "Live", "The monitor reports these findings without a trace, based on recent samples."),
    ("fleet", "In a cluster", "`gputop cluster` reports these findings for jobs on many nodes."),
)



def pages() -> dict[Path, str]:
    """All pages that are made, by their path in docs."""
    made = {Path("findings") / f"{id_}.md": _MADE + page(id_).rstrip() + "\n" for id_ in finding_ids()}
    for name, lines in (("findings/README.md", _findings()), ("reference/commands.md", _commands()),
                        ("reference/keys.md", _keys()), ("reference/settings.md", _settings()),
                        ("reference/metrics.md", _metrics()),
                        ("reference/rule-names.md", _rule_names()), ("reference/steps.md", _steps())):
        made[Path(name)] = _MADE + "\n".join(lines).rstrip() + "\n"
    return made


def finding_ids() -> tuple[str, ...]:
    """The ids of all findings, in the order of their rules."""
    return tuple(dict.fromkeys(id_ for rule in RULES for id_ in rule.ids))


def _cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def _table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(map(_cell, row))} |" for row in rows)
    yield ""


def _findings() -> Iterator[str]:
    yield "# Findings"
    yield ""
    yield ("The page of each finding explains what it means, how to confirm it, how to fix it, and when it is wrong. "
           "`gputop rules explain ID` prints the same page.")
    yield ""
    yield "See [How gputop decides](../concepts/how-it-decides.md) for details on severity, savings, and abstaining."
    yield ""
    for origin, heading, text in ORIGINS:
        yield f"## {heading}"
        yield ""
        yield text
        yield ""
        yield from _table(("finding", "what it means"), (
            (f"[`{id_}`]({id_}.md)", title(id_)) for rule in RULES if rule.origin == origin for id_ in rule.ids))


# -- commands ---------------------------------------------------------------------------------------


def _commands() -> Iterator[str]:
    main = parser()
    yield "# Commands"
    yield ""
    yield ("Use `--help` to see the options of a command. You can put options of the monitor before or after a "
           "command that shares them.")
    yield ""
    yield from _table(("command", "what it does"), [
        ("[`gputop`](#gputop)", "the live monitor"),
        *((f"[`gputop {name}`](#gputop-{name})", command.summary) for name, command in COMMANDS.items())])
    yield "Exit status: 0 success; 1 failure, with a message that says why and what to do; 2 wrong usage."
    yield "3: nothing to show (no GPU, no profiler server, no trace events), or a gate that gputop could not judge."
    yield "4: a gate failed (`--fail-on`)."
    yield ""
    yield ("With `--json`, a command prints one document on stdout and messages on stderr: "
           f"{', '.join(f'`{name}`' for name in sorted(_with_json(main)))}. [JSON](json.md) says how to see the keys.")
    yield ""
    yield "## gputop"
    yield ""
    yield main.description or ""
    yield ""
    yield from _options(main, skip=frozenset())
    yield "Scenarios of `--demo`:"
    yield ""
    yield from _table(("scenario", "what it simulates"), (
        (f"`{name}`", scenario.description) for name, scenario in SCENARIOS.items()))
    shared = frozenset(main._option_string_actions)
    for name, command in COMMANDS.items():
        own = main._commands.choices[name]  # type: ignore[attr-defined]
        yield f"## gputop {name}"
        yield ""
        yield command.description
        yield ""
        yield "```sh"
        yield command.example
        yield "```"
        yield ""
        yield from _options(own, shared)


def _with_json(main: argparse.ArgumentParser) -> Iterator[str]:
    return (name for name, own in main._commands.choices.items()  # type: ignore[attr-defined]
            if "--json" in own._option_string_actions)


def _options(own: argparse.ArgumentParser, skip: frozenset[str]) -> Iterator[str]:
    """A table of what is the command's own, and the names of the options that it shares with the monitor."""
    rows, shared = [], []
    for action in own._actions:
        if isinstance(action, argparse._SubParsersAction | argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        if action.option_strings and skip >= {*action.option_strings}:
            shared.append(action.option_strings[0])
        else:
            rows.append((_invocation(action), (action.help or "").replace("%%", "%").lstrip("; ")))
    if rows:
        yield from _table(("option", "what it does"), rows)
    if shared:
        yield f"It also accepts these [options of the monitor](#gputop): {', '.join(f'`{name}`' for name in shared)}."
        yield ""


def _invocation(action: argparse.Action) -> str:
    value = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else
                               action.dest.upper())
    takes = action.nargs != 0
    value = f" {value}" if takes and action.nargs != "?" else f" [{value}]" if takes else ""
    return ", ".join(f"`{name}{value}`" for name in action.option_strings) or f"`{value.strip()}`"


# -- keys -------------------------------------------------------------------------------------------

_SCREENS = {  # the module or its class that has the keys, and what it is called
    "gputop.tui.monitor.findings_panel": "The panel What to do", "gputop.tui.monitor.gpu_table": "The panel GPUs",
    "gputop.tui.monitor.process_panel": "The panel Processes", "gputop.tui.timeline.timeline_screen": "The timeline",
    "gputop.tui.timeline.canvas": "The timeline: moving", "gputop.tui.timeline.idle_gap_list": "The idle gaps",
    "gputop.tui.screens.tables_screen": "The tables", "gputop.tui.screens.captures": "The captures",
    "gputop.tui.screens.compare": "The comparison", "gputop.tui.screens.finding": "A finding",
    "gputop.tui.screens.process_screens": "A process", "gputop.tui.screens.process_screens:StacksPopup": "The stacks",
    "gputop.tui.screens.capture_questions:ChooseJob": "The question which job",
    "gputop.tui.screens.capture_questions:WorkersQuestion": "The question which workers",
    "gputop.tui.screens.capture_questions:StartServer": "The question before a server is started",
    "gputop.tui.screens.dialogs": "Dialogs", "gputop.tui.cluster.cluster_app": "The screen of gputop cluster",
    "gputop.tui.cluster.cluster_app:ClusterApp": "Everywhere in gputop cluster",
    "gputop.tui.run_app": "The monitor of gputop run",
    "gputop.tui.terminal.terminal_app": "Everywhere",
}


def modules_with_keys() -> dict[str, list[Binding]]:
    """Modules of the interface whose classes have keys that the help explains, with these keys; a class that has a
    heading of its own stands by itself."""
    keys_of: dict[str, list[Binding]] = {}
    for found in pkgutil.walk_packages(gputop.tui.__path__, "gputop.tui."):
        module = importlib.import_module(found.name)
        own = [value for value in vars(module).values() if isinstance(value, type)
               and value.__module__ == module.__name__ and "BINDINGS" in vars(value)]
        for value in own:
            name = f"{module.__name__}:{value.__name__}"
            bindings = [b for b in value.BINDINGS  # type: ignore[attr-defined]
                        if isinstance(b, Binding) and b.tooltip and b not in keys.MONITOR]
            if bindings:
                keys_of.setdefault(name if name in _SCREENS else module.__name__, []).extend(bindings)
    return keys_of


def _keys() -> Iterator[str]:
    yield "# Keys"
    yield ""
    yield "Press `?` on any screen to list its keys, and `ctrl+p` to list all commands."
    yield "Click to select an item, and click again to open it."
    yield "Press `esc` to close an open view, return to the current time, or end a filter."
    yield ""
    yield "## The monitor"
    yield ""
    for heading, group in keys.GROUPS.items():
        yield f"### {heading}"
        yield ""
        yield from _key_table(group)
    of = modules_with_keys()
    for module, heading in _SCREENS.items():
        if module in of:
            yield f"## {heading}"
            yield ""
            yield from _key_table(of[module])


def _key_table(bindings: Iterable[Binding]) -> Iterator[str]:
    yield from _table(("key", "what it does"), (
        (" ".join(f"`{keys.name(key)}`" for key in binding.key.split(",")).replace("`|`", "`\\|`"), binding.tooltip)
        for binding in bindings))


# -- settings, metrics, JSON, names -----------------------------------------------------------------


def _toml(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else "[]" if value == () else f"{value:g}"


def _settings() -> Iterator[str]:
    yield "# Settings and environment variables"
    yield ""
    yield "Settings are in `~/.config/gputop/config.toml`. `gputop config` prints and explains all settings."
    yield "The command line has priority over the file. gputop ignores an invalid value and prints a warning."
    yield ""
    yield "## Settings"
    yield ""
    yield from _table(("setting", "default", "what it does", "option"), (
        (f"`{s.key}`", f"`{_toml(s.default)}`", s.help, f"`{s.option}`" if s.option else "")
        for s in SETTINGS.values()))
    yield "## Environment variables"
    yield ""
    yield from _table(("variable", "what gputop reads it for"), (
        (f"`{name}`", text) for name, text in ENVIRONMENT.items()))
    yield "## Files"
    yield ""
    yield from _table(("file", "what it holds"), ((f"`{name}`", text) for name, text in PLACES.items()))


def _metrics() -> Iterator[str]:
    yield "# Metrics"
    yield ""
    yield "[Where metrics come from](../concepts/metrics.md) explains sources and GPU generations."
    yield ""
    yield "## Metrics of Prometheus"
    yield ""
    yield "`gputop export` and `gputop --export PORT` serve these metrics."
    yield "For a guide, see [Prometheus and Grafana](../tasks/prometheus.md)."
    yield ""
    yield "| metric | type | labels | what |"
    yield "|---|---|---|---|"
    yield from (f"| `{f.name}` | {f.type} | {', '.join(f.labels)} | {f.help} |" for f in families())
    yield ""
    yield "## Metrics of the monitor"
    yield ""
    yield "Snapshots, recordings, JSON and custom rules use these IDs. A lane can show any metric that has a history."
    yield ""
    for heading, table in (("GPU", GPU_METRICS), ("Host", HOST_METRICS), ("RDMA adapter", ADAPTER_METRICS)):
        yield f"### {heading}"
        yield ""
        yield from _metric_rows(table)


def _metric_rows(table: Mapping[str, Metric]) -> Iterator[str]:
    yield from _table(("id", "label", "unit", "lane", "what"), (
        (f"`{m.id}`", m.label, m.unit, "yes" if m.lane else "", m.help) for m in table.values()))


def _rule_names() -> Iterator[str]:
    yield "# Names in custom rules"
    yield ""
    yield "`gputop rules names` prints this list. For a guide, see [Custom rules](../tasks/custom-rules.md)."
    yield ""
    yield "```text"
    yield from names_table()
    yield "```"


def _steps() -> Iterator[str]:
    yield "# How gputop finds steps"
    yield ""
    yield "To show times per step and to compare two captures, gputop needs to know where a training step begins."
    yield "gputop tries these methods in order and uses the first that finds complete steps. Reports name the method."
    yield ""
    yield from _table(("what marks the steps", "which jobs", "what the trace needs"), (
        (detector.name, detector.applies, detector.needs) for detector in STEP_DETECTORS))
    yield "If no method finds steps, gputop reports times as shares of the recording."
    yield "[PyTorch](../tasks/pytorch.md) and [TensorFlow and JAX](../tasks/tensorflow-jax.md) show how to mark steps."
    yield "For the definition of a step, see [Trace notes](../contributing/trace-notes.md)."
    yield ""


def kept(made: Mapping[Path, str]) -> dict[Path, str]:
    """Those of the pages that are in the repository: nothing else shows what they say."""
    return {path: text for path, text in made.items() if path.parts[0] == "findings" or path.name == "steps.md"}


def main() -> int:
    installed = Path(gputop.tui.__file__).parents[2]
    if installed != DOCS.parent:  # it would write that one's pages here, and remove those that it lacks
        print(f"gputop is imported from {installed}, not from {DOCS.parent}: run make reference", file=sys.stderr)
        return 1
    made = kept(pages())
    for old in (DOCS / "findings").glob("*.md"):
        if old.relative_to(DOCS) not in made:
            old.unlink()
    for path, text in made.items():
        (DOCS / path).parent.mkdir(parents=True, exist_ok=True)
        (DOCS / path).write_text(text, encoding="utf-8")
    print(f"{DOCS}: {len(made)} pages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
