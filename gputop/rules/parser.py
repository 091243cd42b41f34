"""Parser of expressions: Python's own, of which a few kinds of nodes are let in.

A unit is no Python, and a text could hold any character: both are put away first, each for a name or a number of the
same length, so that Python sees words of ASCII alone and places stay. Its tree is read and never evaluated.
"""

from __future__ import annotations

import ast
import keyword
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from gputop.rules.names import LITERALS, NONE, Unit

MAX_CHARS = 2000
_MAX_WORDS = 400  # also bounds the depth of a tree, and with it the recursion of who walks it
_MAX_NESTING = 40
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
_UNIT = "|".join(re.escape(unit) for unit in sorted(LITERALS, key=len, reverse=True))
_WORD = re.compile(rf"""
    (?P<space>\s+)
  | (?P<number>(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?)(?:[ ]?(?P<unit>{_UNIT})(?![A-Za-z0-9_µ°%]))?
  | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
  | "(?P<text>[^"\n]*)" | '(?P<single>[^'\n]*)'
  | (?P<operator><=|>=|==|!=|[-+*/<>().,])
""", re.VERBOSE | re.ASCII)
_ATTACHED = re.compile(r"[\w°%]{1,12}")
_INSTEAD = {"=": "==", "&": "and", "|": "or", "!": "not", "^": "a product", "{": "(…)",
            "[": "for GPU 0, write gpu.index == 0 and …"}
_BESIDE = re.compile(r"(?:\b(?!(?:and|or|not)\b)\w+ +|\) *)(?!(?:and|or)\b)\w", re.ASCII)
_OPERATORS: Mapping[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.Eq: "==", ast.NotEq: "!=", ast.And: "and", ast.Or: "or", ast.Not: "not", ast.USub: "-"}


class Mistake(ValueError):
    """Mistake in an expression, and the character at which it is."""

    def __init__(self, message: str, pos: int) -> None:
        super().__init__(message)
        self.message, self.pos = message, pos


class Number(Struct, frozen=True):
    """``value`` is in base units."""

    pos: int
    value: float
    unit: Unit = NONE


class Text(Struct, frozen=True):
    pos: int
    text: str


class Truth(Struct, frozen=True):
    pos: int
    value: bool


class Segment(Struct, frozen=True):
    """One part of a dotted name; ``arguments`` is None where no parentheses follow it."""

    pos: int
    name: str
    arguments: tuple[Node, ...] | None


class Name(Struct, frozen=True):
    """A dotted name: ``sm_active.mean(30s)``, ``layer("decoder/*").time``, ``max(a, b)``."""

    pos: int
    end: int
    segments: tuple[Segment, ...]


class Unary(Struct, frozen=True):
    """``operator`` is "not" or "-"."""

    pos: int
    operator: str
    operand: Node


class Binary(Struct, frozen=True):
    pos: int
    operator: str
    left: Node
    right: Node


Node = Number | Text | Truth | Name | Unary | Binary


def parse(source: str) -> Node:
    """The tree of an expression; raises :class:`Mistake`."""
    if len(source) > MAX_CHARS:
        raise Mistake(f"an expression can have at most {MAX_CHARS} characters", MAX_CHARS)
    return _Tree(source).parse()


def walk(node: Node) -> Iterator[Node]:
    """A tree's nodes, those inside parentheses of names among them."""
    yield node
    parts: tuple[Node, ...] = ()
    if isinstance(node, Binary):
        parts = (node.left, node.right)
    elif isinstance(node, Unary):
        parts = (node.operand,)
    elif isinstance(node, Name):
        parts = tuple(part for segment in node.segments for part in segment.arguments or ())
    for part in parts:
        yield from walk(part)


def _as_python(source: str, values: dict[int, Number | Text]) -> str:
    """The expression with its numbers and texts put away into ``values``, by their places. Raises :class:`Mistake`."""
    out, words = "", 0
    while len(out) < len(source):
        pos = len(out)
        match = _WORD.match(source, pos)
        if match is None:
            raise _unknown(source, pos)
        text, length = match[0], len(match[0])
        words += match["space"] is None
        if words > _MAX_WORDS:
            raise Mistake(f"an expression can have at most {_MAX_WORDS} words: split it into two rules", pos)
        if match["space"] is not None:
            text = " " * length
        elif match["number"] is not None:
            values[pos], text = _number(source, match), "0".ljust(length)
        elif match["text"] is not None or match["single"] is not None:
            values[pos], text = Text(pos, text[1:-1]), f" {'_' * (length - 1)}"
        elif keyword.iskeyword(text) and text not in ("and", "or", "not"):
            raise Mistake(f"the name {text} does not exist", pos)
        out += text
    return out


class _Tree:
    """Python's tree as ours: of its kinds of nodes the few that the language has."""

    def __init__(self, source: str) -> None:
        self._values: dict[int, Number | Text] = {}
        self._source = source
        self._python = f"({_as_python(source, self._values)})"  # in parentheses a line may end

    def parse(self) -> Node:
        depth = 0
        for pos, char in enumerate(self._python[1:-1]):
            depth += (char == "(") - (char == ")")
            if depth < 0:
                raise self._misplaced(pos)
        if depth:
            raise Mistake("the expression ended where a closing parenthesis was expected", len(self._python) - 2)
        try:
            tree = ast.parse(self._python, mode="eval").body
        except SyntaxError as error:  # two values side by side it tells at the first of them
            beside = _BESIDE.search(self._python)
            raise self._misplaced((beside.end() if beside is not None else error.offset or 1) - 2) from None
        except (ValueError, RecursionError, MemoryError):
            raise Mistake("this is not an expression", 0) from None
        return self._node(tree, 0)

    def _misplaced(self, pos: int) -> Mistake:
        rest = self._python[max(pos, 0) + 1:-1].lstrip()
        pos = len(self._python) - 2 - len(rest)
        if not rest:
            return Mistake("the expression ends where a name or a number was expected", pos)
        word = re.match(r"\w+|.", self._source[pos:])[0]  # type: ignore[index]
        instead = f": write {word.lower()}" if word.lower() in ("and", "or", "not") and not word.islower() else ""
        return Mistake(f"“{word}” is not allowed here{instead}", pos)

    def _node(self, python: ast.expr, depth: int) -> Node:
        pos = python.col_offset - 1
        if depth > _MAX_NESTING:
            raise Mistake(f"an expression can be nested at most {_MAX_NESTING} levels deep", pos)
        if isinstance(python, ast.BoolOp):
            return self._chain(python.values, [python.op] * len(python.values), depth)
        if isinstance(python, ast.Compare):
            return self._chain([python.left, *python.comparators], python.ops, depth)
        if isinstance(python, ast.BinOp):
            return self._chain([python.left, python.right], [python.op], depth)
        if isinstance(python, ast.UnaryOp) and type(python.op) in _OPERATORS:
            return Unary(pos, _OPERATORS[type(python.op)], self._node(python.operand, depth + 1))
        if isinstance(python, ast.Name) and python.id in ("true", "false"):
            return Truth(pos, python.id == "true")
        # A text is a name of underscores behind a space.
        value = self._values.get(pos if isinstance(python, ast.Constant) else pos - 1)
        if isinstance(python, ast.Constant | ast.Name) and value is not None:
            return value
        return Name(pos, (python.end_col_offset or 0) - 1, self._segments(python, depth + 1))

    def _chain(self, parts: Sequence[ast.expr], operators: Sequence[ast.AST], depth: int) -> Node:
        left = self._node(parts[0], depth + (not isinstance(parts[0], ast.BinOp)))  # sums go to the left, at any length
        for before, part, operator in zip(parts, parts[1:], operators, strict=False):
            end = before.end_col_offset or 0
            pos = end - 1 + len(self._python[end:]) - len(self._python[end:].lstrip(" )"))
            if type(operator) not in _OPERATORS:
                raise self._misplaced(pos)
            left = Binary(pos, _OPERATORS[type(operator)], left, self._node(part, depth + 1))
        return left

    def _segments(self, python: ast.expr, depth: int) -> tuple[Segment, ...]:
        end = (python.end_col_offset or 0) - 1
        if depth > _MAX_NESTING:
            raise Mistake(f"an expression can be nested at most {_MAX_NESTING} levels deep", end)
        if isinstance(python, ast.Call) and not python.keywords:
            *before, last = self._segments(python.func, depth)
            if last.arguments is None:
                arguments = tuple(self._node(argument, depth) for argument in python.args)
                return (*before, Segment(last.pos, last.name, arguments))
        elif isinstance(python, ast.Attribute):
            return (*self._segments(python.value, depth + 1), Segment(end - len(python.attr), python.attr, None))
        elif isinstance(python, ast.Name):
            return (Segment(python.col_offset - 1, python.id, None),)
        raise self._misplaced(python.col_offset - 1)


def _number(source: str, match: re.Match[str]) -> Number:
    attached = _ATTACHED.match(source, match.end())
    if attached is not None:
        units = ", ".join(literal for literal in LITERALS if "/" not in literal)
        raise Mistake(f"the unit {attached[0]} does not exist: {units}", match.end())
    unit, factor = LITERALS[match["unit"]] if match["unit"] else (NONE, 1.0)
    value = float(match["number"]) * factor
    if not math.isfinite(value):
        raise Mistake("this number is too large", match.start())
    return Number(match.start(), value, unit)


def _unknown(source: str, pos: int) -> Mistake:
    char = source[pos]
    if char in "\"'":
        return Mistake("this string has no closing quote", pos)
    instead = f": write {_INSTEAD[char]}" if char in _INSTEAD else ""
    shown = char if char.isprintable() else f"U+{ord(char):04X}"
    return Mistake(f"{shown} is not allowed here{instead}", pos)
