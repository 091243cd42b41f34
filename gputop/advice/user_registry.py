"""The user's additions to the registry, for the whole process. A module of its own, so that without additions the
monitor's first frame loads no table of rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gputop.advice.rule import Limit, PythonRule
    from gputop.core.findings import Abstained
    from gputop.rules.files import RulePath
    from gputop.rules.rule_file import Budget, RuleText


class UserRules:
    """Rules as text, limits in the place of gputop's, budgets (:func:`gputop.advice.user_rules.install`), and rules
    in Python. Set before anything is judged."""

    rules: tuple[RuleText, ...] = ()
    limits: Mapping[str, Limit] = {}
    budgets: tuple[Budget, ...] = ()
    python_rules: tuple[PythonRule, ...] | None = ()  # None: not loaded yet
    python_limits: Mapping[str, Limit] = {}  # the limits of the rules in Python
    not_loaded: tuple[Abstained, ...] = ()  # entry points that cannot be used
    paths: tuple[RulePath, ...] | None = None  # of the files all this was read from; None: nothing of the user's

    @classmethod
    def clear(cls) -> None:
        """Nothing of the user's."""
        cls.rules, cls.limits, cls.budgets, cls.paths = (), {}, (), None
        cls.python_rules, cls.python_limits, cls.not_loaded = (), {}, ()
