"""The text of PromQL: labels that hold anything, unions, and names."""

from __future__ import annotations

import pytest

from gputop.cluster.promql import (
    any_name,
    below_median,
    by_figure,
    deviation,
    either,
    has,
    matchers,
    queries_by_figure,
    quoted,
    regex,
    selector,
)


@pytest.mark.parametrize("text", ['n"1', "a|b", "x\\", "n.1", 'a"} or vector(1)#', "line\nend"])
def test_labels_from_outside_stay_between_the_quotes(text: str) -> None:
    for written in (quoted(text), regex(text)):
        rest = written.replace("\\\\", "").replace('\\"', "")
        assert '"' not in rest and "\n" not in rest
    assert matchers({"hpc_job": [text]}) == f'hpc_job="{quoted(text)}"'
    assert "|" not in regex("a|b").replace("\\\\|", "")


def test_matchers_and_selectors() -> None:
    assert matchers({"job": ["b", "a"], "cluster": ["c"]}) == 'job=~"a|b", cluster="c"'
    assert (selector("up", ""), selector("up", has("job"))) == ("up", 'up{job!=""}')
    assert any_name(["a", "b"], has("mig")) == '{__name__=~"a|b", mig!=""}'


def test_a_union_leaves_out_what_nobody_exports() -> None:
    assert either(["", "a", "b"], "or on (UUID)") == "(a or on (UUID) b)" and either(["", "a"]) == "a"
    assert either([]) == by_figure({"power_w": ""}) == ""
    assert by_figure({"up": "a", "power_w": "", "down": "b"}) == (
        'label_replace(a, "figure", "up", "", "") or label_replace(b, "figure", "down", "", "")')


def test_figures_are_as_few_queries_as_have_room_for_them() -> None:
    figures = {"a": "x" * 50, "none": "", "b": "ü" * 25, "c": "x" * 200, "d": "x", "e": "y"}
    assert queries_by_figure(figures) == ([by_figure(figures)], []) and queries_by_figure({"none": ""}) == ([], [])
    size = len(by_figure({"a": figures["a"], "b": figures["b"]}).encode())
    both, rest = [by_figure({name: figures[name] for name in names}) for names in ("ab", "de")]
    assert queries_by_figure(figures, size) == ([both, rest], ["c"])
    queries, too_long = queries_by_figure(figures, size - 1)
    assert too_long == ["c"] and [query.count("label_replace") for query in queries] == [1, 3]
    assert " or ".join(queries) == by_figure({**figures, "c": ""}) and all(len(q.encode()) < size for q in queries)
    assert queries_by_figure(figures, 10) == ([], ["a", "b", "c", "d", "e"])


def test_what_is_said_of_a_group_is_compared_within_it() -> None:
    assert below_median(["job"], "a", ratio=0.85) == (
        "(a < on (job) group_left () (0.85 * quantile by (job) (0.5, a)))")
    assert below_median(["job"], "a", distance=0.15) == (
        "(a < on (job) group_left () (quantile by (job) (0.5, a) - 0.15))")
    assert deviation(["job"], "a") == (
        "quantile by (job) (0.5, abs(a - on (job) group_left () quantile by (job) (0.5, a)))")
