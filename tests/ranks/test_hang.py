"""Which rank did not come, from two answers."""

from __future__ import annotations

from gputop.ranks.model import Absence, find_absence
from gputop.ranks.ras_answers import read_json
from tests.ranks.ras_double import Job, as_json


def absence(job: Job) -> Absence | None:
    answer = read_json(as_json(job), 0.0)
    return find_absence(answer, answer)


def test_the_rank_that_waits_in_another_communicator_is_not_the_one_to_look_at() -> None:
    # PID 1001 is absent in the first because it waits in the second, for PID 1002.
    found = absence(Job((100, 99), more=(Job((50, 49), first_pid=1001, key=0xdef),)))
    assert found is not None and found.absent[0].pid == 1002 and found.absent_at == 49
    assert found.also == 1 and not found.circle


def test_ranks_that_wait_for_each_other() -> None:
    found = absence(Job((100, 99), more=(Job((49, 50), key=0xdef),)))
    assert found is not None and found.circle


def test_a_rank_that_runs_other_code() -> None:
    found = absence(Job((100, 100, 99, 100), gathers=(7, 7, 8, 7)))
    assert found is not None and found.crossed and found.operation == "AllReduce" and found.absent[0].number == 2
    found = absence(Job((100, 100, 99, 100)))
    assert found is not None and not found.crossed


def test_a_process_that_is_gone_comes_first() -> None:
    found = absence(Job((100, 100, 99, 100), more=(Job((5, 5, 5, 5), gone=frozenset({3}), first_pid=1004, key=0xdef),)))
    assert found is not None and found.silent and found.absent[0].number == 3


def test_a_single_rank_that_is_ahead() -> None:
    found = absence(Job((100, 101, 100, 100)))
    assert found is not None and found.absent_count == 3 and [r.number for r in found.waiting] == [1]
