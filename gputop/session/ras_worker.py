"""Reads an answer of NCCL's RAS in a process of its own.

Whoever listens on the port may answer with anything, and what a few megabytes of JSON become in memory is a hundred
times as much for a moment: not in the monitor's process, and not with its interpreter's lock held.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence

from gputop.core.errors import GputopError
from gputop.diagnosis.worker import WorkerFailed, WorkerTask, answer, run_in_worker
from gputop.ranks.model import RasAnswer
from gputop.ranks.nccl_ras import read_here

_TIMEOUT_S = 20.0


def read_in_worker(data: bytes, as_json: bool, time_s: float) -> RasAnswer:
    """See :data:`gputop.ranks.nccl_ras.Read`. Blocks; call it from a thread that ends no earlier."""
    try:
        with tempfile.TemporaryFile(prefix="gputop-ras-") as file:
            file.write(data)
            file.seek(0)
            task = WorkerTask("gputop.session.ras_worker",
                              (str(file.fileno()), "json" if as_json else "text", repr(time_s)),
                              "parsing of NCCL's answer", pass_fds=(file.fileno(),))
            return run_in_worker(task, RasAnswer, timeout_s=_TIMEOUT_S)
    except WorkerFailed as error:
        raise GputopError(error.message, "The job itself is not affected.") from None
    except OSError as error:
        raise GputopError(f"cannot write NCCL's answer to a file: {error.strerror or error}",
                          "Set TMPDIR to a folder that you can write to.") from error


def main(arguments: Sequence[str]) -> int:
    """Answer with what is in the open file of that number: "json" or "text", which came at a time."""
    number, form, time_s = arguments

    def work() -> RasAnswer:
        with os.fdopen(int(number), "rb") as file:
            return read_here(file.read(), form == "json", float(time_s))

    return answer(work)
