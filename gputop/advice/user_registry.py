"""The user's additions to the registry, for the whole process. A module of its own, so that without additions the
monitor's first frame loads no table of rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec import Struct, field

if TYPE_CHECKING:
    from gputop.advice.rule import Limit
    from gputop.rules.read_files import RulePath
    from gputop.rules.rule_file import Budget, RuleText


class UserRules(Struct, frozen=True):
    """Rules as text, limits in the place of gputop's, and budgets, as :func:`gputop.advice.user_rules.install` makes
    them; without arguments nothing of the user's."""

    rules: tuple[RuleText, ...] = ()
    limits: Mapping[str, Limit] = field(default_factory=dict)
    budgets: tuple[Budget, ...] = ()
    paths: tuple[RulePath, ...] | None = None  # of the files all this was read from; None: nothing of the user's


_in_use = UserRules()


def user_rules() -> UserRules:
    """Return what this process judges by."""
    return _in_use


def use(rules: UserRules) -> None:
    """Judge by these from now on, and by nothing of those before."""
    global _in_use
    _in_use = rules
