"""Reads what PyTorch's flight recorder holds, by its dumps and by debug servers, in a process of its own: a dump may
take seconds of the interpreter."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gputop.core.errors import GputopError
from gputop.diagnosis.worker import WorkerTask, answer, run_in_worker
from gputop.ranks.debug_server import APART_S, ask, compared
from gputop.ranks.flight_recorder import read_of_processes
from gputop.ranks.flight_recorder_report import FILES, lines, server_lines

_TIMEOUT_S = 60.0


def read_in_worker(pids: Sequence[int]) -> tuple[str, ...]:
    """Read the dumps and ask the debug servers of these processes, as lines. Blocks, for some seconds where a server
    answers; call it from a thread."""
    try:
        task = WorkerTask("gputop.session.flight_recorder_worker", tuple(map(str, pids)),
                          "reading of the flight recorder's dumps")
        return run_in_worker(task, tuple[str, ...], timeout_s=_TIMEOUT_S)
    except GputopError as error:
        return (f"{FILES.head}not asked. {error.in_one_line}",)


def main(arguments: Sequence[str]) -> int:
    """Answer for the processes of these numbers."""
    pids = [*map(int, arguments)]

    def work() -> tuple[str, ...]:
        began_s = time.monotonic()
        answers = ask(pids)
        dumps = read_of_processes(pids)
        if answers:
            time.sleep(max(0.0, APART_S - (time.monotonic() - began_s)))
            answers = compared(answers, ask(pids))
        of_dumps = [*lines(dumps, time.time())]
        return (*of_dumps, *server_lines(answers, time.time())) if of_dumps else ()

    return answer(work)
