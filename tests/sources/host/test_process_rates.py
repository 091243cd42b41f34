"""Rates of processes with their descendants: what is counted once, and what never."""

from __future__ import annotations

from gputop.sources.host.proc_files import DENIED
from gputop.sources.host.process_table import FIRST, Counts, Family, FamilyRates


def member(pid: int, parent: int, read: int | None, ticks: int = 0) -> Family:
    io = None if read is None else (read, 2 * read)
    return {(pid, 1): Counts(parent, ticks, io, DENIED if io is None else "")}


def rates_of(*families: dict[int, Family], alive: set[int] = frozenset()) -> list[tuple[float | None, float | None]]:
    """Bytes per second read and written by family 1 in samples of one second."""
    rates = FamilyRates(100)
    found = [rates.update(float(i), sample, lambda m: m[0] in alive)[1] for i, sample in enumerate(families)]
    return [(r.io_read_bytes_per_s.value, r.io_write_bytes_per_s.value) for r in found]


def test_a_collected_child_is_not_counted_again() -> None:
    """The kernel adds a child's counters to its parent's when the parent collects it."""
    assert rates_of(
        {1: {**member(1, 0, 10), **member(2, 1, 500)}},
        {1: {**member(1, 0, 15), **member(2, 1, 700)}},
        {1: member(1, 0, 15 + 720 + 3)},  # 20 more by the child before it ended, 3 by the parent
    ) == [(None, None), (205.0, 410.0), (23.0, 46.0)]


def test_a_grandchild_is_collected_through_its_parent() -> None:
    assert rates_of(
        {1: {**member(1, 0, 0), **member(2, 1, 100), **member(3, 2, 1000)}},
        {1: member(1, 0, 1107)},
    )[1] == (7.0, 14.0)


def test_a_child_that_is_not_collected_takes_nothing_off() -> None:
    """Its parent ignores SIGCHLD: the parent's counter has not grown by the child's."""
    assert rates_of({1: {**member(1, 0, 0), **member(2, 1, 500)}}, {1: member(1, 0, 40)})[1] == (40.0, 80.0)


def test_a_child_that_lives_on_elsewhere_takes_nothing_off() -> None:
    before, after = {1: {**member(1, 0, 0), **member(2, 1, 5)}}, {1: member(1, 0, 40)}
    assert rates_of(before, after, alive={2})[1] == (40.0, 80.0)
    assert rates_of(before, after)[1] == (35.0, 70.0)


def test_a_child_with_an_entry_of_its_own_that_ends_is_not_its_parents() -> None:
    assert rates_of({1: member(1, 0, 0), 2: member(2, 1, 500)}, {1: member(1, 0, 510)})[1] == (10.0, 20.0)


def test_parents_that_form_a_circle_end() -> None:
    circle = {**member(1, 0, 0), **member(2, 3, 5), **member(3, 2, 5)}
    assert rates_of({1: circle}, {1: member(1, 0, 40)})[1] == (40.0, 80.0)


def test_a_member_that_may_not_be_read_makes_the_sum_unknown() -> None:
    rates = FamilyRates(100)
    first = {1: {**member(1, 0, 0), **member(2, 1, None)}}
    rates.update(0.0, first, lambda _: False)
    found = rates.update(1.0, first, lambda _: False)[1]
    assert found.io_read_bytes_per_s.reason == found.io_write_bytes_per_s.reason == DENIED
    assert found.cpu_cores.value == 0.0
    # As soon as it can be read it counts, from then on.
    rates.update(2.0, {1: {**member(1, 0, 0), **member(2, 1, 900)}}, lambda _: False)
    found = rates.update(3.0, {1: {**member(1, 0, 0), **member(2, 1, 950)}}, lambda _: False)[1]
    assert found.io_read_bytes_per_s.value == 50.0


def test_counters_that_go_back_count_nothing() -> None:
    assert rates_of({1: member(1, 0, 100)}, {1: member(1, 0, 40)})[1] == (0.0, 0.0)
    rates = FamilyRates(100)
    rates.update(0.0, {1: member(1, 0, 0, ticks=50)}, lambda _: False)
    assert rates.update(1.0, {1: member(1, 0, 0, ticks=20)}, lambda _: False)[1].cpu_cores.value == 0.0


def test_no_time_between_two_samples() -> None:
    rates = FamilyRates(100)
    rates.update(5.0, {1: member(1, 0, 0)}, lambda _: False)
    assert rates.update(5.0, {1: member(1, 0, 9)}, lambda _: False)[1].io_read_bytes_per_s.reason == FIRST
