"""The user's additions to the registry, for the whole process. A module of its own, so that without additions the
monitor's first frame loads no table of rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gputop.advice.rule import Limit
    from gputop.rules.read_files import RulePath
    from gputop.rules.rule_file import Budget, RuleText


class UserRules:
    """Rules as text, limits in the place of gputop's, and budgets (:func:`gputop.advice.user_rules.install`). Set
    before anything is judged."""

    rules: tuple[RuleText, ...] = ()
    limits: Mapping[str, Limit] = {}
    budgets: tuple[Budget, ...] = ()
    paths: tuple[RulePath, ...] | None = None  # of the files all this was read from; None: nothing of the user's

    @classmethod
    def clear(cls) -> None:
        """Nothing of the user's."""
        cls.rules, cls.limits, cls.budgets, cls.paths = (), {}, (), None
