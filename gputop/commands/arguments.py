"""The command line: the commands, the options they share, and the parser made of both.

Each command declares its own options in ``gputop/commands/NAME.py``, beside what it does. The parser of a command
is built only where the command line names it: building all of them takes as long as reading the GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct

from gputop.commands.option_types import count, interval_s, listen_address, minutes
from gputop.core.errors import EXIT_USAGE
from gputop.core.own_program import install_command
from gputop.core.version import __version__
from gputop.session.options import DEFAULT_RULE
from gputop.text import console

_EPILOG = """\
examples:
  gputop --demo                      explore without a GPU
  gputop run -- python train.py      start a job that gputop can capture from
  gputop --attach localhost:6009     watch a job that has a profiler server

Defaults can be set in ~/.config/gputop/config.toml; gputop config lists all settings.
exit status: 0 success; 1 failure (the message explains why and what to do); 2 wrong usage; 3 nothing to show
(no GPU, no profiler server, no trace events); 4 a gate failed (--fail-on)"""

SIMULATED_DEFAULT = "default"
_PID = re.compile(r"[1-9]\d{0,8}")
_ADDRESS = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}|unix(?:-abstract)?:.+")


class Command(Struct, frozen=True):
    """A command's line in the list of all, the sentence that its own help begins with, and an example."""

    summary: str
    description: str
    example: str


COMMANDS: Mapping[str, Command] = {
    "snapshot": Command("print the current state of the node",
                        "Write what the monitor shows as text, JSON, or one HTML page.",
                        "gputop snapshot -o node.html"),
    "capture": Command("capture a trace and print its findings",
                       "Record a trace of the job on this node (or of PID, or at HOST:PORT), analyze it, and print "
                       "what slows the GPUs down.",
                       "gputop capture localhost:6009 --json > analysis.json"),
    "analyze": Command("analyze a trace file",
                       "Find what slows the GPUs down in a trace from TensorFlow, JAX, PyTorch or Nsight Systems.",
                       "gputop analyze gputop-traces"),
    "compare": Command("compare two traces, analyses or snapshots: show what changed beyond noise",
                       "Show whether B is better than A, how much the fixes saved, and what changed.",
                       "gputop compare before.xplane.pb after.xplane.pb"),
    "rules": Command("check, explain and test custom rules; list all rules and limits",
                     "Check, explain and test rules written in TOML; list all rules and limits.",
                     "gputop rules test gputop.toml gputop-traces"),
    "record": Command("record telemetry to a file until ctrl-c",
                      "Write the monitor's measurements to a file that gputop replay can open.",
                      "gputop record -o night.rec --interval 5"),
    "replay": Command("open a recording or a snapshot in the monitor",
                      "Show a recording or a snapshot in the monitor. No GPU is needed.",
                      "gputop replay night.rec --speed 10"),
    "report": Command("summarize days of recordings: training, waiting and idle time, energy, worst hours, memory "
                      "growth", "Show how the GPUs' time was used. The job needs no extra code.",
                      "gputop report week/*.rec --price-per-kwh 0.30"),
    "export": Command("serve the node's metrics to Prometheus until ctrl-c",
                      "Serve the monitor's measurements as metrics, or write a file for node_exporter "
                      f"({install_command('export')}).",
                      "gputop export --listen 127.0.0.1:9810"),
    "cluster": Command("show the jobs of a cluster and the GPUs they hold, from Prometheus or the nodes",
                       "Show which jobs hold GPUs that they do not use, and which GPUs slow their jobs down.",
                       "gputop cluster --prometheus http://prometheus:9090 --once"),
    "convert": Command("convert a trace to SQLite, Parquet or Perfetto's format, or a recording to SQLite or Parquet",
                       "Write a trace or a recording in a format that other tools read (Parquet needs pyarrow: "
                       f"{install_command('parquet')}).",
                       "gputop convert gputop-traces -o trace.sqlite"),
    "run": Command("start a job with a profiler server, without changing its code",
                   "Start a job that gputop can capture from, and watch it in the monitor.",
                   "gputop run -- python train.py"),
    "attach": Command("start a profiler server in a running process",
                      "Start a profiler server in a running TensorFlow or JAX process. gputop asks for confirmation "
                      "first.", "gputop attach 41231"),
    "stacks": Command("show where each rank of a job is, and which rank the others wait for",
                      "Find the missing rank with NCCL and PyTorch's flight recorder, and read the stacks of this "
                      f"node's ranks with py-spy ({install_command('stacks')}).", "gputop stacks"),
    "xprof": Command("open a captured trace in XProf in the browser",
                     f"Start XProf ({install_command('xprof')}) with the captured traces.",
                     "gputop xprof gputop-traces"),
    "config": Command("print all settings as a config file",
                      "Print all settings, including the defaults, as a config file.",
                      "gputop config --write"),
    "doctor": Command("check what works on this node, and show how to fix what does not",
                      "Test everything that gputop needs, and show how to fix what fails.",
                      "gputop doctor"),
    "agent": Command("answer requests from gputop on another node, which starts this command over ssh",
                     "Read requests and write answers as lines of JSON, for gputop cluster --nodes and gputop capture "
                     "--nodes.", "ssh n01 gputop agent"),
    "schema": Command("print the JSON Schema of a command's --json output",
                      "Print the JSON Schema of a command's output, for scripts and agents.",
                      "gputop schema analyze"),
    "skill": Command("print instructions for AI agents", "Print SKILL.md, which shows an AI agent how to find the "
                                                         "cause of a slow job.",
                     "gputop skill > SKILL.md"),
    "completion": Command("print a shell completion script or the man page",
                          "Print the completion script of a shell, or the man page.",
                          'eval "$(gputop completion bash)"  # in ~/.bashrc; or: gputop completion man | man -l -'),
}


# What an earlier version had, or other programs have, and what to use instead.
_GONE: Mapping[str, str] = {
    **dict.fromkeys(("-i", "--id"), "To show only GPU 0: gputop --gpus 0."),
    **dict.fromkeys(("-l", "-d", "-n", "-lms", "--loop", "--delay"), "Seconds between samples: gputop --interval 2."),
    **dict.fromkeys(("-1", "--once", "-L", "--list"), "To print one snapshot: gputop snapshot."),
    **dict.fromkeys(("-q", "--query-gpu", "--query"), "gputop snapshot --json prints all values."),
    **dict.fromkeys(("-p", "--pid"), "To record a process: gputop capture PID."),
    **dict.fromkeys(("profile", "trace"), "To record a running job: gputop capture."),
    **dict.fromkeys(("top", "monitor", "watch", "dmon", "pmon"), "To open the monitor: gputop."),
    "version": "To print the version: gputop --version.",
    "--dip-before": "gputop no longer records the time before a dip. --on-dip captures right after a dip.",
    **dict.fromkeys(("--low-bandwidth", "--no-low-bandwidth"),
                    "gputop now skips frames on a slow connection. To sample less often: gputop --interval 5."),
    "--worker-figures": "Name the workers to capture: --attach n1:6009,n7:6009. gputop cluster shows their activity.",
    "serve": "gputop no longer serves web pages. To show the monitor in a web terminal: ttyd -W -i lo gputop.",
}


def _help_width() -> int:
    """Columns of help: two less than the terminal's, as argparse has it."""
    with contextlib.suppress(ValueError):
        if (columns := int(os.environ.get("COLUMNS", ""))) > 0:
            return columns - 2
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return (os.get_terminal_size(sys.__stdout__.fileno()).columns or 80) - 2  # type: ignore[union-attr]
    return 78


class _Parser(argparse.ArgumentParser):
    def __init__(self, **settings: Any) -> None:
        # argparse makes a formatter for each option, and asks shutil for the width, which is slow to import.
        super().__init__(formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=_help_width()),
                         **settings)

    def error(self, message: str) -> NoReturn:
        console.note(self.format_usage())
        if message.startswith("the following arguments are required"):
            message += f". For an example: {self.prog} --help"
        console.say(message)
        self.exit(EXIT_USAGE)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but answer a mistyped word with the one that was meant."""
        commands = self._commands.choices.keys() | {word for word in _GONE if not word.startswith("-")}
        for option in (word.partition("=")[0] for word in takewhile(lambda word: word not in commands, args)):
            habit = option if option in _GONE else option.rstrip("0123456789.")  # -l1
            if habit in _GONE and option not in self._option_string_actions:
                self.error(f"gputop has no option {habit}. {_GONE[habit]}")
            if option.startswith("--") and not any(word.startswith(option) for word in self._option_string_actions):
                self.error(f"gputop has no option {option}.{_meant(option, self._option_string_actions)} For a list: "
                           "gputop --help")
        parsed, unknown = self.parse_known_args(args, namespace)
        if not any(word.startswith("-") for word in unknown) and isinstance(getattr(parsed, "paths", None), list):
            parsed.paths += unknown  # behind an option: argparse takes several words only where they stand together
            unknown = []
        if parsed.command == "capture" and all(_ADDRESS.fullmatch(word) or _PID.fullmatch(word) for word in unknown):
            parsed.attach += [word for word in unknown if not _PID.fullmatch(word)]
            parsed.pids, unknown = [int(word) for word in unknown if _PID.fullmatch(word)], []
        if unknown:
            # What stands before an unknown option is often right without it.
            word = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
            of = f"gputop {parsed.command}" if parsed.command else "gputop"
            subparser = self._commands.choices[parsed.command] if parsed.command else self
            if word.startswith("-"):
                meant = _meant(word, subparser._option_string_actions)
                subparser.error(f"{of} has no option {word}.{meant} For a list: {of} --help")
            subparser.error(f"{of} does not accept {word}.{_belongs(word, subparser)} For an example: {of} --help")
        return parsed

    def add_commands(self, **settings: Any) -> Any:
        self._commands = self.add_subparsers(**settings)
        return self._commands

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            meant = (" Did you mean gputop --demo?" if value == "demo" else
                     f" Did you mean gputop --attach {value}?" if _ADDRESS.fullmatch(value) else
                     _meant(value, action.choices))
            raise argparse.ArgumentError(None, f"there is no command {value!r}.{meant} For a list: gputop --help")
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"{value!r} is not one of {', '.join(action.choices)}."
                                                 f"{_meant(str(value), action.choices)}")
        super()._check_value(action, value)


def _belongs(word: str, parser: argparse.ArgumentParser) -> str:
    """The option that a word without one was probably meant for."""
    address, number, path = _ADDRESS.fullmatch(word), word.isdecimal(), Path(word)
    for fits, option in ((address or number, "--listen"), (address, "--attach"), ("://" in word, "--prometheus"),
                         (number, "--seconds"), (number, "--job"), (path.is_dir(), "--logdir"),
                         (path.suffix, "--output")):
        if fits and option in parser._option_string_actions:
            return f" Did you mean {option} {word}?"
    return ""


def _meant(word: str, words: Iterable[str]) -> str:
    from difflib import get_close_matches

    if word in _GONE:
        return f" {_GONE[word]}"
    words = [candidate for candidate in words if candidate != "-h"]
    begins = [candidate for candidate in words if len(word) == 2 and candidate.startswith(f"-{word}")]
    close = begins if len(begins) == 1 else get_close_matches(word, words, 1)
    return f" Did you mean {close[0]}?" if close else ""


def _watch(watch: argparse._ActionsContainer) -> None:
    watch.add_argument("--demo", nargs="?", const=SIMULATED_DEFAULT, metavar="SCENARIO",
                       help="show a simulated node; --demo list lists the scenarios. With several (a,b), D switches to "
                            "the next one; with one, D applies the fix to the same job")
    watch.add_argument("--gpus", default="", metavar="LIST",
                       help="show only these GPUs: 0,2-3, GPU or MIG UUIDs (or their first characters), MIG instances "
                            "as 0:1, or the word visible for CUDA_VISIBLE_DEVICES")
    watch.add_argument("--interval", type=interval_s, default=None, metavar="S", help="seconds between samples (1.0)")
    watch.add_argument("--source", choices=("auto", "nvml", "dcgm", "simulated"), default="auto",
                       help="source of the measurements. auto: the NVIDIA driver, plus a DCGM host engine for metrics "
                            "that the driver lacks and the engine already watches. nvml: only the driver. dcgm: only "
                            "the host engine")
    watch.add_argument("--dcgm", default=None, metavar="ADDRESS",
                       help="the DCGM host engine: HOST:PORT, [IPv6]:PORT or unix:///SOCKET (127.0.0.1:5555)")
    watch.add_argument("--dcgm-bindings", type=Path, default=None, metavar="DIR",
                       help="NVIDIA's Python bindings for DCGM (default: where DCGM 4 and 3 install them)")
    watch.add_argument("--dcgm-watch", action="store_true", default=False,
                       help="let the DCGM host engine read the profiling fields (SM, tensor, DRAM activity) for gputop "
                            "until gputop exits. On GPUs older than Hopper, this is off by default because it occupies "
                            "the GPU's counters, so ncu, nsys and other profilers fail. On A10 and A40 it has made "
                            "GPUs hang until a reboot (Xid 119). On Hopper and newer, the engine reads the fields "
                            "through GPM, which uses no counters; --source dcgm then reads them without this option")


def _server(servers: argparse._ActionsContainer) -> None:
    servers.add_argument("--attach", action="append", default=[], metavar="HOST:PORT",
                       help="a profiler server to capture from (default: any on this node); unix:/PATH for a socket "
                            "that leads to a server. Several addresses (repeat the option, use commas, or write "
                            "node[01-04]:6009) are treated as the workers of one job and captured together")
    servers.add_argument("--profiler-port", default=None, metavar="PORTS",
                       help="the port of the profiler servers on every machine of the job (6009, or 6009-6012 for four "
                            "ranks per machine). The machines come from --attach without a port, from TF_CONFIG, or "
                            "from SLURM_JOB_NODELIST")


def _capture(captures: argparse._ActionsContainer) -> None:
    captures.add_argument("--logdir", type=Path, default=None, metavar="DIR",
                       help="folder for traces and snapshots, usable as a TensorBoard logdir (./gputop-traces)")
    captures.add_argument("--stacks", action=argparse.BooleanOptionalAction, default=None,
                       help="sample the job's Python stacks during a capture, with py-spy "
                            f"({install_command('stacks')}): idle gaps then show the line of code. By default only for "
                            "your own jobs; --stacks: also for jobs of other users; --no-stacks: for none")


def _rules(rules: argparse._ActionsContainer) -> None:
    rules.add_argument("--rules", action="append", default=[], metavar="FILE",
                       help="use the rules, limits and budgets in this file, in addition to rules.toml in the config "
                            "folder and gputop.toml in the current folder; see gputop rules")


def _dip(dips: argparse._ActionsContainer) -> None:
    dips.add_argument("--on-dip", nargs="?", const=DEFAULT_RULE, default=None, metavar="RULE",
                      help="capture automatically when GPU activity dips, into <logdir>/black-box (limited in size); "
                           f"default rule: {DEFAULT_RULE!r}. Also accepts tensor, dram, util, power, and levels such "
                           "as 'tensor<10%%', 'power<200W'; or a condition in the syntax of custom rules: "
                           "'sm_active.mean(10s) < 40%% and power_w > 200W for 5s'")
    dips.add_argument("--dip-every", type=minutes, default=10.0, metavar="MINUTES",
                      help="minimum minutes between two automatic captures (10)")
    dips.add_argument("--dip-max", type=count, default=None, metavar="N",
                      help="maximum number of automatic captures (20; gputop capture: 1)")


def _cluster(cluster: argparse._ActionsContainer) -> None:
    cluster.add_argument("--prometheus", default=None, metavar="URL",
                         help="address of Prometheus (or VictoriaMetrics, Thanos, Mimir): http://HOST:9090, https://…, "
                              "or, through a login node, ssh://LOGIN/http://HOST:9090. Default: the setting "
                              "prometheus. Credentials come from the environment (GPUTOP_PROMETHEUS_TOKEN, _USER, "
                              "_PASSWORD, _CA) or the settings")


def _remote(nodes: argparse._ActionsContainer) -> None:
    nodes.add_argument("--remote-command", default=None, metavar="COMMAND",
                       help="the shell command that starts gputop on the nodes (gputop)")


def _screen(screen: argparse._ActionsContainer) -> None:
    screen.add_argument("--theme", default=None, metavar="NAME",
                        help="gputop-dark, gputop-light, gputop-contrast (color-blind safe), or a Textual theme")
    screen.add_argument("--color", choices=("auto", "truecolor", "256", "16", "none"), default=None,
                        help="number of terminal colors (auto: what the terminal reports; none if NO_COLOR is set)")
    screen.add_argument("--ascii", action=argparse.BooleanOptionalAction, default=None,
                        help="use only ASCII characters (default: if the locale is not UTF-8)")


def _export(export: argparse._ActionsContainer) -> None:
    export.add_argument("--export", type=listen_address, default=None, metavar="[HOST:]PORT",
                        help="also serve the metrics to Prometheus, like gputop export --listen")


def _notify(notify: argparse._ActionsContainer) -> None:
    notify.add_argument("--notify", action="append", default=[], metavar="WAY",
                        help="notify about persistent findings, GPU faults, and finished captures and jobs. bell: the "
                             "terminal bell, with OSC 9. command:LINE: a command that receives JSON on standard input "
                             "and the text as its last argument. webhook: POST to GPUTOP_WEBHOOK_URL. Repeat the "
                             "option for several. gputop sends the same event at most once every ten minutes")


# The options that commands share, by the heading that the help has for them.
GROUPS: Mapping[str, Callable[[argparse._ActionsContainer], None]] = {
    "what to watch": _watch, "profiler servers": _server, "captures": _capture,
    "custom rules": _rules, "automatic captures": _dip,
    "other nodes": _cluster, "gputop on other nodes": _remote, "the screen": _screen, "metrics": _export,
    "notifications": _notify}


def add_shared(parser: argparse.ArgumentParser, *groups: str, idle: Sequence[str] = ()) -> None:
    """Add options that a command shares with the monitor: they may stand before the command as well as after it.

    They have no defaults here: a default would overwrite what stands before the command. Those of ``idle`` do nothing
    there: command lines with them stay valid, and the help leaves them out.
    """
    for group in groups:
        GROUPS[group](parser.add_argument_group(group))
    shown = len(parser._actions)
    for group in idle:
        GROUPS[group](parser)
    for number, action in enumerate(parser._actions):
        action.default = argparse.SUPPRESS
        action.help = action.help if number < shown else argparse.SUPPRESS


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of one command (None: those of this process). After the first ``--`` of ``run``
    nothing is gputop's: argparse, whose ways with ``--`` differ between versions, never sees it."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    own_words, rest = words, []
    if "--" in words and "run" in words[:words.index("--")]:
        separator = words.index("--")
        own_words, rest = words[:separator], words[separator:]
    args = parser(own_words).parse_args(own_words)
    if args.command == "run":
        args.job = [*args.job, *rest] if args.job else rest[1:]
    return args


def parser(words: Sequence[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """The command line: options of the monitor, and the headless commands beside it.

    Only the commands among ``words`` have their options.
    """
    main_parser = _Parser(prog="gputop", usage="gputop [options] [COMMAND …]", epilog=_EPILOG,
                          description="Shows why the GPUs are not at 100% and what to do about it. Without a command, "
                                      "gputop opens the live monitor.")
    main_parser.add_argument("--version", action=_Version, nargs=0, help="print gputop's version and its environment")
    for title, group in GROUPS.items():
        group(main_parser.add_argument_group(title))
    empty = _Parser(add_help=False)
    commands = main_parser.add_commands(
        dest="command", metavar="COMMAND", prog="gputop",
        parser_class=lambda asked, **settings: _command_parser(asked, **settings) if asked else empty)
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.summary, asked=name if name in words else None)
    return main_parser


def _command_parser(name: str, **settings: Any) -> _Parser:
    command = COMMANDS[name]
    parser = _Parser(description=command.description, **settings)
    import_module(f"gputop.commands.{name}").add_arguments(parser)
    if parser.usage is None:  # argparse's own is ten lines of options
        words = [a.metavar if a.nargs is None else f"[{a.metavar}]" if a.nargs == "?" else
                 f"[{a.metavar}…]" if a.nargs == "*" else f"{a.metavar}…"
                 for a in parser._actions if not a.option_strings]
        parser.usage = " ".join((f"gputop {name} [options]", *map(str, words)))
    parser.epilog = f"example:\n  {command.example}" + (f"\n\n{parser.epilog}" if parser.epilog else "")
    return parser


class _Version(argparse.Action):
    """Prints the versions of gputop and of what it runs on: its first line is the version alone."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from gputop.commands.completion import versions

        console.write_text("\n".join((f"gputop {__version__}", *versions())))
        parser.exit()
