"""Reads the dumps of PyTorch's flight recorder, in a process of its own: one may take seconds of the interpreter."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gputop.core.errors import GputopError
from gputop.diagnosis.worker import WorkerTask, answer, run_in_worker
from gputop.ranks.desync import HEAD, lines
from gputop.ranks.flight_recorder import read_of_processes

_TIMEOUT_S = 60.0


def read_in_worker(pids: Sequence[int]) -> tuple[str, ...]:
    """Read the dumps of these processes, as lines. Blocks; call it from a thread."""
    try:
        task = WorkerTask("gputop.session.flight_recorder_worker", tuple(map(str, pids)),
                          "parsing of the flight recorder dumps")
        return run_in_worker(task, tuple[str, ...], timeout_s=_TIMEOUT_S)
    except GputopError as error:
        return (f"{HEAD}not asked. {error.in_one_line}",)


def main(arguments: Sequence[str]) -> int:
    """Answer for the processes of these numbers."""
    return answer(lambda: tuple(lines(read_of_processes([*map(int, arguments)]), time.time())))
