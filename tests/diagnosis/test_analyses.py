"""The table of analyses and its runner."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from gputop.diagnosis.analyses import ANALYSES, FIELDS, AnalysisEntry, Given, ordered, start_analyses

NOTHING = cast(Given, None)


def results_of(*entries: AnalysisEntry) -> dict[str, Any]:
    with ThreadPoolExecutor(1) as threads:
        futures = start_analyses(threads, NOTHING, entries)
    return {name: future.result() for name, future in futures.items()}


def test_one_thread_is_enough_for_analyses_that_need_each_other_in_any_order() -> None:
    results = results_of(
        AnalysisEntry("sum", lambda _, two, one: one + two, ("two", "one")),
        AnalysisEntry("two", lambda _, one: one * 2, ("one",)),
        AnalysisEntry("one", lambda _: 1))
    assert results == {"one": 1, "two": 2, "sum": 3}


def test_what_has_nothing_to_analyze_is_none_for_those_that_need_it() -> None:
    results = results_of(
        AnalysisEntry("none", lambda _: pytest.fail("it ran"), when=lambda _: False),
        AnalysisEntry("after", lambda _, none: [none], ("none",)))
    assert results == {"none": None, "after": [None]}


@pytest.mark.parametrize("needs", [("one",), ("unknown",)])
def test_a_circle_and_an_unknown_need_are_said(needs: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="no analysis provides what one needs"):
        results_of(AnalysisEntry("one", lambda *_: 1, needs))


def test_the_table_begins_with_those_that_need_nothing() -> None:
    entries = list(ordered(ANALYSES))
    names = [entry.name for entry in entries]
    assert len(set(names)) == len(ANALYSES) and set(FIELDS) < set(names)
    free = [entry.name for entry in ANALYSES if not entry.needs]
    assert names[:len(free)] == free
