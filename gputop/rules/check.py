"""Checks that the parts of an expression fit: every name is known, and only figures of one unit are added and
compared."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from msgspec import Struct

from gputop.rules.names import (
    AGGREGATES,
    EXAMPLE,
    MAX_WINDOW_S,
    MIN_WINDOW_S,
    NAMES,
    NONE,
    PARTS_OF,
    SECONDS,
    TABLES,
    NamedRows,
    Quantity,
    Source,
    Unit,
)
from gputop.rules.parser import COMPARISONS, Binary, Mistake, Name, Node, Number, Segment, Text, Truth, Unary

_OVER_GPUS = (*AGGREGATES, "sum", "count", "any", "all")
_OF_CONDITIONS = ("count", "any", "all")
_PLAIN = {"min": 2, "max": 2, "abs": 1}
ID = re.compile(r"[a-z][a-z0-9_]{0,63}")


class Reference(Struct, frozen=True):
    """Meaning of a name: a quantity, now or over ``window_s``; or a ``field`` of the rows that ``pattern`` chooses."""

    text: str
    quantity: Quantity
    aggregate: str = ""
    window_s: float = 0.0
    table: NamedRows | None = None
    pattern: str = ""
    finding: str = ""


class FunctionCall(Struct, frozen=True):
    """A function: min, max, abs, or one over the GPUs, whose result is a figure of its own."""

    function: str
    arguments: tuple[Node, ...]
    text: str = ""
    over_gpus: Quantity | None = None


class ResultKind(Struct, frozen=True):
    """Result of a part: a figure of a unit, or a condition (``unit`` None); ``zero``: 0, which is of any unit;
    ``share``: a ratio of at most 1."""

    unit: Unit | None
    zero: bool = False
    share: bool = False

    def __str__(self) -> str:
        return "a condition" if self.unit is None else "a number without a unit" if self.unit == NONE else (
            f"a value in {self.unit}")


_CONDITION = ResultKind(None)
Meaning = Reference | FunctionCall


class Checker:
    """Checks one tree; ``meanings`` has what each of its names means, by where it stands."""

    def __init__(self, source: str, where: Source) -> None:
        self.meanings: dict[int, Meaning] = {}
        self.per_gpu = False
        self._source, self._where = source, where
        self._over_gpus = False

    def kind(self, node: Node) -> ResultKind:
        """Raises :class:`Mistake`."""
        if isinstance(node, Number):
            return ResultKind(node.unit, node.value == 0 and node.unit == NONE)
        if isinstance(node, Truth):
            return _CONDITION
        if isinstance(node, Text):
            raise Mistake('a string is allowed only in layer("…"), kernel("…"), op("…") and finding("…")', node.pos)
        if isinstance(node, Unary):
            kind = self.kind(node.operand)
            if (kind.unit is None) != (node.operator == "not"):
                raise Mistake(f"{node.operator} needs a {'condition' if node.operator == 'not' else 'value'}, not "
                              f"{kind}", node.pos)
            return kind
        return self._binary(node) if isinstance(node, Binary) else self._named(node)

    def _binary(self, node: Binary) -> ResultKind:
        left, right, what = self.kind(node.left), self.kind(node.right), node.operator
        if what in ("and", "or"):
            for side, kind in ((node.left, left), (node.right, right)):
                if kind.unit is not None:
                    raise Mistake(f"{what} joins conditions, but this is {kind}; add a comparison such as … > "
                                  "0", side.pos)
            return _CONDITION
        if left.unit is None or right.unit is None:
            twice = what in COMPARISONS and any(isinstance(n, Binary) and n.operator in COMPARISONS
                                                for n in (node.left, node.right))
            raise Mistake("write a < b and b < c" if twice else f"{what} needs values, not conditions", node.pos)
        if what == "*":
            return ResultKind(self._unit(left.unit.times(right.unit), node.pos))
        if what == "/":
            unit = self._unit(left.unit.over(right.unit), node.pos)
            return ResultKind(unit, share=self._is_part(node.left, node.right))
        if left.unit != right.unit and not left.zero and not right.zero:
            raise Mistake(f"{left} and {right} cannot be {'compared' if what in COMPARISONS else 'added'}"
                          f"{_hint(left.unit, right.unit, node)}", node.pos)
        if what not in COMPARISONS:
            return ResultKind(right.unit if left.zero else left.unit)
        for kind, other in ((left, node.right), (right, node.left)):
            if kind.share and isinstance(other, Number) and other.value > 1:
                raise self._no_share(node.left if kind is left else node.right, other)
        return _CONDITION

    def _no_share(self, figure: Node, number: Number) -> Mistake:
        """Mistake in a comparison that holds always or never."""
        what = self._text(figure) if isinstance(figure, Name) else "this figure"
        percent = re.match(r"[^\s%]*\s?%", self._source[number.pos:]) is not None
        instead = f": write {number.value:g}%" if not percent and number.value <= 100 else ""
        return Mistake(f"{what} is a share of at most 100%{instead}", number.pos)

    def _is_part(self, above: Node, below: Node) -> bool:
        """Return whether one is a part of the other, so that their quotient is a share."""
        names = [meaning.quantity.name for node in (above, below) if isinstance(meaning := self.meanings.get(
            node.pos) if isinstance(node, Name) else None, Reference)]
        return len(names) == 2 and names[0] in PARTS_OF.get(names[1], ())

    def _unit(self, unit: Unit, pos: int) -> Unit:
        if max(map(abs, unit)) > 4:
            raise Mistake(f"no value has the unit {unit}", pos)
        return unit

    # -- names ------------------------------------------------------------------------------------

    def _named(self, node: Name) -> ResultKind:
        first = node.segments[0]
        if first.arguments is not None:
            if first.name in _PLAIN:
                return self._function(node, first)
            return self._of_rows(node, first)
        if first.name == "gpus" and len(node.segments) > 1:
            return self._of_gpus(node)
        return self._quantity(node)

    def _function(self, node: Name, call: Segment) -> ResultKind:
        arguments = call.arguments or ()
        if len(node.segments) > 1:
            raise Mistake(f"{call.name}(…) has no field {node.segments[1].name}", node.segments[1].pos)
        if len(arguments) != _PLAIN[call.name]:
            instead = f"; over a time window: name.{call.name}(30s)" if call.name in AGGREGATES else ""
            raise Mistake(f"{call.name} needs {_PLAIN[call.name]} value{'s' * (_PLAIN[call.name] > 1)}, not "
                          f"{len(arguments)}{instead}", call.pos)
        kinds = [self.kind(argument) for argument in arguments]
        units = {kind.unit for kind in kinds if not kind.zero}
        if None in units or len(units) > 1:
            raise Mistake(f"{call.name} needs values with the same unit, not {' and '.join(map(str, kinds))}", call.pos)
        self.meanings[node.pos] = FunctionCall(call.name, arguments)
        return ResultKind(units.pop(), share=all(kind.share for kind in kinds)) if units else kinds[0]

    def _of_gpus(self, node: Name) -> ResultKind:
        call = node.segments[1]
        if call.name not in _OVER_GPUS or call.arguments is None or len(node.segments) > 2:
            raise Mistake(f"there is no gpus.{call.name}: gpus." + ", gpus.".join(_OVER_GPUS), call.pos)
        if len(call.arguments) != 1:
            raise Mistake(f"gpus.{call.name} needs one value or condition", call.pos)
        if self._over_gpus:
            raise Mistake("gpus.… cannot be inside gpus.…", node.pos)
        self._over_gpus = True
        kind = self.kind(call.arguments[0])
        self._over_gpus = False
        if (kind.unit is None) != (call.name in _OF_CONDITIONS):
            raise Mistake(f"gpus.{call.name} needs a {'condition' if kind.unit is not None else 'value'}, not "
                          f"{kind}", call.pos)
        self.meanings[node.pos] = FunctionCall(call.name, call.arguments, self._text(node), Quantity(
            "", kind.unit or NONE, "", ratio=call.name != "count" and self._is_ratio(call.arguments[0])))
        if call.name in ("count", "sum"):
            return ResultKind(kind.unit or NONE)
        return _CONDITION if kind.unit is None else kind

    def _is_ratio(self, node: Node) -> bool:
        meaning = self.meanings.get(node.pos) if isinstance(node, Name) else None
        return isinstance(meaning, Reference) and meaning.quantity.ratio

    def _of_rows(self, node: Name, first: Segment) -> ResultKind:
        tables: Mapping[str, NamedRows] = TABLES if self._where == "trace" else {}
        if first.name not in tables and first.name != "finding":
            raise self._unknown(f"{first.name}(…)", [*tables, "finding", *_PLAIN], first.pos)
        argument = first.arguments[0] if first.arguments and len(first.arguments) == 1 else None
        if not isinstance(argument, Text) or not 0 < len(argument.text) <= 200:
            raise Mistake(f'{first.name} needs one string in quotes: {first.name}("…")', first.pos)
        if first.name == "finding":
            return self._finding(node, argument)
        table = tables[first.name]
        chosen = node.segments[1] if len(node.segments) == 2 else None
        if chosen is None or chosen.name not in table.fields or chosen.arguments is not None:
            raise Mistake(f'{table.name}("…") has {", ".join(f".{name}" for name in table.fields)}',
                          chosen.pos if chosen is not None else node.pos)
        quantity = table.fields[chosen.name]
        self.meanings[node.pos] = Reference(self._text(node), quantity, table=table, pattern=argument.text)
        return ResultKind(quantity.unit, share=quantity.ratio)

    def _finding(self, node: Name, argument: Text) -> ResultKind:
        if len(node.segments) > 1 or not ID.fullmatch(argument.text):
            raise Mistake('finding needs the ID of a rule: finding("input_bound")', argument.pos)
        self.meanings[node.pos] = Reference(self._text(node), Quantity("finding", NONE, ""), finding=argument.text)
        return _CONDITION

    def _quantity(self, node: Name) -> ResultKind:
        """A name, or its past: ``sm_active``, ``host.cpu_ratio.mean(30s)``."""
        quantities, segments = NAMES[self._where], node.segments
        last = segments[-1]
        name = ".".join(segment.name for segment in (segments if last.arguments is None else segments[:-1]))
        if any(segment.arguments is not None for segment in segments[:-1]) or name not in quantities:
            raise self._unknown(name, quantities, node.pos)
        quantity = quantities[name]
        self.per_gpu |= quantity.per_gpu and not self._over_gpus
        window_s = 0.0
        if last.arguments is not None:
            window_s = self._window(quantity, last)
        self.meanings[node.pos] = Reference(self._text(node), quantity, last.name if window_s else "", window_s)
        return ResultKind(quantity.unit, share=quantity.ratio)

    def _window(self, quantity: Quantity, call: Segment) -> float:
        if call.name not in AGGREGATES:
            meant = ": write .mean" if call.name in ("avg", "average") else ""
            raise Mistake(f"a name can be followed by {', '.join(f'.{name}(30s)' for name in AGGREGATES)}, not "
                          f".{call.name}{meant}", call.pos)
        if not quantity.past:
            no_past = "a trace has no history" if self._where == "trace" else (f"{quantity.name} has no history")
            raise Mistake(f"{no_past}: write just {quantity.name}", call.pos)
        seconds = call.arguments[0] if call.arguments and len(call.arguments) == 1 else None
        if not isinstance(seconds, Number) or seconds.unit != SECONDS:
            raise Mistake(f"{call.name} needs a time, as in {quantity.name}.{call.name}(30s)", call.pos)
        if not MIN_WINDOW_S <= seconds.value <= MAX_WINDOW_S:
            raise Mistake(f"a time must be from {MIN_WINDOW_S:g}s to {MAX_WINDOW_S / 3600:g}h", seconds.pos)
        return seconds.value

    def _unknown(self, name: str, names: Iterable[str], pos: int) -> Mistake:
        near = get_close_matches(name, list(names), 1, 0.5)
        other: Source = "trace" if self._where == "live" else "live"
        if name in NAMES[other] or name.removesuffix("(…)") in (TABLES if other == "trace" else ()):
            return Mistake(f"{name} works only in rules with on = \"{other}\"", pos)
        hint = f"did you mean {near[0]}?" if near else "for a list: gputop rules names"
        return Mistake(f"the name {name} does not exist: {hint}", pos)

    def _text(self, node: Name) -> str:
        return self._source[node.pos:node.end]


def _hint(left: Unit, right: Unit, node: Binary) -> str:
    """Hint how the number would be written, where one side is one without a unit."""
    for unit, other in ((left, node.right), (right, node.left)):
        if isinstance(other, Number) and other.unit == NONE and unit in EXAMPLE:
            return f": add a unit, as in {EXAMPLE[unit]}"
    return ""
