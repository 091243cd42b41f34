"""A real job of two workers, one of which does not reach a collective: the stacks name the line at which it is."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from gputop.ranks.stack_groups import StackGroup, group
from gputop.ranks.stacks import find_py_spy, read_all
from tests import workers_job

pytestmark = [pytest.mark.tensorflow, pytest.mark.skipif(find_py_spy() is None, reason="py-spy is not installed"),
              # Not importorskip: that would load it here, for the tests of the same process, too.
              pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")]


def test_the_line_of_the_rank_that_did_not_come() -> None:
    lines, first = inspect.getsourcelines(workers_job.late_batch)
    with workers_job.start_workers(late=1) as job:
        pids = [process.pid for process in job.processes]
        waits, late = _stuck(pids)
        assert late.line is not None and (late.line.function, late.line.line) == ("late_batch", first + len(lines) - 1)
        assert late.processes[0].rank == "worker 1" and waits.processes[0].rank == "worker 0"
        assert waits.line is not None and waits.line.function == "_train" and waits.calls[-1] == "quick_execute"
        told = subprocess.run([sys.executable, "-m", "gputop", "stacks", "--json", *map(str, pids)],
                              capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
        document = json.loads(told.stdout)
        assert f"workers_job.py:{late.line.line}" in document["jobs"][0]["summary"]
        assert all(process.poll() is None for process in job.processes)  # none was harmed


def _stuck(pids: list[int]) -> tuple[StackGroup, StackGroup]:
    """The two groups, once the first worker waits in the step that the other does not come to."""
    for _ in range(200):
        groups = sorted(group(read_all(pids)), key=lambda own: own.processes[0].rank)
        if len(groups) == 2 and "quick_execute" in groups[0].calls and groups[1].line is not None \
                and groups[1].line.function == "late_batch":
            return groups[0], groups[1]
    raise AssertionError(groups)
