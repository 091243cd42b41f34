"""A timeline made in a process of its own, which the monitor starts.

Reading a trace takes up to gigabytes of memory, and building a timeline sorts all its events; the caller gets a mapped
file only. The file has no name, cannot be read by others, and vanishes with the process that has it open.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Sequence

import msgspec

from gputop.core.errors import os_errors_as
from gputop.diagnosis.worker import Diagnosis, WorkerTask, answer, diagnosis_of, print_line, run_in_worker
from gputop.timeline.file_layout import Extent
from gputop.timeline.read_timeline import Timeline


class _Made(msgspec.Struct, frozen=True):
    section: Extent  # where the file describes the timeline
    diagnosis: Diagnosis | None


def timeline_in_worker(
    paths: Sequence[str], stop: threading.Event, on_rows: Callable[[Timeline], None],
    on_diagnosis: Callable[[Diagnosis], None] | None,
) -> Timeline:
    """The timeline of the trace in these files. Blocks; call it from a worker thread. ``on_rows`` is called with what
    there is of it before the analysis has begun: all rows, without the critical path and the idle gaps.
    ``on_diagnosis``: with what the trace says, so that nobody reads it once more for that. Raises GputopError as
    :func:`gputop.diagnosis.worker.analyze_in_worker` does, and where there is no room for the file."""
    with (os_errors_as("Cannot write the timeline", "Set TMPDIR to a folder that you can write to."),
          tempfile.TemporaryFile(prefix="gputop-timeline-") as file):
        def show_rows(line: bytes) -> None:
            on_rows(Timeline.open(file, Extent(*map(int, line.split()))))

        asked = "diagnosis" if on_diagnosis is not None else ""
        task = WorkerTask("gputop.timeline.timeline_worker", (str(file.fileno()), asked, *map(str, paths)),
                          "timeline", pass_fds=(file.fileno(),))
        made = run_in_worker(task, _Made, stop, on_line=show_rows)
        if on_diagnosis is not None and made.diagnosis is not None:
            on_diagnosis(made.diagnosis)
        return Timeline.open(file, made.section)


def main(arguments: Sequence[str]) -> int:
    """Write the timeline to the open file of that number: its rows, then the rest; answers with what the trace says,
    where that is asked for."""
    from gputop.analysis.host.host_ops import without_idle_gpus
    from gputop.analysis.steps.steps import detect_steps
    from gputop.timeline.build import RowsWritten
    from gputop.trace.readers.load import load

    def work() -> _Made:
        number, asked, *paths = arguments
        trace, steps = detect_steps(without_idle_gpus(load(paths)))
        with os.fdopen(int(number), "wb", buffering=0) as file:
            rows = RowsWritten(trace, steps, file)
            print_line(" ".join(map(str, rows.describe(trace))))
            from gputop.diagnosis.diagnose import analyze_with_steps  # loads the analyses, which the rows do without

            facts = analyze_with_steps(trace, steps)
            section = rows.finish(facts)
        return _Made(section, diagnosis_of(facts) if asked else None)

    return answer(work)
