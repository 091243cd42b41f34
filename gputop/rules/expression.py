"""One expression: read and checked once, evaluated often, for given values.

A figure that is not known makes unknown what depends on it; false and unknown is false, true or unknown is true
(S. C. Kleene, "On notation for ordinal numbers", J. Symb. Log. 3, 1938).
"""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct, field

from gputop.rules.check import Checker, FunctionCall, Meaning, Reference, ResultKind
from gputop.rules.names import Quantity, Source
from gputop.rules.parser import Binary, Mistake, Name, Node, Number, Text, Truth, Unary, parse, walk

# A figure or a condition; None where it is not known.
Value = float | bool | None


class Values(Protocol):
    """Source of the values of names."""

    @property
    def gpus(self) -> Sequence[int]:
        """The GPUs that can be judged, by their numbers."""

    def read(self, reference: Reference, gpu: int | None) -> tuple[Value, str]:
        """The value in base units, or None and what is missing for it. ``gpu``: of a name that each GPU has."""


class Evaluation(Struct):
    """One evaluation of an expression: what it read on the way. ``missing`` has why something is not known."""

    meanings: Mapping[int, Meaning]
    values: Values
    gpu: int | None = None
    figures: dict[str, tuple[float, Quantity]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    # What was computed over all GPUs, by where it stands: it is the same for each of them.
    over_gpus: dict[int, tuple[Value, dict[str, str]]] = field(default_factory=dict)

    def of(self, node: Node) -> Value:
        """Never raises: what cannot be computed, such as a division by 0, is None."""
        if isinstance(node, (Number, Truth)):
            return node.value
        if isinstance(node, Unary):
            value = self.of(node.operand)
            return None if value is None else (not value if node.operator == "not" else -value)
        if isinstance(node, Binary):
            return self._binary(node)
        return None if isinstance(node, Text) else self._named(node)

    def _binary(self, node: Binary) -> Value:
        left = self.of(node.left)
        if node.operator in ("and", "or"):
            decides = node.operator == "or"
            if left is decides:
                return decides
            right = self.of(node.right)
            return decides if right is decides else None if left is None or right is None else not decides
        right = self.of(node.right)
        if left is None or right is None:
            return None
        if node.operator == "/" and right == 0:
            self.missing.setdefault("division", "a divisor other than 0")
            return None
        return _finite(_OPERATORS[node.operator](left, right))

    def _named(self, node: Name) -> Value:
        meaning = self.meanings[node.pos]
        if isinstance(meaning, Reference):
            value, missing = self.values.read(meaning, self.gpu if meaning.quantity.per_gpu else None)
            if value is None:
                self.missing.setdefault(meaning.text, f"{meaning.text}: {missing}")
            elif not isinstance(value, bool):
                value = _finite(value)
                self.figures[meaning.text] = (value or 0.0, meaning.quantity)
            return value
        if meaning.over_gpus is not None:
            if node.pos not in self.over_gpus:
                self.over_gpus[node.pos] = self._over_gpus(meaning)
            result, lacks = self.over_gpus[node.pos]
            self.missing |= lacks
            if result is not None and not isinstance(result, bool):
                self.figures[meaning.text] = (result, meaning.over_gpus)
            return result
        arguments = [self.of(argument) for argument in meaning.arguments]
        present = [value for value in arguments if value is not None]
        return None if len(present) < len(arguments) else _FUNCTIONS[meaning.function](present)

    def _over_gpus(self, call: FunctionCall) -> tuple[Value, dict[str, str]]:
        """Value over the GPUs that have one; None and what is missing where none has."""
        (argument,) = call.arguments
        parts = [Evaluation(self.meanings, self.values, gpu) for gpu in self.values.gpus]
        present = [value for part in parts if (value := part.of(argument)) is not None]
        if not present:
            return None, next((part.missing for part in parts if part.missing), {"gpus": "a readable GPU"})
        try:
            return _finite(_FUNCTIONS[call.function](present)), {}
        except OverflowError:  # math.fsum, where floats would be infinite
            return None, {}


def _finite(value: Value) -> Value:
    return value if value is None or isinstance(value, bool) or math.isfinite(value) else None


_OPERATORS: Mapping[str, Callable[[float, float], Value]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "<": operator.lt,
    "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne}
_FUNCTIONS: Mapping[str, Callable[[list[float]], Value]] = {
    "min": min, "max": max, "abs": lambda values: abs(values[0]), "mean": statistics.fmean, "sum": math.fsum,
    "median": statistics.median, "count": lambda values: float(sum(map(bool, values))), "any": any, "all": all}


class ConditionOutcome(NamedTuple):
    """Outcome of a condition: whether it holds, None where that is not known for want of ``missing``; ``figures`` are
    the named ones that it read, in base units."""

    holds: bool | None
    figures: Mapping[str, tuple[float, Quantity]]
    missing: tuple[str, ...]


class Condition(Struct, frozen=True):
    """An expression that holds or does not. ``per_gpu``: for each GPU, as it uses a name that each GPU has."""

    text: str
    source: Source
    tree: Node
    meanings: Mapping[int, Meaning]
    per_gpu: bool

    @property
    def references(self) -> tuple[Reference, ...]:
        return tuple(meaning for meaning in self.meanings.values() if isinstance(meaning, Reference))

    @property
    def is_monotonic(self) -> bool:
        """Return whether the ends of a range decide for all values of a name between: not where equality with another
        number than 0 is asked for, or ``abs`` is."""
        equal = [node for node in walk(self.tree) if isinstance(node, Binary) and node.operator in ("==", "!=")]
        zero = [node for node in equal for side in (node.left, node.right)
                if isinstance(side, Number) and side.value == 0]
        return len(equal) == len(zero) and not any(
            isinstance(meaning, FunctionCall) and meaning.function == "abs" for meaning in self.meanings.values())

    def judge(self, values: Values) -> dict[int | None, ConditionOutcome]:
        """Judge for each GPU where ``per_gpu``, else once, for None. Raises nothing of its own."""
        over_gpus: dict[int, tuple[Value, dict[str, str]]] = {}
        return {gpu: self._judge(Evaluation(self.meanings, values, gpu, over_gpus=over_gpus))
                for gpu in (values.gpus if self.per_gpu else (None,))}

    def _judge(self, evaluation: Evaluation) -> ConditionOutcome:
        holds = evaluation.of(self.tree)
        missing = tuple(evaluation.missing.values()) if holds is None else ()
        return ConditionOutcome(None if holds is None else bool(holds), evaluation.figures,
                                missing or (("a numeric result",) if holds is None else ()))


def condition(text: str, source: Source) -> Condition:
    """Read and check a condition; raises :class:`~gputop.rules.parser.Mistake` with its place in ``text``."""
    tree = parse(text)
    checker = Checker(text, source)
    kind = checker.kind(tree)
    if kind != ResultKind(None):
        raise Mistake(f"a rule needs a condition, but this is {kind}; add a comparison such as … > 0", 0)
    return Condition(" ".join(text.split()), source, tree, checker.meanings, checker.per_gpu)
