"""Parser from words to a tree: precedence climbing (V. Pratt, "Top down operator precedence", POPL 1973)."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from gputop.rules.lexer import Mistake, Word, words
from gputop.rules.units import NONE, Unit

MAX_NODES = 200  # also bounds the depth of a tree, and with it the recursion of who walks it
_MAX_NESTING = 40
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
_BINDING = {"or": 1, "and": 2, **dict.fromkeys(COMPARISONS, 4), "+": 5, "-": 5, "*": 6, "/": 6}
_NOT, _SIGN = 3, 7
_WORDS = ("and", "or", "not")


class Number(Struct, frozen=True):
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
    """The tree of an expression; raises :class:`~gputop.rules.lexer.Mistake`."""
    parser = _Parser(words(source))
    tree = parser.expression(0)
    parser.expect("end", "the end, or an operator such as and, <, +")
    return tree


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


class _Parser:
    def __init__(self, source: list[Word]) -> None:
        self._words = source
        self._next = 0
        self._nodes = 0
        self._nesting = 0

    @property
    def _word(self) -> Word:
        return self._words[self._next]

    def _take(self) -> Word:
        word = self._word
        self._next += word.kind != "end"
        return word

    def _made(self, pos: int) -> int:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise Mistake(f"an expression has at most {MAX_NODES} parts: split it into two rules", pos)
        return pos

    def _is(self, operator: str) -> bool:
        return self._word.kind == "operator" and self._word.text == operator

    def expect(self, what: str, meant: str) -> Word:
        word = self._take()
        if word.kind != what and (word.kind, word.text) != ("operator", what):
            instead_of = "the end of the expression" if word.kind == "end" else f"“{word.text}”"
            lower = word.text.lower()
            instead = f": write {lower}" if lower in _WORDS and word.text not in _WORDS else ""
            raise Mistake(f"{instead_of} where {meant} belongs{instead}", word.pos)
        return word

    def expression(self, power: int) -> Node:
        self._nesting += 1
        if self._nesting > _MAX_NESTING:
            raise Mistake(f"an expression is nested at most {_MAX_NESTING} deep", self._word.pos)
        left = self._operand()
        while (binding := self._binding()) > power:
            word = self._take()
            right = self.expression(binding)
            left = Binary(self._made(word.pos), word.text, left, right)
        self._nesting -= 1
        return left

    def _binding(self) -> int:
        return _BINDING.get(self._word.text, 0) if self._word.kind in ("operator", "name") else 0

    def _operand(self) -> Node:
        word = self._take()
        if word.kind == "number":
            return Number(self._made(word.pos), word.value, word.unit)
        if word.kind == "text":
            return Text(self._made(word.pos), word.text)
        if (word.kind, word.text) == ("operator", "("):
            inner = self.expression(0)
            self.expect(")", "a closing parenthesis")
            return inner
        if word.text in ("not", "-") and word.kind in ("name", "operator"):
            return Unary(self._made(word.pos), word.text, self.expression(_NOT if word.text == "not" else _SIGN))
        if word.kind == "name" and word.text in ("true", "false"):
            return Truth(self._made(word.pos), word.text == "true")
        if word.kind != "name" or word.text in _BINDING:
            subject = "the expression ends" if word.kind == "end" else f"“{word.text}” stands"
            raise Mistake(f"{subject} where a name or a number belongs", word.pos)
        return self._name(word)

    def _name(self, word: Word) -> Name:
        segments = [self._segment(word)]
        while self._is("."):
            self._take()
            segments.append(self._segment(self.expect("name", "a name")))
        return Name(self._made(word.pos), self._words[self._next - 1].end, tuple(segments))

    def _segment(self, word: Word) -> Segment:
        if not self._is("("):
            return Segment(word.pos, word.text, None)
        self._take()
        arguments: list[Node] = []
        while not self._is(")"):
            if arguments:
                self.expect(",", "a comma or a closing parenthesis")
            arguments.append(self.expression(0))
        self._take()
        return Segment(word.pos, word.text, tuple(arguments))
