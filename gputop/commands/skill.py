"""``gputop skill``: print SKILL.md, what an agent needs to know of gputop."""

from __future__ import annotations

import argparse
from pathlib import Path

from gputop.core.errors import EXIT_OK
from gputop.text import console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options."""


def run(args: argparse.Namespace) -> int:
    console.write_text((Path(__file__).parents[1] / "SKILL.md").read_text(encoding="utf-8"), end="")
    return EXIT_OK
