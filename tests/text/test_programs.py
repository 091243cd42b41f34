"""Programs that are run for what they print."""

from __future__ import annotations

import pytest

from gputop.text.programs import Ended, run_program

LONG_S = 60.0


def test_what_it_prints_and_how_it_ends() -> None:
    ended = run_program(["sh", "-c", "printf abc; echo gone >&2; exit 3"], LONG_S, 3)
    assert ended == Ended(b"abc", "gone", 3, True, True)
    ended = run_program(["yes"], LONG_S, 1000)  # a byte too many ends it
    assert len(ended.out) == 1001 and ended.status == -9 and ended.in_time and not ended.in_bounds


@pytest.mark.parametrize("script", ["exec sleep 60", "sleep 60; true", "exec >&-; exec sleep 60"])
def test_one_that_goes_on_is_ended_and_its_children_are_not_waited_for(script: str) -> None:
    ended = run_program(["sh", "-c", script], 0.2, 100)
    assert ended.out == b"" and ended.status == -9 and not ended.in_time and ended.in_bounds


def test_what_a_program_has_printed_counts_though_a_child_keeps_the_pipe() -> None:
    ended = run_program(["sh", "-c", "echo all; sleep 60 &"], 0.5, 100)
    assert ended.out == b"all\n" and ended.status == 0
    ended = run_program(["sh", "-c", "echo gone >&2; sleep 60 >&- & exit 3"], LONG_S, 100)
    assert (ended.error, ended.status, ended.in_time) == ("gone", 3, True)


def test_what_it_says_on_stderr_takes_no_disk_and_a_flood_ends_it() -> None:
    """On a node that is asked by ssh it could fill /tmp here."""
    ended = run_program(["sh", "-c", "head -c 6000000 /dev/zero >&2; echo last words >&2; stat -L -c %s /dev/fd/2"],
                        LONG_S, 100)
    assert ended.error.endswith("last words") and len(ended.error) <= 300 and ended.in_bounds
    assert int(ended.out) < 1 << 20  # of a file: all of it
    ended = run_program(["sh", "-c", "exec yes >&2"], LONG_S, 100)  # a flood on stderr ends it
    assert ended.status == -9 and ended.in_time and not ended.in_bounds
