"""One expression: read and checked once, evaluated often."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gputop.rules.check import Call, Checker, Kind, Meaning, Reference
from gputop.rules.evaluate import Evaluation, Value, Values
from gputop.rules.lexer import Mistake
from gputop.rules.names import Quantity, Source
from gputop.rules.parser import Binary, Node, Number, parse, walk


class Outcome(NamedTuple):
    """Outcome of a condition: whether it holds, None where that is not known for want of ``missing``; ``figures`` are
    the named ones that it read, in base units."""

    holds: bool | None
    figures: Mapping[str, tuple[float, Quantity]]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Condition:
    """An expression that holds or does not. ``per_gpu``: for each GPU, as it uses a name that each GPU has."""

    text: str
    source: Source
    tree: Node
    meanings: Mapping[int, Meaning]
    per_gpu: bool

    @property
    def references(self) -> tuple[Reference, ...]:
        """The names that it uses."""
        return tuple(meaning for meaning in self.meanings.values() if isinstance(meaning, Reference))

    @property
    def is_monotonic(self) -> bool:
        """Return whether the ends of a range decide for all values of a name between: not where equality with another
        number than 0 is asked for, or ``abs`` is."""
        equal = [node for node in walk(self.tree) if isinstance(node, Binary) and node.operator in ("==", "!=")]
        zero = [node for node in equal for side in (node.left, node.right)
                if isinstance(side, Number) and side.value == 0]
        return len(equal) == len(zero) and not any(
            isinstance(meaning, Call) and meaning.function == "abs" for meaning in self.meanings.values())

    def judge(self, values: Values) -> dict[int | None, Outcome]:
        """Judge for each GPU where ``per_gpu``, else once, for None. Raises nothing of its own."""
        over_gpus: dict[int, tuple[Value, dict[str, str]]] = {}
        return {gpu: self._judge(Evaluation(self.meanings, values, gpu, over_gpus=over_gpus))
                for gpu in (values.gpus if self.per_gpu else (None,))}

    def _judge(self, evaluation: Evaluation) -> Outcome:
        holds = evaluation.of(self.tree)
        missing = tuple(evaluation.missing.values()) if holds is None else ()
        return Outcome(None if holds is None else bool(holds), evaluation.figures,
                       missing or (("a result that is a number",) if holds is None else ()))


def condition(text: str, source: Source) -> Condition:
    """Read and check a condition; raises :class:`~gputop.rules.lexer.Mistake` with its place in ``text``."""
    tree = parse(text)
    checker = Checker(text, source)
    kind = checker.kind(tree)
    if kind != Kind(None):
        raise Mistake(f"a rule asks for a condition, and this is {kind}: compare it, as in … > 0", 0)
    return Condition(" ".join(text.split()), source, tree, checker.meanings, checker.per_gpu)
