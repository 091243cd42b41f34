"""``gputop completion``: completion scripts of shells and the man page, made while the package is built (setup.py)."""

from __future__ import annotations

import argparse
from pathlib import Path

from gputop.core.errors import EXIT_OK, GputopError
from gputop.text import console

FILES = {"bash": "gputop.bash", "zsh": "_gputop", "fish": "gputop.fish", "man": "gputop.1"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=tuple(FILES), metavar="|".join(FILES),
                        help="the shell, or man for the man page (roff)")


def folder() -> Path:
    """Folder into which the build writes them."""
    return Path(__file__).parents[1] / "completion"


def run(args: argparse.Namespace) -> int:
    try:
        text = (folder() / FILES[args.what]).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise GputopError("The installation creates the completion scripts and the man page, but this copy is not "
                          "installed. In its folder: pip install .") from None
    console.write_text(text, end="")
    return EXIT_OK
