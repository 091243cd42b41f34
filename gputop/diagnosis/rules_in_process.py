"""The user's own rules taken into this process, and into those that analyze for it."""

from __future__ import annotations

from collections.abc import Sequence

from gputop.advice.user_rules import install
from gputop.rules.read_files import RulePath, load_rules


def use_rules(paths: Sequence[RulePath]) -> list[str]:
    """Judge by the rules, limits and budgets of these files from now on; returns what is wrong with the files,
    ``FILE:LINE:COLUMN: what`` each."""
    files, unread = load_rules(paths)
    return [*unread, *map(str, install(files, tuple(paths)))]
