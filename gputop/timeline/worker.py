"""A timeline made in a process of its own: ``python -m gputop.timeline.worker FD PATH…``, run by the monitor.

Reading a trace takes up to gigabytes of memory, and building a timeline sorts all its events; the caller gets a mapped
file only. The file has no name, cannot be read by others, and vanishes with the process that has it open.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Sequence

from gputop.core.errors import GputopError
from gputop.diagnosis.worker import TIMEOUT_S, answer, run_in_worker
from gputop.timeline.reader import Timeline


def timeline_in_worker(
    paths: Sequence[str], stop: threading.Event | None = None, timeout_s: float = TIMEOUT_S,
) -> Timeline:
    """The timeline of the trace in these files. Blocks; call it from a worker thread.

    Raises GputopError as :func:`gputop.diagnosis.worker.analyze_in_worker` does, and where there is no room for
    the file.
    """
    try:
        with tempfile.TemporaryFile(prefix="gputop-timeline-") as file:
            run_in_worker("gputop.timeline.worker", [str(file.fileno()), *map(str, paths)], int, stop, timeout_s,
                          "timeline", pass_fds=(file.fileno(),))
            return Timeline.open(file)
    except OSError as error:
        raise GputopError(f"The timeline has no place to be written: {error.strerror or error}",
                          "Set TMPDIR to a folder that you may write to.") from error


def main(arguments: Sequence[str]) -> int:
    """Write the timeline to the open file of that number; answers with the number of events."""
    from gputop.diagnosis.diagnose import examine
    from gputop.timeline.build import build
    from gputop.trace.readers.load import load

    def work() -> int:
        number, *paths = arguments
        facts = examine(load(paths))
        with os.fdopen(int(number), "wb", buffering=0) as file:
            build(facts, file)
        return facts.trace.event_count

    return answer(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
