"""Rules in Python from installed packages, by the entry points ``gputop.rules``.

An entry point names a :class:`~gputop.advice.rule.PythonRule`, several in a list, or a function without arguments that
returns either. It is code: only packages in the interpreter's own folders of packages are asked, never the folder
gputop was started in. One that fails is said and costs the others nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs
from msgspec.structs import replace

from gputop.advice.registry import FINDING_IDS, LIMITS
from gputop.advice.rule import Origin, PythonRule, Rule
from gputop.advice.user_registry import UserRules
from gputop.core.files import read_regular
from gputop.core.findings import Abstained, Finding
from gputop.text.units import printable

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "gputop.rules"
_MESSAGE_CHARS = 300
_MAX_DECLARED_BYTES = 1 << 20
_ID = re.compile(r"[a-z][a-z0-9_]{0,63}")


def python_rules(origin: Origin) -> tuple[PythonRule, ...]:
    """The user's rules in Python, imported when they are asked for first."""
    if UserRules.python_rules is None:
        UserRules.python_rules, UserRules.not_loaded = _load()
        UserRules.python_limits = {limit.id: limit for rule in UserRules.python_rules for limit in rule.limits}
    return tuple(rule for rule in UserRules.python_rules if rule.origin == origin)


def _load() -> tuple[tuple[PythonRule, ...], tuple[Abstained, ...]]:
    """The rules that packages bring, and an abstention for each entry point that cannot be used."""
    rules: dict[str, PythonRule] = {}
    failed: list[Abstained] = []
    for point in _entry_points():
        name = f"{_package(point)}:{printable(point.name)}"[:64]  # never an id, which may be that of a rule of gputop's
        try:
            loaded = [(rule, _unusable(rule, rules)) for rule in _rules_of(point)]
        except Exception as error:  # noqa: BLE001  somebody else's code
            failed.append(Abstained(name, f"the rules of {_package(point)}: {_failure(error)}"))
            continue
        for rule, flaw in loaded:
            if flaw is None and rule.id not in rules:
                rules[rule.id] = structs.replace(rule, package=_package(point))
            else:
                failed.append(Abstained(name, flaw or f"another id for its second rule {rule.id}"))
    return tuple(rules.values()), tuple(failed)


def _unusable(rule: PythonRule, loaded: Container[str]) -> str | None:
    """Requirement that a rule does not meet; None where it can be used."""
    shown = printable(str(rule.id))[:64]
    if _ID.fullmatch(rule.id) is None:
        return f"an id of a-z, 0-9 and _ for its rule {shown}"
    if rule.id in loaded or not FINDING_IDS.isdisjoint(rule.ids):
        return f"another id for its rule {shown}, which is taken"
    if rule.origin not in ("trace", "live"):
        return f'origin "trace" or "live" in its rule {shown}, not {printable(str(rule.origin))[:64]}'
    for rule_limit in rule.limits:
        if not rule_limit.id.startswith(f"{rule.id}.") or rule_limit.id in LIMITS:
            return f"limits whose ids begin with {shown}. in its rule {shown}, not {printable(rule_limit.id)[:64]}"
    return None


def _entry_points() -> Iterable[EntryPoint]:
    """Entry points of the group. importlib.metadata takes 1.4 MB of the monitor: it is asked where a package names
    it."""
    if not any(GROUP.encode() in text for folder in sys.path for text in _declared(folder)):
        return ()
    from importlib.metadata import entry_points

    return entry_points(group=GROUP)


def _declared(folder: str) -> Iterable[bytes]:
    """Entry points that the packages of a folder of sys.path declare."""
    with contextlib.suppress(OSError):  # an archive, or nothing there
        for package in Path(folder or os.curdir).iterdir():
            if package.name.lower().endswith("-info"):
                with contextlib.suppress(OSError):
                    yield read_regular(package / "entry_points.txt", _MAX_DECLARED_BYTES)


def guarded(rule: Rule, judge: Callable[[], Finding | Abstained | None]) -> Finding | Abstained | None:
    """Call a rule. One in Python may fail, or return what is no finding: it abstains then."""
    if not isinstance(rule, PythonRule):
        return judge()
    try:
        outcome = judge()
        if isinstance(outcome, Finding):
            from gputop.core.codec import convert, to_document  # 2 MB, which most monitors do without

            return replace(convert(to_document(outcome), Finding), yours=rule.package)
        return outcome
    except Exception as error:  # noqa: BLE001  somebody else's code
        return Abstained(rule.id, f"the rule of {rule.package} to work: {_failure(error)}")


def _rules_of(point: EntryPoint) -> Sequence[PythonRule]:
    folder = os.path.realpath(str(point.dist.locate_file(""))) if point.dist is not None else ""
    if folder not in _package_folders():
        raise ImportError(f"it is no installed package: {printable(folder)}")
    loaded = point.load()
    if callable(loaded):
        loaded = loaded()
    rules = [loaded] if isinstance(loaded, PythonRule) else list(loaded)
    if not all(isinstance(rule, PythonRule) for rule in rules):
        raise TypeError("it is no gputop.advice.rule.PythonRule")
    return rules


def _package_folders() -> set[str]:
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return {os.path.realpath(folder) for folder in folders}


def _package(point: EntryPoint) -> str:
    return printable(point.dist.name if point.dist is not None else point.value)


def _failure(error: Exception) -> str:
    return printable(f"it failed with {type(error).__name__}: {error}")[:_MESSAGE_CHARS]
