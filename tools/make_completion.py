"""Makes what `gputop completion` prints, gputop/completion/*, while the package is built (setup.py)."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from gputop.advice.registry import RULES
from gputop.commands.arguments import COMMANDS, parser
from gputop.commands.completion import FILES
from gputop.commands.schema import SCHEMAS
from gputop.core.version import __version__
from gputop.simulation.scenarios import SCENARIOS

_SUMMARY = "shows why the GPUs are not at 100%, and what to do about it"
FOLDER = Path(__file__).parents[1] / "gputop" / "completion"
_FOLDERS = ("DIR", "RUN|LOGDIR")
_NAMES = ("FILE", "PATH", "A", "B")
# Words for arguments whose words argparse does not check: others are right, too, or gputop's own message says more.
_WORDS: dict[tuple[str | None, str], Iterable[str]] = {
    (None, "demo"): ("list", *SCENARIOS), (None, "theme"): ("gputop-dark", "gputop-light", "gputop-contrast"),
    (None, "notify"): ("bell", "webhook"), ("schema", "name"): SCHEMAS,
    ("rules", "words"): sorted({rule_id for rule in RULES for rule_id in rule.ids}),
}


def _with_values(root: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser, its arguments that are paths marked as such, and others with the words that they take."""
    shtab = import_module("shtab")
    parsers = {None: root, **root._commands.choices}  # type: ignore[attr-defined]
    for command, action in ((command, action) for command, own in parsers.items() for action in own._actions):
        if action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY
        elif action.metavar in _NAMES:
            action.complete = shtab.FILE
        elif words := _WORDS.get((command, action.dest)) or _WORDS.get((None, action.dest)):
            action.choices = list(words)
    return root


def _man_page(page: str) -> str:
    """What argparse-manpage leaves out: a line for whatis, lines that begin with a dot, the lines of the examples."""
    page = page.replace(".SH NAME\ngputop\n", f".SH NAME\ngputop \\- {_SUMMARY}\n", 1)
    page = re.sub(r"(?m)^(?=\.(?![A-Z]{1,2}\b)|')", r"\\&", page)
    head, _, tail = page.partition(".SH COMMENTS\n")
    return f"{head}.SH EXAMPLES\n.nf\n{tail.removeprefix('examples:').strip(chr(10))}\n.fi\n"


def made(what: str) -> str:
    """The text of one file."""
    os.environ["COLUMNS"] = "80"  # argparse breaks lines by it
    if what != "man":
        return str(import_module("shtab").complete(_with_values(parser()), what))
    page = import_module("argparse_manpage.manpage").Manpage(parser())
    page.source, page.manual, page.date = f"gputop {__version__}", "User Commands", ""
    return _man_page(f"{page}\n")


def make(folder: Path = FOLDER) -> None:
    """Write all files into `folder`."""
    folder.mkdir(exist_ok=True)
    for what, name in FILES.items():
        (folder / name).write_text(made(what), encoding="utf-8")


if __name__ == "__main__":
    make()
    print(f"{FOLDER}: the words of {len(COMMANDS)} commands for {', '.join(FILES)}")
