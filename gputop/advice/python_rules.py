"""Rules in Python from installed packages, by the entry points ``gputop.rules``.

An entry point names a :class:`~gputop.advice.rule.PythonRule`, several in a list, or a function without arguments that
returns either. It is code: only packages in the interpreter's own folders of packages are asked, never the folder
gputop was started in. One that fails is said and costs the others nothing.
"""

from __future__ import annotations

import contextlib
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gputop.advice.own_registry import Own
from gputop.advice.registry import FINDING_IDS
from gputop.advice.rule import Origin, PythonRule, Rule
from gputop.core.findings import Abstained, Finding
from gputop.text.units import printable

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "gputop.rules"
_MESSAGE_CHARS = 300


def python_rules(origin: Origin) -> tuple[PythonRule, ...]:
    """The user's rules in Python, imported when they are asked for first."""
    if Own.python_rules is None:
        Own.python_rules, Own.not_loaded = _load()
    return tuple(rule for rule in Own.python_rules if rule.origin == origin)


def _load() -> tuple[tuple[PythonRule, ...], tuple[Abstained, ...]]:
    """The rules that packages bring, and an abstention for each entry point that cannot be used."""
    rules: dict[str, PythonRule] = {}
    failed: list[Abstained] = []
    for point in _entry_points():
        try:
            loaded = _rules_of(point)
        except Exception as error:  # noqa: BLE001  somebody else's code
            failed.append(Abstained(printable(point.name)[:64], f"the rules of {_package(point)}: {_failure(error)}"))
            continue
        for rule in loaded:
            if rule.id in rules or rule.id in FINDING_IDS:
                failed.append(Abstained(rule.id, f"another id for the rule of {_package(point)}: this one is taken"))
            else:
                rules[rule.id] = replace(rule, package=_package(point))
    return tuple(rules.values()), tuple(failed)


def _entry_points() -> Iterable[EntryPoint]:
    """Those of the group. importlib.metadata takes 1.4 MB of the monitor: it is asked where a package names it."""
    if not any(GROUP.encode() in text for folder in sys.path for text in _declared(folder)):
        return ()
    from importlib.metadata import entry_points

    return entry_points(group=GROUP)


def _declared(folder: str) -> Iterable[bytes]:
    """What the packages of a folder of sys.path say of their entry points."""
    with contextlib.suppress(OSError):  # an archive, or nothing there
        for package in Path(folder or os.curdir).iterdir():
            if package.name.lower().endswith("-info"):
                with contextlib.suppress(OSError):
                    yield (package / "entry_points.txt").read_bytes()


def guarded(rule: Rule, judge: Callable[[], Finding | Abstained | None]) -> Finding | Abstained | None:
    """What a rule says. One in Python may fail, or return what is no finding: it abstains then."""
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
    place = os.path.realpath(str(point.dist.locate_file(""))) if point.dist is not None else ""
    if place not in _package_folders():
        raise ImportError(f"it is no installed package: {printable(place)}")
    loaded = point.load()
    if callable(loaded):
        loaded = loaded()
    found = [loaded] if isinstance(loaded, PythonRule) else list(loaded)
    if not all(isinstance(rule, PythonRule) for rule in found):
        raise TypeError("it is no gputop.advice.rule.PythonRule")
    return found


def _package_folders() -> set[str]:
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return {os.path.realpath(folder) for folder in folders}


def _package(point: EntryPoint) -> str:
    return printable(point.dist.name if point.dist is not None else point.value)


def _failure(error: Exception) -> str:
    return printable(f"it failed with {type(error).__name__}: {error}")[:_MESSAGE_CHARS]
