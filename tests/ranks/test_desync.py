"""Which rank did not come, from the dumps of the ranks against each other."""

from __future__ import annotations

from gputop.ranks.desync import StacksProcessGroup, compare, lines, not_compared, sentence
from gputop.ranks.flight_recorder import Dump, Dumps
from tests.ranks.flight_dumps import NOW_S, dump, entry, history

WAITS = entry(4, state="started", line=20)


def first(*dumps: Dump) -> StacksProcessGroup:
    return compare(dumps)[0]


def ranks(states: object) -> list[int]:
    return [own.rank for own in states]  # type: ignore[attr-defined]


def report(*dumps: Dump, problems: tuple[str, ...] = ()) -> str:
    return "\n".join(lines([Dumps(dumps, problems)], NOW_S + 1060))


def test_the_rank_that_is_behind_and_its_line() -> None:
    state = first(dump(0, history(3, then=[WAITS])), dump(1, history(3)))
    assert (state.verdict, state.number, state.operation) == ("absent", 4, "all_reduce")
    assert ranks(state.apart) == [1] and ranks(state.others) == [0]
    waiting, behind = state.others[0], state.apart[0]
    assert (waiting.scheduled, waiting.started, waiting.completed) == (4, 4, 3)
    assert (behind.scheduled, behind.started, behind.completed) == (3, 3, 3) and behind.launched is None
    assert sentence(state) == ("Rank 1 did not launch all_reduce 4 of the group of all ranks. Rank 0 is waiting in "
                               "this collective at train.py:20.")
    assert "Rank 1 last launched all_reduce 3 at train.py:10." in report(
        dump(0, history(3, then=[WAITS])), dump(1, history(3)))


def test_a_rank_that_never_launched_anything_is_behind_unless_its_recorder_forgot() -> None:
    waits = dump(0, [entry(1, state="started")])
    assert first(waits, dump(1, [])).verdict == "absent"
    forgot = dump(1, [entry(5, group=("1", "undefined"), record=4000)], groups={"1": [1]})
    assert first(waits, forgot).verdict == "unclear"


def test_a_collective_that_ended_was_reached_by_all() -> None:
    assert first(dump(0, history(4)), dump(1, history(3))).verdict == "unclear"


def test_a_collective_of_nccl_that_failed_has_not_ended_one_of_gloo_may_have() -> None:
    for backend, verdict in (("nccl", "absent"), ("gloo", "unclear")):
        retired = {**entry(4, state="scheduled", backend=backend), "retired": True}
        assert first(dump(0, history(3, then=[retired])), dump(1, history(3))).verdict == verdict


def test_a_dump_from_before_the_others_launched_shows_nothing() -> None:
    early = dump(1, history(3), written_s=NOW_S + 3.5)
    assert first(dump(0, history(3, then=[WAITS])), early).verdict == "unclear"


def test_dumps_of_two_runs_are_not_compared() -> None:
    other = [entry(seq, at_s=NOW_S - 90_000 + seq) for seq in (1, 2, 3)]
    state = first(dump(0, history(3, then=[WAITS])), dump(1, other))
    assert state.verdict == "unclear" and "different times" in sentence(state)


def test_a_rank_that_is_far_behind_what_the_others_still_hold() -> None:
    far = [entry(seq, state="completed") for seq in range(50, 60)] + [entry(60, state="started")]
    assert first(dump(0, far), dump(1, history(3))).verdict == "unclear"


def test_all_inside_and_all_idle() -> None:
    inside = first(dump(0, history(3, then=[WAITS])), dump(1, history(3, then=[WAITS])))
    assert inside.verdict == "inside" and "at train.py:20, but not all have finished it" in sentence(inside)
    assert first(dump(0, history(3)), dump(1, history(3))).verdict == "idle"


def test_ranks_that_launched_different_collectives() -> None:
    other = entry(4, "broadcast", state="started", line=33)
    dumps = [dump(0, history(3, then=[WAITS]), 3), dump(1, history(3, then=[other]), 3),
             dump(2, history(3, then=[WAITS]), 3)]
    state = first(*dumps)
    assert (state.verdict, state.number) == ("mismatch", 4) and ranks(state.apart) == [1]
    text = report(*dumps)
    assert "Ranks 0, 2 launched all_reduce of 8 elements at train.py:20." in text
    assert "Rank 1 launched broadcast of 8 elements at train.py:33." in text
    assert ranks(first(*dumps[:2]).apart) == [0, 1]  # of two nobody is the odd one


def test_different_sizes_count_where_all_must_pass_as_many() -> None:
    for operation, sizes, verdict in (("all_reduce", (2, 5), "mismatch"), ("all_reduce", (2, 4), "inside"),
                                      ("all_to_all", (2, 5), "inside"), ("all_gather", (2, 5), "inside")):
        one, other = (entry(4, operation, size, state="started") for size in ((8,), sizes))
        assert first(dump(0, history(3, then=[one])), dump(1, history(3, then=[other]))).verdict == verdict


def test_collectives_that_were_launched_as_one_are_not_compared() -> None:
    together = [entry(4, state="started"), entry(4, "coalesced", state="started")]
    assert first(dump(0, history(3, then=together)), dump(1, history(3, then=together[:1]))).verdict == "inside"


def test_the_group_that_explains_the_others_comes_first() -> None:
    # Rank 1 does not come to the group of all, because it waits in group 1 for rank 2.
    groups = {"1": [1, 2]}
    small = entry(1, "_all_gather_base", state="started", line=40, group=("1", "undefined"))
    states = compare([dump(0, history(3, then=[WAITS]), 3), dump(1, [*history(3), small], 3, groups),
                      dump(2, history(3), 3, groups)])
    assert [(state.name, ranks(state.apart)) for state in states] == [("1", [2]), ("0", [1, 2])]


def test_groups_of_one_name_with_other_members_are_other_groups() -> None:
    one, other = (entry(seq, state="started", group=("7", "undefined")) for seq in (5, 2))
    dumps = [dump(rank, [own], 4, {"7": members})
             for rank, own, members in ((0, one, [0, 1]), (1, one, [0, 1]), (2, other, [2, 3]), (3, other, [2, 3]))]
    assert [state.verdict for state in compare(dumps)] == ["inside", "inside"]


def test_groups_whose_members_are_not_known_are_left_out_but_for_that_of_all() -> None:
    own = entry(1, state="started", group=("1", "undefined"))
    dumps = [dump(0, [*history(3, then=[WAITS]), own], None), dump(1, history(3), None)]
    assert [state.name for state in compare(dumps)] == ["0"] and not_compared(dumps) == ("1",)
    assert "a rank without a dump may be missing" in report(*(dump(rank, history(3), None) for rank in (0, 1)))
    assert "Not compared: 1 group whose members" in report(*dumps)


def test_what_was_not_asked_is_said() -> None:
    message = entry(3, "send 0->1", p2p=True)
    text = report(dump(0, [*history(3, then=[WAITS]), message], 4), dump(1, history(3, then=[WAITS]), 4),
                  problems=("process 7: no dump such as /tmp/x_2",))
    assert "Ranks 0-1 launched all_reduce 4" in text and "All ranks" not in text
    assert "Not asked: ranks 2-3, because gputop read no dump for them. The other ranks may be waiting" in text
    assert "Not read: process 7: no dump such as /tmp/x_2." in text and "sends and receives, 1 in" in text
    assert "Dumps read: ranks 0-1, written 60.0 s ago." in text
    assert "a single dump" in report(dump(0, history(3)))
    assert "there are no ranks to compare: process 7: no dump. PyTorch" in report(problems=("process 7: no dump",))
