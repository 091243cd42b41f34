"""A file of rules, limits and budgets: TOML, checked as a whole. A mistake costs what it stands in, not the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Any, TypeVar, cast

from msgspec import Struct, field

from gputop.core.findings import Severity
from gputop.rules.check import ID, Reference
from gputop.rules.expression import Condition, condition
from gputop.rules.names import SECONDS, Source, Unit
from gputop.rules.parser import Mistake, Number, parse
from gputop.rules.toml_places import Places, TomlMistake, TomlPlace, parse_toml
from gputop.text.units import printable

MAX_BYTES = 1 << 18
MAX_ENTRIES = 200  # rules of a file, and budgets
T = TypeVar("T")
_MAX_CHARS = {"title": 200, "action": 1000, "snippet": 4000, "why": 1000}
_MAX_HOLD_S = 3600.0


class FileProblem(Struct, frozen=True):
    file: str
    place: TomlPlace
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.place.line}:{self.place.column}: {self.message}"


class RuleText(Struct, frozen=True):
    """One ``[[rule]]``. ``hold_s``: for how long its condition has to hold (live). ``asked``: where each finding
    stands that its condition asks for, by id."""

    id: str
    condition: Condition
    severity: Severity
    title: str
    why: str
    action: str
    snippet: str | None
    hold_s: float
    origin: str  # file:line
    asked: Mapping[str, TomlPlace]


class LimitText(Struct, frozen=True):
    """One line of ``[limits]``: a number, with its unit where it has one."""

    id: str
    value: float
    unit: Unit
    origin: str
    place: TomlPlace


class Budget(Struct, frozen=True):
    """One line of ``[budget]``: what has to hold of a trace."""

    id: str
    condition: Condition
    origin: str
    asked: Mapping[str, TomlPlace]


class RuleFile(Struct):
    """Rules of a file that can be used, and its problems."""

    name: str
    owner: int | None = None  # user id, where it is known
    rules: list[RuleText] = field(default_factory=list)
    limits: list[LimitText] = field(default_factory=list)
    budgets: list[Budget] = field(default_factory=list)
    problems: list[FileProblem] = field(default_factory=list)


def read_rules(text: str, name: str) -> RuleFile:
    """The content of a file called ``name``. Raises nothing: what is wrong stands in ``problems``."""
    file = RuleFile(name)
    try:
        document = parse_toml(text)
    except TomlMistake as mistake:
        file.problems.append(FileProblem(name, mistake.place, f"this is not TOML: {printable(mistake.message)}"))
        return file
    _Reader(file, Places(text)).read(document)
    file.problems.sort(key=lambda problem: problem.place)
    return file


def quantity(value: object) -> tuple[float, Unit]:
    """A number, or a text with a number and its unit ("30s", "5%"); raises :class:`Mistake`."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = repr(value)  # infinite or too large: the same mistake as in a text
    if isinstance(value, str):
        node = parse(value)
        if isinstance(node, Number):
            return node.value, node.unit
    raise Mistake('write a number with its unit here, as in "30s" or 0.4', 0)


class _Wrong(Exception):
    """A value that cannot be used: what is wrong, in which key, at which of its characters (None: the key itself)."""

    def __init__(self, message: str, key: str = "", pos: int | None = 0) -> None:
        super().__init__(message)
        self.message, self.key, self.pos = message, key, pos


class _Reader:
    def __init__(self, file: RuleFile, places: Places) -> None:
        self._file, self._places = file, places

    def read(self, document: Mapping[str, Any]) -> None:
        readers: dict[str, Callable[[Any], None]] = {"rule": self._rules, "limits": self._limits,
                                                     "budget": self._budgets}
        for key, value in document.items():
            if self._is_full:
                return
            if key not in readers:
                position = self._places.table(key) if isinstance(value, (dict, list)) else self._places.key("", 0, key)
                self._problem(position, f"{_quoted(key)} is not allowed here{_near(key, readers)}: gputop reads "
                                        "[[rule]], [limits] and [budget]")
            else:
                readers[key](value)

    @property
    def _is_full(self) -> bool:
        """Return whether so much is wrong that more of it is not reported."""
        return len(self._file.problems) >= MAX_ENTRIES

    def _problem(self, position: TomlPlace, message: str) -> None:
        if not self._is_full:
            self._file.problems.append(FileProblem(self._file.name, position, message))

    def _origin(self, position: TomlPlace) -> str:
        return f"{self._file.name}:{position.line}"

    # -- rules ------------------------------------------------------------------------------------

    def _rules(self, tables: Any) -> None:
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            self._problem(self._places.table("rule"), "write [[rule]] with double brackets")
            return
        if len(tables) > MAX_ENTRIES:
            self._problem(self._places.table("rule", MAX_ENTRIES), f"a file can have at most {MAX_ENTRIES} rules")
        for number, table in enumerate(tables[:MAX_ENTRIES]):
            if not self._is_full:
                self._rule(table, number)

    def _rule(self, table: Mapping[str, Any], number: int) -> None:
        """One rule, or all that is wrong with it."""
        places, wrong = self._places, list[_Wrong]()

        def read(of: Callable[..., T], *arguments: Any, **options: Any) -> T | None:
            try:
                return of(table, *arguments, **options)
            except _Wrong as flaw:
                wrong.append(flaw)
                return None

        wrong += [_Wrong(f"{_quoted(key)} is not allowed in a rule{_near(key, _RULE_KEYS)}", key, None)
                  for key in islice((key for key in table if key not in _RULE_KEYS), MAX_ENTRIES)]
        id_, source = read(_text, "id", ID), read(_one_of, "on", ("live", "trace"), None)
        when = read(_condition, "when", source) if source is not None else None
        hold_s = read(_hold, source) if source is not None and "for" in table else 0.0
        severity = read(_one_of, "severity", ("low", "medium", "high"), "medium")
        title, snippet = read(_text, "title"), read(_snippet)
        reason, action = read(_text, "why", default=""), read(_text, "action", default="")
        for flaw in wrong:
            self._problem(places.key("rule", number, flaw.key) if flaw.pos is None else
                          places.value("rule", number, flaw.key, table.get(flaw.key), flaw.pos), flaw.message)
        if not wrong:
            self._file.rules.append(RuleText(
                id_ or "", cast("Condition", when), cast("Severity", severity), printable(title or ""),
                printable(reason or ""), printable(action or ""), snippet, hold_s or 0.0,
                self._origin(places.table("rule", number)),
                self._asked(cast("Condition", when), "rule", number, "when", table["when"])))

    def _asked(self, condition: Condition, table: str, number: int, key: str, text: str) -> Mapping[str, TomlPlace]:
        return {meaning.finding: self._places.value(table, number, key, text, pos)
                for pos, meaning in condition.meanings.items() if isinstance(meaning, Reference) and meaning.finding}

    # -- limits and budgets -------------------------------------------------------------------------

    def _limits(self, table: Any) -> None:
        for key, value, position in self._entries("limits", table):
            try:
                number, unit = quantity(value)
            except Mistake as mistake:
                self._problem(position, mistake.message)
            else:
                self._file.limits.append(LimitText(key, number, unit, self._origin(position), position))

    def _budgets(self, table: Any) -> None:
        for key, value, position in self._entries("budget", table):
            if not ID.fullmatch(key):
                self._problem(position, "a budget's name can contain only a-z, 0-9 and _, such as step_time")
                continue
            try:
                condition = _condition({"budget": value}, "budget", "trace")
            except _Wrong as wrong:
                self._problem(self._places.value("budget", 0, key, value, wrong.pos or 0), wrong.message)
            else:
                self._file.budgets.append(Budget(key, condition, self._origin(position),
                                                 self._asked(condition, "budget", 0, key, value)))

    def _entries(self, name: str, table: Any) -> Iterator[tuple[str, Any, TomlPlace]]:
        """The keys of a table with their values; of tables inside, as dotted keys make them, joined by dots."""
        if not isinstance(table, dict):
            self._problem(self._places.table(name), f"[{name}] must contain lines of NAME = VALUE")
            return
        flat = list(_flat(table, name))
        if len(flat) > MAX_ENTRIES:
            self._problem(self._places.table(name), f"[{name}] can have at most {MAX_ENTRIES} lines")
        for path, value in flat[:MAX_ENTRIES]:
            key = path.removeprefix(f"{name}.")
            inner, _, last = path.rpartition(".")
            position = self._places.value(name, 0, key, value)
            if position == self._places.table(name):
                position = self._places.value(inner, 0, last, value)
            yield key, value, position


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and prefix.count(".") < 3:
            yield from _flat(value, f"{prefix}.{key}")
        else:
            yield f"{prefix}.{key}", value


_RULE_KEYS = ("id", "on", "when", "for", "severity", "title", "why", "action", "snippet")


def _text(table: Mapping[str, Any], key: str, pattern: re.Pattern[str] | None = None,
          default: str | None = None) -> str:
    value = table.get(key, default)
    if value is None:
        raise _Wrong(f"a rule needs {key} = …")
    if not isinstance(value, str) or (not value.strip() and default is None):
        raise _Wrong(f'{key} must be a string in quotes', key)
    if len(value) > _MAX_CHARS.get(key, 1 << 20):
        raise _Wrong(f"{key} can have at most {_MAX_CHARS[key]} characters", key)
    if pattern is not None and not pattern.fullmatch(value):
        raise _Wrong(f"{key} can contain only a-z, 0-9 and _, such as slow_input", key)
    return value


def _one_of(table: Mapping[str, Any], key: str, choices: tuple[str, ...], default: str | None) -> str:
    value = _text(table, key, default=default)
    if value not in choices:
        raise _Wrong(f"{key} must be one of {', '.join(choices)}", key)
    return value


def _condition(table: Mapping[str, Any], key: str, source: Source) -> Condition:
    try:
        return condition(_text(table, key), source)
    except Mistake as mistake:
        raise _Wrong(printable(mistake.message), key, mistake.pos) from None


def _hold(table: Mapping[str, Any], source: Source) -> float:
    if source != "live":
        raise _Wrong("for works only in live rules, with on = \"live\"", "for")
    try:
        seconds, unit = quantity(table["for"])
    except Mistake:
        seconds, unit = -1.0, SECONDS
    if unit not in (SECONDS, Unit()) or not 0 <= seconds <= _MAX_HOLD_S:
        raise _Wrong('for must be a time of up to 1h, as in "30s"', "for")
    return seconds


def _snippet(table: Mapping[str, Any]) -> str | None:
    """Snippet of a rule. Lines keep their indentation; all else that is not printable is replaced."""
    lines = _text(table, "snippet", default="").strip("\n").splitlines()
    return "\n".join(" " * (len(line.expandtabs(4)) - len(line.expandtabs(4).lstrip(" "))) + printable(line.strip())
                     for line in lines) or None


def _near(word: str, words: Collection[str]) -> str:
    near = get_close_matches(word, words, 1)
    return f" (did you mean {near[0]}?)" if near else ""


def _quoted(key: str) -> str:
    shown = printable(key)
    return f"“{shown if len(shown) <= 40 else shown[:39] + '…'}”"
