"""The past: what is asked for, when, and what is made of gaps, of a young Prometheus and of clocks that are set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from gputop.cluster import series_store
from gputop.cluster.model import FleetView
from gputop.cluster.prometheus import QueryTooLong, Series
from gputop.cluster.series_store import SUBJECTS_AT_ONCE, PastQuestion, SeriesStore, SlotGrid
from gputop.core.errors import GputopError

VIEW = FleetView(span_s=600.0, step_s=60.0)
NOW = 1_800_000_030.0  # in the middle of a slot
LAST = int(NOW // 60)


class Past:
    """Has the value of its slot for each job, and notes the slots that it is asked for."""

    def __init__(self, value: Callable[[int], float | None] = float) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self.value = value
        self.error: GputopError | None = None
        self.max_bytes = 10**6

    def range(self, figures: Mapping[str, str], begin_s: float, end_s: float, step_s: float) -> list[Series]:
        (query,) = figures.values()
        first, last = round(begin_s / step_s), round(end_s / step_s)
        self.asked.append((query, first, last))
        if self.error is not None:
            raise self.error
        if len(query) > self.max_bytes:
            raise QueryTooLong("too long", self.max_bytes)
        points = [(slot * step_s, value) for slot in range(first, last + 1) if (value := self.value(slot)) is not None]
        return [Series({"figure": "activity", "job": job}, points) for job in query.split("|") if points]


def ask(store: SeriesStore, past: Past, jobs: Sequence[str], now_s: float = NOW, view: FleetView = VIEW) -> bool:
    question = PastQuestion("jobs", jobs, lambda some: {"activity": "|".join(some)}, lambda labels: labels["job"])
    return store.range(past, question, SlotGrid.of(view, now_s))


def values(store: SeriesStore, job: str, now_s: float = NOW) -> list[float | None]:
    return list(SlotGrid.of(VIEW, now_s).history(store.points("activity", job).get).values)


def test_only_what_is_missing_is_asked_for() -> None:
    store, past = SeriesStore(), Past()
    assert ask(store, past, ["a", "b"]) and not ask(store, past, ["a", "b"], NOW + 20)
    assert ask(store, past, ["a", "b"], NOW + 130) and ask(store, past, ["a"], NOW + 200)
    assert ask(store, past, ["b", "a"], NOW + 260)
    assert past.asked == [("a|b", LAST - 9, LAST), ("a|b", LAST + 1, LAST + 2), ("a", LAST + 3, LAST + 3),
                          ("b|a", LAST + 3, LAST + 4)]
    assert values(store, "a", NOW + 260) == [float(slot) for slot in range(LAST - 5, LAST + 5)]
    assert not store.points("activity", "c") and store.is_known("jobs", ["a", "b"])
    assert not store.is_known("jobs", ["a", "c"]) and not store.is_known("nodes", ["a"])


def test_what_is_new_comes_first_and_some_at_once() -> None:
    store, past = SeriesStore(), Past()
    jobs = [f"j{i}" for i in range(SUBJECTS_AT_ONCE + 2)]
    assert ask(store, past, jobs) and ask(store, past, [*jobs, "new"]) and not ask(store, past, jobs)
    assert past.asked[0][0].split("|") == jobs[:SUBJECTS_AT_ONCE]
    assert past.asked[1] == ("|".join([*jobs[SUBJECTS_AT_ONCE:], "new"]), LAST - 9, LAST)
    ask(store, past, [*jobs, "newer"], NOW + 60)
    assert past.asked[2] == ("newer", LAST - 8, LAST + 1)
    ask(store, past, jobs, NOW + 60)
    assert past.asked[3] == ("|".join(jobs[:SUBJECTS_AT_ONCE]), LAST + 1, LAST + 1)


def test_of_a_server_that_takes_no_query_so_long_fewer_are_asked_for_at_once() -> None:
    store, past = SeriesStore(), Past()
    past.max_bytes = 5
    jobs = ["aa", "bb", "cc", "dd", "ee"]
    while ask(store, past, jobs):
        pass
    assert [query for query, _, _ in past.asked if len(query) <= 5] == ["aa|bb", "cc", "dd|ee"]
    assert all(values(store, job) == [float(slot) for slot in range(LAST - 9, LAST + 1)] for job in jobs)
    with pytest.raises(QueryTooLong):
        ask(store, past, ["longer"])
    assert not store.is_known("jobs", ["longer"])


def test_a_failure_and_a_gap_are_made_up_for() -> None:
    store, past = SeriesStore(), Past()
    ask(store, past, ["a"])
    past.error = GputopError("gone")
    for _ in range(2):
        with pytest.raises(GputopError, match="gone"):
            ask(store, past, ["a"], NOW + 60)
    past.error = None
    assert values(store, "a", NOW + 60)[-2:] == [float(LAST), None]
    ask(store, past, ["a"], NOW + 240)
    assert past.asked[-1] == ("a", LAST + 1, LAST + 4) and None not in values(store, "a", NOW + 240)
    ask(store, past, ["a"], NOW + 7200)  # the machine slept
    assert past.asked[-1] == ("a", LAST + 111, LAST + 120) and None not in values(store, "a", NOW + 7200)


def test_what_was_not_measured_is_not_asked_for_again() -> None:
    store, past = SeriesStore(), Past(lambda slot: float(slot) if slot > LAST - 3 else None)
    ask(store, past, ["a"])
    assert values(store, "a") == [*[None] * 7, LAST - 2.0, LAST - 1.0, float(LAST)]
    past.value = lambda slot: None  # the exporter is away
    ask(store, past, ["a"], NOW + 60)
    ask(store, past, ["a"], NOW + 120)
    assert [slots[1:] for slots in past.asked] == [(LAST - 9, LAST), (LAST + 1, LAST + 1), (LAST + 2, LAST + 2)]
    assert values(store, "a", NOW + 120)[-3:] == [float(LAST), None, None]


def test_a_clock_that_was_set() -> None:
    store, past = SeriesStore(), Past()
    ask(store, past, ["a"])
    assert not ask(store, past, ["a"], NOW - 60)  # the time of an answer varies
    assert not ask(store, past, ["a"])
    past.value = lambda slot: 0.5
    assert ask(store, past, ["a"], NOW - 3600)
    assert past.asked[-1] == ("a", LAST - 69, LAST - 60) and values(store, "a", NOW - 3600) == [0.5] * 10
    assert values(store, "a") == [None] * 10  # that was another time
    ask(store, past, ["a"], NOW + 86400)
    assert past.asked[-1] == ("a", LAST + 1431, LAST + 1440)


def test_another_grid_is_asked_for_anew_and_a_shorter_one_is_there() -> None:
    store, past = SeriesStore(), Past()
    ask(store, past, ["a"])
    assert not ask(store, past, ["a"], view=FleetView(span_s=300.0, step_s=60.0))
    assert ask(store, past, ["a"]) and past.asked[-1] == ("a", LAST - 9, LAST)
    assert ask(store, past, ["a"], view=FleetView(span_s=600.0, step_s=120.0))
    assert past.asked[-1] == ("a", int(NOW // 120) - 4, int(NOW // 120))
    assert set(store.points("activity", "a")) == set(range(int(NOW // 120) - 4, int(NOW // 120) + 1))


def test_only_slots_that_were_asked_for_are_taken() -> None:
    class Foreign(Past):
        def range(self, figures: Mapping[str, str], begin_s: float, end_s: float, step_s: float) -> list[Series]:
            labels = {"figure": "activity", "job": figures["activity"]}
            return [Series(labels, [(begin_s - step_s, 1.0), (end_s + step_s, 1.0)])]

    store = SeriesStore()
    ask(store, Foreign(), ["a"])
    assert values(store, "a") == [None] * 10 and not store.points("activity", "a")


def test_subjects_that_no_label_selects_have_no_past_and_cost_no_query() -> None:
    store, past = SeriesStore(), Past()
    question = PastQuestion("jobs", ["a"], lambda subjects: {"activity": ""}, lambda labels: labels["job"])
    assert not store.range(past, question, SlotGrid.of(VIEW, NOW)) and not past.asked and store.is_known("jobs", ["a"])


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may name other jobs each time, and jobs end."""
    monkeypatch.setattr(series_store, "_MAX_SERIES", 50)
    store, past = SeriesStore(), Past()
    for number in range(200):
        ask(store, past, [str(number)])
        assert len(store) <= 52
    monkeypatch.undo()
    store = SeriesStore()
    for number in range(30):
        ask(store, past, [str(number)], NOW + 60 * number)
    assert len(store) == 2 * 10  # those of the grid's time
