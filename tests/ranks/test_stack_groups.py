"""Ranks that stand alike, and the one that stands elsewhere."""

from __future__ import annotations

from gputop.core.errors import GputopError
from gputop.ranks.processes import Halt
from gputop.ranks.stack_groups import group, jobs, odd_ones, report, sentence
from gputop.ranks.stacks import Frame, ProcessStacks, ThreadStack
from tests.ranks.rank_stacks import LOADS, OUTER, TORCH, WAITS, rank
from tests.records import replace


def test_the_odd_one_is_named() -> None:
    polled = (Frame("wait", f"{TORCH}x.py", 7), *WAITS)  # as if it polled: another function deeper in the library
    ranks = [rank(i, LOADS if i == 5 else WAITS) for i in range(8)]
    groups = group(ranks)
    assert sentence(groups) == "7 ranks in wrapper → all_reduce at train.py:112, 1 rank in load at data.py:40"
    assert [p.pid for p in odd_ones(groups)] == [105]
    text = list(report([ranks]))
    assert "Check rank 5 (pid 105) first" in text[1]
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


def test_of_two_that_differ_the_one_outside_of_the_collective_is_the_odd_one() -> None:
    groups = group([rank(0, WAITS), rank(1, LOADS)])
    assert len(groups) == 2 and [p.pid for p in odd_ones(groups)] == [101]
    text = list(report([[rank(0, WAITS), rank(1, LOADS)]]))
    assert text[1] == "Check rank 1 (pid 101) first: the others are in a collective and may be waiting for it."
    elsewhere = (Frame("save", "/home/ana/data.py", 50), OUTER)
    assert odd_ones(group([rank(0, elsewhere), rank(1, LOADS)])) == ()  # neither is in one
    assert odd_ones(groups[:1]) == () and odd_ones(()) == ()


def test_a_rank_that_is_stopped_is_not_counted_with_those_that_wait() -> None:
    ranks = [rank(i, WAITS) for i in range(3)]
    ranks[1] = replace(ranks[1], halt=Halt("stopped", "is stopped (SIGSTOP or a debugger): kill -CONT 101"))
    text = list(report([ranks]))
    assert text[0] == "rank 1 (pid 101) is stopped (SIGSTOP or a debugger): kill -CONT 101."
    assert text[1].startswith("2 ranks in wrapper → all_reduce at train.py:112, 1 rank in ")
    assert text[1].endswith("(stopped).") and not any("3 ranks" in line for line in text)
    assert not any(line.startswith("Check ") for line in text)
    assert [p.pid for p in odd_ones(group(ranks))] == [101]


def test_ranks_that_have_ended_are_with_the_job() -> None:
    ended = ProcessStacks(9, halt=Halt("ended", "has ended, but its parent (pid 1) has not reaped it"))
    (job,) = jobs([ended, rank(0, WAITS), rank(1, WAITS)])
    text = list(report([job]))
    assert text[0].startswith("pid 9 has ended") and text[1].startswith("2 ranks in")
    assert not any("is not running Python" in line for line in text)


def test_frames_of_an_import_do_not_drown_the_line() -> None:
    machinery = tuple(Frame(name, "<frozen importlib._bootstrap>", 1) for name in (
        "_call_with_frames_removed", "exec_module", "_load_unlocked", "_find_and_load_unlocked", "_find_and_load"))
    def importing(line: int) -> tuple[Frame, ...]:
        deep = Frame("<module>", "/env/lib/python3.11/site-packages/tensorflow/python/ops.py", line)
        package = Frame("<module>", "/env/lib/python3.11/site-packages/tensorflow/__init__.py", 30)
        return (*machinery, deep, *machinery, package, *machinery, Frame("<module>", "/home/ana/train.py", 3))

    ranks = [rank(i, importing(i + 1)) for i in range(4)]
    text = list(report([ranks]))
    assert text[0] == "4 ranks in import of tensorflow at train.py:3."
    assert len(text) < 8 and not any("importlib" in line for line in text)


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
