"""``gputop config``: where the settings are, and all of them."""

from __future__ import annotations

import argparse

from gputop.commands.settings import Config, document
from gputop.core.errors import EXIT_OK, GputopError
from gputop.text import console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--path", action="store_true", help="print only the path of the file")


def run(args: argparse.Namespace) -> int:
    config: Config = args.config
    if args.path:
        if config.path is None:
            raise GputopError("a user without a home folder has no file of settings", "Set HOME or XDG_CONFIG_HOME.")
        console.write_text(str(config.path))
    else:
        console.write_text(document(config), end="")
    return EXIT_OK
