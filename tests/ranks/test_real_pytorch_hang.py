"""A real job of PyTorch with gloo, of which one rank does not come to a collective: its dumps."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gputop.ranks.desync import compare
from gputop.ranks.flight_recorder import read_of_processes
from tests.environments import PYTORCH, environment
from tests.forked_processes import WITHOUT_COMPILE, Forked

JOB = Path(__file__).parents[1] / "gloo_job.py"


@pytest.fixture(scope="module")
def pids(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    """Its two ranks, once both have written their dumps."""
    python, folder = environment(PYTORCH).python, tmp_path_factory.mktemp("gloo")
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WORLD_SIZE": "2",
               "TORCH_FR_BUFFER_SIZE": "100", "TORCH_FR_DUMP_TEMP_FILE": str(folder / "dump_")}
    job = [Forked([str(python), str(JOB), str(folder / "store")], {**environ, "RANK": str(number)}, 2, WITHOUT_COMPILE)
           for number in (0, 1)]
    try:
        for process in job:
            assert process.stdout.readline() == "dumped\n"
        yield [process.pid for process in job]
    finally:
        for process in job:
            process.kill()
            process.communicate()


def test_the_dumps_say_which_rank_does_not_come_and_where_the_other_waits(pids: list[int]) -> None:
    (dumps,) = read_of_processes(pids)
    assert [dump.rank for dump in dumps.dumps] == [0, 1] and not dumps.problems
    (state,) = compare(dumps.dumps)
    source = JOB.read_text().splitlines()
    waits, last = (next(i for i, line in enumerate(source, 1) if word in line) for word in ("# waits", "# all come"))
    assert (state.verdict, state.number, state.operation) == ("absent", 4, "all_reduce")
    assert [(rank.rank, rank.launched and rank.launched.line) for rank in state.others] == [(0, f"gloo_job.py:{waits}")]
    assert [(rank.rank, rank.last and rank.last.line) for rank in state.apart] == [(1, f"gloo_job.py:{last}")]
