"""The user's own rules, as the command line and the places of their files say."""

from __future__ import annotations

import argparse

from gputop.commands.settings import Config
from gputop.core.errors import EXIT_USAGE, GputopError

# Those that judge nothing: they need no rules.
_WITHOUT = {"agent", "attach", "cluster", "completion", "config", "doctor", "record", "schema", "xprof"}


def use_user_rules(args: argparse.Namespace, config: Config) -> list[str]:
    """Have the command judge by them; returns what is wrong in files that it finds by itself.

    Raises GputopError (wrong usage) for what is wrong in a file that --rules names, and with --fail-on in any.
    """
    if args.command in _WITHOUT:
        return []
    from gputop.advice.user_registry import UserRules, use
    from gputop.rules.read_files import rule_paths

    paths = rule_paths(config.path, args.rules)
    use(UserRules(paths=paths))
    if not paths:
        return []
    from gputop.diagnosis.rules_in_process import use_rules

    problems = use_rules(paths)
    named = [text for text in problems if text.startswith(tuple(f"{path}{end}" for path in args.rules for end in ": "))]
    if getattr(args, "fail_on", None):  # a gate that lacks a rule or a budget would pass for want of it
        named = problems
    if named:
        raise GputopError(named[0], "\n  ".join(named[1:]), EXIT_USAGE)
    # "rules check" and "rules test" say so themselves, of the files that they are given.
    return [] if args.command == "rules" and args.action in ("check", "test") else problems
