"""Ranks that stand alike, and the one that stands elsewhere."""

from __future__ import annotations

from gputop.core.errors import GputopError
from gputop.ranks.stack_groups import group, jobs, odd_ones, report, sentence
from gputop.ranks.stacks import Frame, ProcessStacks, ThreadStack
from tests.ranks.rank_stacks import LOADS, TORCH, WAITS, rank


def test_the_odd_one_is_named() -> None:
    polled = (Frame("wait", f"{TORCH}x.py", 7), *WAITS)  # as if it polled: another function deeper in the library
    ranks = [rank(i, LOADS if i == 5 else WAITS) for i in range(8)]
    groups = group(ranks)
    assert sentence(groups) == "7 ranks in wrapper → all_reduce at train.py:112, 1 rank in load at data.py:40"
    assert [p.pid for p in odd_ones(groups)] == [105]
    text = list(report([ranks]))
    assert "Look at rank 5 (pid 105) first" in text[1]
    assert any(line.startswith("  → step") and "train.py:112" in line for line in text)
    headings = [line for line in text[2:] if line and not line.startswith(" ")]
    assert headings == ["rank 5 (pid 105): load at data.py:40",
                        "ranks 0-4, 6-7: wrapper → all_reduce at train.py:112"]
    assert any(line.endswith("torch/…/distributed_c10d.py:2810") for line in text)
    assert not any("pin_memory" in line for line in text)
    assert any("pin_memory" in line for line in report([ranks], threads=True))
    assert len(group([*ranks, rank(9, polled)])) == 3


def test_lines_inside_of_libraries_do_not_part_ranks() -> None:
    later = (Frame("all_reduce", f"{TORCH}distributed_c10d.py", 2815), *WAITS[1:])
    native = (Frame("poll", "/lib/libc.so.6", None, native=True), *WAITS)
    assert len(group([rank(0, WAITS), rank(1, later), rank(2, native)])) == 1


def test_two_that_differ_have_no_odd_one() -> None:
    groups = group([rank(0, WAITS), rank(1, LOADS)])
    assert len(groups) == 2 and odd_ones(groups) == () and odd_ones(groups[:1]) == () and odd_ones(()) == ()


def test_jobs_are_not_compared_with_each_other() -> None:
    other = rank(0, LOADS, "python serve.py")
    found = jobs([rank(0, WAITS), other, rank(1, WAITS)])
    assert [[p.command for p in own] for own in found] == [
        ["python train.py --rank 0", "python train.py --rank 1"], ["python serve.py --rank 0"]]
    assert any(line.startswith("Job 2: serve.py --rank 0") for line in report(jobs([rank(0, WAITS), other])))


def test_processes_without_stacks_are_told() -> None:
    native = ProcessStacks(8, "", "", (ThreadStack("", True, True, (Frame("main", "a.out", None, native=True),)),))
    text = "\n".join(report([[ProcessStacks(7, problem=GputopError("it has ended", "")), native]]))
    assert "pid 7: it has ended." in text and "1 process in native code only" in text
    assert list(report([[]])) == list(report([])) == []
