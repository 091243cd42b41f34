"""``gputop config``: where the settings are, and all of them."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

from gputop.commands.settings import Config, document, save_all
from gputop.core.errors import EXIT_OK, GputopError
from gputop.text import console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", action="store_true",
                        help="add missing settings to the config file as comments; existing settings stay")
    parser.add_argument("--path", action="store_true", help="print only the path of the config file")


def _is_output(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no file yet, or no standard output
        return os.path.samestat(os.fstat(sys.stdout.fileno()), path.stat())
    return False


def run(args: argparse.Namespace) -> int:
    config: Config = args.config
    if (args.path or args.write) and config.path is None:
        raise GputopError("a user without a home folder has no config file", "Set HOME or XDG_CONFIG_HOME.")
    if args.write and (problem := save_all(config)):
        raise GputopError(problem)
    if args.path or args.write:
        console.write_text(str(config.path))
    elif config.path is not None and _is_output(config.path):
        raise GputopError(f"the output goes to {config.path}, which the shell emptied before gputop started",
                          "gputop config --write keeps existing settings.")
    else:
        console.write_text(document(config), end="")
    return EXIT_OK
