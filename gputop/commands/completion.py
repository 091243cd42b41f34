"""``gputop completion``: the completion scripts of shells and the man page, made by tools/make_completion.py."""

from __future__ import annotations

import argparse
from importlib.resources import files

from gputop.core.errors import EXIT_OK
from gputop.text import console

FILES = {"bash": "gputop.bash", "zsh": "_gputop", "fish": "gputop.fish", "man": "gputop.1"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=tuple(FILES), metavar="|".join(FILES),
                        help="the shell, or man for the man page (roff)")


def run(args: argparse.Namespace) -> int:
    text = (files("gputop") / "completion" / FILES[args.what]).read_text(encoding="utf-8")
    console.write_text(text, end="")
    return EXIT_OK
