"""Makes what `gputop completion` prints, gputop/completion/*: `make completion`, after a change of the command line."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path

from gputop.commands.arguments import COMMANDS, parser
from gputop.commands.completion import FILES
from gputop.core.version import __version__

FOLDER = Path(__file__).parents[1] / "gputop" / "completion"
_FOLDERS = ("DIR", "RUN|LOGDIR")
_NAMES = ("FILE", "PATH", "A", "B")


def _with_paths(root: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser, its arguments that are paths marked as such."""
    shtab = import_module("shtab")
    parsers = [root, *root._commands.choices.values()]  # type: ignore[attr-defined]
    for action in (action for own in parsers for action in own._actions):
        if action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY
        elif action.metavar in _NAMES:
            action.complete = shtab.FILE
    return root


def made(what: str) -> str:
    """The text of one file."""
    os.environ["COLUMNS"] = "80"  # argparse breaks lines by it
    if what != "man":
        return str(import_module("shtab").complete(_with_paths(parser()), what))
    page = import_module("argparse_manpage.manpage").Manpage(parser())
    page.project_name, page.version, page.date = "gputop", __version__, ""
    return f"{page}\n"


def main() -> int:
    for what, name in FILES.items():
        (FOLDER / name).write_text(made(what), encoding="utf-8")
    print(f"{FOLDER}: the words of {len(COMMANDS)} commands for {', '.join(FILES)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
