"""The text of PromQL: selectors, aggregations and unions. Pure; knows no exporter and no metric."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping

_OR = " or "
VALUE = "value"  # the label of :func:`counted`
FIGURE = "figure"  # the label that says which expression of :func:`by_figure` a series of the answer is of


def matchers(values: Mapping[str, Collection[str]]) -> str:
    """``{"Hostname": ["n1", "n2"]}`` → ``Hostname=~"n1|n2"``; one value: an equality."""
    parts = []
    for label, texts in values.items():
        ordered = sorted(texts)
        parts.append(f'{label}="{quoted(ordered[0])}"' if len(ordered) == 1
                     else f'{label}=~"{"|".join(map(regex, ordered))}"')
    return ", ".join(parts)


def has(label: str) -> str:
    return f'{label}!=""'


def lacks(label: str) -> str:
    return f'{label}=""'


def all_of(*conditions: str) -> str:
    """Several matchers as one; "" matches everything."""
    return ", ".join(filter(None, conditions))


def selector(metric: str, condition: str) -> str:
    """``metric{condition}``, and the bare name without a condition."""
    return f"{metric}{{{condition}}}" if condition else metric


def any_name(names: Iterable[str], condition: str = "") -> str:
    joined = "|".join(names)
    return selector("", all_of(f'__name__=~"{joined}"', condition))


def duration(seconds: float) -> str:
    """A window or an offset: PromQL takes whole numbers, rounded up."""
    return f"{math.ceil(seconds)}s"


def grouped(function: str, labels: Iterable[str], value: str) -> str:
    """``avg by (job) (value)``."""
    return f"{function} by ({', '.join(labels)}) ({value})"


def counted(labels: Iterable[str], value: str) -> str:
    """Return how many series of each group have a value, by the label :data:`VALUE`."""
    return f'count_values by ({", ".join(labels)}) ("{VALUE}", {value})'


def median(labels: Iterable[str], value: str) -> str:
    return f"quantile by ({', '.join(labels)}) (0.5, {value})"


def lowest(count: int, labels: Iterable[str], value: str) -> str:
    """The ``count`` lowest of each group, with all of their labels."""
    return f"bottomk by ({', '.join(labels)}) ({count}, {value})"


def deviation(labels: Iterable[str], value: str) -> str:
    """The median absolute deviation of each group: of the distances from the group's median the median."""
    by = ", ".join(labels)
    return median(labels, f"abs({value} - on ({by}) group_left () {median(labels, value)})")


def below_median(labels: Iterable[str], value: str, *, ratio: float = 1.0, distance: float = 0.0,
                 peers: str = "") -> str:
    """Select what is below the ``ratio`` of its group's median, or below it by more than a ``distance``. ``peers``: the
    same values with fewer labels, of which a server makes the median with less work."""
    by = ", ".join(labels)
    limit = median(labels, peers or value)
    limit = f"{limit} - {distance:g}" if distance else f"{ratio:g} * {limit}"
    return f"({value} < on ({by}) group_left () ({limit}))"


def either(values: Iterable[str], operator: str = "or") -> str:
    """The series of all of these; of those that are alike, the first has. "" where there are none."""
    present = [value for value in values if value]
    return f"({f' {operator} '.join(present)})" if len(present) > 1 else "".join(present)


def with_label(value: str, label: str, text: str) -> str:
    """The same series, each with a label of this text."""
    return f'label_replace({value}, "{label}", "{text}", "", "")'


def with_copied_label(value: str, label: str, source: str) -> str:
    """The same series; those that have the label ``source`` have its text as ``label``, too."""
    return f'label_replace({value}, "{label}", "$1", "{source}", "(.+)")'


def without_label(value: str, label: str, condition: str) -> str:
    """The same series; those that have the label ``condition`` lose ``label``."""
    return f'label_replace({value}, "{label}", "", "{condition}", ".+")'


def with_copied_uuid(value: str, label: str, source: str) -> str:
    """The same series; those that have the label ``source`` have its UUID as ``label``, too, with GPU- before it."""
    return f'label_replace({value}, "{label}", "GPU-$1", "{source}", "(?:GPU-)?(.+)")'


def with_uuid(value: str, label: str, sources: Iterable[str]) -> str:
    """The same series; those that lack the ``label`` have the texts of ``sources`` in its place, after a semicolon."""
    joined = ", ".join(f'"{source}"' for source in (label, *sources))
    return f'label_replace(label_join({value}, "{label}", ";", {joined}), "{label}", "$1", "{label}", "([^;]+);.*")'


def with_first_label(value: str, label: str, sources: Iterable[str]) -> str:
    """The same series, each with the text of the first of the labels ``sources`` that it has as ``label``."""
    joined = ", ".join(f'"{source}"' for source in sources)
    return f'label_replace(label_join({value}, "{label}", ";", {joined}), "{label}", "$1", "{label}", ";*([^;]+).*")'


def by_figure(expressions: Mapping[str, str]) -> str:
    """One query for several figures: the answer's label :data:`FIGURE` says which figure a series is. Figures without
    an expression are left out."""
    return _OR.join(with_label(value, FIGURE, figure) for figure, value in expressions.items() if value)


def queries_by_figure(expressions: Mapping[str, str], max_bytes: int | None = None) -> tuple[list[str], list[str]]:
    """The figures as few queries of :func:`by_figure`, each of at most ``max_bytes`` (None: any number); and the names
    of those figures whose expression is longer alone."""
    if max_bytes is None:
        return [query] if (query := by_figure(expressions)) else [], []
    queries: list[str] = []
    too_long: list[str] = []
    room = 0
    for figure, value in expressions.items():
        if not (query := by_figure({figure: value})):
            continue
        size = len(query.encode())
        if size > max_bytes:
            too_long.append(figure)
        elif size + len(_OR) <= room:
            queries[-1] += _OR + query
            room -= size + len(_OR)
        else:
            queries.append(query)
            room = max_bytes - size
    return queries, too_long


def quoted(text: str) -> str:
    """``text`` between the quotes of a string of PromQL."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def regex(text: str) -> str:
    """``text`` as a regular expression (RE2) that matches only itself, between quotes."""
    return quoted(re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", text))
